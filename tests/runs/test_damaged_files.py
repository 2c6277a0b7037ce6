"""Whatever has become of a file of a run, no command that reads it ends with a traceback, and none
loses what is whole."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from support.configurations import DIGITS_MLP
from support.damage import damaged_copy, damages

import raysim

CONFIG = DIGITS_MLP | {
    "algorithm": "scaffold",
    "local": {"steps": 1, "batch_size": 8, "lr": 0.1},
    "partition": {"clients": 8, "test": {"fraction": 0.2}},
    "client_state": {"memory": 20_000},
    "checkpoint": {"every": 1, "best": True},
    "evaluate": {"clients": {"every": 1}, "forgetting": {}},
    "record_updates": {"clients": 1},
}

COMMANDS = {
    "sync": ["tracking", "sync", "{run}"],
    "export": ["export", "{run}", "--out", "{out}.pt"],
    "attack": ["attack", "{run}", "iterations=1", "restarts=1"],
    "fork": ["resume", "--fork", "{run}", "rounds=3", "run_dir={out}"],
    "resume": ["resume", "{run}", "rounds=3"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds, of whose records the last ones were not sent."""
    place = tmp_path_factory.mktemp("whole")
    tracking = {"uri": f"sqlite:///{place}/mlflow.db"}
    done = raysim.run(CONFIG, run_dir=str(place / "run"), tracking=tracking)
    mark = done.run_dir / "spool.sent"
    sent = json.loads(mark.read_text())
    mark.write_text(json.dumps(sent | {"records": sent["records"] - 3}))
    return done.run_dir


def cases(run: Path) -> list[tuple[Path, str]]:
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.suffix != ".png"]
    return [(path.relative_to(run), name) for path in files for name, _ in damages(path)]


def explored(some: list[tuple[Path, str]], run: Path, tmp_path: Path, raysim_) -> list[str]:
    """Call the commands on copies of a run with one damaged file each; return what is wrong."""
    wrong = []
    for file, name in some:
        copy = tmp_path / "copy"
        damaged_copy(run, file, dict(damages(run / file))[name], copy)
        for command, words in COMMANDS.items():
            place = {"run": copy, "out": tmp_path / "out"}
            try:
                said = raysim_(*(word.format(**place) for word in words))
            except BaseException as error:
                wrong.append(f"{file}, {name}: {command}: {type(error).__name__}: {error}")
                continue
            # The content of a row is checked where it is read, in the middle of a run.
            codes = (0, 1, 2) if file.parent.name == "rows" else (0, 2)
            if said.code not in codes or "Traceback" in said.err + said.out:
                wrong.append(f"{file}, {name}: {command} ends with {said.code}: {said.err}")
        for left in (copy, tmp_path / "out"):
            shutil.rmtree(left, ignore_errors=True)
    return wrong


def test_some_damage(run, tmp_path, raysim_):
    some = random.Random(0).sample(cases(run), 12)
    wrong = explored(some, run, tmp_path, raysim_)
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
def test_all_damage(run, tmp_path, raysim_):
    wrong = explored(cases(run), run, tmp_path, raysim_)
    assert not wrong, "\n".join(wrong)
