"""Users' rules in the dry run, watched for mistakes that a run would not notice or notice late.

Each method that a rule overrides is wrapped. After a call the wrapper compares the states of the
global random generators, and the arguments that a local step may not change. It also turns errors
that are certainly mistakes in the code, such as an unknown name, into breaches of the contract.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor

from raysim.config.objects.description import used_names
from raysim.errors import ContractError, place_of_error
from raysim.models.comparison import same_values
from raysim.rules.batch import Batch
from raysim.rules.contract import (
    PLAIN_STEP,
    ClientRule,
    ServerRule,
    half_of,
    overridden,
)
from raysim.rules.errors.keyed_numbers import (
    RANDOM_NUMBERS_PAGE,
    keyed_numbers_only,
    stream_on_server,
)
from raysim.rules.errors.user_code import breach, described, mixes_devices, raised_by_task
from raysim.rules.losses import Net
from raysim.rules.methods.misspelled_methods import public_names
from raysim.rules.methods.registry import RULES

AnyRule = TypeVar("AnyRule", ClientRule, ServerRule)

BUGS = (NameError, AttributeError, TypeError, KeyError)
"""Errors that do not depend on the examples of a client; `FrozenInstanceError` is one of them."""

MAX_COPIED_NUMBERS = 2_000_000
"""Larger arguments are not copied; of them, changes that PyTorch does not count go unnoticed."""

SERVER_ARGUMENTS = {
    "sent_to": ("shared",),
    "broadcast": ("state",),
    "for_evaluation": ("state",),
    "candidates": ("state",),
    "select": ("state",),
}
"""Arguments that methods of a server rule may not change."""

LOCAL_STEP = ("direction", "step")
"""Methods that may change none of their arguments; the others may not change `shared`."""


def watched(rule: AnyRule) -> AnyRule:
    """Return a rule that computes the same and raises ContractError for a mistake.

    Args:
        rule: a client rule or a server rule.
    """
    cls = type(rule)
    contract = dict(inspect.getmembers(RULES[half_of(rule)], inspect.isfunction))
    members: dict[str, Any] = {"name": cls.name, "__setattr__": _refuse_assignment}
    members["called_methods"] = set()
    for name in overridden(rule, public_names(contract)):
        method = inspect.getattr_static(cls, name)
        if inspect.isfunction(method) and name not in ("at", "check"):
            parameters = list(inspect.signature(contract[name]).parameters)[1:]
            members[name] = _watched(name, method, parameters)
    copy = object.__new__(type(cls.__name__, (cls,), members))
    fields = {entry.name: getattr(rule, entry.name) for entry in dataclasses.fields(rule)}
    for key, value in {**fields, **vars(rule)}.items():  # with slots, fields are no variables
        object.__setattr__(copy, key, value)
    return copy


def _refuse_assignment(self: Any, name: str, value: Any) -> None:
    """Raise the error of a frozen dataclass, which does not hold for classes derived from it."""
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _watched(name: str, method: Callable[..., Any], parameters: list[str]) -> Callable[..., Any]:
    """Return a method of a rule with the checks around it."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        self.called_methods.add(name)
        arguments = {**dict(zip(parameters, args, strict=False)), **options}
        checked = ("shared", "state", "batch") if name in LOCAL_STEP else ("shared",)
        if isinstance(self, ServerRule):
            checked = SERVER_ARGUMENTS.get(name, ())
        before = [_Argument(key, arguments[key]) for key in checked if key in arguments]
        with keyed_numbers_only(lambda drawn: _unkeyed(self, name, drawn)):
            try:
                returned = method(self, *args, **options)
            except Exception as error:
                if not _is_mistake(error):
                    raise
                if place_of_error(error):
                    raise ContractError(described(error)) from error
                raise breach(self, name, f"failed: {described(error)}") from error
        if name == "loss" and isinstance(self, ClientRule):
            _check_loss(self, returned, arguments["net"])
        for argument in before:
            if (changed := argument.changed(rebound=name == "direction")) is not None:
                raise breach(
                    self,
                    name,
                    f"changes {changed}, which the engine and other clients still use; write "
                    "x = x + y for x += y, and keep what lasts for the next step in `step`",
                )
        return returned

    return call


def _is_mistake(error: Exception) -> bool:
    """Return whether an error is certainly a mistake in the code, whatever the client."""
    is_of_task = isinstance(error, ValueError) and raised_by_task(error)
    return isinstance(error, BUGS) or is_of_task or mixes_devices(error)


def _check_loss(rule: ClientRule, values: Any, net: Net) -> None:
    """Raise ContractError if a loss has no gradient."""
    has_gradient = torch.is_grad_enabled() and net.logits.requires_grad
    if has_gradient and isinstance(values, Tensor) and not values.requires_grad:
        raise breach(
            rule,
            "loss",
            "returns values without a gradient; leave out detach(), item() and numpy()",
        )


def check_used(rule: ClientRule) -> None:
    """Check that local steps have used what the rule defines for them.

    An inherited `direction` may compute a gradient by itself, and a `loss` of the rule is then left
    out.

    Args:
        rule: a watched rule that has made local steps.

    Raises:
        ContractError: a method has not been called by a more general one of the same class or of a
            base class.
    """
    called = rule.called_methods  # type: ignore[attr-defined]
    definers = {}
    for name in PLAIN_STEP:
        definers[name] = next(c for c in type(rule).__mro__[1:] if name in vars(c))
    for user, used in (("step", "direction"), ("step", "loss"), ("direction", "loss")):
        # A static method is not watched.
        is_own = overridden(rule, [user]) and used in vars(type(rule))
        is_derived = issubclass(definers[used], definers[user])
        # It may call it in later rounds only, perhaps by the base class.
        code = getattr(vars(definers[user])[user], "__code__", None)
        names = used_names(code) if isinstance(code, CodeType) else set()
        if is_own and is_derived and used not in called and not {used, "super"} & names:
            raise breach(
                rule,
                used,
                f"has no effect, because `{user}` of {definers[user].__name__} does not call it; "
                f"define `{user}` too, or leave out `{used}`",
            )


class _Argument:
    """An argument of a local step, as it was before the call.

    Args:
        name: its name.
        value: a dict of tensors, or a batch.
    """

    def __init__(self, name: str, value: Any):
        self.name = name
        self.value = value
        self.tensors = self._tensors()
        self.versions = {key: tensor._version for key, tensor in self.tensors.items()}
        self.copies = {
            key: tensor.clone()
            for key, tensor in self.tensors.items()
            if tensor.numel() <= MAX_COPIED_NUMBERS
        }

    def changed(self, rebound: bool) -> str | None:
        """Return the first entry that the call has changed; None for none.

        Args:
            rebound: whether another tensor under the same key counts.
        """
        after = self._tensors()
        for key, tensor in self.tensors.items():
            copy = self.copies.get(key)
            if tensor._version != self.versions[key] or not (
                copy is None or same_values(tensor, copy)
            ):
                return f"{self._text(key)} in place"
        if rebound or self.name == "shared":
            for key in after:
                if after[key] is not self.tensors.get(key):
                    return self._text(key)
        return None

    def _tensors(self) -> dict[str, Tensor]:
        if isinstance(self.value, Batch):
            entries = {"x": self.value.x, "y": self.value.y}
        else:
            entries = self.value if isinstance(self.value, Mapping) else {}
        return {key: tensor for key, tensor in entries.items() if isinstance(tensor, Tensor)}

    def _text(self, key: str) -> str:
        return f"batch.{key}" if isinstance(self.value, Batch) else f'{self.name}["{key}"]'


def _unkeyed(rule: ClientRule | ServerRule, method: str, drawn: str) -> ContractError:
    """Return the error for a method of a rule that draws from a global generator."""
    if isinstance(rule, ServerRule):
        stream = stream_on_server(method)
    elif method == "collude":
        stream = 'cohort.rng("name")'
    elif method in LOCAL_STEP:
        stream = "`noise` and batch.noise"
    else:
        stream = 'task.rng("name")'
    return breach(rule, method, f"{drawn}, {stream} {RANDOM_NUMBERS_PAGE}")
