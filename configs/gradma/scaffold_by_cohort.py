"""SCAFFOLD with a frequent mistake: the server's control variate is divided by the cohort.

    x <- x - server.lr * mean(delta);   c <- c + (1 / S) sum(delta_c)

Algorithm 1 of Karimireddy et al. (ICML 2020) divides by all N clients, so with N = 100 and S = 10 c
moves ten times too far in each round.
"""

from dataclasses import dataclass

from raysim.algorithms.scaffold import SCAFFOLDServer
from raysim.rules import Reports, State


@dataclass(frozen=True)
class ScaffoldByCohortServer(SCAFFOLDServer):
    """The server of SCAFFOLD with c divided by the cohort."""

    def update(self, state: State, reports: Reports) -> State:
        """Move x by the mean update, and c by the mean over the cohort."""
        c = state["c"] + reports.sum("delta_c") / len(reports.ids)
        return {"x": state["x"] - self.lr * reports.mean("delta"), "c": c}
