"""Checks of what the methods of rules return, with errors for their authors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.rules.errors.user_code import RETURNS, breach
from raysim.rules.rule import Rule


def check_passes(rule: Rule, passes: int) -> None:
    """Check that a local step made one pass in mode "train", whose loss is logged.

    Args:
        rule: the client rule.
        passes: passes in mode "train" that the step made.

    Raises:
        ContractError: it made none or several; names the rule, the method, its line and what to
            write.
    """
    if passes == 1:
        return
    method = next((m for m in ("step", "direction", "loss") if m in vars(type(rule))), "direction")
    fix = (
        'compute the other gradients by task.grad(w, batch, mode="frozen")'
        if passes
        else 'compute one gradient by task.grad(w, batch), that is without mode="frozen" or "eval"'
    )
    raise breach(
        rule, method, f"makes {passes} passes in mode 'train' in a step, in place of one; {fix}"
    )


def check_dict(rule: Rule, method: str, value: Any) -> None:
    """Check that a method returned a dict.

    Args:
        rule: the client or server rule.
        method: the method that returned the value.
        value: the value that it returned.

    Raises:
        ContractError: it did not; names the rule, the method, its line and what to write.
    """
    if not isinstance(value, Mapping):
        raise breach(rule, method, f"returns {_kind(value)}; end it with `{_return(rule, method)}`")


def check_tensors(rule: Rule, method: str, value: Any) -> None:
    """Check that a method returned a dict of tensors.

    Args:
        rule: the client or server rule.
        method: the method that returned the value.
        value: the value that it returned.

    Raises:
        ContractError: it did not; names the rule, the method, its line, the key and what to write.
    """
    check_dict(rule, method, value)
    for key, tensor in value.items():
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise breach(rule, method, f"returns '{key}' as {kind}; make it a tensor")
        check_constant(rule, method, f"'{key}'", tensor)


def check_constant(rule: Rule, method: str, name: str, tensor: Tensor) -> None:
    """Check that a tensor that a method returned has no graph of autograd, which would grow.

    Args:
        rule: the rule.
        method: its method.
        name: what the tensor is, for the message.
        tensor: the tensor.

    Raises:
        ContractError: it has one.
    """
    if tensor.requires_grad:
        raise breach(rule, method, f"returns {name} with requires_grad; return its .detach()")


def declared_noise(rule: Rule, value: Any) -> dict[str, tuple[tuple[Any, ...], str]]:
    """Return shape and distribution of each entry of a rule's `noise`.

    Args:
        rule: the client rule.
        value: the value that its `noise` returned.

    Raises:
        ContractError: it is no dict of shapes and distributions; names the rule, the method, its
            line, the key and what to write.
    """
    check_dict(rule, "noise", value)
    declared = {}
    for key, spec in value.items():
        shape, distribution = spec if isinstance(spec, tuple) and len(spec) == 2 else ("?", None)
        sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        sizes = tuple(int(size) if isinstance(size, np.integer) else size for size in sizes)
        if not _is_shape(sizes) or distribution not in ("normal", "uniform"):
            raise breach(
                rule,
                "noise",
                f"returns '{key}' as {spec!r}; give a shape and a distribution, "
                f"'normal' or 'uniform', for example `{RETURNS['noise']}`",
            )
        declared[key] = sizes, distribution
    return declared


def _is_shape(sizes: tuple[Any, ...]) -> bool:
    """Return whether these are sizes of a tensor, of which the first may be "B"."""
    if sizes[:1] == ("B",):
        sizes = sizes[1:]
    return all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes)


def check_begin(rule: Rule, value: Any, x: Tensor, buffers: Tensor) -> None:
    """Check that `begin` returned parameters [P], statistics [Q] or None, and perhaps a dict.

    Args:
        rule: the client rule.
        value: the value that its `begin` returned.
        x: [P], the parameters received.
        buffers: [Q], the BatchNorm statistics received.

    Raises:
        ContractError: it did not; names the rule, the method, its line and what to write.
    """
    if not isinstance(value, tuple) or len(value) not in (2, 3):
        raise breach(
            rule,
            "begin",
            f"returns {_kind(value)}; return the parameters and the BatchNorm statistics or None, "
            f"for example `{RETURNS['begin']}`",
        )
    w, own_buffers, *state = value
    _check_like(rule, "begin", "w", w, x)
    if own_buffers is not None:
        _check_like(rule, "begin", "buffers", own_buffers, buffers)
    for tensors in state:
        check_tensors(rule, "begin", tensors)
        if "w" in tensors:
            raise breach(rule, "begin", 'returns "w" in its third part; it is the first one')


def _check_like(rule: Rule, method: str, name: str, part: Any, like: Tensor) -> None:
    """Check that a part of what a method returned is a tensor of the shape and type of another."""
    if not isinstance(part, Tensor):
        raise breach(rule, method, f"returns {_kind(part)} as {name}; return a tensor")
    check_constant(rule, method, name, part)
    if part.shape != like.shape or part.dtype != like.dtype:
        raise breach(
            rule,
            method,
            f"returns {name} as {part.dtype} {list(part.shape)}; return {like.dtype} "
            f"{list(like.shape)}",
        )


def check_sent_to(rule: Rule, value: Any, x: Tensor) -> None:
    """Check that `sent_to` returned tensors with parameters "x" [P].

    Args:
        rule: the server rule.
        value: the value that its `sent_to` returned.
        x: [P], the parameters of the broadcast.

    Raises:
        ContractError: it did not; names the rule, the method, its line and what to write.
    """
    check_tensors(rule, "sent_to", value)
    if "x" not in value:
        raise breach(rule, "sent_to", "returns no 'x'; return the parameters under this key")
    _check_like(rule, "sent_to", "'x'", value["x"], x)


def check_direction(rule: Rule, w: Tensor, direction: Any) -> None:
    """Check that `direction` returned a vector [P].

    Args:
        rule: the client rule.
        w: [P], the local parameters.
        direction: the value that its `direction` returned.

    Raises:
        ContractError: it did not; names the rule, the method, its line and what to write.
    """
    if not isinstance(direction, Tensor):
        raise breach(
            rule, "direction", f"returns {_kind(direction)}; end it with `{RETURNS['direction']}`"
        )
    if direction.shape != w.shape:
        raise breach(
            rule,
            "direction",
            f"returns a tensor of shape {list(direction.shape)}; "
            'return one of the shape of state["w"], '
            f"{list(w.shape)}, as task.grad gives it",
        )


def check_step(rule: Rule, before: Mapping[str, Tensor], after: Any) -> None:
    """Check that `step` returned the whole next state.

    Args:
        rule: the client rule.
        before: the state that `step` was given, with `w` [P].
        after: what it returned; it must have the same keys, and `w` the same shape and type.

    Raises:
        ContractError: it did not; names the rule, the method, its line and what to write.
    """
    check_dict(rule, "step", after)
    if odd := sorted(before.keys() ^ after.keys()):
        raise breach(
            rule,
            "step",
            f"returns another state than it was given, different in {', '.join(odd)}; "
            "return {**state, ...}",
        )
    _check_like(rule, "step", "w", after["w"], before["w"])
    for key, value in after.items():
        if isinstance(value, Tensor):
            check_constant(rule, "step", f"'{key}'", value)


def check_evaluated(rule: Rule, x: Tensor, buffers: Tensor, evaluated: Any) -> None:
    """Check that `evaluated` returned a model.

    Args:
        rule: the client rule.
        x: [P], the global parameters.
        buffers: [Q], the global BatchNorm statistics.
        evaluated: the value that `evaluated` returned; expected is w, or (w, buffers).

    Raises:
        ContractError: it did not; names the rule, the method, its line and what to return.
    """
    parts = evaluated if isinstance(evaluated, tuple) and len(evaluated) == 2 else (evaluated,)
    for part, like, name in zip(parts, (x, buffers), ("parameters", "statistics"), strict=False):
        _check_like(rule, "evaluated", name, part, like)


def check_predicted(rule: Rule, outputs: Any, expected: Sequence[int]) -> None:
    """Check that `predict` returned outputs.

    Args:
        rule: the client rule.
        outputs: the value that `predict` returned.
        expected: shape of the net's outputs.

    Raises:
        ContractError: it did not; names the rule, the method, its line and what to return.
    """
    shape = list(outputs.shape) if isinstance(outputs, Tensor) else ""
    if shape != list(expected):
        returned = f"{_kind(outputs)} {shape}".rstrip()
        raise breach(
            rule, "predict", f"returns {returned}; return outputs, a tensor {list(expected)}"
        )


def check_statistics_named(rule: Rule, method: str, w: Tensor, x: Tensor) -> None:
    """Check that a model without BatchNorm statistics of its own is the one that was received.

    The statistics received are those of x. Another model would be evaluated with statistics that it
    was not trained with.

    Args:
        rule: the client rule.
        method: `begin` or `evaluated`, which returned w without statistics.
        w: [P], the parameters that it returned.
        x: [P], the parameters received.

    Raises:
        ContractError: w differs from x; names the rule, the method, its line and what to return.
    """
    if not torch.equal(w, x):
        raise breach(
            rule,
            method,
            "returns parameters of the client's own without BatchNorm statistics; return a pair "
            "(w, buffers) with statistics that the client keeps beside w "
            "(task.grad_and_buffers moves them), or with task.buffers for those received, or set "
            "local.buffers=personal",
        )


def check_finish(rule: Rule, value: Any) -> None:
    """Check that `finish` returned a report and a state.

    Args:
        rule: the client rule.
        value: what `finish` returned; expected is (report, client state), each a dict of tensors.

    Raises:
        ContractError: it did not; names the rule, the method, its line and what to write.
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise breach(
            rule,
            "finish",
            f"returns {_kind(value)}; return the uploads and the state to keep, for example "
            f"`{RETURNS['finish']}`",
        )
    for part in value:
        check_tensors(rule, "finish", part)


def _return(rule: Rule, method: str) -> str:
    return (
        'return {"x": x0}' if method == "init" and not hasattr(rule, "sends") else RETURNS[method]
    )


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
