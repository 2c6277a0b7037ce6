"""The CNN with dropout of pfl-research's CIFAR-10 benchmark: layers, size, initial weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from raysim.errors import ConfigError
from raysim.models.nets import zoo


def test_layers_are_those_of_the_benchmark():
    """Conv 3×3 32, conv 3×3 64, pool 2, dropout .25, dense 128, dropout .5, dense 10; no padding."""
    net = zoo.cnn_dropout((3, 32, 32), 10)
    layers = [m for m in net.modules() if not isinstance(m, nn.Sequential)]
    assert [type(m).__name__ for m in layers] == [
        *["Conv2d", "ReLU"],
        *["Conv2d", "MaxPool2d", "ReLU", "Dropout"],
        *["Flatten", "Linear", "ReLU", "Dropout"],
        "Linear",
    ]
    convolutions = [m for m in layers if isinstance(m, nn.Conv2d)]
    assert [(c.out_channels, c.kernel_size, c.padding) for c in convolutions] == [
        (32, (3, 3), (0, 0)),
        (64, (3, 3), (0, 0)),
    ]
    assert [m.p for m in layers if isinstance(m, nn.Dropout)] == [0.25, 0.5]
    # (32 - 4) / 2 = 14 pixels a side are left of 32.
    assert [m.in_features for m in layers if isinstance(m, nn.Linear)] == [64 * 14 * 14, 128]
    # 896 + 18,496 + 1,605,760 + 1,290
    assert sum(p.numel() for p in net.parameters()) == 1_626_442


def test_weights_are_initially_xaviers():
    """U(-a, a) with a² = 6 / (fan in + fan out); a convolution's fans count its 3×3 kernel."""
    torch.manual_seed(0)
    net = zoo.cnn_dropout((3, 32, 32), 10)
    fans = [9 * (3 + 32), 9 * (32 + 64), 64 * 14 * 14 + 128, 128 + 10]
    weights = [m.weight for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    for weight, both in zip(weights, fans, strict=True):
        bound = math.sqrt(6 / both)
        assert 0.98 * bound < weight.abs().max().item() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_small_images_are_refused():
    with pytest.raises(ConfigError, match=r"model\.name: 'cnn_dropout' is too deep"):
        zoo.cnn_dropout((3, 4, 4), 10)
