"""Text for a terminal. Names that users choose can neither style it nor control it."""

from __future__ import annotations

import logging
import sys
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from raysim.errors import visible


class Terminal(Console):
    """Console that prints text as it is, with control characters written out.

    It reads neither markup nor codes of emojis.

    Args:
        stderr: whether it prints to standard error, as beside `--json`.
        **options: further arguments of `rich.console.Console`.
    """

    def __init__(self, stderr: bool = False, **options: Any) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False, **options)

    def tell(self, line: str) -> None:
        """Print a line that is not broken where the terminal's width ends.

        Args:
            line: the line.
        """
        self.print(line, soft_wrap=True)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return text as rich prints it; all strings pass here, those in tables too."""
        return super().render_str(visible(text), **options)


def say(text: str = "", *, file: IO[str] | None = None, end: str = "\n") -> None:
    """Print text at once, with control characters written out.

    Args:
        text: the text; its line breaks stay.
        file: where it is printed; None: standard output.
        end: what follows the text.
    """
    print(visible(text), file=file or sys.stdout, end=end, flush=True)


def aside(line: str) -> None:
    """Print a line on standard error, beside the results on standard output.

    Args:
        line: the line.
    """
    say(line, file=sys.stderr)


class LogFormatter(logging.Formatter):
    """Formatter of log lines, with control characters written out."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return visible(super().format(record))
