"""Attributes that a rule's arguments do not have: the error names the nearest one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raysim.spelling import did_you_mean


class SuggestsAttributes:
    """Base of a rule's arguments: the error for an unknown attribute names the nearest one."""

    if not TYPE_CHECKING:  # a type checker would take every attribute for known

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
            # The class that an author knows is that of the contract, not the one of a mode.
            classes = type(self).__mro__
            contract = next(c for c in classes if c.__module__.startswith("raysim.rules."))
            known = {
                attribute
                for cls in contract.__mro__
                for attribute in (*vars(cls), *vars(cls).get("__annotations__", {}))
                if not attribute.startswith("_")
            }
            raise AttributeError(
                f"'{contract.__name__}' object has no attribute '{name}'{did_you_mean(name, known)}"
            )
