"""Call a user's function that a section of the configuration names, with the section's keys."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from raysim.config.references import load_object
from raysim.errors import ConfigError
from raysim.spelling import did_you_mean, lacking
from raysim.system.signals import failing_as


def users_function(
    section: str, name: str, keys: Mapping[str, Any], n_arguments: int
) -> Callable[..., Any]:
    """Return a user's function of positional arguments; its errors are those of the configuration.

    Args:
        section: section of the configuration that names the function.
        name: path.py:FUNCTION.
        keys: the keys of the section, which are keyword arguments of the function.
        n_arguments: number of positional arguments, before those.

    Raises:
        ConfigError: there is no such function, a key is wrong or missing, or the function fails.
    """
    function = load_object(name, f"{section}.name")
    if not callable(function):
        raise ConfigError(f"{section}.name: {name} is not a function")
    _check_arguments(section, name, function, keys, n_arguments)
    failed = f"{section}.name: {name} failed"

    def call(*arguments: Any) -> Any:
        with failing_as(lambda why: ConfigError(f"{failed}: {why}"), (ConfigError,)):
            return function(*arguments, **keys)

    return call


def _check_arguments(
    section: str, name: str, function: Callable, keys: Mapping[str, Any], n_given: int
) -> None:
    """Raise ConfigError if a key is no argument of the function, or an argument is missing."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a function without a signature
        return
    variable = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    variable &= {parameter.kind for parameter in parameters.values()}
    named = {key: p for key, p in parameters.items() if p.kind not in variable}
    by_position = [key for key, p in named.items() if p.kind is not p.KEYWORD_ONLY]
    if len(by_position) < n_given and inspect.Parameter.VAR_POSITIONAL not in variable:
        raise ConfigError(
            f"{section}.name: {name} takes {len(by_position)} arguments; it is called with "
            f"{n_given}"
        )
    known = [key for key in named if key not in by_position[:n_given]]
    if inspect.Parameter.VAR_KEYWORD not in variable:
        for key in lacking(keys, known):
            raise ConfigError(f"{section}.{key}: unknown key of '{name}'{did_you_mean(key, known)}")
    for key in lacking(known, keys):
        if named[key].default is inspect.Parameter.empty:
            raise ConfigError(f"{section}.{key}: missing; '{name}' needs it")
