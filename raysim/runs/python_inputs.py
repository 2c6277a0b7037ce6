"""Python objects in place of names: data, functions, nets, rules, tasks, losses, stages, probes.

`named_inputs` replaces each object by a section of the configuration that means it. Examples are
written to a file that is named after their content, so that the run can be resumed from anywhere.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from raysim.config import explain
from raysim.config.loading import KEYS_OF_FILES, parse_overrides
from raysim.config.objects import python_objects
from raysim.config.references import reference_of
from raysim.config.schema import Config
from raysim.data.own import reading
from raysim.data.partition import given_partitions
from raysim.engine.plan import Probe
from raysim.errors import ConfigError
from raysim.metrics.table import METRICS_KEY
from raysim.rules import Algorithm, ClientRule, ClientSampling, LearningTask, ServerRule, TaskMetric
from raysim.rules.contract import ALGORITHMS, CLIENT_RULES, SERVER_RULES
from raysim.rules.tasks.shipped_tasks import TASKS
from raysim.rules.upload_stages import STAGES, UploadStage

Section = dict[str, Any]
"""A section of a configuration: a name, and parameters."""


def named_inputs(
    inputs: Iterable[str] | Mapping[str, Any], several: bool = False
) -> dict[str, Any]:
    """Return a configuration, or overrides, without objects.

    Args:
        inputs: the mapping; texts "key=value" are parsed, and cannot hold objects.
        several: whether a list holds several values of a key, as in the overrides of a sweep.

    Raises:
        ConfigError: an object is not what its key needs, or a parameter is none that a
            configuration can hold; the message names its key.
    """
    if not isinstance(inputs, Mapping):
        return parse_overrides(inputs)
    named: dict[str, Any] = {}
    for key, value in inputs.items():
        if several and isinstance(value, list):
            named[key] = [_without_objects(key, item) for item in value]
        else:
            named[key] = _without_objects(key, value)
    return named


def named_source(source: str | Path | Mapping[str, Any] | None) -> str | Path | dict[str, Any]:
    """Return a configuration file unchanged, and a mapping without objects.

    Args:
        source: a configuration file, the name of a shipped one, or a mapping; None: an empty one.

    Raises:
        ConfigError: an object is not what its key needs.
    """
    if isinstance(source, str | Path):
        return source
    return named_inputs(source or {})


def _without_objects(key: str, value: Any) -> Any:
    """Return the value of a key, in any depth, without objects."""
    if value is None:
        return None
    name_of = LISTS.get(_place(key))
    if name_of is not None:
        return _list_without_objects(key, value, name_of)
    section = key.removesuffix(".name")
    name_of = SECTIONS.get(_place(section))
    if name_of is not None:
        named = _section(section, value, name_of)
        if section != key and isinstance(named, Mapping):
            return named["name"]
        return named
    if isinstance(value, Mapping) and key.partition(".")[0] in SECTIONS_ABOVE:
        return {inner: _without_objects(f"{key}.{inner}", item) for inner, item in value.items()}
    return _plain(key, value)


def _place(key: str) -> str:
    """Return a key with * in place of the name of a group."""
    return re.sub(r"^groups\.[^.]+", "groups.*", key)


def _list_without_objects(
    key: str, value: Any, name_of: Callable[[str, Any], Section]
) -> list[Any]:
    """Return the list of a key in `LISTS` without objects; one item may stand for a list."""
    items = value if isinstance(value, list | tuple) else [value]
    sections = []
    for item in items:
        is_name = isinstance(item, str)
        sections.append({"name": item} if is_name else _section(key, item, name_of))
    if key == METRICS_KEY:  # whose items have no parameters
        return [section["name"] for section in sections]
    return sections


def _section(key: str, value: Any, name_of: Callable[[str, Any], Section]) -> Any:
    """Return a section without objects; a value without any is returned as it is."""
    if isinstance(value, str | Path | None):
        return _plain(key, value)
    holds_objects = HOLDS_OBJECTS.get(key)
    if not isinstance(value, Mapping) or (holds_objects and holds_objects(value)):
        return name_of(key, value)
    parameters = {
        inner: item if inner == "name" else _plain(f"{key}.{inner}", item)
        for inner, item in value.items()
    }
    if isinstance(name := value.get("name"), str | None):
        return parameters
    return {**parameters, **name_of(key, name)}


def _plain(key: str, value: Any) -> Any:
    """Return a parameter as a configuration can hold it."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, torch.Tensor | np.ndarray | nn.Module) or callable(value):
        if (name := key.partition(".")[0]) not in (*Config.model_fields, *KEYS_OF_FILES):
            raise ConfigError(f"{name}: unknown key{explain.top_level_hint(name)}")
        raise ConfigError(
            f"{key}: a {type(value).__name__} is no value of a configuration, which has numbers, "
            "texts, lists and mappings; give a list, or define the class or function inside of a "
            "function that has it as a variable"
        )
    if isinstance(value, Mapping):
        return {inner: _plain(f"{key}.{inner}", item) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(f"{key}.{i}", item) for i, item in enumerate(value))
    return value


def _instance(key: str, value: Any, cls: type, shipped: Mapping[str, Any]) -> Section:
    """Return the section of a class, or of its instance with the values of the fields."""
    names = [name for name, known in shipped.items() if known is cls]
    name = names[0] if names else reference_of(cls, key)
    fields = dataclasses.fields(value) if value is not cls else ()
    values = {f.name: getattr(value, f.name) for f in fields if f.init}
    return {**{k: _plain(f"{key}.{k}", v) for k, v in values.items()}, "name": name}


def _class_of(value: Any, *bases: type) -> type | None:
    """Return a class or the class of an instance; None if it is derived from none of the bases."""
    cls = value if isinstance(value, type) else type(value)
    return cls if issubclass(cls, bases) else None


# -- what each section may be ----------------------------------------------------------------------


def _data(key: str, value: Any) -> Section:
    is_function = callable(value) and not isinstance(value, torch.utils.data.Dataset)
    return {"name": reference_of(value, key)} if is_function else reading.store_examples(value)


def _partition(key: str, value: Any) -> Section:
    if callable(value):
        return {"name": reference_of(value, key)}
    # An array of the positions of each client, such as [clients, examples].
    if isinstance(value, np.ndarray) and (value.ndim == 2 or value.dtype == object):
        value = list(value)
    if isinstance(value, list | tuple | Mapping):
        return given_partitions.store_partition(value)
    raise ConfigError(
        f"{key}: a {type(value).__name__} is neither a function of (y, clients, rng) nor a list "
        "with the positions of each client's examples; if it has the client of each example, give "
        "it as users of the data, with partition=natural"
    )


def _task(key: str, value: Any) -> Section:
    if cls := _class_of(value, LearningTask):
        return _instance(key, value, cls, TASKS)
    if callable(value):
        return {"name": reference_of(value, key)}
    raise ConfigError(
        f"{key}: a {type(value).__name__} is neither a LearningTask nor a loss function of outputs "
        "and targets"
    )


def _step_sizes(key: str, value: Any) -> Any:
    if _class_of(value, torch.optim.lr_scheduler.LRScheduler):
        raise ConfigError(
            f"{key}: a scheduler of PyTorch changes an optimizer of its own; give a name and its "
            "keys, such as {'name': 'step', 'base_lr': 0.1, 'step_size': 10, 'gamma': 0.5}, or a "
            "function of the round"
        )
    if callable(value):
        return {"name": reference_of(value, key)}
    return _plain(key, value)


def _optimizer(key: str, value: Any) -> Section:
    raise ConfigError(
        f"{key}: a {type(value).__name__} is not possible, since a client's moments are kept and "
        "reset here; give a name and its keys, such as {'name': 'adam', 'betas': [0.9, 0.99]}; "
        "another optimizer is a client rule with a step of its own"
    )


def _model(key: str, value: Any) -> Section:
    if not callable(value):
        raise ConfigError(
            f"{key}: a {type(value).__name__} is neither a torch.nn.Module nor a function that "
            "returns one"
        )
    return {"name": reference_of(value, key)}


def _rule(key: str, value: Any) -> Section:
    shipped = SECTIONS_OF_RULES[key.rpartition(".")[2]]
    if isinstance(value, Algorithm):
        # A configuration names its rules, too.
        for rule in (value.client, value.server):
            python_objects.reference(rule)
        return _instance(key, value, value, shipped)  # pyright: ignore[reportArgumentType]
    if cls := _class_of(value, ClientRule, ServerRule):
        return _instance(key, value, cls, shipped)
    raise ConfigError(
        f"{key}: a {type(value).__name__} is not a rule; give a ClientRule or a "
        "ServerRule, an instance of one, or an Algorithm"
    )


def _metric(key: str, value: Any) -> Section:
    if cls := _class_of(value, TaskMetric):
        return _instance(key, value, cls, {})
    if callable(value) and not isinstance(value, type):
        return {"name": reference_of(value, key)}
    raise ConfigError(
        f"{key}: {value!r} is neither a name, a function of outputs and targets, nor derived from "
        "raysim.rules.TaskMetric"
    )


def _derived(base: type, shipped: Mapping[str, Any] | None = None) -> Callable[[str, Any], Section]:
    """Return the function for a section of which a user derives classes."""

    def name_of(key: str, value: Any) -> Section:
        if cls := _class_of(value, base):
            return _instance(key, value, cls, shipped or {})
        raise ConfigError(
            f"{key}: {value!r} is neither a name nor derived from raysim's {base.__name__}; derive "
            f"a class from raysim.rules.{base.__name__}"
        )

    return name_of


SECTIONS_OF_RULES: dict[str, Mapping[str, Any]] = {
    "algorithm": ALGORITHMS,
    "client": CLIENT_RULES,
    "server": SERVER_RULES,
}
"""The shipped methods of the sections that name rules."""

SECTIONS: dict[str, Callable[[str, Any], Section]] = {
    "data": _data,
    "partition": _partition,
    "task": _task,
    "model": _model,
    "algorithm": _rule,
    "client": _rule,
    "server": _rule,
    "groups.*.client": _rule,
    "schedule.sampling": _derived(ClientSampling),
    "local.lr": _step_sizes,
    "groups.*.local.lr": _step_sizes,
    "local.optimizer": _optimizer,
    "groups.*.local.optimizer": _optimizer,
}
"""For each section that may be an object: the function that returns its name and parameters."""

HOLDS_OBJECTS: dict[str, Callable[[Mapping[Any, Any]], bool]] = {
    "data": reading.is_content,
    "partition": given_partitions.is_lists,
}
"""For each section that a mapping of objects may be: whether a mapping is one."""

LISTS: dict[str, Callable[[str, Any], Section]] = {
    "local.upload": _derived(UploadStage, STAGES),
    "groups.*.local.upload": _derived(UploadStage, STAGES),
    "evaluate.probes": _derived(Probe),
    METRICS_KEY: _metric,
}
"""The same for the items of lists."""

SECTIONS_ABOVE = ("groups", "schedule", "local", "evaluate")
"""Sections that hold such sections."""
