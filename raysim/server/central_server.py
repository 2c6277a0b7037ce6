"""Central server: state of the server rule and BatchNorm statistics, updated once per round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.random import Generator
from torch import Tensor

from raysim.errors import RaysimError
from raysim.models.default_device import brought_to, tensors_on
from raysim.rules.client_sampling import SelectionPool
from raysim.rules.contract import ServerRule, State, overridden
from raysim.rules.errors.returned_values import check_tensors
from raysim.rules.errors.user_code import breach
from raysim.rules.reports import Cohort, Reports
from raysim.rules.rule import Problem
from raysim.server.batchnorm_average import averaged_statistics
from raysim.server.round_cohort import RoundCohort
from raysim.server.round_uploads import (
    BUFFERS,
    total_uploads,
    uploads_of_clients,
)
from raysim.server.selection import named_candidates, selected_clients
from raysim.server.update_checks import (
    check_evaluated,
    check_state,
    check_unchanged,
    check_update,
    described_uploads,
    errors_name_rule,
    versions_of,
)
from raysim.server.update_steps import UpdateStep
from raysim.training.messages import Broadcast, WorkerResult

EVALUATED = "evaluated"
"""Key of a snapshot for the evaluated parameters, if they are not those of the state."""

MIN_REMAINING_WEIGHT = 2.0**-900
"""Smallest share of a round's weights that must remain after clients were dropped.

Below it weighted updates come near the smallest float64, and the round does not change the model.
Only weights that decrease exponentially get this small.
"""


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
        steps: the steps around each update, in their order.

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
        steps: Sequence[UpdateStep] = (),
    ):
        self.rule = rule
        self.problem = problem
        self.shapes = shapes
        self.steps = steps
        self.hides_clients = any(step.hides_clients for step in steps)
        self.device = x0.device
        with self._names_errors(rule, "init", 0):
            # Copies, because on the CPU these are the tensors of the plan.
            self.state = rule.init(x0.clone(), problem)
            self.buffers = buffers.clone()
            check_tensors(rule, "init", self.state)
            if "x" not in self.state:
                raise breach(rule, "init", "returns no 'x'; return the parameters under this key")
            check_state(rule, "init", {"x": x0}, {"x": self.state["x"]})
        self.cohort = Cohort(0, [], problem.n_nonempty, seed=problem.seed)
        self.sent: State = {}
        """The tensors of the last broadcast, which clients may still use."""
        self.evaluated: Tensor | None = None
        """[P], the parameters that the last broadcast has for evaluation alone."""
        self.updated = self.state
        """The state after the last update, before `before_round`. It is what a snapshot has: a
        fork may have other clients in its first round."""

    @contextmanager
    def _names_errors(
        self, rule: ServerRule, method: str, t: int, details: Callable[[], str] = str
    ) -> Iterator[None]:
        """Name the rule in errors, whose tensors are made on the server's device."""
        with tensors_on(self.device), errors_name_rule(rule, method, t, details):
            yield

    def candidates(self, pool: SelectionPool, rng: Generator) -> list[int]:
        """Return the clients whose loss the rule asks for before it selects a round.

        Args:
            pool: the number of the round, and the clients to select from.
            rng: a generator that is keyed by seed and round.

        Raises:
            RaysimError: the rule fails, or names something else than clients.
        """
        rule = self.rule.at(pool.round)
        with self._names_errors(rule, "candidates", pool.round):
            return named_candidates(rule, {**self.state}, pool, rng)

    def select(self, pool: SelectionPool, rng: Generator) -> list[int]:
        """Return the clients that the rule selects for a round.

        Args:
            pool: the number of the round, and the clients to select from.
            rng: a generator that is keyed by seed and round.

        Raises:
            RaysimError: the rule fails, or returns something that `selected_clients` refuses.
        """
        rule = self.rule.at(pool.round)
        with self._names_errors(rule, "select", pool.round):
            return selected_clients(rule, {**self.state}, pool, rng)

    def broadcast(self, following: RoundCohort) -> Broadcast:
        """Run `before_round` for the next round, and return the broadcast of that round.

        Args:
            following: the next round; without clients, the broadcast is the present model.

        Raises:
            RaysimError: the rule fails, or breaks its contract.
        """
        rule = self.rule.at(following.t)
        self.cohort = following.cohort(self.problem)
        with self._names_errors(rule, "before_round or broadcast", following.t):
            # A round without clients only asks for the model: at the end, or for candidates.
            self.state = self._before_round(rule) if following.ids else self.updated
            shared = rule.broadcast({**self.state})
            check_tensors(rule, "broadcast", shared)
            self.sent = shared
            shared = brought_to(shared, self.device)
            evaluated = None
            if overridden(rule, ["for_evaluation"]):
                evaluated = rule.for_evaluation({**self.state})
                check_evaluated(rule, shared, evaluated)
                evaluated = brought_to(evaluated, self.device)
        for step in self.steps:
            of_step = step.shared(self.state["x"].device)
            shared = {**shared, **of_step}
            evaluated = None if evaluated is None else {**evaluated, **of_step}
        self.evaluated = None if evaluated is None else evaluated["x"]
        return Broadcast(shared, self.buffers, evaluated=evaluated)

    def _before_round(self, rule: ServerRule) -> State:
        """Return the state of the rule for the present cohort; `updated` stays as it is."""
        versions = versions_of(self.updated), versions_of(self.sent)
        state = rule.before_round({**self.updated}, self.cohort)
        check_state(rule, "before_round", self.updated, state)
        check_unchanged(rule, "before_round", *versions)
        return state

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
        reports = self._reports(rule, round, outcomes, bases)
        if reports is None:
            self.updated = self.state
            return {"server/uploads": 0.0, **self._named(self.cohort.metrics)}
        weights, n_uploads = reports.weights, len(reports.ids)
        # The rule does not see the statistics; they are averaged by weights that `update` may set.
        mean_statistics = reports.totals.pop(("mean", BUFFERS), None)
        client_statistics = reports.rows.pop(BUFFERS, [])
        metrics: dict[str, float] = {}
        for step in self.steps:
            metrics |= step.before(reports, Broadcast(self.state, self.buffers))
        with self._names_errors(rule, "update", round.t, lambda: described_uploads(reports)):
            # A copy, because the state before is compared with what `update` returns.
            # The parameters before are compared with those after, also if copies were sent.
            versions = versions_of({"x": self.state["x"]}), versions_of(self.sent)
            state = rule.update({**self.state}, reports)
            check_update(rule, round.t, self.state, state, reports)
            check_unchanged(rule, "update", *versions)
        for step in self.steps:
            state = step.after(self.state, state)
        self.state = self.updated = state
        self.buffers = averaged_statistics(
            self.buffers, mean_statistics, client_statistics, reports.given_weights
        )
        if n_uploads:
            reports.metrics["weights_entropy"] = _entropy(reports.given_weights or weights)
        return {
            **self._named(reports.metrics),
            **metrics,
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
        stay = round.remaining
        # A worker whose clients have all failed has no sums.
        outcomes = [outcome for outcome in outcomes if outcome.ids]
        cohort = round.cohort(self.problem, stay)
        reports = Reports(**{**vars(cohort), "metrics": dict(self.cohort.metrics)})
        reports.versions = [round.bases[i] for i in stay]
        reports.weights = [round.weights[i] for i in stay]
        has_uploads = bool(stay and outcomes)
        if self.hides_clients:
            # Their weights are equal, and a divisor that depended on them would tell their number.
            reports.weights = [1.0] * len(stay)
            if has_uploads:
                self._receive(reports, outcomes, remaining=1.0)
            return reports
        if not has_uploads:
            return None
        remaining = 1.0
        if round.dropped:
            remaining = self._weigh_again(rule, reports, cohort)
            if remaining < MIN_REMAINING_WEIGHT:
                return None
        self._receive(reports, outcomes, remaining)
        if rule.needs_base_params:
            reports.bases = _base_params(rule, reports, bases)
        return reports

    def _weigh_again(self, rule: ServerRule, reports: Reports, cohort: Cohort) -> float:
        """Let the rule weigh the clients that remain, and return their share of the weights before.

        Workers weighted their clients as part of the whole cohort. Divided by this share, the sums
        are means over the clients that remain.
        """
        weight_in_sums = sum(reports.weights)
        if weight_in_sums == 0:  # no rule can weigh these by themselves
            return 0.0
        with self._names_errors(rule, "weigh", reports.round):
            reports.weights = rule.weigh(cohort)
        return weight_in_sums / sum(reports.weights)

    def _receive(self, reports: Reports, outcomes: list[WorkerResult], remaining: float) -> None:
        """Put the sums of the workers into reports, and the uploads that arrive client by client.

        Args:
            reports: the reports, with clients and weights.
            outcomes: the results of the workers.
            remaining: the share of the weights that remains after clients were dropped; means are
                divided by it.
        """
        x = self.state["x"]
        totals, n_short = total_uploads(
            outcomes,
            {"mean": remaining, "sum": 1.0, "difference": float(self.problem.n_nonempty)},
            # A proper mean even if the weights do not add up to 1.
            buffers_divisor=sum(reports.weights),
            like=x,
            always_exact=self.hides_clients,
        )
        for (mode, key), total in totals.items():
            reports.totals[mode, key] = total.reshape(self.shapes.get(key, (-1,)))
        reports.rows = uploads_of_clients(outcomes, reports.ids, x.device)
        # Not with client-level privacy, whose ε does not cover it.
        if n_short and not self.hides_clients:
            reports.metrics["short_sums"] = float(n_short)

    @staticmethod
    def _named(metrics: dict[str, float]) -> dict[str, float]:
        """Return a rule's metrics with the prefix `server/`, sizes in bytes `system/server_`."""
        named = {}
        for name, value in metrics.items():
            prefix = "system/server_" if name.endswith("_bytes") else "server/"
            named[prefix + name] = value
        return named

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
        """Return a copy of the state after the last update, and of the evaluated parameters.

        They are on the CPU. The next round is prepared again from them.
        """
        # Copies: a rule may change large buffers in place before the checkpoint is written.
        packed = {f"state/{k}": v.detach().cpu().clone() for k, v in self.updated.items()}
        packed["buffers"] = self.buffers.cpu().clone()
        evaluated = self.state["x"] if self.evaluated is None else self.evaluated
        if evaluated is not self.updated["x"]:
            packed[EVALUATED] = evaluated.detach().cpu().clone()
        for step in self.steps:
            packed |= step.snapshot()
        return packed

    def restore(self, snapshot: State) -> None:
        """Restore the state that `snapshot` returned.

        Args:
            snapshot: the rule's state and BatchNorm statistics.

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
        # Copies, whose memory is aligned as that of any tensor: a matrix product of tensors inside
        # of a file's memory may have other last bits.
        self.state = self.updated = {
            key: snapshot[f"state/{key}"].to(tensor.device, copy=True)
            for key, tensor in self.state.items()
        }
        self.buffers = snapshot["buffers"].to(self.buffers)
        for step in self.steps:
            step.restore(snapshot)

    @property
    def bytes(self) -> int:
        """Memory of the server's state, in bytes."""
        return sum(tensor.nbytes for tensor in self.state.values())


def evaluated_params(snapshot: State) -> Tensor:
    """Return the parameters of the model that is evaluated, [P].

    Args:
        snapshot: the server's state, as `Server.snapshot` returned it.
    """
    return snapshot.get(EVALUATED, snapshot["state/x"])


def _base_params(
    rule: ServerRule, reports: Reports, bases: Mapping[int, Broadcast]
) -> list[Tensor]:
    """Return the parameters that each client of a round started from, [P]."""
    started_from = []
    for client, version in zip(reports.ids, reports.versions, strict=True):
        base = bases[version]
        with tensors_on(base.global_params.device):
            sent = rule.sent_to(base.shared, client)["x"]
        started_from.append(sent.to(base.global_params.device))
    return started_from


def _entropy(weights: list[float]) -> float:
    """Return the entropy of the weights in nats: log K if all K weights are equal."""
    p = np.array(weights) / (sum(weights) or 1.0)  # FLTrust may trust nobody
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())
