"""A net and a rule that note whether TF32 is allowed where they compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from raysim import ClientRule

SEEN: dict[str, set[tuple[bool, bool]]] = {
    "forward": set(),
    "backward": set(),
    "eval": set(),
    "rule": set(),
}


def note(where: str) -> None:
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    SEEN[where].add((bool(matmul), bool(cudnn)))


class Noted(torch.autograd.Function):
    """The identity."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        note("backward")
        return grad


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.linear = nn.Linear(64, classes)

    def forward(self, x):
        if torch.is_grad_enabled() or not self.training:
            note("forward" if self.training else "eval")
        return Noted.apply(self.linear(x.flatten(1)))


@dataclass(frozen=True)
class Rule(ClientRule):
    """FedAvg with a direction from `task.grad`, and a pass of its own."""

    def direction(self, shared, state, batch, task):
        gradient = task.grad(state["w"], batch)
        note("rule")
        return gradient + 0 * task.net(state["w"], batch).logits.sum()


@dataclass(frozen=True)
class Inputs(ClientRule):
    """FedAvg with a gradient with respect to the inputs."""

    def direction(self, shared, state, batch, task):
        part = task.input_grad(state["w"], batch).sum()
        note("rule")
        return task.grad(state["w"], batch) + 0 * part
