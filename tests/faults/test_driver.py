"""What must hold when the driver itself is killed, or told to end, or started twice in one folder."""

from __future__ import annotations

import json
import os
import platform
import random
import re
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from support.forked import Forked
from support.processes import (
    SUPPORT,
    basic,
    catches,
    each_step_once,
    kill,
    processes_with_mark,
    run_in,
    start,
    timeless,
    until,
    written,
)
from support.programs import program
from support.stopped_runs import checkpoint_rounds

import raysim
from raysim.engine.state import checkpoint
from raysim.runs.resume import resume
from raysim.system import lock

pytestmark = pytest.mark.ray

MOMENTS = ("files", "rename", "renamed", "remove")
"""In the writing of a checkpoint, where a process kills itself: see `support/dying.py`."""


def raysim_(folder: Path, *arguments: object, die: str = "", **environment: str) -> Forked:
    """`raysim ...`, which may kill itself in a checkpoint's writing."""
    dying = SUPPORT / "dying.py"
    program: tuple[object, ...] = (dying, die) if die else ("-m", "raysim")
    return Forked(*program, *arguments, cwd=folder, **environment)


SLEEPY = program("driver_sleepy")
"""Takes its time and notes the version that each task begins with; after 60 tasks, while a file is
there, it sleeps, but in no dry run."""


def sleepy(rule: str, **parameters: Any) -> dict[str, Any]:
    return {
        "client": {"name": f"{rule}:Sleepy", **parameters},
        "server": {"name": "fedavgm"},
        "algorithm": None,
    }


def killed_until_it_is_done(
    folder: Path, config: dict[str, Any], moments: list[str], seed: int, **environment: str
) -> None:
    """Starts a run and kills it as often as there are moments, then lets it end."""
    choice, file, run = random.Random(seed), written(folder, config), Path(config["run_dir"])
    for moment in [*moments, "never"]:
        begun = (run / "config.yaml").exists()
        arguments = ("resume", run) if begun else ("run", file)
        driver = raysim_(folder, *arguments, die=moment * (moment in MOMENTS), **environment)
        before = checkpoint_rounds(run)[-1:]
        if moment == "soon":
            time.sleep(choice.uniform(0, 1.5))
        elif moment == "on its way":
            until(
                lambda: checkpoint_rounds(run)[-1:] != before or not driver.alive(),  # noqa: B023
                120,
                driver.output,
            )
            time.sleep(choice.uniform(0, 0.4))
        if moment in ("soon", "on its way"):
            assert driver.alive(), driver.output
            driver.signal(signal.SIGKILL)
        code = driver.wait()
        assert code == (0 if moment == "never" else -signal.SIGKILL), f"{moment}: {driver.output}"


@pytest.mark.parametrize(
    ("soon", "on_its_way"), [(1, 2), pytest.param(6, 10, marks=pytest.mark.long)]
)
def test_many_kills_do_not_show(uri, tmp_path, source, soon, on_its_way):
    """Four of them while a checkpoint is written; the others at the start, in training, anywhere."""
    config = basic(tmp_path, uri) | sleepy(source("sleepy", SLEEPY), seconds=0.01)
    rounds = 18 * (soon + on_its_way)  # so that all kills come before the end
    config |= {"rounds": rounds, "checkpoint": {"every": 2}, "client_state": {"memory": "20kB"}}
    whole = raysim.run(
        {**config, **sleepy(source("sleepy", SLEEPY))}, run_dir=str(tmp_path / "whole")
    )
    moments = [*MOMENTS, *["soon"] * soon, *["on its way"] * on_its_way]
    random.Random(5).shuffle(moments)
    killed_until_it_is_done(tmp_path, config, moments, seed=5)
    saved = checkpoint.read_latest(tmp_path / "run")
    assert saved is not None and timeless(saved.facts["history"]) == timeless(whole.history)
    run = next(r for r in runs_in(uri, tmp_path.name) if r.info.run_id == saved.facts["run_id"])
    assert run.data.tags["digest"] == whole.digest and run.info.status == "FINISHED"
    each_step_once(uri, run.info.run_id, saved.facts["history"])
    assert len(runs_in(uri, tmp_path.name)) == 2, (
        "each kill goes on in the MLflow run that was there"
    )
    assert not list(checkpoint.checkpoints_folder(tmp_path / "run").glob(".*"))


def runs_in(uri: str, experiment: str) -> list[Any]:
    from support.processes import client_of

    client = client_of(uri)
    return list(client.search_runs([client.get_experiment_by_name(experiment).experiment_id]))


def test_a_kill_of_a_driver_of_actors_does_not_show(uri, tmp_path, source):
    """And its Ray is gone with it."""
    config = basic(tmp_path, uri) | sleepy(source("sleepy", SLEEPY), seconds=0.01)
    config |= {"rounds": 40, "checkpoint": {"every": 2}}
    whole = raysim.run(
        {**config, **sleepy(source("sleepy", SLEEPY))}, {"tracking.experiment": "whole"}
    )
    config |= {
        "run_dir": str(tmp_path / "ray"),
        "resources": {"executor": "ray", "actors": 1, "cpus": 0.5},
    }
    mark = uuid.uuid4().hex
    killed_until_it_is_done(tmp_path, config, ["on its way"], seed=6, RAYSIM_TEST_MARK=mark)
    run = run_in(uri, tmp_path.name)
    assert run.data.tags["digest"] == whole.digest
    saved = checkpoint.read_latest(tmp_path / "ray")
    assert saved is not None and timeless(saved.facts["history"]) == timeless(whole.history)
    each_step_once(uri, run.info.run_id, saved.facts["history"])
    until(lambda: not processes_with_mark(mark), 60, f"still alive: {processes_with_mark(mark)}")


# -- told to end in a long round -------------------------------------------------------------------

SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"name": "sync", "cohort": 6},
    "kasync": {"name": "kasync", "k": 4, "concurrency": 10},
}


@pytest.mark.parametrize(
    ("executor", "schedule"),
    [
        ("inline", "kasync"),
        pytest.param("inline", "sync", marks=pytest.mark.long),
        pytest.param("ray", "kasync", marks=pytest.mark.long),
    ],
)
def test_what_was_done_is_kept_when_a_long_round_is_ended(
    uri, tmp_path, source, executor, schedule
):
    """SIGTERM in a round that would never end: exit 143, and it goes on from the very round that
    was done. The driver alone gets the signal: what ends Ray's processes as well may take the
    server's state with it."""
    rule, alarm, book = source("sleepy", SLEEPY), tmp_path / "alarm", tmp_path / "book"
    config = basic(tmp_path, uri) | sleepy(rule, alarm=str(alarm), book=str(book))
    config |= {"rounds": 30, "schedule": SCHEDULES[schedule], "checkpoint": {"every": 1000}}
    config["resources"] = {"executor": executor, "actors": 2, "cpus": 0.5}
    whole = raysim.run(
        {**config, **sleepy(rule)},
        resources={"executor": "inline"},
        run_dir=str(tmp_path / "whole"),
    )
    alarm.touch()
    book.touch()
    driver = raysim_(tmp_path, "run", written(tmp_path, config))
    until(lambda: book.stat().st_size > 120 or not driver.alive(), 120, driver.output)
    time.sleep(1)
    began = time.monotonic()
    os.kill(driver.pid, signal.SIGTERM)
    assert driver.wait() == 143, driver.output
    assert time.monotonic() - began < 60
    (done,) = checkpoint_rounds(tmp_path / "run")
    assert done > 3 and f"continues after round {done}" in driver.output.splitlines()[-1]
    alarm.unlink()
    book.write_text("")
    again = raysim_(tmp_path, "resume", tmp_path / "run")
    assert again.wait() == 0, again.output
    saved = checkpoint.read_latest(tmp_path / "run")
    assert saved is not None and timeless(saved.facts["history"]) == timeless(whole.history)
    left = sum(record["clients/used"] for record in whole.history[done + 1 :])
    assert len(book.read_text().split()) == left, "what was done is not done again"
    (run,) = (r for r in runs_in(uri, tmp_path.name) if r.info.run_id == saved.facts["run_id"])
    assert run.data.tags["digest"] == whole.digest
    each_step_once(uri, run.info.run_id, saved.facts["history"])


@pytest.mark.parametrize(
    ("later", "number"),
    [
        (0.1, signal.SIGINT),
        pytest.param(3.0, signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(1.5, signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(5.0, signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_a_signal_while_it_starts(uri, tmp_path, later, number):
    """While it imports, and while Ray and its actors start: no traceback, the right exit code, and
    it can go on."""
    config = basic(tmp_path, uri) | {
        "rounds": 5,
        "resources": {"executor": "ray", "actors": 2, "cpus": 0.5},
    }
    process = start("run", written(tmp_path, config), cwd=tmp_path)
    try:
        # Python itself has no handler of SIGTERM, and raysim installs that of SIGINT before it.
        until(lambda: catches(process.pid, signal.SIGTERM), 60, "no handler is installed")
        time.sleep(later)
        process.send_signal(number)
        output = process.communicate(timeout=180)[0]
    finally:
        kill(process)
        process.communicate()  # closes its pipe
    if process.returncode != 0:  # on a fast machine it may be over
        assert process.returncode == 128 + number and "Traceback" not in output, output
    if (tmp_path / "run" / "config.yaml").exists() and process.returncode:
        assert resume(tmp_path / "run", {"resources.executor": "inline"}).rounds == 5


# -- one process at a time -------------------------------------------------------------------------


def test_a_folder_at_work_is_refused_and_one_whose_process_died_is_taken_over(
    uri, tmp_path, source
):
    rule, alarm, book = source("sleepy", SLEEPY), tmp_path / "alarm", tmp_path / "book"
    config = basic(tmp_path, uri) | sleepy(rule, alarm=str(alarm), book=str(book))
    config |= {"rounds": 20, "checkpoint": {"every": 2}}
    whole = raysim.run({**config, **sleepy(rule)}, run_dir=str(tmp_path / "whole"))
    alarm.touch()
    book.touch()
    file = written(tmp_path, config)
    driver = raysim_(tmp_path, "run", file)
    until(lambda: book.stat().st_size > 120 or not driver.alive(), 120, driver.output)
    before = {
        p: p.stat().st_mtime_ns for p in checkpoint.checkpoints_folder(tmp_path / "run").rglob("*")
    }
    for arguments in (
        ("run", file),
        ("resume", tmp_path / "run"),
        ("resume", tmp_path / "run", "--fork", "rounds=40"),
    ):
        other = raysim_(tmp_path, *arguments)
        assert other.wait() == 2, other.output
        output = other.output.splitlines()[-1]
        assert re.search(
            rf"process {driver.pid} on {re.escape(platform.node())} is at work", output
        ), output
    assert driver.alive() and before == {
        p: p.stat().st_mtime_ns for p in checkpoint.checkpoints_folder(tmp_path / "run").rglob("*")
    }
    driver.signal(signal.SIGKILL)
    driver.wait()
    alarm.unlink()
    assert (tmp_path / "run" / lock.LOCK_FILE).exists()
    again = raysim_(tmp_path, "resume", tmp_path / "run")
    assert again.wait() == 0, again.output
    saved = checkpoint.read_latest(tmp_path / "run")
    assert saved is not None and timeless(saved.facts["history"]) == timeless(whole.history)
    assert not (tmp_path / "run" / lock.LOCK_FILE).exists()


def test_a_lock_of_another_machine_holds_while_it_is_touched(uri, tmp_path, monkeypatch):
    """Whether that process lives does not show here; a file that is old, and stays so, does."""
    monkeypatch.setattr(lock, "STALE_WATCH_S", 0.5)
    config = basic(tmp_path, uri) | {"rounds": 4}
    raysim.run(config)
    file = tmp_path / "run" / lock.LOCK_FILE
    file.write_text(json.dumps({"pid": 4711, "host": "elsewhere"}))
    with pytest.raises(raysim.errors.ConfigError, match=r"process 4711 on elsewhere .*is at work"):
        resume(tmp_path / "run", {"rounds": 6})
    assert json.loads(file.read_text())["host"] == "elsewhere"
    os.utime(file, (time.time() - 2 * lock.STALE_AFTER_S,) * 2)
    assert resume(tmp_path / "run", {"rounds": 6}).rounds == 6
    assert not file.exists()
