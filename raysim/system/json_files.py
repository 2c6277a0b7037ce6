"""Read JSON that raysim or a user wrote: damaged or foreign content is an error in one line."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from raysim.errors import ConfigError


def parsed(text: str | bytes, kind: Any) -> Any:
    """Return the content of JSON text.

    Args:
        text: the text, or its bytes in UTF-8.
        kind: type that the content must have, such as `dict[str, int]` or a TypedDict; keys that
            it does not name are allowed.

    Raises:
        ValueError: the text is not JSON, or its content has another type; a message of one line.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON; it may have been cut off") from None
    try:
        _adapter(kind).validate_python(content, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{part!r}]" for part in first["loc"])
        raise ValueError(f"{place or 'it'}: {first['msg'].lower()}") from None
    return content


def read_json(path: Path, kind: Any, remedy: str) -> Any:
    """Return the content of a JSON file.

    Args:
        path: the file.
        kind: type that the content must have, as for `parsed`.
        remedy: what a user can do about a damaged file; ends the message.

    Raises:
        ConfigError: the file cannot be read, or is damaged.
    """
    try:
        return parsed(path.read_bytes(), kind)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {remedy}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}; {remedy}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's validator of a type."""
    return TypeAdapter(kind)
