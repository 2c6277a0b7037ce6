"""My method: one sentence that says what is new (Author, venue and year).

    client   y <- x;  K times: y <- y - lr (∇f_i(y; batch) + mu (y - x));  d_i = x - y
    server   x <- x - server.lr Σ_i w_i d_i

`lr` is the key local.lr. Tables show the server's step size as server.lr; its key is algorithm.lr.
P is the number of parameters.

State: none. Traffic: P floats down, P floats up. With mu = 0 it is FedAvg.

    raysim run quickstart algorithm=./my_method.py:my_method algorithm.mu=0.1
    pytest test_my_method.py
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor

from raysim.rules import Algorithm, Batch, ClientRule, Reports, ServerRule, State, Task


@dataclass(frozen=True)
class MyMethodClient(ClientRule):
    """Local SGD that is pulled towards the parameters it received."""

    mu: Annotated[float, Field(ge=0)] = 0.1
    """Strength of the pull."""

    # Every field is a hyper-parameter: algorithm.mu=0.5. Its annotation is checked before a run
    # starts.

    def direction(self, shared: State, state: State, batch: Batch, task: Task) -> Tensor:
        """Return the direction [P] of one local step; then w <- w - lr * direction.

        `shared["x"]` are the received parameters [P], `state["w"]` the client's own [P]. Do not
        change either in place, and keep nothing in Python from one step to the next: on a GPU a
        step is captured once and then replayed.

        See `ClientRule.direction`.
        """
        gradient = task.grad(state["w"], batch)
        return gradient + self.mu * (state["w"] - shared["x"])


@dataclass(frozen=True)
class MyMethodServer(ServerRule):
    """Weighted average of the clients' updates.

    `lr` and `weights` are fields of every server rule.
    """

    def update(self, state: State, reports: Reports) -> State:
        """Return the next state of the server.

        `reports.mean("delta")` is the weighted mean [P] of the clients' d_i = x - y.

        See `ServerRule.update`.
        """
        return {**state, "x": state["x"] - self.lr * reports.mean("delta")}


my_method = Algorithm("my_method", MyMethodClient, MyMethodServer, "Author year")
