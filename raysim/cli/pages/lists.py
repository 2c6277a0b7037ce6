"""The lists of `raysim list`: all that a configuration can name.

To find the shipped methods, nets and data sets, all of them and torch are imported, which takes
seconds. Their lists are therefore part of the shipped JSON Schema (`raysim.cli.pages.json_schema`),
and are read there unless an installed package adds to them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

from raysim.cli.pages.keys import first_paragraph
from raysim.config import entry_points
from raysim.config.entry_points import EntryPointGroup
from raysim.config.shipped_files import shipped_schema
from raysim.errors import ConfigError

CatalogueRow = dict[str, str]
"""Texts of one line of a list, by column."""

IN_SCHEMA = "x-lists"
"""Key of the shipped JSON Schema for the rows of the lists in `LISTS_OF_CODE`."""

OF_FAMILIES = ("algorithms", "clients", "servers")
"""Lists whose rows have a family."""

AT_DATA_PATH = "at data.path"
"""Location of a user's own data set, in the list of data sets."""


def rows(listing: str) -> list[CatalogueRow]:
    """Return the rows of a list.

    Args:
        listing: one of `LISTABLE`.
    """
    if listing not in LISTS_OF_CODE:
        return LISTABLE[listing]()
    group = LISTS_OF_CODE[listing]
    if group is not None and entry_points.entry_points(group):
        found = LISTABLE[listing]()
    else:
        found = shipped_schema()[IN_SCHEMA][listing]
    if listing == "data":
        for row in found:
            row["here"] = _presence(row["here"])
    return found


def shipped_rows() -> dict[str, list[CatalogueRow]]:
    """Return the rows of the lists in `LISTS_OF_CODE`, without those of installed packages."""
    return {
        listing: [row for row in LISTABLE[listing]() if row.get("from") in (None, "", "raysim")]
        for listing in LISTS_OF_CODE
    }


def _presence(files: str) -> str:
    """Return where the files of a data set are, or whether they are in the usual folder."""
    from raysim.config.sections.data import data_root

    if files == AT_DATA_PATH:
        return files
    return "yes" if not files or any(data_root().glob(files)) else "no"


def _algorithms() -> list[CatalogueRow]:
    from raysim.rules.methods import registry
    from raysim.rules.rule import family

    return [
        {
            "name": name,
            "from": origin,
            "family": family(a.module) if origin == "raysim" else "",
            "paper": a.paper,
            "client": a.client.name,
            "server": a.server.name,
            "state": a.state,
            "traffic": a.traffic,
            "presets": " ".join(a.presets),
        }
        for name, a, origin in registry.catalogue("algorithm")
    ]


def _described(catalogue: Iterable[tuple[str, Any, str]]) -> list[CatalogueRow]:
    """Return a row for each class of a catalogue, with its hyper-parameters."""
    from raysim.rules.methods import registry

    rows = []
    for name, cls, origin in catalogue:
        keys = " ".join(registry.hyperparameter_names(cls))
        rows.append({"name": name, "from": origin, "what": first_paragraph(cls), "keys": keys})
    return rows


def _rules(side: Literal["client", "server"]) -> list[CatalogueRow]:
    from raysim.rules.methods import registry
    from raysim.rules.rule import family

    catalogue = list(registry.catalogue(side))
    rows = _described(catalogue)
    for row, (_, cls, origin) in zip(rows, catalogue, strict=True):
        row["family"] = family(cls.__module__) if origin == "raysim" else ""
    return rows


def _families() -> list[CatalogueRow]:
    """Return a row for each family, with the numbers of its methods."""
    from raysim.rules.rule import SHIPPED_PACKAGE

    folders = importlib.import_module(SHIPPED_PACKAGE).__path__
    numbers = {key: Counter(row["family"] for row in rows(key)) for key in OF_FAMILIES}
    found = []
    for _, name, is_package in pkgutil.iter_modules(folders):
        if not is_package:
            continue
        package = importlib.import_module(f"{SHIPPED_PACKAGE}.{name}")
        counts = {key: str(number[name] or "") for key, number in numbers.items()}
        found.append({"name": name, "what": first_paragraph(package), **counts})
    return found


def _models() -> list[CatalogueRow]:
    from raysim.models import build

    return [
        {"name": name, "from": origin, "what": first_paragraph(net)}
        for name, net, origin in build.catalogue()
    ]


def _probes() -> list[CatalogueRow]:
    from raysim.prepare import configured_probes

    return _described(configured_probes.catalogue())


def _tasks() -> list[CatalogueRow]:
    from raysim.rules.methods import registry
    from raysim.rules.tasks.shipped_tasks import TASKS

    return [
        {
            "name": name,
            "what": first_paragraph(task),
            "metrics": " ".join(task.metric_classes),
            "keys": " ".join(registry.hyperparameter_names(task)),
        }
        for name, task in TASKS.items()
    ]


def _datasets() -> list[CatalogueRow]:
    """Return a row for each data set; "here" is the pattern of its files, "" if it needs none."""
    from raysim import data
    from raysim.data.loading import DESCRIPTIONS, USER_FORMATS

    return [
        {
            "name": name,
            "from": origin,
            "here": AT_DATA_PATH if name in USER_FORMATS else data.files_pattern(name),
            "what": DESCRIPTIONS.get(name, ""),
        }
        for name, origin in data.catalogue()
    ]


def _choices(section: str) -> list[CatalogueRow]:
    """Return the choices of a section of the configuration."""
    from raysim.config.explain import choices

    return [
        {
            "name": name,
            "what": first_paragraph(model),
            "keys": " ".join(key for key in model.model_fields if key not in ("name", "unit")),
        }
        for name, model in choices(section).items()
    ]


def _stages() -> list[CatalogueRow]:
    from raysim.rules.methods import registry
    from raysim.rules.upload_stages import STAGES

    registry.discover()
    rows = _described((name, stage, "") for name, stage in STAGES.items())
    return [{key: row[key] for key in ("name", "what", "keys")} for row in rows]


def _metrics() -> list[CatalogueRow]:
    from raysim.metrics import all_metrics
    from raysim.rules.methods import registry

    registry.discover()
    return [
        {"name": m.name, "unit": m.unit, "what": m.meaning, "logged": m.logged}
        for m in all_metrics()
    ]


def _configs() -> list[CatalogueRow]:
    from raysim.config.loading import shipped

    return [{"name": name, "what": text} for name, text in shipped().items()]


def _rule_pairs() -> list[CatalogueRow]:
    """Return a row per server rule with the name of each pair ("x": unnamed, "": refused)."""
    from raysim.rules import contract
    from raysim.rules.methods import pairs, registry

    registry.discover()
    named: dict[tuple[str, str], str] = {}
    for a in contract.ALGORITHMS.values():
        named.setdefault((a.client.name, a.server.name), a.name)

    def word(client: str, server: str) -> str:
        try:
            pairs.refuse_pair(contract.CLIENT_RULES[client](), contract.SERVER_RULES[server]())
        except ConfigError:
            return ""
        return named.get((client, server), "x")

    clients = sorted(contract.CLIENT_RULES)
    return [
        {"server": s, **{c: word(c, s) for c in clients}} for s in sorted(contract.SERVER_RULES)
    ]


LISTABLE: dict[str, Callable[[], list[CatalogueRow]]] = {
    "algorithms": _algorithms,
    "clients": partial(_rules, "client"),
    "servers": partial(_rules, "server"),
    "families": _families,
    "pairs": _rule_pairs,
    "models": _models,
    "tasks": _tasks,
    "probes": _probes,
    "data": _datasets,
    "partitions": partial(_choices, "partition"),
    "phases": partial(_choices, "phases"),
    "schedules": partial(_choices, "schedule"),
    "client_speeds": partial(_choices, "client_speeds"),
    "sampling": partial(_choices, "sampling"),
    "optimizers": partial(_choices, "optimizer"),
    "lr": partial(_choices, "lr"),
    "stages": _stages,
    "privacy": partial(_choices, "privacy"),
    "metrics": _metrics,
    "configs": _configs,
}
"""Functions that return the rows of a list, by the word that `raysim list` accepts."""


LISTS_OF_CODE: dict[str, EntryPointGroup | None] = {
    "algorithms": entry_points.ALGORITHMS,
    "clients": entry_points.ALGORITHMS,
    "servers": entry_points.ALGORITHMS,
    "pairs": None,
    "models": entry_points.MODELS,
    "tasks": None,
    "probes": entry_points.PROBES,
    "data": entry_points.DATA,
    "stages": None,
    "metrics": None,
}
"""Lists that take seconds to find, and the kind of entry points that adds to them, if one does."""
