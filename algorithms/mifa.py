"""MIFA: memorised updates of absent clients (Gu, Huang, Zhang, Huang, NeurIPS 2021).

    client   upload delta_i = d_i - (the d_i of its last upload, 0 at first);  keep d_i
    server   D <- D + 1/N sum_i delta_i;    x <- x - server.lr D
    MIFAM    m <- beta1 m + D;    x <- x - server.lr m

State: server P (float64, since a float32 sum would drift), MIFAM another P; client P for each
client that ever participated. Traffic: P down, P up.

D is the mean over all clients of their latest known update. The upload mode "difference" does the
client's part for any rule. With `weights: samples` that mean is weighted by samples.
MIFAM (Luo 2023) adds server momentum; beta1 = 0 is MIFA.

D starts at 0, as in Luo 2023, so the first rounds make small steps. The original does not move x
before every client has been seen (`wait: true`). Clients without data are not waited for; a client
that fails every time is waited for without end: see the metric `clients/never_seen`. The authors'
code then fills the table by running all clients at once; here it fills as clients are sampled, at
the same x0. Their code stores d_i / lr and multiplies by the current lr, which differs only under a
schedule of lr and is not offered.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from raysim.algorithms.fedavg import AUTHORS_CODE, FedAvgClient
from raysim.rules import Algorithm, Problem, Reports, ServerRule, State, UnitScheduled, Uploads


@dataclass(frozen=True)
class MIFAServer(ServerRule):
    """Mean of the latest known update of every client."""

    wait: bool = False
    """Do not move x before every client with data has been seen."""

    @property
    def uploads(self) -> Uploads:
        return {"delta": "difference"}

    def init(self, x0: Tensor, problem: Problem) -> State:
        return {
            "x": x0,
            "D": torch.zeros_like(x0, dtype=torch.float64),
            "seen": torch.zeros(problem.n_clients, dtype=torch.bool),
            "expected": torch.tensor(problem.n_nonempty),
        }

    def update(self, state: State, reports: Reports) -> State:
        state["seen"][reports.ids] = True
        missing = int(state["expected"] - state["seen"].sum())
        state = {**state, "D": state["D"] + reports.difference("delta")}
        return state if self.wait and missing else self.move(state)

    def move(self, state: State) -> State:
        """Return the state after one step of x along the mean.

        Args:
            state: the server's state with "x" [P] and "D" [P], the mean of all clients' last
                updates.
        """
        return {**state, "x": state["x"] - self.lr * state["D"].to(state["x"].dtype)}


@dataclass(frozen=True)
class MIFAMServer(MIFAServer):
    """MIFA with heavy-ball momentum."""

    beta1: UnitScheduled = 0.9
    """Momentum."""

    def init(self, x0: Tensor, problem: Problem) -> State:
        return {**super().init(x0, problem), "m": torch.zeros_like(x0)}

    def move(self, state: State) -> State:
        m = self.beta1 * state["m"] + state["D"].to(state["x"].dtype)
        return {**state, "x": state["x"] - self.lr * m, "m": m}


Algorithm(
    "mifa", FedAvgClient, MIFAServer, "Gu 2021", state="server P, client P", presets=AUTHORS_CODE
)
Algorithm(
    "mifam",
    FedAvgClient,
    MIFAMServer,
    "Luo 2023",
    state="server 2P, client P",
    presets=AUTHORS_CODE,
)
