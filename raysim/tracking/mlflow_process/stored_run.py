"""One run in an MLflow server or database, which receives the records of its spool."""

from __future__ import annotations

import getpass
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from raysim.errors import RaysimError
from raysim.tracking.mlflow_process import store
from raysim.tracking.mlflow_process.run_client import MAX_METRICS_PER_REQUEST
from raysim.tracking.mlflow_process.run_in_store import RunInStore
from raysim.tracking.recorder import legal
from raysim.tracking.spool import plain
from raysim.tracking.store_errors import FileRefused, Refused, RunDeleted, brief

_MAX_VALUES_PER_REQUEST = 100  # MLflow's limit of parameters or tags in a request
_MAX_VALUE_LETTERS = {"params": 6000, "tags": 8000}  # and of characters in a value

_RUN_KEY_TAG = "raysim.key"
"""Tag of a run with the key of its start record."""

_REPLACES_TAG = "raysim.replaces"
"""Tag of a run with the id of the deleted run that it replaces."""


class StoredRun(RunInStore):
    """A run to which this process sends records; see `RunInStore` for the arguments."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.notes: list[str] = []
        """Warnings for the log."""
        self._client: Any = None
        self._experiment_id = ""
        self._lost = ""
        """File that was being sent when a connection was lost."""
        # Which steps a reopened run has, by metric; None for a run that was created here: all of it
        # came from here.
        self._steps: dict[str, set[int]] | None = {} if self.run_id else None
        self._artifacts = store.artifact_location(self.uri)

    @property
    def is_server(self) -> bool:
        """Whether the store is a server, and no database."""
        return self.uri.startswith("http")

    def send(self, records: list[dict[str, Any]]) -> int:
        """Send records that go together: one of any kind, or metrics of several steps.

        Args:
            records: the oldest unsent records of the spool.

        Returns:
            The number of records that were sent; 1 if one of them may be refused.

        Raises:
            Refused: the server will never accept the first record.
            FileRefused: the store does not accept the file of the first record.
            RunDeleted: the run was deleted; the records belong to it or to a new one.
            Exception: any error of MLflow or the network. The record may or may not have arrived;
                try again.
        """
        if self._client is None:
            self._client, self._experiment_id = store.open_experiment(
                self.uri, self.experiment, self._artifacts, self.notes.append
            )
        count = len(records)
        try:
            try:
                self._deliver(records)
            except Exception as error:
                if count == 1 or not _final(error):
                    raise
                count = 1  # one of them is to blame: find it by going one by one
                self._deliver(records[:1])
        except Exception as error:
            if _final(error) and records[0]["kind"] != "start":
                self._get(self.run_id)  # every record of a deleted run would be refused
                raise Refused(brief(error)) from error
            raise
        return count

    def _deliver(self, records: list[dict[str, Any]]) -> None:
        send_kind = {
            "start": self._open,
            "params": self._params,
            "tags": lambda record: self._tags(record["values"]),
            "metrics": lambda record: self._metrics(records),
            "inputs": self._inputs,
            "artifact": self._file,
            "parent": lambda record: self._tags(_under(self._id_of(record["parent"]))),
            "finish": self._end,
        }
        send_kind[records[0]["kind"]](records[0])

    def _end(self, finish: Mapping[str, Any]) -> None:
        self._client.set_terminated(self.run_id, finish["status"], finish["time"])

    def _file(self, record: Mapping[str, Any]) -> None:
        """Send a file or a folder."""
        path = self.run_dir / record["path"]
        if not path.exists():
            raise Refused(f"{path} no longer exists")
        if self.is_server:
            address = self._get(self.run_id).info.artifact_uri
            if urlsplit(address).scheme in ("", "file"):
                raise FileRefused(
                    f"the server names a folder of this machine for them, {address}; start it with "
                    "--artifacts-destination instead"
                )
        send = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
        try:
            send(self.run_id, str(path), record["folder"])
        except Exception as error:
            self._get(self.run_id)  # raises if it is the server that fails, not its files
            if _is_connections(error) and self._lost != record["path"]:
                self._lost = record["path"]  # it is tried again, once
                raise
            raise FileRefused(brief(error)) from error
        self._lost = ""

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

    def _get(self, run_id: str | None) -> Any:
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
        for part in _parts(batch, MAX_METRICS_PER_REQUEST):
            self._client.log_batch(self.run_id, metrics=part)
        for metric in batch:
            self._known(metric.key).add(metric.step)

    def _known(self, key: str) -> set[int]:
        """Return the steps of a metric that a reopened run has; of a new run an unused set."""
        if self._steps is None:
            return set()
        if key not in self._steps:
            self._steps[key] = {
                metric.step for metric in self._client.get_metric_history(self.run_id, key)
            }
        return self._steps[key]

    def _params(self, record: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        values: dict[str, str] = {}
        for key, value in record["values"].items():
            values[legal(key)] = self._fit(value, key, "params")
        there = self._get(self.run_id).data.params
        new = [Param(key, value) for key, value in values.items() if key not in there]
        for part in _parts(new, _MAX_VALUES_PER_REQUEST):
            self._client.log_batch(self.run_id, params=part)
        self._tags({f"resumed.{key}": v for key, v in values.items() if there.get(key, v) != v})

    def _tags(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(key, self._fit(value, key, "tags")) for key, value in values.items()]
        for part in _parts(tags, _MAX_VALUES_PER_REQUEST):
            self._client.log_batch(self.run_id, tags=part)

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

    def _fit(self, value: str, key: str, kind: str) -> str:
        """Return a value as MLflow keeps it, which has limits of length."""
        limit = _MAX_VALUE_LETTERS[kind]
        if len(value) <= limit:
            return value
        self.notes.append(
            f"tracking: {kind} {key} has {len(value)} characters, MLflow keeps {limit}"
        )
        return value[: limit - 1] + "…"


def _parts(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yield the values in parts of at most `size`."""
    for first in range(0, len(values), size):
        yield values[first : first + size]


def _is_connections(error: BaseException | None) -> bool:
    """Return whether an error comes from a connection that was lost or never made."""
    from requests import exceptions

    kinds = ConnectionError, TimeoutError, exceptions.ConnectionError, exceptions.Timeout
    while error is not None:
        if isinstance(error, kinds):
            return True
        error = error.__cause__ or error.__context__
    return False


def _under(parent: str) -> dict[str, str]:
    """Return the tags of a run that is shown under `parent`.

    A run that moves to another parent stays a member of the first.
    """
    return {"mlflow.parentRunId": parent, f"raysim.sweep.{parent}": "true"}


def _final(error: Exception) -> bool:
    """Return whether retrying is useless, because the server rejects the record itself."""
    codes = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")
    return isinstance(error, Refused) or getattr(error, "error_code", None) in codes


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        return str(os.getuid())
