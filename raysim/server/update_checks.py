"""Checks of what a server rule returns, and errors that name the rule and what it received."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

from raysim.errors import RaysimError, round_name
from raysim.numerics.fixed_point import NonFiniteError
from raysim.rules.contract import ServerRule, State
from raysim.rules.errors.keyed_numbers import (
    RANDOM_NUMBERS_PAGE,
    keyed_numbers_only,
    libraries_to_watch,
    stream_on_server,
)
from raysim.rules.errors.returned_values import check_tensors
from raysim.rules.errors.user_code import breach, translate_errors
from raysim.rules.methods.registry import is_shipped
from raysim.rules.reports import Reports
from raysim.rules.uploads import described_tensor


@contextmanager
def errors_name_rule(
    rule: ServerRule, method: str, t: int, details: Callable[[], str] = str
) -> Iterator[None]:
    """Name the rule and the round in every error that a server rule raises.

    Args:
        rule: the server rule.
        method: the rule's method that runs, for the message.
        t: number of the round, from 0.
        details: returns a text for the end of the message.

    Raises:
        RaysimError: the block inside raised, or a user's rule drew from a global random generator;
            the message names rule and round.
    """
    name = f"{round_name(t)}: {method} of server rule '{rule.name}'"

    def unkeyed(drawn: str) -> RaysimError:
        return RaysimError(f"{name} {drawn}, {stream_on_server(method)} {RANDOM_NUMBERS_PAGE}")

    # Those that ship draw keyed numbers only.
    watched = () if is_shipped(rule) else libraries_to_watch(type(rule))
    watch = keyed_numbers_only(unkeyed, watched)
    with translate_errors(lambda text: RaysimError(f"{name} failed: {text}{details()}")), watch:
        try:
            yield
        except NonFiniteError as error:
            raise RaysimError(
                f"{round_name(t)}: server rule '{rule.name}': {error}; lower local.lr"
            ) from None


def check_state(rule: ServerRule, method: str, before: State, state: State) -> None:
    """Check the state that a method of a rule returned.

    Args:
        rule: the server rule.
        method: the method.
        before: the state before; keys, shapes and the type of "x" must stay.
        state: the state that the method returned.

    Raises:
        ContractError: the state is not a dict of tensors, or has other keys or shapes.
    """
    check_tensors(rule, method, state)
    differing_keys = ", ".join(sorted(state.keys() ^ before.keys()))
    if differing_keys:
        raise breach(
            rule, method, f"must return the keys of init; the two differ in {differing_keys}"
        )
    for key, tensor in before.items():
        after = state[key]
        if after.shape != tensor.shape or (key == "x" and after.dtype != tensor.dtype):
            raise breach(
                rule,
                method,
                f"returns '{key}' as {described_tensor(after)}, but before it was "
                f"{described_tensor(tensor)}; keep its shape and type",
            )


def versions_of(tensors: State) -> dict[str, tuple[Tensor, int]]:
    """Return tensors with their versions, as PyTorch counts changes in place.

    Those that have no version are left out. A view has the version of the tensor whose part it is,
    another part of which may change.

    Args:
        tensors: the tensors by name.
    """
    return {
        key: (tensor, tensor._version)
        for key, tensor in tensors.items()
        if not tensor.is_inference() and not tensor._is_view()
    }


def check_unchanged(
    rule: ServerRule, method: str, *versions: Mapping[str, tuple[Tensor, int]]
) -> None:
    """Check that a method has not changed tensors in place.

    Args:
        rule: the server rule.
        method: the method that has run.
        *versions: tensors that clients or a checkpoint may still use, with their versions before.

    Raises:
        ContractError: it has changed one.
    """
    for key, (tensor, version) in chain.from_iterable(part.items() for part in versions):
        if tensor._version != version:
            raise breach(
                rule,
                method,
                f"changes '{key}' in place, which clients or a checkpoint may still use; write "
                "x = x - step for x -= step",
            )


def check_update(rule: ServerRule, t: int, before: State, state: State, reports: Reports) -> None:
    """Check the state that a rule's `update` returned, and the weights that it set.

    Args:
        rule: the server rule.
        t: number of the round, from 0.
        before: the state before the update; keys, shapes and the type of "x" must stay.
        state: what `update` returned.
        reports: what `update` received.

    Raises:
        ContractError: the state is not a dict of tensors, or has other keys or shapes.
        RaysimError: parameters or weights are not finite, or `update` may not set weights.
    """
    check_state(rule, "update", before, state)
    # NaN and infinity stay in the sum, which needs no mask [P].
    if not torch.isfinite(state["x"].sum()):
        raise RaysimError(
            f"{round_name(t)}: server rule '{rule.name}' made non-finite parameters; lower server "
            "lr or local.lr"
        )
    given_weights = reports.given_weights
    if given_weights is not None and not all(map(math.isfinite, given_weights)):
        raise RaysimError(
            f"server rule '{rule.name}': update passed weights that are not finite to "
            f"reports.set_weights: {given_weights}"
        )
    if given_weights is not None and not rule.weights_after_training:
        raise RaysimError(
            f"server rule '{rule.name}': update calls reports.set_weights; set "
            "weights_after_training = True in the class"
        )


def check_evaluated(rule: ServerRule, shared: State, evaluated: State) -> None:
    """Check what a rule's `for_evaluation` returned.

    Args:
        rule: the server rule.
        shared: what its `broadcast` returned for the same state.
        evaluated: what `for_evaluation` returned.

    Raises:
        ContractError: it is not a dict of tensors, or has other keys or shapes than the broadcast.
    """
    check_tensors(rule, "for_evaluation", evaluated)
    differing = sorted(shared.keys() ^ evaluated.keys())
    differing += [k for k in shared if k in evaluated and evaluated[k].shape != shared[k].shape]
    if differing:
        raise breach(
            rule,
            "for_evaluation",
            "must return tensors with the keys and shapes of broadcast; different: "
            + ", ".join(differing),
        )


def described_uploads(reports: Reports) -> str:
    """Return the uploads of a round with their shapes and types, for the end of a message.

    Args:
        reports: what the server rule received in the round.
    """
    uploads = [
        f"{mode} of '{key}' {described_tensor(total)}"
        for (mode, key), total in reports.totals.items()
    ]
    uploads += [
        f"{len(rows)} times '{key}' {described_tensor(rows[0])}"
        for key, rows in reports.rows.items()
        if rows
    ]
    return f" (the uploads were: {', '.join(uploads)})"
