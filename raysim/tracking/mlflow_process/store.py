"""Experiments of a tracking store, and the tables of a SQLite file.

SQLite files are MLflow's own, with two precautions: a relative path is made absolute at once, and
processes that meet on a fresh file wait for each other (its tables must be made by one of them).
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from filelock import FileLock

from raysim.config.tracking_uri import database_of
from raysim.errors import RaysimError
from raysim.system import files
from raysim.tracking import charts, mlflow_client

_LOCATIONS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
)
"""Tables and columns of MLflow's database that hold addresses of files."""


def artifact_location(uri: str) -> str | None:
    """Return the address of the files beside a SQLite database; None for any other store.

    Args:
        uri: absolute tracking URI.
    """
    database = database_of(uri)
    return (database.parent / "mlartifacts").as_uri() if database else None


def open_experiment(
    uri: str, name: str, artifacts: str | None, note: Callable[[str], None]
) -> tuple[Any, str]:
    """Connect to a store and open an experiment, which is created if it does not exist.

    Args:
        uri: absolute tracking URI.
        name: name of the experiment.
        artifacts: address of the files of a new experiment; None: the store chooses.
        note: called with the text of a warning.

    Returns:
        (MLflow's client, the experiment's id).

    Raises:
        RaysimError: the experiment was deleted.
        Exception: any error of MLflow or the network.
    """
    mlflow = mlflow_client.import_mlflow(uri)
    database = database_of(uri)
    with _alone(database):
        if database is not None and not database.exists():
            _create_database(mlflow, database, artifacts)
        client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            tags = {charts.VIEW_TAG: charts.view()}
            try:
                return client, client.create_experiment(name, artifacts, tags)
            except mlflow.MlflowException:  # somebody else was faster, or it is a true failure
                experiment = client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        if experiment.lifecycle_stage == "deleted":
            raise RaysimError(
                f"tracking.experiment: '{name}' was deleted there; restore it (mlflow experiments "
                f"restore -x {experiment.experiment_id}) or choose another name"
            )
        if database and artifacts and _was_moved(experiment.artifact_location, artifacts):
            before = experiment.artifact_location
            _correct_locations(database, before, artifacts)
            note(
                f"tracking: {database} was moved: its files are taken to be in {artifacts}, no "
                f"longer in {before}"
            )
    return client, experiment.experiment_id


def _create_database(mlflow: Any, database: Path, artifacts: str | None) -> None:
    """Create the tables of a SQLite file: all of them, or, if the process is killed, no file.

    MLflow would write the place of its default experiment, the current folder, into SQL without
    quoting it.
    """
    with files.whole(database) as partial:
        store = mlflow.store.tracking.sqlalchemy_store.SqlAlchemyStore(
            f"sqlite:///{partial}", artifacts
        )
        store.engine.dispose()


def _was_moved(location: str, artifacts: str) -> bool:
    """Return whether the files beside a SQLite database were elsewhere before."""
    if location == artifacts:
        return False
    before = Path(unquote(urlsplit(location).path))
    now = Path(unquote(urlsplit(artifacts).path))
    if urlsplit(location).scheme != "file" or before.name != now.name:
        return False  # somebody chose this location
    return now.is_dir() or not before.is_dir()


def _correct_locations(database: Path, before: str, artifacts: str) -> None:
    """Replace the former location of the files in a moved SQLite database.

    MLflow has no call for it, and would create the former folder again.
    """
    rest = len(before) + 1
    values = (artifacts, rest, before, rest, f"{before}/")
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        for table, column in _LOCATIONS:
            connection.execute(
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) "
                f"WHERE {column} = ? OR substr({column}, 1, ?) = ?",
                values,
            )


@contextlib.contextmanager
def _alone(database: Path | None) -> Iterator[None]:
    """Keep other processes from preparing the same SQLite file.

    Two processes that create its tables at the same time both fail.
    """
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{database}.lock"):
        yield
