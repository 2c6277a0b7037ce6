"""Forwards of layers as pure functions of parameters, input and a `ForwardContext`.

The keyed BatchNorm keeps its running statistics in a flat buffer vector. The keyed Dropout uses
masks that its caller drew from keyed generators. A `ForwardContext` sets the behaviour of each
forward pass. Only forwards are exchanged, and only those of PyTorch's own layers: a subclass may
compute something else.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Generic, TypeVar, cast

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
    drop: tuple[Tensor, ...] = ()
    """Dropout masks, in the order of the dropout calls; () disables dropout."""
    dropouts: list[DropoutMask] | None = None
    """The dropout calls of each pass in training; None while the net is read."""
    buffers: Tensor | None = None
    """[Q], the running statistics of all BatchNorm layers."""
    moved: dict[int, Tensor] = field(default_factory=dict)
    """New running statistics of a pass with `in_place` False, by their start in `buffers`."""
    probe: DropoutCalls | None = None
    """Collects every dropout call; then no dropout is applied."""
    calls: int = 0
    """Number of dropout calls of this pass so far."""
    features: Tensor | None = None
    """[B, F], the input of the last classifier."""
    passed: set[int] = field(default_factory=set)
    """Positions in `buffers` of the running means and variances of each BatchNorm that ran."""

    def moved_buffers(self) -> Tensor:
        """Return the statistics [Q] after a pass that stored its new ones in `moved`."""
        assert self.buffers is not None
        parts = []
        position = 0
        for start in sorted(self.moved):
            parts += [self.buffers[position:start], self.moved[start]]
            position = start + self.moved[start].shape[0]
        return torch.cat([*parts, self.buffers[position:]])


LayerT = TypeVar("LayerT", bound=nn.Module)


class LayerForward(Generic[LayerT]):
    """Base of forwards in place of a layer's own.

    The layer stays the module that the user wrote, with its type, its hooks and its names. It is
    referred to weakly: nets in a circle of references would stay in memory for long.
    """

    def __init__(self, layer: LayerT):
        """Refer to a layer.

        Args:
            layer: the layer whose forward this will be.
        """
        self._layer = weakref.ref(layer)

    @property
    def layer(self) -> LayerT:
        """The layer whose forward this is."""
        layer = self._layer()
        assert layer is not None
        return layer

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerForward:
        """Return the forward of the copy of the layer, which is being made."""
        copied = copy.copy(self)
        copied.__dict__ = {k: copy.deepcopy(v, memo) for k, v in vars(self).items()}
        copied._layer = weakref.ref(memo[id(self.layer)])
        return copied


class KeyedBatchNorm(LayerForward[nn.modules.batchnorm._BatchNorm]):
    """Forward of a BatchNorm.

    Args:
        layer: the layer.
        start: position of the layer's running statistics in the buffer vector.
        frame: the context of the net.
    """

    def __init__(self, layer: nn.modules.batchnorm._BatchNorm, start: int, frame: ForwardContext):
        super().__init__(layer)
        self.start = start
        self.frame = frame

    @property
    def tracked(self) -> bool:
        """True if the layer has running statistics."""
        return self.layer.running_mean is not None

    def _running(self) -> tuple[Tensor, Tensor]:
        """Return views of the running means and variances, [channels] each."""
        assert self.frame.buffers is not None
        channels = self.layer.num_features
        statistics = self.frame.buffers.narrow(-1, self.start, 2 * channels)
        mean, var = statistics.split(channels, -1)
        return mean, var

    def how(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, bool, float] | None:
        """Return the arguments of PyTorch's batch-norm kernel for this pass.

        Args:
            x: the input [B, channels, ...].

        Returns:
            Running mean, running variance, whether the statistics of the batch are used, and
            momentum. None if the kernel does not support this pass (running statistics outside
            `buffers`, or one value per channel).
        """
        frame, layer = self.frame, self.layer
        if not layer.training and self.tracked:
            return *self._running(), False, 0.0
        if not frame.in_place or x.numel() <= layer.num_features:
            return None
        mean, var = self._running() if frame.mode == "train" and self.tracked else (None, None)
        return mean, var, True, layer.momentum or 0.0

    def __call__(self, input: Tensor) -> Tensor:
        """Normalise a batch by channel.

        Args:
            input: [B, channels, ...].
        """
        x, layer, frame = input, self.layer, self.frame
        layer._check_input_dim(x)
        if x.dtype is torch.bfloat16:  # of an autocast layer; its statistics would be coarse
            x = x.float()
        if self.tracked:
            frame.passed.update((self.start, self.start + layer.num_features))
        kernel_arguments = self.how(x)
        if kernel_arguments is not None:
            mean, var, training, momentum = kernel_arguments
            return F.batch_norm(
                x, mean, var, layer.weight, layer.bias, training, momentum, layer.eps
            )
        updates_statistics = frame.mode == "train" and self.tracked
        axes = [0, *range(2, x.ndim)]
        shape = (1, -1, *[1] * (x.ndim - 2))
        count = x.numel() // x.shape[1]
        mean = x.sum(axes) / count
        centred = x - mean.reshape(shape)
        var = (centred * centred).sum(axes) / count
        if updates_statistics:
            # Running statistics use the unbiased variance, as in PyTorch.
            unbiased_var = var * count / max(count - 1, 1)
            of_batch = torch.cat([mean, unbiased_var]).detach()
            old = frame.moved.get(self.start)
            old = torch.cat(self._running()) if old is None else old
            momentum = layer.momentum or 0.0
            new = (1 - momentum) * old + momentum * of_batch
            if frame.in_place:
                assert frame.buffers is not None
                frame.buffers.data.narrow(-1, self.start, 2 * layer.num_features).copy_(new)
            else:
                frame.moved[self.start] = new
        out = centred * torch.rsqrt(var + layer.eps).reshape(shape)
        if layer.weight is None:
            return out
        return out * layer.weight.reshape(shape) + layer.bias.reshape(shape)


class KeyedDropout(LayerForward[nn.modules.dropout._DropoutNd]):
    """Forward of a dropout with the masks in `frame.drop`, in the order of calls.

    Args:
        layer: the layer.
        name: its name, which copies of the net share.
        frame: the context of the net.
    """

    def __init__(self, layer: nn.modules.dropout._DropoutNd, name: str, frame: ForwardContext):
        super().__init__(layer)
        self.name = name
        self.frame = frame

    def __call__(self, input: Tensor) -> Tensor:
        """Multiply a batch by the mask of this call; with a probe, record the mask's shape.

        Args:
            input: [B, ...].
        """
        x, layer, frame = input, self.layer, self.frame
        if frame.probe is not None:
            if layer.training and layer.p > 0:
                frame.probe.append((self.name, layer.p, mask_shape(layer, x)))
            return x.mul_(1) if layer.inplace else x
        mask = self.mask(x)
        if mask is None:
            return x
        return x.mul_(mask) if layer.inplace else x * mask

    def mask(self, x: Tensor) -> Tensor | None:
        """Return the mask of this call, and count the call; None without dropout.

        Args:
            x: the input of the call.

        Raises:
            ValueError: the call is not the one of the net's first examples: of another dropout,
                with another rate, or on a tensor of another shape.
        """
        frame, layer = self.frame, self.layer
        is_active = frame.mode != "eval" and layer.training and layer.p > 0
        if not is_active or frame.dropouts is None:
            return None
        call = frame.calls
        frame.calls += 1
        # Also without masks: a net in which no dropout was found has none, and needs some here.
        expected = frame.dropouts[call] if call < len(frame.dropouts) else None
        if expected is None or (expected.layer, expected.rate) != (self.name, layer.p):
            raise ValueError(self._unexpected(expected))
        if not frame.drop:
            return None
        mask = frame.drop[call]
        if mask.shape != mask_shape(layer, x):
            raise ValueError(
                f"a {type(layer).__name__} gets a tensor of shape {list(x.shape)}, which does not "
                f"follow from the number of examples as it did on the first ones; its mask is "
                f"{list(mask.shape)}"
            )
        return mask

    def _unexpected(self, expected: DropoutMask | None) -> str:
        """Return the message about a call for which no mask was drawn."""
        first = "none"
        if expected is not None:
            first = f"{expected.layer or 'the net'} with rate {expected.rate:g}"
        return (
            f"the net calls dropout {self.name or 'the net'} ({type(self.layer).__name__}) with "
            f"rate {self.layer.p:g} where it called {first} on its first examples, so that no mask "
            "was drawn; make the same calls in each training pass and choose among their outputs, "
            "or call F.dropout(x, p, self.training) in each, which also works in "
            "torch.utils.checkpoint"
        )


def mask_shape(layer: nn.modules.dropout._DropoutNd, x: Tensor) -> tuple[int, ...]:
    """Return the shape of the mask that PyTorch draws for a dropout.

    Args:
        layer: one of `DROPOUTS`.
        x: its input.
    """
    shape = tuple(x.shape)
    if type(layer) is nn.Dropout:
        return shape
    # PyTorch takes inputs of fewer dimensions for one example without a batch dimension.
    is_one_example = {nn.Dropout1d: len(shape) == 2, nn.Dropout3d: len(shape) != 5}
    kept = 1 if is_one_example.get(type(layer), False) else 2
    return shape[:kept] + (1,) * len(shape[kept:])


@dataclass(frozen=True)
class DropoutMask:
    """Mask of one dropout call, for any number of examples."""

    sizes: tuple[int, ...]
    """Size of each dimension, for one example in those that grow with their number."""
    grows: tuple[bool, ...]
    """For each dimension, True if it grows with the number of examples."""
    rate: float
    """Probability that an entry is dropped."""
    layer: str
    """Name of the layer."""

    def shape(self, n: int) -> tuple[int, ...]:
        """Return the shape of the mask.

        Args:
            n: number of examples.
        """
        sizes = zip(self.sizes, self.grows, strict=True)
        return tuple(size * n if grows else size for size, grows in sizes)

    @property
    def is_of_examples(self) -> bool:
        """True if the first dimension, and no other, is that of the examples."""
        return self.sizes[:1] == (1,) and self.grows == (True, *[False] * len(self.sizes[1:]))

    @classmethod
    def of(
        cls, two: tuple[int, ...], three: tuple[int, ...], rate: float, layer: str
    ) -> DropoutMask | None:
        """Return the mask whose shapes for two and three examples are known.

        Args:
            two: the shape for two examples.
            three: the shape for three examples.
            rate: probability that an entry is dropped.
            layer: name of the layer.

        Returns:
            The mask; None if its shape does not follow from the number of examples.
        """
        if len(two) != len(three):
            return None
        grows = tuple(a != b for a, b in zip(two, three, strict=True))
        sizes = tuple(b - a if a != b else a for a, b in zip(two, three, strict=True))
        mask = cls(sizes, grows, rate, layer)
        return mask if (mask.shape(2), mask.shape(3)) == (two, three) else None


DropoutCalls = list[tuple[str, float, tuple[int, ...]]]
"""Name and rate of the layer, and the shape of the mask, of each call of a dropout."""


def dropout_masks(of_two: DropoutCalls, of_three: DropoutCalls, label: str) -> list[DropoutMask]:
    """Return the masks of a net's dropouts, in the order of the calls.

    Args:
        of_two: the calls for two examples.
        of_three: the calls for three examples.
        label: beginning of a message about the net.

    Raises:
        ConfigError: the shape of a mask does not follow from the number of examples.
    """
    masks: list[DropoutMask] = []
    none = ("", 0.0, ())
    for (layer, rate, two), (_, _, three) in zip_longest(of_two, of_three, fillvalue=none):
        mask = DropoutMask.of(two, three, rate, layer)
        if mask is None:
            raise ConfigError(
                f"{label} calls a dropout of rate {rate:g} on tensors of shape {list(two)} for two "
                f"examples and {list(three)} for three, so that masks cannot be drawn before a "
                "pass; let the shape follow from the number of examples, or set the rate to 0"
            )
        masks.append(mask)
    return masks


def has_own_forward(module: nn.Module) -> bool:
    """Return whether the forward of a layer was set for this one layer, and is not its class's.

    Args:
        module: any layer.
    """
    return "forward" in vars(module)


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""The layers that `KeyedBatchNorm` computes: these very types, since a subclass may differ."""

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""The layers that `KeyedDropout` computes: these very types."""


def set_keyed_forwards(net: nn.Module, frame: ForwardContext, starts: Mapping[str, int]) -> None:
    """Give the BatchNorm and Dropout layers of a net their keyed forwards.

    The layers stay what they are: their types, names, hooks and attributes are the user's. Any
    other layer, such as a subclass, keeps its own forward.

    Args:
        net: the net; changed in place.
        frame: the context that all keyed layers of the net share.
        starts: position of the running statistics of each BatchNorm in the buffer vector, by the
            name of the layer; 0 for one that is missing.
    """
    for name, module in net.named_modules():
        if has_own_forward(module):
            continue
        if type(module) in BATCH_NORMS:
            module.forward = KeyedBatchNorm(cast(Any, module), starts.get(name, 0), frame)
        elif type(module) in DROPOUTS:
            module.forward = KeyedDropout(cast(Any, module), name, frame)


@dataclass(eq=False)
class NoteFeatures:
    """Forward pre-hook of the classifier, which stores its input in `frame.features`."""

    frame: ForwardContext
    """The context of the net."""

    def __call__(self, classifier: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Store the input.

        Args:
            classifier: the classifier of the net.
            args: its positional arguments, of which the first is its input, [B, F].
        """
        if args:
            self.frame.features = args[0]


def switch_off_dropout(net: nn.Module) -> None:
    """Let the layers of a net whose masks are keyed pass their input on.

    Args:
        net: the net; changed in place.
    """
    for module in net.modules():
        if type(module) in DROPOUTS and not has_own_forward(module):
            module.forward = _identity


def _identity(input: Tensor) -> Tensor:
    return input
