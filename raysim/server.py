"""The central server: the server rule's state, the averaged BatchNorm statistics, and the door that uploads pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from raysim.block import Outcome
from raysim.errors import RaysimError
from raysim.numerics.sums import NonFiniteError, combine, to_float
from raysim.rules import Cohort, Problem, Reports, ServerRule, State


@dataclass
class Broadcast:
    """What travels down in a round: the rule's tensors and the BatchNorm statistics [Q]."""

    shared: State
    buffers: Tensor


@dataclass
class Round:
    """The facts of a round that the server needs: who trained, how much, and who is left out (`dropped`)."""

    t: int
    ids: list[int]
    weights: list[float]
    samples: list[int]
    steps: list[int]
    dropped: set[int] = field(default_factory=set)


@dataclass
class Advanced:
    """What the server gives between two rounds: the rule's metrics, the next broadcast, a snapshot if asked for."""

    metrics: dict[str, float]
    down: Broadcast
    snapshot: State


class Server:
    """Holds the state of a server rule and moves it on, round by round."""

    def __init__(self, rule: ServerRule, x0: Tensor, buffers: Tensor, problem: Problem):
        self.rule, self.problem = rule, problem
        self.state, self.buffers = rule.init(x0.clone(), problem), buffers.clone()
        self.cohort = Cohort(0, [], problem.n_clients)

    def broadcast(self, t: int, ids: list[int]) -> Broadcast:
        """Admits the cohort of round `t` and gives what is sent to it. With no ids: the model as it stands."""
        rule = self.rule.at(t)
        self.cohort = Cohort(t, ids, self.problem.n_clients)
        if ids:
            self.state = rule.admit(self.state, self.cohort)
        return Broadcast(rule.broadcast(self.state), self.buffers)

    def update(self, round: Round, outcomes: list[Outcome]) -> dict[str, float]:
        """Applies what arrived and gives the rule's metrics. With no upload left the round changes nothing."""
        stay = [i for i, client in enumerate(round.ids) if client not in round.dropped]
        outcomes = [o for o in outcomes if o.ids]
        if not stay or not outcomes:
            return {"server/uploads": 0.0, **self._named(self.cohort.metrics)}
        weights = [round.weights[i] for i in stay]
        left = sum(weights) if round.dropped else 1.0
        ids = [client for o in outcomes for client in o.ids]
        place = {client: i for i, client in enumerate(ids)}
        arranged = [place[round.ids[i]] for i in stay]
        x = self.state["x"]
        bound = sum(o.bound for o in outcomes)
        totals: dict[tuple[str, str], Tensor] = {}
        for name in outcomes[0].sums:
            mode, _, key = name.partition(" ")
            total = combine([o.sums[name] for o in outcomes], bound)
            divisor = {"mean": left, "sum": 1.0, "change": float(self.problem.n_clients)}[mode]
            dtype = torch.float64 if mode == "change" else x.dtype
            totals[mode, key] = to_float(total, dtype, divisor).to(x.device)
        self.buffers = totals.pop(("mean", "buffers"), self.buffers)
        rows = {}
        for key in outcomes[0].rows:
            every = [row for o in outcomes for row in o.rows[key]]
            rows[key] = [every[i].to(x.device) for i in arranged]
        reports = Reports(
            round.t,
            [round.ids[i] for i in stay],
            self.problem.n_clients,
            dict(self.cohort.metrics),
            weights=[w / left for w in weights],
            samples=[round.samples[i] for i in stay],
            steps=[round.steps[i] for i in stay],
            staleness=[0] * len(stay),
            versions=[round.t] * len(stay),
            totals=totals,
            rows=rows,
        )
        try:
            state = self.rule.at(round.t).update(self.state, reports)
        except NonFiniteError as error:
            raise RaysimError(f"round {round.t}: server rule '{self.rule.name}': {error}; lower local.lr") from None
        if state.keys() != self.state.keys():
            odd = ", ".join(sorted(state.keys() ^ self.state.keys()))
            raise RaysimError(
                f"server rule '{self.rule.name}': update must give back the keys of init; differs in {odd}"
            )
        self.state = state
        if not torch.isfinite(self.state["x"].sum()):
            raise RaysimError(
                f"round {round.t}: server rule '{self.rule.name}' made non-finite parameters; "
                "lower server lr or local.lr"
            )
        return {
            **self._named(reports.metrics),
            "server/uploads": float(len(stay)),
            "server/state_bytes": float(self.bytes),
        }

    @staticmethod
    def _named(metrics: dict[str, float]) -> dict[str, float]:
        return {f"server/{k}": v for k, v in metrics.items()}

    def advance(self, round: Round, outcomes: list[Outcome], ids: list[int], keep: bool) -> Advanced:
        """The step between two rounds: applies what arrived, takes a snapshot if told to `keep` one, and admits the
        next cohort."""
        metrics = self.update(round, outcomes)
        snapshot = self.snapshot() if keep else {}
        return Advanced(metrics, self.broadcast(round.t + 1, ids), snapshot)

    def snapshot(self) -> State:
        """Everything that the server knows, on the CPU, as it stands now."""
        return {
            **{f"state/{k}": v.detach().cpu().clone() for k, v in self.state.items()},
            "buffers": self.buffers.cpu().clone(),
        }

    def restore(self, snapshot: State) -> None:
        """Goes back to a snapshot."""
        self.buffers = snapshot["buffers"].to(self.buffers)
        self.state = {k: snapshot[f"state/{k}"].to(v.device) for k, v in self.state.items()}

    @property
    def bytes(self) -> int:
        """Memory that the server's state takes."""
        return sum(t.numel() * t.element_size() for t in self.state.values())
