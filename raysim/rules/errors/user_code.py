"""Errors of rules for their authors: the rule, the method, the line and what to write."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from functools import partial
from types import CodeType, FrameType
from typing import Any

from raysim.errors import (
    PACKAGE_FOLDER,
    ContractError,
    RaysimError,
    in_a_line,
    is_users,
    place_of_error,
    readable_path,
)
from raysim.rules.rule import Rule
from raysim.system.deterministic_kernels import operation_without_kernel
from raysim.system.signals import reraise_stop

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
    "for_evaluation": 'return {"x": state["x"]}',
    "candidates": "return pool.ids",
    "select": "return pool.ids[: pool.size]",
    "sent_to": "return shared",
    "before_round": "return state",
    "update": 'return {"x": x}',
    "collude": 'return {"delta": -uploads["delta"]}',
}
"""For each method the shortest last line that fulfils the contract."""


OTHER_DEVICE = ("on the same device", "device type tensor to numpy")
"""Parts of PyTorch's messages for tensors of the CPU beside those of a GPU."""


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
    if operation := operation_without_kernel(error):
        message = f"{operation} has no deterministic kernel on a GPU"
        advice = "; use another layer or function, or set resources.deterministic=false"
    places = ", ".join(filter(None, (_method(error, ["sends"]), place_of_error(error))))
    advice = advice or _way_out(error)
    return f"{message} ({places}){advice}" if places else message + advice


def mixes_devices(error: BaseException) -> bool:
    """Return whether PyTorch raised an error because of tensors of the CPU beside those of a GPU.

    Args:
        error: the error.
    """
    return any(text in str(error) for text in OTHER_DEVICE)


def _way_out(error: BaseException) -> str:
    """Return what to write instead of a usual mistake; "" if it is none."""
    frames = [frame for frame in _frames(error) if is_users(frame.f_code)]
    variables = frames[-1].f_locals if frames else {}
    if isinstance(error, FrozenInstanceError):
        is_server = hasattr(variables.get("self"), "provides")
        place = "what `init` returns" if is_server else "`state`"
        return f"; a rule keeps nothing in itself: declare what it keeps in {place}"
    if mixes_devices(error):
        return (
            "; the run computes on a GPU, and PyTorch moves nothing there by itself: write "
            "a.to(x.device) for a tensor a of the CPU, t.cpu().numpy() for an array, and "
            "register_buffer for a constant of a net"
        )
    if isinstance(error, KeyError) and error.args:
        return _known_keys(error.args[0], place_of_error(error), variables)
    return ""


def _known_keys(key: Any, line: str, variables: Mapping[str, Any]) -> str:
    """Return the keys of the dict of a rule's arguments in which a key was looked for; else ""."""
    for name in ("shared", "state", "client_state"):
        tensors = variables.get(name)
        if isinstance(tensors, Mapping) and f"{name}[" in line and key not in tensors:
            return f"; {name} has: {', '.join(sorted(map(str, tensors)))}"
    return ""


def with_traceback(error: BaseException) -> str:
    """Return `described` and the traceback in the user's code; without any, that of the engine.

    An error of raysim's own says what is wrong, so it has no traceback of the engine.

    Args:
        error: an error with its traceback.

    Returns:
        Several lines, of the innermost `MAX_FRAMES` frames; one for an error of raysim's own.
    """
    tb = error.__traceback__
    frames = list(zip(traceback.walk_tb(tb), traceback.extract_tb(tb), strict=True))
    theirs = [summary for (frame, _), summary in frames if is_users(frame.f_code)]
    if not theirs and isinstance(error, RaysimError):
        return described(error)
    shown = theirs or [summary for _, summary in frames]
    title = "In the rule or the model" if theirs else "In raysim and libraries"
    lines = [
        *traceback.format_list(shown[-MAX_FRAMES:]),
        *traceback.format_exception_only(error),
    ]
    return "\n".join(
        [described(error), f"{title}, the innermost call last:", *"".join(lines).splitlines()]
    )


def raised_by_task(error: BaseException) -> bool:
    """Return whether a rule's task raised an error, such as `task.rng` in a local step.

    Args:
        error: an error with its traceback.
    """
    innermost = list(_frames(error))[-1].f_code.co_filename
    return innermost.startswith(f"{PACKAGE_FOLDER}training{os.sep}")


def defined_at(rule: Rule, method: str) -> str:
    """Return where a rule defines a method, as `file, line N`.

    Args:
        rule: a client or server rule.
        method: a method's name; it may be inherited.
    """
    return function_defined_at(getattr(type(rule), method))


def function_defined_at(function: Callable[..., Any]) -> str:
    """Return where a function is defined, as `file, line N`; the type of another callable.

    Args:
        function: a function, a method, or a `functools.partial` of one.
    """
    while isinstance(function, partial):
        function = function.func
    code: CodeType | None = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return type(function).__name__
    return f"{readable_path(code.co_filename)}, line {code.co_firstlineno}"


def class_defined_at(cls: type) -> str:
    """Return where a class is defined, as `file, line N`; "" if its source is not known.

    Args:
        cls: a class of a user, or a shipped one.
    """
    try:
        lines = inspect.getsourcelines(cls)
    except (OSError, TypeError):
        return ""
    return f"{readable_path(inspect.getfile(cls))}, line {lines[1]}"


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


HALVES = {"sends": "client", "provides": "server"}
"""The halves of a method, by an attribute that only their rules have."""


def _method(error: BaseException, halves: Iterable[str] = HALVES) -> str:
    """Return where an error arose, "METHOD of client rule 'NAME'"; "" for no such method."""
    for frame in _frames(error):
        rule: Any = frame.f_locals.get("self")
        name = frame.f_code.co_name
        half = next((HALVES[mark] for mark in halves if hasattr(rule, mark)), None)
        if half and name in RETURNS and is_users(frame.f_code):
            return f"{name} of {half} rule '{rule.name}'"
    return ""


def _frames(error: BaseException) -> Iterator[FrameType]:
    return (frame for frame, _ in traceback.walk_tb(error.__traceback__))
