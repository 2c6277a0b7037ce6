"""The `Task`: a client's training problem as its rule sees it, one client at a time or many under vmap."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from raysim.models import Bound, Mode, Model
from raysim.randomness import generator


@dataclass(frozen=True)
class Batch:
    """One mini-batch of one client: x [B, C, H, W], y [B], mask [B] (None if every example is real)."""

    x: Tensor
    y: Tensor
    mask: Tensor | None = None
    drops: tuple[tuple[Tensor, ...], ...] = ()
    """Independent sets of dropout masks, as many as the rule's `masks`."""
    chosen: int = 0

    @property
    def drop(self) -> tuple[Tensor, ...]:
        return self.drops[self.chosen] if self.drops else ()

    def masked(self, k: int) -> Batch:
        """The same batch under the k-th set of dropout masks."""
        return replace(self, chosen=k)


@dataclass(frozen=True)
class LocalData:
    """A client's data as a rule may see it whole: its number of examples."""

    n: int | Tensor


class Net:
    """A forward pass as a loss function sees it."""

    def __init__(self, forward: Callable[[], Tensor]):
        self._forward, self._logits = forward, None

    @property
    def logits(self) -> Tensor:
        """[B, classes]."""
        if self._logits is None:
            self._logits = self._forward()
        return self._logits


Loss = Callable[[Net, Batch], Tensor]


def cross_entropy(net: Net, batch: Batch) -> Tensor:
    """Per sample, [B]."""
    return F.cross_entropy(net.logits, batch.y, reduction="none")


@dataclass(frozen=True)
class Facts:
    """What stays the same through a client's local training."""

    t: int = 0
    lr: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    x0: Tensor | None = None
    decayed: Tensor | None = None


class Task:
    """The training problem of one client in one round, as its rule sees it.

    `lr` is this round's η_l, `steps` the number of local steps of this client, `t` the round, `x0` [P] the run's
    initial parameters, `segments` the lengths of the named tensors in the flat vector, `buffers` [Q] this client's
    running statistics (the engine threads them; a rule never writes them).
    """

    def __init__(self, model: Model, facts: Facts, buffers: Tensor | None = None, steps: int | Tensor = 0):
        self.model, self.facts, self.steps = model, facts, steps
        self.buffers = buffers
        self.segments = model.segments
        self.losses: list[Tensor] = []
        """Mean loss of each pass in train mode."""

    @property
    def lr(self) -> float:
        return self.facts.lr

    @property
    def t(self) -> int:
        return self.facts.t

    @property
    def x0(self) -> Tensor:
        assert self.facts.x0 is not None
        return self.facts.x0

    def grad(
        self, w: Tensor, batch: Batch, loss: Loss = cross_entropy, mode: Mode = "train", buffers: Tensor | None = None
    ) -> Tensor:
        """The gradient [P] at w [P] of the mean over the batch's real examples of `loss`, which gives one value
        for each example. Exactly one pass of a step is in mode "train"; `buffers` are for mode "eval"."""
        raise NotImplementedError

    def zeros(self) -> Tensor:
        """A zero vector [P] for a rule's state."""
        return torch.zeros(self.model.size, dtype=self.model.dtype, device=self.model.device)

    def _downhill(self, w: Tensor, direction: Tensor) -> Tensor:
        if self.facts.decayed is not None:
            direction = direction + self.facts.weight_decay * self.facts.decayed * w
        if self.facts.clip is not None:
            norm = (direction * direction).sum().sqrt()
            direction = direction * torch.clamp(self.facts.clip / norm.clamp(min=1e-30), max=1.0)
        return direction

    def descend(self, w: Tensor, direction: Tensor) -> Tensor:
        """w - lr * direction, with the configured weight decay and clipping."""
        return torch.add(w, self._downhill(w, direction), alpha=-self.lr)


class LoopTask(Task):
    """One client at a time, on nets bound to flat vectors: one for the parameters in training, one for the rest."""

    def __init__(self, model: Model, facts: Facts):
        super().__init__(model, facts)
        self.trained, self.other = Bound(model), Bound(model)

    def start(self, facts: Facts, x: Tensor, buffers: Tensor, steps: int) -> Tensor:
        """Begins with the next client: returns the vector in training, which holds a copy of x."""
        self.facts, self.steps, self.losses = facts, steps, []
        self.buffers = buffers.clone()
        return self.trained.flat.copy_(x)

    def descend_in_place(self, w: Tensor, direction: Tensor) -> None:
        w.add_(self._downhill(w, direction), alpha=-self.lr)

    def grad(
        self, w: Tensor, batch: Batch, loss: Loss = cross_entropy, mode: Mode = "train", buffers: Tensor | None = None
    ) -> Tensor:
        bound = self.trained
        if w is not bound.flat:
            bound = self.other
            bound.flat.copy_(w)
        statistics = self.buffers if mode == "train" else buffers
        value = loss(Net(lambda: bound.forward(batch.x, mode, statistics, batch.drop)), batch).mean()
        parts = torch.autograd.grad(value, bound.parameters, materialize_grads=True)
        if mode == "train":
            self.losses.append(value.detach())
        return torch.cat([p.reshape(-1) for p in parts])


class VmapTask(Task):
    """One client of many, inside `torch.func.vmap`: everything is a pure function."""

    def grad(
        self, w: Tensor, batch: Batch, loss: Loss = cross_entropy, mode: Mode = "train", buffers: Tensor | None = None
    ) -> Tensor:
        model, statistics = self.model, self.buffers if mode == "train" else buffers

        def mean_loss(w: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            frame = model.frame
            frame.mode, frame.in_place, frame.mask, frame.drop = mode, False, batch.mask, batch.drop
            frame.buffers, frame.moved, frame.calls = statistics, {}, 0
            net = Net(lambda: torch.func.functional_call(model.module, model.views(w), (batch.x,)))
            each = loss(net, batch)
            value = each.mean() if batch.mask is None else (each * batch.mask).sum() / batch.mask.sum()
            moved = model.moved_buffers(frame) if mode == "train" else value.new_zeros(0)
            return value, (moved, value.detach())

        try:
            grad, (moved, value) = torch.func.grad(mean_loss, has_aux=True)(w)
        finally:  # nothing of vmap's outlives it
            frame = model.frame
            frame.mask, frame.drop, frame.buffers, frame.moved, frame.in_place = None, (), None, {}, True
        if mode == "train":
            self.buffers = moved
            self.losses.append(value)
        return grad


def why_not_vmap(model: Model) -> str | None:
    """None if clients can train side by side under vmap, else the reason. Compares with one-by-one training."""
    x = torch.from_numpy(generator(0, "dry run").standard_normal((2, 3, *model.shape), dtype="float32"))
    x, y = x.to(model.device, model.dtype), torch.zeros(2, 3, dtype=torch.long, device=model.device)
    w, buffers = model.initial()
    mask, drops = x.new_ones(2, 3), tuple(x.new_ones(2, 3, *shape) for shape, _ in model.dropouts)

    def side_by_side(x: Tensor, y: Tensor, mask: Tensor, *drop: Tensor) -> Tensor:
        return VmapTask(model, Facts(), buffers).grad(w, Batch(x, y, mask, (drop,)))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns where it would fall back to a slow loop of its own
            many = torch.func.vmap(side_by_side)(x, y, mask, *drops)
        one = LoopTask(model, Facts())
        one.buffers = buffers
        alone = torch.stack([one.grad(w, Batch(x[i], y[i], None, (tuple(d[i] for d in drops),))) for i in (0, 1)])
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if not (torch.isfinite(many).all() and torch.isfinite(alone).all()):
        return "its gradients on random images are not finite, so the two ways cannot be compared"
    if not torch.allclose(many, alone, rtol=1e-2, atol=1e-3 * float(alone.abs().max())):
        return "it computes other gradients under vmap than alone"
    return None
