"""What must hold of any configuration: it is accepted, or refused with a message that names the
key. Nothing else."""

from __future__ import annotations

import copy
import datetime
import io
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.bounds import bounded
from support.configurations import NAMES, TO_CHANGE

from raysim.cli.run_resume import _dry_run
from raysim.errors import ConfigError, RaysimError
from raysim.prepare.resolve import prepare

pytestmark = pytest.mark.ray

Path_ = tuple[Any, ...]

COMMON = TO_CHANGE | {"rounds": 3}

VALID: list[dict[str, Any]] = [
    COMMON,
    COMMON | {"algorithm": {"name": "gradma", "memory": 5}, "partition": {"name": "iid", "clients": 9}},
    COMMON
    | {
        "algorithm": "scaffold",
        "partition": {"name": "shards", "clients": 20},
        "client_state": {"memory": "1MB"},
    },
    COMMON
    | {
        "algorithm": {"name": "fedhist", "length": 2},
        "schedule": {
            "name": "kasync",
            "k": 3,
            "concurrency": 6,
            "client_speeds": {"name": "lognormal"},
            "client_dropout": {"rate": 0.1, "rejoin_after": 1},
            "availability": {"period": 10, "open": 5},
        },
    },
    COMMON
    | {
        "privacy": {"max_grad_norm": 1, "noise_multiplier": 0.5},
        "model": "logistic",
        "record_updates": {"rounds": [0]},
    },
    COMMON | {"algorithm": "fedprox", "evaluate": {"forgetting": {}}, "partition": {"name": "virtual", "clients": 50}},
    COMMON | {"algorithm": "fedadam", "partition": {"name": "slow_class", "alpha": 1.0}, "model": "tinynn"},
]  # fmt: skip
"""Each is then written out whole, so that every key is there to be changed."""

ODD = [
    None, True, False, "", "x", "ünïcode ☃ 名", "a" * 3000, "a:b", "nosuch.py:Thing", "null", "1e3",
    "full", "auto", 0, 1, -1, 2, 7, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.5, -0.0, 1e-320, 1e-9,
    1e308, 1e400, -1e400, float("nan"), [], [[]], [1], [0], ["x"], [None], [[0, 0.1]],
    [[0, 0.1], [2, -1]], [[2, 1]], [[0, 1, 2]], {}, {"name": None}, {"name": 3}, {"name": "x"},
    {"name": ["x"]}, {"a": {"b": {"c": 1}}}, {3: 4}, datetime.date(2024, 1, 1), b"bytes",
    [[[[[[1]]]]]],
]  # fmt: skip
KNOWN = [
    *NAMES, "fedavg", "gradma", "scaffold", "feddyn", "mifa", "fedreg", "moon", "loop", "lanes",
    "drop", "float64", "ray",
]  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(ODD),
    st.integers(-5, 300),
    st.floats(-2, 20),
    st.text(max_size=8),
    st.sampled_from(KNOWN),
)
NUMBERS = [
    0, 1, 2, 3, 4, 5, 7, 9, 12, 20, 100, 1000, 2**16, 10**6, 2**31, 2**53 + 1, 2**63, 2**64, 10**30,
    -1, 0.1, 0.5, 1.0, 0.999999, 1.5, 3.0, 1e-320, 1e-30, 1e-9, 1e9, 1e30, 1e308,
]  # fmt: skip
"""In the place of other numbers."""
KEYS = st.one_of(
    st.sampled_from(
        ["lrr", "name", "clients", "Rounds", "sweep", "extends", 3, None, True, 1.5, "a.b"]
    ),
    st.text(max_size=6),
)

Change = tuple[str, int, Any, Any]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["nudge"] * 8 + ["set"] * 4 + ["remove", "add", "rename", "move", "text"]),
        st.sampled_from(range(10_007)),
        KEYS,
        VALUES,
    ),
    min_size=1,
    max_size=2,
)


def places(tree: Any, above: Path_ = ()) -> Iterator[Path_]:
    """Of all keys of a configuration, sections among them."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield (*above, key)
            yield from places(value, (*above, key))


def at(tree: Any, path: Path_) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def changed(tree: dict[str, Any], change: Change) -> list[Any]:
    """Changes a configuration in place; the keys that a complaint may be about."""
    kind, where, key, value = change
    there = list(places(tree))
    if not there:
        return []
    if kind == "nudge":
        there = [path for path in there if is_number(at(tree, path))] or there
    path = there[where % len(there)]
    *above, last = path
    section = at(tree, tuple(above))
    match kind:
        case "nudge":
            section[last] = NUMBERS[where // 101 % len(NUMBERS)]
            return [*path]
        case "set":
            section[last] = copy.deepcopy(value)
        case "remove":
            del section[last]
        case "rename":
            section[key] = section.pop(last)
            return [*path, key]
        case "add":
            inside = section[last] if isinstance(section[last], dict) else section
            inside[key] = copy.deepcopy(value)
            return [*path, key]
        case "move":
            sections = [
                p for p in there if isinstance(at(tree, p), dict) and p[: len(path)] != path
            ]
            if sections:
                to = sections[where % 31 % len(sections)]
                at(tree, to)[last] = section.pop(last)
                return [*path, *to]
    return [*path, *(places_of(value))]


def places_of(value: Any) -> list[Any]:
    return [key for path in places(value) for key in path]


def judged(text: str, keys: list[Any], folder: Path) -> str | None:
    """What is wrong with how a configuration was taken; None if nothing is."""
    path = folder / "config.yaml"
    path.write_text(text)
    try:
        with bounded(10, 4):
            plan = prepare(path)
            local, r = plan.config.local, plan.config.resources
            threads = max(r.threads, r.server_threads or 0)
            if threads > 10_000:
                return f"accepted are {threads} threads, which no process can have"
            if (
                threads <= 16 and max(local.steps or 0, local.epochs or 0) <= 100
            ):  # else it takes for long
                _dry_run(plan, Console(file=io.StringIO()))
    except ConfigError as error:
        message = str(
            error
        )  # a change may have consequences elsewhere: any key that it begins with will do
        by_name = any(str(key) in message or repr(key) in message for key in keys if key != "")
        if keys and not by_name and not re.match(r"[\w.]+: ", message):
            return f"names none of its keys {keys}: {message[:300]}"
    except RaysimError as error:  # what a run itself stops at, and says so: a client that diverges
        return None if "client" in str(error) else f"{type(error).__name__}: {str(error)[:300]}"
    except Exception as error:
        here = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if "/raysim/" in frame.filename
        ]
        place = f"{Path(here[-1].filename).name}:{here[-1].lineno}" if here else "?"
        return f"{type(error).__name__} at {place}: {str(error)[:300]}"
    return None


@pytest.fixture(scope="module")
def whole() -> list[dict[str, Any]]:
    return [yaml.safe_load(prepare(one).config.dump()) for one in VALID]


def explored(
    examples: int, whole: list[dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, tuple[str, str]]:
    """What is wrong, each kind once: what was said, and the shortest YAML that shows it."""
    monkeypatch.chdir(folder)
    found: dict[str, tuple[str, str]] = {}

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]  # its members
    )
    @given(st.sampled_from(range(len(whole))), CHANGES, st.booleans())
    def explore(which: int, changes: list[Change], written_out: bool) -> None:
        tree = copy.deepcopy(whole[which] if written_out else VALID[which])
        keys: list[Any] = []
        for change in changes:
            if change[0] != "text":
                keys += changed(tree, change)
        text = yaml.safe_dump(tree, allow_unicode=True, sort_keys=False)
        for kind, where, key, _ in changes:
            if kind == "text":  # a character taken out, and perhaps others put in
                i = where % len(text)
                text, keys = text[:i] + str(key) * (key is not None) + text[i + 1 :], []
        if any(0xD800 <= ord(c) < 0xE000 for c in text):
            return
        if (wrong := judged(text, keys, folder)) is not None:
            kind = re.sub(r"\[.*?\]|/\S+|'.*?'|\d+", "", wrong)[:100]
            shown = text if not keys else f"# {changes}\n{text}"
            if kind not in found or len(found[kind][1]) > len(shown):
                found[kind] = wrong, shown

    explore()
    return found


def report(found: dict[str, tuple[str, str]]) -> str:
    return "\n\n".join(f"==== {wrong}\n{text}" for wrong, text in found.values())


def test_any_configuration_is_accepted_or_refused_with_its_key(whole, tmp_path, monkeypatch):
    found = explored(300, whole, tmp_path, monkeypatch)
    assert not found, report(found)


@pytest.mark.long
def test_two_thousand_configurations_are_accepted_or_refused_with_their_keys(
    whole, tmp_path, monkeypatch
):
    found = explored(2000, whole, tmp_path, monkeypatch)
    assert not found, report(found)


def test_a_message_without_the_key_would_be_found(tmp_path):
    assert judged(yaml.safe_dump(COMMON), [], tmp_path) is None
    assert judged(yaml.safe_dump(COMMON | {"rounds": 0}), ["rounds"], tmp_path) is None
    assert "names none" in (judged("[]", ["seed"], tmp_path) or "")
