"""Small nets on features, which FedCP and GPFL share among the clients.

A net is a linear layer A from F to [2, F] numbers, and three vectors [2, F] in one tensor: its
bias, and the scale and shift of a layer norm.
"""

from dataclasses import dataclass

import torch

from raysim.numerics import initial_layers
from raysim.rules import ServerRule, Upload

NET = {"A": Upload((2, "F", "F")), "vectors": Upload((3, 2, "F"))}
"""The tensors of a net, as uploads."""


@dataclass(frozen=True)
class _AveragingServer(ServerRule):
    """Averages the updates of x, and all other tensors that it broadcasts."""

    @property
    def uploads(self):
        return dict.fromkeys(("delta", *self.provides[1:]), "mean")

    def update(self, state, reports):
        x = state["x"] - self.lr * reports.mean("delta")
        return {"x": x, **{key: reports.mean(key) for key in self.provides[1:]}}


def initial_net(x0, problem, stream):
    """Return PyTorch's initial values of a net.

    Args:
        x0: a tensor of the parameters' type.
        problem: the sizes of the run.
        stream: key of the random numbers.
    """
    size = problem.features
    weight, bias = map(x0.new_tensor, initial_layers(problem.rng(stream), (size, 2 * size)))
    bias = bias.view(2, size)
    scale, shift = torch.ones_like(bias), torch.zeros_like(bias)
    return {"A": weight.view(2, size, size), "vectors": torch.stack([bias, scale, shift])}


def discrepancy(x, y):
    """Return the maximum mean discrepancy of the rows of x [B, F] and y [B, F].

    The kernel is the sum of exp(-|.|² / 2a) for a = 10, 15, 20, 50.
    """

    def kernel(x, y):
        squared = (x[:, None] - y).square().sum(2)
        return torch.stack([(-squared / (2 * a)).exp() for a in (10, 15, 20, 50)]).sum(0)

    return (kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)).mean()
