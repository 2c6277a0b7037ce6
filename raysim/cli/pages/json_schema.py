"""JSON Schema of a configuration file, for editors and for shell completion.

configs/schema.json is the schema of what ships with raysim, with the rows and the pages of methods
that `raysim list` prints. A test compares it with the code; after a change of the configuration,
generate it again:

    raysim schema --shipped > configs/schema.json
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, TypeAdapter, create_model

from raysim.cli.pages import lists, method_page
from raysim.cli.pages.keys import keys_of
from raysim.config import entry_points
from raysim.config.sections.base import OWN_CODE, Named, Section
from raysim.prepare.early_validation import DEFAULTS_ELSEWHERE

JsonSchema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"

OTHER_SECTIONS: dict[str, JsonSchema] = {
    "extends": {
        "type": "string",
        "description": "The configuration that this file changes: a path, or a shipped name.",
    },
    "claims": {
        "type": ["object", "array"],
        "description": "Claims of a paper about these runs, for `raysim report claims`.",
    },
    "match": {
        "type": "object",
        "description": "The method to compare with at equal privacy, and the search.",
    },
}
"""Sections of a file that are not part of a run's configuration."""


DOCSTRING_SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:")
"""Beginnings of paragraphs that editors do not show."""


def configuration_schema(distribution: str | None = None) -> JsonSchema:
    """Return the JSON Schema of a configuration file.

    No key is required, because a file may extend another one.

    Args:
        distribution: distribution whose names are listed, such as "raysim"; None: all installed
            ones.
    """
    from raysim import data
    from raysim.config.schema import Config
    from raysim.config.sections.data import Arrays, Data, HuggingFace, OwnData, TorchvisionData
    from raysim.rules.tasks.shipped_tasks import TASKS
    from raysim.rules.upload_stages import STAGES
    from raysim.sweeps.reading import SweepSettings

    schema = _section_schema(Config)
    definitions: dict[str, JsonSchema] = schema["$defs"]
    sections: dict[str, JsonSchema] = schema["properties"]

    sections["algorithm"] = _by_name(_algorithms(distribution))
    definitions["ClientRule"] = _by_name(_rules("client", distribution))
    sections["client"] = {"$ref": "#/$defs/ClientRule"}
    group = definitions["Group"]["properties"]["client"]
    group["anyOf"] = [{"$ref": "#/$defs/ClientRule"}, {"type": "null"}]
    sections["server"] = _by_name(_rules("server", distribution))
    sections["model"] = _by_name(_models())
    sections["task"] = _by_name({name: _described(task) for name, task in TASKS.items()})
    definitions["OwnPartition"]["properties"]["name"] = OWN_CODE
    units = sections["privacy"]["anyOf"]
    sections["privacy"]["anyOf"] = [kind for unit in units for kind in unit.get("oneOf", [unit])]
    definitions["Data"]["properties"]["name"] = {"enum": list(data.dataset_names())}
    # A file of arrays and the user's own code have their own keys, so the names must not overlap.
    kinds = (Data, OwnData, Arrays, TorchvisionData, HuggingFace)
    definitions["OwnData"]["properties"]["name"] = OWN_CODE
    variants = [{"$ref": f"#/$defs/{model.__name__}"} for model in kinds]
    sections["data"] = {"anyOf": [{"enum": list(data.dataset_names())}, OWN_CODE, *variants]}
    probe: JsonSchema = {"anyOf": [OWN_CODE, {"$ref": "#/$defs/Named"}]}
    if distribution is None:
        sections["model"]["anyOf"] += _installed(entry_points.MODELS)
        sections["data"]["anyOf"] += _installed(entry_points.DATA)
        probe["anyOf"] += _installed(entry_points.PROBES)
    evaluate = definitions["Evaluate"]["properties"]
    evaluate["probes"] = _one_or_several(probe, evaluate["probes"])

    stage = _by_name({name: _described(cls) for name, cls in STAGES.items()})
    stage["anyOf"].remove({"type": "null"})
    definitions["UploadStage"] = stage
    stage_reference = {"$ref": "#/$defs/UploadStage"}
    for definition in definitions.values():
        keys = definition.get("properties", {})
        if "upload" in keys:
            keys["upload"] = _one_or_several(stage_reference, keys["upload"])

    settings = _section_schema(SweepSettings)
    definitions |= settings["$defs"]
    sections["sweep"] = {
        "type": ["object", "array"],
        "description": "Keys with several values each, and how trials run; or a list of grids.",
        "properties": settings["properties"],
    }
    whole = {
        "$schema": DIALECT,
        "description": "Configuration of raysim: a run, or a sweep.",
        "type": "object",
        "properties": {**OTHER_SECTIONS, **sections},
        "additionalProperties": False,
        "$defs": definitions,
    }
    plain = _without_noise(whole)
    if distribution is not None:
        plain[lists.IN_SCHEMA] = lists.shipped_rows()
        plain[method_page.IN_SCHEMA] = method_page.shipped_pages()
    return plain


def _section_schema(section: type[BaseModel]) -> JsonSchema:
    """Return the schema of a section and of those in it, with what their keys mean.

    Pydantic could read the docstrings itself, but in each process that imports a section: that
    takes longer than everything else of the import.
    """
    schema = section.model_json_schema()
    nodes = {section.__name__: schema, **schema["$defs"]}
    sections = [Section, Named]
    for base in sections:
        sections += base.__subclasses__()  # the list grows by the subclasses of subclasses
    for described in sections:
        properties = nodes.get(described.__name__, {}).get("properties", {})
        for key in keys_of(described):
            if key.meaning and key.name in properties:
                with_meaning = {"description": key.meaning, **properties[key.name]}
                properties[key.name] = dict(sorted(with_meaning.items()))
    return schema


def _installed(group: entry_points.EntryPointGroup) -> list[JsonSchema]:
    """Return the schemas of what installed packages offer by name, alone or with its keys."""
    names = sorted({point.name for point in entry_points.entry_points(group)})
    if not names:
        return []
    name = {"enum": names}
    return [name, {"type": "object", "properties": {"name": name}, "required": ["name"]}]


def _algorithms(distribution: str | None) -> dict[str, JsonSchema]:
    from raysim.rules.methods import registry

    schemas = {}
    for name, algorithm, origin in registry.catalogue("algorithm"):
        if distribution not in (None, origin):
            continue
        if isinstance(algorithm, type):  # an installed rule, which is paired with half of FedAvg
            schemas[name] = _described(algorithm)
            continue
        keys = {**_hyper_parameters(algorithm.client), **_hyper_parameters(algorithm.server)}
        if algorithm.presets:
            keys["preset"] = {"enum": list(algorithm.presets)}
        schemas[name] = {"description": algorithm.paper, "properties": keys}
        if algorithm.defaults:
            schemas[name][DEFAULTS_ELSEWHERE] = dict(algorithm.defaults)
    return schemas


def _rules(section: Any, distribution: str | None) -> dict[str, JsonSchema]:
    from raysim.rules.methods import registry

    return {
        name: _described(rule)
        for name, rule, origin in registry.catalogue(section)
        if distribution in (None, origin)
    }


def _described(rule: type) -> JsonSchema:
    return {"description": rule.__doc__ or "", "properties": _hyper_parameters(rule)}


def _hyper_parameters(rule: type) -> dict[str, JsonSchema]:
    """Return the schema of each field of a rule."""
    schemas = TypeAdapter(rule).json_schema().get("properties", {})
    for key in keys_of(rule):
        if key.meaning:
            schemas[key.name] = {"description": key.meaning, **schemas[key.name]}
    return schemas


def _models() -> dict[str, JsonSchema]:
    from raysim.models import build
    from raysim.models.nets import zoo

    schemas = {}
    for name, make in zoo.NETS.items():
        arguments: dict[str, Any] = {
            key: (parameter.annotation, parameter.default)
            for key, parameter in build.net_parameters(name).items()
        }
        for key, (kind, meaning) in build.COMMON_KEYS.items():
            arguments.setdefault(key, (kind | None, Field(default=None, description=meaning)))
        fields = create_model(name, **arguments).model_json_schema()["properties"]
        schemas[name] = {"description": make.__doc__ or "", "properties": fields}
    return schemas


def _by_name(variants: Mapping[str, JsonSchema]) -> JsonSchema:
    """Return the schema of a section that names one of `variants`, or code of the user's own."""
    objects = [
        {
            "type": "object",
            **variant,
            "properties": {"name": {"const": name}, **variant["properties"]},
            "additionalProperties": False,
        }
        for name, variant in sorted(variants.items())
    ]
    own_code = {"type": "object", "properties": {"name": OWN_CODE}, "required": ["name"]}
    return {"anyOf": [{"enum": sorted(variants)}, *objects, OWN_CODE, own_code, {"type": "null"}]}


def _one_or_several(item: JsonSchema, section: JsonSchema) -> JsonSchema:
    """Return the schema of a list in which one item may stand for the list."""
    about = {"description": section.get("description", "")}
    return {**about, "anyOf": [item, {"type": "array", "items": item}]}


def _without_noise(node: Any) -> Any:
    """Remove pydantic's titles, its required keys, and the line breaks of docstrings."""
    if isinstance(node, list):
        return [_without_noise(item) for item in node]
    if not isinstance(node, dict):
        return node
    dropped = ("title", "required") if node.get("title") else ("title",)
    kept = {}
    for key, value in node.items():
        if key in dropped:
            continue
        if key == "description":
            value = _paragraphs(value)
        elif key in ("properties", "$defs"):
            value = {name: _without_noise(inner) for name, inner in value.items()}
        elif key != "default":
            value = _without_noise(value)
        kept[key] = value
    return kept


def _paragraphs(text: str) -> str:
    """Return the paragraphs of a docstring, each on one line, without its Google-style sections."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return "\n\n".join(line for line in paragraphs if not line.startswith(DOCSTRING_SECTIONS))
