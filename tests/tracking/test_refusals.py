"""A store that takes records but no files, a run that was deleted there, and a project that moved:
no record is lost, and each is reported once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from mlflow.exceptions import MlflowException
from support.processes import client_of as client
from support.processes import until

from raysim.config.sections.storage import Tracking
from raysim.errors import RaysimError
from raysim.tracking import spool_sender as tracking
from raysim.tracking.late_sending import replay_spool
from raysim.tracking.mlflow_process import store
from raysim.tracking.mlflow_process.stored_run import StoredRun
from raysim.tracking.recorder import Recorder
from raysim.tracking.spool import Tail
from raysim.tracking.spool_sender import Writer
from raysim.tracking.tracker import Tracker


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracking:
    monkeypatch.setattr(tracking, "FLUSH_INTERVAL_S", 0.05)
    return Tracking(uri=f"sqlite:///{tmp_path}/store/mlflow.db", experiment="trouble")


def wait_for(condition: Any) -> None:
    until(condition, 30, "it did not happen in time")


def steps(uri: str, run_id: str) -> list[int]:
    return sorted(m.step for m in client(uri).get_metric_history(run_id, "loss"))


def train(tracker: Tracker, folder: Path, rounds: range = range(5)) -> None:
    """Track a file, as a run does at its start, and then metrics."""
    (folder / "requirements.txt").write_text("torch\n")
    tracker.artifact(folder / "requirements.txt")
    for t in rounds:
        tracker.metrics({"loss": float(t)}, t)


@pytest.fixture(params=["not writable", ModuleNotFoundError("No module named 'boto3'"), "500"])
def refused(
    request: pytest.FixtureRequest, settings: Tracking, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.MonkeyPatch]:
    """Let the store refuse all files until the patch is undone."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "not writable":
            folder = Path(settings.uri[10:]).parent / "mlartifacts"
            folder.parent.mkdir()
            folder.write_text("a file in the place of the folder")
            yield patch
            return
        error = request.param
        if error == "500":
            error = OSError("500 Server Error for url: http://…/api/2.0/mlflow-artifacts")

        def refuse(*arguments: object) -> None:
            raise error

        kind = type(client(settings.uri))
        patch.setattr(kind, "log_artifact", refuse)
        patch.setattr(kind, "log_artifacts", refuse)
        yield patch


def test_metrics_and_status_arrive_whatever_files_do(
    settings: Tracking, tmp_path: Path, refused: pytest.MonkeyPatch, caplog
) -> None:
    tracker = Tracker(settings, tmp_path / "run")
    run_id = tracker.start("run", {"rounds": 5}, {"who": "me"})
    train(tracker, tmp_path / "run")
    tracker.artifact(tmp_path / "run" / "requirements.txt", "again")
    tracker.finish("FINISHED")
    run = client(settings.uri).get_run(run_id)
    assert steps(settings.uri, run_id) == list(range(5)) and run.info.status == "FINISHED"
    assert run.data.params == {"rounds": "5"} and run.data.tags["who"] == "me"
    assert "tracking is down" not in caplog.text
    assert caplog.text.count("takes no files") == 1
    assert "2 records were not sent" in caplog.text and "raysim tracking sync" in caplog.text

    with pytest.raises(RaysimError, match=r"2 of 2 records still cannot be sent.*artifact store"):
        replay_spool(tmp_path / "run")
    assert Tail(tmp_path / "run").pending == 2
    refused.undo()
    if (place := tmp_path / "store" / "mlartifacts").is_file():
        place.unlink()
    assert replay_spool(tmp_path / "run") == 2 and replay_spool(tmp_path / "run") == 0
    files = {file.path for file in client(settings.uri).list_artifacts(run_id)}
    assert files == {"requirements.txt", "again"}


def test_a_connection_that_is_lost_is_no_refusal(
    settings: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    """The file is sent again; MLflow gives the lost connection as an error of its own."""
    kind = type(client(settings.uri))
    send, lost = kind.log_artifact, [requests.ConnectionError("reset by peer")]

    def log_artifact(*arguments: Any) -> None:
        if lost:
            try:
                raise lost.pop()
            except requests.ConnectionError as error:
                raise MlflowException(f"API request failed with exception {error}") from error
        send(*arguments)

    monkeypatch.setattr(kind, "log_artifact", log_artifact)
    (tmp_path / "run").mkdir()
    tracker = Tracker(settings, tmp_path / "run")
    run_id = tracker.start("run", {}, {})
    (tmp_path / "run" / "notes.txt").write_text("notes")
    tracker.artifact(tmp_path / "run" / "notes.txt")
    tracker.finish("FINISHED")
    assert not lost and "takes no files" not in caplog.text
    assert [file.path for file in client(settings.uri).list_artifacts(run_id)] == ["notes.txt"]


def test_a_name_that_the_store_refuses_costs_no_other_metric(
    settings: Tracking, tmp_path: Path, caplog
) -> None:
    tracker = Tracker(settings, tmp_path / "run")
    run_id = tracker.start("run", {}, {})
    names = "..x", "layers//norm", "a+b", "a*b", "../y", ".", "loss"
    tracker.metrics({name: float(i) for i, name in enumerate(names)}, 0)
    tracker.finish("FINISHED")
    kept = {"layers/norm": 1, "a_b": 2, "a_b_": 3, "y": 4, "_": 5, "loss": 6}
    assert client(settings.uri).get_run(run_id).data.metrics == kept
    assert caplog.text.count("refuses metrics") == 1 and "'..x'" in caplog.text


def test_a_file_that_a_resumed_run_writes_once_more_is_sent_at_its_end(
    settings: Tracking, tmp_path: Path, caplog
) -> None:
    unsent = Recorder(settings.uri, settings.experiment, tmp_path / "run")
    key = unsent.start("run", {}, {})
    train(unsent, tmp_path / "run")  # pyright: ignore[reportArgumentType]
    unsent.close()
    (tmp_path / "run" / "requirements.txt").unlink()
    tracker = Tracker(settings, tmp_path / "run")
    run_id = tracker.start("run", {}, {}, run_id=key)
    wait_for(lambda: tracker.pending == 1)
    (tmp_path / "run" / "requirements.txt").write_text("torch\n")
    tracker.finish("FINISHED")
    files = client(settings.uri).list_artifacts(run_id)
    assert [file.path for file in files] == ["requirements.txt"]
    assert not tracker.pending and "refuses" not in caplog.text


def test_files_of_a_sweep_block_no_metrics(settings: Tracking, tmp_path: Path, refused) -> None:
    """The writer sends the records of all trials."""
    recorders = [Recorder(settings.uri, settings.experiment, tmp_path / name) for name in "ab"]
    writer = Writer(settings.uri, settings.experiment)
    for recorder in recorders:
        recorder.start("trial", {}, {})
        train(recorder, recorder._spool.path.parent)  # pyright: ignore[reportArgumentType]
        recorder.finish("FINISHED")
        writer.follow(recorder._spool.path.parent)
    writer.finish()
    for name in "ab":
        tail = Tail(tmp_path / name)
        assert tail.pending == 1 and tail.run_id
        assert steps(settings.uri, tail.run_id) == list(range(5))
        assert client(settings.uri).get_run(tail.run_id).info.status == "FINISHED"


def test_a_server_that_names_a_local_folder_gets_no_file(tmp_path: Path, monkeypatch) -> None:
    """It could have files written anywhere on this machine."""
    settings = Tracking(uri=f"sqlite:///{tmp_path}/mlflow.db", experiment="lies")
    answered = (tmp_path / "elsewhere").as_uri()
    monkeypatch.setattr(store, "artifact_location", lambda uri: answered)
    monkeypatch.setattr(StoredRun, "is_server", True)
    tracker = Tracker(settings, tmp_path / "run")
    run_id = tracker.start("run", {}, {})
    train(tracker, tmp_path / "run")
    tracker.finish("FINISHED")
    assert not (tmp_path / "elsewhere").exists()
    assert steps(settings.uri, run_id) == list(range(5)) and tracker.pending == 1


@pytest.mark.parametrize("deleted", ["run", "experiment"])
def test_records_of_a_deleted_run_are_kept_and_sent_when_it_is_restored(
    settings: Tracking, tmp_path: Path, deleted: str, caplog
) -> None:
    tracker = Tracker(settings, tmp_path / "run")
    run_id = tracker.start("run", {}, {})
    train(tracker, tmp_path / "run")
    wait_for(lambda: not tracker.pending)
    mlflow = client(settings.uri)
    experiment = mlflow.get_run(run_id).info.experiment_id
    mlflow.delete_run(run_id) if deleted == "run" else mlflow.delete_experiment(experiment)
    for t in range(5, 9):
        tracker.metrics({"loss": float(t)}, t)
        wait_for(lambda: tracker._writer.error)
    tracker.finish("FINISHED")
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 2, lines  # once in the middle, once at the end
    assert f"mlflow {deleted}s restore" in lines[0] and "refuses" not in caplog.text
    assert "5 records were not sent" in lines[1] and "--new-run" in lines[1]
    with pytest.raises(RaysimError, match=r"5 of 5 records.*restore"):
        replay_spool(tmp_path / "run")
    mlflow.restore_run(run_id) if deleted == "run" else mlflow.restore_experiment(experiment)
    assert replay_spool(tmp_path / "run") == 5
    assert steps(settings.uri, run_id) == list(range(9))
    assert mlflow.get_run(run_id).info.status == "FINISHED"


def test_a_deleted_run_is_replaced_by_a_new_one(settings: Tracking, tmp_path: Path) -> None:
    """With everything, also what the former run had; a resumed run finds the new one."""
    tracker = Tracker(settings, tmp_path / "run")
    old = tracker.start("run", {"rounds": 5}, {})
    train(tracker, tmp_path / "run")
    tracker.finish("KILLED")
    again = Tracker(settings, tmp_path / "run")
    again.start("run", {"rounds": 7}, {}, run_id=old)
    again.metrics({"loss": 5.0}, 5)
    again.finish("KILLED")
    client(settings.uri).delete_run(old)
    assert replay_spool(tmp_path / "run", to_a_new_run=True) > 5
    new = Tail(tmp_path / "run").run_id
    assert new and new != old and steps(settings.uri, new) == list(range(6))
    resumed = Tracker(settings, tmp_path / "run")
    assert resumed.start("run", {"rounds": 7}, {}, run_id=old) == new
    resumed.metrics({"loss": 6.0}, 6)
    resumed.finish("FINISHED")
    run = client(settings.uri).get_run(new)
    assert steps(settings.uri, new) == list(range(7)) and run.info.status == "FINISHED"


def test_a_moved_project_keeps_its_files_together(tmp_path: Path, caplog) -> None:
    """New files go to the new place, and MLflow finds the old ones there."""
    before, after = tmp_path / "before", tmp_path / "after"
    uri = f"sqlite:///{before}/mlflow.db"
    tracker = Tracker(Tracking(uri=uri, experiment="sweep"), before / "runs" / "first")
    first = tracker.start("first", {}, {})
    train(tracker, before / "runs" / "first")
    tracker.finish("FINISHED")
    unsent = Recorder(uri, "sweep", before / "runs" / "second")
    unsent.start("second", {}, {})
    train(unsent, before / "runs" / "second")  # pyright: ignore[reportArgumentType]
    unsent.finish("FINISHED")
    before.rename(after)
    uri = f"sqlite:///{after}/mlflow.db"
    tracker = Tracker(Tracking(uri=uri, experiment="sweep"), after / "runs" / "third")
    third = tracker.start("third", {}, {})
    train(tracker, after / "runs" / "third")
    tracker.finish("FINISHED")
    assert replay_spool(after / "runs" / "second") > 5  # into the moved database
    assert not before.exists()
    second = Tail(after / "runs" / "second").run_id
    assert second
    for run_id in (first, second, third):
        assert steps(uri, run_id) == list(range(5))
        assert [file.path for file in client(uri).list_artifacts(run_id)] == ["requirements.txt"]
        assert (after / "mlartifacts" / run_id / "artifacts" / "requirements.txt").is_file()
    assert caplog.text.count("was moved") == 1
