"""FedProx: a proximal term in local training (Li et al., MLSys 2020).

    client   y <- y - lr (grad f_i(y; batch) + mu (y - x))    gradient of f_i(y) + mu/2 |y - x|^2
    server   FedAvg

State: none. Traffic: P down, P up.

The proximal term includes the factor 1/2: code that adds gamma |y - x|^2 means mu = 2 gamma. With
mu = 0 the method is FedAvg, bit for bit.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor

from raysim.algorithms.fedavg import AUTHORS_CODE, FedAvgServer
from raysim.rules import Algorithm, Batch, ClientRule, State, Task


@dataclass(frozen=True)
class FedProxClient(ClientRule):
    """Local SGD with a pull towards the received parameters."""

    mu: Annotated[float, Field(ge=0)] = 0.01
    """Strength of the pull."""

    def direction(self, shared: State, state: State, batch: Batch, task: Task) -> Tensor:
        pull = (state["w"] - shared["x"]).mul_(self.mu)
        return task.grad(state["w"], batch).add_(pull)


Algorithm("fedprox", FedProxClient, FedAvgServer, "Li T. 2020", presets=AUTHORS_CODE)
