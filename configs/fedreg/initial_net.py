"""Xu 2022's MNIST net with the initial parameters of the authors' runs."""

import torch
from torch import nn

from raysim.models.nets.zoo import mnist_cnn as build

SEED = 124
"""Seed of torch with which the authors' code builds every net, whatever the seed of the run."""


def mnist_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the net of `model: mnist_cnn` with their initial parameters.

    Args:
        shape: shape (C, H, W) of one example.
        classes: number of classes.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return build(shape, classes)
