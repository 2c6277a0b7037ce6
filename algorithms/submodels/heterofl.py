"""HeteroFL (Diao et al., ICLR 2021).

A small client trains a sub-model: in each hidden layer the first ceil(width · units) units. All
other parameters count as 0 for it. In its steps the outputs of hidden layers are divided by `width`
before the activation. Parameter j of the global model becomes the mean of w_ij over the clients i
that have it, and stays as it is if none has. The configuration has groups of three widths. For nets
of linear layers and convolutions with biases; the units of a convolution are its channels. The
paper's static BatchNorm and masked cross-entropy are left out.

Run: raysim run methods/heterofl
"""

from dataclasses import dataclass
from math import prod
from typing import Annotated

from pydantic import Field

from raysim.algorithms.submodels.widths import check_chain, places
from raysim.rules import Algorithm, ClientRule, ServerRule


@dataclass(frozen=True)
class HeteroFLClient(ClientRule):
    """Local SGD of the first units of each hidden layer."""

    sends = ("delta", "has")
    width: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the units of each hidden layer that the client has."""

    def check(self, problem):
        check_chain(problem.shapes)

    def init(self, shared, client_state, data, task):
        mask = (places(task.shapes) < self.width).to(shared["x"])
        classifier = sum(prod(shape) for shape in task.shapes[-2:])
        mask[:-classifier] /= self.width
        return {"mask": mask}

    def direction(self, shared, state, batch, task):
        return state["mask"] * task.grad(state["mask"] * state["w"], batch)

    def finish(self, shared, state, client_state, data, task):
        has = (state["mask"] > 0).to(state["w"])
        return {"delta": has * (shared["x"] - state["w"]), "has": has}, {}


@dataclass(frozen=True)
class HeteroFLServer(ServerRule):
    """Mean of each parameter over the clients that have it."""

    counts_equally = True
    uploads = {"delta": "sum", "has": "sum"}

    def update(self, state, reports):
        return {"x": state["x"] - self.lr * reports.sum("delta") / reports.sum("has").clamp(min=1)}


Algorithm("heterofl", HeteroFLClient, HeteroFLServer, "Diao 2021", traffic="down P, up 2P")
