"""What must hold of runs whose processes died without a word, and of clocks that jump: MLflow tells
the truth."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from support.forked import Forked
from support.processes import client_of, run_in

from raysim.config.sections.storage import Tracking
from raysim.errors import ConfigError
from raysim.planning import doctor
from raysim.reports.runs import RunSource
from raysim.system import lock
from raysim.tracking import abandoned
from raysim.tracking.recorder import Clock, Recorder
from raysim.tracking.tracker import Tracker

pytestmark = pytest.mark.ray

HOURS = 5 * 3600

DYING = """
    import os, signal, sys, time
    from pathlib import Path
    from raysim.system import lock
    from raysim.config.sections.storage import Tracking
    from raysim.tracking import abandoned
    from raysim.tracking import spool_sender as tracking
    from raysim.tracking.tracker import Tracker
    folder = Path(sys.argv[3])
    folder.mkdir(parents=True)
    with lock.alone(folder):
        tracker = Tracker(Tracking(uri=sys.argv[1], experiment=sys.argv[2]), folder)
        tracker.start("run", {}, {"run_dir": str(folder)})
        for t in range(3):
            tracker.metrics({"accuracy": t / 3}, t)
        while tracker.pending:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def died(uri: str, tmp_path: Path) -> Path:
    """The folder of a run whose process was killed."""
    folder = tmp_path / "runs" / "x" / "run"
    process = Forked("-c", textwrap.dedent(DYING), uri, tmp_path.name, folder, cwd=tmp_path)
    assert process.wait() == -signal.SIGKILL, process.output
    assert run_in(uri, tmp_path.name).info.status == "RUNNING"
    return folder


def report(uri: str, experiment: str) -> list[str]:
    """What a report says of an experiment in which no run is finished."""
    messages: list[str] = []
    with pytest.raises(ConfigError, match="no run is finished"):
        RunSource([experiment], uri).finished(say=messages.append)
    return messages


def test_a_report_marks_a_run_whose_process_died(uri, tmp_path, died):
    """At the time of its last record. A second report has nothing to mark."""
    assert "1 run marked FAILED" in report(uri, tmp_path.name)[0]
    run = run_in(uri, tmp_path.name)
    last = max(
        json.loads(line)["time"] for line in (died / "spool.jsonl").read_text().splitlines()[:-2]
    )
    assert (run.info.status, run.info.end_time) == ("FAILED", last)
    assert "died without a word" in run.data.tags["error"]
    assert not (died / lock.LOCK_FILE).exists()
    assert "marked" not in report(uri, tmp_path.name)[0]


def test_what_a_process_had_not_sent_when_it_died_is_sent(uri, tmp_path, died):
    """It had recorded its end."""
    Recorder("", "", died).end("FINISHED")
    assert abandoned.finish_abandoned([died]) == [died]
    assert run_in(uri, tmp_path.name).info.status == "FINISHED"
    assert abandoned.finish_abandoned([died]) == []


def test_doctor_marks_the_runs_of_a_folder(uri, tmp_path, died, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good, output = doctor._check_runs()
    assert good and "raysim resume runs/x/run" in output
    assert run_in(uri, tmp_path.name).info.status == "FAILED"
    assert "none" in doctor._check_runs()[1]


@pytest.mark.parametrize("age", [0, HOURS])
def test_a_run_of_another_host_is_left_alone_while_it_is_touched(
    uri, tmp_path, died, monkeypatch, age
):
    """By a clock that is right, or hours behind; once nobody touches it any more, it is marked."""
    monkeypatch.setattr(lock, "STALE_WATCH_S", 1.0)
    file = died / lock.LOCK_FILE
    file.write_text(json.dumps({"pid": 4711, "host": "elsewhere"}))
    beating = textwrap.dedent(
        f"""
        import os, time
        while True:
            os.utime({str(file)!r}, (time.time() - {age},) * 2)
            time.sleep(0.1)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", beating])
    try:
        end = time.monotonic() + 60
        while age and time.time() - file.stat().st_mtime < age / 2:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert abandoned.finish_abandoned([died]) == []
        assert run_in(uri, tmp_path.name).info.status == "RUNNING"
    finally:
        process.kill()
        process.wait()
    os.utime(file, (time.time() - HOURS,) * 2)
    assert abandoned.finish_abandoned([died]) == [died]
    assert run_in(uri, tmp_path.name).info.status == "FAILED"


def test_a_run_that_lives_is_left_alone(uri, tmp_path, died):
    with lock.alone(died):
        assert abandoned.finish_abandoned([died]) == []
    assert run_in(uri, tmp_path.name).info.status == "RUNNING"


# -- clocks that jump ------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [HOURS, -HOURS])
def test_times_in_mlflow_go_on_evenly_when_the_clock_jumps(uri, tmp_path, monkeypatch, jump):
    """In the middle of a run, and between a run and its resumption."""
    wall, shift = time.time_ns, [0]
    monkeypatch.setattr(time, "time_ns", lambda: wall() + shift[0] * 10**9)
    settings = Tracking(uri=uri, experiment=tmp_path.name)
    began = wall() // 1_000_000
    tracker = Tracker(settings, tmp_path / "run")
    run_id = tracker.start("run", {}, {})
    for t in range(4):
        tracker.metrics({"loss": 1.0}, t)
        shift[0] = jump
    tracker.finish("KILLED")
    shift[0] = -HOURS
    again = Tracker(settings, tmp_path / "run")
    again.start("run", {}, {}, run_id=run_id)
    again.metrics({"loss": 1.0}, 4)
    again.finish("FINISHED")
    now = wall() // 1_000_000
    times = [m.timestamp for m in sorted(history(uri, run_id), key=lambda m: m.step)]
    info = run_in(uri, tmp_path.name).info
    assert len(times) == 5 and times == sorted(times)
    assert began <= info.start_time <= times[0] and times[-1] <= info.end_time <= now


def history(uri: str, run_id: str) -> list[Any]:
    return list(client_of(uri).get_metric_history(run_id, "loss"))


def test_a_clock_goes_on_where_an_earlier_process_was(monkeypatch):
    ahead = time.time_ns() // 1_000_000 + HOURS * 1000
    clock = Clock(ahead)
    assert ahead <= clock.now() <= clock.now() < ahead + 60_000
