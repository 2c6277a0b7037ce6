"""FedBABU (Oh et al., ICLR 2022).

The classifier keeps its random start, also under weight decay: only the body is trained, sent and
averaged. Clients know the classifier from the start, so it is never sent. A client then fine-tunes
the whole net on its own data, for its evaluation only: the method's result is
`fine_tuned/accuracy`, and `clients/accuracy` that of the model before.

Run: raysim run quickstart algorithm=fedbabu partition.test.fraction=0.2 evaluate.clients.every=20
evaluate.clients.fine_tune.steps=5
"""

from dataclasses import dataclass

import torch

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule


@dataclass(frozen=True)
class FedBABUClient(ClientRule):
    """Local SGD of the body; the classifier stays as it is."""

    needs_features = True

    def personal(self, task):
        return task.part("classifier")

    def init(self, shared, client_state, data, task):
        return {"body": ~task.part("classifier")}

    def direction(self, shared, state, batch, task):
        return state["body"] * task.grad(state["w"], batch)

    def step(self, shared, state, batch, task):
        after = super().step(shared, state, batch, task)
        return {**after, "w": torch.where(state["body"], after["w"], state["w"])}


Algorithm(
    "fedbabu",
    FedBABUClient,
    FedAvgServer,
    "Oh 2022",
    state="server 0, client the classifier",
    traffic="down the body, up the body",
)
