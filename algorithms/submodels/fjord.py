"""FjORD (Horváth et al., NeurIPS 2021).

Ordered dropout: each local step trains the sub-model of a width p that is drawn uniformly from
1/parts, 2/parts, ..., largest/parts. It has the first ceil(p · units) units of each hidden layer.
`largest` is what the client's device can train. Parameter j of the global model becomes the mean
of w_ij over the clients i whose largest sub-model has it, by the server rule of HeteroFL. For nets
of linear layers and convolutions with biases, and without the paper's self-distillation.

Run: raysim run methods/fjord
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raysim.algorithms.submodels.heterofl import HeteroFLServer
from raysim.algorithms.submodels.widths import check_chain, places
from raysim.rules import Algorithm, ClientRule, PositiveInt
from raysim.rules.contract import NoiseSpec


@dataclass(frozen=True)
class FjordClient(ClientRule):
    """Local SGD with a width that is drawn for each step."""

    sends = ("delta", "has")
    parts: PositiveInt = 5
    """Number of widths."""
    largest: PositiveInt = 5
    """Largest width that the client trains, in units of 1/parts."""

    def check(self, problem):
        check_chain(problem.shapes)

    def noise(self, task) -> Mapping[str, NoiseSpec]:
        return {"width": ((), "uniform")}

    def init(self, shared, client_state, data, task):
        return {"place": places(task.shapes).to(shared["x"])}

    def direction(self, shared, state, batch, task):
        width = ((self.largest * batch.noise["width"]).floor() + 1) / self.parts
        mask = (state["place"] < width).to(state["w"])
        return mask * task.grad(mask * state["w"], batch)

    def finish(self, shared, state, client_state, data, task):
        has = (state["place"] < self.largest / self.parts).to(state["w"])
        return {"delta": has * (shared["x"] - state["w"]), "has": has}, {}


Algorithm("fjord", FjordClient, HeteroFLServer, "Horváth 2021", traffic="down P, up 2P")
