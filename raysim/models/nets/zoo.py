"""The shipped nets: those of the papers, and common ones.

Every function builds a net for images of a shape (C, H, W) and a number of classes. Every net
except ViT is a sequence of stages; the last stage is the classifier. Initialisation is PyTorch's
default unless the docstring names another. `P` is the number of trainable parameters. Max pooling
comes before ReLU: the numbers are the same, and ReLU has fewer of them to do. A user's own
`nn.Module`, configured by its path, does not need stages.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from raysim.errors import ConfigError
from raysim.models.nets.sequence import Width, lstm, transformer
from raysim.models.nets.vit import vit_b_32

Shape = tuple[int, int, int]
"""Shape (C, H, W) of an image."""


def _features(stages: list[nn.Module], shape: Shape, name: str) -> int:
    """Return the number of features that the convolutional stages compute from an image."""
    with torch.no_grad():
        try:
            return nn.Sequential(*stages).eval()(torch.zeros(1, *shape)).numel()
        except RuntimeError:
            raise ConfigError(
                f"model.name: '{name}' is too deep for images of {shape[1]}×{shape[2]}; "
                "use tinynn, mlp or lenet"
            ) from None


def logistic(shape: Shape, classes: int) -> nn.Module:
    """Build multinomial logistic regression.

    Args:
        shape: shape of one example.
        classes: number of classes, that is of outputs.
    """
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes)))


class _LeastSquares(nn.Module):
    """Least squares f = ½ (bᵀw - r)² of an example (b, r), expressed as logits (0, z).

    For label 0 their cross-entropy is log(1 + e^z) = f + log 2.
    """

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(1)
        f = (rows[:, :-1] @ self.weight - rows[:, -1]).square() / 2
        # z = log(2 e^f - 1), without the overflow of e^f.
        z = f + torch.log1p(-torch.expm1(-f))
        return torch.stack([torch.zeros_like(z), z], 1)


def quadratic(shape: Shape, classes: int) -> nn.Module:
    """Build the vector w of `data: quadratics`, initially 0.

    Its cross-entropy is f_i(w) + log 2, so every method minimises f.

    Args:
        shape: shape (C, H, W) of one example.
        classes: 2, as `data: quadratics` has them.

    Raises:
        ConfigError: the data are not quadratics.
    """
    if shape[:2] != (1, 1) or classes != 2:
        raise ConfigError(
            "model.name: 'quadratic' is for data.name=quadratics; use logistic or mlp"
        )
    return nn.Sequential(_LeastSquares(shape[2] - 1))


def mlp(shape: Shape, classes: int, hidden: tuple[Width, ...] = (200, 200)) -> nn.Module:
    """Build a fully connected net with ReLU between its layers.

    McMahan's 2NN is hidden = (200, 200), P = 199 210 on MNIST.

    Args:
        shape: shape (C, H, W) of one example.
        classes: number of classes, that is of outputs.
        hidden: widths of the hidden layers; () for none, that is logistic regression.
    """
    stages = []
    width = prod(shape)
    for i, size in enumerate(hidden):
        flatten = [nn.Flatten()] if i == 0 else []
        stages.append(nn.Sequential(*flatten, nn.Linear(width, size), nn.ReLU()))
        width = size
    return nn.Sequential(*stages, nn.Linear(width, classes) if hidden else logistic(shape, classes))


def tinynn(shape: Shape, classes: int) -> nn.Module:
    """Build Luo 2023's MNIST net: 784-200-100-10 with BatchNorm and ReLU; P = 178 710.

    Args:
        shape: shape (C, H, W) of one example.
        classes: number of classes, that is of outputs.
    """
    return nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), 200), nn.BatchNorm1d(200), nn.ReLU()),
        nn.Sequential(nn.Linear(200, 100), nn.BatchNorm1d(100), nn.ReLU()),
        nn.Linear(100, classes),
    )


def lenet5(shape: Shape, classes: int, dropout: float = 0.5) -> nn.Module:
    """Build Luo 2023's CIFAR-10 net; P = 941 834.

    It has 5×5 convolutions 32, 64, fully connected layers 512, 128 and BatchNorm. It differs much
    from LeCun's LeNet-5.

    Args:
        shape: shape (C, H, W) of one example.
        classes: number of classes, that is of outputs.
        dropout: rate of dropout after the two fully connected layers.

    Raises:
        ConfigError: the images are too small.
    """
    convolutions: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(shape[0], 32, 5), nn.BatchNorm2d(32), nn.MaxPool2d(2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(32, 64, 5), nn.BatchNorm2d(64), nn.MaxPool2d(2), nn.ReLU()),
    ]
    width = _features(convolutions, shape, "lenet5")
    return nn.Sequential(
        *convolutions,
        nn.Sequential(
            nn.Flatten(), nn.Linear(width, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(dropout)
        ),
        nn.Sequential(nn.Linear(512, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(dropout)),
        nn.Linear(128, classes),
    )


def vgg11(shape: Shape, classes: int, dropout: float = 0.5) -> nn.Module:
    """Build Luo 2023's CIFAR-100 net: VGG-11 with BatchNorm and a small head.

    P = 9 304 548 for 100 classes.

    Args:
        shape: shape (C, H, W) of one example.
        classes: number of classes, that is of outputs.
        dropout: rate of dropout below the classifier.

    Raises:
        ConfigError: the images are too small.
    """
    stages: list[nn.Module] = []
    width = shape[0]
    for group in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
        layers: list[nn.Module] = []
        for size in group:
            layers += [nn.Conv2d(width, size, 3, padding=1), nn.BatchNorm2d(size), nn.ReLU()]
            width = size
        stages.append(nn.Sequential(*layers[:-1], nn.MaxPool2d(2), layers[-1]))
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
        keeps_shape = width == size and stride == 1
        self.shortcut = (
            nn.Identity()
            if keeps_shape
            else nn.Sequential(nn.Conv2d(width, size, 1, stride, bias=False), nn.BatchNorm2d(size))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet20(shape: Shape, classes: int) -> nn.Module:
    """Build He 2016's CIFAR ResNet-20 (16-32-64, 3 blocks each); P = 284 824 for 200 classes.

    Args:
        shape: shape (C, H, W) of one example.
        classes: number of classes, that is of outputs.
    """
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
    return nn.Sequential(
        *stages, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
    )


def lenet(shape: Shape, classes: int) -> nn.Module:
    """Build the small CNN of Jiang 2023's comparison; P = 62 006 on 3×32×32.

    It has 5×5 convolutions 6, 16 and fully connected layers 120, 84. Small images are padded.

    Args:
        shape: shape (C, H, W) of one example.
        classes: number of classes, that is of outputs.

    Raises:
        ConfigError: the images are too small.
    """
    padding_1 = 2 if shape[1] < 32 else 0
    padding_2 = 2 if shape[1] < 16 else 0
    convolutions: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(shape[0], 6, 5, padding=padding_1), nn.MaxPool2d(2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(6, 16, 5, padding=padding_2), nn.MaxPool2d(2), nn.ReLU()),
    ]
    width = _features(convolutions, shape, "lenet")
    return nn.Sequential(
        *convolutions,
        nn.Sequential(nn.Flatten(), nn.Linear(width, 120), nn.ReLU()),
        nn.Sequential(nn.Linear(120, 84), nn.ReLU()),
        nn.Linear(84, classes),
    )


def mnist_cnn(shape: Shape, classes: int) -> nn.Module:
    """Build Xu 2022's MNIST and EMNIST net; P = 228 010.

    It has 5×5 convolutions 32, 32, 64, a fully connected layer 256, and pooling before ReLU.

    Args:
        shape: shape (C, H, W) of one example.
        classes: number of classes, that is of outputs.

    Raises:
        ConfigError: the images are too small.
    """
    convolutions: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(shape[0], 32, 5), nn.ReLU()),
        nn.Sequential(nn.Conv2d(32, 32, 5), nn.MaxPool2d(2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.ReLU()),
    ]
    width = _features(convolutions, shape, "mnist_cnn")
    return nn.Sequential(
        *convolutions,
        nn.Sequential(nn.Flatten(), nn.Linear(width, 256), nn.ReLU()),
        nn.Linear(256, classes),
    )


def cnn_dropout(shape: Shape, classes: int) -> nn.Module:
    """Build Reddi 2021's CNN with dropout; P = 1 626 442 on 3×32×32.

    It has 3×3 convolutions 32, 64, one pooling, a fully connected layer 128, and dropout of 0.25
    and 0.5. pfl-research's CIFAR-10 benchmark trains it (Granqvist 2024). As there, weights are
    initially Xavier's uniform ones.

    Args:
        shape: shape (C, H, W) of one example.
        classes: number of classes, that is of outputs.

    Raises:
        ConfigError: the images are too small.
    """
    convolutions: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(shape[0], 32, 3), nn.ReLU()),
        nn.Sequential(nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Dropout(0.25)),
    ]
    width = _features(convolutions, shape, "cnn_dropout")
    net = nn.Sequential(
        *convolutions,
        nn.Sequential(nn.Flatten(), nn.Linear(width, 128), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(128, classes),
    )
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    return net


class _Bias(nn.Module):
    """Trainable scalar that is added to the input, initially 0."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class _Scale(nn.Module):
    """Trainable scalar that multiplies the input, initially 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def _fixup_convolution(width: int, size: int, gain: float = 1.0) -> nn.Conv2d:
    """Return a 3×3 convolution without bias, with weights N(0, gain² · 2 / (9 size))."""
    layer = nn.Conv2d(width, size, 3, padding=1, bias=False)
    nn.init.normal_(layer.weight, std=gain * (2 / (9 * size)) ** 0.5)
    return layer


def _fixup_layer(width: int, size: int) -> list[nn.Module]:
    """Return a Fixup convolution with its biases and scale, and ReLU."""
    return [_Bias(), _fixup_convolution(width, size), _Scale(), _Bias(), nn.ReLU()]


class _FixupBlock(nn.Module):
    """Zhang 2019's residual block without normalisation (Fixup, arXiv 1901.09321).

    The block is initially the identity.
    """

    def __init__(self, width: int, blocks: int):
        """Build a block of `width` channels for a net with `blocks` residual blocks."""
        super().__init__()
        self.body = nn.Sequential(
            *[_Bias(), _fixup_convolution(width, width, blocks**-0.5), _Bias(), nn.ReLU()],
            *[_Bias(), _fixup_convolution(width, width, 0.0), _Scale(), _Bias()],
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + x)


def fixup_resnet9(shape: Shape, classes: int) -> nn.Module:
    """Build Xu 2022's CIFAR net: ResNet-9 with Fixup instead of BatchNorm.

    The classifier is initially 0. P = 6 568 673 for 10 classes, 6 614 843 for 100.

    Args:
        shape: shape (C, H, W) of one example.
        classes: number of classes, that is of outputs.

    Raises:
        ConfigError: the images are too small.
    """
    stages: list[nn.Module] = [
        nn.Sequential(*_fixup_layer(shape[0], 64)),
        nn.Sequential(*_fixup_layer(64, 128), nn.MaxPool2d(2), _FixupBlock(128, 2)),
        nn.Sequential(*_fixup_layer(128, 256), nn.MaxPool2d(2)),
        nn.Sequential(*_fixup_layer(256, 512), nn.MaxPool2d(2), _FixupBlock(512, 2)),
        nn.Sequential(nn.MaxPool2d(4), nn.Flatten(), _Bias()),
    ]
    classifier = nn.Linear(_features(stages, shape, "fixup_resnet9"), classes)
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    return nn.Sequential(*stages, classifier)


def ct_cnn(
    shape: Shape,
    classes: int,
    width: Annotated[int, Field(ge=1)] = 128,
    downsample: Annotated[int, Field(ge=1)] = 1,
) -> nn.Module:
    """Build Xu 2022's CNN for CT images; P = 15 676 418 for 2 classes on 3×128×128.

    The net has nine 3×3 convolutions and a classifier on all features of the last one.

    Args:
        shape: shape (C, H, W) of an image.
        classes: number of classes.
        width: channels of the first convolution; the last ones have four times as many.
        downsample: side, in pixels, of the squares that are averaged first. The paper has none (1).
            With width 24 and downsample 2 (P = 573 266 on 1×128×128) the net runs on a CPU.

    Raises:
        ConfigError: too few pixels are left after downsampling.
    """
    side = [size // downsample // 3 for size in shape[1:]]
    if min(side) < 1:
        raise ConfigError(
            f"model.downsample: {downsample} leaves too little of {shape[1]}×{shape[2]} pixels; "
            "lower it, or use lenet"
        )
    sizes = [shape[0], width, 2 * width, 2 * width, *[4 * width] * 6]
    stages = []
    for i, (old, new) in enumerate(pairwise(sizes)):
        first = [nn.AvgPool2d(downsample)] if i == 0 and downsample > 1 else []
        norm = [nn.GroupNorm(1, new)] if i in (5, 7) else []
        pool = [nn.MaxPool2d(3)] if i == 5 else []
        last = [nn.Flatten()] if i == 8 else []
        stages.append(
            nn.Sequential(*first, nn.Conv2d(old, new, 3, padding=1), *norm, nn.ReLU(), *pool, *last)
        )
    return nn.Sequential(*stages, nn.Linear(sizes[-1] * prod(side), classes))


GROUPNORM_GROUPS = 4
"""Number of groups of every GroupNorm in `densenet121_gn`."""


def densenet121_gn(shape: Shape, classes: int) -> nn.Module:
    """Build Xu 2022's net for CT images and landmarks; P = 7 054 210 for 2 classes on 3×224×224.

    This is torchvision's DenseNet-121 (Huang 2017) with a GroupNorm of 4 groups instead of every
    BatchNorm. There is no average pooling: the classifier uses all places of the last feature maps.
    Both changes follow the authors' code.

    Args:
        shape: shape (C, H, W) of one example.
        classes: number of classes, that is of outputs.

    Raises:
        ConfigError: the images are smaller than 32×32.
    """
    from raysim.data.images import import_torchvision

    if min(shape[1:]) < 32:
        raise ConfigError(
            "model.name: 'densenet121_gn' needs images of 32×32 at least, "
            f"these are {shape[1]}×{shape[2]}"
        )
    features = import_torchvision().models.densenet121().features
    if shape[0] != 3:
        features.conv0 = nn.Conv2d(shape[0], 64, 7, 2, 3, bias=False)
        nn.init.kaiming_normal_(features.conv0.weight)
    for module in list(features.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(GROUPNORM_GROUPS, child.num_features))
    classifier = nn.Linear(1024 * (shape[1] // 32) * (shape[2] // 32), classes)
    nn.init.zeros_(classifier.bias)
    return nn.Sequential(
        nn.Sequential(features.conv0, features.norm0, features.relu0, features.pool0),
        nn.Sequential(features.denseblock1, features.transition1),
        nn.Sequential(features.denseblock2, features.transition2),
        nn.Sequential(features.denseblock3, features.transition3),
        nn.Sequential(features.denseblock4, features.norm5, nn.ReLU(), nn.Flatten()),
        classifier,
    )


NETS: dict[str, Callable[..., nn.Module]] = {
    factory.__name__: factory
    for factory in (
        *(logistic, quadratic, mlp, tinynn, lenet5, vgg11, resnet20, lenet),
        *(cnn_dropout, mnist_cnn, fixup_resnet9, ct_cnn, densenet121_gn, vit_b_32),
        *(lstm, transformer),
    )
}
"""The functions that build the shipped nets, by name."""
