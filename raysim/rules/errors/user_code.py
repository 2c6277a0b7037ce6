"""Errors of rules for their authors: the rule, the method, the line and what to write."""

from __future__ import annotations

import inspect
import linecache
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.errors import ContractError, RaysimError, in_a_line
from raysim.rules.rule import Rule
from raysim.system.signals import reraise_stop

PACKAGE_FOLDER = f"{Path(__file__).parents[2]}{os.sep}"
"""The folder of raysim's own code."""
SHIPPED_RULES = f"{PACKAGE_FOLDER}algorithms{os.sep}"
LIBRARIES = tuple(f"{os.path.dirname(str(library.__file__))}{os.sep}" for library in (torch, np))
STANDARD_LIBRARY = f"{Path(inspect.__file__).parent}{os.sep}"
"""Folder of the standard library; that of installed packages may lie in it."""
MAX_FRAMES = 20
"""Frames in a traceback."""

RETURNS = {
    "noise": 'return {"z": (task.x0.shape, "normal")}',
    "personal": 'return task.part("classifier")',
    "begin": 'return shared["x"], None',
    "state": "return {}",
    "init": "return {}",
    "prepare": "return ()",
    "loss": "return task_loss(net, batch)",
    "direction": 'return task.grad(state["w"], batch)',
    "step": 'return {**state, "w": task.descend(state["w"], direction)}',
    "finish": 'return {"delta": shared["x"] - state["w"]}, {}',
    "broadcast": 'return {"x": state["x"]}',
    "candidates": "return pool.ids",
    "select": "return pool.ids[: pool.size]",
    "sent_to": "return shared",
    "before_round": "return state",
    "update": 'return {"x": x}',
}
"""For each method the shortest last line that fulfils the contract."""

UNDER_VMAP = {
    "data-dependent control flow": (
        "a branch on a tensor",
        "write torch.where(condition, a, b) for `a if condition else b`",
    ),
    ".item()": (
        "a number taken out of a tensor",
        "write steps without .item(), float() and int() of tensors",
    ),
    "dynamic shape": (
        "a tensor whose shape depends on values",
        "write torch.where(condition, x, 0) for x[condition]",
    ),
    "inplace": ("a change in place", "write x = x + y for x += y"),
    "match the broadcast shape": ("a change in place", "write x = x + y for x += y"),
}
"""Parts of PyTorch's messages about vmap: what they mean in a rule, and what to write instead."""


@contextmanager
def translate_errors(translate: Callable[[str], RaysimError]) -> Iterator[None]:
    """Turn every exception of a user's code into an error of raysim.

    Errors of raysim, and signals that end the run, pass unchanged; a `ContractError` also gets the
    user's line that it comes from.

    Args:
        translate: makes the error from the text of `described`.

    Raises:
        RaysimError: the user's code raised an exception; it is the cause of this error.
        ContractError: the user's code broke the contract.
    """
    try:
        yield
    except ContractError as error:
        raise ContractError(described(error)) from error
    except RaysimError:
        raise
    except BaseException as error:
        reraise_stop(error)
        raise translate(described(error)) from error


def described(error: BaseException) -> str:
    """Return an error of a user's code in one line: what, where and, if known, what to write.

    Args:
        error: an error with its traceback.

    Returns:
        The message, then (method and rule, the user's innermost line), then advice. The message of
        a `ContractError` may name the line already, and contains the advice.
    """
    message, advice = in_a_line(error), ""
    if isinstance(error, ContractError):
        place = place_of_error(error)
        places = ", ".join(filter(None, (_method(error), place)))
        return message if place in message else f"{message} ({places})"
    if any(frame.f_globals.get("__name__") == "torch._functorch.vmap" for frame in _frames(error)):
        message, advice = next(
            (
                (f"{meaning} under vmap", f"; {write}")
                for part, (meaning, write) in UNDER_VMAP.items()
                if part in message
            ),
            (message, ""),
        )
    places = ", ".join(filter(None, (_method(error, ["sends"]), place_of_error(error))))
    advice = advice or _way_out(error)
    return f"{message} ({places}){advice}" if places else message + advice


def _way_out(error: BaseException) -> str:
    """Return what to write instead of a usual mistake; "" if it is none."""
    frame = next((f for f in reversed(list(_frames(error))) if _is_users(f.f_code)), None)
    if isinstance(error, FrozenInstanceError):
        rule = frame.f_locals.get("self") if frame else None
        place = "what `init` returns" if hasattr(rule, "provides") else "`state`"
        return f"; a rule keeps nothing in itself: declare what it keeps in {place}"
    if isinstance(error, KeyError) and frame and error.args:
        line = place_of_error(error)
        for name in ("shared", "state", "client_state"):
            tensors = frame.f_locals.get(name)
            if isinstance(tensors, Mapping) and f"{name}[" in line and error.args[0] not in tensors:
                return f"; {name} has: {', '.join(sorted(map(str, tensors)))}"
    return ""


def with_traceback(error: BaseException) -> str:
    """Return `described` and the traceback in the user's code; without any, that of the engine.

    Args:
        error: an error with its traceback.

    Returns:
        Several lines, of the innermost `MAX_FRAMES` frames.
    """
    tb = error.__traceback__
    frames = list(zip(traceback.walk_tb(tb), traceback.extract_tb(tb), strict=True))
    theirs = [summary for (frame, _), summary in frames if _is_users(frame.f_code)]
    shown = theirs or [summary for _, summary in frames]
    title = "In the rule or the model" if theirs else "In raysim and libraries"
    lines = [
        *traceback.format_list(shown[-MAX_FRAMES:]),
        *traceback.format_exception_only(error),
    ]
    return "\n".join(
        [described(error), f"{title}, the innermost call last:", *"".join(lines).splitlines()]
    )


def place_of_error(error: BaseException) -> str:
    """Return the user's innermost line in a traceback, `file, line N: code`; "" for none.

    Args:
        error: an error with its traceback.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if _is_users(frame.f_code):
            code = linecache.getline(frame.f_code.co_filename, line).strip()
            return f"{_readable(frame.f_code.co_filename)}, line {line}" + (
                f": `{code}`" if code else ""
            )
    return ""


def defined_at(rule: Rule, method: str) -> str:
    """Return where a rule defines a method, as `file, line N`.

    Args:
        rule: a client or server rule.
        method: a method's name; it may be inherited.
    """
    code: CodeType = inspect.unwrap(getattr(type(rule), method)).__code__
    return f"{_readable(code.co_filename)}, line {code.co_firstlineno}"


def class_defined_at(cls: type) -> str:
    """Return where a class is defined, as `file, line N`; "" if its source is not known.

    Args:
        cls: a class of a user, or a shipped one.
    """
    try:
        lines = inspect.getsourcelines(cls)
    except (OSError, TypeError):
        return ""
    return f"{_readable(inspect.getfile(cls))}, line {lines[1]}"


def breach(rule: Rule, method: str, why: str) -> ContractError:
    """Return the error for a method that does not keep the contract.

    Args:
        rule: a client or server rule.
        method: name of the method that broke the contract.
        why: what it does, and what to write instead; continues "METHOD of client rule 'NAME'".
    """
    half = "client" if hasattr(rule, "sends") else "server"
    return ContractError(
        f"{method} of {half} rule '{rule.name}' {why} ({defined_at(rule, method)})"
    )


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
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        is_shape = all(
            (isinstance(size, int) and not isinstance(size, bool) and size >= 0)
            or (size == "B" and position == 0)
            for position, size in enumerate(sizes)
        )
        if not is_shape or distribution not in ("normal", "uniform"):
            raise breach(
                rule,
                "noise",
                f"returns '{key}' as {spec!r}; give a shape and a distribution, "
                f"'normal' or 'uniform', for example `{RETURNS['noise']}`",
            )
        declared[key] = sizes, distribution
    return declared


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
    for name, part, like in (("w", value[0], x), ("buffers", value[1], buffers)):
        if name == "buffers" and part is None:
            continue
        if not isinstance(part, Tensor):
            raise breach(rule, "begin", f"returns {_kind(part)} as {name}; return a tensor")
        if part.shape != like.shape or part.dtype != like.dtype:
            raise breach(
                rule,
                "begin",
                f"returns {name} as {part.dtype} {list(part.shape)}; return {like.dtype} "
                f"{list(like.shape)}",
            )
    if len(value) == 3:
        check_tensors(rule, "begin", value[2])
        if "w" in value[2]:
            raise breach(rule, "begin", 'returns "w" in its third part; it is the first one')


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
    sent = value.get("x")
    if sent is None or sent.shape != x.shape or sent.dtype != x.dtype:
        kind = "no 'x'" if sent is None else f"'x' as {sent.dtype} {list(sent.shape)}"
        raise breach(rule, "sent_to", f"returns {kind}; return 'x' as {x.dtype} {list(x.shape)}")


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
        after: what it returned; it must have the same keys, and `w` the same shape.

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
    if after["w"].shape != before["w"].shape:
        raise breach(
            rule,
            "step",
            f"returns w as {list(after['w'].shape)}; it was given {list(before['w'].shape)}, "
            "which must stay",
        )


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
        if not isinstance(part, Tensor) or part.shape != like.shape or part.dtype != like.dtype:
            shape = f" {list(part.shape)}, {part.dtype}" if isinstance(part, Tensor) else ""
            raise breach(
                rule,
                "evaluated",
                f"returns {_kind(part)}{shape}; return {name}, a tensor {list(like.shape)} of "
                f"{like.dtype}"
                + ("" if len(parts) == 2 else ", or a pair of parameters and BatchNorm statistics"),
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


HALVES = {"sends": "client", "provides": "server"}
"""The halves of a method, by an attribute that only their rules have."""


def _method(error: BaseException, halves: Iterable[str] = HALVES) -> str:
    """Return where an error arose, "METHOD of client rule 'NAME'"; "" for no such method."""
    for frame in _frames(error):
        rule: Any = frame.f_locals.get("self")
        name = frame.f_code.co_name
        half = next((HALVES[mark] for mark in halves if hasattr(rule, mark)), None)
        if half and name in RETURNS and _is_users(frame.f_code):
            return f"{name} of {half} rule '{rule.name}'"
    return ""


def _frames(error: BaseException) -> Iterator[FrameType]:
    return (frame for frame, _ in traceback.walk_tb(error.__traceback__))


def _is_users(code: CodeType) -> bool:
    """Return True for code outside of the engine and the libraries, and for shipped rules."""
    file = code.co_filename
    if file.startswith(SHIPPED_RULES):
        return True
    if file.startswith(STANDARD_LIBRARY) and "site-packages" not in file:
        return False
    return not file.startswith((PACKAGE_FOLDER, *LIBRARIES, "<"))


def _readable(file: str) -> str:
    """Return a path relative to the working directory if it lies in it."""
    return file.removeprefix(f"{os.getcwd()}{os.sep}")
