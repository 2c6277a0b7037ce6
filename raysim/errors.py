"""Errors of raysim. The command line prints them without a traceback."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType

MAX_WORD_CHARACTERS = 300
"""Longer words in a message are shortened."""

MAX_LINE_CHARACTERS = 1500
"""Longer lines of a message are shortened."""

MAX_LINES = 40
"""Further lines of a message are left out."""

_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that control a terminal or the direction of text, except line breaks and tabs; and
halves of surrogate pairs, which cannot be printed."""

PACKAGE_FOLDER = f"{Path(__file__).parent}{os.sep}"
"""The folder of raysim's own code."""
SHIPPED_RULES = f"{PACKAGE_FOLDER}algorithms{os.sep}"
STANDARD_LIBRARY = f"{Path(inspect.__file__).parent}{os.sep}"
"""Folder of the standard library; that of installed packages may lie in it."""

_LONG_WORD = re.compile(rf"\S{{{MAX_WORD_CHARACTERS + 1},}}")


class RaysimError(Exception):
    """Error that stops a run with a valid configuration."""

    exit_code = 1
    """Exit code of the command line."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows in place of a traceback (IPython's protocol)."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(RaysimError):
    """Mistake in the user's input: a key, a value or a file. Raised before anything starts.

    The message quotes the input, which may have any length, and is therefore `shortened`.
    """

    exit_code = 2

    def __init__(self, message: object = ""):
        super().__init__(shortened(str(message)))


class ClientError(RaysimError):
    """Failure of a simulated client.

    The message names the client and the round and contains the first traceback.
    """


class ContractError(RaysimError):
    """Violation of the rules' contract.

    A rule differs from its declaration, or does something that the engine does not allow. The
    message names the rule, the method and the key.
    """


class ProbeError(RaysimError):
    """Failure of a probe; the message names the probe, its method and the client or the round."""


class ServerStateLost(RaysimError):
    """Loss of the central server, of a vector that it stores, or of an actor (`ActorDied`)."""


class WorkersLost(RaysimError):
    """Loss of all ClientActors, in place of which none has started in time."""


def shortened(text: str) -> str:
    """Return a message with long words and lines cut in the middle and excess lines left out.

    Args:
        text: a message of any length, for example one that quotes a user's value.
    """
    lines = [
        re.sub(_LONG_WORD, lambda word: _cut(word[0], MAX_WORD_CHARACTERS), line)
        for line in text.splitlines()
    ]
    more = [f"… and {len(lines) - MAX_LINES:,} lines more"] if len(lines) > MAX_LINES else []
    return "\n".join([_cut(line, MAX_LINE_CHARACTERS) for line in lines[:MAX_LINES]] + more)


def _cut(text: str, most: int) -> str:
    """Return `text`, cut in the middle if it has more than `most` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most // 3]}…({len(text):,} characters)…{text[-most // 6 :]}"


def visible(text: str) -> str:
    """Return a text whose control characters are written out, ESC as a backslash and x1b.

    Args:
        text: any text, for example a message with a name in it. Line breaks and tabs stay.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def in_a_line(error: BaseException) -> str:
    """Return an error as one line, with its type unless it is a RaysimError.

    Args:
        error: any error; line breaks in its message become spaces.
    """
    text = " ".join(str(error).split())
    if isinstance(error, RaysimError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def with_users_line(error: BaseException) -> str:
    """Return an error as one line, with the line of a user's code that raised it if there is one.

    Args:
        error: an error with its traceback.
    """
    return in_a_line(error) + users_line(error)


def users_line(error: BaseException) -> str:
    """Return `place_of_error` in brackets, to append to a message; "" for no line of a user.

    Args:
        error: an error with its traceback.
    """
    place = place_of_error(error)
    return f" ({place})" if place else ""


def place_of_error(error: BaseException) -> str:
    """Return the user's innermost line in a traceback, `file, line N: code`; "" for none.

    Args:
        error: an error with its traceback.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if is_users(frame.f_code):
            code = linecache.getline(frame.f_code.co_filename, line).strip()
            return f"{readable_path(frame.f_code.co_filename)}, line {line}" + (
                f": `{code}`" if code else ""
            )
    return ""


def is_users(code: CodeType) -> bool:
    """Return True for code outside of the engine and the libraries, and for shipped rules.

    Args:
        code: the code of a frame or of a function.
    """
    file = code.co_filename
    if file.startswith(SHIPPED_RULES):
        return True
    if file.startswith(STANDARD_LIBRARY) and "site-packages" not in file:
        return False
    imported = [sys.modules[name] for name in ("torch", "numpy") if name in sys.modules]
    libraries = [f"{os.path.dirname(str(library.__file__))}{os.sep}" for library in imported]
    return not file.startswith((PACKAGE_FOLDER, *libraries, "<"))


def readable_path(file: str) -> str:
    """Return a path relative to the working directory if it lies in it.

    Args:
        file: an absolute path.
    """
    return file.removeprefix(f"{os.getcwd()}{os.sep}")


@contextmanager
def errors_begin(place: str) -> Iterator[None]:
    """Let errors of the configuration in this block begin with a place.

    Args:
        place: the file or the key, with what separates it from the message.

    Raises:
        ConfigError: the block raised one; it has the place before its message.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}{error}") from None


@contextmanager
def unreadable(place: str) -> Iterator[None]:
    """Let a file that cannot be read in this block be an error of the configuration.

    Args:
        place: the key and the file.

    Raises:
        ConfigError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or in_a_line(error)
        raise ConfigError(f"{place} cannot be read: {reason}") from None


def round_name(t: int) -> str:
    """Return the name of a training round in messages, "round 1" for the first one.

    Rounds count from 1 there, as in progress, metrics and checkpoints; round 0 is the evaluation
    before training.

    Args:
        t: the number of rounds that are done before it.
    """
    return f"round {t + 1}"


def counted(n: int, noun: str) -> str:
    """Return a number with its noun: "1 block", "2 blocks".

    Args:
        n: number of things.
        noun: the noun in the singular.
    """
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def with_cause(error: BaseException) -> str:
    """Return an error as one line, with the first error of its chain if that says something else.

    A package that cannot be imported often raises an error that does not say why.

    Args:
        error: any error, with the errors that it was raised from.
    """
    first = error
    while first.__cause__ or (first.__context__ and not first.__suppress_context__):
        first = first.__cause__ or first.__context__
        assert first is not None
    text, cause = in_a_line(error), in_a_line(first)
    if "torchvision::nms" in cause:
        cause += " (torchvision's build does not fit torch's; install both from one index)"
    return text if first is error or cause in text else f"{text}; caused by {cause}"
