"""Plain SGD steps of a net that ends in fully connected layers, whose backward pass is written out (`fused`).

With autograd a step passes over a layer's weights four times: forward, for what goes further down, to write their
gradient, to add it. Here the last two are one product into the weights' own place, W <- W - lr gᵀh. That rounds
otherwise, so a method that is plain SGD at some value of a hyper-parameter is no longer so to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raysim.config import Config
from raysim.models import Bound, Model, note_features
from raysim.randomness import generator
from raysim.rules import PLAIN_STEP, ClientRule, overridden


@dataclass(frozen=True)
class Layer:
    """y = x Wᵀ + b, where x may be what a ReLU gave."""

    weight: Tensor
    bias: Tensor | None
    after_relu: bool


class Dense:
    """A bound net as a body (any modules, by autograd; perhaps none) and fully connected layers with ReLU between."""

    def __init__(self, bound: Bound, body: Sequence[nn.Module], layers: Sequence[Layer]):
        self.bound, self.body, self.layers = bound, body, layers
        count = sum(1 + (layer.bias is not None) for layer in layers)
        self.parameters, self.views = bound.parameters[:-count], bound.views[:-count]

    @classmethod
    def of(cls, bound: Bound) -> Dense | None:
        """None if the net is not a sequence that ends so, or if more happens in it (hooks, shared or frozen layers)."""
        body, layers = list(_leaves(bound.module[0])), []
        parameters, views = list(bound.parameters), list(bound.views)
        while body and _is(body[-1], nn.Linear):
            own = list(body[-1].parameters())
            if list(map(id, own)) != list(map(id, parameters[-len(own) :])):
                break
            weight, *bias = views[-len(own) :]
            del body[-1], parameters[-len(own) :], views[-len(own) :]
            relu = len(body) > 1 and _is(body[-1], nn.ReLU) and _is(body[-2], nn.Linear)
            if relu:
                del body[-1]
            layers.insert(0, Layer(weight, bias[0] if bias else None, relu))
        if layers and layers[0].after_relu:  # the layer below is none of ours
            body.append(nn.ReLU())
        while body and _is(body[-1], nn.Flatten) and (body[-1].start_dim, body[-1].end_dim) == (1, -1):
            del body[-1]
        found = cls(bound, body, layers) if layers else None
        return found if found and found._right() else None

    def _right(self) -> bool:
        """Whether it does what autograd does: what else happens in a net's modules need not show in their kinds."""
        bound, model, rng = self.bound, self.bound.model, generator(0, "dry run")
        x, w, *drop = (
            torch.from_numpy(rng.standard_normal(shape, dtype="float32")).to(model.device, model.dtype)
            for shape in ((3, *model.shape), (model.size,), *((3, *shape) for shape, _ in model.dropouts))
        )
        y, ends = torch.arange(3, device=model.device) % model.classes, []
        for fused in (True, False):
            bound.flat.copy_(model.initial()[0]).add_(w, alpha=0.1)
            buffers = model.initial()[1]
            try:
                if fused:
                    self.step(x, y, 1.0, buffers, tuple(drop))
                else:
                    loss = F.cross_entropy(bound.forward(x, "train", buffers, tuple(drop)), y)
                    parts = torch.autograd.grad(loss, bound.parameters, materialize_grads=True)
                    bound.flat.sub_(torch.cat([part.reshape(-1) for part in parts]))
            except Exception:  # whatever is wrong with it, autograd's way will say so in training, or do without
                return False
            ends.append(bound.flat.clone())
        bound.frame.features = None
        return torch.allclose(*ends, rtol=1e-4, atol=1e-5 * float(ends[1].abs().max()))

    def step(self, x: Tensor, y: Tensor, lr: float, buffers: Tensor | None, drop: tuple[Tensor, ...]) -> Tensor:
        """One step in mode "train" on images x [B, C, H, W] and labels y [B]; the mean cross-entropy before it."""
        top = x
        if self.body:
            self.bound.tell("train", buffers, drop)
            for module in self.body:
                top = module(top)
        h, inputs = top.detach().flatten(1), []
        for layer in self.layers:
            h = h.relu_() if inputs and layer.after_relu else h
            inputs.append(h)
            h = h @ layer.weight.T if layer.bias is None else torch.addmm(layer.bias, h, layer.weight.T)
        log_p = torch.log_softmax(h, 1)
        loss = F.nll_loss(log_p, y)
        g = log_p.exp_()
        g.scatter_add_(1, y[:, None], g.new_full((1, 1), -1.0).expand(len(y), 1)).div_(len(y))
        for i, (layer, h) in reversed(list(enumerate(zip(self.layers, inputs, strict=True)))):
            below = g @ layer.weight if i or self.parameters else g
            layer.weight.addmm_(g.T, h, alpha=-lr)
            if layer.bias is not None:
                layer.bias.sub_(g.sum(0), alpha=lr)
            g = below.masked_fill_(h <= 0, 0) if i and layer.after_relu else below
        if self.parameters:
            parts = torch.autograd.grad(top, self.parameters, g.view_as(top), materialize_grads=True)
            torch._foreach_add_(self.views, parts, alpha=-lr)  # pyright: ignore[reportPrivateImportUsage]
        return loss


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    """What a module runs one after the other."""
    if type(module) is nn.Sequential and not _hooks(module):
        for child in module:
            yield from _leaves(child)
    else:
        yield module


def _is(module: nn.Module, kind: type[nn.Module]) -> bool:
    return type(module) is kind and not _hooks(module)


def _hooks(module: nn.Module) -> list:
    found = [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]
    return [hook for hooks in found for hook in hooks.values() if hook is not note_features]


def why_not_fused(config: Config, client: ClientRule, model: Model) -> str | None:
    """None if clients' steps can be fused, else the reason."""
    if own := overridden(client, PLAIN_STEP):
        return f"client rule '{client.name}' has a {own[0]} of its own"
    if not config.takes_bare_gradients:
        return "each client's gradient is changed before its step"
    if Dense.of(Bound(model)) is None:
        return f"model '{config.model.name}' does not end in fully connected layers of its own"
    return None
