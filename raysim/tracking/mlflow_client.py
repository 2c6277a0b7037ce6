"""Connections to an MLflow server or database.

SQLite files are MLflow's own, with two precautions: a relative path is made absolute at once, and
processes that meet on a fresh file wait for each other (its tables must be made by one of them).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import proxy_bypass

from filelock import FileLock

from raysim.config.sections.storage import Tracking
from raysim.config.tracking_uri import absolute_uri, database_of, mask_secrets
from raysim.errors import ConfigError, RaysimError, visible
from raysim.tracking import charts
from raysim.tracking.spool import Tail

logger = logging.getLogger("raysim.tracking")

_MLFLOW_ENVIRONMENT = {
    # The writer retries itself and logs it; MLflow would hang for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
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


def open_experiment(uri: str, name: str, artifacts: str | None) -> tuple[Any, str]:
    """Connect to a store and open an experiment, which is created if it does not exist.

    Args:
        uri: absolute tracking URI.
        name: name of the experiment.
        artifacts: address of the files of a new experiment; None: the store chooses.

    Returns:
        (MLflow's client, the experiment's id).

    Raises:
        RaysimError: the experiment was deleted.
        Exception: any error of MLflow or the network.
    """
    mlflow = import_mlflow(uri)
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
            _correct_locations(database, experiment.artifact_location, artifacts)
    return client, experiment.experiment_id


def _create_database(mlflow: Any, database: Path, artifacts: str | None) -> None:
    """Create the tables of a SQLite file: all of them, or, if the process is killed, no file.

    MLflow would write the place of its default experiment, the current folder, into SQL without
    quoting it.
    """
    partial = database.with_name(f".partial-{database.name}")
    partial.unlink(missing_ok=True)
    store = mlflow.store.tracking.sqlalchemy_store.SqlAlchemyStore(
        f"sqlite:///{partial}", artifacts
    )
    store.engine.dispose()
    partial.replace(database)


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
    logger.warning(
        "tracking: %s was moved: its files are taken to be in %s, no longer in %s",
        database,
        artifacts,
        before,
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


def remedy(uri: str, error: Exception | None) -> str:
    """Return advice for a store that does not work.

    Args:
        uri: absolute tracking URI.
        error: what it raised, if that is known.
    """
    text = f"{type(error).__name__} {error}"
    database = database_of(uri)
    if "mlflow db upgrade" in text:
        return (
            "Another version of MLflow made this database; keep a copy of it, then: mlflow db "
            f"upgrade {mask_secrets(uri)}"
        )
    if isinstance(error, ImportError):
        return (
            "Install the database's driver: pip install psycopg2-binary (PostgreSQL), pip "
            "install pymysql (mysql+pymysql://)"
        )
    if database:
        return _remedy_of_a_file(database, text)
    if not uri.startswith("http"):
        return "See that the database runs, and that its address, user and password are right"
    if proxy := _proxy(uri):
        return (
            f"{proxy} sends these requests to a proxy; add {urlsplit(uri).hostname} to "
            "NO_PROXY, start the server, or correct the address"
        )
    return "Start the server (mlflow server --host HOST --port PORT) or correct the address"


def _remedy_of_a_file(database: Path, error: str) -> str:
    """Return advice for a SQLite file that does not work."""
    if "already exists" in error:
        return (
            f"A process was killed while it made the tables; remove {database} if no run is in it"
        )
    if "database is locked" in error:
        return f"End the process that holds {database}"
    if "disk" in error:
        return f"Make room on the disk of {database}"
    return f"See that {database} can be written and was made by this version of MLflow"


def connected(uri: str) -> Any:
    """Return an MLflow client of a tracking store.

    Args:
        uri: absolute tracking URI.
    """
    return import_mlflow(uri).MlflowClient(tracking_uri=uri)


@contextlib.contextmanager
def open_store(uri: str | None, purpose: str = "read") -> Iterator[Any]:
    """Yield a client of a tracking store, whose errors inside the block become one line.

    Args:
        uri: tracking URI; None: the default of `tracking.uri`.
        purpose: past participle of what the block does with the store, such as "read", for errors.

    Raises:
        ConfigError: the URI is not usable, or there is no such database.
        RaysimError: the store does not answer, or refuses.
    """
    address = absolute_uri(uri or Tracking().uri)
    database = database_of(address)
    if database and not database.is_file():
        raise ConfigError(
            f"--uri: there is no {database}; start this in the folder of the runs, or give the "
            "address of their tracking store, sqlite:///… or http://…"
        )
    try:
        yield connected(address)
    except RaysimError:
        raise
    except Exception as error:
        no_answer = "Max retries exceeded" in str(error)
        why = "nothing answers; is the server up?" if no_answer else brief(error)
        raise RaysimError(f"--uri: {mask_secrets(address)} cannot be {purpose}: {why}") from None


def folder_of_tracked_run(run_id: str, uri: str | None = None) -> str:
    """Return the folder of a run that MLflow knows by this id.

    Args:
        run_id: MLflow's id of the run.
        uri: tracking URI; None: the default of `tracking.uri`.

    Raises:
        ConfigError: the store cannot be read or has no such run, or its folder is not on this
            machine.
    """
    address = absolute_uri(uri or Tracking().uri)
    if address.startswith("sqlite:///") and not Path(address[10:].partition("?")[0]).exists():
        raise ConfigError(
            f"there is no {address[10:]} to look run {run_id} up in; say tracking.uri=…, or give "
            "its folder"
        )
    try:
        run = import_mlflow(address).MlflowClient(tracking_uri=address).get_run(run_id)
    except Exception as error:
        raise ConfigError(
            f"run {run_id} is not found in {mask_secrets(address)}: {brief(error)}; say "
            "tracking.uri=…, or give its folder"
        ) from None
    if not (folder := run.data.tags.get("run_dir")) or not Path(folder).is_dir():
        raise ConfigError(
            f"run {run_id} was made in {folder or 'an unknown folder'}, which is not on this "
            "machine"
        )
    return folder


def check_database(uri: str, run_dir: Path) -> None:
    """Check that a run which was tracked before is not about to be tracked in a new database.

    Args:
        uri: tracking URI.
        run_dir: the run's folder.

    Raises:
        ConfigError: the run was tracked, and the store is a SQLite file that does not exist.
    """
    database = database_of(absolute_uri(uri))
    if database and not database.exists() and (run_id := Tail(run_dir).run_id):
        raise ConfigError(
            f"tracking.uri: there is no {database}, so run {run_id} is not in it; give the "
            "database that holds the "
            "run, or set tracking.required=false to begin a new record of it"
        )


def import_mlflow(uri: str) -> Any:
    """Import MLflow, which takes seconds, without its banners and minutes of retries.

    Args:
        uri: tracking URI; a store that is no server needs further modules.

    Returns:
        The module `mlflow`.
    """
    for name, value in _MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings(
        "ignore", message="The ``noload`` loader strategy is deprecated"
    )  # MLflow's own models
    import mlflow

    if not uri.startswith("http"):
        import mlflow.store.db.utils
        import mlflow.store.tracking.sqlalchemy_store

        # The writer tries again itself; MLflow would try for a minute, also with a wrong password.
        mlflow.store.db.utils.MAX_RETRY_COUNT = 1
    logging.getLogger("mlflow.store").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(
        logging.CRITICAL
    )  # a traceback a try; the writer reports it
    return mlflow


def brief(error: Exception) -> str:
    """Return an error in one line of about 200 characters.

    Long errors are cut in the middle: they state what failed at the beginning and why at the end.

    Args:
        error: any error; passwords and tokens in its message are masked.
    """
    text = mask_secrets(" ".join(str(error).split())) or type(error).__name__
    text = visible(text)
    return text if len(text) <= 200 else f"{text[:90]} … {text[-110:]}"


def _proxy(uri: str) -> str:
    """Return the environment variable that sends requests for an address to a proxy; "" if none."""
    parts = urlsplit(uri)
    if proxy_bypass(parts.hostname or ""):
        return ""
    names = (f"{parts.scheme}_proxy", f"{parts.scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY")
    return next((name for name in names if os.environ.get(name)), "")
