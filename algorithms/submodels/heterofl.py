"""HeteroFL (Diao et al., ICLR 2021).

A small client trains a sub-model: in each hidden layer the first ceil(width · units) units. All
other parameters count as 0 for it. In its steps the outputs of hidden layers are divided by `width`
before the activation. Parameter j of the global model becomes the mean of w_ij over the clients i
that have it, and stays as it is if none has. The groups of heterofl.yaml have three widths. For
nets of linear layers with biases.

Run: raysim run methods/heterofl
"""

from dataclasses import dataclass
from math import ceil

import torch

from raysim.rules import Algorithm, ClientRule, ServerRule


@dataclass(frozen=True)
class HeteroFLClient(ClientRule):
    """Local SGD of the first units of each hidden layer."""

    sends = ("delta", "has")
    width: float = 1.0
    """Share of the units of each hidden layer that the client has."""

    def init(self, shared, client_state, data, task):
        masks = [task.x0.new_zeros(shape).reshape(shape[0], -1) for shape in task.shapes]
        for k, mask in enumerate(masks):
            rows = ceil(self.width * len(mask)) if k < len(masks) - 2 else len(mask)
            columns = ceil(self.width * mask.shape[1]) if k else mask.shape[1]
            mask[:rows, :columns] = 1 / self.width if k < len(masks) - 2 else 1
        return {"mask": torch.cat([mask.flatten() for mask in masks])}

    def direction(self, shared, state, batch, task):
        return state["mask"] * task.grad(state["mask"] * state["w"], batch)

    def finish(self, shared, state, client_state, data, task):
        has = (state["mask"] > 0).to(state["w"])
        return {"delta": has * (shared["x"] - state["w"]), "has": has}, {}


@dataclass(frozen=True)
class HeteroFLServer(ServerRule):
    """Mean of each parameter over the clients that have it."""

    uploads = {"delta": "sum", "has": "sum"}

    def update(self, state, reports):
        return {"x": state["x"] - self.lr * reports.sum("delta") / reports.sum("has").clamp(min=1)}


Algorithm("heterofl", HeteroFLClient, HeteroFLServer, "Diao 2021", traffic="down P, up 2P")
