"""The reference of the configuration and of other YAML files, from their schemas."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from fields import Field, attribute_text, default_text, definition_list, values_text
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from raysim.attacks.attack_options import AttackOptions
from raysim.attacks.noise_matching import MatchOptions
from raysim.config.explain import annotation_types
from raysim.config.schema import Config
from raysim.planning.simulated_costs import Costs
from raysim.reports.claims import Claim
from raysim.sweeps.definition import SweepSettings

TAGS = ("name", "unit")
"""Keys by which a section's kind is chosen."""


OTHER_SECTIONS = {"sweep": SweepSettings, "claims": Claim, "match": MatchOptions}
"""Sections of a file that are not part of a run's configuration."""


def pages() -> dict[str, str]:
    """Return the pages that describe the keys of a configuration and of other files."""
    sections = [line for key, model in OTHER_SECTIONS.items() for line in _keys(key, model, 3)]
    return {
        "configuration": "\n".join(_config()),
        "other_sections": "\n".join(sections),
        "attack_options": "\n".join(_keys("", AttackOptions, 3)),
        "costs": "\n".join(_keys("", Costs, 3)),
    }


def _config() -> Iterator[str]:
    sections = {key: _models(Config, key) for key in Config.model_fields}
    plain = [key for key, models in sections.items() if not models]
    yield f"## Top level\n\n{definition_list(_field(Config, key, '') for key in plain)}\n"
    for key, models in sections.items():
        if models:
            yield from _section(key, models, level=2)


def _keys(path: str, model: type[BaseModel], level: int) -> Iterator[str]:
    """Yield the keys of a model: those of a section, or with path "" those of a whole file."""
    if path:
        yield from _section(path, [model], level)
        return
    yield f"{inspect.cleandoc(model.__doc__ or '')}\n"
    plain = [key for key in model.model_fields if not _models(model, key)]
    yield definition_list(_field(model, key, "") for key in plain)
    for key in model.model_fields:
        if models := _models(model, key):
            yield from _section(key, models, level)


def _section(path: str, models: list[type[BaseModel]], level: int) -> Iterator[str]:
    """Yield a section that is one of several models, then the sections inside it."""
    yield f"{'#' * level} `{path}`\n"
    for model in models:
        name = _name(model)
        if len(models) > 1:
            yield f"{'#' * (level + 1)} `{path}: {name}`\n"
        yield f"{inspect.cleandoc(model.__doc__ or '')}\n"
        plain = [key for key in model.model_fields if not _models(model, key)]
        hidden = TAGS if len(models) > 1 else ()
        yield definition_list(_field(model, key, f"{path}.") for key in plain if key not in hidden)
    inner: dict[str, list[type[BaseModel]]] = {}
    for model in models:
        for key in model.model_fields:
            if (found := _models(model, key)) and key not in inner:
                inner[key] = found
    for key, found in inner.items():
        yield from _section(f"{path}.{key}", found, min(level + 1, 6))


def _models(owner: type[BaseModel], key: str) -> list[type[BaseModel]]:
    """Return the sections that a key may hold; none for a plain value."""
    return [
        model
        for model in annotation_types(owner.model_fields[key].annotation)
        if isinstance(model, type) and issubclass(model, BaseModel)
    ]


def _name(model: type[BaseModel]) -> str:
    """Return the `name` or `unit` by which a section's kind is chosen."""
    tags = [key for key in TAGS if key in model.model_fields]
    [name] = annotation_types(model.model_fields[tags[0]].annotation) if tags else [""]
    return str(name)


def _field(model: type[BaseModel], key: str, prefix: str) -> Field:
    schema = _schema(model)
    field = model.model_fields[key]
    name = field.alias or key
    value = field.get_default(call_default_factory=True)
    default = "" if value is PydanticUndefined else default_text(_jsonable(value))
    return Field(
        prefix + name,
        values_text(schema["properties"][name], schema.get("$defs", {})),
        default,
        attribute_text(model, key),
    )


def _schema(model: type[BaseModel]) -> Mapping[str, Any]:
    return model.model_json_schema()


def _jsonable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
