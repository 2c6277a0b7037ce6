"""Shell completion of configurations, keys, values and experiments.

It reads the shipped JSON Schema and MLflow's database. It imports neither torch nor MLflow, so that
it is fast.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

PLACES = {
    "clients": "client",
    "servers": "server",
    "models": "model",
    "tasks": "task",
    "probes": "evaluate.probes",
    "partitions": "partition",
    "phases": "partition.phases",
    "schedules": "schedule",
    "client_speeds": "schedule.client_speeds",
    "sampling": "schedule.sampling",
    "optimizers": "local.optimizer",
    "lr": "local.lr",
    "stages": "local.upload",
    "privacy": "privacy",
}
"""The key of a configuration that names one of a list, by the list."""

PROBE_KEYS = ("record_updates", "evaluate.forgetting", "evaluate.theory")
"""Keys that attach probes of raysim."""

Completions = list[tuple[str, str]]
"""Possible completions of a word, each with its description."""

SchemaNode = Mapping[str, Any]
"""Part of a JSON Schema."""

ONLY_IN_FILES = ("extends", "claims", "match", "files", "own_metrics", "own_defaults")
"""Sections that cannot be set as key=value."""


def complete_configuration(incomplete: str) -> Completions:
    """Return shipped configurations, YAML files and folders whose names begin with `incomplete`.

    Args:
        incomplete: the word before the cursor.
    """
    from raysim.config.loading import shipped

    folder = Path(incomplete if incomplete.endswith("/") else Path(incomplete).parent)
    beside = sorted(folder.iterdir()) if folder.is_dir() else []
    paths = [f"{path}/" if path.is_dir() else str(path) for path in beside]
    files = [(path, "") for path in paths if path.endswith((".yaml", ".yml", "/"))]
    return _beginning_with(incomplete, [*shipped().items(), *files])


def complete_override(context: typer.Context, incomplete: str) -> Completions:
    """Return keys, or values of a key, for a word of the form key=value.

    Zsh and fish complete the whole word. Bash splits it at "=": then `incomplete` is only the
    value, and the key is the last word before it.

    Args:
        context: the command with the words so far, among them earlier overrides.
        incomplete: the word before the cursor.
    """
    words = re.sub(r" ?= ?", "=", " ".join(context.params.get("overrides") or [])).split()
    key, equals, _ = incomplete.partition("=")
    schema = _Schema([word for word in words if "=" in word])
    if equals:
        values = [(f"{key}={value}", about) for value, about in schema.values(key)]
        return _beginning_with(incomplete, values)
    if words and (words[-1].endswith("=") or ("=" not in words[-1] and not incomplete)):
        return _beginning_with(incomplete, schema.values(words[-1].rstrip("=")))
    return schema.keys(incomplete)


def complete_experiment(context: typer.Context, incomplete: str) -> Completions:
    """Return the experiments in the SQLite database of `--uri` that begin with `incomplete`.

    Without a database, or with one that cannot be read, there are none.

    Args:
        context: the command with the options so far, among them `--uri`.
        incomplete: the word before the cursor.
    """
    from raysim.config.sections.storage import Tracking
    from raysim.config.tracking_uri import database_of

    path = database_of(context.params.get("uri") or Tracking().uri)
    if path is None or not path.is_file():
        return []
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db,
    ):
        query = "SELECT name FROM experiments WHERE lifecycle_stage = 'active' ORDER BY name"
        return _beginning_with(incomplete, [(name, "") for (name,) in db.execute(query)])
    return []


def complete_listed(context: typer.Context, incomplete: str) -> Completions:
    """Return the names that follow `raysim list LISTING` and begin with `incomplete`.

    Args:
        context: the command with the words so far, among them the list.
        incomplete: the word before the cursor.
    """
    listing = context.params.get("listing")
    if listing == "probes":
        return _beginning_with(incomplete, [(key, "") for key in PROBE_KEYS])
    place = {"algorithms": "algorithm", **PLACES}.get(listing or "")
    return _beginning_with(incomplete, _Schema([]).values(place)) if place else []


def _beginning_with(incomplete: str, candidates: Completions) -> Completions:
    """Return the candidates that begin with `incomplete`."""
    return [(text, about) for text, about in candidates if text.startswith(incomplete)]


class _Schema:
    """Shipped JSON Schema, restricted by the overrides of a command line.

    Args:
        overrides: the overrides before the word to complete. After `algorithm=NAME` only the keys
            of that algorithm remain.
    """

    def __init__(self, overrides: list[str]):
        from raysim.config.shipped_files import shipped_schema

        self.schema = shipped_schema()
        for section in ONLY_IN_FILES:
            del self.schema["properties"][section]
        self.overrides = {
            key: value for key, _, value in (word.partition("=") for word in overrides)
        }

    def keys(self, incomplete: str) -> Completions:
        """Return keys (ending in "=") and sections (ending in ".") that begin with `incomplete`."""
        section, dot, _ = incomplete.rpartition(".")
        candidates: Completions = []
        for key, node in self._children(section).items():
            path = f"{section}{dot}{key}"
            if path.startswith(incomplete):
                inner = self._children(path)
                is_value = not inner or "name" in inner
                candidates += [(f"{path}.", self._about(node))] if inner else []
                candidates += [(f"{path}=", self._about(node))] if is_value else []
        if len(candidates) != 1:
            return candidates
        ((only, about),) = candidates
        if only.endswith("."):
            return self.keys(only)
        # With a second candidate, shells do not end the word with a space.
        return [
            (only, about),
            *((f"{only}{value}", text) for value, text in self.values(only[:-1])),
        ]

    def values(self, key: str) -> Completions:
        """Return the possible values of a key; its default if they cannot be listed."""
        section, _, last = key.rpartition(".")
        node = self._children(section).get(last, {})
        names: list[str] = []
        about: dict[str, str] = {}
        for leaf in self._alternatives(node):
            names += self._listed(leaf)
            variant = leaf.get("properties", {}).get("name", {})
            if "const" in variant:
                about[variant["const"]] = self._about(leaf)
        if names:
            return [(name, about.get(name, "")) for name in names]
        default = node.get("default")
        if default is None or isinstance(default, dict):
            return []
        text = default if isinstance(default, str) else json.dumps(default)
        return [(text, about.get(text, "default"))]

    def _listed(self, leaf: SchemaNode) -> list[str]:
        """Return the values that a node without alternatives lists."""
        if leaf.get("type") == "boolean":
            return ["true", "false"]
        if "enum" in leaf:
            return list(map(str, leaf["enum"]))
        return [str(leaf["const"])] if "const" in leaf else []

    def _children(self, path: str) -> dict[str, SchemaNode]:
        """Return the keys of a section by name, of all its variants if none is chosen."""
        node: SchemaNode = self.schema
        children: dict[str, SchemaNode] = dict(self.schema["properties"])
        for part in filter(None, path.split(".")):
            node = children.get(part, {})
            children = {}
            name = self.overrides.get(part) or self.overrides.get(f"{part}.name")
            for variant in self._alternatives(node):
                keys = variant.get("properties", {})
                if not name or keys.get("name", {}).get("const", name) == name:
                    children = {**keys, **children}
        return children

    def _alternatives(self, node: SchemaNode) -> Iterator[SchemaNode]:
        """Yield the alternatives of a node, with references resolved."""
        if "$ref" in node:
            yield from self._alternatives(self.schema["$defs"][node["$ref"].rpartition("/")[2]])
        elif "anyOf" in node:
            for alternative in node["anyOf"]:
                yield from self._alternatives(alternative)
        else:
            yield node

    def _about(self, node: SchemaNode) -> str:
        """Return the first sentence of a node's description."""
        texts = [
            node.get("description", ""),
            *(n.get("description", "") for n in self._alternatives(node)),
        ]
        return next(filter(None, texts), "").partition(". ")[0].rstrip(".")
