"""TensorBoard and Weights & Biases, which follow a run beside MLflow.

A follower reads the spool of a run in a thread of its own. It marks in `spool.<name>.sent` how many
records it has received, so a resumed run, or `raysim tracking sync`, continues where it stopped. A
follower never delays the run: after an error it is logged and tried again, and at the end of the
run it gets a few seconds for the rest.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import shlex
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raysim.errors import ConfigError, RaysimError, in_a_line
from raysim.tracking.spool import Tail

logger = logging.getLogger("raysim.tracking")

FOLLOW_INTERVAL_S = 1.0
"""Seconds between two reads of the spool."""

FOLLOWER_DRAIN_TIMEOUT_S = 20.0
"""Seconds that a follower gets for the remaining records when the run has ended."""

NOTE_TAG = "mlflow.note.content"
"""Tag with the description of a run."""


class Follower(ABC):
    """A tracker that follows the spool of a run."""

    name: str
    """Name in `tracking.also`, and of the extra that installs its package."""

    def __init__(self, run_dir: Path) -> None:
        """Follow the run in this folder.

        Args:
            run_dir: the folder of the run.
        """
        self.run_dir = run_dir

    @abstractmethod
    def open(self, start: Mapping[str, Any]) -> None:
        """Begin or continue the run.

        Args:
            start: the run's newest record of the kind "start".
        """

    @abstractmethod
    def resumed(self) -> None:
        """Take note that the run was resumed: the rounds after its checkpoint come again."""

    @abstractmethod
    def parameters(self, values: Mapping[str, str]) -> None:
        """Log the configuration, with dotted keys.

        Args:
            values: values as text, by dotted key.
        """

    @abstractmethod
    def metrics(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Log the metrics of a step.

        Args:
            values: value of each metric by name.
            step: number of completed rounds.
            time: time at which they were recorded, in seconds since 1970.
        """

    @abstractmethod
    def tags(self, values: Mapping[str, str]) -> None:
        """Log tags; they replace older values.

        Args:
            values: value of each tag by name.
        """

    @abstractmethod
    def artifact(self, path: Path) -> None:
        """Log a file or a folder of the run.

        Args:
            path: a file or folder, which may have been removed since.
        """

    @abstractmethod
    def flush(self) -> None:
        """Write what was logged so far."""

    @abstractmethod
    def close(self, status: str) -> None:
        """End the run, or leave it open for more if `status` is empty.

        Args:
            status: "FINISHED", "FAILED" or "KILLED"; "" if the run may resume.
        """


class TensorBoard(Follower):
    """Event files in `<run_dir>/tensorboard`."""

    name = "tensorboard"

    def open(self, start: Mapping[str, Any]) -> None:
        """Create the writer of the event files. See `Follower.open`."""
        from torch.utils.tensorboard import SummaryWriter

        self._make_writer = lambda step: SummaryWriter(
            str(self.run_dir / "tensorboard"), purge_step=step
        )
        self._writer = self._make_writer(None)
        self._resumed = False

    def resumed(self) -> None:
        """Let the next step replace all later ones. See `Follower.resumed`."""
        self._resumed = True

    def parameters(self, values: Mapping[str, str]) -> None:
        """Log the configuration as a table. See `Follower.parameters`."""
        self._text("configuration", values)

    def metrics(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Write each metric as a scalar. See `Follower.metrics`."""
        if self._resumed:
            self._writer.close()
            self._writer, self._resumed = self._make_writer(step), False
        for key, value in values.items():
            self._writer.add_scalar(key, value, step, walltime=time)

    def tags(self, values: Mapping[str, str]) -> None:
        """Log tags as a table, and the description as text. See `Follower.tags`."""
        values = dict(values)
        if note := values.pop(NOTE_TAG, None):
            self._writer.add_text("description", note)
        if values:
            self._text("tags", values)

    def artifact(self, path: Path) -> None:
        """Do nothing: the file stays in the folder of the run. See `Follower.artifact`."""

    def _text(self, title: str, values: Mapping[str, str]) -> None:
        """Log a table of keys and values, in Markdown."""
        lines = [f"| {key} | {value} |".replace("\n", " ") for key, value in values.items()]
        self._writer.add_text(title, "\n".join(["| key | value |", "| --- | --- |", *lines]))

    def flush(self) -> None:
        """Write what was logged so far."""
        self._writer.flush()

    def close(self, status: str) -> None:
        """Close the event files. See `Follower.close`."""
        self._writer.close()


class WandB(Follower):
    """A run of Weights & Biases, in the project that is named after the experiment.

    Address, key and mode are those of its own variables: $WANDB_API_KEY, $WANDB_BASE_URL,
    $WANDB_MODE (`offline` keeps the run in `<run_dir>/wandb` for `wandb sync`).
    """

    name = "wandb"

    def open(self, start: Mapping[str, Any]) -> None:
        """Create or continue the run. See `Follower.open`."""
        import wandb

        self._files = wandb.Artifact(f"run-{start['key']}", type="run")
        self._run = wandb.init(
            project=start["experiment"].strip("/").replace("/", "-"),
            id=start["key"],
            name=start["name"],
            dir=str(self.run_dir),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )

    def resumed(self) -> None:
        """Do nothing: W&B keeps the first values of a step. See `Follower.resumed`."""

    def parameters(self, values: Mapping[str, str]) -> None:
        """Update the configuration of the run. See `Follower.parameters`."""
        self._run.config.update(
            {key: _as_json(value) for key, value in values.items()}, allow_val_change=True
        )

    def metrics(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Log the finite metrics. See `Follower.metrics`."""
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        self._run.log({**finite, "time": time}, step=step)

    def tags(self, values: Mapping[str, str]) -> None:
        """Log tags as the summary, and the description as the notes. See `Follower.tags`."""
        values = dict(values)
        if note := values.pop(NOTE_TAG, None):
            self._run.notes = note
        self._run.summary.update(values)

    def artifact(self, path: Path) -> None:
        """Add a file or folder to the artifact of the run. See `Follower.artifact`."""
        if path.exists():
            if path.is_dir():
                self._files.add_dir(str(path), name=path.name)
            else:
                self._files.add_file(str(path), overwrite=True)

    def flush(self) -> None:
        """Do nothing: a process of W&B sends the records."""

    def close(self, status: str) -> None:
        """Log the artifact and end the run. See `Follower.close`."""
        if len(self._files.manifest.entries):
            self._run.log_artifact(self._files)
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)


def _as_json(text: str) -> Any:
    """Return the value of a parameter, which `flatten_parameters` has written as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


FOLLOWERS: dict[str, type[Follower]] = {kind.name: kind for kind in (TensorBoard, WandB)}
"""The trackers that can follow a run, by name."""


def require_packages(names: Sequence[str]) -> None:
    """Check that the packages of some followers are installed.

    Args:
        names: names of followers, keys of `FOLLOWERS`.

    Raises:
        ConfigError: a package is not installed.
    """
    for name in names:
        package = importlib.util.find_spec(name)
        if package is None or package.origin is None:  # a folder of the user's has this name
            raise ConfigError(
                f"tracking.also: {name} is not installed; run pip install 'raysim[{name}]', or "
                "leave it out"
            )


def send(tail: Tail, follower: Follower) -> None:
    """Send a follower the records of a spool that it does not have, and mark them as sent.

    Args:
        tail: the spool, with the follower's mark.
        follower: an open follower.
    """
    log: dict[str, Callable[[dict[str, Any]], None]] = {
        "start": lambda record: None if record["run_id"] is None else follower.resumed(),
        "params": lambda record: follower.parameters(record["values"]),
        "metrics": lambda record: follower.metrics(
            record["values"], record["step"], record["time"] / 1000
        ),
        "tags": lambda record: follower.tags(record["values"]),
        "artifact": lambda record: follower.artifact(follower.run_dir / record["path"]),
    }
    while records := tail.head():
        for record in records:
            if record["kind"] in log:
                log[record["kind"]](record)
        follower.flush()
        tail.acknowledge(len(records), None)


class FollowedRun:
    """The followers of one run, each in a thread of its own."""

    def __init__(self, names: Sequence[str], run_dir: Path) -> None:
        """Follow the run in this folder, which has been started.

        Args:
            names: names of followers, keys of `FOLLOWERS`.
            run_dir: the folder of the run.
        """
        self._run_dir, self._closing, self._status = run_dir, threading.Event(), ""
        self._threads = [
            threading.Thread(
                target=self._follow,
                args=(FOLLOWERS[name](run_dir.absolute()),),
                name=f"raysim-{name}",
                daemon=True,
            )
            for name in names
        ]
        for thread in self._threads:
            thread.start()

    def finish(self, status: str) -> None:
        """Send the remaining records and end, in at most FOLLOWER_DRAIN_TIMEOUT_S.

        Args:
            status: the status of the run: FINISHED, FAILED or KILLED.
        """
        self._status = status
        self._closing.set()
        for thread in self._threads:
            thread.join(FOLLOWER_DRAIN_TIMEOUT_S)
            if thread.is_alive():
                self._warn(thread.name.removeprefix("raysim-"), "it is too slow")

    def _follow(self, follower: Follower) -> None:
        """Send a follower the records of the run until it ends; stop after an error."""
        try:
            tail = Tail(self._run_dir, f"spool.{follower.name}.sent")
            follower.open(tail.last("start") or {})
            ended = False
            while not ended:
                ended = self._closing.wait(FOLLOW_INTERVAL_S)
                send(tail, follower)
            follower.close(self._status)
        except Exception as error:
            self._warn(follower.name, in_a_line(error))

    def _warn(self, name: str, why: str) -> None:
        logger.warning(
            "%s does not follow this run any more: %s. Its records are kept; to send them after "
            "the run: raysim tracking sync %s --also %s",
            name,
            why,
            shlex.quote(str(self._run_dir)),
            name,
        )


def catch_up(run_dir: Path, names: Sequence[str]) -> dict[str, int]:
    """Send followers the records of a run that has ended.

    Args:
        run_dir: the folder of the run.
        names: names of followers, keys of `FOLLOWERS`.

    Returns:
        The number of records sent to each follower, by its name.

    Raises:
        ConfigError: the package of a follower is not installed.
        RaysimError: a follower failed.
    """
    require_packages(names)
    sent = {}
    for name in names:
        tail, follower = Tail(run_dir, f"spool.{name}.sent"), FOLLOWERS[name](run_dir.absolute())
        sent[name] = tail.pending
        if not sent[name]:
            continue
        try:
            follower.open(tail.last("start") or {})
            send(tail, follower)
            finish = tail.last("finish")
            follower.close(finish["status"] if finish else "")
        except Exception as error:
            raise RaysimError(f"{run_dir}: {name}: {in_a_line(error)}") from None
    return sent
