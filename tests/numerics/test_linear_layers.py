"""Linear layers of a method's own nets, against PyTorch's."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import nn

from raysim.numerics import initial_layers, layers_of

SIZES = (300, 40, 25, 7)


def test_layers_of_one_vector_compute_what_linear_layers_do():
    values = initial_layers(np.random.default_rng(1), SIZES)
    flat = torch.cat([torch.from_numpy(v).flatten() for v in values])
    x = out = torch.from_numpy(np.random.default_rng(2).standard_normal((3, 300)))
    net = nn.Sequential(*(nn.Linear(n, m, dtype=torch.float64) for n, m in pairwise(SIZES)))
    nn.utils.vector_to_parameters(flat, net.parameters())
    for weight, bias in layers_of(flat, SIZES):
        out = out @ weight.T + bias
    assert torch.allclose(out, net(x), rtol=1e-12)


def test_initial_values_are_distributed_as_pytorchs():
    """Both are uniform, up to the same bound."""
    torch.manual_seed(1)
    values = initial_layers(np.random.default_rng(1), (300, 40))
    for ours, theirs in zip(values, nn.Linear(300, 40).parameters(), strict=True):
        assert ours.shape == theirs.shape
        assert abs(np.abs(ours).max() / theirs.abs().max().item() - 1) < 0.06
    assert abs(values[0].std() * 300**0.5 - 3**-0.5) < 0.01
