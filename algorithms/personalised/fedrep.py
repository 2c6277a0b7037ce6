"""FedRep (Collins et al., ICML 2021).

The classifier is personal, the body is shared. A client's first `head_steps` steps train the
classifier, the others the body.

Run: raysim run quickstart algorithm=fedrep algorithm.head_steps=2 partition.test.fraction=0.2
evaluate.clients.every=20
"""

from dataclasses import dataclass

import torch

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule


@dataclass(frozen=True)
class FedRepClient(ClientRule):
    """The classifier is personal. Its steps come first, then those of the body."""

    head_steps: int = 3
    """Local steps of the classifier; the body has those that are left."""

    def personal(self, task) -> torch.Tensor | None:
        return task.part("classifier")

    def init(self, shared, client_state, data, task):
        return {"head": task.part("classifier"), "step": torch.zeros_like(task.x0[0])}

    def step(self, shared, state, batch, task):
        in_turn = state["head"] == (state["step"] < self.head_steps)
        direction = self.direction(shared, state, batch, task)
        w = task.descend(state["w"], direction * in_turn)
        w = torch.where(in_turn, w, state["w"])  # no weight decay or momentum out of turn
        return {**state, "w": w, "step": state["step"] + 1}


Algorithm(
    "fedrep",
    FedRepClient,
    FedAvgServer,
    "Collins 2021",
    state="server 0, client its classifier",
    traffic="down the body, up the body",
)
