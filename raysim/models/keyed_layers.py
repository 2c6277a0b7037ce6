"""Layers without state: pure functions of their parameters, their input and a `ForwardContext`.

The keyed BatchNorm uses the batch statistics of real examples only, and keeps its running
statistics in a flat buffer vector. The keyed Dropout uses masks that its caller drew from keyed
generators. A `ForwardContext` sets the behaviour of each forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raysim.errors import ConfigError
from raysim.rules.task import PassMode


@dataclass
class ForwardContext:
    """Inputs and side outputs of one forward pass, shared by all keyed layers of a net."""

    mode: PassMode = "eval"
    """train: batch statistics and dropout, running statistics are updated. frozen: the same
    without the update. eval: running statistics, no dropout."""
    in_place: bool = True
    """Whether running statistics are updated inside `buffers`; otherwise they go to `moved`."""
    mask: Tensor | None = None
    """[B], 1 for real examples and 0 for padding; None if all examples are real."""
    drop: tuple[Tensor, ...] = ()
    """Dropout masks, in the order of the dropout calls; () disables dropout."""
    buffers: Tensor | None = None
    """[Q], the running statistics of all BatchNorm layers."""
    moved: dict[int, Tensor] = field(default_factory=dict)
    """New running statistics of a pass with `in_place` False, by their start in `buffers`."""
    probe: list[tuple[tuple[int, ...], float]] | None = None
    """Collects the shape and rate of every dropout; then no dropout is applied."""
    calls: int = 0
    """Number of dropout calls of this pass so far."""
    features: Tensor | None = None
    """[B, F], the input of the last classifier."""


class KeyedBatchNorm(nn.Module):
    """BatchNorm over the real examples of a batch, with running statistics in `frame.buffers`."""

    def __init__(self, old: nn.modules.batchnorm._BatchNorm, start: int, frame: ForwardContext):
        """Replace a BatchNorm of PyTorch.

        Args:
            old: the layer that is replaced; its weight and bias are shared.
            start: position of this layer's running statistics in the buffer vector.
            frame: the context of the net.
        """
        super().__init__()
        self.weight = old.weight
        self.bias = old.bias
        self.eps = old.eps
        self.channels = old.num_features
        self.tracked = old.track_running_stats
        """Whether the layer has running statistics."""
        self.start = start
        self.frame = frame
        self.frozen = False
        """Whether the running statistics are used in all modes, and never change."""
        self.momentum = float(old.momentum or 0.0)
        mean = torch.zeros(self.channels) if old.running_mean is None else old.running_mean
        var = torch.ones(self.channels) if old.running_var is None else old.running_var
        self.initial = torch.cat([mean, var]).detach()
        """[2 * channels], initial means and variances: loaded values, or 0 and 1."""

    def _running(self) -> tuple[Tensor, Tensor]:
        """Return views of the running means and variances, [channels] each."""
        assert self.frame.buffers is not None
        statistics = self.frame.buffers.narrow(-1, self.start, 2 * self.channels)
        mean, var = statistics.split(self.channels, -1)
        return mean, var

    def how(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, bool, float] | None:
        """Return the arguments of PyTorch's batch-norm kernel for this pass.

        Args:
            x: the input [B, channels, ...].

        Returns:
            Running mean, running variance, whether the statistics of the batch are used, and
            momentum. None if the kernel does not support this pass (padded examples, running
            statistics outside `buffers`, or one value per channel).
        """
        frame = self.frame
        if (frame.mode == "eval" or self.frozen) and self.tracked:
            return *self._running(), False, 0.0
        if not frame.in_place or frame.mask is not None or x.numel() <= self.channels:
            return None
        mean, var = self._running() if frame.mode == "train" and self.tracked else (None, None)
        return mean, var, True, self.momentum

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` [B, channels, ...] by channel.

        Args:
            x: [B, channels, ...]; `frame.mask` marks the real examples.
        """
        if x.dtype is torch.bfloat16:  # of an autocast layer; its statistics would be coarse
            x = x.float()
        frame = self.frame
        kernel_arguments = self.how(x)
        if kernel_arguments is not None:
            mean, var, training, momentum = kernel_arguments
            return F.batch_norm(x, mean, var, self.weight, self.bias, training, momentum, self.eps)
        updates_statistics = frame.mode == "train" and self.tracked
        axes = [0, *range(2, x.ndim)]
        shape = (1, -1, *[1] * (x.ndim - 2))
        mask = x.new_ones(x.shape[0]) if frame.mask is None else frame.mask
        real = mask.reshape(-1, *[1] * (x.ndim - 1))
        count = mask.sum() * (x[0, 0].numel())
        mean = (x * real).sum(axes) / count
        centred = x - mean.reshape(shape)
        var = (centred * centred * real).sum(axes) / count
        if updates_statistics:
            # Running statistics use the unbiased variance, as in PyTorch.
            unbiased_var = var * count / (count - 1).clamp(min=1)
            of_batch = torch.cat([mean, unbiased_var]).detach()
            old = frame.moved.get(self.start)
            old = torch.cat(self._running()) if old is None else old
            new = (1 - self.momentum) * old + self.momentum * of_batch
            if frame.in_place:
                assert frame.buffers is not None
                frame.buffers.data.narrow(-1, self.start, 2 * self.channels).copy_(new)
            else:
                frame.moved[self.start] = new
        out = centred * torch.rsqrt(var + self.eps).reshape(shape)
        if self.weight is None:
            return out
        return out * self.weight.reshape(shape) + self.bias.reshape(shape)


class KeyedDropout(nn.Module):
    """Dropout with the masks in `frame.drop`, in the order of calls."""

    def __init__(self, rate: float, channels: bool, frame: ForwardContext):
        """Store the settings of the layer.

        Args:
            rate: probability that a number is dropped.
            channels: whether whole channels are dropped.
            frame: the context of the net.
        """
        super().__init__()
        self.rate = rate
        self.channels = channels
        self.frame = frame

    def forward(self, x: Tensor) -> Tensor:
        """Multiply `x` [B, ...] by the mask of this call; with a probe, record the mask's shape.

        Args:
            x: the input, [B, ...].
        """
        frame = self.frame
        if frame.probe is not None:
            shape = tuple(x.shape[1:])
            if self.channels:
                shape = shape[:1] + (1,) * len(shape[1:])
            frame.probe.append((shape, self.rate))
            return x
        mask = self.mask()
        return x if mask is None else x * mask

    def mask(self) -> Tensor | None:
        """Return the mask of this call, and count the call; None without dropout."""
        frame = self.frame
        if frame.mode == "eval" or not frame.drop:
            return None
        frame.calls += 1
        return frame.drop[frame.calls - 1]


class UnfoldedConv2d(nn.Conv2d):
    """Convolution as a matrix product of its weights with the unfolded images (im2col).

    Under `torch.func.vmap` over clients the weights differ. This layer then becomes one batched
    matrix product, and a plain convolution becomes a grouped convolution.
    """

    @classmethod
    def of(cls, old: nn.Conv2d) -> UnfoldedConv2d:
        """Return `old` as an unfolded convolution that shares its parameters.

        Args:
            old: a convolution for which `unfoldable` is True.
        """
        new = cls.__new__(cls)
        new.__dict__ = old.__dict__
        return new

    def forward(self, input: Tensor) -> Tensor:
        """Convolve `input` [B, C, H, W]; returns [B, O, H', W'].

        Args:
            input: the images, [B, C, H, W].
        """
        padding: Any = self.padding
        # Shapes, with L = H' W' places: columns [B, C k k, L], product [O, B L], output [B, O, L].
        columns = F.unfold(input, self.kernel_size, self.dilation, padding, self.stride)
        product = self.weight.flatten(1) @ columns.transpose(0, 1).flatten(1)
        out = product.unflatten(1, (len(input), -1)).transpose(0, 1)
        axes = zip(
            input.shape[2:], padding, self.dilation, self.kernel_size, self.stride, strict=True
        )
        size = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in axes]
        return (out if self.bias is None else out + self.bias[:, None]).unflatten(2, size)


def unfoldable(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Return whether `module` is an `nn.Conv2d` without groups, padded by a number of zeros.

    Args:
        module: any layer.
    """
    is_plain = type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros"
    return is_plain and not isinstance(module.padding, str)


def unfold_convolutions(module: nn.Module) -> None:
    """Replace the `unfoldable` convolutions inside `module` by `UnfoldedConv2d`.

    Args:
        module: the net, changed in place; it cannot itself be the convolution.
    """
    for name, child in module.named_children():
        if unfoldable(child):
            setattr(module, name, UnfoldedConv2d.of(child))
        else:
            unfold_convolutions(child)


_UNKEYED = (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.SyncBatchNorm)
"""Layers with random numbers or state that have no keyed version."""


def swap(
    module: nn.Module,
    frame: ForwardContext,
    start: int = 0,
    path: str = "",
    swapped: dict[nn.Module, nn.Module] | None = None,
) -> int:
    """Replace the BatchNorm and Dropout layers inside `module` by keyed layers, in its order.

    Args:
        module: the net; changed in place.
        frame: the context that all keyed layers of the net share.
        start: length of the buffer vector before this module.
        path: name of this module inside the net, for messages.
        swapped: the keyed layer of each BatchNorm that was replaced; it may be in several places.

    Returns:
        Q, the length of the buffer vector after this module.

    Raises:
        ConfigError: a layer draws random numbers or keeps state, and has no keyed version.
    """
    swapped = {} if swapped is None else swapped
    for name, child in list(module._modules.items()):
        child_path = f"{path}.{name}".lstrip(".")
        if child is None:
            continue
        if child in swapped:
            setattr(module, name, swapped[child])
        elif isinstance(child, _UNKEYED) or (
            getattr(child, "dropout", 0) and isinstance(child, nn.RNNBase)
        ):
            raise ConfigError(
                f"model: {child_path} ({type(child).__name__}) draws random numbers or keeps "
                "state; use BatchNorm1d-3d, Dropout or Dropout1d-3d, which raysim keys"
            )
        elif isinstance(child, nn.modules.batchnorm._BatchNorm):
            if child.momentum is None:
                raise ConfigError(
                    f"model: {child_path} is a BatchNorm with momentum=None; "
                    "set it to a number, for example 0.1"
                )
            swapped[child] = KeyedBatchNorm(child, start, frame)
            setattr(module, name, swapped[child])
            start += 2 * child.num_features if child.track_running_stats else 0
        elif isinstance(child, nn.modules.dropout._DropoutNd):
            setattr(module, name, KeyedDropout(child.p, not isinstance(child, nn.Dropout), frame))
        else:
            start = swap(child, frame, start, child_path, swapped)
    return start


def note_features(classifier: nn.Module, args: tuple[Tensor, ...]) -> None:
    """Store the input of the classifier in `features`; a forward pre-hook.

    Args:
        classifier: the classifier of the net; its attribute `frame` is the context of the pass.
        args: its positional arguments, of which the first is its input, [B, F].
    """
    cast(ForwardContext, classifier.frame).features = args[0]
