"""Absolute paths of the files that a configuration names, so that it means the same elsewhere."""

from __future__ import annotations

from pathlib import Path

from raysim.config.schema import Config
from raysim.config.sections.base import with_value
from raysim.config.sections.data import Arrays, Data, HuggingFace
from raysim.errors import errors_begin
from raysim.models import build
from raysim.models.initial import weights
from raysim.prepare.file_digests import own_paths
from raysim.tracking.mlflow_process.run_client import folder_of_tracked_run


def with_absolute_paths(config: Config) -> Config:
    """Return the configuration with absolute paths of the files that its own keys name.

    So a run can be resumed and loaded from another folder. Names of a hub, names that begin with a
    scheme, and the parameters of users' code stay as they are. A run that `model.init_from` names
    by its id is named by its folder.

    Args:
        config: the configuration of a run.

    Raises:
        ConfigError: the tracking store has no run of that id.
    """
    paths = named_paths(config)
    if weights.is_run_id(source := _initial_weights(config)):
        with errors_begin("model.init_from: "):
            paths["model.init_from"] = folder_of_tracked_run(source, config.tracking.uri)
    for key, path in paths.items():
        config = with_value(config, key, str(Path(path).expanduser().absolute()))
    return config


def named_paths(config: Config) -> dict[str, str]:
    """Return the paths that a configuration names, by their keys; no parameters of users' code.

    Args:
        config: the configuration of a run.
    """
    paths = dict(own_paths(config))
    data = config.data
    is_on_hub = isinstance(data, HuggingFace) and not Path(data.path).expanduser().is_dir()
    if isinstance(data, Data | Arrays | HuggingFace) and not is_on_hub and data.path is not None:
        paths["data.path"] = data.path
    source = _initial_weights(config)
    is_elsewhere = source.startswith((weights.TORCHVISION, weights.HUGGING_FACE))
    if source and not is_elsewhere and not weights.is_run_id(source):
        paths["model.init_from"] = source
    return paths


def _initial_weights(config: Config) -> str:
    """Return the value of `model.init_from` that is no parameter of the net itself; "" if unset."""
    # Most nets have none, and need not be looked up.
    is_set = "init_from" in config.model.parameters
    return (build.initial_weights(config.model) if is_set else None) or ""
