"""What must hold of checkpoints that cannot be used, or cannot be written."""

from __future__ import annotations

import csv
import json
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.forked import Forked, call
from support.processes import SUPPORT, basic, client_of, each_step_once, run_in, timeless, written
from support.stopped_runs import checkpoint_rounds, stop_at

import raysim
from raysim.engine.inline_executor import Inline, InlineRound
from raysim.engine.loop import Engine
from raysim.engine.state import checkpoint
from raysim.errors import ConfigError, RaysimError, ServerStateLost, WorkersLost
from raysim.runs import result
from raysim.runs.artifacts import written_files
from raysim.runs.resume import resume
from raysim.system import startup_stages

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory, uri: str) -> tuple[Path, Any]:
    """A run with rows in memory and on disk and a virtual clock, stopped in round 9 of 12; and the
    whole one."""
    folder = tmp_path_factory.mktemp("halfway")
    config = basic(folder, uri) | {
        "rounds": 12,
        "algorithm": {"name": "scaffold"},
        "schedule": {"name": "kasync", "k": 4, "concurrency": 10},
        "client_state": {"memory": "20kB"},
        "checkpoint": {"every": 2, "keep": 9},
    }
    whole = raysim.run(config, run_dir=str(folder / "whole"))
    with pytest.raises(KeyboardInterrupt):
        raysim.run(config, progress=stop_at(9))
    return folder / "run", whole


@pytest.fixture
def stopped(halfway: tuple[Path, Any], tmp_path: Path) -> Path:
    shutil.copytree(halfway[0], tmp_path / "stopped", symlinks=True)
    return tmp_path / "stopped"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 16
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def change(**facts: Any) -> Callable[[Path], None]:
    """Other facts, with checksums that fit."""

    def damage(folder: Path) -> None:
        run = folder / "run.json"
        run.write_text(json.dumps({**json.loads(run.read_text()), **facts}))
        sums = json.loads((folder / "sums.json").read_text())
        (folder / "sums.json").write_text(
            json.dumps({**sums, "run.json": checkpoint._sha256_of_file(run)})
        )

    return damage


def every_file(damage: Callable[[Path], None]) -> list[Callable[[Path], None]]:
    return [
        lambda folder, name=name: damage(folder / name)
        for name in (*checkpoint.CHECKPOINT_FILES, "sums.json")
    ]


DAMAGES: dict[str, list[Callable[[Path], None]]] = {
    "truncated": every_file(cut),
    "a bit flipped": every_file(flip),
    "a file missing": every_file(Path.unlink),
    "another format": [change(format=1), change(format=99, raysim="9.9.9"), change(format=None)],
    "other contents": [
        lambda folder, name=name: (folder / name).write_text("[]")
        for name in ("run.json", "sums.json")
    ],
    "nothing in it": [lambda folder: [path.unlink() for path in folder.iterdir()]],  # type: ignore[list-item]
    "not a folder": [lambda folder: [shutil.rmtree(folder), folder.write_text("")]],  # type: ignore[list-item]
}


@pytest.mark.parametrize("name", DAMAGES)
def test_each_checkpoint_that_cannot_be_used_is_named_and_the_one_before_taken(
    stopped, caplog, name
):
    """Of the four newest ones, each damaged in another way."""
    paths = checkpoint.available_checkpoints(stopped)
    assert len(paths) == 4
    for i, damage in enumerate(DAMAGES[name]):
        copy = stopped.with_name(f"copy-{i}")
        shutil.copytree(stopped, copy, symlinks=True)
        newest, second = checkpoint.available_checkpoints(copy)[:1:-1]
        for path in (newest, second):
            damage(path)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            saved = checkpoint.read_latest(copy)
        assert saved is not None and saved.facts["round"] == 4
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == 2 and str(newest) in messages[0] and str(second) in messages[1], (
            messages
        )
        if name == "another format":
            assert all(
                re.search(r"written by raysim \S+ in format \w+; this one reads \d", line)
                for line in messages
            )


def test_checkpoints_are_in_the_order_of_rounds_also_after_a_million(stopped):
    """Their names have six digits, or seven; a folder of somebody else's is left alone."""
    home = checkpoint.checkpoints_folder(stopped)
    newest = checkpoint.available_checkpoints(stopped)[-1]
    for name in (999_999, 1_000_000, "old"):
        shutil.copytree(newest, home / f"round-{name}")
    assert checkpoint_rounds(stopped)[-2:] == [999_999, 1_000_000]
    checkpoint.remove_after(stopped, 999_999)
    assert checkpoint_rounds(stopped)[-1] == 999_999 and (home / "round-old").exists()


def test_a_run_goes_on_from_an_earlier_checkpoint_to_the_same_end(stopped, halfway):
    """Though later ones were damaged, and rows on disk have been written since."""
    for damage, path in zip(
        (flip, cut), checkpoint.available_checkpoints(stopped)[:1:-1], strict=True
    ):
        damage(path / "clients.safetensors")
    done = resume(stopped)
    assert done.state_digest == halfway[1].state_digest and timeless(done.history) == timeless(
        halfway[1].history
    )


def test_rows_that_a_checkpoint_needs_are_gone(stopped, halfway, caplog):
    """Cut short, it is found before the run begins; damaged, when the row is read. It never counts
    as an empty row."""
    rows = stopped / "rows" / "rows.bin"
    kept = rows.read_bytes()
    os.truncate(rows, 0)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(RaysimError, match=r"none of the 4 checkpoints"),
    ):
        resume(stopped)
    assert all("rows.bin" in record.getMessage() for record in caplog.records[:4])
    rows.write_bytes(bytes(len(kept)))
    with pytest.raises(RaysimError, match=r"row of client \d+ .* is damaged: wrong checksum"):
        resume(stopped)


def test_a_checkpoint_of_another_configuration_is_refused(stopped):
    """It is whole, so the one before it is not taken either: the mistake is named."""
    change(fingerprint="0" * 64)(checkpoint.available_checkpoints(stopped)[-1])
    with pytest.raises(ConfigError, match=r"another configuration than config\.yaml"):
        resume(stopped)


@pytest.mark.parametrize("what", ["data", "partition"])
def test_a_checkpoint_on_other_data_is_refused(stopped, what):
    change(**{what: "0" * 64})(checkpoint.available_checkpoints(stopped)[-1])
    with pytest.raises(
        ConfigError, match=rf"{what}: .* was run with another {what} than is there now"
    ):
        resume(stopped)


def test_the_best_checkpoint_is_kept(uri, tmp_path):
    """By the accuracy after its last round, beside the last ones; where none is measured, only the
    last ones."""
    config = basic(tmp_path, uri) | {
        "rounds": 12,
        "local": {"lr": [[0, 0.5], [5, 5.0]], "steps": 3, "batch_size": 16},
    }
    done = raysim.run(config, {"checkpoint": {"every": 2, "keep": 2}})
    at = {t: done.history[t]["accuracy"] for t in range(2, 13, 2)}
    best = max(at, key=lambda t: at[t])
    assert best < 10, f"the later rounds must be worse: {at}"
    assert checkpoint_rounds(tmp_path / "run") == [best, 10, 12]
    raysim.run(
        config,
        {"checkpoint": {"every": 2, "keep": 2, "best": False}, "run_dir": str(tmp_path / "last")},
    )
    assert checkpoint_rounds(tmp_path / "last") == [10, 12]
    config["evaluate"] = {"every": 0}
    raysim.run(
        config, {"checkpoint": {"every": 2, "keep": 2}, "run_dir": str(tmp_path / "unmeasured")}
    )
    assert checkpoint_rounds(tmp_path / "unmeasured") == [10, 12]


# -- a full disk -----------------------------------------------------------------------------------


def on_a_full_disk(
    folder: Path, what: str, first: int, *arguments: object
) -> tuple[int, list[str]]:
    """The exit code, and the lines of its output."""
    script = SUPPORT / "full_disk.py"
    code, output = Forked(script, what, first, *arguments, cwd=folder).ended()
    return code, output.rstrip().splitlines()


def test_repeated_rounds_keep_the_records_that_were_reported(uri, tmp_path, monkeypatch):
    """Those of a tracker, with the times of the first attempt."""
    config = basic(tmp_path, uri) | {"rounds": 9, "checkpoint": {"every": 4}}
    train, trained, reported = InlineRound.get, [], []

    def lost_once(self: InlineRound) -> Any:
        trained.append(self)
        if len(trained) == 8:
            raise ServerStateLost("the server's node is gone")
        return train(self)

    monkeypatch.setattr(InlineRound, "get", lost_once)
    done = raysim.run(config, progress=lambda record: reported.append(dict(record)))
    assert len(trained) == 8 + 5 and reported == done.history


def test_what_is_done_is_saved_when_no_worker_is_left(uri, tmp_path, monkeypatch):
    """Server and driver are there, so no round that they have done is lost."""
    config = basic(tmp_path, uri) | {"rounds": 6, "checkpoint": {"every": 50}}
    whole = raysim.run(config, run_dir=str(tmp_path / "whole"))
    train, trained = InlineRound.get, []

    def without_workers(self: InlineRound) -> Any:
        trained.append(self)
        if len(trained) > 3:
            raise WorkersLost("waited 120 s for a new ClientActor")
        return train(self)

    monkeypatch.setattr(InlineRound, "get", without_workers)
    with pytest.raises(WorkersLost, match="waited 120 s"):
        raysim.run(config, run_dir=str(tmp_path / "part"))
    monkeypatch.undo()
    assert checkpoint_rounds(tmp_path / "part") == [3]
    assert resume(tmp_path / "part").state_digest == whole.state_digest


@pytest.mark.parametrize("what", ["checkpoints", "size"])
def test_the_run_stops_where_a_checkpoint_is_required(uri, tmp_path, what):
    """With exit code 1 and one line that says how much is free; the last good one is there, nothing
    half-written beside it, and with room again the run goes on to the same end."""
    config = basic(tmp_path, uri) | {"rounds": 10, "checkpoint": {"every": 2}}
    whole = raysim.run(config, run_dir=str(tmp_path / "whole"))
    code, lines = on_a_full_disk(tmp_path, what, 3, "run", written(tmp_path, config))
    assert code == 1, lines
    assert lines[-1].startswith("error: ") and re.search(r"\(\d+ MB free there\)", lines[-1])
    assert "checkpoint.required=false" in lines[-1]
    if what != "size":  # that limit may meet the tracker's thread as well
        assert not [line for line in lines if "Traceback" in line]
    there = checkpoint_rounds(tmp_path / "run")
    assert there == [2, 4]
    assert sorted(
        path.name for path in checkpoint.checkpoints_folder(tmp_path / "run").iterdir()
    ) == [checkpoint.checkpoint_name(t) for t in there]
    assert run_in_state(uri, tmp_path.name, "FAILED")
    assert resume(tmp_path / "run").state_digest == whole.state_digest


def run_in_state(uri: str, experiment: str, status: str) -> list[Any]:
    client = client_of(uri)
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return [run for run in found if run.info.status == status]


def test_the_run_goes_on_where_a_checkpoint_is_not_required(uri, tmp_path):
    """It finishes, counts what failed, and keeps the last good one."""
    config = basic(tmp_path, uri) | {"rounds": 10, "checkpoint": {"every": 2, "required": False}}
    whole = raysim.run(
        config, run_dir=str(tmp_path / "whole"), tracking={"uri": uri, "experiment": "whole"}
    )
    code, lines = on_a_full_disk(
        tmp_path, "checkpoints", 3, "run", written(tmp_path, config), "--json"
    )
    assert code == 0, lines
    assert json.loads(lines[-1])["digest"] == whole.digest
    assert checkpoint_rounds(tmp_path / "run") == [2, 4]
    run = run_in(uri, tmp_path.name)
    failed = {
        m.step: m.value
        for m in client_of(uri).get_metric_history(run.info.run_id, "system/checkpoints_failed")
        if m.value
    }
    assert failed == {7: 1, 8: 1, 9: 2, 10: 2}
    each = [line for line in lines if "cannot be written" in line]
    assert len(each) == 3 and all(
        "MB free" in line and line.endswith("there); the run continues without it") for line in each
    )


def test_a_full_disk_loses_nothing_that_was_to_be_tracked(uri, tmp_path):
    """The spool keeps in memory what it cannot write, and the server gets all of it, once."""
    config = basic(tmp_path, uri) | {"rounds": 10, "checkpoint": {"every": 0}}
    code, lines = on_a_full_disk(tmp_path, "spool", 8, "run", written(tmp_path, config), "--json")
    assert code == 0, lines
    assert sum("records are kept in memory" in line for line in lines) == 1
    run = run_in(uri, tmp_path.name)
    assert run.info.status == "FINISHED"
    with (tmp_path / "run" / "history.csv").open() as file:
        history = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    assert len(history) == 11
    each_step_once(uri, run.info.run_id, history)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 kB; only root can make one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "none", str(disk)]).returncode
    ):
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_run_on_a_full_disk_ends_in_one_line_and_is_ended_in_mlflow(uri, tmp_path, small_disk):
    config = basic(tmp_path, uri) | {"rounds": 6, "run_dir": str(small_disk / "run")}
    config["model"] = {"name": "mlp", "hidden": [64]}
    code, output = call("run", written(tmp_path, config), cwd=tmp_path)
    assert code == 1 and "Traceback" not in output, output
    assert re.fullmatch(
        r"error: checkpoint .* cannot be written: .* \(\d+ MB free there\).*",
        output.splitlines()[-1],
    )
    (run,) = run_in_state(uri, tmp_path.name, "FAILED")
    assert (
        "cannot be written" in run.data.tags["error"]
        and "partition.png" in run.data.tags["error_at_end"]
    )
    there = {path.name for path in (small_disk / "run").iterdir()}
    assert "parameters.safetensors" not in there and not [
        name for name in there if "partial" in name
    ]


@pytest.mark.parametrize("fails", [True, False])
def test_what_fails_at_the_end_hides_nothing(uri, tmp_path, monkeypatch, caplog, fails):
    """All closing steps fail, each by itself. The cause of the end stays, or the result, and
    MLflow's run is ended."""

    def broken(*arguments: Any, **options: Any) -> None:
        raise OSError(5, "Input/output error")

    for place, name in ((written_files, "plot_partition"), (Inline, "close"), (Engine, "close")):
        monkeypatch.setattr(place, name, broken)

    def progress(record: dict[str, float]) -> None:
        if fails and record["round"] == 3:
            raise ZeroDivisionError("the cause")

    config = basic(tmp_path, uri) | {"rounds": 4}
    if fails:
        with pytest.raises(ZeroDivisionError, match="the cause") as caught:
            raysim.run(config, progress=progress)
        assert caught.value.__context__ is None
    else:
        assert raysim.run(config).rounds == 4
    run = run_in(uri, tmp_path.name)
    assert run.info.status == ("FAILED" if fails else "FINISHED")
    assert run.data.tags.get("error") == ("ZeroDivisionError: the cause" if fails else None)
    for what in (
        "partition.png is not written",
        "rows on disk are not removed",
        "the executor is not closed",
    ):
        assert what in run.data.tags["error_at_end"] and what in caplog.text
    kept = {file.path for file in client_of(uri).list_artifacts(run.info.run_id)}
    assert {"config.yaml", "history.csv", "learning_curve.png"} <= kept


def test_a_run_whose_parameters_could_not_be_written_is_resumed_for_them(
    uri, tmp_path, monkeypatch
):
    config = basic(tmp_path, uri) | {"rounds": 4}
    save = result.save_file

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"torn")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(result, "save_file", full)
    with pytest.raises(
        checkpoint.Unwritable, match=r"parameters\.safetensors cannot be written: .*No space"
    ):
        raysim.run(config)
    assert not (tmp_path / "run" / "parameters.safetensors").exists()
    monkeypatch.setattr(result, "save_file", save)
    with startup_stages.shown_by((stages := []).append):
        done = resume(tmp_path / "run")
    assert stages[-1] == "the end of the run"  # and no round 5
    assert done.rounds == 4 and (tmp_path / "run" / "parameters.safetensors").exists()
    run = run_in(uri, tmp_path.name)
    assert run.info.status == "FINISHED" and not run.data.tags["error"]
    with pytest.raises(ConfigError, match="4 rounds are done"):
        resume(tmp_path / "run")
