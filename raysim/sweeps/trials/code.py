"""The users' files and objects that trials need, for the processes that train them."""

from __future__ import annotations

import cloudpickle

from raysim.config.objects.python_objects import PythonObject
from raysim.config.references import Code
from raysim.errors import ConfigError
from raysim.prepare import file_digests
from raysim.sweeps.definition import Trial


def pickled_code(trials: list[Trial]) -> bytes:
    """Return the users' files and objects that trials name, pickled; they register when loaded.

    Args:
        trials: trials of a sweep.

    Raises:
        ConfigError: an object of Python cannot be pickled; the message names the trial.
    """
    code = [file_digests.code(trial.config) for trial in trials]
    try:
        return cloudpickle.dumps(code)
    except Exception as error:  # pickle calls the objects' own code, which may raise anything
        for trial, needed in zip(trials, code, strict=True):
            for user_code in needed:
                _check_pickles(trial, user_code)
        raise ConfigError(f"the objects of Python cannot be pickled: {error}") from error


def _check_pickles(trial: Trial, user_code: Code | PythonObject) -> None:
    """Raise ConfigError if a file or an object that a trial names cannot be pickled."""
    try:
        cloudpickle.dumps(user_code)
    except Exception as error:
        name = user_code.name if isinstance(user_code, PythonObject) else user_code.package
        raise ConfigError(
            f"trial {trial.title}: {name}: it cannot be sent to the process of a trial "
            f"({type(error).__name__}: {error}); create such a part where it is first used, or "
            "call raysim.run"
        ) from None
