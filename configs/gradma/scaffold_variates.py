"""SCAFFOLD with other control variates: whether one gives the low figures of the paper on GradMA.

Lines are those of Algorithm 1 of Karimireddy et al. (ICML 2020), as in `algorithms/scaffold.py`.
"""

from dataclasses import dataclass

from torch import Tensor

from raysim.algorithms.scaffold import SCAFFOLDClient
from raysim.rules import Batch, LocalData, Report, State, Task


@dataclass(frozen=True)
class WithoutDifference(SCAFFOLDClient):
    """Line 12 without c_i - c: c_i+ = (x - y) / (K lr), the mean of corrected gradients."""

    def finish(
        self, shared: State, state: State, client_state: State, data: LocalData, task: Task
    ) -> tuple[Report, State]:
        """Upload delta = x - y and the change of c_i."""
        delta = shared["x"] - state["w"]
        c_i = delta / (task.steps * task.lr)
        return {"delta": delta, "delta_c": c_i - client_state["c_i"]}, {"c_i": c_i}


@dataclass(frozen=True)
class Reversed(SCAFFOLDClient):
    """Line 10 with the opposite sign: y <- y - lr (g(y) + c_i - c)."""

    def direction(self, shared: State, state: State, batch: Batch, task: Task) -> Tensor:
        """Correct a gradient towards the client's own mean, away from that of all clients."""
        return task.grad(state["w"], batch) + state["c_i"] - shared["c"]


@dataclass(frozen=True)
class ScaledByExamples(SCAFFOLDClient):
    """Lines 10 and 13 with weights p_i = n_i / mean(n): g(y) - c_i + c / p_i, and p_i delta_c.

    These are the control variates in the published code of FedDyn (Acar et al., ICLR 2021).
    SCAFFOLD for the sum of the clients' losses weighted by examples has c / p_i in line 12 too,
    where that code has c. Both have the optimum of that sum as their fixed point. Not taken from
    that code: it averages the clients' parameters with equal weights, and clips the corrected
    gradients.
    """

    def init(self, shared: State, client_state: State, data: LocalData, task: Task) -> State:
        """Start with the correction of this client."""
        return {
            "c_i": client_state["c_i"],
            "correction": shared["c"] * (data.average / data.n) - client_state["c_i"],
        }

    def direction(self, shared: State, state: State, batch: Batch, task: Task) -> Tensor:
        """Correct a gradient."""
        return task.grad(state["w"], batch) + state["correction"]

    def finish(
        self, shared: State, state: State, client_state: State, data: LocalData, task: Task
    ) -> tuple[Report, State]:
        """Upload delta = x - y and the scaled change of c_i; line 12 stays as it is."""
        report, kept = super().finish(shared, state, client_state, data, task)
        return {**report, "delta_c": report["delta_c"] * (data.n / data.average)}, kept
