"""SCAFFOLD with other frequent mistakes: whether one gives the low figures of GradMA's paper.

Lines are those of Algorithm 1 of Karimireddy et al. (ICML 2020), as in `algorithms/scaffold.py`.
"""

from dataclasses import dataclass

from raysim.algorithms.scaffold import SCAFFOLDClient, SCAFFOLDServer
from raysim.rules import LocalData, Report, Reports, State, Task


@dataclass(frozen=True)
class WithoutK(SCAFFOLDClient):
    """Line 12 without K: c_i+ = c_i - c + (x - y) / lr, which is K times too large."""

    def finish(
        self, shared: State, state: State, client_state: State, data: LocalData, task: Task
    ) -> tuple[Report, State]:
        """Upload delta = x - y and the change of c_i."""
        delta = shared["x"] - state["w"]
        c_i = client_state["c_i"] - shared["c"] + delta / task.lr
        return {"delta": delta, "delta_c": c_i - client_state["c_i"]}, {"c_i": c_i}


@dataclass(frozen=True)
class Forgetful(SCAFFOLDClient):
    """Clients are made anew in each round, so that every c_i is 0 when a round begins."""

    def finish(
        self, shared: State, state: State, client_state: State, data: LocalData, task: Task
    ) -> tuple[Report, State]:
        """Upload as SCAFFOLD does, and keep 0."""
        report, _ = super().finish(shared, state, client_state, data, task)
        return report, {"c_i": task.zeros()}


@dataclass(frozen=True)
class DividedByAll(SCAFFOLDServer):
    """Line 16 divided by all N clients, as line 17 is, so that x moves S / N times as far."""

    def update(self, state: State, reports: Reports) -> State:
        """Move x by the sum over the cohort divided by N, and c as SCAFFOLD does."""
        share = len(reports.ids) / reports.n_clients
        c = state["c"] + reports.sum("delta_c") / reports.n_clients
        return {"x": state["x"] - self.lr * share * reports.mean("delta"), "c": c}
