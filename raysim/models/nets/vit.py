"""Torchvision's vision transformer, for images of other sizes and channels."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from raysim.errors import ConfigError
from raysim.models.initial.weights import read_state_dict


class _Enlarged(nn.Module):
    """Net that first enlarges its images bilinearly to squares of `size` pixels."""

    def __init__(self, net: nn.Module, size: int):
        super().__init__()
        self.net = net
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(nn.functional.interpolate(x, (self.size, self.size), mode="bilinear"))


def vit_b_32(
    shape: tuple[int, int, int],
    classes: int,
    image_size: Annotated[int, Field(ge=32, multiple_of=32)] | None = None,
    weights: str | None = None,
) -> nn.Module:
    """Build torchvision's ViT-B/32 (Dosovitskiy 2021); P = 87 605 092 for 100 classes on 3×384×384.

    The classifier is new, with weights 1 and bias 0, as in Xu 2022's experiments with CIFAR-100.
    The net has no stages.

    Args:
        shape: shape (C, H, W) of an image.
        classes: number of classes.
        image_size: side, in pixels, to which the net enlarges its images; None leaves them.
        weights: file of a state_dict of torchvision's net (written by torch.save); None initialises
            at random. Its classifier is ignored. Its position embeddings are interpolated if it was
            trained on another image size.

    Raises:
        ConfigError: the image size is not supported, or the weights cannot be read or do not fit.
    """
    from raysim.data.images import import_torchvision

    size = image_size or shape[1]
    if size % 32 or (image_size is None and shape[1] != shape[2]):
        raise ConfigError(
            "model.image_size: 'vit_b_32' needs squares of a multiple of 32, "
            f"not images of {shape[1]}×{shape[2]}; set the size to which they are enlarged"
        )
    pretrained = None if weights is None else read_state_dict(weights, "model.weights")
    vit = import_torchvision().models.vision_transformer
    net = vit.vit_b_32(image_size=size, num_classes=classes)
    if shape[0] != 3:
        net.conv_proj = nn.Conv2d(shape[0], 768, 32, 32)
        nn.init.trunc_normal_(net.conv_proj.weight, std=(shape[0] * 32 * 32) ** -0.5)
        nn.init.zeros_(net.get_parameter("conv_proj.bias"))
    if pretrained is not None:
        try:
            _load_body(net, vit.interpolate_embeddings(size, 32, pretrained))
        except (RuntimeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"model.weights: {weights} does not fit ViT-B/32 on images of "
                f"{[shape[0], size, size]}: {reason}"
            ) from None
    nn.init.ones_(net.heads.head.weight)
    nn.init.zeros_(net.heads.head.bias)
    return net if image_size is None else _Enlarged(net, image_size)


def _load_body(net: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Load the tensors of a net by name, except for its classifier, which keeps its own."""
    body = {name: tensor for name, tensor in tensors.items() if not name.startswith("heads.")}
    head = {name: own for name, own in net.state_dict().items() if name.startswith("heads.")}
    net.load_state_dict(body | head)
