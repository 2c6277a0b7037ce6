"""The reference of the configuration and of other YAML files, from their schemas."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Iterator, Mapping

from fields import entry
from pydantic import BaseModel

from raysim.attacks.attack_options import AttackOptions
from raysim.attacks.noise_matching import MatchOptions
from raysim.cli.pages.keys import first_paragraph, keys_of, values_of_keys
from raysim.config.explain import annotation_types
from raysim.config.schema import Config
from raysim.config.sections.groups import GroupLocal
from raysim.config.sections.local import Local
from raysim.models import build
from raysim.models.nets import zoo
from raysim.reports.claims.claim_section import Claim
from raysim.rules.methods import registry
from raysim.rules.tasks.shipped_tasks import TASKS
from raysim.sweeps.reading import SweepSettings

TAGS = ("name", "unit")
"""Keys by which a section's kind is chosen."""

LIKE: Mapping[type[BaseModel], type[BaseModel]] = {GroupLocal: Local}
"""Sections whose keys mean the same as those of another one."""

OTHER_SECTIONS = {"sweep": SweepSettings, "claims": Claim, "match": MatchOptions}
"""Sections of a file that are not part of a run's configuration."""


def pages() -> dict[str, str]:
    """Return the pages that describe the keys of a configuration and of other files."""
    sections = [line for key, model in OTHER_SECTIONS.items() for line in _keys(key, model, 3)]
    return {
        "configuration": "\n".join(_config()),
        "other_sections": "\n".join(sections),
        "attack_options": "\n".join(_keys("", AttackOptions, 3)),
    }


def _config() -> Iterator[str]:
    yield "## Top level\n"
    yield _definition_list(Config)
    for key in Config.model_fields:
        if models := _models(Config, key):
            yield from _section(key, models, level=2)


def _keys(path: str, model: type[BaseModel], level: int) -> Iterator[str]:
    """Yield the keys of a model: those of a section, or with path "" those of a whole file."""
    if path:
        yield from _section(path, [model], level)
        return
    yield f"{inspect.cleandoc(model.__doc__ or '')}\n"
    yield _definition_list(model)
    for key in model.model_fields:
        if models := _models(model, key):
            yield from _section(key, models, level)


def _section(path: str, models: list[type[BaseModel]], level: int) -> Iterator[str]:
    """Yield a section that is one of several models, then the sections inside it."""
    yield f"{'#' * level} `{path}`\n"
    inner: dict[str, list[type[BaseModel]]] = {}
    for model in models:
        if len(models) > 1:
            yield f"{'#' * (level + 1)} `{path}: {_name(model)}`\n"
        yield f"{inspect.cleandoc(model.__doc__ or '')}\n"
        if like := LIKE.get(model):
            yield _same_keys(model, like)
            continue
        hidden = TAGS if len(models) > 1 else ()
        yield _definition_list(model, f"{path}.", hidden)
        for key in model.model_fields:
            if found := _models(model, key):
                inner.setdefault(key, found)
    if path in NAMED_BY_TABLE:
        yield from NAMED_BY_TABLE[path]()
    for key, found in inner.items():
        yield from _section(f"{path}.{key}", found, min(level + 1, 6))


def _same_keys(model: type[BaseModel], like: type[BaseModel]) -> str:
    """Return the names of a section's keys, which another section explains."""
    assert model.model_fields.keys() <= like.model_fields.keys(), model
    names = ", ".join(f"`{key}`" for key in model.model_fields)
    section = like.__name__.lower()
    return f"Its keys are some of those of [`{section}`](#{section}): {names}.\n"


def _nets() -> Iterator[str]:
    """Yield the shipped nets with their keys, then the keys of every net."""
    yield "| net | keys with defaults | what it is |\n| --- | --- | --- |"
    for name, net in zoo.NETS.items():
        keys = ", ".join(
            f"`{key}: {json.dumps(parameter.default)}`"
            for key, parameter in build.net_parameters(name).items()
        )
        text = first_paragraph(net).removeprefix("Build ")
        yield f"| `{name}` | {keys} | {text[0].upper()}{text[1:]} |"
    yield "\nEvery net also has these keys:\n"
    for key, (_, meaning) in build.COMMON_KEYS.items():
        yield f"`model.{key}`\n: {meaning}\n"


def _tasks() -> Iterator[str]:
    """Yield the shipped learning tasks with their keys."""
    yield "| task | keys | metrics | what it is |\n| --- | --- | --- | --- |"
    for name, task in TASKS.items():
        keys = ", ".join(f"`{key}`" for key in registry.hyperparameter_names(task))
        metrics = ", ".join(f"`{metric}`" for metric in task.metric_classes)
        yield f"| `{name}` | {keys} | {metrics} | {first_paragraph(task)} |"
    yield ""


NAMED_BY_TABLE = {"model": _nets, "task": _tasks}
"""Sections whose names have keys that only a registry knows."""


def _models(owner: type[BaseModel], key: str) -> list[type[BaseModel]]:
    """Return the sections that a key may hold; none for a plain value."""
    return [
        model
        for model in annotation_types(owner.model_fields[key].annotation)
        if isinstance(model, type) and issubclass(model, BaseModel)
    ]


def _name(model: type[BaseModel]) -> str:
    """Return the `name` or `unit` by which a section's kind is chosen.

    For a kind that has any name, it is "path.py:Class" if its text says so, else "NAME".
    """
    tags = [key for key in TAGS if key in model.model_fields]
    [name] = annotation_types(model.model_fields[tags[0]].annotation) if tags else [""]
    if name is not str:
        return str(name)
    meanings = {key.name: key.meaning for key in keys_of(model)}
    path = re.match(r"path\.py:\w+", meanings[tags[0]])
    return path[0] if path else "NAME"


def _definition_list(model: type[BaseModel], prefix: str = "", hidden: Collection[str] = ()) -> str:
    """Return the keys of a section as a definition list, except hidden ones."""
    values = values_of_keys(model)
    entries = []
    for key in keys_of(model):
        if key.name in hidden:
            continue
        text = f"`{values[key.name]}`"
        if model is Config:
            text = text.replace("`section`", f"a [section](#{key.name})")
            text = text.replace("`section or null`", f"a [section](#{key.name}) or `null`")
        entries.append(entry(key, text, prefix))
    return "\n".join(entries)
