"""WKAFL: two-stage weighted K-async aggregation (Zhou, Ye, Xu, Lv, Li, TPDS 2022).

    server   1.  g_i = d_i + alpha G, clipped to norm `clip`;    G the last aggregate
             2.  p_i ~ (e/2)^-s_i;    H = sum p_i g_i
             3.  c_i = cos(g_i, H), 1 for g_i = 0;    A = {i : c_i > theta}
             4.  q_i ~ p_i exp(sharpness c_i) on A
                 from round `stage2` on, g_i is clipped to norm clip2 |H| first
                 G = sum_A q_i g_i    (H if A is empty)
             5.  x <- x - server.lr / (1 + decay (s_min + 1)) G

State: server P; the K updates are held for the round. Traffic: P down, P up.

d_i = x_{b_i} - y_i. The authors use gradients d_i / lr and clip each of them at 70. Here updates
arrive, so server.lr = 1 is their eta_0 = lr, and `clip` is 70 lr for lr = 0.01 (null: no clipping).
Their stage two reads past the end of its list of norms in the file for CIFAR-10; in the others its
bound is 0 or undefined. |H| is what the paper means. `weights: samples` multiplies p_i by n_i.

The defaults are the constants of their code for CIFAR-10. It has others for each data set: on
gradients clip 70, clip2 5, stage2 3500, sharpness 50 and decay 0.01 for CIFAR-10; 100, 10, 1000, 10
and 0.1 for MNIST; 100, 10, 5000, 10 and 0.1 for EMNIST; 500, 5, 1000, 20 and 0.05 for CelebA, where
the decay has no effect. For the last two it adds alpha G to 2 d_i from the second round on, and
leaves p_i out of q_i.
"""

from dataclasses import dataclass
from math import e, exp
from operator import mul
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from raysim.algorithms.dynsgd import KASYNC
from raysim.algorithms.fedavg import FedAvgClient
from raysim.algorithms.twafl import decay
from raysim.numerics import gram, norm, weighted_sum
from raysim.rules import (
    Algorithm,
    Logged,
    Positive,
    Problem,
    Reports,
    ServerRule,
    State,
    Uploads,
    normalised,
)


@dataclass(frozen=True)
class WKAFLServer(ServerRule):
    """Two-stage average of the updates that agree with the weighted mean of all."""

    alpha: Annotated[float, Field(ge=0)] = 0.1
    """Share of the last aggregate that is added to each update."""
    theta: Annotated[float, Field(ge=-1, le=1)] = 0.3
    """Cosine to the mean above which an update is kept."""
    clip: Positive | None = 0.7
    """Largest norm of an update; None: no clipping."""
    clip2: Positive = 5.0
    """Largest norm of an update in stage two, in norms of the mean."""
    stage2: Annotated[int, Field(ge=0)] | None = 3500
    """Round from which stage two clips; None: never."""
    sharpness: Annotated[float, Field(ge=0)] = 50.0
    """Sharpness of the weights in the cosine."""
    decay: Annotated[float, Field(ge=0)] = 0.01
    """Decay of the step with the least staleness of the round's updates."""

    weights_after_training = True

    logs = (
        Logged("kept", "updates that the selection kept", "updates"),
        Logged("mean_cosine", "mean cosine of the updates with their aggregate"),
    )

    @property
    def uploads(self) -> Uploads:
        return {"delta": "per_client"}

    def init(self, x0: Tensor, problem: Problem) -> State:
        return {"x": x0, "G": torch.zeros_like(x0)}

    def update(self, state: State, reports: Reports) -> State:
        g = [d + self.alpha * state["G"] for d in reports.rows["delta"]]
        if self.clip is not None:
            g = [_clipped(v, self.clip) for v in g]
        p = normalised(
            w * by for w, by in zip(reports.weights, decay(reports.staleness), strict=True)
        )
        mean = weighted_sum(g, p)
        c = _cosines(g, mean)
        kept = [i for i, cosine in enumerate(c) if cosine > self.theta]
        q, G = p, mean
        if kept:
            least = min(
                reports.staleness[i] for i in kept
            )  # largest exponents first, so that not all can vanish
            top = max(c[i] for i in kept)
            aged = [reports.weights[i] * (e / 2) ** (least - reports.staleness[i]) for i in kept]
            agree = [exp(self.sharpness * (c[i] - top)) for i in kept]
            on_kept = dict(zip(kept, normalised(map(mul, aged, agree)), strict=True))
            q = [on_kept.get(i, 0.0) for i in range(len(g))]
            if self.stage2 is not None and reports.round >= self.stage2:
                g = [_clipped(v, self.clip2 * norm(mean)) for v in g]
            G = weighted_sum([g[i] for i in kept], [q[i] for i in kept])
        reports.set_weights(q)
        reports.log(kept=len(kept), mean_cosine=sum(c) / len(c))
        step = self.lr / (1 + self.decay * (min(reports.staleness) + 1))
        return {"x": state["x"] - step * G, "G": G}


def _clipped(v: Tensor, limit: float) -> Tensor:
    return v * (limit / length) if (length := norm(v)) > limit else v


def _cosines(g: list[Tensor], mean: Tensor) -> list[float]:
    """Return cos(g_i, mean): 1 for a zero g_i, 0 for a zero mean."""
    products = gram([*g, mean])
    lengths = products.diagonal().sqrt().tolist()
    *norms, whole = lengths
    return [
        1.0 if length == 0 else float(products[i, -1]) / (length * whole) if whole else 0.0
        for i, length in enumerate(norms)
    ]


Algorithm(
    "wkafl", FedAvgClient, WKAFLServer, "Zhou 2022", state="server P, client 0", defaults=KASYNC
)
