"""Gradients of dense nets without autograd.

Autograd's bookkeeping takes a large part of a small net's local step, and for a chain of layers all
of it is known in advance. `FastGradient` calls the kernels that autograd would call, in autograd's
order, and writes the gradients where they are wanted. The bits are autograd's: `matches_autograd`
compares both on the device at hand, and a net that fails the comparison keeps to autograd.

Only nets of dense layers gain enough to be here. The same for convolutional nets brought 5 to 8 %,
and most of that came from max pooling before ReLU, which the shipped nets now do by themselves.
CPU time of a round by autograd over that by `FastGradient`, in loop mode with one thread, median of
7 pairs of turns (smallest, largest); 10 clients make 5 steps of 64 unless noted otherwise:

    FedAvg, MLP 784-200-200-10, P = 199,210                   1.23 (1.13, 1.32)
    the same, 1000 clients, one step of 6                     1.23 (1.19, 1.32)
    FedAvg, 784-200-100-10 with BatchNorm, P = 178,710        1.24 (1.20, 1.29)
    GradMA, the same net                                      1.18 (1.09, 1.25)
    FedAvg, MLP 784-550-150-10, P = 515,910                   1.16 (1.12, 1.22)
    FedAvg, MLP 784-1000-210-10, P = 997,320                  1.10 (0.99, 1.15)
    the same, 20 clients, five steps of 20                    1.06 (0.99, 1.11)
    FedProx, the same                                         1.22 (1.16, 1.30)
    GradMA, the same, 5 pairs                                 1.11 (1.04, 1.16)
    FedAvg, 784-600-256-10, P = 627,426, 20 clients, 5 of 20  1.11 (1.06, 1.22)
    FedProx, the same                                         1.18 (1.07, 1.26)

    python benchmarks/earns_its_place.py gradient
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from numpy.random import Generator
from torch import Tensor, nn

from raysim.models.flat import BoundModel, Model
from raysim.models.keyed_layers import KeyedBatchNorm, KeyedDropout
from raysim.models.stages import is_chain, is_modified
from raysim.randomness import generator
from raysim.rules.task import PassMode
from raysim.system.signals import reraise_stop

aten = torch.ops.aten

MAX_PARAMETERS = 1_000_000
"""Larger nets keep to autograd: their kernels take so long that FedAvg gains less than 10 %."""

Backward = Callable[[Tensor, bool, list[Tensor]], Tensor | None]
"""`backward(g, needs_input, out)` takes the gradient of a layer's output, which it may overwrite.

It writes the gradients of the layer's parameters into `out`, and returns that of the input, or None
if it is not needed.
"""

Forward = Callable[[Tensor], tuple[Tensor, Backward]]
"""Takes a layer's input, which it does not change; returns the output and the way back."""


class FastGradient:
    """The gradient of a bound net that is a chain of dense layers.

    Args:
        bound: the net with its parameters; if it is not such a chain, `layers` is empty.
    """

    def __init__(self, bound: BoundModel):
        """Find the layers of the net; `layers` stays empty if it is anything but such a chain."""
        modules = list(_leaves(bound.module[0]))
        self._bound = bound
        self.layers: list[tuple[Forward, int]] = []
        """Each layer with its number of parameter tensors."""
        if _are_dense_layers(bound, modules):
            for module in modules:
                forward = LAYERS[_kind(module)](module)
                self.layers.append((forward, len(list(module.parameters()))))
        self._normalized = any(_kind(module) is KeyedBatchNorm for module in modules)

    def supports(self, x: Tensor) -> bool:
        """Return whether `gradient` can be called on images x [B, C, H, W].

        Batch statistics of a single example need autograd.

        Args:
            x: images [B, C, H, W].
        """
        return len(x) > 1 or not self._normalized

    def gradient(
        self,
        x: Tensor,
        y: Tensor,
        mode: PassMode,
        buffers: Tensor,
        drop: tuple[Tensor, ...],
        out: list[Tensor],
    ) -> Tensor:
        """Compute the gradient of the mean cross-entropy.

        Args:
            x: images [B, C, H, W].
            y: labels [B].
            mode: see `Task.grad`; "train" moves `buffers`.
            buffers: [Q], the BatchNorm statistics.
            drop: dropout masks [B, ...], one for each layer.
            out: the gradient of each parameter tensor is written into these.

        Returns:
            The mean cross-entropy.
        """
        self._bound.tell(mode, buffers, drop)
        x = x.detach()
        backwards: list[Backward] = []
        for forward, _ in self.layers:
            x, backward = forward(x)
            backwards.append(backward)
        log_p = torch.log_softmax(x, 1)
        # Reduction 1 is the mean, and -100 the default `ignore_index` of F.cross_entropy.
        loss, weight = aten.nll_loss_forward.default(log_p, y, None, 1, -100)
        g = torch.ones_like(loss)
        g = aten.nll_loss_backward.default(g, log_p, y, None, 1, -100, weight)
        g = aten._log_softmax_backward_data.default(g, log_p, 1, log_p.dtype)
        end = len(out)
        for backward, (_, count) in zip(reversed(backwards), reversed(self.layers), strict=True):
            start = end - count
            # Without parameters below a layer, nobody needs the gradient of its input.
            g = backward(g, start > 0, out[start:end])
            if g is None:
                break
            end = start
        return loss


def matches_autograd(model: Model) -> bool:
    """Return whether `FastGradient` gives autograd's gradients and statistics, to the bit.

    It is False for nets that are not a chain of dense layers, have more than `MAX_PARAMETERS`, or
    compute in another precision than float32, and for tasks other than classification.

    Args:
        model: the net.
    """
    if model.size > MAX_PARAMETERS or model.precision != "float32" or not model.is_classifier:
        return False
    bound = BoundModel(model)
    fast = FastGradient(bound)
    if not fast.layers:
        return False
    rng = generator(0, "dry run")
    # Initial zeros would hide differences.
    bound.w.copy_(model.initial()[0]).add_(_random(rng, model, model.size), alpha=0.1)
    modes: tuple[PassMode, ...] = ("train", "frozen", "eval")
    for mode, n in product(modes, (1, 3)):
        x = _random(rng, model, n, *model.shape)
        drop = tuple(_random(rng, model, *mask.shape(n)) for mask in model.dropouts)
        if fast.supports(x) and not _same_gradient(bound, fast, x, mode, drop):
            return False
    return True


def _random(rng: Generator, model: Model, *shape: int) -> Tensor:
    """Return normal numbers of a shape, as the net's parameters."""
    values = torch.from_numpy(rng.standard_normal(shape, dtype="float32"))
    return values.to(model.device, model.dtype)


def _same_gradient(
    bound: BoundModel, fast: FastGradient, x: Tensor, mode: PassMode, drop: tuple[Tensor, ...]
) -> bool:
    """Return whether both ways give the same gradient and statistics on a batch, to the bit."""
    model = bound.model
    y = torch.arange(len(x), device=model.device) % model.classes
    buffers, buffers_of_autograd = model.initial_buffers(), model.initial_buffers()
    # NaN shows a part that `gradient` does not write.
    gradient = torch.full_like(bound.w, torch.nan)
    try:
        fast.gradient(x, y, mode, buffers, drop, list(model.views(gradient).values()))
        _, parts = by_autograd(bound, x, y, mode, buffers_of_autograd, drop)
    except BaseException as error:  # if autograd fails too, training reports it
        reraise_stop(error)
        return False
    reached = [part.reshape(-1) for part in parts if part is not None]
    if len(reached) < len(parts):
        return False
    is_same = torch.equal(gradient, torch.cat(reached))
    return is_same and torch.equal(buffers, buffers_of_autograd)


def by_autograd(
    bound: BoundModel,
    x: Tensor,
    y: Tensor,
    mode: PassMode,
    buffers: Tensor,
    drop: tuple[Tensor, ...],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Compute the mean loss of any net, and its gradient in new tensors.

    Args:
        bound: the net with its parameters.
        x: inputs [B, ...].
        y: [B, ...], the targets.
        mode: mode of the pass; "train" moves `buffers`.
        buffers: [Q], the BatchNorm statistics.
        drop: dropout masks [B, ...], one for each layer.

    Returns:
        The mean loss, and the gradient of each parameter tensor; None where it does not depend on
        the parameter.
    """
    with bound.model.passes():
        loss = bound.model.mean_loss(bound.forward(x, mode, buffers, drop), x, y)
        parts = torch.autograd.grad(loss, bound.parameters, allow_unused=True)
    bound.frame.features = None
    return loss.detach(), parts


# -- layers ----------------------------------------------------------------------------------------


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the modules that a net runs one after the other."""
    if is_chain(module):
        for child in module:
            yield from _leaves(child)
    else:
        yield module


def _kind(module: nn.Module) -> type:
    """Return the key of a layer in `LAYERS`: its keyed forward's type, else its own."""
    return type(vars(module).get("forward", module))


def _are_dense_layers(bound: BoundModel, modules: list[nn.Module]) -> bool:
    """Return whether the modules of a net are layers of `LAYERS` and nothing else computes."""
    if not all(map(_is_known, modules)) or any(map(is_modified, bound.module.modules())):
        return False
    # No parameter is frozen or shared.
    parameters = [id(parameter) for module in modules for parameter in module.parameters()]
    return parameters == list(map(id, bound.parameters))


def _is_known(module: nn.Module) -> bool:
    # The backward pass of BatchNorm writes the gradients of weight and bias.
    without_weights = isinstance(module, nn.modules.batchnorm._NormBase) and module.weight is None
    return _kind(module) in LAYERS and not without_weights


def _linear(layer: nn.Linear) -> Forward:
    # `data` is a view of the bound vector [P], and autograd does not record what is done with it.
    weight = layer.weight.data
    bias = None if layer.bias is None else layer.bias.data

    def forward(x: Tensor) -> tuple[Tensor, Backward]:
        def backward(g: Tensor, needs_input: bool, out: list[Tensor]) -> Tensor | None:
            _multiply(g.t(), x, out[0])
            if bias is not None:
                torch.sum(g, 0, out=out[1])
            return g.mm(weight) if needs_input else None

        y = x.mm(weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
        return y, backward

    return forward


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a @ b into `out`.

    On some machines the bits depend on the alignment of the result. Autograd's own tensors begin at
    a multiple of this many bytes.
    """
    if out.data_ptr() % (64 if out.is_cpu else 512):
        out.copy_(a.mm(b))
    else:
        torch.mm(a, b, out=out)


def _batch_norm(module: nn.modules.batchnorm._BatchNorm) -> Forward:
    weight, bias, eps = module.weight.data, module.bias.data, module.eps
    keyed: KeyedBatchNorm = vars(module)["forward"]

    def forward(x: Tensor) -> tuple[Tensor, Backward]:
        arguments = keyed.how(x)
        assert arguments is not None
        mean, var, by_batch, momentum = arguments
        normalized, *saved = aten.native_batch_norm.default(
            x, weight, bias, mean, var, by_batch, momentum, eps
        )

        def backward(g: Tensor, needs_input: bool, out: list[Tensor]) -> Tensor | None:
            wanted = (needs_input, True, True)
            below, g_weight, g_bias = aten.native_batch_norm_backward.default(
                g, x, weight, mean, var, *saved, by_batch, eps, wanted
            )
            out[0].copy_(g_weight)
            out[1].copy_(g_bias)
            return below

        return normalized, backward

    return forward


def _dropout(module: nn.Module) -> Forward:
    keyed: KeyedDropout = vars(module)["forward"]

    def forward(x: Tensor) -> tuple[Tensor, Backward]:
        mask = keyed.mask(x)
        if mask is None:
            return x, lambda g, needs_input, out: g
        return x * mask, lambda g, needs_input, out: g.mul_(mask)

    return forward


def _relu(layer: nn.ReLU) -> Forward:
    def forward(x: Tensor) -> tuple[Tensor, Backward]:
        positive = torch.relu(x)

        def backward(g: Tensor, needs_input: bool, out: list[Tensor]) -> Tensor:
            return aten.threshold_backward.grad_input(g, positive, 0, grad_input=g)

        return positive, backward

    return forward


def _flatten(layer: nn.Flatten) -> Forward:
    def forward(x: Tensor) -> tuple[Tensor, Backward]:
        y = x.flatten(layer.start_dim, layer.end_dim)
        return y, lambda g, needs_input, out: g.view(x.shape)

    return forward


LAYERS: dict[type, Callable[[Any], Forward]] = {
    nn.Linear: _linear,
    nn.ReLU: _relu,
    nn.Flatten: _flatten,
    KeyedBatchNorm: _batch_norm,
    KeyedDropout: _dropout,
}
