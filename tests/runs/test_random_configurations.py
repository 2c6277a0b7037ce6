"""A run of any configuration finishes, is refused before it starts, or ends with one sentence that
names a key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import random_configurations
from support.random_configurations import ending, explored, names_a_key

from raysim.errors import ConfigError, RaysimError

ALLOWED = {"finished", "refused", "error of the run"}


def wrong(seeds: range, folder: Path) -> list[dict[str, Any]]:
    found = explored(seeds, folder)
    assert sum(n for end, n in found["counts"].items() if end in ALLOWED) <= len(seeds)
    return [case for case in found["others"] if case["end"] not in ALLOWED]


def test_a_few_configurations(tmp_path):
    found = wrong(range(4), tmp_path)
    assert not found, json.dumps(found, indent=1)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_four_hundred_configurations(first, tmp_path):
    found = wrong(range(first, first + 50), tmp_path)
    assert not found, json.dumps(found, indent=1)


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (KeyError("w_s"), "traceback"),
        (ConfigError("local.lr: too large"), "refused"),
        (RaysimError("client 3 fails; lower local.lr"), "error of the run"),
        (RaysimError("it fails"), "error without a key"),
        (RaysimError("local.lr: it fails\nTraceback (most recent call last)"), "error without a key"),
    ],
)  # fmt: skip
def test_how_an_end_is_judged(error, end, monkeypatch):
    def train(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(random_configurations, "train", train)
    assert ending({}, [], None).end == end


def test_a_key_in_a_message():
    assert names_a_key("stop.metric: there is none") and names_a_key("lower local.lr")
    assert not names_a_key("there is none. Sorry")
