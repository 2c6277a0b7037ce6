"""Absolute paths of the files that a configuration names, so that it means the same elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from raysim.config.schema import Config
from raysim.config.sections.data import Arrays, Data, FromFile, HuggingFace
from raysim.config.sections.schedule import Trace
from raysim.models import build
from raysim.models.initial import weights


def with_run_folder(config: Config) -> Config:
    """Return the configuration in which `model.init_from` names a run by its folder, not by its id.

    Args:
        config: the configuration; without the id of a run in `model.init_from` it is returned
            unchanged.

    Raises:
        ConfigError: the tracking store has no such run.
    """
    source = _initial_weights(config)
    if not weights.is_run_id(source):
        return config
    folder = weights.run_folder(source, config.tracking.uri)
    return config.model_copy(
        update={"model": config.model.model_copy(update={"init_from": folder})}
    )


def with_absolute_paths(config: Config) -> Config:
    """Return the configuration with absolute paths of the files that its own keys name.

    So a run can be resumed and loaded from another folder. Names of a hub, names that begin with a
    scheme, and the parameters of users' code stay as they are.

    Args:
        config: the configuration of a run.
    """
    update: dict[str, Any] = {
        "groups": {name: _with_absolute(group, "file") for name, group in config.groups.items()}
    }
    data = config.data
    if isinstance(data, Data | Arrays) or (
        isinstance(data, HuggingFace) and Path(data.path).expanduser().is_dir()
    ):
        update["data"] = _with_absolute(data, "path")
    if isinstance(config.partition, FromFile):
        update["partition"] = _with_absolute(config.partition, "path")
    source = _initial_weights(config)
    if source and not source.startswith((weights.TORCHVISION, weights.HUGGING_FACE)):
        update["model"] = _with_absolute(config.model, "init_from")
    if isinstance(config.schedule.client_speeds, Trace):
        speeds = _with_absolute(config.schedule.client_speeds, "path")
        update["schedule"] = config.schedule.model_copy(update={"client_speeds": speeds})
    return config.model_copy(update=update)


def _initial_weights(config: Config) -> str:
    """Return the value of `model.init_from` that is no parameter of the net itself; "" if unset."""
    # Most nets have none, and need not be looked up.
    is_set = "init_from" in config.model.parameters
    return (build.initial_weights(config.model) if is_set else None) or ""


def _with_absolute(section: BaseModel, key: str) -> Any:
    """Return a section with the absolute path of the file that `key` names, if it names one."""
    path: str | None = getattr(section, key)
    if path is None:
        return section
    return section.model_copy(update={key: str(Path(path).expanduser().absolute())})
