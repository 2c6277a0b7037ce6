"""FedHist: K-async aggregation that uses past updates (Jiang X. et al. 2023, arXiv 2312.10425).

    EGS      k* = argmin_k cos(g_i, LG_k);    g'_i = (1 - a) g_i + a LG_{k*};  g_i if LG is empty  R
    HAA      w_i = (1 - b) (e/2)^-s_i + b u_i;    p_i ~ max(w_i, 0), 1/K if all are 0              R
             G = sum p_i g'_i
    INA      c = mean_i |g_i| / |G|;  G <- rho^t c G                                               R
             x <- x - server.lr G;    append G to LG and the round to LL; drop rounds older than L
    utility  once LL has L rounds, with r the oldest: F = {g in LL computed on version r},
             ghat = mean(F), and for each (i, s_i, g_i) of round r                                 R
             e_i = cos(g_i, ghat) - theta
             v_i = min(1, |F|/K) e_i phi
             phi = 2 - (e/2)^-s_i if e_i >= 0, else (e/2)^-s_i
             u_i <- kappa u_i + (1 - kappa) v_i

State: server L (K + 1) P, and one number per client. Traffic: P down, P up.

g_i = x_{b_i} - y_i and s_i = t - b_i. LG holds the last L aggregates, LL the (i, s_i, g_i) of the
last L rounds. The available text has lost its formulas: lines marked R are reconstructed from the
words around them, and each of their constants is a hyper-parameter.

Under `history: float16` LL is stored in half precision, each vector scaled by its largest entry.
Ablations: a = 0 is "without EGS", b = 0 "without HAA", ina = false "without INA"; length = 0 leaves
TWAFL without n_i, and INA. K in |F|/K is the schedule's K (K clients receive each version), even if
fewer arrived. F contains a client's own gradient unless `leave_one_out`. `weights: samples`
multiplies max(w_i, 0) by n_i. Other readings of INA: `ina_norm` takes the median or the largest
|g_i|; under `ina_decay: factor` the factor is 1 + rho^t (c - 1), which tends to 1; with
`ina_only_up` it is at least 1.
"""

from dataclasses import dataclass
from math import e
from statistics import median
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from raysim.algorithms.dynsgd import KASYNC
from raysim.algorithms.fedavg import FedAvgClient
from raysim.numerics import aligned, cross, gram, norm, weighted_sum
from raysim.rules import Algorithm, Logged, Problem, Reports, ServerRule, State, Uploads, normalised

Unit = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class FedHistServer(ServerRule):
    """Average of updates fused with past aggregates, weighted by staleness and utility."""

    a: Unit = 0.1
    """Share of the past aggregate in each update (EGS)."""
    b: Unit = 0.3
    """Share of the client's utility in its weight (HAA)."""
    theta: Annotated[float, Field(ge=-1, le=1)] = 0.0
    """Cosine at which a client's utility changes its sign."""
    kappa: Unit = 0.9
    """Decay of the moving average of a client's utility."""
    rho: Annotated[float, Field(gt=0, le=1)] = 0.9995
    """Decay per round of the norm to which the aggregate is scaled (INA)."""
    length: Annotated[int, Field(ge=0, le=100_000)] = 15
    """L, rounds that are remembered; 0: none."""
    ina: bool = True
    """Scale the aggregate to the norm of the updates."""
    ina_norm: Literal["mean", "median", "largest"] = "mean"
    """Norm of the updates to which the aggregate is scaled."""
    ina_decay: Literal["norm", "factor"] = "norm"
    """Quantity that decays by rho: the aggregate's norm, or the factor's distance to 1."""
    ina_only_up: bool = False
    """Never make the aggregate shorter: the factor is at least 1."""
    leave_one_out: bool = False
    """Leave a client's own update out of the mean it is compared with."""
    history: Literal["float32", "float16"] = "float32"
    """Precision of LL; float32 means the precision of the parameters."""

    weights_after_training = True

    logs = (
        Logged("fresh", "least stale updates that enter the mean", "updates"),
        Logged(
            "ina_factor",
            "factor of the step: ρ^t times the mean norm of the round's "
            "updates by that of their mean",
        ),
        Logged("utility_q{q}", "quantile q (in percent) of the clients' utility"),
        Logged("weights_cut", "updates whose weight was negative and was cut", "updates"),
        Logged("buffer_bytes", "memory of the buffer of past gradients", "bytes"),
    )

    @property
    def uploads(self) -> Uploads:
        return {"delta": "per_client"}

    def init(self, x0: Tensor, problem: Problem) -> State:
        L, K, P = self.length, problem.cohort, problem.size
        precision = torch.float16 if self.history == "float16" else x0.dtype
        if not L:
            return {"x": x0}
        return {
            "x": x0,
            "LG": x0.new_zeros(L, P),
            "LL/g": torch.zeros(L, K, P, dtype=precision, device=x0.device),
            "LL/scale": torch.ones(L, K, dtype=torch.float64),
            "LL/client": torch.full((L, K), -1),
            "LL/base": torch.full((L, K), -1),
            "LL/round": torch.full((L,), -1),
            "utility": torch.zeros(problem.n_clients, dtype=torch.float64),
            "rounds": torch.tensor(0),
        }

    def update(self, state: State, reports: Reports) -> State:
        g = reports.rows["delta"]
        past = [state["LG"][k] for k in self._places(state)]
        p = self._weights(state, reports)
        G = weighted_sum(g, p)
        if past and self.a:
            G = self._fused(g, p, past)
        if self.ina and (length := norm(G)) > 0:
            factor = self._amplification([norm(v) for v in g], length, reports.round)
            reports.log(ina_factor=factor)
            G = factor * G
        reports.set_weights(p)
        state = {**state, "x": state["x"] - self.lr * G}
        if self.length:
            state = self._remembered(state, reports, G)
            if int(state["rounds"]) >= self.length:
                state["utility"] = self._utilities(state, reports)
            q = np.quantile(state["utility"].cpu().numpy(), (0.1, 0.5, 0.9))
            buffers = sum(state[k].nbytes for k in ("LG", "LL/g"))
            reports.log(utility_q10=q[0], utility_q50=q[1], utility_q90=q[2], buffer_bytes=buffers)
        return state

    def _places(self, state: State) -> list[int]:
        """Return the slots of the remembered rounds in the buffers, oldest first."""
        if not self.length:
            return []
        rounds, L = int(state["rounds"]), self.length
        return [n % L for n in range(max(0, rounds - L), rounds)]

    def _weights(self, state: State, reports: Reports) -> list[float]:
        """Return the weights p_i of the clients (HAA)."""
        past = state["utility"][reports.ids].tolist() if self.length else [0.0] * len(reports.ids)
        b = self.b if self.length else 0.0
        w = [(1 - b) * (e / 2) ** -s + b * u for s, u in zip(reports.staleness, past, strict=True)]
        reports.log(weights_cut=sum(v < 0 for v in w))
        w = [max(v, 0.0) * weight for v, weight in zip(w, reports.weights, strict=True)]
        return normalised(w) if any(w) else [1 / len(w)] * len(w)

    def _fused(self, g: list[Tensor], p: list[float], past: list[Tensor]) -> Tensor:
        """Return sum p_i ((1 - a) g_i + a LG_{k*}), EGS and the aggregation in one."""
        products = cross(aligned(g, torch.float64), aligned(past, torch.float64)).cpu().numpy()
        lengths = np.array([norm(v) for v in past])
        # the argmin over k does not depend on |g_i|; a zero vector has cosine 0 to all
        cosines = np.where(lengths > 0, products / np.maximum(lengths, 1e-300), 0.0)
        nearest = cosines.argmin(1)
        weights = [(1 - self.a) * v for v in p] + [self.a * v for v in p]
        return weighted_sum([*g, *(past[k] for k in nearest)], weights)

    def _amplification(self, norms: list[float], length: float, t: int) -> float:
        """Return the factor of an aggregate of this length, for updates of these norms (INA)."""
        if self.ina_norm == "mean":
            wanted = sum(norms) / len(norms)
        else:
            wanted = max(norms) if self.ina_norm == "largest" else median(norms)
        decay = self.rho**t
        factor = decay * wanted / length
        if self.ina_decay == "factor":
            factor = 1 + decay * (wanted / length - 1)
        return max(factor, 1.0) if self.ina_only_up else factor

    def _remembered(self, state: State, reports: Reports, G: Tensor) -> State:
        """Return the state with this round in LG and LL, in the slot of the oldest round."""
        at, K = int(state["rounds"]) % self.length, len(reports.ids)
        state["LG"][at] = G
        state["LL/client"][at], state["LL/base"][at], state["LL/round"][at] = -1, -1, reports.round
        state["LL/client"][at, :K] = torch.tensor(reports.ids)
        state["LL/base"][at, :K] = torch.tensor(reports.versions)
        for i, v in enumerate(reports.rows["delta"]):
            scale = (float(v.abs().max()) or 1.0) if self.history == "float16" else 1.0
            state["LL/scale"][at, i] = scale
            state["LL/g"][at, i] = v / scale if scale != 1 else v
        return {**state, "rounds": state["rounds"] + 1}

    def _utilities(self, state: State, reports: Reports) -> Tensor:
        """Return the utilities [N], updated for the clients of the oldest remembered round."""
        at, K = self._places(state)[0], state["LL/client"].shape[1]
        r = int(state["LL/round"][at])
        fresh = [
            (n, i)
            for n in self._places(state)
            for i in range(K)
            if int(state["LL/base"][n, i]) == r
        ]
        reports.log(fresh=len(fresh))
        utility = state["utility"].clone()
        means: dict[tuple[tuple[int, int], ...], Tensor] = {}  # of the judges, mostly the same
        for i, client in enumerate(state["LL/client"][at].tolist()):
            judges = tuple(
                place for place in fresh if not (self.leave_one_out and place == (at, i))
            )
            if client < 0 or not judges:
                continue
            if judges not in means:
                updates = [self._g(state, *place) for place in judges]
                means[judges] = weighted_sum(updates, [1 / len(judges)] * len(judges))
            error = _cosine(self._g(state, at, i), means[judges]) - self.theta
            young = (e / 2) ** -(r - int(state["LL/base"][at, i]))
            u = min(1.0, len(judges) / K) * error * (2 - young if error >= 0 else young)
            utility[client] = self.kappa * utility[client] + (1 - self.kappa) * u
        return utility

    def _g(self, state: State, n: int, i: int) -> Tensor:
        return state["LL/g"][n, i].to(state["x"].dtype) * float(state["LL/scale"][n, i])


def _cosine(u: Tensor, v: Tensor) -> float:
    """Return the cosine of two vectors, 0 if one of them is zero."""
    products = gram([u, v])
    lengths = float(products[0, 0] * products[1, 1]) ** 0.5
    return float(products[0, 1]) / lengths if lengths > 0 else 0.0


Algorithm(
    "fedhist",
    FedAvgClient,
    FedHistServer,
    "Jiang X. 2023",
    state="server L(K+1)·P, client 0",
    defaults=KASYNC,
)
