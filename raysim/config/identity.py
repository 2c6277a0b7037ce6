"""The identity of a run: the keys of its configuration that determine the parameters.

Every key is part of the identity, whatever its value. A key for which this is not so has a mark of
`Identity` in its annotation; a key that is added to a section gets `UNLESS_DEFAULT`, so that the
runs of older versions keep their identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo


class Identity(Enum):
    """Mark of a key that is not always part of the identity of a run."""

    NEVER = auto()
    """The key cannot change the parameters, or something else that is part of the identity has
    what it names."""
    UNLESS_DEFAULT = auto()
    """With its default value the key changes nothing, as in versions that did not have it."""


def identity_of(section: BaseModel) -> dict[str, Any]:
    """Return the keys of a section that are part of a run's identity, as JSON has them.

    Args:
        section: the section, or the whole configuration.
    """
    dumped = section.model_dump(mode="json")
    _leave_out(section, dumped)
    return dumped


def _leave_out(value: Any, dumped: Any) -> None:
    """Remove keys from the dump of a section, or of a mapping of sections by name."""
    if isinstance(value, BaseModel):
        for key, field in type(value).model_fields.items():
            entry = getattr(value, key)
            if _is_left_out(entry, field):
                dumped.pop(key)
            else:
                _leave_out(entry, dumped[key])
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            # Keys of free mappings may be numbers, which JSON has as texts.
            if isinstance(entry, BaseModel):
                _leave_out(entry, dumped[key])


def _is_left_out(value: Any, field: FieldInfo) -> bool:
    if Identity.UNLESS_DEFAULT in field.metadata:
        return value == field.get_default(call_default_factory=True)
    return Identity.NEVER in field.metadata
