"""Wait for results of Ray actors, with time limits and errors that name the missing result."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from raysim.errors import ConfigError, RaysimError, ServerStateLost

POLL_INTERVAL_S = 1.0
"""Interval at which every wait checks for failed actors and dead nodes, in seconds."""


class ActorDied(ServerStateLost):
    """Error of a wait whose actor has died."""


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
        return ray.get(reference, timeout=timeout)
    except GetTimeoutError:
        raise RaysimError(
            f"waited {timeout:g} s for {awaited}; the actor may be overloaded, or its node may "
            "have failed (limit: resources.timeout)"
        ) from None
    except RayTaskError as error:
        if isinstance(error.cause, RaysimError):
            raise error.cause from None
        kind = ServerStateLost if isinstance(error.cause, RayError) else RaysimError
        raise kind(f"{awaited} failed: {error}") from None
    except RayError as error:
        reason = first_line(error)
        # Ray keeps only the text of an error that an actor raised while it started.
        kind, _, message = reason.partition(": ")
        if kind == f"{ConfigError.__module__}.{ConfigError.__name__}":
            raise ConfigError(message) from None
        raise ActorDied(f"{awaited} failed: {reason}") from None


def first_line(message: object) -> str:
    """Return the line of a Ray error message that has the reason.

    Args:
        message: the error or its text. If an actor failed while starting, the reason is in the
            last line, else in the first.
    """
    lines = [line.strip() for line in str(message).splitlines() if line.strip()] or [
        type(message).__name__
    ]
    line = lines[-1] if "creation task" in lines[0] else lines[0]
    if "low on memory" in line:  # of Ray's memory monitor
        line += "; take fewer actors (resources.actors), or smaller blocks (batching.size)"
    return line
