"""The nets of the papers and the common ones. Each is made for an input shape (C, H, W) and a number of classes.

Every net is a sequence of stages, the last one the classifier, with PyTorch's default initialisation. `d` is the
number of trainable parameters. Users bring their own `nn.Module` by path; it need not have stages.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import nn

from raysim.errors import ConfigError

Shape = tuple[int, int, int]


def _features(stages: list[nn.Module], shape: Shape, name: str) -> int:
    """How many numbers an image has become after these convolutional stages."""
    with torch.no_grad():
        try:
            return nn.Sequential(*stages).eval()(torch.zeros(1, *shape)).numel()
        except RuntimeError:
            raise ConfigError(
                f"model.name: '{name}' is too deep for images of {shape[1]}×{shape[2]}; take tinynn, mlp or lenet"
            ) from None


def logistic(shape: Shape, classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes)))


def mlp(shape: Shape, classes: int, hidden: tuple[int, ...] = (200, 200)) -> nn.Module:
    """Fully connected, ReLU between: McMahan's 2NN is hidden = (200, 200), d = 199 210 on MNIST."""
    stages, width = [], prod(shape)
    for i, size in enumerate(hidden):
        stages.append(nn.Sequential(*([nn.Flatten()] if i == 0 else []), nn.Linear(width, size), nn.ReLU()))
        width = size
    return nn.Sequential(*stages, nn.Linear(width, classes) if hidden else logistic(shape, classes))


def tinynn(shape: Shape, classes: int) -> nn.Module:
    """Luo 2023's MNIST net: 784-200-100-10, BatchNorm and ReLU after each hidden layer; d = 178 710."""
    return nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), 200), nn.BatchNorm1d(200), nn.ReLU()),
        nn.Sequential(nn.Linear(200, 100), nn.BatchNorm1d(100), nn.ReLU()),
        nn.Linear(100, classes),
    )


def lenet5(shape: Shape, classes: int, dropout: float = 0.5) -> nn.Module:
    """Luo 2023's CIFAR-10 net, far from LeCun's: 5×5 convolutions 32, 64 and FC 512, 128, BatchNorm; d = 941 834."""
    convolutions: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(shape[0], 32, 5), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(32, 64, 5), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
    ]
    width = _features(convolutions, shape, "lenet5")
    return nn.Sequential(
        *convolutions,
        nn.Sequential(nn.Flatten(), nn.Linear(width, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(dropout)),
        nn.Sequential(nn.Linear(512, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(dropout)),
        nn.Linear(128, classes),
    )


def vgg11(shape: Shape, classes: int, dropout: float = 0.5) -> nn.Module:
    """Luo 2023's CIFAR-100 net: VGG-11 with BatchNorm and a small head; d = 9 304 548 for 100 classes."""
    stages: list[nn.Module] = []
    width = shape[0]
    for group in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
        layers: list[nn.Module] = []
        for size in group:
            layers += [nn.Conv2d(width, size, 3, padding=1), nn.BatchNorm2d(size), nn.ReLU()]
            width = size
        stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
    width = _features(stages, shape, "vgg11")
    head = nn.Sequential(nn.Flatten(), nn.Linear(width, 128), nn.ReLU(), nn.Dropout(dropout))
    return nn.Sequential(*stages, head, nn.Linear(128, classes))


class _Residual(nn.Module):
    """He 2016's basic block: two 3×3 convolutions and a shortcut (1×1 where the shape changes)."""

    def __init__(self, width: int, size: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, size, 3, stride, 1, bias=False),
            nn.BatchNorm2d(size),
            nn.ReLU(),
            nn.Conv2d(size, size, 3, 1, 1, bias=False),
            nn.BatchNorm2d(size),
        )
        same = width == size and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(width, size, 1, stride, bias=False), nn.BatchNorm2d(size))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet20(shape: Shape, classes: int) -> nn.Module:
    """He 2016's CIFAR ResNet-20 (16-32-64, three blocks each); d = 284 824 for 200 classes."""
    stages: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(shape[0], 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    ]
    width = 16
    for size in (16, 32, 64):
        blocks = []
        for i in range(3):
            blocks.append(_Residual(width, size, 2 if i == 0 and size > 16 else 1))
            width = size
        stages.append(nn.Sequential(*blocks))
    return nn.Sequential(*stages, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)))


def lenet(shape: Shape, classes: int) -> nn.Module:
    """The small CNN of Jiang 2023's comparison: 5×5 convolutions 6, 16, FC 120, 84; d = 62 006 on 3×32×32."""
    padding = 2 if shape[1] < 32 else 0
    convolutions: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(shape[0], 6, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(6, 16, 5, padding=2 if shape[1] < 16 else 0), nn.ReLU(), nn.MaxPool2d(2)),
    ]
    width = _features(convolutions, shape, "lenet")
    return nn.Sequential(
        *convolutions,
        nn.Sequential(nn.Flatten(), nn.Linear(width, 120), nn.ReLU()),
        nn.Sequential(nn.Linear(120, 84), nn.ReLU()),
        nn.Linear(84, classes),
    )


NETS: dict[str, Callable[..., nn.Module]] = {
    f.__name__: f for f in (logistic, mlp, tinynn, lenet5, vgg11, resnet20, lenet)
}
