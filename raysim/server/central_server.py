"""Central server: state of the server rule and BatchNorm statistics, updated once per round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from raysim.errors import RaysimError
from raysim.numerics.fixed_point import combine, is_short, to_float
from raysim.rules.client_sampling import SelectionPool
from raysim.rules.contract import ServerRule, State
from raysim.rules.errors.returned_values import check_tensors
from raysim.rules.reports import NOT_REQUESTED, Cohort, Refused, Reports
from raysim.rules.rule import Problem
from raysim.server.client_dp_noise import NoisyMean
from raysim.server.collusion import Collusion
from raysim.server.selection import Candidates, named_candidates, selected_clients
from raysim.server.update_checks import check_update, described_uploads, errors_name_rule
from raysim.training.messages import Broadcast, WorkerResult
from raysim.training.tasks.server_task import ServerTask

FACTS_ABOUT_CLIENTS = ("ids", "samples", "steps", "draws", "staleness", "weights", "versions")
"""Attributes of `Reports` with an entry for each client of the round."""

NO_ROUND = -1
"""Value of `Server.last_prepared_round` before the first round."""

MIN_REMAINING_WEIGHT = 2.0**-900
"""Smallest share of a round's weights that must remain after clients were dropped.

Below it weighted updates come near the smallest float64, and the round does not change the model.
Only weights that decrease exponentially get this small.
"""


@dataclass
class RoundCohort:
    """Clients whose updates arrive in a round. The lists have one entry per client."""

    t: int
    """The round."""

    ids: list[int]
    """Ids of the clients."""

    bases: list[int]
    """Version of the global model from which each client started."""

    weights: list[float]
    """Aggregation weight of each client."""

    samples: list[int]
    """Number of training examples of each client."""

    steps: list[int]
    """Number of local steps of each client."""

    draws: list[int] = field(default_factory=list)
    """How often each client was drawn; empty means once."""

    dropped: set[int] = field(default_factory=set)
    """Ids of the clients whose updates are left out."""

    def cohort(self, problem: Problem, stay: list[int] | None = None) -> Cohort:
        """Return the facts about the clients that a rule may use before they train.

        Args:
            problem: the facts about the run.
            stay: positions of the clients to include; None includes all.
        """
        positions = list(range(len(self.ids))) if stay is None else stay
        return Cohort(
            self.t,
            [self.ids[i] for i in positions],
            problem.n_nonempty,
            samples=[self.samples[i] for i in positions],
            steps=[self.steps[i] for i in positions],
            staleness=[self.t - self.bases[i] for i in positions],
            draws=[self.draws[i] for i in positions] if self.draws else [1] * len(positions),
            seed=problem.seed,
        )


@dataclass
class ServerStep:
    """Result of the server's work between two rounds."""

    metrics: dict[str, float]
    """Metrics of the server rule for the finished round."""

    broadcast: Broadcast
    """Broadcast of the next round."""


class Server:
    """State of a server rule, updated once per round.

    Args:
        rule: the server rule.
        x0: [P], the initial parameters.
        buffers: [Q], the initial BatchNorm statistics.
        problem: the facts about data, clients and net that the rule may use.
        shapes: the shapes of declared uploads, by key; all others are vectors.
        personal: mask [P] of the parameters that clients keep to themselves, which the server does
            not change; None if there are none.
        noisy_mean: adds the noise of client-level privacy; None without it.
        task: the training problem of a rule with `needs_public_data`; None for other rules.
        collusion: the clients that change their uploads together; None if there are none.

    Raises:
        RaysimError: the rule's `init` fails, or breaks its contract.
    """

    def __init__(
        self,
        rule: ServerRule,
        x0: Tensor,
        buffers: Tensor,
        problem: Problem,
        shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
        personal: Tensor | None = None,
        noisy_mean: NoisyMean | None = None,
        task: ServerTask | None = None,
        collusion: Collusion | None = None,
    ):
        self.rule = rule
        self.task = task
        self.collusion = collusion
        self.personal = personal
        self.problem = problem
        self.shapes = shapes
        self.noisy_mean = noisy_mean
        with errors_name_rule(rule, "init", 0):
            # Copies, because on the CPU these are the tensors of the plan.
            self.state = rule.init(x0.clone(), problem)
            self.buffers = buffers.clone()
            check_tensors(rule, "init", self.state)
        self.cohort = Cohort(0, [], problem.n_nonempty, seed=problem.seed)
        self.last_prepared_round = NO_ROUND
        """The last round for which the rule's `before_round` has run."""
        self.selection: list[int] = []
        """The last round for which the rule's `select` has run, then the clients that it chose."""
        self.candidate_ids: list[int] = []
        """The last round for which the rule's `candidates` has run, then the clients it named."""

    def candidates(self, pool: SelectionPool, rng: Generator) -> Candidates:
        """Return the clients whose loss the rule asks for before it selects a round.

        The rule is not asked again if it selected for this round before the state was saved.

        Args:
            pool: the number of the round, and the clients to select from.
            rng: a generator that is keyed by seed and round.

        Raises:
            RaysimError: the rule fails, or names something else than clients.
        """
        selected = self.selection[:1] == [pool.round]
        if not selected:
            rule = self.rule.at(pool.round)
            with errors_name_rule(rule, "candidates", pool.round):
                self.candidate_ids = [pool.round, *named_candidates(rule, self.state, pool, rng)]
        is_of_round = self.candidate_ids[:1] == [pool.round]
        return Candidates(self.candidate_ids[1:] if is_of_round else [], selected)

    def select(self, pool: SelectionPool, rng: Generator) -> list[int]:
        """Return the clients that the rule selects for a round.

        The rule is not asked again if it selected for this round before the state was saved.

        Args:
            pool: the number of the round, and the clients to select from.
            rng: a generator that is keyed by seed and round.

        Raises:
            RaysimError: the rule fails, or returns something that `selected_clients` refuses.
        """
        if self.selection[:1] != [pool.round]:
            rule = self.rule.at(pool.round)
            with errors_name_rule(rule, "select", pool.round):
                self.selection = [pool.round, *selected_clients(rule, self.state, pool, rng)]
        return self.selection[1:]

    def broadcast(self, following: RoundCohort) -> Broadcast:
        """Run `before_round` for the next round, and return the broadcast of that round.

        `before_round` is skipped if it already ran for this round before the state was saved.

        Args:
            following: the next round; without clients, the broadcast is the present model.

        Raises:
            RaysimError: the rule fails, or breaks its contract.
        """
        rule = self.rule.at(following.t)
        previous_metrics = self.cohort.metrics
        self.cohort = following.cohort(self.problem)
        with errors_name_rule(rule, "before_round or broadcast", following.t):
            if self.last_prepared_round == following.t:
                # After a restore: what `before_round` logged comes from the snapshot.
                self.cohort.metrics.update(previous_metrics)
            elif following.ids:
                # A round without clients only asks for the model: at the end, or for candidates.
                state = rule.before_round(self.state, self.cohort)
                check_tensors(rule, "before_round", state)
                self.state = state
                self.last_prepared_round = following.t
            shared = rule.broadcast(self.state)
            check_tensors(rule, "broadcast", shared)
            if self.noisy_mean is not None:
                shared = {**shared, **self.noisy_mean.shared(self.state["x"].device)}
            return Broadcast(shared, self.buffers)

    def update(
        self, round: RoundCohort, outcomes: list[WorkerResult], bases: Mapping[int, Broadcast]
    ) -> dict[str, float]:
        """Apply a round's updates to the global model.

        A round in which all updates were dropped does not change the model.

        Args:
            round: the clients of the round, with those that are `dropped`.
            outcomes: the results of the workers, with the sums of the updates.
            bases: the model versions from which the clients started, by number; used if the rule
                has `needs_base_params`.

        Returns:
            The server rule's metrics.

        Raises:
            RaysimError: the rule fails, breaks its contract, or its parameters are not finite.
        """
        rule = self.rule.at(round.t)
        privacy_metrics: dict[str, float] = {}
        if self.noisy_mean is None:
            reports = self._reports(rule, round, outcomes, bases)
        else:
            reports, privacy_metrics = self._private_reports(rule, round, outcomes, self.noisy_mean)
        if reports is None:
            return {"server/uploads": 0.0, **self._named(self.cohort.metrics)}
        # First, so that the rule and the text of its errors have the uploads that attackers send.
        if self.collusion is not None:
            self.collusion.apply(reports)
        if (task := self.task) is not None:
            x = self.state["x"]
            reports.make_task = lambda: task.at_round(round.t, x, self.buffers)
        # The rule does not see the statistics; they are averaged by weights that `update` may set.
        mean_statistics = reports.totals.pop(("mean", "buffers"), None)
        client_statistics = reports.rows.pop("buffers", [])
        with errors_name_rule(rule, "update", round.t, lambda: described_uploads(reports)):
            state = rule.update(self.state, reports)
            check_update(rule, round.t, self.state, state, reports)
            # Uploads are 0 at personal parameters, so what the rule makes of them means nothing.
            if self.personal is not None:
                state = {**state, "x": torch.where(self.personal, self.state["x"], state["x"])}
        self.state = state
        self._average_statistics(mean_statistics, client_statistics, reports.given_weights)
        n_uploads = sum(client not in round.dropped for client in round.ids)
        if n_uploads:
            # Under client-level privacy reports refuse to give the weights, which are all equal.
            weights = reports.weights if self.noisy_mean is None else [1.0] * n_uploads
            reports.log(weights_entropy=_entropy(reports.given_weights or weights))
        return {
            **self._named(reports.metrics),
            **privacy_metrics,
            "server/uploads": float(n_uploads),
            "system/server_state_bytes": float(self.bytes),
        }

    def _reports(
        self,
        rule: ServerRule,
        round: RoundCohort,
        outcomes: list[WorkerResult],
        bases: Mapping[int, Broadcast],
    ) -> Reports | None:
        """Return the updates of a round for the rule; None if too little weight remains."""
        stay = [i for i, client in enumerate(round.ids) if client not in round.dropped]
        # A worker whose clients have all failed has no sums.
        outcomes = [o for o in outcomes if o.ids]
        if not stay or not outcomes:
            return None
        cohort = round.cohort(self.problem, stay)
        weights = [round.weights[i] for i in stay]
        remaining = 1.0
        # Workers weighted their clients as part of the whole cohort. Divided by this share,
        # the sums are means over the clients that remain.
        if round.dropped:
            with errors_name_rule(rule, "weigh", round.t):
                weight_in_sums = sum(weights)
                weights = rule.weigh(cohort)
            remaining = weight_in_sums / sum(weights)
            if remaining < MIN_REMAINING_WEIGHT:
                return None
        totals, n_short = self._totals(outcomes, remaining, sum(weights))
        metrics = dict(self.cohort.metrics)
        if n_short:
            metrics["short_sums"] = float(n_short)
        return Reports(
            **{**vars(cohort), "metrics": metrics},
            weights=weights,
            versions=[round.bases[i] for i in stay],
            bases=[rule.sent_to(bases[round.bases[i]].shared, round.ids[i])["x"] for i in stay]
            if rule.needs_base_params
            else NOT_REQUESTED,
            totals=totals,
            rows=self._rows(outcomes, [round.ids[i] for i in stay]),
        )

    def _private_reports(
        self,
        rule: ServerRule,
        round: RoundCohort,
        outcomes: list[WorkerResult],
        noisy_mean: NoisyMean,
    ) -> tuple[Reports, dict[str, float]]:
        """Return a round's noisy mean for the rule, and the metrics of privacy.

        The rule gets no facts about the clients, not even their number: ε does not cover them.
        """
        stay = [i for i, client in enumerate(round.ids) if client not in round.dropped]
        outcomes = [o for o in outcomes if o.ids] if stay else []
        # Dropped clients do not change the divisor, which would tell how many took part.
        totals = self._totals(outcomes, 1.0, 1.0)[0] if outcomes else {}
        mean, metrics = noisy_mean.release(round.t, totals, len(stay), self.state["x"])
        cohort = vars(round.cohort(self.problem, stay))
        secret = {name: _withheld(rule, name) for name in FACTS_ABOUT_CLIENTS}
        reports = Reports(
            **{**cohort, **secret, "metrics": dict(self.cohort.metrics)},
            totals={("mean", noisy_mean.key): mean},
        )
        return reports, metrics

    def _average_statistics(
        self,
        mean: Tensor | None,
        client_statistics: list[Tensor],
        given_weights: list[float] | None,
    ) -> None:
        """Average the clients' BatchNorm statistics [Q].

        The weights are those of the round's means, or those that the rule set in `update`.
        """
        if mean is None:
            return
        if given_weights is None:
            self.buffers = mean
        else:
            self.buffers = _mixed(self.buffers, client_statistics, given_weights)

    def _totals(
        self, outcomes: list[WorkerResult], remaining: float, weight: float
    ) -> tuple[dict[tuple[str, str], Tensor], int]:
        """Return the sums over all workers by upload mode and key, and how many are short.

        Args:
            outcomes: the results of the workers.
            remaining: the share of the weights that remains after clients were dropped; means are
                divided by it.
            weight: the sum of the weights. The mean of BatchNorm statistics is divided by it,
                because it must be a proper mean even if the weights do not add up to 1.
        """
        x = self.state["x"]
        bound = sum(o.bound for o in outcomes)
        totals = {}
        n_short = 0
        for name in outcomes[0].sums:
            mode, _, key = name.partition(" ")
            total = combine([o.sums[name] for o in outcomes], bound)
            divisor = {"mean": remaining, "sum": 1.0, "difference": float(self.problem.n_nonempty)}[
                mode
            ]
            divisor *= weight if key == "buffers" else 1.0
            # Rules add differences up over all rounds; noise is added before a mean is rounded.
            is_exact = mode == "difference" or self.noisy_mean is not None
            dtype = torch.float64 if is_exact else x.dtype
            summed = to_float(total, dtype, divisor).to(x.device)
            n_short += is_short(total, summed, divisor, x.dtype == torch.float64)
            totals[mode, key] = summed.reshape(self.shapes.get(key, (-1,)))
        return totals, n_short

    def _rows(self, outcomes: list[WorkerResult], ids: list[int]) -> dict[str, list[Tensor]]:
        """Return the uploads that are kept per client, by key, in the order of `ids`."""
        arrived = [client for o in outcomes for client in o.ids]
        position = {client: i for i, client in enumerate(arrived)}
        device = self.state["x"].device
        uploads_by_key = {}
        for key in outcomes[0].rows:
            uploads = [row for o in outcomes for row in o.rows[key]]
            uploads_by_key[key] = [uploads[position[client]].to(device) for client in ids]
        return uploads_by_key

    @staticmethod
    def _named(metrics: dict[str, float]) -> dict[str, float]:
        """Return a rule's metrics with the prefix `server/`, sizes in bytes `system/server_`."""
        return {
            f"system/server_{name}" if name.endswith("_bytes") else f"server/{name}": value
            for name, value in metrics.items()
        }

    def advance(
        self,
        round: RoundCohort,
        outcomes: list[WorkerResult],
        bases: Mapping[int, Broadcast],
        following: RoundCohort,
    ) -> ServerStep:
        """Do the server's work between two rounds: `update`, then `broadcast`.

        Args:
            round: the clients of the finished round.
            outcomes: the results of the workers, with the sums of the updates.
            bases: the model versions from which the clients started, by number.
            following: the clients of the next round.

        Returns:
            The metrics of the finished round and the broadcast of the next round.

        Raises:
            RaysimError: the rule fails, breaks its contract, or its parameters are not finite.
        """
        metrics = self.update(round, outcomes, bases)
        return ServerStep(metrics, self.broadcast(following))

    def snapshot(self) -> State:
        """Return a copy of the complete state on the CPU.

        It includes the last rounds for which `before_round`, `candidates` and `select` ran, and
        their results.
        """
        return {
            # Copies: a rule may change large buffers in place before the checkpoint is written.
            **{f"state/{k}": v.detach().cpu().clone() for k, v in self.state.items()},
            **{
                f"admitted/{k}": torch.tensor(v, dtype=torch.float64)
                for k, v in self.cohort.metrics.items()
            },
            "admitted": torch.tensor(self.last_prepared_round),
            **({"selection": torch.tensor(self.selection)} if self.selection else {}),
            **({"candidates": torch.tensor(self.candidate_ids)} if self.candidate_ids else {}),
            "buffers": self.buffers.cpu().clone(),
            **(self.noisy_mean.snapshot() if self.noisy_mean is not None else {}),
        }

    def restore(self, snapshot: State) -> None:
        """Restore the state that `snapshot` returned.

        Args:
            snapshot: the rule's state, BatchNorm statistics, and what has been prepared for the
                next round.

        Raises:
            RaysimError: the snapshot comes from another rule or another model.
        """
        # All tensors are checked before one is set, so that a refused snapshot changes nothing.
        for key, tensor in self.state.items():
            saved = snapshot.get(f"state/{key}")
            if saved is None or saved.shape != tensor.shape:
                raise RaysimError(
                    f"the saved state does not fit server rule '{self.rule.name}' with "
                    f"{self.problem.size:,} parameters: '{key}' is missing or has another shape"
                )
        self.state = {k: snapshot[f"state/{k}"].to(v.device) for k, v in self.state.items()}
        self.buffers = snapshot["buffers"].to(self.buffers)
        self.last_prepared_round = int(snapshot["admitted"])
        self.selection = snapshot["selection"].tolist() if "selection" in snapshot else []
        self.candidate_ids = snapshot["candidates"].tolist() if "candidates" in snapshot else []
        if self.noisy_mean is not None:
            self.noisy_mean.restore(snapshot)
        metrics = {
            k.removeprefix("admitted/"): float(v)
            for k, v in snapshot.items()
            if k.startswith("admitted/")
        }
        self.cohort.metrics.clear()
        self.cohort.metrics.update(metrics)

    @property
    def bytes(self) -> int:
        """Memory of the server's state, in bytes."""
        return sum(t.numel() * t.element_size() for t in self.state.values())


def _mixed(present: Tensor, client_statistics: list[Tensor], weights: list[float]) -> Tensor:
    """Return the weighted sum of statistics [Q]; `present` gets 1 minus the sum of the weights."""
    mixed = present.double() * (1 - sum(weights))
    for statistics, p in zip(client_statistics, weights, strict=True):
        mixed += p * statistics.double()
    return mixed.to(present.dtype)


def _entropy(weights: list[float]) -> float:
    """Return the entropy of the weights in nats: log K if all K weights are equal."""
    p = np.array(weights) / sum(weights)
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def _withheld(rule: ServerRule, name: str) -> Refused:
    """Return the placeholder of a fact about clients that are private, by its name in `Reports`."""
    return Refused(
        f"server rule '{rule.name}' reads reports.{name}, and with privacy.unit 'client' the "
        "guarantee covers a server that sees the noisy mean alone; use a server rule that does "
        "without, such as fedavg, or leave privacy out"
    )
