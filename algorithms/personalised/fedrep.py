"""FedRep (Collins et al., ICML 2021).

The classifier is personal, the body is shared. The first steps of a client, `head_share` of them,
train the classifier, the others the body. PFLlib's one epoch of each is local.epochs=2 and 0.5. The
paper gives every client both; here a client with a single step makes it with both parts.

Run: raysim run quickstart algorithm=fedrep algorithm.head_share=0.4 partition.test.fraction=0.2
evaluate.clients.every=20
"""

from dataclasses import dataclass

import torch

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule, Share


@dataclass(frozen=True)
class FedRepClient(ClientRule):
    """The classifier is personal. Its steps come first, then those of the body."""

    head_share: Share = 0.6
    """Share of a client's local steps that train the classifier; of two or more, each part has at
    least one."""

    def personal(self, task) -> torch.Tensor | None:
        return task.part("classifier")

    def init(self, shared, client_state, data, task):
        steps = int(task.steps)
        left = min(max(round(self.head_share * steps), 1), steps - 1)
        head = task.part("classifier")
        body = ~head if steps > 1 else torch.ones_like(head)
        return {"head": head, "body": body, "left": task.x0.new_full((), left)}

    def step(self, shared, state, batch, task):
        in_turn = torch.where(state["left"] > 0, state["head"], state["body"])
        direction = self.direction(shared, state, batch, task)
        w = task.descend(state["w"], direction * in_turn)
        w = torch.where(in_turn, w, state["w"])  # no weight decay or momentum out of turn
        return {**state, "w": w, "left": state["left"] - 1}


Algorithm(
    "fedrep",
    FedRepClient,
    FedAvgServer,
    "Collins 2021",
    state="server 0, client its classifier",
    traffic="down the body, up the body",
)
