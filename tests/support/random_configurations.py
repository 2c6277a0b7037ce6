"""Random valid configurations, and how their runs end:

    python random_configurations.py FIRST LAST FOLDER

Keys and values come from the JSON Schema of configuration files, which is made from the sections
and from the registries of methods, nets, tasks and upload stages. A new one takes part by itself.
A part of a configuration that is refused is drawn anew or left out, until the rest is accepted.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from raysim.cli.pages.json_schema import configuration_schema
from raysim.data import loading_once
from raysim.errors import ConfigError, RaysimError, in_a_line
from raysim.metrics import all_metrics
from raysim.prepare.resolve import read_run_config, resolve_plan
from raysim.rules.methods import registry
from raysim.runs.run import execute
from raysim.tracking.recorder import Untracked
from support.bounds import bounded

MAX_SECONDS = 300
"""Seconds after which a run, or the check of a key, hangs."""

MAX_GIGABYTES = 4
"""Memory beyond that of an idle process."""

MAX_PARAMETERS = 300_000
"""Parameters of a net that is trained here."""

LARGE_NETS = {"vit_b_32", "densenet121_gn", "vgg11", "ct_cnn", "fixup_resnet9", "resnet20"}
"""Nets that take long to build."""

NOT_VARIED = {
    "extends", "claims", "match", "sweep", "name", "run_dir", "files", "own_metrics", "own_defaults", "tracking",
    "resources", "data", "task", "rounds",
}  # fmt: skip
"""Sections that are not a matter of the run, or that the workload gives."""

SMALL = {
    "clients": [10, 15],
    "cohort": [1, 3, 5],
    "k": [1, 3],
    "buffer_size": [1, 3],
    "concurrency": [4, 8],
    "steps": [1, 2, 3],
    "epochs": [1, 2],
    "batch_size": [1, 2, 8, 64],
    "every": [0, 1, 2],
    "size": [1, 2, 3],
    "samples": [1, 8],
    "max_samples": [2, 20],
}
"""Values of the keys that determine how much work a run is, or how often something happens."""

registry.discover()  # whose methods declare metrics

WORDS = {
    "metric": [metric.name for metric in all_metrics() if "{" not in metric.name],
    "metrics": ["accuracy", "loss", "top2", "f1", "macro_f1", "balanced_accuracy", "mae", "r2"],
    "personal": ["classifier", "norm", "*weight*", "*bias"],
    "freeze": ["classifier", "norm", "*bias"],
}
"""Values of the keys whose schema is any text."""

MAX_TRIES = 20
"""Times that a configuration is tried, with fewer and fewer parts."""


def write_data(folder: Path) -> list[dict[str, Any]]:
    """Write small arrays of every kind of learning task; return the workloads that use them."""
    rng = np.random.default_rng(0)

    def write(name: str, x: np.ndarray, y: np.ndarray, **more: np.ndarray) -> dict[str, Any]:
        n = len(x) * 3 // 4
        halves = {"x": x[:n], "y": y[:n], "x_test": x[n:], "y_test": y[n:]}
        user = np.sort(rng.integers(0, 9, n))
        np.savez(folder / f"{name}.npz", **halves, user=user, **more)
        return {"name": "arrays", "path": str(folder / f"{name}.npz")}

    x = rng.normal(size=(240, 6)).astype(np.float32)
    images = rng.integers(0, 256, (240, 8, 8, 1)).astype(np.uint8)
    tokens = rng.integers(0, 7, (240, 6))
    labels = np.arange(240) % 3
    bits = rng.integers(0, 2, (240, 4)).astype(np.float32)
    public = {"public_x": x[:20], "public_y": labels[:20]}
    table = write("table", x, labels, **public)
    return [
        {"data": "digits"},
        {"data": "digits", "model": "logistic"},
        {"data": "digits", "model": "tinynn"},
        {"data": "quadratics", "model": "quadratic"},
        {"data": table},
        {"data": table, "partition": {"name": "natural"}},
        {"data": write("images", images, labels), "model": "lenet"},
        {"data": write("bits", x, bits), "task": "multilabel"},
        {"data": write("lines", x, x @ rng.normal(size=(6, 2))), "task": "regression"},
        {
            "data": write("text", tokens, np.roll(tokens, -1, 1)),
            "task": "next_token",
            "model": {"name": "lstm", "hidden": 8},
        },
    ]


class Drawing:
    """Values drawn from a JSON Schema.

    Args:
        rng: source of the draws.
        schema: the schema of configuration files.
    """

    def __init__(self, rng: random.Random, schema: dict[str, Any]):
        self.rng = rng
        self.definitions = schema["$defs"]

    def resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        return self.definitions[schema["$ref"].split("/")[-1]] if "$ref" in schema else schema

    def value(self, key: str, schema: dict[str, Any]) -> Any:
        """Return a value that the schema allows; None if it allows nothing else that is known."""
        schema = self.resolved(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.rng.choice([name for name in schema["enum"] if name not in LARGE_NETS])
        if variants := schema.get("anyOf") or schema.get("oneOf"):
            # Code of the user's own has a pattern in place of names; null is like no value.
            known = [
                kind
                for kind in variants
                if kind.get("type") != "null" and not self.is_own_code(kind)
            ]
            return self.value(key, self.rng.choice(known)) if known else None
        match schema.get("type"):
            case "object":
                return self.section(key, schema)
            case "array" if "prefixItems" in schema:
                return [self.value(key, item) for item in schema["prefixItems"]]
            case "array":
                items = [
                    self.value(key, schema["items"]) for _ in range(self.rng.choice([1, 1, 2]))
                ]
                return [item for item in items if item is not None]
            case "integer":
                return self.number(key, schema, whole=True)
            case "number":
                return self.number(key, schema, whole=False)
            case "boolean":
                return self.rng.choice([True, False])
            case "string":
                return self.rng.choice(WORDS[key]) if key in WORDS else None
        return None

    def is_own_code(self, schema: dict[str, Any]) -> bool:
        schema = self.resolved(schema)
        name = schema.get("properties", {}).get("name", schema)
        return "pattern" in name

    def section(
        self, key: str, schema: dict[str, Any], likelihood: float = 0.35
    ) -> dict[str, Any] | None:
        """Return a mapping with its name, keys without default, and some of the others."""
        if patterns := schema.get("patternProperties"):
            group = self.resolved(next(iter(patterns.values())))
            names = ("a", "b")[: self.rng.choice([1, 1, 2])]
            return {name: self.section(name, group, likelihood=0.6) for name in names}
        section = {}
        for name, kind in schema.get("properties", {}).items():
            needed = name == "name" or "default" not in kind
            if needed or self.rng.random() < likelihood:
                section[name] = self.value(name, kind)
                if section[name] is None:
                    if needed:
                        return None
                    del section[name]
        return section

    def number(self, key: str, schema: dict[str, Any], whole: bool) -> float:
        """Return a small number within the bounds, near the default if there is one."""
        default = schema.get("default")
        if whole:
            near = SMALL.get(key) or [0, 1, 2, 3, *([default] if isinstance(default, int) else [])]
        else:
            near = [0.0, 1e-3, 0.1, 0.5, 0.9, 1.0, 2.0]
            if isinstance(default, int | float):
                near += [default, default / 2, default * 2]
        allowed = [value for value in near if within(value, schema)]
        return self.rng.choice(allowed or [schema.get("minimum", 1)])


def within(value: float, schema: dict[str, Any]) -> bool:
    """Return whether a number is within the bounds of its schema."""
    return (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or schema["exclusiveMinimum"] < value)
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
    )


@dataclass
class Outcome:
    """How a configuration ended, with its message; the configuration as YAML."""

    end: str
    message: str
    text: str


@dataclass
class Piece:
    """A part of a configuration: a section, or one key of a section whose keys are independent."""

    section: str
    key: str
    schema: dict[str, Any]
    value: Any

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}" if self.key else self.section


ADVICE = re.compile(r"\b([a-z_]+(?:\.[a-z_]+)*=[\w.-]*\w)")
"""A key with its value, which a refusal suggests."""


def pieces(drawing: Drawing, schema: dict[str, Any]) -> Iterator[Piece]:
    """Yield the parts of a configuration."""
    sections = schema["properties"]
    for section in sorted(set(sections) - NOT_VARIED):
        kind = sections[section]
        # A section without variants has keys that are independent of each other.
        keys = (
            drawing.resolved(kind).get("properties", {"": kind}) if "$ref" in kind else {"": kind}
        )
        for key, of_key in keys.items():
            if drawing.rng.random() < (0.2 if key else 0.5):
                piece = Piece(section, key, of_key, drawing.value(key or section, of_key))
                if piece.value is not None:
                    yield piece


def assembled(base: dict[str, Any], parts: list[Piece]) -> dict[str, Any]:
    """Return the base with its parts; a rule of one half takes the place of the algorithm."""
    config = copy.deepcopy(base)
    for part in parts:
        if part.key:
            config[part.section] = {**config.get(part.section, {}), part.key: part.value}
        else:
            config[part.section] = part.value
    if "client" in config or "server" in config:
        if "algorithm" in {part.section for part in parts}:
            config = {key: config[key] for key in config if key not in ("client", "server")}
        else:
            config = {"client": "fedavg", "server": "fedavg", **config}
            config.pop("algorithm")
    return config


def culprit(parts: list[Piece], message: str, rng: random.Random) -> Piece:
    """Return the part that a refusal is about, by the keys that it names; else any."""
    named = [part for part in parts if re.search(rf"\b{re.escape(part.name)}\b", message)]
    named = named or [part for part in parts if re.search(rf"\b{part.section}\b", message)]
    first = min(named, key=lambda part: message.find(part.name) % 10_000, default=None)
    return first or rng.choice(parts)


def tried(
    seed: int, workloads: list[dict[str, Any]], schema: dict[str, Any], load: Any
) -> Iterator[Outcome]:
    """Draw a configuration, and yield how it ends. What the refusal suggests is done, or the part
    that is refused is drawn anew or left out, and all is tried again."""
    rng = random.Random(seed)
    drawing = Drawing(rng, schema)
    base: dict[str, Any] = {
        "seed": seed,
        "rounds": rng.choice([2, 3]),
        "partition": {"name": "iid", "clients": 12},
        "model": {"name": "mlp", "hidden": [8]},
        "local": {"steps": 2, "batch_size": 8, "lr": 0.05},
        "schedule": {"cohort": 3},
        "resources": {"executor": "inline"},
        "algorithm": "fedavg",
        **copy.deepcopy(rng.choice(workloads)),
    }
    parts, advice, before = list(pieces(drawing, schema)), [], ""
    for _ in range(MAX_TRIES):
        outcome = ending(assembled(base, parts), advice, load)
        yield outcome
        if outcome.end != "refused" or not parts:
            return
        known = {text for text in ADVICE.findall(outcome.message) if is_varied(text)}
        if outcome.message == before:
            advice = []
        elif known and rng.random() < 0.7:
            advice = [*advice, rng.choice(sorted(known))]
            before = outcome.message
            continue
        wrong = culprit(parts, outcome.message, rng)
        wrong.value = drawing.value(wrong.key or wrong.section, wrong.schema)
        if wrong.value is None or outcome.message == before or rng.random() < 0.3:
            parts.remove(wrong)
        before = outcome.message


def is_varied(text: str) -> bool:
    """Return whether a suggested key belongs to a section that is drawn."""
    return re.split(r"[.=]", text)[0] not in NOT_VARIED | {"model"}


def train(config: dict[str, Any], overrides: list[str], load: Any) -> None:
    """Run a configuration without MLflow, unless its net is large."""
    plan = resolve_plan(read_run_config(config, overrides), load)
    if plan.problem.size > MAX_PARAMETERS:
        raise ConfigError(f"model: {plan.problem.size:,} parameters")
    with tempfile.TemporaryDirectory() as folder:
        execute(plan, Path(folder), tracker=Untracked())


def ending(config: dict[str, Any], overrides: list[str], load: Any) -> Outcome:
    """Return how the run of a configuration ends."""
    text = yaml.safe_dump(config, sort_keys=False) + f"# {' '.join(overrides)}\n"
    rang: list[bool] = []
    try:
        with bounded(MAX_SECONDS, MAX_GIGABYTES, rang):
            train(copy.deepcopy(config), overrides, load)
        end, message = "finished", ""
    except ConfigError as error:
        end, message = "refused", in_a_line(error)
    except RaysimError as error:
        end, message = "error of the run", str(error)
        if not names_a_key(message):
            end = "error without a key"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "/raysim/" in f.filename or "/algorithms/" in f.filename]
        place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"
        end, message = "traceback", f"{place}: {in_a_line(error)}"
    return Outcome("hang", message, text) if rang else Outcome(end, message, text)


KEY = re.compile(r"\b[a-z_]+(\.[a-z_]+)+\b|^[a-z_]+: |'[a-z_]+'")
"""A key with dots, one at the beginning, or one in quotes."""


def names_a_key(message: str) -> bool:
    """Return whether a message of one line or two names a key, and no exception of Python."""
    is_short = len(message.splitlines()) <= 2 and not re.search(r"\w+Error: |Traceback", message)
    return is_short and bool(KEY.search(message))


def explored(seeds: range, folder: Path) -> dict[str, Any]:
    """Run a configuration for each seed; return the counts of their ends, and all that did not
    finish with their messages and YAML."""
    torch.set_num_threads(1)
    before = Path.cwd()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    try:
        schema, workloads = configuration_schema("raysim"), write_data(folder)
        counts: Counter[str] = Counter()
        others, load = [], loading_once()
        for seed in seeds:
            *refused, outcome = tried(seed, workloads, schema, load)
            counts["refusals on the way"] += len(refused)
            counts[outcome.end] += 1
            if outcome.end != "finished":
                others.append({"seed": seed, **vars(outcome)})
                print(f"{seed} {outcome.end}: {outcome.message}", file=sys.stderr, flush=True)
    finally:
        os.chdir(before)
    return {"counts": dict(counts), "others": others}


if __name__ == "__main__":
    first, last = map(int, sys.argv[1:3])
    print(json.dumps(explored(range(first, last), Path(sys.argv[3]).absolute()), indent=1))
