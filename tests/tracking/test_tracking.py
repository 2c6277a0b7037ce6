"""What must hold of tracking: every step arrives once, the engine never waits, and nothing is lost
by a crash.

All databases of MLflow here are one (its making takes seconds); each test has its own experiment in
it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysim.config.sections.storage import Tracking
from raysim.config.tracking_uri import absolute_uri
from raysim.errors import ConfigError, RaysimError
from raysim.runs.artifacts.plots import plot_learning_curve
from raysim.tracking import charts, mlflow_client
from raysim.tracking import spool_sender as tracking
from raysim.tracking.late_sending import replay_spool
from raysim.tracking.recorder import flatten_parameters
from raysim.tracking.spool import Spool
from raysim.tracking.tracker import Tracker


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('a folder')}/mlflow.db"


@pytest.fixture
def settings(
    database: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Tracking:
    monkeypatch.setattr(tracking, "FLUSH_INTERVAL_S", 0.05)
    return Tracking(uri=database, experiment=request.node.name)


@pytest.fixture
def nowhere() -> Iterator[str]:
    """The address of a server that is dead: its port is taken, and nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def client(uri: str) -> Any:
    return mlflow_client.import_mlflow(uri).MlflowClient(tracking_uri=uri)


def history(uri: str, run_id: str, key: str) -> list[tuple[int, float]]:
    """What MLflow has of a metric: (step, value), by step, repetitions and all."""
    return sorted((m.step, m.value) for m in client(uri).get_metric_history(run_id, key))


def steps(uri: str, run_id: str, key: str) -> list[int]:
    return [step for step, _ in history(uri, run_id, key)]


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def python(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


class Outage:
    """A server that fails: calls raise before or, where `late`, after they took effect (the answer
    is lost)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
        self.down, self.late, self.calls = False, False, 0
        self.released, self.was_released = threading.Event(), True
        self.released.set()
        mlflow = type(client(uri))
        for name in ("create_run", "get_run", "log_batch", "get_metric_history", "set_terminated"):
            monkeypatch.setattr(mlflow, name, self.failing(getattr(mlflow, name)))

    def failing(self, call: Any) -> Any:
        def attempt(*arguments: Any, **options: Any) -> Any:
            if self.down:
                self.calls += 1
                if self.calls == 1:  # whoever waits for the server cannot release it
                    self.was_released = self.released.wait(60)
                if self.late:
                    call(*arguments, **options)
                raise ConnectionError("connection reset by peer")
            return call(*arguments, **options)

        return attempt


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch, database: str) -> Outage:
    return Outage(monkeypatch, database)


def test_everything_arrives(settings: Tracking, tmp_path: Path) -> None:
    tracker = Tracker(settings, tmp_path / "run")
    params = {"rounds": 30, "local": {"lr": [[0, 0.1]], "max_grad_norm": None}, "name": "x" * 7000}
    params |= {f"many{i}": i for i in range(250)}
    run_id = tracker.start("a run", params, {"who": "me"})
    assert tracker.run_id == run_id
    for t in range(30):
        tracker.metrics({"accuracy": t / 30, "loss at (t)": 1.0}, t)
    tracker.metrics({f"wide{i}": float(i) for i in range(2500)}, 0)
    tracker.inputs("digits", "d" * 64, "https://example.org/digits", "training", {"examples": 1797})
    (tmp_path / "model.txt").write_text("weights")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "part").write_text("part")
    tracker.artifact(tmp_path / "model.txt", "model")
    tracker.artifact(tmp_path / "folder", "all")
    tracker.tags({"digest": "abc"})
    tracker.finish("FINISHED")
    assert not tracker.pending

    mlflow = client(settings.uri)
    run = mlflow.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "a run")
    view = json.loads(mlflow.get_experiment(run.info.experiment_id).tags[charts.VIEW_TAG])
    assert [chart["metricKey"] for chart in view["compareRunCharts"]][:2] == ["accuracy", "loss"]
    assert history(settings.uri, run_id, "accuracy") == [(t, t / 30) for t in range(30)]
    assert steps(settings.uri, run_id, "loss at _t_") == list(range(30))
    assert run.data.metrics["wide2499"] == 2499
    assert (
        run.data.params["local.lr"] == "[[0, 0.1]]"
        and run.data.params["local.max_grad_norm"] == "null"
    )
    assert len(run.data.params) == 254 and len(run.data.params["name"]) == 6000
    assert run.data.tags["who"] == "me" and run.data.tags["digest"] == "abc"
    (given,) = run.inputs.dataset_inputs
    assert (given.dataset.name, given.dataset.digest) == ("digits", "d" * 36)
    assert json.loads(given.dataset.profile) == {"examples": 1797}
    assert given.tags[0].value == "training"
    kept = (
        Path(settings.uri.removeprefix("sqlite:///")).parent / "mlartifacts" / run_id / "artifacts"
    )
    assert (kept / "model" / "model.txt").read_text() == "weights"
    assert (kept / "all" / "part").read_text() == "part"


def test_not_finite(settings: Tracking, tmp_path: Path) -> None:
    tracker = Tracker(settings, tmp_path)
    run_id = tracker.start("run", {}, {})
    for t, value in enumerate([1.0, math.nan, math.inf, -math.inf, 2.0]):
        tracker.metrics({"loss": value}, t)
    tracker.finish("FAILED")
    values = [value for _, value in history(settings.uri, run_id, "loss")]
    assert (
        values[0] == 1
        and math.isnan(values[1])
        and values[2] > 1e308
        and values[3] < -1e308
        and values[4] == 2
    )
    assert client(settings.uri).get_run(run_id).info.status == "FAILED"


def test_killed_and_reopened(settings: Tracking, tmp_path: Path) -> None:
    """A resumed run repeats the rounds since its checkpoint: MLflow has them once, with the first
    values."""
    tracker = Tracker(settings, tmp_path)
    run_id = tracker.start("run", {"rounds": 10, "seed": 1}, {})
    for t in range(10):
        tracker.metrics({"loss": float(t), "seconds": 0.1}, t)
    tracker.finish("KILLED")
    tracker.finish("FINISHED")
    with pytest.raises(RuntimeError, match="finished"):
        tracker.metrics({"loss": 0.0}, 10)
    assert client(settings.uri).get_run(run_id).info.status == "KILLED"

    again = Tracker(settings, tmp_path)
    assert again.start("run", {"rounds": 20, "seed": 1}, {}, run_id=run_id) == run_id
    wait_for(lambda: not again.pending)
    assert client(settings.uri).get_run(run_id).info.status == "RUNNING"
    for t in range(6, 20):
        again.metrics({"loss": float(t), "seconds": 0.2}, t)
    again.finish("FINISHED")
    run = client(settings.uri).get_run(run_id)
    assert history(settings.uri, run_id, "loss") == [(t, float(t)) for t in range(20)]
    assert history(settings.uri, run_id, "seconds") == [
        (t, 0.1 if t < 10 else 0.2) for t in range(20)
    ]
    assert run.data.params["rounds"] == "10" and run.data.tags["resumed.rounds"] == "20"
    assert run.info.status == "FINISHED"


def test_unknown_run(settings: Tracking, tmp_path: Path) -> None:
    with pytest.raises(RaysimError, match=r"tracking\.uri.*no run 0000.*tracking\.required=false"):
        Tracker(settings, tmp_path).start("run", {}, {}, run_id="0000")


def test_deleted_experiment(settings: Tracking, tmp_path: Path) -> None:
    mlflow = client(settings.uri)
    mlflow.delete_experiment(mlflow.create_experiment(settings.experiment))
    with pytest.raises(
        RaysimError, match=r"tracking\.experiment.*deleted.*mlflow experiments restore"
    ):
        Tracker(settings, tmp_path).start("run", {}, {})


@pytest.mark.parametrize("late", [False, True])
def test_server_dies_in_the_middle(
    settings: Tracking, tmp_path: Path, outage: Outage, caplog: pytest.LogCaptureFixture, late: bool
) -> None:
    tracker = Tracker(settings, tmp_path)
    run_id = tracker.start("run", {}, {})
    outage.late = late
    outage.released.clear()
    for t in range(300):
        outage.down = 100 <= t < 200
        if t in (100, 200):
            wait_for(lambda: not tracker.pending or outage.calls)
        if t == 199:
            wait_for(lambda: outage.calls > 1)
        tracker.metrics({"loss": t / 7}, t)
        if t == 150:
            outage.released.set()
    tracker.tags({"after": "all"})
    tracker.finish("FINISHED")
    assert history(settings.uri, run_id, "loss") == [(t, t / 7) for t in range(300)]
    assert client(settings.uri).get_run(run_id).data.tags["after"] == "all"
    assert not tracker.pending
    assert outage.was_released, "a record waited for the server"
    lines = [r.getMessage() for r in caplog.records if r.name == "raysim.tracking"]
    assert [line[:16] for line in lines] == ["tracking is down", "tracking is back"]
    assert "connection reset by peer" in lines[0] and f"{outage.calls} failed attempts" in lines[1]


@pytest.mark.parametrize("late", [False, True])
def test_server_stays_down_and_replay(
    settings: Tracking, tmp_path: Path, outage: Outage, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, late: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(tracking, "DRAIN_TIMEOUT_S", {"up": 1.0, "down": 0.5})
    tracker = Tracker(settings, tmp_path)
    run_id = tracker.start("run", {}, {})
    for t in range(50):
        tracker.metrics({"loss": float(t)}, t)
        if t == 25:
            wait_for(lambda: not tracker.pending)
            outage.down, outage.late = True, late
    tracker.finish("FINISHED")
    assert tracker.pending == 25  # 24 rounds and the end
    assert f"25 records were not sent to {settings.uri}" in caplog.text
    assert f"raysim tracking sync {tmp_path}" in caplog.text
    with pytest.raises(RaysimError, match="25 of 25 records still cannot be sent"):
        replay_spool(tmp_path)
    outage.down = False
    assert replay_spool(tmp_path) == 25
    assert replay_spool(tmp_path) == 0
    assert steps(settings.uri, run_id, "loss") == list(range(50))
    run = client(settings.uri).get_run(run_id)
    assert run.info.status == "FINISHED" and run.info.end_time >= run.info.start_time


@pytest.mark.ray
def test_crash_before_acknowledgement(settings: Tracking, tmp_path: Path) -> None:
    """Killed after a batch arrived and before it was noted: the mark is older than the truth, or
    torn, or gone."""
    crash = python(
        """
        import os, signal, sys, time
        from pathlib import Path
        from raysim.config.sections.storage import Tracking
        from raysim.tracking import mlflow_client
        from raysim.tracking import spool_sender as tracking
        from raysim.tracking.tracker import Tracker
        from raysim.tracking.spool import Spool
        tracking.FLUSH_INTERVAL_S = 0.05
        tracker = Tracker(Tracking(uri=sys.argv[1], experiment=sys.argv[2]), Path(sys.argv[3]))
        print(tracker.start("run", {"a": 1}, {}), flush=True)
        for t in range(100):
            tracker.metrics({"loss": float(t)}, t)
            if t == 60:
                while tracker.pending:
                    time.sleep(0.01)
                Spool.acknowledge = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(20)
        """,
        settings.uri, settings.experiment, tmp_path,
    )  # fmt: skip
    out, err = crash.communicate(timeout=30)
    assert crash.returncode == -signal.SIGKILL, err
    run_id = out.strip()
    mark = json.loads((tmp_path / "spool.sent").read_text())
    assert mark == {"records": 64, "run_id": run_id}  # start, params, tags, 61 rounds
    assert max(steps(settings.uri, run_id, "loss")) > 60  # something arrived that was not noted
    with (tmp_path / "spool.jsonl").open("ab") as spool:
        spool.write(b'{"kind": "metrics", "st')
    assert replay_spool(tmp_path) == 39
    assert steps(settings.uri, run_id, "loss") == list(range(100))
    (tmp_path / "spool.sent").write_text('{"rec')
    assert replay_spool(tmp_path) == 103
    (tmp_path / "spool.sent").unlink()
    assert replay_spool(tmp_path) == 103
    assert steps(settings.uri, run_id, "loss") == list(range(100))


def test_a_database_that_was_deleted_gets_the_whole_run_again(tmp_path: Path) -> None:
    """In the middle of the run, say; what was sent until then is not lost either."""
    uri = f"sqlite:///{tmp_path}/own.db"
    tracker = Tracker(Tracking(uri=uri), tmp_path / "run")
    tracker.start("run", {}, {})
    for t in range(5):
        tracker.metrics({"loss": float(t)}, t)
    tracker.finish("FINISHED")
    (tmp_path / "own.db").unlink()
    code = "import sys; from raysim.tracking.late_sending import replay_spool; print(*(replay_spool(sys.argv[1]) for _ in range(2)))"
    said, error = python(code, tmp_path / "run").communicate(timeout=100)
    assert said.split() == ["9", "0"], error  # start, params, tags, 5 rounds, finish
    with contextlib.closing(sqlite3.connect(tmp_path / "own.db")) as database:
        assert database.execute("select status from runs").fetchall() == [("FINISHED",)]
        assert database.execute("select step, value from metrics").fetchall() == [
            (t, float(t)) for t in range(5)
        ]


def test_a_folder_is_free_as_soon_as_a_run_that_never_began_is_over(
    tmp_path: Path, monkeypatch
) -> None:
    """Also while MLflow is still being imported."""
    imported = threading.Event()
    monkeypatch.setattr(mlflow_client, "import_mlflow", lambda uri: imported.wait(30))
    monkeypatch.setitem(tracking.START_TIMEOUT_S, "database", 0.05)  # for the import
    first = Tracker(Tracking(uri=f"sqlite:///{tmp_path}/mlflow.db"), tmp_path)
    first.finish("FAILED")
    assert first._writer._thread.is_alive(), "MLflow is still being imported"
    second = Tracker(Tracking(uri=f"sqlite:///{tmp_path}/mlflow.db"), tmp_path)
    imported.set()
    second.finish("FAILED")


@pytest.mark.ray
def test_two_processes_on_a_fresh_database(tmp_path: Path) -> None:
    """Both start from a relative path, at once, in one folder, and leave the terminal clean."""
    code = """
        import sys
        from pathlib import Path
        from raysim.config.sections.storage import Tracking
        from raysim.tracking.tracker import Tracker
        assert "mlflow" not in sys.modules
        tracker = Tracker(Tracking(), Path(sys.argv[1]))
        print(tracker.start(sys.argv[1], {}, {}))
        tracker.metrics({"loss": 1.0}, 0)
        tracker.finish("FINISHED")
        assert not tracker.pending
    """
    paths = {**os.environ, "PYTHONPATH": str(Path(tracking.__file__).parents[1])}
    both = [python(code, name, cwd=tmp_path, env=paths) for name in ("one", "two")]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert [err for _, err in said] == ["", ""]
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert [steps(uri, out.strip(), "loss") for out, _ in said] == [[0], [0]]


def test_dead_server_when_required(nowhere: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    address = nowhere.replace("//", "//me:secret@")
    with pytest.raises(RaysimError) as caught:
        Tracker(Tracking(uri=address), tmp_path).start("run", {}, {})
    assert time.monotonic() - begin < 10
    message = str(caught.value)
    assert caught.value.exit_code == 1 and "Traceback" not in message and "secret" not in message
    assert all(
        part in message
        for part in ("tracking.uri", nowhere, "mlflow server", "tracking.required=false")
    )
    assert (
        tmp_path / "spool.jsonl"
    ).read_text() == ""  # a run that never was leaves nothing to replay


def test_silent_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes the connection and never answers."""
    monkeypatch.setitem(tracking.START_TIMEOUT_S, "http", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        with pytest.raises(RaysimError, match=r"no answer within 0\.5 s"):
            Tracker(Tracking(uri=f"http://127.0.0.1:{silent.getsockname()[1]}"), tmp_path).start(
                "run", {}, {}
            )
        assert time.monotonic() - begin < 5


def test_dead_server_when_not_required(
    nowhere: str,
    settings: Tracking,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run starts at once, under a provisional id by which it is known ever after."""
    monkeypatch.setitem(tracking.DRAIN_TIMEOUT_S, "down", 0.2)
    away = Tracking(uri=nowhere, experiment=settings.experiment, required=False)
    begin = time.monotonic()
    tracker = Tracker(away, tmp_path)
    provisional = tracker.start("run", {"a": 1}, {"b": "2"})
    assert time.monotonic() - begin < 10
    for t in range(5):
        tracker.metrics({"loss": float(t)}, t)
    tracker.finish("FINISHED")
    assert tracker.run_id == provisional and tracker.pending == 9
    assert "tracking is down" in caplog.text and "9 records were not sent" in caplog.text
    tracker._writer._thread.join(10)

    again = Tracker(settings, tmp_path)  # the server is back, elsewhere
    run_id = again.start("run", {"a": 1}, {}, run_id=provisional)
    for t in range(3, 8):
        again.metrics({"loss": float(t)}, t)
    again.finish("FINISHED")
    assert run_id == again.run_id != provisional
    assert steps(settings.uri, run_id, "loss") == list(range(8))
    run = client(settings.uri).get_run(run_id)
    assert run.data.params == {"a": "1"} and run.data.tags["b"] == "2"


def test_server_comes_late(settings: Tracking, tmp_path: Path, outage: Outage) -> None:
    outage.down = outage.late = (
        True  # even the run is made, and the answer lost: it must not be made twice
    )
    tracker = Tracker(settings.model_copy(update={"required": False}), tmp_path)
    provisional = tracker.start("run", {}, {})
    tracker.metrics({"loss": 1.0}, 0)
    outage.down = False
    wait_for(lambda: not tracker.pending)
    assert tracker.run_id != provisional
    tracker.finish("FINISHED")
    mlflow = client(settings.uri)
    (run,) = mlflow.search_runs([mlflow.get_experiment_by_name(settings.experiment).experiment_id])
    assert run.info.run_id == tracker.run_id and run.data.metrics == {"loss": 1.0}


def test_refused_records_are_named_and_the_rest_goes_on(
    settings: Tracking, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker(settings, tmp_path)
    run_id = tracker.start("run", {}, {})
    for t in range(6):
        tracker.metrics({"loss" if t != 3 else "..loss": 1.0}, t)
    tracker.artifact(tmp_path / "absent")
    tracker.finish("FINISHED")
    assert steps(settings.uri, run_id, "loss") == [0, 1, 2, 4, 5]
    assert not tracker.pending and caplog.text.count("refuses ") == 2
    assert "refuses metrics" in caplog.text and "absent no longer exists" in caplog.text


def test_full_disk(
    settings: Tracking,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracker = Tracker(settings, tmp_path)
    run_id = tracker.start("run", {}, {})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for t in range(30):
        if t == 10:
            monkeypatch.setattr(Spool, "_put", full)
        if t == 20:
            monkeypatch.undo()
        tracker.metrics({"loss": 1.0}, t)
    tracker.finish("FINISHED")
    assert steps(settings.uri, run_id, "loss") == list(range(30))
    assert caplog.text.count("kept in memory") == 1


def test_one_process_at_a_time(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    with pytest.raises(RaysimError, match="another process"):
        replay_spool(tmp_path)
    spool.close()
    assert replay_spool(tmp_path) == 0
    with pytest.raises(RaysimError, match=r"no spool\.jsonl"):
        replay_spool(tmp_path / "elsewhere")


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_uri("sqlite:///mlflow.db") == f"sqlite:///{tmp_path}/mlflow.db"
    assert absolute_uri("sqlite:////a/b.db?timeout=3") == "sqlite:////a/b.db?timeout=3"
    assert absolute_uri("http://host:5000/") == "http://host:5000"
    for wrong in (
        "sqlite://mlflow.db",
        "sqlite:///",
        "sqlite:///:memory:",
        "mlruns",
        "file:///mlruns",
    ):
        with pytest.raises(ConfigError, match=r"tracking\.uri"):
            absolute_uri(wrong)


def test_flatten() -> None:
    nested = {"a": {"b": {"c": 1}, "d": None}, "e": [1, "x"], "f": "text", "g": True, "h": {}}
    assert flatten_parameters(nested) == {
        "a.b.c": "1",
        "a.d": "null",
        "e": '[1, "x"]',
        "f": "text",
        "g": "true",
        "h": "{}",
    }


@pytest.mark.usefixtures("pictures")
def test_learning_curve(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    rows = [
        {"round": float(t), "loss": 1 / (t + 1)} | ({"accuracy": t / 10} if t % 2 else {})
        for t in range(10)
    ]
    plot_learning_curve(rows, path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    plot_learning_curve([], path)  # a run of which nothing was evaluated
