from dataclasses import dataclass

import torch

from raysim.rules import Batch, ClientRule, ServerRule, cross_entropy


@dataclass(frozen=True)
class Shifted(ClientRule):
    """Features get a scale and a shift that each client trains and keeps."""

    def state(self, task):
        return {"z": task.x0.new_zeros(2, task.features)}

    def init(self, shared, client_state, data, task):
        return {"z": client_state["z"]}

    def step(self, shared, state, batch, task):
        def loss(net, batch, others):
            scale, shift = others["z"]
            logits = net.classify(net.features * (1 + scale) + shift)
            return torch.nn.functional.cross_entropy(logits, batch.y, reduction="none")

        others = {"z": state["z"]}
        gradient, of_others = task.joint_grad(state["w"], batch, others, loss)
        z = state["z"] - task.lr * of_others["z"]
        return {"w": task.descend(state["w"], gradient), "z": z}

    def finish(self, shared, state, client_state, data, task):
        return {"delta": shared["x"] - state["w"] + state["z"].sum()}, {"z": state["z"]}


@dataclass(frozen=True)
class Ensemble(ServerRule):
    """Trains a vector of features through the classifiers of the clients' models."""

    needs_task = True

    @property
    def uploads(self):
        return {"delta": "per_client"}

    def init(self, x0, problem):
        return {"x": x0, "h": x0.new_ones(1, problem.features)}

    def update(self, state, reports):
        h = state["h"].clone().requires_grad_()
        y = torch.zeros(1, dtype=torch.long)
        batch = Batch(h, y)
        deltas = reports.per_client("delta")
        nets = [reports.task.net(state["x"] - delta, batch, "eval") for delta in deltas]
        logits = torch.stack([net.classify(h) for net in nets]).mean(0)
        loss = torch.nn.functional.cross_entropy(logits, y)
        moved = state["h"] - 0.5 * torch.autograd.grad(loss, h)[0]
        return {"x": state["x"] - reports.mean("delta"), "h": moved}


@dataclass(frozen=True)
class Unasked(ServerRule):
    def update(self, state, reports):
        batch = Batch(torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.long))
        return {"x": reports.task.grad(state["x"], batch, cross_entropy, "eval")}


@dataclass(frozen=True)
class Public(Unasked):
    needs_task = True

    def update(self, state, reports):
        return {"x": state["x"] + len(reports.public)}
