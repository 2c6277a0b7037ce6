"""Evaluation of single clients on the driver: which clients, when, the table and the metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from raysim.config.sections.evaluation import EvaluateClients
from raysim.data import Clients
from raysim.engine.executor import Executor, Future, ModelHandle, RoundResults
from raysim.engine.plan import Plan
from raysim.engine.round_clients import failed_clients
from raysim.engine.state.client_store import ClientStateStore
from raysim.errors import ConfigError, RaysimError, in_a_line
from raysim.metrics import VALIDATION
from raysim.metrics.table import UNDEFINED
from raysim.randomness import generator
from raysim.system import files
from raysim.training.client_evaluator import uses_own_models
from raysim.training.messages import Block, ClientEvaluation, ClientTask, cut_blocks

if TYPE_CHECKING:
    import pandas as pd

CLIENTS_PER_BLOCK = 16
"""Clients that a worker evaluates together."""

TABLES_FOLDER = "clients"
"""Folder of a run's tables of clients, one for each evaluation."""

WORST_SHARE = 0.1
"""Share of the clients whose mean is the figure `_worst10`."""

FINE_TUNED = "fine_tuned_"
"""First part of the columns with metrics after fine-tuning."""


class ClientEvaluations:
    """The evaluations of clients in one run. In a run without any, `due` is always False.

    Args:
        plan: the plan of the run.
        run_dir: the folder of the run; None if it has none.
        rounds_done: number of rounds that are complete. Tables of later rounds are removed.
    """

    def __init__(self, plan: Plan, run_dir: Path | None, rounds_done: int):
        self.config = plan.config
        self.asked = plan.config.evaluate.clients
        self.folder = None if run_dir is None else run_dir / TABLES_FOLDER
        self.metrics = {m.name: m.larger_is_better is not False for m in plan.metrics}
        """The metrics of a client on its test and its validation examples, and whether larger
        values are better."""
        self.metrics |= {"loss": False}
        self.metrics |= {f"{VALIDATION}{name}": larger for name, larger in self.metrics.items()}
        self.sends_states = have_own_models(plan)
        self.has_val = plan.config.partition.val is not None
        if self.asked is None or not isinstance(plan.clients, Clients):
            return
        self.held_out = set(plan.clients.held_out.tolist())
        self.n_without: dict[str, int] = {}
        """How many clients with training examples have none for a test or for validation."""
        self.groups: np.ndarray | None = None
        """[N], the name of each client's group, "" for none; None if the run has no groups."""
        if plan.members is not None:
            self.groups = np.array([group.name for group in plan.all_groups])[plan.members]
        self.ids = self._choose(plan.clients, self.asked)
        """The clients that are evaluated, in ascending order."""
        for t, path in tables(run_dir).items():
            if t > rounds_done:
                path.unlink()

    def _choose(self, clients: Clients, asked: EvaluateClients) -> list[int]:
        """Return the clients that are evaluated, at most `sample` that train and as many held out.

        Count those with training examples that cannot be evaluated.
        """
        included = np.ones(len(clients), dtype=bool)
        if self.groups is not None:
            included = ~np.isin(self.groups, asked.exclude)
        if not included.any():
            raise ConfigError("evaluate.clients.exclude: no client is left to evaluate")
        trains = included & (clients.all_examples().sizes > 0)
        has_examples = np.zeros(len(clients), dtype=bool)
        for kind, lists in (("test", clients.test), ("val", clients.val)):
            if lists is not None:
                self.n_without[f"clients/without_{kind}"] = int((trains & (lists.sizes == 0)).sum())
                has_examples |= lists.sizes > 0
        with_examples = np.flatnonzero(included & has_examples)
        is_held_out = np.isin(with_examples, clients.held_out)
        rng = generator(self.config.seed, "evaluated clients")
        train = rng.permutation(with_examples[~is_held_out])[: asked.sample]
        held_out = rng.permutation(with_examples[is_held_out])[: asked.sample]
        return np.sort(np.concatenate([train, held_out])).tolist()

    def due(self, rounds_done: int) -> bool:
        """Return whether clients are evaluated after `rounds_done` rounds.

        Args:
            rounds_done: number of completed rounds.
        """
        return self.asked is not None and self.asked.due(rounds_done, self.config.rounds)

    def start(
        self,
        executor: Executor[ModelHandle],
        version: int,
        broadcast: ModelHandle,
        store: ClientStateStore,
    ) -> ClientMetrics:
        """Start an evaluation, and return its metrics as a future.

        Args:
            executor: the executor of the run.
            version: the number of the newest version of the model.
            broadcast: this version, as the executor refers to it.
            store: the states of the clients.
        """
        results = executor.evaluate_clients(version, broadcast, self._blocks(version, store))
        return ClientMetrics(results, partial(self.record, version))

    def _blocks(self, version: int, store: ClientStateStore) -> list[Block]:
        """Return the clients in blocks of evaluation."""
        assert self.asked is not None
        steps = self.asked.fine_tune.steps if self.asked.fine_tune else 0
        return evaluation_blocks(self.ids, version, store, self.sends_states, "test", steps)

    def record(self, version: int, results: RoundResults) -> dict[str, float]:
        """Write the table of an evaluation, and return its metrics.

        Args:
            version: number of the version of the global model, which is that of completed rounds.
            results: results of the workers.

        Returns:
            The metrics by name, with counts of the clients and the seconds that workers took.

        Raises:
            ClientError: an evaluation failed, and `faults.on_client_error` is "stop".
            RaysimError: the table cannot be written.
        """
        failed = failed_clients(
            results,
            f"the evaluation of client {{}} after round {version} failed",
            self.config.faults.on_client_error,
            "leaves such clients out of all metrics",
        )
        evaluations = [done for done in results.evaluations if done.error is None]
        evaluations.sort(key=lambda done: done.client)
        if self.folder is not None and evaluations:
            self._write_table(version, evaluations)
        not_evaluated = {**self.n_without, "clients/evaluation_failed": len(failed)}
        return {
            "clients/evaluated": float(len(evaluations)),
            **{name: float(n) for name, n in not_evaluated.items() if n},
            **self._metrics(evaluations),
            "system/client_evaluation_seconds": sum(worker.seconds for worker in results.workers),
        }

    def _metrics(self, evaluations: list[ClientEvaluation]) -> dict[str, float]:
        """Return the figures of each metric over the clients that train and those held out."""
        metrics: dict[str, float] = {}
        train = [done for done in evaluations if done.client not in self.held_out]
        held_out = [done for done in evaluations if done.client in self.held_out]
        for metric in self.metrics:
            metrics |= self._figures_of_group("clients", "fine_tuned", metric, train)
            metrics |= self._figures_of_group("held_out", "held_out_fine_tuned", metric, held_out)
            if f"held_out/{metric}" in metrics and f"clients/{metric}" in metrics:
                gap = metrics[f"clients/{metric}"] - metrics[f"held_out/{metric}"]
                metrics[f"participation_gap/{metric}"] = gap
        return metrics

    def _figures_of_group(
        self, name: str, name_fine_tuned: str, metric: str, group: list[ClientEvaluation]
    ) -> dict[str, float]:
        """Return the figures of a metric over some clients, before and after fine-tuning."""
        values: list[tuple[float, int]] = []
        values_fine_tuned: list[tuple[float, int]] = []
        for done in group:
            weight = done.val_examples if metric.startswith(VALIDATION) else done.examples
            # Clients without examples have no value; they are counted as clients/without_test.
            if metric in done.metrics:
                values.append((done.metrics[metric], weight))
            if metric in done.fine_tuned:
                values_fine_tuned.append((done.fine_tuned[metric], weight))
        metrics = {}
        for prefix, weighted in ((name, values), (name_fine_tuned, values_fine_tuned)):
            for figure, value in figures(weighted, self.metrics[metric]).items():
                metrics[f"{prefix}/{metric}{figure}"] = value
            if undefined := sum(np.isnan(value) for value, _ in weighted):
                metrics[f"{prefix}/{UNDEFINED}{metric}"] = float(undefined)
        return metrics

    def _write_table(self, version: int, evaluations: list[ClientEvaluation]) -> None:
        """Write a row for each client."""
        import pandas as pd

        assert self.folder is not None
        rows = []
        for done in evaluations:
            row: dict[str, object] = {"round": version, "client": done.client}
            row["examples"] = done.examples
            if self.has_val:
                row["val_examples"] = done.val_examples
            row["held_out"] = done.client in self.held_out
            if self.groups is not None:
                row["group"] = self.groups[done.client]
            fine_tuned = {f"{FINE_TUNED}{name}": value for name, value in done.fine_tuned.items()}
            rows.append({**row, **done.metrics, **fine_tuned})
        path = self.folder / f"round-{version:09d}.parquet"
        try:
            self.folder.mkdir(exist_ok=True)
            with files.whole(path) as partial:
                pd.DataFrame(rows).to_parquet(partial, index=False, write_page_checksum=True)
        except OSError as error:
            fix = "free some space and continue from the last checkpoint with `raysim resume`"
            why = files.why_unwritable(self.folder.parent, error, fix)
            raise RaysimError(f"{path} cannot be written: {why}") from None


def have_own_models(plan: Plan) -> bool:
    """Return whether clients use other models than the global one, so they need their states.

    Args:
        plan: the plan of the run.
    """
    rules = [group.rule for group in plan.all_groups]
    return any(uses_own_models(plan.config, rule, plan.server) for rule in rules)


def evaluation_blocks(
    clients: Iterable[int],
    version: int,
    store: ClientStateStore,
    sends_states: bool,
    examples: Literal["test", "training"],
    steps: int = 0,
) -> list[Block]:
    """Return clients in blocks of evaluation.

    Args:
        clients: numbers of the clients.
        version: the number of the version of the model.
        store: the states of the clients, with whether they have taken part.
        sends_states: whether the clients need their states.
        examples: the examples on which they are evaluated.
        steps: local steps of fine-tuning; 0 without it.
    """
    tasks = [
        ClientTask(
            client,
            version,
            cursor=0,
            weight=0.0,
            steps=steps,
            seen=bool(store.seen[client]),
            client_state=store.get(client) if sends_states else None,
        )
        for client in clients
    ]
    return cut_blocks(tasks, CLIENTS_PER_BLOCK, examples)


@dataclass
class ClientMetrics:
    """Future metrics of an evaluation of clients."""

    results: Future[RoundResults]
    """Results of the workers."""
    record: Callable[[RoundResults], dict[str, float]]
    """Returns the metrics of the results."""

    def ready(self) -> bool:
        """Return whether `get` returns without waiting."""
        return self.results.ready()

    def get(self) -> dict[str, float]:
        """Wait for the results and return their metrics.

        Raises:
            ClientError: an evaluation failed, and `faults.on_client_error` is "stop".
            RaysimError: the table cannot be written.
        """
        return self.record(self.results.get())


def figures(weighted: list[tuple[float, int]], larger_is_better: bool) -> dict[str, float]:
    """Return the figures of a metric over clients, by the ends of their names; {} without clients.

    Clients for which the metric is not defined (NaN: the AUC of one class, say) do not count.

    Args:
        weighted: the metric of each client, and the number of its examples on which it was
            measured.
        larger_is_better: whether the worst clients are those with the lowest values.

    Returns:
        The figures of `metrics.CLIENT_FIGURES`. The worst 10 % of the clients are rounded up.
    """
    defined = [(value, weight) for value, weight in weighted if not np.isnan(value)]
    if not defined:
        return {}
    values, weights = zip(*defined, strict=True)
    from_worst = np.sort(values) if larger_is_better else np.sort(values)[::-1]
    n_worst = int(np.ceil(WORST_SHARE * len(values)))
    return {
        "": float(np.mean(values)),
        "_weighted": float(np.average(values, weights=weights)),
        "_std": float(np.std(values)),
        "_q10": float(np.quantile(values, 0.1)),
        "_worst10": float(from_worst[:n_worst].mean()),
    }


def tables(run_dir: Path | None) -> dict[int, Path]:
    """Return the files of a run's tables of clients by round, in ascending order.

    Args:
        run_dir: the folder of the run; None if it has none.
    """
    return files.of_rounds(run_dir / TABLES_FOLDER, ".parquet") if run_dir else {}


def read_clients(run_dir: Path) -> pd.DataFrame:
    """Return the table of the clients that a run has evaluated.

    Args:
        run_dir: the folder of the run.

    Returns:
        A row for each client and evaluation: round, client, examples (of its test), held_out,
        the metrics, and the metrics after fine-tuning as fine_tuned_<metric>. With `partition.val`
        also val_examples, and each metric on them as val_<metric>. With `groups` also group, "" for
        clients of no group.

    Raises:
        ConfigError: the run has evaluated no clients, or a table is damaged.
    """
    import pandas as pd

    of_rounds = tables(run_dir)
    if not of_rounds:
        raise ConfigError(
            f"{run_dir}: no clients were evaluated in this run; set evaluate.clients and "
            "partition.test"
        )
    read = []
    for path in of_rounds.values():
        try:
            read.append(pd.read_parquet(path, page_checksum_verification=True))
        # Damaged names and types of columns raise errors of all these kinds.
        except (OSError, ValueError, TypeError, LookupError, NotImplementedError) as error:
            raise ConfigError(
                f"{path} is damaged: {in_a_line(error)}; remove it, and that evaluation is missing "
                "in the table"
            ) from None
    return pd.concat(read, ignore_index=True)
