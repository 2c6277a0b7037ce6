"""FedMLB: multi-level branched regularisation (Kim, Kim, Han, ICML 2022).

    h_1..h_L, o    outputs of the stages of the local model, and its logits
    o_l            logits of the frozen global model's stages after l, applied to h_l, l = 1..L
    loss           lambda1 CE(o) + lambda2 1/L sum_l CE(o_l)
                   + lambda3 1/L sum_l KL(softmax(o_l / T) || softmax(o / T))
    server         FedAvg

State: none. Traffic: P down, P up. A step costs L more partial passes.

As in the code of Kim 2022 there is no factor T^2, and the gradient of the KL term flows through
both of its arguments. Frozen stages use batch statistics, update none and apply no dropout. With
lambda1 = 1 and lambda2 = lambda3 = 0 the method is FedAvg, bit for bit. FedMLBM (Luo 2023) has
FedAvgM's server.

The model must consist of stages (an nn.Sequential; the output of a stage is a level). In a flat
nn.Sequential every layer is a stage: group the layers between which levels are wanted.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from raysim.algorithms.fedavg import AUTHORS_CODE, FedAvgServer
from raysim.algorithms.fedavgm import FedAvgMServer
from raysim.rules import (
    Algorithm,
    Batch,
    ClientRule,
    Net,
    NonNegative,
    Positive,
    Problem,
    State,
    Task,
    cross_entropy,
)


@dataclass(frozen=True)
class FedMLBClient(ClientRule):
    """Local SGD whose activations at every level must suit the global model's later stages."""

    lambda1: NonNegative = 1.0
    """Weight of the local model's cross-entropy."""
    lambda2: NonNegative = 1.0
    """Weight of the hybrid paths' cross-entropy."""
    lambda3: NonNegative = 1.0
    """Weight of the KL terms."""
    temperature: Positive = 1.0
    """T of the KL terms."""

    needs_class_labels = True

    def check(self, problem: Problem) -> None:
        if problem.levels == 0:
            raise ValueError(
                f"name: 'fedmlb' needs a net made of stages (an nn.Sequential of two or more), "
                f"which model '{problem.model}' is not"
            )

    def direction(self, shared: State, state: State, batch: Batch, task: Task) -> Tensor:
        frozen = task.net(shared["x"], batch, "frozen", dropout=False)

        def loss(net: Net, batch: Batch) -> Tensor:
            *levels, o = net.levels
            hybrid = [frozen.tail(level, h) for level, h in enumerate(levels, 1)]
            ce = sum(F.cross_entropy(o_l, batch.y, reduction="none") for o_l in hybrid) / len(
                hybrid
            )
            kl = sum(divergence(o_l, o, self.temperature) for o_l in hybrid) / len(hybrid)
            return self.lambda1 * cross_entropy(net, batch) + self.lambda2 * ce + self.lambda3 * kl

        return task.grad(state["w"], batch, loss)


def divergence(a: Tensor, b: Tensor, temperature: float) -> Tensor:
    """Return KL(softmax(a / T) || softmax(b / T)) for each example, [B], of logits [B, C].

    Args:
        a: logits [B, C] of the reference distribution.
        b: logits [B, C] of the other distribution.
        temperature: T; larger values soften both.
    """
    log_p, log_q = F.log_softmax(a / temperature, 1), F.log_softmax(b / temperature, 1)
    return (log_p.exp() * (log_p - log_q)).sum(1)


Algorithm("fedmlb", FedMLBClient, FedAvgServer, "Kim 2022", presets=AUTHORS_CODE)
Algorithm(
    "fedmlbm",
    FedMLBClient,
    FedAvgMServer,
    "Luo 2023",
    state="server P, client 0",
    presets=AUTHORS_CODE,
)
