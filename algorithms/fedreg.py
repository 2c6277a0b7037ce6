"""FedReg: regularisation by generated data (Xu, Hong, Huang, Jiang, ICLR 2022).

    prepare  theta0 = x; for each batch (X, Y) of one shuffled pass, E steps of sign ascent:
                 X <- X + eta sign(grad_X L(theta0; X, Y))
             pseudo data       eta = eta_s, labels f_theta0(X): what the global model knows
             perturbed data    eta = eta_p, labels Y: what the client's data show
    step     g = grad L(gamma theta + (1 - gamma) theta0; batch);    theta <- theta - lr g
             g_s, g_p = grad L((theta + theta0) / 2; pseudo), the same of perturbed
             w_s = max(0, <theta - theta0, g_s> / |g_s|^2)
             w_p = max(0, <theta - w_s g_s - theta0, g_p> / |g_p|^2)
             theta <- theta - w_s g_s - w_p g_p
    server   FedAvg

State: none. Traffic: P down, P up. A step costs three gradients (FedReg-MG four), the preparation
2E input gradients per batch.

The two corrections are projections onto half-spaces, one after the other: to first order no step
raises the loss on the pseudo data, nor then on the perturbed data. FedReg-MG (modified gradients)
protects the client's data from gradient inversion: with q = grad L(pseudo images, all labels 1/C)
at the same parameters, g <- g - <g, q> / |q|^2 q.

L is -sum y log(p + 1e-12), with any task of class labels. In the code of Xu 2022 the methods that
are compared with FedReg have this loss too, here by the task configs/fedreg/bounded_loss.py. Step i
uses the data that was prepared from batch i of the pass, not from its own images, as in that code.
`pairing: own` prepares the data anew at each step.
That code's q comes from the step's own images (`fresh: true`, preset authors_code). That code
intends to clamp images to the range of their batch but does not (`clamp`). On one device its
generator lets both sets share their storage, so that both become the same; this fault is not
reproduced. If eta_s is so large that theta0 is certain of every pseudo image, g_s cancels to
rounding noise and so does the projection along it: then runs of other builds, or in another
execution mode, drift apart.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import (
    Algorithm,
    Batch,
    ClientRule,
    LocalData,
    Logged,
    Positive,
    Problem,
    Report,
    Share,
    State,
    Task,
    soft_cross_entropy,
)


@dataclass(frozen=True)
class FedRegClient(ClientRule):
    """Local SGD that may not undo what the global model knows."""

    gamma: Share = 0.5
    """Share of the local parameters where the gradient is computed."""
    eta_s: Positive = 0.1
    """Step size of the ascent for pseudo data, in pixel units."""
    eta_p: Positive | None = None
    """Step size of the ascent for perturbed data; None: a hundredth of eta_s."""
    ascent: Annotated[int, Field(ge=1)] = 10
    """E, steps of sign ascent."""
    pairing: Literal["index", "own"] = "index"
    """Batch that a step's data is prepared from: batch i of a pass, or the step's own."""
    clamp: bool = False
    """Clamp images to the range of their batch."""

    supports_dp = False
    needs_class_labels = True

    logs = (
        Logged("w_s", "mean weight of the pseudo data's gradient"),
        Logged("w_p", "mean weight of the perturbed data's gradient"),
    )

    @property
    def prepares(self) -> bool:
        return self.pairing == "index"

    def prepare(self, shared: State, batch: Batch, task: Task) -> tuple[Batch, ...]:
        """Return pseudo and perturbed data of a batch. See `ClientRule.prepare`."""
        pseudo = self._ascend(self.eta_s, shared["x"], batch, task)
        perturbed = self._ascend(
            self.eta_s / 100 if self.eta_p is None else self.eta_p, shared["x"], batch, task
        )
        logits = task.net(shared["x"], replace(batch, x=pseudo), "eval", task.global_buffers).logits
        return Batch(pseudo, torch.softmax(logits, -1)), Batch(perturbed, batch.y)

    def _ascend(self, eta: float, x0: Tensor, batch: Batch, task: Task) -> Tensor:
        x, low, high = batch.x, batch.x.amin(), batch.x.amax()
        for _ in range(self.ascent):
            x = (
                x
                + eta
                * task.input_grad(
                    x0, replace(batch, x=x), soft_cross_entropy, task.global_buffers
                ).sign()
            )
            if self.clamp:
                x = torch.minimum(torch.maximum(x, low), high)
        return x

    def init(self, shared: State, client_state: State, data: LocalData, task: Task) -> State:
        zero = shared["x"].new_zeros(())
        return {"w_s": zero, "w_p": zero}

    def gradient(
        self, shared: State, state: State, batch: Batch, prepared: tuple[Batch, ...], task: Task
    ) -> Tensor:
        """Return g [P], at a mixture of local and global parameters.

        Args:
            shared: the broadcast, with the global parameters.
            state: the state of the local steps, with "w" [P].
            batch: the mini-batch.
            prepared: its pseudo and perturbed data, as from `prepare`.
            task: the client's task.
        """
        return task.grad(self._mixed(shared, state), batch, soft_cross_entropy)

    def _mixed(self, shared: State, state: State) -> Tensor:
        return torch.lerp(shared["x"], state["w"], self.gamma)

    def step(self, shared: State, state: State, batch: Batch, task: Task) -> State:
        x0, prepared = (
            shared["x"],
            batch.prepared if self.prepares else self.prepare(shared, batch, task),
        )
        w = task.descend(state["w"], self.gradient(shared, state, batch, prepared, task))
        middle = torch.lerp(x0, w, 0.5)
        g_s, g_p = (task.grad(middle, data, soft_cross_entropy, "frozen") for data in prepared)
        w_s = _overshoot(w - x0, g_s)
        w = torch.addcmul(w, g_s, -w_s)
        w_p = _overshoot(w - x0, g_p)
        return {
            "w": torch.addcmul(w, g_p, -w_p),
            "w_s": state["w_s"] + w_s,
            "w_p": state["w_p"] + w_p,
        }

    def finish(
        self, shared: State, state: State, client_state: State, data: LocalData, task: Task
    ) -> tuple[Report, State]:
        means = {f"metric/{key}": state[key] / task.steps for key in ("w_s", "w_p")}
        return {"delta": shared["x"] - state["w"], **means}, {}


def _overshoot(way: Tensor, g: Tensor) -> Tensor:
    """Return max(0, <way, g> / |g|^2): the multiple of g by which `way` goes uphill."""
    return torch.clamp(torch.dot(way, g) / (torch.dot(g, g) + 1e-30), min=0)


@dataclass(frozen=True)
class FedRegMGClient(FedRegClient):
    """FedReg with gradients that carry no component along that of uninformative labels."""

    fresh: bool = False
    """Compute q on pseudo images of the step's own batch."""

    name = "fedreg_mg"

    @property
    def needs_plain_sgd(self) -> str:
        return "an optimizer would bring back what modified gradients remove"

    def check(self, problem: Problem) -> None:
        if problem.classes < 2:
            raise ValueError(
                "name: modified gradients want a classifier of two classes or more; take fedreg"
            )

    def gradient(
        self, shared: State, state: State, batch: Batch, prepared: tuple[Batch, ...], task: Task
    ) -> Tensor:
        at = self._mixed(shared, state)
        g = task.grad(at, batch, soft_cross_entropy)
        x = prepared[0].x
        if self.fresh and self.prepares:
            x = self._ascend(self.eta_s, shared["x"], batch, task)
        nothing = torch.full_like(prepared[0].y[:1], 1 / prepared[0].y.shape[-1]).expand(len(x), -1)
        q = task.grad(at, Batch(x, nothing), soft_cross_entropy, "frozen")
        return torch.addcmul(g, q, -torch.dot(g, q) / (torch.dot(q, q) + 1e-30))


Algorithm("fedreg", FedRegClient, FedAvgServer, "Xu 2022")
Algorithm(
    "fedreg_mg", FedRegMGClient, FedAvgServer, "Xu 2022", presets={"authors_code": {"fresh": True}}
)
