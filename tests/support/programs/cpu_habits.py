"""Users' code that names no device, as it is written on a machine without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from raysim.rules import Classification, ClientRule, ServerRule


@dataclass(frozen=True)
class Habits(ClientRule):
    """Constants, masks, indices, tables and single numbers, made where they are used."""

    def state(self, task):
        return {"c": torch.zeros(len(task.x0)), "rounds": torch.tensor(0.0)}

    def begin(self, shared, client_state, data, task):
        return shared["x"], None, {"share": torch.tensor(0.1 / data.n)}

    def init(self, shared, client_state, data, task):
        return {"pull": torch.tensor([1.0] * len(shared["x"])), "n": torch.tensor(float(data.n))}

    def direction(self, shared, state, batch, task):
        g = task.grad(state["w"], batch, self.of_eye)
        mask = torch.zeros(len(g), dtype=torch.bool)
        mask[torch.arange(40)] = True
        g = torch.where(mask, g, g + 0.01 / state["n"])
        g = g + (shared["falling"] + shared["own"] + state["share"]) * state["w"]
        return g + 0.001 * state["pull"] * torch.full((len(g),), 2.0)

    @staticmethod
    def of_eye(net, batch):
        return -(torch.eye(10)[batch.y] * net.logits.log_softmax(1)).sum(1)

    def finish(self, shared, state, client_state, data, task):
        delta = shared["x"] - state["w"]
        sent = torch.zeros(len(delta))
        top = delta.abs().topk(200).indices
        sent[top] = delta[top]
        kept = {"c": client_state["c"] + delta, "rounds": client_state["rounds"] + 1}
        return {"delta": sent}, kept


@dataclass(frozen=True)
class Table(ServerRule):
    """Momentum, a number that is another one in each round, and a table of the clients seen."""

    def init(self, x0, problem):
        v = torch.zeros(problem.size)
        return {"x": x0, "v": v, "t": torch.tensor(0.0), "seen": torch.zeros(problem.n_clients)}

    def broadcast(self, state):
        return {"x": state["x"], "falling": torch.tensor(0.1 / (1 + float(state["t"])))}

    def sent_to(self, shared, client):
        return {**shared, "own": torch.tensor(0.01 * client)}

    def update(self, state, reports):
        seen = state["seen"].clone()
        seen[torch.tensor(reports.ids)] += 1
        v = 0.9 * state["v"] + reports.mean("delta") * torch.linspace(1, 1, len(state["v"]))
        return {"x": state["x"] - v, "v": v, "t": state["t"] + 1, "seen": seen}


@dataclass(frozen=True)
class ArraysOfClient(ClientRule):
    """NumPy in a local step."""

    def direction(self, shared, state, batch, task):
        return task.grad(state["w"], batch) + torch.from_numpy(np.ones(len(state["w"]), np.float32))


@dataclass(frozen=True)
class ArraysOfServer(ServerRule):
    """NumPy in an update."""

    def update(self, state, reports):
        clipped = np.clip(reports.mean("delta").numpy(), -1, 1)
        return {"x": state["x"] - torch.from_numpy(clipped)}


class Positions(nn.Module):
    """A net with numbers of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(64, 2)
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        by_position = x.flatten(1)[:, :, None] * self.position(torch.arange(64))
        return self.head(by_position.flatten(1))


class Constant(nn.Module):
    """A net with a constant that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.linspace(0, 1, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(x.flatten(1) * self.scale)


@dataclass(frozen=True)
class Smooth(Classification):
    """Cross-entropy with a table of targets."""

    def loss(self, outputs, batch):
        wanted = 0.9 * torch.eye(10)[batch.y] + torch.full((10,), 0.01)
        return F.cross_entropy(outputs, wanted, reduction="none")


def largest(outputs, targets):
    """A metric with a tensor of its own."""
    hits = torch.zeros(10)
    for c in range(10):
        hits[c] = ((outputs.argmax(1) == c) & (targets == c)).sum()
    return float(hits.max())
