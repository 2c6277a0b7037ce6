"""What must hold of TensorBoard and W&B: they get what MLflow gets, once, and cannot harm a run."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import raysim
from raysim.errors import ConfigError
from raysim.tracking import followers
from raysim.tracking.followers import Follower, catch_up, send
from raysim.tracking.recorder import Recorder
from raysim.tracking.spool import Tail

OVERRIDES = {
    "partition.clients": 8,
    "schedule.cohort": 4,
    "local.steps": 1,
    "resources.executor": "inline",
    "checkpoint.every": 1,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(followers, "FOLLOW_INTERVAL_S", 0.05)
    return tmp_path


def scalars(run_dir: Path, key: str) -> list[tuple[int, float]]:
    """What TensorBoard shows of a metric: (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0})
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(key)]


def wandb_records(run_dir: Path) -> list[Any]:
    """The records of a run that W&B has kept offline."""
    from wandb.proto.wandb_internal_pb2 import Record

    [path] = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    content, at, parts, records = path.read_bytes(), 7, [], []
    while at < len(
        content
    ):  # LevelDB's log format: blocks of 32 KiB; crc, length, kind before each part
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts.append(content[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(b"".join(parts)))
            parts = []
    return records


def accuracies(history: list[dict[str, float]]) -> list[tuple[int, float]]:
    return [(int(row["round"]), pytest.approx(row["accuracy"], abs=1e-6)) for row in history]


def test_tensorboard_gets_every_round_of_a_run(folder: Path):
    result = raysim.run(
        "quickstart", OVERRIDES, rounds=3, run_dir="r", **{"tracking.also": ["tensorboard"]}
    )
    assert scalars(folder / "r", "accuracy") == accuracies(result.history)


@pytest.mark.ray
@pytest.mark.long
def test_wandb_gets_every_round_of_a_run(folder: Path):
    """In a process of its own, because W&B starts a server and takes the process's signals."""
    keys = {**OVERRIDES, "rounds": 3, "run_dir": "r", "tracking.also": "wandb"}
    code = f"import raysim; raysim.run('quickstart', {keys!r})"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    history = raysim.load(folder / "r").history
    records = wandb_records(folder / "r")
    rows = [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    logged = [(int(row["_step"]), float(row["accuracy"])) for row in rows if "accuracy" in row]
    assert logged == accuracies(history)
    [run] = [record.run for record in records if record.HasField("run")][:1]
    assert run.project == "quickstart", "as the experiment in MLflow"
    assert any("history.csv" in str(record) for record in records), "the run's files"


def test_a_resumed_run_shows_each_round_once(folder: Path):
    raysim.run("quickstart", OVERRIDES, rounds=2, run_dir="r", **{"tracking.also": "tensorboard"})
    result = raysim.resume("r", ["rounds=4"])
    assert scalars(folder / "r", "accuracy") == accuracies(result.history)


@pytest.mark.parametrize("later", [False, True])
def test_rounds_that_are_trained_again_replace_those_of_a_killed_run(folder: Path, later: bool):
    """In both cases: TensorBoard follows the run, or gets its records afterwards."""
    also = {} if later else {"tracking.also": "tensorboard"}

    def kill(record: dict[str, float]) -> None:
        if record["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        raysim.run(
            "quickstart", OVERRIDES, rounds=4, run_dir="r", progress=kill,
            **{"checkpoint.every": 2, **also},
        )  # fmt: skip
    result = raysim.resume("r")
    catch_up(folder / "r", ["tensorboard"])
    assert scalars(folder / "r", "accuracy") == accuracies(result.history)


def test_sync_shows_an_old_run_in_tensorboard(raysim_, folder: Path):
    result = raysim.run("quickstart", OVERRIDES, rounds=2, run_dir="r")
    assert not (folder / "r" / "tensorboard").exists()
    assert catch_up(folder / "r", ["tensorboard"])["tensorboard"] > 5
    assert scalars(folder / "r", "accuracy") == accuracies(result.history)
    assert catch_up(folder / "r", ["tensorboard"]) == {"tensorboard": 0}
    refused = raysim_("tracking", "sync", "r", "--also", "tensorbord")
    assert refused.code == 2 and "did you mean 'tensorboard'" in refused.err


class Memory(Follower):
    """Keeps what it is sent; may fail."""

    name = "tensorboard"
    fails = False
    opened = 0

    def open(self, start: Any) -> None:
        Memory.opened += 1
        self.steps: list[int] = []

    def resumed(self) -> None: ...

    def parameters(self, values: Any) -> None: ...

    def tags(self, values: Any) -> None: ...

    def artifact(self, path: Any) -> None: ...

    def metrics(self, values: Any, step: int, time: float) -> None:
        if self.fails:
            raise OSError("the disk is full")
        self.steps.append(step)

    def flush(self) -> None: ...

    def close(self, status: str) -> None: ...


def test_a_follower_that_fails_is_reported_and_harms_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    expected = raysim.run("quickstart", OVERRIDES, rounds=2, run_dir="alone")
    monkeypatch.setitem(followers.FOLLOWERS, "tensorboard", Memory)
    monkeypatch.setattr(Memory, "fails", True)
    with caplog.at_level(logging.WARNING):
        result = raysim.run(
            "quickstart", OVERRIDES, rounds=2, run_dir="r", **{"tracking.also": "tensorboard"}
        )
    assert result.digest == expected.digest
    assert caplog.text.count("tensorboard does not follow this run any more") == 1
    assert "the disk is full" in caplog.text and "--also tensorboard" in caplog.text


def test_what_was_sent_is_not_sent_again(folder: Path):
    recorder = Recorder("sqlite:///none.db", "e", folder / "r")
    recorder.start("name", {}, {})
    for step in range(3):
        recorder.metrics({"accuracy": 0.5}, step)
    first, second = Memory(folder / "r"), Memory(folder / "r")
    first.open({}), second.open({})
    send(Tail(folder / "r", "spool.memory.sent"), first)
    recorder.metrics({"accuracy": 0.5}, 3)
    send(Tail(folder / "r", "spool.memory.sent"), second)
    recorder.close()
    assert (first.steps, second.steps) == ([0, 1, 2], [3])


def test_a_package_that_is_missing_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(followers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"wandb is not installed.*raysim\[wandb\]"):
        raysim.run("quickstart", OVERRIDES, run_dir="r", **{"tracking.also": "wandb"})
    assert not (folder / "r").exists()


def test_a_folder_of_that_name_is_no_package(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "wandb_").mkdir()
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(ConfigError, match=r"wandb_ is not installed"):
        followers.require_packages(["wandb_"])
