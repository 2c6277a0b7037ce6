"""Wait for results of Ray actors, with time limits and errors that name the missing result."""

from __future__ import annotations

from typing import Any

import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from raysim.distributed.transport import actor_calls
from raysim.engine.failure_policy import ActorDied
from raysim.errors import ConfigError, RaysimError, ServerStateLost

POLL_INTERVAL_S = 1.0
"""Interval at which every wait checks for failed actors and dead nodes, in seconds."""

PROGRESS_INTERVAL_S = 10.0
"""Seconds between two lines about the nodes or actors that are awaited."""


def get(reference: Any, awaited: str, timeout: float) -> Any:
    """Return the value of `reference`, like `ray.get`, within a time limit.

    Args:
        reference: one reference, or a list of references.
        awaited: name of the value in errors.
        timeout: time limit, in seconds.

    Raises:
        ActorDied: the actor has died.
        ConfigError: the actor found a mistake in the configuration while it started.
        ServerStateLost: an input of the actor is lost.
        RaysimError: the limit has passed, or the actor raised an error. Errors of raysim pass
            unchanged.
    """
    try:
        return actor_calls.get(reference, timeout)
    except GetTimeoutError:
        raise RaysimError(
            f"waited {timeout:g} s for {awaited}; the actor may be overloaded, or its node may "
            "have failed (limit: resources.timeout)"
        ) from None
    except RayError as error:
        raise translated(error, awaited) from None


def translated(error: RayError, awaited: str) -> RaysimError:
    """Return an error of Ray as one of raysim.

    Args:
        error: Ray's error about a call of an actor.
        awaited: name of the call or of its result, for the message.

    Returns:
        `ActorDied`, also if the actor's GPU failed; `ServerStateLost` if an input of the call is
        lost; `ConfigError` if the actor found a mistake in the configuration, or a module is
        missing, while it started; the error of raysim that the actor raised; or a `RaysimError`
        with another error that it raised.
    """
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, RaysimError):
            return error.cause
        # If an argument of a call is lost, Ray reports it as the cause of the call's error.
        if isinstance(error.cause, RayError):
            return ServerStateLost(f"{awaited} cannot read its inputs: {first_line(error.cause)}")
        # After an error of CUDA every later call of the process fails too: it counts as dead.
        if isinstance(error.cause, torch.AcceleratorError):
            return ActorDied(f"{awaited} failed: {first_line(error.cause)}")
        return RaysimError(f"{awaited} failed: {error}")
    reason = first_line(error)
    # Ray keeps only the text of an error that an actor raised while it started.
    kind, _, message = reason.partition(": ")
    if kind == f"{ConfigError.__module__}.{ConfigError.__name__}":
        return ConfigError(message)
    if kind == ModuleNotFoundError.__name__:
        return ConfigError(
            f"{awaited} failed: {message}; install it where the workers run, put it on PYTHONPATH "
            "before Ray starts, or into the folder of the command"
        )
    return ActorDied(f"{awaited} failed: {reason}")


def first_line(message: object) -> str:
    """Return the line of a Ray error message that has the reason.

    Args:
        message: the error or its text. If an actor failed while starting, the reason is in the
            last line, else in the first.
    """
    lines = [line.strip() for line in str(message).splitlines() if line.strip()]
    if not lines:
        return type(message).__name__
    line = lines[-1] if "creation task" in lines[0] else lines[0]
    if "low on memory" in line:  # of Ray's memory monitor
        line += "; take fewer actors (resources.actors), or smaller blocks (batching.size)"
    return line
