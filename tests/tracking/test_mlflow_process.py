"""The process that calls MLflow: it is not noticed, it dies without a loss, and it stays behind
nobody."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.mlflow_thread import call_mlflow_in_a_process
from support.processes import client_of, until

from raysim.config.sections.storage import Tracking
from raysim.errors import RaysimError
from raysim.system.processes import Process
from raysim.tracking import spool_sender as tracking
from raysim.tracking.mlflow_process import connection
from raysim.tracking.mlflow_process.run_client import find_run
from raysim.tracking.store_errors import ProcessFailed, StoreError
from raysim.tracking.tracker import Tracker

pytestmark = pytest.mark.ray  # it starts and kills processes


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    call_mlflow_in_a_process(monkeypatch.setattr)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracking:
    monkeypatch.setattr(tracking, "FLUSH_INTERVAL_S", 0.05)
    return Tracking(uri=f"sqlite:///{tmp_path}/mlflow.db", experiment="process")


def steps(uri: str, run_id: str) -> list[int]:
    return sorted(m.step for m in client_of(uri).get_metric_history(run_id, "loss"))


def running() -> int:
    """Return the id of the process that calls MLflow for this one."""
    assert connection._process is not None
    return connection._process.popen.pid


@pytest.mark.parametrize("busy", [False, True])
def test_nothing_is_lost_when_it_is_killed(
    settings: Tracking, tmp_path: Path, caplog: pytest.LogCaptureFixture, busy: bool
) -> None:
    """Between two requests, or while it works on one."""
    tracker = Tracker(settings, tmp_path / "run")
    run_id = tracker.start("run", {"rounds": 40}, {})
    for t in range(20):
        tracker.metrics({"loss": float(t)}, t)
    until(lambda: not tracker.pending, 30, "not sent")
    killed = running()
    if busy:
        os.kill(killed, signal.SIGSTOP)
    else:
        os.kill(killed, signal.SIGKILL)
    tracker.metrics({"loss": 20.0}, 20)
    if busy:
        sent = threading.Event()
        assert not sent.wait(0.5) and tracker.pending
        os.kill(killed, signal.SIGKILL)
    for t in range(21, 40):
        tracker.metrics({"loss": float(t)}, t)
    tracker.tags({"after": "all"})
    tracker.finish("FINISHED")
    run = client_of(settings.uri).get_run(run_id)
    assert steps(settings.uri, run_id) == list(range(40))
    assert run.info.status == "FINISHED" and run.data.tags["after"] == "all"
    assert (tracker.run_id, tracker.pending) == (run_id, 0)
    assert running() != killed
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["the process that calls MLflow was started again: killed by signal 9"]


@pytest.mark.parametrize(
    ("program", "why"),
    [("/no/such/python", "cannot be started: .*No such file"), ("/bin/false", "exit code 1")],
)
def test_a_process_that_does_not_start_is_named(
    settings: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, why: str
) -> None:
    connection._end()  # the one of earlier tests
    monkeypatch.setattr(sys, "executable", program)
    connection.start()  # reports nothing
    with pytest.raises(RaysimError, match=rf"the process that calls MLflow .*{why}.*printed"):
        Tracker(settings, tmp_path / "run").start("run", {}, {})
    with pytest.raises(ProcessFailed):
        find_run(settings.uri, "0" * 32)
    connection._end()


def test_signals_of_a_terminal_do_not_end_it(settings: Tracking, tmp_path: Path) -> None:
    tracker = Tracker(settings, tmp_path / "run")
    run_id = tracker.start("run", {}, {})
    process = running()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(process, number)
    assert os.getpgid(process) != os.getpgid(0)
    tracker.metrics({"loss": 0.0}, 0)
    tracker.finish("FINISHED")
    assert running() == process and steps(settings.uri, run_id) == [0]


def test_trackers_of_this_process_share_it(settings: Tracking, tmp_path: Path) -> None:
    """At the same time, and one after the other."""
    first = Tracker(settings, tmp_path / "first")
    first.start("first", {}, {})
    process = running()
    second = Tracker(settings, tmp_path / "second")
    second.start("second", {}, {})
    for tracker in (first, second):
        tracker.finish("FINISHED")
        assert steps(settings.uri, tracker.run_id) == []
    third = Tracker(settings, tmp_path / "third")
    third.start("third", {}, {})
    third.finish("FINISHED")
    assert running() == process


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """The address of a server that refuses all requests, and the credentials that it got."""
    credentials: list[str] = []

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            credentials.append(self.headers["Authorization"])
            self.send_error(403)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}", credentials
        made.shutdown()


def test_variables_are_those_of_this_process(
    server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, credentials = server
    for token in ("one", "two"):
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", token)
        with pytest.raises(StoreError, match="403"):
            find_run(uri, "0" * 32)
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN")
    with pytest.raises(StoreError, match="403"):
        find_run(uri, "0" * 32)
    assert credentials == ["Bearer one", "Bearer two", None]


DRIVER = """
    import os, sys, time
    from pathlib import Path
    import raysim
    from raysim.tracking.mlflow_process import connection

    def progress(record):
        if record["round"] == 2:
            if "fork" in sys.argv and os.fork() == 0:
                time.sleep(60)  # with all open files
                os._exit(0)
            print(connection._process.popen.pid, "mlflow" in sys.modules, flush=True)
            time.sleep(60 if "wait" in sys.argv else 0)

    result = raysim.run(
        "quickstart", rounds=3, resources={"executor": "inline"}, progress=progress,
        tracking={"uri": "sqlite:///mlflow.db"}, **{"algorithm.weights": "samples"},
    )
    print(result.run_id, "mlflow" in sys.modules)
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(DRIVER), *arguments],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def test_a_tracked_run_does_not_import_mlflow(tmp_path: Path) -> None:
    driver = start(tmp_path)
    output, error = driver.communicate(timeout=120)
    assert driver.returncode == 0, error
    (process, during), (run_id, after) = (line.split() for line in output.splitlines())
    assert (during, after) == ("False", "False") and Process.at(int(process)) is None
    assert error == ""
    run = client_of(f"sqlite:///{tmp_path}/mlflow.db").get_run(run_id)
    assert run.info.status == "FINISHED" and "loss" in run.data.metrics


@pytest.mark.parametrize("forked", [False, True])
def test_a_killed_run_leaves_no_process(tmp_path: Path, forked: bool) -> None:
    """Also if it has forked processes that live on."""
    driver = start(tmp_path, "wait", *["fork"] * forked)
    try:
        assert driver.stdout is not None
        line = driver.stdout.readline()
        process = Process.at(int(line.split()[0]))
        assert process is not None, (line, driver.poll())
        libraries = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in libraries and "_raylet" not in libraries
        os.kill(driver.pid, signal.SIGKILL)
        until(lambda: not process.alive, 30, "it lives on")
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.communicate(timeout=30)
