"""The client of an MLflow server or database: one run's records go there, and runs are read back.

SQLite files are MLflow's own, with two precautions: a relative path is made absolute at once, and
processes that meet on a fresh file wait for each other (its tables must be made by one of them).
"""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import os
import sqlite3
import warnings
from collections.abc import Iterator, Mapping
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import proxy_bypass

from filelock import FileLock

from raysim.config.sections.storage import Tracking
from raysim.config.tracking_uri import absolute_uri, database_of, mask_secrets
from raysim.errors import ConfigError, RaysimError, visible
from raysim.tracking import charts
from raysim.tracking.recorder import legal
from raysim.tracking.spool import Tail, plain

logger = logging.getLogger("raysim.tracking")

_MAX_METRICS_PER_REQUEST = 1000  # MLflow's limit of metrics in a request
_MAX_VALUE_LETTERS = {"params": 6000, "tags": 8000}  # and of characters in a value
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
_RUN_KEY_TAG = "raysim.key"


_REPLACES_TAG = "raysim.replaces"


class Refused(Exception):
    """Error for a record that the server will never accept."""


class FileRefused(Exception):
    """Error of a store that does not accept a file, while the server accepts other records."""


class RunDeleted(RaysimError):
    """Error for a run that was deleted in MLflow."""


class RunClient:
    """Client of an MLflow server or database for one run; used by one thread.

    Args:
        uri: absolute tracking URI.
        experiment: name of the experiment, which is created if it does not exist.
        run_id: MLflow's id of the run that has received earlier records; None: none has.
        run_dir: the run's folder, to which the paths of its files are relative.
        replaces: id of a deleted run, whose records a new run receives; None: no run is replaced.
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        run_id: str | None,
        run_dir: Path,
        replaces: str | None = None,
    ) -> None:
        self.uri, self.experiment, self.run_id = uri, experiment, run_id
        self.run_dir, self.replaces = Path(run_dir).absolute(), replaces
        self.key: str | None = None
        """Id of the open run in its start record, possibly the provisional one."""
        self.refused = 0
        self.refuses_files = False
        """Whether the store has refused a file."""
        self._client: Any = None
        self._experiment_id = ""
        # Which steps a reopened run has, by metric; None for a run that was created here: all of it
        # came from here.
        self._steps: dict[str, set[int]] | None = {} if run_id else None
        self._database = database_of(uri)
        self._is_server = uri.startswith("http")
        self._artifacts = (
            (self._database.parent / "mlartifacts").as_uri() if self._database else None
        )

    def import_mlflow(self) -> None:
        """Import what this store needs of MLflow, which takes seconds."""
        import_mlflow(self.uri)

    def remedy(self, error: Exception | None) -> str:
        """Return advice for a store that does not work.

        Args:
            error: what it raised, if that is known.
        """
        text = f"{type(error).__name__} {error}"
        if "mlflow db upgrade" in text:
            return (
                "Another version of MLflow made this database; keep a copy of it, then: mlflow db "
                f"upgrade {mask_secrets(self.uri)}"
            )
        if isinstance(error, ImportError):
            return (
                "Install the database's driver: pip install psycopg2-binary (PostgreSQL), pip "
                "install pymysql (mysql+pymysql://)"
            )
        if self._database:
            if "already exists" in text:
                return (
                    f"A process was killed while it made the tables; remove {self._database} if no "
                    "run is in it"
                )
            if "database is locked" in text:
                return f"End the process that holds {self._database}"
            if "disk" in text:
                return f"Make room on the disk of {self._database}"
            return (
                f"See that {self._database} can be written and was made by this version of MLflow"
            )
        if not self._is_server:
            return "See that the database runs, and that its address, user and password are right"
        if proxy := _proxy(self.uri):
            return (
                f"{proxy} sends these requests to a proxy; add {urlsplit(self.uri).hostname} to "
                "NO_PROXY, start the server, or correct the address"
            )
        return "Start the server (mlflow server --host HOST --port PORT) or correct the address"

    def send(self, records: list[dict[str, Any]]) -> int:
        """Send the first record, or as many metric records as fit in one batch.

        Args:
            records: the oldest unsent records of the spool, at least one.

        Returns:
            The number of records that were sent.

        Raises:
            Refused: the server will never accept the first record.
            FileRefused: the store does not accept the file of the first record.
            RunDeleted: the run was deleted; the records belong to it or to a new one.
            Exception: any error of MLflow or the network. The record may or may not have arrived;
                try again.
        """
        self._connect()
        count = _together(records)
        try:
            try:
                self._deliver(records[:count])
            except Exception as error:
                if count == 1 or not _final(error):
                    raise
                count = 1  # one of them is to blame: find it by going one by one
                self._deliver(records[:1])
        except Exception as error:
            if _final(error) and records[0]["kind"] != "start":
                self._get(self.run_id or "")  # every record of a deleted run would be refused
                raise Refused(brief(error)) from error
            raise
        return count

    def _deliver(self, records: list[dict[str, Any]]) -> None:
        match records[0]:
            case {"kind": "metrics"}:
                self._metrics(records)
            case {"kind": "start"} as start:
                self._open(start)
            case {"kind": "params", "values": values}:
                self._params(values)
            case {"kind": "tags", "values": values}:
                self._tags(values)
            case {"kind": "inputs"} as record:
                self._inputs(record)
            case {"kind": "artifact", "path": path, "folder": folder}:
                self._file(self.run_dir / path, folder)
            case {"kind": "parent", "parent": parent}:
                self._tags(_under(self._id_of(parent)))
            case {"kind": "finish", "status": status, "time": end}:
                self._client.set_terminated(self.run_id, status, end)

    def _file(self, path: Path, folder: str | None) -> None:
        """Send a file or a folder."""
        if not path.exists():
            raise Refused(f"{path} no longer exists")
        address = self._get(self.run_id or "").info.artifact_uri
        if self._is_server and urlsplit(address).scheme in ("", "file"):
            self.refuses_files = True
            raise FileRefused(
                f"the server names a folder of this machine for them, {address}; start it with "
                "--artifacts-destination instead"
            )
        send = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
        try:
            send(self.run_id, str(path), folder)
        except Exception as error:
            self._get(self.run_id or "")  # raises if it is the server that fails, not its files
            self.refuses_files = True
            raise FileRefused(brief(error)) from error

    def _connect(self) -> None:
        if self._client is not None:
            return
        mlflow = import_mlflow(self.uri)
        with self._alone():
            if self._database is not None and not self._database.exists():
                self._create_database(mlflow)
            client = mlflow.MlflowClient(tracking_uri=self.uri)
            experiment = client.get_experiment_by_name(self.experiment)
            if experiment is None:
                try:
                    self._experiment_id = client.create_experiment(
                        self.experiment,
                        artifact_location=self._artifacts,
                        tags={charts.VIEW_TAG: charts.view()},
                    )
                except mlflow.MlflowException:  # somebody else was faster, or it is a true failure
                    if (experiment := client.get_experiment_by_name(self.experiment)) is None:
                        raise
            if experiment is not None:
                if experiment.lifecycle_stage == "deleted":
                    raise RaysimError(
                        f"tracking.experiment: '{self.experiment}' was deleted there; restore it "
                        f"(mlflow experiments restore -x {experiment.experiment_id}) or choose "
                        "another name"
                    )
                self._experiment_id = experiment.experiment_id
                if self._was_moved(experiment.artifact_location):
                    self._correct_locations(experiment.artifact_location)
        self._client = client

    def _create_database(self, mlflow: Any) -> None:
        """Create the tables of a SQLite file: all of them, or, if the process is killed, no file.

        MLflow would write the place of its default experiment, the current folder, into SQL without
        quoting it.
        """
        assert self._database is not None
        partial = self._database.with_name(f".partial-{self._database.name}")
        partial.unlink(missing_ok=True)
        store = mlflow.store.tracking.sqlalchemy_store.SqlAlchemyStore(
            f"sqlite:///{partial}", self._artifacts
        )
        store.engine.dispose()
        partial.replace(self._database)

    def _was_moved(self, location: str) -> bool:
        """Return whether the files beside a SQLite database were elsewhere before."""
        if self._artifacts is None or location == self._artifacts:
            return False
        before = Path(unquote(urlsplit(location).path))
        here = Path(unquote(urlsplit(self._artifacts).path))
        if urlsplit(location).scheme != "file" or before.name != here.name:
            return False  # somebody chose this location
        return here.is_dir() or not before.is_dir()

    def _correct_locations(self, before: str) -> None:
        """Replace the former location of the files in a moved SQLite database.

        MLflow has no call for it, and would create the former folder again.
        """
        assert self._artifacts is not None and self._database is not None
        with contextlib.closing(sqlite3.connect(self._database)) as database, database:
            for table, column in _LOCATIONS:
                database.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) "
                    f"WHERE {column} = ? OR substr({column}, 1, ?) = ?",
                    (
                        self._artifacts,
                        len(before) + 1,
                        before,
                        len(before) + 1,
                        f"{before}/",
                    ),
                )
        logger.warning(
            "tracking: %s was moved: its files are taken to be in %s, no longer in %s",
            self._database,
            self._artifacts,
            before,
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from preparing the same SQLite file.

        Two processes that create its tables at the same time both fail.
        """
        if self._database is None:
            yield
            return
        self._database.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self._database}.lock"):
            yield

    def _find(self, name: str) -> Any:
        """Return the run with this id, or the one that was created under this key or replaces it.

        Return None if there is none.
        """
        try:
            return self._get(name)
        except RunDeleted as deleted:
            error = deleted
        for tag in (_RUN_KEY_TAG, _REPLACES_TAG):
            if runs := self._client.search_runs(
                [self._experiment_id], f"tags.`{tag}` = '{name}'", max_results=1
            ):
                return runs[0]
        if error.__cause__ is None:  # it can be restored
            raise error
        return None

    def _id_of(self, name: str) -> str:
        """Return MLflow's id of a run that may have a provisional one."""
        run = self._find(name)
        return run.info.run_id if run else name

    def _get(self, run_id: str) -> Any:
        try:
            run = self._client.get_run(run_id)
        except Exception as error:
            if getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST":
                raise RunDeleted(f"there is no run {run_id}") from error
            raise
        if run.info.lifecycle_stage == "deleted":
            experiment = self._client.get_experiment(run.info.experiment_id)
            restore = f"mlflow runs restore --run-id {run_id}"
            if experiment.lifecycle_stage == "deleted":
                restore = f"mlflow experiments restore -x {run.info.experiment_id}"
            raise RunDeleted(f"run {run_id} was deleted there; restore it ({restore})")
        return run

    def _open(self, start: Mapping[str, Any]) -> None:
        if self.replaces:
            run = self._get(self.run_id) if self.run_id else None
        else:
            run = self._find(start["key"])
        under = _under(self._id_of(start["parent"])) if start["parent"] else {}
        if run is not None:
            self._client.update_run(run.info.run_id, status="RUNNING")
            self._steps = {}
        elif start["run_id"] and start["required"] and not self.replaces:
            raise RaysimError(f"it has no run {start['run_id']}")
        else:
            tags = {
                _RUN_KEY_TAG: start["key"],
                "mlflow.user": _user(),
                "mlflow.source.name": "raysim",
                **under,
                **({_REPLACES_TAG: self.replaces} if self.replaces else {}),
            }
            run = self._client.create_run(self._experiment_id, start["time"], tags, start["name"])
            self._steps = None
        self.run_id, self.key = run.info.run_id, start["key"]
        if under and run.data.tags.get("mlflow.parentRunId") != under["mlflow.parentRunId"]:
            self._tags(under)

    def _metrics(self, records: list[dict[str, Any]]) -> None:
        from mlflow.entities import Metric

        batch = [
            Metric(key, value, record["time"], record["step"])
            for record in records
            for key, value in record["values"].items()
            if record["step"] not in self._known(key)
        ]
        for first in range(0, len(batch), _MAX_METRICS_PER_REQUEST):
            self._client.log_batch(
                self.run_id, metrics=batch[first : first + _MAX_METRICS_PER_REQUEST]
            )
        for metric in batch:
            if self._steps is not None:
                self._steps[metric.key].add(metric.step)

    def _known(self, key: str) -> set[int]:
        if self._steps is None:
            return set()
        if key not in self._steps:
            self._steps[key] = {
                metric.step for metric in self._client.get_metric_history(self.run_id, key)
            }
        return self._steps[key]

    def _params(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        values = {legal(key): _fit(value, key, "params") for key, value in values.items()}
        there = self._get(self.run_id or "").data.params
        new = [Param(key, value) for key, value in values.items() if key not in there]
        for first in range(0, len(new), 100):
            self._client.log_batch(self.run_id, params=new[first : first + 100])
        self._tags({f"resumed.{key}": v for key, v in values.items() if there.get(key, v) != v})

    def _tags(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(key, _fit(value, key, "tags")) for key, value in values.items()]
        for first in range(0, len(tags), 100):
            self._client.log_batch(self.run_id, tags=tags[first : first + 100])

    def _inputs(self, record: Mapping[str, Any]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        remote = record["source"].startswith(("http://", "https://"))
        dataset = Dataset(
            name=record["name"],
            digest=record["digest"][:36],
            source_type="http" if remote else "local",
            source=json.dumps({"url" if remote else "uri": record["source"]}),
            profile=json.dumps(record["profile"], default=plain),
        )
        context = InputTag("mlflow.data.context", record["context"])
        inputs = [DatasetInput(dataset, [context])]
        try:
            self._client.log_inputs(self.run_id, datasets=inputs)
        except Exception as error:
            if "unique constraint" not in str(error).lower():
                raise
            # Another run has just logged the same data set, which MLflow finds now.
            self._client.log_inputs(self.run_id, datasets=inputs)


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


def _together(records: list[dict[str, Any]]) -> int:
    """Return how many of the first records fit in one request.

    Metrics go together up to MLflow's limit; every other kind goes alone.
    """
    sizes = (
        len(record["values"])
        for record in takewhile(lambda record: record["kind"] == "metrics", records)
    )
    return max(1, sum(total <= _MAX_METRICS_PER_REQUEST for total in accumulate(sizes)))


def _under(parent: str) -> dict[str, str]:
    """Return the tags of a run that is shown under `parent`.

    A run that moves to another parent stays a member of the first.
    """
    return {"mlflow.parentRunId": parent, f"raysim.sweep.{parent}": "true"}


def _final(error: Exception) -> bool:
    """Return whether retrying is useless, because the server rejects the record itself."""
    codes = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")
    return isinstance(error, Refused) or getattr(error, "error_code", None) in codes


def _fit(value: str, key: str, kind: str) -> str:
    limit = _MAX_VALUE_LETTERS[kind]
    if len(value) <= limit:
        return value
    logger.warning(
        "tracking: %s %s has %d characters, MLflow keeps %d", kind, key, len(value), limit
    )
    return value[: limit - 1] + "…"


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


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        return str(os.getuid())
