"""Result of a run: the returned object, its files in the run's folder, and how to load it."""

from __future__ import annotations

import copy
import csv
import hashlib
import itertools
import json
import logging
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from raysim.config import explain
from raysim.config.objects.python_objects import keep_with, noting_changes
from raysim.config.schema import Config
from raysim.config.sections.evaluation import BestBy
from raysim.data import Examples
from raysim.data.own.reading import inputs_like
from raysim.engine.early_stop import StopRule
from raysim.engine.evaluation.client_evaluation import have_own_models, read_clients
from raysim.engine.evaluation.client_model import check_client, client_state_dict
from raysim.engine.loop import Record
from raysim.engine.plan import Plan
from raysim.engine.state import checkpoint
from raysim.errors import ConfigError
from raysim.metrics import has_direction, lower_is_better
from raysim.prepare.resolve import prepare, read_run_config
from raysim.rules.contract import overridden
from raysim.rules.tasks.several_outputs import OutputForms
from raysim.runs import run_dir
from raysim.runs.given_again import (
    asking_for_objects,
    loading_with,
    without_objects_for_training,
)
from raysim.runs.python_inputs import named_inputs
from raysim.runs.run_dir import HISTORY_FILE, PARAMETERS_FILE
from raysim.server.central_server import evaluated_params
from raysim.system import files
from raysim.system.global_generators import one_thread
from raysim.tracking.charts import FIRST_METRICS
from raysim.tracking.spool import Tail

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger("raysim")

PARAMETER_ORDER_KEY = "parameters"
"""Metadata key of the parameter file: the names in the order of the flat vector, as JSON."""

STATE_DIGEST_KEY = "state_digest"
"""Metadata key of the parameter file: `RunResult.state_digest`."""


@dataclass(repr=False)
class RunResult:
    """Result of a run, finished or stopped."""

    run_id: str
    """The run's id in MLflow."""
    run_dir: Path
    """The run's folder."""
    config: Config
    """The resolved configuration, without passwords."""
    history: list[Record]
    """One record of metrics for each round; round 0 is before training."""
    parameters: Tensor
    """Global parameters after the last round, as a flat vector `[P]`."""
    state_dict: dict[str, Tensor]
    """Parameters by name, with BatchNorm statistics, for the net's `load_state_dict`."""
    digest: str
    """sha256 of `parameters`."""
    seconds: float
    """Wall-clock seconds of the call; of a loaded run, the seconds of its rounds."""
    stopped: str = ""
    """Why the run ended before its last round; empty if all rounds are done."""
    state_digest: str = ""
    """sha256 of the server's whole state and of what each client keeps, such as a model of its own;
    empty for a run that was stopped."""

    def __post_init__(self) -> None:
        # A script may change its working directory.
        self.run_dir = self.run_dir.absolute()
        # A net that was given as an object is there for `net` and `predict`.
        keep_with(self)

    def __repr__(self) -> str:
        """Return one line: folder, rounds, last and best accuracy, and the digest's first 8."""
        ended = self.stopped or self.early_stop
        rounds = f"{self.rounds} of {self.config.rounds}" if ended else str(self.rounds)
        parts = [str(self.run_dir), f"{rounds} rounds"]
        if accuracy := self.metrics.get("accuracy"):
            parts.append(f"accuracy {accuracy['last']:.4f}, best {accuracy['best']:.4f}")
        return f"RunResult({', '.join(parts)}, digest {self.digest[:8]})"

    @property
    def rounds(self) -> int:
        """Number of completed rounds."""
        return int(self.history[-1]["round"]) if self.history else 0

    @property
    def early_stop(self) -> str:
        """Why the section `stop` ended the run; empty if it did not."""
        return StopRule(self.config, self.history).reason

    @property
    def clients(self) -> pd.DataFrame:
        """The evaluated clients, a row for each client and evaluation (`evaluate.clients`).

        The columns are round, client, examples (of its test), held_out, the metrics, and the
        metrics after fine-tuning as fine_tuned_<metric>; with `groups` also group, "" for clients
        of no group. Raises ConfigError without evaluations.
        """
        return read_clients(self.run_dir)

    @property
    def partition(self) -> list[np.ndarray]:
        """Positions of each client's training examples in the training half, N arrays int64 [n_i].

        They are read again as the configuration says. Raises ConfigError if the data set cannot be.
        """
        clients = loaded_plan(self.run_dir).clients
        return [clients.client(i) for i in range(len(clients))]

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """Last and best values of metrics and losses by name.

        An example is `{"accuracy": {"last": 0.9, "best": 0.92}}`.
        """
        return last_and_best(self.history, self.config.evaluate.best)

    @noting_changes()
    def net(self, client: int | None = None) -> nn.Module:
        """Return the configured net with the parameters and statistics of this result.

        It is a plain `torch.nn.Module` in evaluation mode, on the CPU.

        Args:
            client: number of a client, for the net that `evaluate.clients` evaluates it with after
                the last round, from the last checkpoint; None: the net of the server.

        Raises:
            ConfigError: the net cannot be built, for example because its file is missing, or the
                data set cannot be read, whose shape and classes the net needs; or there is no such
                client, no checkpoint of the last round, or no net by which the client predicts.
        """
        plan = loaded_plan(self.run_dir, trains=client is not None)
        return net_with(plan, self._tensors(plan, client))

    def _tensors(self, plan: Plan, client: int | None) -> dict[str, Tensor]:
        """Return the tensors of the server's net, or of the net of a client, by name."""
        if client is None:
            warn_of_own_models(plan, self.run_dir)
            return self.state_dict
        check_client(plan, client)
        if not have_own_models(plan):
            return self.state_dict
        saved = checkpoint.read_latest(self.run_dir)
        if saved is None or saved.facts["round"] < self.rounds:
            raise ConfigError(
                f"{self.run_dir}: there is no checkpoint after round {self.rounds}, which has the "
                "models of the clients; run it again with checkpoints (checkpoint.every)"
            )
        if saved.facts["round"] > self.rounds:
            raise ConfigError(
                f"{self.run_dir}: this is the result after round {self.rounds}, but the run has "
                f"gone on to round {saved.facts['round']}; load it again"
            )
        return client_state_dict(plan, self.run_dir, saved, client)

    @noting_changes()
    def predict(self, x: Any, client: int | None = None) -> Any:
        """Return the net's outputs for inputs that are given as the data set's examples were.

        Inputs are scaled as those of the data set (`data.scaling`); images are uint8.

        Args:
            x: inputs, [n, ...].
            client: number of a client, for its net; see `net`.

        Returns:
            The outputs of the net in evaluation mode, [n, ...], on the CPU, in the form in which
            forward returns them. For classification they are the logits, whose `argmax(1)` is the
            class.

        Raises:
            ConfigError: `x` has another form than the data set's examples, or the net or the data
                set cannot be read; see `net`.
        """
        plan = loaded_plan(self.run_dir, trains=client is not None)
        inputs, net = inputs_like(x, plan.dataset), net_with(plan, self._tensors(plan, client))
        labels = np.zeros(len(inputs), dtype=np.int64)
        scale, shift = plan.dataset.scale, plan.dataset.shift
        examples = Examples(inputs, labels, scale, shift, dtype=plan.dtype)
        batches = torch.arange(len(inputs)).split(self.config.evaluate.batch_size)
        forms, rows = OutputForms(), []
        with torch.no_grad():
            for batch in batches:
                rows.append(forms.pack(net(examples.batch(batch)[0]), len(batch)))
        return forms.unpacked(torch.cat(rows))

    @property
    def clients_per_second(self) -> float:
        """Trained clients per second of wall-clock time, over all rounds."""
        seconds = total(self.history, "system/round_seconds")
        return total(self.history, "clients/used") / seconds if seconds else 0.0

    def as_object(self) -> dict[str, Any]:
        """Return the summary that `--json` prints."""
        return {
            "run_id": self.run_id,
            "run_dir": str(self.run_dir.absolute()),
            "rounds": self.rounds,
            "metrics": self.metrics,
            "seconds": round(self.seconds, 3),
            "clients_per_second": round(self.clients_per_second, 3),
            "digest": self.digest,
            **({"state_digest": self.state_digest} if self.state_digest else {}),
            **({"stopped": self.stopped} if self.stopped else {}),
            **({"early_stop": self.early_stop} if self.early_stop else {}),
        }


def best_values(names: Iterable[str]) -> dict[str, Callable[[Iterable[float]], float]]:
    """Return the function that selects the best value of each metric that has one.

    Args:
        names: names of metrics; accuracy and losses come first, whatever their order.
    """
    names = sorted(filter(has_direction, set(names)))
    first = [name for name in FIRST_METRICS if name in names]
    ordered = dict.fromkeys([*first, *names])
    return {name: min if lower_is_better(name) else max for name in ordered}


def last_and_best(
    history: Iterable[Record], best_by: BestBy | None = None
) -> dict[str, dict[str, float]]:
    """Return the last and the best finite value of each metric that has a direction.

    A value of round 0, before any training, counts if there was no later evaluation.

    Args:
        history: records of the rounds, in order.
        best_by: the metric that selects the best model, with its direction, which is reported too;
            None: no further one.

    Returns:
        {"last": value, "best": value} by metric. Metrics without a finite value are left out.
    """
    summary = {}
    records = list(history)
    selects = best_values(itertools.chain.from_iterable(records))
    if best_by is not None:
        selects[best_by.metric] = best_by.select
    for name, best in selects.items():
        logged = {record["round"]: record[name] for record in records if name in record}
        trained = {t: value for t, value in logged.items() if t > 0} or logged
        if values := [value for value in trained.values() if np.isfinite(value)]:
            summary[name] = {"last": values[-1], "best": best(values)}
    return summary


def net_with(plan: Plan, named: dict[str, Tensor]) -> nn.Module:
    """Return a copy of a plan's net with these parameters and statistics, in evaluation mode.

    Args:
        plan: the plan of a run.
        named: parameters and BatchNorm statistics by name, as in `RunResult.state_dict`.

    Returns:
        The copy, in the run's floating-point type.
    """
    net = copy.deepcopy(plan.net).to(plan.dtype)
    net.load_state_dict(named)
    net.eval()  # a user's own may return nothing
    return net


def warn_of_own_models(plan: Plan, folder: Path) -> None:
    """Warn that a net is that of the server, if the clients of its run have models of their own.

    Args:
        plan: the plan of the run.
        folder: the folder of the run.
    """
    if not have_own_models(plan):
        return
    advice = ""
    if not overridden(plan.group(0).rule, ["predict"]):
        command = f"raysim export {shlex.quote(str(folder))} --client 0"
        advice = f"; net(client=0), or `{command}`, gives that of client 0"
    logger.warning(
        "this is the server's net, and clients of '%s' have models of their own%s",
        plan.label,
        advice,
    )


def best_figures(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the best value of each metric as best_<metric>, by which MLflow can sort runs.

    Args:
        metrics: last and best values by metric, as from `last_and_best`.
    """
    return {f"best_{name}": values["best"] for name, values in metrics.items()}


def parameters_digest(x: Tensor) -> str:
    """Return the sha256 of the parameters' bytes.

    Args:
        x: [P], the parameters, on the CPU.

    Returns:
        The digest in hexadecimal.
    """
    return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()


def digest_of_state(server: Mapping[str, Tensor], checksums: np.ndarray) -> str:
    """Return the sha256 of the state that a run has at its end.

    Args:
        server: the server's state, as `Server.snapshot` returned it.
        checksums: the CRC-32 of what each client keeps, int64 [N]; -1 for nothing.

    Returns:
        The digest in hexadecimal.
    """
    whole = hashlib.sha256(checksums.tobytes())
    for name, tensor in sorted(server.items()):
        whole.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        content = tensor.contiguous().reshape(-1).view(torch.uint8)  # NumPy lacks bfloat16
        whole.update(content.numpy().tobytes())
    return whole.hexdigest()


def total(history: Iterable[Record], metric: str) -> float:
    """Return the sum of a metric over the rounds that log it.

    Args:
        history: records of rounds.
        metric: name of the metric.
    """
    return sum(record.get(metric, 0.0) for record in history)


def loaded_plan(folder: Path, trains: bool = False) -> Plan:
    """Return the plan of a run, with the server's net.

    Args:
        folder: the folder of the run.
        trains: whether what only training and evaluations need, such as metrics, has to be that of
            the run, as for the net of a client. Objects that were given for it in Python are
            replaced otherwise.

    Raises:
        ConfigError: an object that was given in Python is missing; says how to give it.
    """
    replaced = {} if trains else without_objects_for_training(folder)
    with asking_for_objects(folder, loading_with, replaced), one_thread():
        return prepare(folder / "config.yaml", replaced)


@noting_changes()
def load(run: str | Path, *, tracking_uri: str | None = None, **objects: Any) -> RunResult:
    """Load the result of a run that is finished, or was stopped after a checkpoint.

    Args:
        run: the run's folder, or its MLflow id.
        tracking_uri: the MLflow store in which an id is looked up; the default is that of a
            configuration.
        **objects: the objects that the run was given in Python, such as `model`; `net` of the
            result needs them.

    Returns:
        The result. The result of a stopped run is that of its last checkpoint; to name its
        parameters, the run's data are read.

    Raises:
        ConfigError: there is no such run, it is still running, it has no checkpoint yet, or a file
            is damaged.
    """
    named_inputs(objects)  # from now on this process has them
    folder = run_dir.find_run_dir(run, tracking_uri)
    config = explain.validate(read_run_config(folder / "config.yaml"))
    tail = Tail(folder)
    run_id = tail.run_id or (tail.last("start") or {}).get("key", "")
    if (folder / PARAMETERS_FILE).exists():
        if not (folder / HISTORY_FILE).exists():
            raise ConfigError(
                f"{folder}: {HISTORY_FILE} is missing, as after a kill at the end of a run; "
                f"`raysim resume {shlex.quote(str(folder))}` writes it"
            )
        named, x, state_digest = _read_parameters(folder / PARAMETERS_FILE)
        history = read_history(folder / HISTORY_FILE)
        stopped = ""
    else:
        saved = checkpoint.read_latest(folder)
        if saved is None:
            raise ConfigError(
                f"{folder}: the run was stopped before its first checkpoint; "
                "`raysim resume` starts it"
            )
        x = evaluated_params(saved.server)
        history = saved.facts["history"]
        named = loaded_plan(folder).state_dict(saved.server, x)
        stopped = f"stopped after round {saved.facts['round']} of {config.rounds}"
        state_digest = ""
    seconds = total(history, "system/round_seconds")
    digest = parameters_digest(x)
    return RunResult(
        run_id, folder, config, history, x, named, digest, seconds, stopped, state_digest
    )


def write_parameters(plan: Plan, named: dict[str, Tensor], state_digest: str, folder: Path) -> None:
    """Write the final parameters and BatchNorm statistics into the run's folder.

    Args:
        plan: the run's plan.
        named: parameters and statistics by name.
        state_digest: see `RunResult`.
        folder: the run's folder.

    Raises:
        Unwritable: the file cannot be written, for example because the disk is full. The last
            checkpoint still contains the parameters.
    """
    facts = {PARAMETER_ORDER_KEY: json.dumps(plan.problem.names), STATE_DIGEST_KEY: state_digest}
    try:
        with files.whole(folder / PARAMETERS_FILE) as partial:
            save_file(named, partial, facts)
    except (OSError, SafetensorError) as error:
        why = files.why_unwritable(folder, error, "make room and `raysim resume` writes it")
        raise checkpoint.Unwritable(
            f"{folder / PARAMETERS_FILE} cannot be written: {why}"
        ) from None


def _read_parameters(path: Path) -> tuple[dict[str, Tensor], Tensor, str]:
    """Return the final parameters by name, and as one vector, and the digest of the state."""
    try:
        with safe_open(path, "pt") as file:
            # `file` is not a mapping, so it cannot be iterated without keys().
            named = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = file.metadata()
        # The file's names are sorted.
        in_order = {name: named[name] for name in json.loads(facts[PARAMETER_ORDER_KEY])}
        x = torch.cat([value.flatten() for value in in_order.values()])
        return {**in_order, **named}, x, facts.get(STATE_DIGEST_KEY, "")
    except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error!r}); put it back, or run it again"
        ) from None


def write_history(history: list[Record], path: Path) -> None:
    """Write the records of all rounds to a CSV file, one row per round.

    Args:
        history: metrics of each round by name; a missing one leaves its cell empty.
        path: the file, which is replaced.
    """
    columns = list(dict.fromkeys(itertools.chain.from_iterable(history)))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(history)


def read_history(path: Path) -> list[Record]:
    """Return the records of a CSV file that `write_history` wrote.

    Args:
        path: the CSV file.

    Raises:
        ConfigError: the file cannot be read, or has other values than numbers.
    """
    try:
        with path.open(newline="") as file:
            return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); put it back, or run it again"
        ) from None
