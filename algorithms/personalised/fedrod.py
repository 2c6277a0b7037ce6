"""FedRoD (Chen and Chao, ICLR 2022).

Body and generic head are trained with the balanced softmax, whose logits get the logarithm of the
client's number of examples of each class. On top of the same features, each client trains a
personal head with the plain loss of the sum of both heads. With linear heads, this sum is one
head: the personal model is x + head. The linear form of the paper; the personal head starts at 0.
For a missing class the number counts as 1e-8. The personal model has BatchNorm statistics of its
own, moved by its passes.

Run: raysim run quickstart algorithm=fedrod partition.test.fraction=0.2 evaluate.clients.every=20
"""

from dataclasses import dataclass

from torch.nn.functional import cross_entropy

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule


@dataclass(frozen=True)
class FedRoDClient(ClientRule):
    """Local SGD with the balanced softmax, and a personal head on the same features."""

    needs_class_labels = True
    needs_features = True

    def state(self, task):
        return {"head": task.zeros(), "buffers": task.initial_buffers}

    def init(self, shared, client_state, data, task):
        n = data.examples.y.bincount(minlength=task.classes).to(shared["x"])
        kept = {"head": client_state["head"], "buffers": client_state["buffers"]}
        return {**kept, "log_n": n.clamp(min=1e-8).log()}

    def loss(self, shared, state, net, batch, task):
        return cross_entropy(net.logits + state["log_n"], batch.y, reduction="none")

    def step(self, shared, state, batch, task):
        w, head = state["w"] + state["head"], state["head"]
        gradient, buffers = task.grad_and_buffers(w, batch, state["buffers"])
        head = head - task.lr * gradient * task.part("classifier")
        return {**super().step(shared, state, batch, task), "head": head, "buffers": buffers}

    def finish(self, shared, state, client_state, data, task):
        kept = {"head": state["head"], "buffers": state["buffers"]}
        return {"delta": shared["x"] - state["w"]}, kept

    def evaluated(self, shared, client_state, data, task):
        buffers = client_state["buffers"] if client_state["seen"] else task.buffers
        return shared["x"] + client_state["head"], buffers


Algorithm("fedrod", FedRoDClient, FedAvgServer, "Chen 2022", state="server 0, client P + Q")
