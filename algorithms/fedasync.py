"""FedAsync: every arriving model is mixed into the global model (Xie, Koyejo, Gupta 2019).

    client   FedProx with mu = 0.005, pulled towards its own starting point x_b
    server   alpha_t = alpha h(t - b);    x <- (1 - alpha_t) x + alpha_t y
             y = x_b - d, the client's model
             h = 1                                                    `constant`
               = (s + 1)^-a                                           `polynomial`
               = 1 if s <= c else 1 / (a (s - c) + 1)                 `hinge`

State: none. Traffic: P down, P up.

The server mixes models, not updates: a stale model pulls x back even if its client did not move.
The paper counts a round per arrival: `schedule.k: 1`. With more arrivals per round (ten by default,
so that a round costs what it costs in other methods) the models are mixed one after the other in
order of arrival, and staleness counts rounds. The paper uses alpha 0.6 or 0.9, halved once late in
training, which is a schedule: [[0, 0.6], [1500, 0.3]]. It drops arrivals beyond a staleness bound:
`schedule.max_staleness`. BatchNorm statistics are mixed the same way.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from raysim.algorithms.dynsgd import KASYNC
from raysim.algorithms.fedprox import FedProxClient
from raysim.rules import (
    Algorithm,
    Logged,
    PositiveScheduled,
    Problem,
    Reports,
    ServerRule,
    State,
    Uploads,
)


@dataclass(frozen=True)
class FedAsyncServer(ServerRule):
    """Mixing of client models with a factor that falls with staleness."""

    alpha: PositiveScheduled = 0.6
    """Share of the arriving model in the new global model, at staleness 0."""
    staleness: Literal["constant", "polynomial", "hinge"] = "polynomial"
    """How alpha falls with staleness."""
    a: Annotated[float, Field(gt=0)] | None = None
    """Speed of the fall; None: 0.5 for `polynomial`, 10 for `hinge`."""
    c: Annotated[float, Field(ge=0)] = 4.0
    """Staleness up to which `hinge` keeps alpha, in rounds."""

    needs_base_params = True
    weights_after_training = True

    logs = (Logged("alpha", "mixing weight of the last update"),)

    def check(self, problem: Problem) -> None:
        if max([v for _, v in self.alpha] if isinstance(self.alpha, list) else [self.alpha]) > 1:
            raise ValueError(
                f"alpha: must be at most 1, where the new model replaces the old one (given: "
                f"{self.alpha})"
            )
        if self.lr != 1:
            raise ValueError("lr: has no place here; alpha says how much of an arrival is mixed in")
        if self.weights != "uniform":
            raise ValueError(
                "weights: have no place here; alpha says how much of an arrival is mixed in"
            )
        if self.a is not None and self.staleness == "constant":
            raise ValueError(
                "a: has no place in staleness=constant; give polynomial or hinge with it"
            )
        if self.c != 4.0 and self.staleness != "hinge":
            raise ValueError("c: has a place in staleness=hinge only; give that with it")

    @property
    def uploads(self) -> Uploads:
        return {"delta": "per_client"}

    def update(self, state: State, reports: Reports) -> State:
        x, alpha, shares = state["x"], 0.0, []
        for base, d, s in zip(reports.bases, reports.rows["delta"], reports.staleness, strict=True):
            alpha = self.alpha * self.h(s)
            x = (1 - alpha) * x + alpha * (base - d)
            shares = [(1 - alpha) * share for share in shares] + [alpha]
        reports.set_weights(shares)
        reports.log(alpha=alpha)
        return {"x": x}

    def h(self, s: int) -> float:
        """Return the factor of alpha at staleness s, in rounds.

        Args:
            s: rounds between the version that the client started from and the present one.
        """
        if self.staleness == "polynomial":
            return (s + 1) ** -(self.a or 0.5)
        if self.staleness == "hinge" and s > self.c:
            return 1 / ((self.a or 10.0) * (s - self.c) + 1)
        return 1.0


Algorithm(
    "fedasync",
    FedProxClient,
    FedAsyncServer,
    "Xie 2019",
    settings={"mu": 0.005},
    defaults=KASYNC,
)
