"""The statistics of a net: buffers that a training pass moves, such as BatchNorm's running means.

They are gathered in one flat vector [Q], which a client moves and the server averages, as it would
average the rest of a `state_dict`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raysim.errors import ConfigError
from raysim.models.comparison import same_values
from raysim.models.keyed_layers import BATCH_NORMS, has_own_forward, switch_off_dropout
from raysim.rules.tasks.several_outputs import OutputForms
from raysim.system.global_generators import GENERATORS, generators_kept, seed_generators

COUNTER = "num_batches_tracked"
"""Buffer of normalisation layers that counts passes; only a momentum of None depends on it."""

PASSES = 4
"""Passes in which a buffer may move, each from its own seed; parameters move between them."""

STEP_SHARE = 0.1
"""Size of such a move of a parameter, as a share of its mean magnitude."""


@dataclass(frozen=True)
class Statistic:
    """A buffer of a net and its place in the flat vector."""

    layer: str
    """Name of the layer."""
    name: str
    """Name of the buffer in the layer."""
    start: int
    """Position of its first number in the vector."""
    shape: tuple[int, ...]
    """Shape of the buffer."""
    is_keyed: bool
    """True if a `KeyedBatchNorm` moves it, False if a forward of the user's does."""

    @property
    def size(self) -> int:
        """Number of its numbers."""
        return torch.Size(self.shape).numel()

    def of(self, vector: Tensor) -> Tensor:
        """Return a view of the statistic in a flat vector.

        Args:
            vector: [Q].
        """
        return vector[self.start : self.start + self.size].view(self.shape)


def find_statistics(
    net: nn.Module,
    x: Tensor,
    shared: Sequence[Mapping[str, Tensor]],
    forms: OutputForms | None = None,
) -> list[Statistic]:
    """Find the statistics of a net.

    These are the running statistics of normalisation layers, and the other floating-point buffers
    that a training pass moves.

    Args:
        net: the net, as the user wrote it; not changed.
        x: [B, ...], inputs for passes, which are made only if the net has other buffers.
        shared: what `shared_memory` returned for the net.
        forms: the forms of several outputs; None: forward returns a tensor.

    Raises:
        ConfigError: a BatchNorm averages over all batches (momentum None), or a buffer that moves
            is not persistent, shares its memory, or changes its shape.
    """
    moved = _moved_buffers(net, x, forms) if _has_unknown_buffers(net) else set()
    tied = {name: group for group in shared for name in group}
    statistics = []
    start = 0
    for layer, module in net.named_modules():
        running = _running_statistics(layer, module)
        has_keyed_forward = type(module) in BATCH_NORMS and not has_own_forward(module)
        for name, buffer in module.named_buffers(recurse=False):
            if name not in running and _path(layer, name) not in moved:
                continue
            if name in module._non_persistent_buffers_set:
                raise ConfigError(
                    f"model: {_described(layer, module)} changes its buffer '{name}' in training, "
                    "which is not part of the state_dict that the server averages; register it "
                    "with persistent=True, or keep what each pass computes anew in an attribute"
                )
            if group := tied.get(_path(layer, name)):
                first, second, *_ = group
                raise ConfigError(
                    f"model: '{first}' and '{second}' share their memory, which training moves, "
                    "and a copy of the net parts them; let one layer have the buffer, and give it "
                    "to the others in forward"
                )
            is_keyed = has_keyed_forward and name in running
            statistics.append(Statistic(layer, name, start, tuple(buffer.shape), is_keyed))
            start += statistics[-1].size
    return statistics


def _running_statistics(layer: str, module: nn.Module) -> tuple[str, ...]:
    """Return the names of the running statistics of a normalisation layer; () for other layers."""
    if not isinstance(module, nn.modules.batchnorm._NormBase):
        return ()
    if module.running_mean is not None and module.momentum is None:
        raise ConfigError(
            f"model: {_described(layer, module)} has momentum=None; "
            "set it to a number, for example 0.1"
        )
    return "running_mean", "running_var"


def _has_unknown_buffers(net: nn.Module) -> bool:
    """Return whether a net has buffers of floats, or to come, beside those of normalisation."""
    return any(
        buffer is None or buffer.is_floating_point()
        for module in net.modules()
        if not isinstance(module, nn.modules.batchnorm._NormBase)
        for buffer in module._buffers.values()
    )


def _moved_buffers(net: nn.Module, x: Tensor, forms: OutputForms | None) -> set[str]:
    """Return the names of the floating-point buffers that steps of training change."""
    net = copy.deepcopy(net)
    switch_off_dropout(net)
    before = {name: buffer.detach().clone() for name, buffer in net.named_buffers()}
    net.train()
    moved = set()
    with generators_kept():
        for number in range(PASSES):
            seed_generators(GENERATORS, number)
            try:
                if number > 0:
                    _move_parameters(net)
                outputs = _trial_pass(net, x, forms)
                # Some move in the backward pass only. Once will do, which takes long.
                if number == PASSES - 1 and outputs.requires_grad:
                    outputs.square().sum().backward()
            except Exception:  # the dry run reports it
                break
            for name, buffer in net.named_buffers():
                if name not in before or before[name].shape != buffer.shape:
                    raise ConfigError(
                        f"model: a pass in training makes the buffer '{name}', or changes its "
                        "shape, and the server averages buffers of one shape; register it with "
                        "its final shape"
                    )
                if buffer.is_floating_point() and not same_values(before[name], buffer.detach()):
                    moved.add(name)
    return moved


@torch.enable_grad()
def _trial_pass(net: nn.Module, x: Tensor, forms: OutputForms | None) -> Tensor:
    """Return the outputs of a pass with gradients, by which a forward may know training."""
    outputs = net(x.clone())
    return outputs if forms is None else forms.pack(outputs, len(x))


@torch.no_grad()
def _move_parameters(net: nn.Module) -> None:
    """Move the trained parameters.

    An average of them that starts as their copy rests until they move, and so does the mean of a
    layer that starts at zero.
    """
    for parameter in net.parameters():
        if parameter.requires_grad:
            # A number for each row: one for each entry of a large net takes long.
            rows = (*parameter.shape[:1], *[1] * (parameter.ndim - 1))
            scale = STEP_SHARE * (parameter.abs().mean() + STEP_SHARE)
            parameter += scale * torch.randn(rows).to(parameter)


def statistics_vector(net: nn.Module, statistics: list[Statistic], dtype: torch.dtype) -> Tensor:
    """Return the statistics of a net as a flat vector [Q].

    Args:
        net: the net.
        statistics: its statistics.
        dtype: type of the vector.
    """
    parts = [
        getattr(net.get_submodule(statistic.layer), statistic.name).detach().reshape(-1).to(dtype)
        for statistic in statistics
    ]
    device = next(net.parameters()).device
    return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype, device=device)


class BoundStatistics:
    """The statistics of one net as views of a vector, so that a pass moves the vector.

    A forward of the user's gets copies, since it may put new tensors in their place; `collect`
    stores what it made of them.

    Args:
        net: the net.
        statistics: its statistics.
    """

    def __init__(self, net: nn.Module, statistics: list[Statistic]):
        places = [(net.get_submodule(s.layer), s) for s in statistics]
        self.keyed = [place for place in places if place[1].is_keyed]
        self.unkeyed = [place for place in places if not place[1].is_keyed]
        self.vector: Tensor | None = None

    def bind(self, vector: Tensor) -> None:
        """Let the net read and move a vector [Q].

        Args:
            vector: [Q], the statistics.
        """
        for module, statistic in self.unkeyed:
            module._buffers[statistic.name] = statistic.of(vector).clone()
        if vector is self.vector:
            return
        for module, statistic in self.keyed:
            module._buffers[statistic.name] = statistic.of(vector)
        self.vector = vector

    def collect(self, moved: Collection[int] = ()) -> None:
        """Store the statistics that forwards of the user's moved, in the vector.

        Args:
            moved: positions of those that a `KeyedBatchNorm` has moved there by itself, since the
                first pass did not call it and this one did.
        """
        assert self.vector is not None
        for module, statistic in self.unkeyed:
            if statistic.start in moved:
                continue
            buffer = module._buffers[statistic.name]
            assert buffer is not None
            # By `data`: a BatchNorm's backward pass keeps views of the vector, and autograd takes
            # any other write to it for a change of them.
            statistic.of(self.vector.data).copy_(buffer.detach())


def _path(layer: str, name: str) -> str:
    return f"{layer}.{name}".lstrip(".")


def _described(layer: str, module: nn.Module) -> str:
    """Return the name of a layer and its kind, for messages."""
    return f"{layer or 'the net'} ({type(module).__name__})"


def named_statistics(
    net: nn.Module, statistics: list[Statistic], vector: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names in a `state_dict` of a net and copies of its statistics.

    Args:
        net: the net. A layer in two places has two names.
        statistics: its statistics.
        vector: [Q], their values.
    """
    owners = {id(net.get_submodule(s.layer)): s.layer for s in statistics}
    for path, module in net.named_modules(remove_duplicate=False):
        layer = owners.get(id(module))
        for statistic in statistics:
            if layer is not None and statistic.layer == layer:
                yield _path(path, statistic.name), statistic.of(vector).clone()
