"""Stores that cannot be used: each error says what to do about this one."""

from __future__ import annotations

import re
import resource
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.processes import basic, client_of

import raysim
from raysim.config.sections.storage import Tracking
from raysim.errors import RaysimError
from raysim.tracking import mlflow_client, store_errors
from raysim.tracking import spool_sender as tracking
from raysim.tracking.late_sending import replay_spool
from raysim.tracking.mlflow_process import store
from raysim.tracking.store_errors import brief
from raysim.tracking.tracker import Tracker


@pytest.mark.parametrize(
    ("uri", "error", "advice"),
    [
        (
            "sqlite:////there/mlflow.db",
            RuntimeError("x" * 500 + " run `mlflow db upgrade <database_uri>` " + "x" * 500),
            "mlflow db upgrade sqlite:////there/mlflow.db",
        ),
        (
            "sqlite:////there/mlflow.db",
            RuntimeError("table _alembic_tmp_experiments already exists"),
            "remove /there/mlflow.db",
        ),
        ("sqlite:////there/mlflow.db", RuntimeError("database is locked"), "End the process"),
        ("sqlite:////there/mlflow.db", RuntimeError("disk I/O error"), "Make room on the disk"),
        (
            "postgresql://me:secret@db/runs",
            ModuleNotFoundError("No module named 'psycopg2'"),
            "pip install psycopg2-binary",
        ),
        ("postgresql://me:secret@db/runs", RuntimeError("password authentication failed"), "user and password"),
        ("http://tracking:5000", ConnectionError("refused"), "add tracking to NO_PROXY"),
    ],
)  # fmt: skip
def test_the_advice_fits_the_error(uri: str, error: Exception, advice: str) -> None:
    remedy = store_errors.remedy(uri, error)
    assert advice in remedy and "secret" not in remedy
    assert ("mlflow server" in remedy) == uri.startswith("http")


def test_control_characters_of_a_server_do_not_reach_the_terminal() -> None:
    assert brief(RuntimeError("run \x1b]0;title\x07 \x1b[2J")) == r"run \x1b]0;title\x07 \x1b[2J"


def test_a_locked_database_is_awaited(tmp_path: Path, monkeypatch) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client_of(uri).search_experiments()
    errors = [RuntimeError("(sqlite3.OperationalError) database is locked")] * 2
    connect = store.open_experiment

    def locked(*arguments: Any) -> tuple[Any, str]:
        if errors:
            raise errors.pop()
        return connect(*arguments)

    monkeypatch.setattr(store, "open_experiment", locked)
    tracker = Tracker(Tracking(uri=uri, experiment="locked"), tmp_path / "run")
    assert tracker.start("run", {}, {})
    tracker.finish("FINISHED")
    assert not errors and not tracker.pending


def test_tables_are_made_in_one_step(tmp_path: Path, monkeypatch) -> None:
    """A process that is killed meanwhile leaves no database, and the next one makes it."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow = mlflow_client.import_mlflow(uri)
    (tmp_path / ".partial-mlflow.db").write_text("half a database")
    made: list[Path] = []
    notes: list[str] = []

    class Killed(mlflow.store.tracking.sqlalchemy_store.SqlAlchemyStore):
        def __init__(self, store_uri: str, artifacts: str) -> None:
            super().__init__(store_uri, artifacts)
            made.extend(tmp_path.glob("*mlflow.db"))
            if len(made) == 1:
                self.engine.dispose()  # as the end of a process does
                raise SystemExit("killed")

    monkeypatch.setattr(mlflow.store.tracking.sqlalchemy_store, "SqlAlchemyStore", Killed)
    with pytest.raises(SystemExit):
        store.open_experiment(uri, "experiment", store.artifact_location(uri), notes.append)
    assert [path.name for path in made] == [".partial-mlflow.db"]
    assert not (tmp_path / "mlflow.db").exists()
    store.open_experiment(uri, "experiment", store.artifact_location(uri), notes.append)
    assert (tmp_path / "mlflow.db").exists() and not (tmp_path / ".partial-mlflow.db").exists()


def test_a_data_set_that_another_run_logs_at_the_same_time(tmp_path: Path, monkeypatch) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    kind = type(client_of(uri))
    log_inputs, calls = kind.log_inputs, []

    def meeting(self, *arguments, **options):
        calls.append(options)
        if len(calls) == 1:
            raise sqlite3.IntegrityError("UNIQUE constraint failed: datasets.experiment_id")
        return log_inputs(self, *arguments, **options)

    monkeypatch.setattr(kind, "log_inputs", meeting)
    tracker = Tracker(Tracking(uri=uri, experiment="meeting"), tmp_path / "run")
    run_id = tracker.start("run", {}, {})
    tracker.inputs("digits", "d" * 8, "digits", "training", {})
    tracker.finish("FINISHED")
    assert len(calls) == 2 and not tracker.pending
    assert len(client_of(uri).get_run(run_id).inputs.dataset_inputs) == 1


def test_a_folder_that_was_deleted_is_not_called_a_full_disk(
    tmp_path: Path, monkeypatch, caplog, uri: str
) -> None:
    monkeypatch.setattr(tracking, "DRAIN_TIMEOUT_S", {"up": 1.0, "down": 0.5})

    def progress(record: dict[str, float]) -> None:
        if record["round"] == 2:
            (tmp_path / "run").rename(tmp_path / "elsewhere")  # at once, while others write

    config = basic(tmp_path, uri) | {"rounds": 3, "checkpoint": {"every": 0}}
    with pytest.raises(RaysimError, match=r"the folder .*run no longer exists; run it again$"):
        raysim.run(config, progress=progress)
    assert re.search(r"were not sent to .* and are lost: .*spool.jsonl no longer", caplog.text)
    assert "are kept in" not in caplog.text


@pytest.mark.parametrize("required", [True, False])
def test_a_full_disk_under_the_database_is_reported_at_the_end(
    tmp_path: Path, monkeypatch, caplog, required: bool
) -> None:
    """By the system's own limit: the database cannot grow any more, the small spool can."""
    monkeypatch.setattr(tracking, "DRAIN_TIMEOUT_S", {"up": 2.0, "down": 1.0})
    monkeypatch.setattr(tracking, "FLUSH_INTERVAL_S", 0.05)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    config = basic(tmp_path, uri) | {"rounds": 40, "checkpoint": {"every": 0}}
    config["tracking"]["required"] = required
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)

    def progress(record: dict[str, float]) -> None:
        if record["round"] == 5:
            time.sleep(0.5)
            size = (tmp_path / "mlflow.db").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))

    try:
        if required:
            with pytest.raises(RaysimError, match=r"records of this run are not in .* Make room"):
                raysim.run(config, progress=progress)
        else:
            raysim.run(config, progress=progress)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert "records were not sent" in caplog.text and "raysim tracking sync" in caplog.text
    assert (tmp_path / "run" / "parameters.safetensors").exists()
    for thread in threading.enumerate():
        if thread.name == "raysim-tracking":
            thread.join(30)
    assert replay_spool(tmp_path / "run") > 0
    (run,) = client_of(uri).search_runs(
        [client_of(uri).get_experiment_by_name(tmp_path.name).experiment_id]
    )
    assert run.info.status == "FINISHED"
