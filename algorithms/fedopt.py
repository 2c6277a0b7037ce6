"""FedAdagrad, FedAdam, FedYogi (Reddi et al., ICLR 2021) and FedAMS (Wang, Lin, Chen, ICML 2022).

    D = -sum w_i d_i;    m <- beta1 m + (1 - beta1) D;    x <- x + server.lr m / (sqrt(v) + tau)
    FedAdagrad   v <- v + D^2
    FedAdam      v <- beta2 v + (1 - beta2) D^2
    FedYogi      v <- v - (1 - beta2) D^2 sign(v - D^2)
    FedAMS       v as FedAdam;  vmax <- max(vmax, v, tau);  x <- x + server.lr m / sqrt(vmax)

State: server 2P (FedAMS 3P). Traffic: P down, P up.

All operations are elementwise. m starts at 0, v at tau^2, vmax at 0; there is no bias correction.
The papers search server.lr over powers of sqrt(10) between about 1e-3 and 10; the best value varies
a lot between problems. Libraries with the defaults beta2 = 0.999 and v = 0 implement another
method.

FedAMS differs from its paper in one initial value: Wang Y. 2022 starts from v = 0, here v = tau^2
as in the other three. Its rest in v after t rounds is beta2^t tau^2, below tau^2 = 1e-6 beside the
floor tau = 1e-3 of vmax. It shows only in entries where v exceeds tau, as at most a share tau of v.
The code of Wang Y. 2022 starts from v = 0 and vmax = `--max_init` (default 0) and adds `--eps`
(default 1e-8) to the denominator. Its README's command sets `--eps=0 --max_init=1e-3`, so vmax
starts at tau, the same as the floor. The code also corrects the bias: m / (1 - beta1^t) and
sqrt(vmax) / sqrt(1 - beta2^t). The paper's algorithm and this file do not.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from raysim.algorithms.fedavg import AUTHORS_CODE, FedAvgClient
from raysim.rules import (
    Algorithm,
    PositiveScheduled,
    Problem,
    Reports,
    ServerRule,
    State,
    UnitScheduled,
)


@dataclass(frozen=True)
class _AdaptiveServer(ServerRule):
    """Server momentum, and steps divided by the root of the second moment."""

    lr: PositiveScheduled = 0.03
    """Server learning rate."""
    beta1: UnitScheduled = 0.9
    """Decay of the first moment."""
    tau: Annotated[float, Field(gt=0)] = 1e-3
    """Floor of the denominator (adaptivity)."""

    def init(self, x0: Tensor, problem: Problem) -> State:
        return {"x": x0, "m": torch.zeros_like(x0), "v": torch.full_like(x0, self.tau**2)}

    def update(self, state: State, reports: Reports) -> State:
        delta = -reports.mean("delta")
        m = self.beta1 * state["m"] + (1 - self.beta1) * delta
        state = {**state, "m": m, "v": self.second_moment(state["v"], delta * delta)}
        return self.step(state)

    def step(self, state: State) -> State:
        """Return the state after the step of x.

        Args:
            state: the server's state with the next moments "m" and "v", [P] each.
        """
        return {**state, "x": state["x"] + self.lr * state["m"] / (state["v"].sqrt() + self.tau)}

    @abstractmethod
    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """Return the next second moment.

        Args:
            v: the second moment before this round, [P].
            squared: elementwise square of the mean update, [P].
        """
        raise NotImplementedError(f"{type(self).__name__} defines no second_moment")


@dataclass(frozen=True)
class FedAdagradServer(_AdaptiveServer):
    """Adaptive server with the sum of all squared updates; no momentum by default."""

    beta1: UnitScheduled = 0.0
    """Decay of the first moment."""

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared


@dataclass(frozen=True)
class FedAdamServer(_AdaptiveServer):
    """Adaptive server with the exponential moving average of squared updates."""

    beta2: UnitScheduled = 0.99
    """Decay of the second moment."""

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared


@dataclass(frozen=True)
class FedYogiServer(_AdaptiveServer):
    """Adaptive server whose second moment changes by a bounded amount."""

    beta2: UnitScheduled = 0.99
    """Decay of the second moment."""

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        v = v - (1 - self.beta2) * squared * torch.sign(v - squared)
        if v.numel() and v.min() < 0:
            raise ArithmeticError(
                "FedYogi's second moment has become negative, which its rule excludes"
            )
        return v


@dataclass(frozen=True)
class FedAMSServer(FedAdamServer):
    """FedAdam, divided by the largest second moment so far."""

    def init(self, x0: Tensor, problem: Problem) -> State:
        return {**super().init(x0, problem), "v_max": torch.zeros_like(x0)}

    def step(self, state: State) -> State:
        v_max = torch.maximum(state["v_max"], state["v"]).clamp(min=self.tau)
        return {**state, "v_max": v_max, "x": state["x"] + self.lr * state["m"] / v_max.sqrt()}


for _server, _paper in (
    (FedAdagradServer, "Reddi 2021"),
    (FedAdamServer, "Reddi 2021"),
    (FedYogiServer, "Reddi 2021"),
    (FedAMSServer, "Wang Y. 2022"),
):
    _kept = "3P" if _server is FedAMSServer else "2P"
    Algorithm(
        _server.name,
        FedAvgClient,
        _server,
        _paper,
        state=f"server {_kept}, client 0",
        presets=AUTHORS_CODE,
    )
