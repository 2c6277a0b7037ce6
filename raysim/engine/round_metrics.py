"""The metrics of a round. The registry `raysim.metrics` defines each of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np

from raysim.config.schema import Config
from raysim.data.partition.clients import Clients, VirtualClients
from raysim.data.partition.groups import batch_sizes_of, drops_last
from raysim.engine.executor import Record, RoundResults
from raysim.engine.state.client_store import ClientStateStore
from raysim.schedule import ScheduledRound
from raysim.training.batches.batch_order import batches_per_pass
from raysim.training.messages import ClientResult
from raysim.training.tasks.dp_sgd import epsilon, passes
from raysim.training.uploads.client_level_dp import client_epsilon

LOSS_QUANTILES = (0.1, 0.5, 0.9)

UPDATES_NOT_USED = {
    "clients/failed": "failed",
    "clients/dropped_out": "dropped out",
    "clients/missed_deadline": "missed the deadline",
    "clients/discarded_stale": "were too stale",
}
"""Metrics that count the clients whose updates are not used, and what became of those clients."""


def participation_metrics(
    config: Config, scheduled: ScheduledRound, n_used: int, n_failed: int, n_never_seen: int
) -> Record:
    """Return the virtual time of a round and the numbers of clients by what became of them.

    What the configuration rules out is not counted. A virtual time that is always the number of
    rounds is not logged.

    Args:
        config: the configuration of the run.
        scheduled: the scheduled round.
        n_used: clients whose updates are used.
        n_failed: clients that failed.
        n_never_seen: clients that never took part.
    """

    def is_set(key: str) -> bool:
        return getattr(config.schedule, key, None) is not None

    not_used = [
        ("failed", n_failed, config.faults.on_client_error == "drop"),
        ("dropped_out", scheduled.dropped_out, is_set("client_dropout")),
        ("missed_deadline", scheduled.missed_deadline, is_set("deadline")),
        ("discarded_stale", scheduled.discarded_stale, is_set("max_staleness")),
    ]
    return {
        "round": float(scheduled.t + 1),
        **virtual_time_metric(config, scheduled.time),
        "clients/used": float(n_used),
        "clients/never_seen": float(n_never_seen),
        **{f"clients/{fate}": float(n) for fate, n, is_possible in not_used if is_possible},
    }


def virtual_time_metric(config: Config, time: float) -> Record:
    """Return the virtual time; {} where it is always the number of rounds.

    Args:
        config: the configuration of the run.
        time: the virtual time at the end of the round.
    """
    # Under client privacy a round may have clients without examples only; it takes no time.
    if config.schedule.time_is_rounds and config.client_privacy is None:
        return {}
    return {"virtual_time": float(time)}


def staleness_metrics(scheduled: ScheduledRound) -> Record:
    """Return mean and maximum of the arrivals' staleness, and a histogram; {} without arrivals.

    The bins are 0, 1, 2 to 3, 4 to 7, and so on; each is named after its lowest staleness.

    Args:
        scheduled: the scheduled round.
    """
    if not scheduled.arrivals:
        return {}
    staleness = np.array(scheduled.staleness)
    largest = int(staleness.max())
    metrics = {"staleness/mean": float(staleness.mean()), "staleness/max": float(largest)}
    edges = [0, *(2**k for k in range(largest.bit_length() + 1))]
    for low, high in pairwise(edges):
        in_bin = (staleness >= low) & (staleness < high)
        metrics[f"staleness/from_{low}"] = float(in_bin.sum())
    return metrics


def client_metrics(clients: Sequence[ClientResult]) -> Record:
    """Return the training loss of a round's clients, and the metrics that their rules reported.

    Metrics of a rule are averaged over the clients that have them, where NaN is none; of a metric
    whose name ends in "_max" the maximum is used.

    Args:
        clients: the clients of the round whose updates were used.

    Returns:
        `train_loss`, quantiles of the clients' losses, and "client/NAME" for each metric of the
        rule; {} without clients.
    """
    if not clients:
        return {}
    losses = np.array([client.loss for client in clients])
    metrics = {"train_loss": float(losses.mean())}
    with np.errstate(invalid="ignore"):  # between infinite losses
        quantiles = np.quantile(losses, LOSS_QUANTILES)
    for q, loss in zip(LOSS_QUANTILES, quantiles, strict=True):
        metrics[f"client_loss/q{round(100 * q)}"] = float(loss)
    # Clients of other groups, and those without mini-batches, may not have a metric.
    values_by_name: dict[str, list[float]] = {}
    for client in clients:
        for name, value in client.metrics.items():
            values_by_name.setdefault(name, []).append(value)
    for name, values in values_by_name.items():
        known = [value for value in values if not np.isnan(value)] or values
        pooled = np.max(known) if name.endswith("_max") else np.mean(known)
        metrics[f"client/{name}"] = float(pooled)
    return metrics


def client_state_metrics(store: ClientStateStore) -> Record:
    """Return how many bytes clients' states take; {} if clients keep none.

    Args:
        store: the clients' states, in memory and on disk.
    """
    if not store.bytes and not store.disk_bytes:
        return {}
    return {
        "system/client_state_bytes": float(store.bytes),
        "system/client_state_bytes_on_disk": float(store.disk_bytes),
    }


def privacy_metrics(
    config: Config, rounds_done: int, clients: Clients | VirtualClients, cursors: np.ndarray
) -> Record:
    """Return ε of all rounds so far, as "privacy/epsilon"; {} without privacy.

    For the privacy of examples it is ε of the client with most passes over its data.

    Args:
        config: the configuration of the run.
        rounds_done: number of completed rounds.
        clients: the partition, with the number of examples of each client.
        cursors: [N], batches that each client has drawn.
    """
    if config.client_privacy is not None:
        of_clients = client_epsilon(
            "poisson" if config.samples_by_poisson else "uniform",
            config.schedule.size,
            clients.n_training,
            config.client_privacy.noise_multiplier,
            config.client_privacy.delta,
            rounds_done,
        )
        return {"privacy/epsilon": of_clients}
    private = config.example_privacy
    if private is None:
        return {}
    # Many clients, few kinds: the batches of a pass are counted once for each kind.
    dropped = drops_last(config, len(clients))
    kinds = np.stack([clients.sizes, batch_sizes_of(config, clients.sizes), dropped])
    different, which = np.unique(kinds, axis=1, return_inverse=True)
    per_pass = [
        batches_per_pass(n, size, drop_last=bool(drops)) for n, size, drops in different.T.tolist()
    ]
    spent = passes(cursors, np.array(per_pass)[which])
    return {"privacy/epsilon": epsilon(private.noise_multiplier, private.delta, spent)}


class Stopwatch:
    """Measures rounds, from the end of one cohort's training to the end of the next one's."""

    def __init__(self) -> None:
        self._round_started = time.perf_counter()
        self._evaluation_seconds = 0.0

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count the time spent in the context as evaluation."""
        started = time.perf_counter()
        yield
        self._evaluation_seconds += time.perf_counter() - started

    def lap(self, results: RoundResults) -> Record:
        """End a round; return its seconds, and how many were neither training nor evaluation.

        Args:
            results: the results of the round, with the seconds of its training.
        """
        now = time.perf_counter()
        seconds = now - self._round_started
        trained_seconds = results.metrics.get("system/train_seconds", 0.0)
        overhead = seconds - self._evaluation_seconds - trained_seconds
        self._round_started = now
        self._evaluation_seconds = 0.0
        trained = sum(done.error is None for done in results.clients)
        uncaptured = sum(outcome.uncaptured_steps for outcome in results.workers)
        return {
            "system/round_seconds": seconds,
            "system/clients_per_second": trained / seconds,
            "system/overhead_seconds": overhead,
            **({"system/uncaptured_steps": uncaptured} if uncaptured else {}),
        }
