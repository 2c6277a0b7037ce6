"""Refusal of rules that were written for the contract's former names."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from raysim.config import renamed
from raysim.errors import ConfigError, did_you_mean

_ROOM = __name__.rpartition(".")[0] + "."


def refuse_former_names(rule: type, section: str) -> None:
    """Check that a rule's class defines nothing under a former name of the contract.

    A hyper-parameter may have such a name.

    Args:
        rule: class of a rule, a dataclass.
        section: the section of the configuration that names it.

    Raises:
        ConfigError: it does; the message has the rule, the former name and the present one.
    """
    hyperparameters = [field.name for field in fields(rule)]
    for family in rule.__mro__:
        for former, present in renamed.CONTRACT.get(family.__name__, {}).items():
            value = next((vars(c)[former] for c in rule.__mro__ if former in vars(c)), None)
            if value is None or former in hyperparameters:
                continue
            kind = "method" if callable(value) else "attribute"
            raise ConfigError(
                f"{section}.name: {rule.__name__}: {family.__name__} {kind} `{former}` is now "
                f"called `{present}`"
            )


class TellsPresentNames:
    """Base of a rule's arguments: the error for an unknown attribute names the one that was meant.

    That is the present name of a former attribute, or the nearest one.
    """

    if not TYPE_CHECKING:  # a type checker would take every attribute for known

        def __getattr__(self, name: str) -> Any:
            for cls in type(self).__mro__:
                if present := renamed.CONTRACT.get(cls.__name__, {}).get(name):
                    raise AttributeError(
                        f"{cls.__name__} attribute `{name}` is now called `{present}`"
                    )
            if name.startswith("_"):
                raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
            contract = next(c for c in type(self).__mro__ if c.__module__.startswith(_ROOM))
            known = {
                attribute
                for cls in contract.__mro__
                for attribute in (*vars(cls), *vars(cls).get("__annotations__", {}))
                if not attribute.startswith("_")
            }
            raise AttributeError(
                f"'{contract.__name__}' object has no attribute '{name}'{did_you_mean(name, known)}"
            )
