"""What must hold while a real MLflow server is away: nothing is lost or told twice, and the run
does not wait."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support.forked import call
from support.mlflow_server import Server
from support.processes import basic, client_of, each_step_once, run_in, until
from support.programs import program

import raysim
from raysim.tracking import spool_sender as tracking

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"))
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def server(only: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """At work."""
    monkeypatch.setattr(tracking, "MAX_RETRY_PAUSE_S", 1.0)
    monkeypatch.setattr(tracking, "START_TIMEOUT_S", {"http": 60.0, "database": 60.0})
    if only.process is None:
        only.start()
    only.wait()
    return only


SLOW = program("mlflow_server_slow")


def test_a_server_that_goes_and_comes_back_loses_and_delays_nothing(
    server, tmp_path, source, caplog
):
    """It goes after round 20, and is started again after round 40; the run ends once it is heard of
    again."""
    config = basic(tmp_path, server.uri) | {
        "rounds": 80,
        "algorithm": f"{source('slow', SLOW)}:Slow",
    }
    last, gaps = time.monotonic(), {}

    def progress(record: dict[str, float]) -> None:
        nonlocal last
        gaps[int(record["round"])] = time.monotonic() - last
        match record["round"]:
            case 20:
                server.stop()
            case 40:
                server.start()
            case 75:
                server.wait()
                until(lambda: "tracking is back" in caplog.text, 60, caplog.text)
        last = time.monotonic()

    done = raysim.run(config, progress=progress)
    assert list(gaps) == list(range(81))
    usual = max(gaps[t] for t in range(3, 20))
    assert max(gaps[t] for t in range(21, 80)) < usual + 1
    run = client_of(server.uri).get_run(done.run_id)
    assert run.info.status == "FINISHED" and run.data.tags["digest"] == done.digest
    each_step_once(server.uri, done.run_id, done.history)
    files = {one.path for one in client_of(server.uri).list_artifacts(done.run_id)}
    assert {"history.csv", "parameters.safetensors"} <= files


def test_what_a_run_could_not_send_is_sent_afterwards(server, tmp_path):
    """Once: a second replay has nothing to send."""
    config = basic(tmp_path, server.uri) | {"rounds": 20}

    def progress(record: dict[str, float]) -> None:
        if record["round"] == 10:
            server.stop()

    done = raysim.run(config, progress=progress)
    code, output = call("tracking", "sync", tmp_path / "run", cwd=tmp_path)
    assert code == 1 and "cannot be sent" in output and "Traceback" not in output, output
    server.start()
    server.wait()
    code, output = call("tracking", "sync", tmp_path / "run", cwd=tmp_path)
    assert code == 0 and int(output.split()[0]) > 0, output
    code, output = call("tracking", "sync", tmp_path / "run", cwd=tmp_path)
    assert (code, output.strip()) == (0, "0 records sent")
    run = run_in(server.uri, tmp_path.name)
    assert run.info.status == "FINISHED" and run.data.tags["digest"] == done.digest
    each_step_once(server.uri, run.info.run_id, done.history)


SECRET = "correct-horse-battery"


def test_a_password_lands_nowhere_on_the_server(server, only, tmp_path, caplog, capfd, monkeypatch):
    """Not in parameters, tags or files, of a run or of its fork; nor in what is said."""
    monkeypatch.chdir(tmp_path)
    config = basic(tmp_path, f"http://user:{SECRET}@127.0.0.1:{server.port}") | {"rounds": 4}
    done = raysim.run(config)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "user")  # no run keeps them in its folder
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRET)
    fork = raysim.fork("run", {"local.lr": 0.2, "rounds": 6})
    for run_id in (done.run_id, fork.run_id):
        run = client_of(server.uri).get_run(run_id)
        facts = [*run.data.params.items(), *run.data.tags.items()]
        assert run.data.params["tracking.uri"].endswith(f"127.0.0.1:{server.port}")
        assert not [fact for fact in facts if SECRET in "".join(fact)]
    files = [path for path in (only.folder / "artifacts").rglob("*") if path.is_file()]
    assert any(path.name == "config.yaml" for path in files)
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    output = "".join(capfd.readouterr()) + caplog.text
    assert SECRET not in output
