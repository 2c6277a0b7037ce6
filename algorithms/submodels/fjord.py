"""FjORD (Horváth et al., NeurIPS 2021).

Ordered dropout: each local step trains the sub-model of a width p that is drawn uniformly from
1/parts, 2/parts, ..., largest/parts. It has the first ceil(p · units) units of each hidden layer.
`largest` is what the client's device can train. Parameter j of the global model becomes the mean
of w_ij over the clients i whose largest sub-model has it, by the server rule of HeteroFL. For nets
of linear layers with biases, and without the paper's self-distillation.

Run: raysim run methods/fjord
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from raysim.algorithms.submodels.heterofl import HeteroFLServer
from raysim.rules import Algorithm, ClientRule
from raysim.rules.contract import NoiseSpec


@dataclass(frozen=True)
class FjordClient(ClientRule):
    """Local SGD with a width that is drawn for each step."""

    sends = ("delta", "has")
    parts: int = 5
    """Number of widths."""
    largest: int = 5
    """Largest width that the client trains, in units of 1/parts."""

    def noise(self, task) -> Mapping[str, NoiseSpec]:
        return {"width": ((), "uniform")}

    def init(self, shared, client_state, data, task):
        places = []  # a sub-model of width p has the parameters at places below p
        for k, shape in enumerate(task.shapes):
            row, column = (torch.arange(n).to(task.x0) / n for n in (*shape, 1)[:2])
            row, column = row * (k < len(task.shapes) - 2), column * (k > 0)
            places.append(torch.maximum(row[:, None], column).flatten())
        return {"place": torch.cat(places)}

    def direction(self, shared, state, batch, task):
        width = ((self.largest * batch.noise["width"]).floor() + 1) / self.parts
        mask = (state["place"] < width).to(state["w"])
        return mask * task.grad(mask * state["w"], batch)

    def finish(self, shared, state, client_state, data, task):
        has = (state["place"] < self.largest / self.parts).to(state["w"])
        return {"delta": has * (shared["x"] - state["w"]), "has": has}, {}


Algorithm("fjord", FjordClient, HeteroFLServer, "Horváth 2021", traffic="down P, up 2P")
