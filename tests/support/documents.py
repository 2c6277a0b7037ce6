"""Code blocks of Markdown files, and checks of commands that do not run them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from raysim import cli

_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})(\S*)")
_MARKER = re.compile(r"^\s*<!-- (.*) -->\s*$")
_FILE = re.compile(r"^# (\S+\.(?:py|yaml))\b")


@dataclass(frozen=True)
class Block:
    """A code block, with the comment above it."""

    path: Path
    line: int
    language: str
    text: str
    marker: str = ""
    """The text of the HTML comment on the line above; "" if there is none."""

    @property
    def place(self) -> str:
        return f"{self.path.name}:{self.line}"

    @property
    def reason_not_to_run(self) -> str:
        """The reason why the block is only parsed: the marker `not run: REASON`."""
        return self.marker.removeprefix("not run: ") if self.marker.startswith("not run: ") else ""

    @property
    def file(self) -> str:
        """The name of the file whose content the block shows; "" if it shows none.

        It is the comment in the first line, or the marker `file: NAME`.
        """
        if self.marker.startswith("file: "):
            return self.marker.removeprefix("file: ")
        found = _FILE.match(self.text)
        return found[1] if found else ""


def blocks(path: Path) -> Iterator[Block]:
    """Yield the code blocks of a Markdown file, in order."""
    lines = iter(enumerate(path.read_text().splitlines(), 1))
    marker = ""
    for number, line in lines:
        if opening := _FENCE.match(line):
            indent, fence, language = opening.groups()
            inside = []
            for _, text in lines:
                if text.strip() == fence:
                    break
                inside.append(text.removeprefix(indent))
            if language == "{literalinclude}":
                shown = path.parent / line[opening.end() :].strip()
                yield Block(path, number, language, shown.read_text(), f"file: {shown.name}")
                continue
            yield Block(path, number, language, "\n".join(inside) + "\n", marker)
        found = _MARKER.match(line)
        marker = found[1] if found else ""


def commands(script: str) -> Iterator[list[str]]:
    """Yield the words of every command of a shell script that has neither loops nor functions."""
    for line in script.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|;", line.split(" | ")[0]) if "'" not in line else [line]:
            if words := shlex.split(part, comments=True):
                yield words


def parse(words: list[str]) -> dict[str, Any]:
    """Parse the arguments of `raysim`, as the program would.

    Returns:
        The parameters of the command, by name.

    Raises:
        click.UsageError: there is no such command, argument or option.
    """
    command, name = typer.main.get_command(cli.app), "raysim"
    context = command.context_class(command, info_name=name)
    while hasattr(command, "get_command"):
        name, *words = words
        command = command.get_command(context, name)  # pyright: ignore
        assert command is not None, f"raysim has no command {name}"
    return command.make_context(name, words, parent=context).params
