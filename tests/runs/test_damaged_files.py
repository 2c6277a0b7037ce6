"""Whatever has become of a file of a run, no command that reads it ends with a traceback, and none
loses what is whole."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
import pytest
from support.configurations import DIGITS_MLP
from support.damage import NOISE, damaged_copy, damages

import raysim
from raysim.engine.evaluation.client_evaluation import read_clients
from raysim.engine.state import checkpoint
from raysim.errors import ConfigError
from raysim.system import lock
from raysim.tracking.spool import Spool, Tail

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


def explored(
    some: list[tuple[Path, str]], commands: Iterable[str], run: Path, tmp_path: Path, raysim_
) -> list[str]:
    """Call commands on copies of a run with one damaged file each; return what is wrong."""
    wrong = []
    for file, name in some:
        copy = damaged_copy(run, file, dict(damages(run / file))[name], tmp_path / "copy")
        for command in commands:
            place = {"run": copy, "out": tmp_path / "out"}
            try:
                said = raysim_(*(word.format(**place) for word in COMMANDS[command]))
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
    some = random.Random(0).sample(cases(run), 4)
    wrong = explored(some, ["sync", "resume"], run, tmp_path, raysim_)
    assert not wrong, "\n".join(wrong)


def test_a_folder_in_the_place_of_a_file_is_named(run, tmp_path, raysim_):
    files = [path.relative_to(run) for path in run.iterdir() if path.is_file()]
    some = [(file, "a folder") for file in files]
    wrong = explored(some, ["resume"], run, tmp_path, raysim_)
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
def test_all_damage(run, tmp_path, raysim_):
    wrong = explored(cases(run), COMMANDS, run, tmp_path, raysim_)
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def folder(run: Path, tmp_path: Path) -> Path:
    """A copy of the spool and its mark."""
    for name in ("spool.jsonl", "spool.sent"):
        shutil.copy(run / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("name", ["spool.jsonl", "spool.sent"])
def test_a_damaged_spool_is_named_and_kept(name, run, folder):
    """Either it can be read, or the error names it, and it stays as it is for its owner."""
    refused = []
    for damage_name, damage in damages(run / name):
        path = folder / name
        with contextlib.suppress(IsADirectoryError, FileNotFoundError):
            path.unlink()
        shutil.rmtree(path, ignore_errors=True)
        shutil.copy(run / name, path)
        damage(path)
        before = path.read_bytes() if path.is_file() else None
        try:
            tail = Tail(folder)
            tail.last("start", "finish")
            tail.tags()
            spool = Spool(folder)
            spool.head()
            spool.close()
        except ConfigError as error:
            refused.append(damage_name)
            assert str(path) in str(error) and "\n" not in str(error), damage_name
            assert before is None or path.read_bytes() == before, damage_name
    assert ("noise" in refused) == (name == "spool.jsonl")


def test_only_the_beginning_of_a_record_is_removed(folder):
    path = folder / "spool.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "metr')
    Spool(folder).close()
    assert path.read_bytes() == whole
    path.write_bytes(whole + NOISE.replace(b"\n", b""))
    with pytest.raises(ConfigError, match=f"does not end with a record .* byte {len(whole)}"):
        Spool(folder)


def test_a_damaged_checkpoint_is_passed_over(run, tmp_path, caplog):
    """The one before is read, whichever file of the newest one is damaged."""
    home = Path("checkpoints", "round-000002")
    for file in sorted((run / home).iterdir()):
        for name, damage in damages(file):
            copy = tmp_path / "copy"
            damaged_copy(run, home / file.name, damage, copy)
            caplog.clear()
            read = checkpoint.read_latest(copy)
            lines = caplog.messages[:]
            assert read is not None and read.facts["round"] == (1 if lines else 2), name
            is_harmless = any(part in name for part in ("raysim", "a list"))
            assert lines or is_harmless, (file, name)
            newest = str(copy / home)
            assert all(newest in line and "trying the one before" in line for line in lines)
            assert checkpoint.read_best(copy) is not None
            shutil.rmtree(copy)


def test_no_flipped_bit_changes_what_a_table_of_clients_says(run, tmp_path):
    shutil.copytree(run / "clients", tmp_path / "clients")
    table = sorted((tmp_path / "clients").iterdir())[-1]
    whole, content = read_clients(tmp_path), table.read_bytes()
    n_names = int.from_bytes(content[-8:-4], "little")  # the names and types of columns, at the end
    for i in range(len(content) - 8 - n_names):
        table.write_bytes(content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1 :])
        try:
            found = read_clients(tmp_path)
        except ConfigError as error:
            assert str(table) in str(error)
        else:
            pd.testing.assert_frame_equal(found, whole)


def test_a_damaged_lock_is_no_obstacle(tmp_path):
    for content in (b"[" * 4000, b"\xff\xfe", b"null", b"3", NOISE):
        (tmp_path / "lock").write_bytes(content)
        assert lock.running(tmp_path) is None
        with lock.alone(tmp_path):
            pass
