"""The `Task`: a client's training problem as its rule sees it, one client at a time or many under vmap."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from raysim.config.schema import Privacy
from raysim.errors import in_a_line
from raysim.models.flat import Bound, Mode, Model
from raysim.randomness import generator
from raysim.signals import reraise_stop
from raysim.training.fast_gradient import Chain, by_autograd
from raysim.training.privacy import clipped_sum, in_parts


@dataclass(frozen=True)
class Batch:
    """One mini-batch of one client: x [B, C, H, W], y [B] (or probabilities [B, classes]), mask [B] (None if every
    example is real).

    Under vmap the batches of a block are padded to the largest one. `size` and `mean` leave the padding out.
    """

    x: Tensor
    y: Tensor
    mask: Tensor | None = None
    drops: tuple[tuple[Tensor, ...], ...] = ()
    """Independent sets of dropout masks, as many as the rule's `masks`."""
    chosen: int = 0
    made: tuple[Batch, ...] = ()
    """What the rule's `make` gave for the batch of the same number in its pass."""
    noise: Tensor | None = None
    """[P], standard normal; for private steps only."""

    @property
    def drop(self) -> tuple[Tensor, ...]:
        return self.drops[self.chosen] if self.drops else ()

    @property
    def size(self) -> int | Tensor:
        """How many real examples it has: an int, or a number as a tensor where a batch is padded, under vmap.

        `len(batch.y)` counts the padding as well.
        """
        return len(self.y) if self.mask is None else self.mask.sum()

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the real examples of values [B, ...], as [...].

        `values.mean()` averages over the padding as well.
        """
        if self.mask is None:
            return values.mean(0)
        return (values * self.mask.reshape(-1, *[1] * (values.ndim - 1))).sum(0) / self.mask.sum()

    def masked(self, k: int) -> Batch:
        """The same batch under the k-th set of dropout masks."""
        return replace(self, chosen=k)


@dataclass(frozen=True)
class LocalData:
    """A client's data as a rule sees it whole: `n` examples, where clients have `average` of them. What needs to look
    at the examples themselves (`task.full_grad`) is a method of the task."""

    n: int
    average: float = 0.0
    batches: Callable[..., Iterator[Batch]] = lambda augment=False: iter(())
    """One pass over everything, not shuffled, without dropout; `batches(augment=True)` augments it."""


class Net:
    """A forward pass as a loss function sees it. It is run when something of it is asked for, and once."""

    def __init__(self, model: Model, x: Tensor, call: Callable[..., tuple[Tensor, Tensor | None]]):
        """`call(x, first, levels)` runs the stages from `first` on; it gives the output and the classifier's input."""
        self._model, self._x, self._call = model, x, call
        self._out: tuple[Tensor, Tensor | None] | None = None
        self._levels: list[Tensor] | None = [] if model.levels else None

    def _forward(self) -> tuple[Tensor, Tensor | None]:
        if self._out is None:
            self._out = self._call(self._x, 0, self._levels)
        return self._out

    @property
    def logits(self) -> Tensor:
        """[B, classes]."""
        return self._forward()[0]

    @property
    def features(self) -> Tensor:
        """The representation, that is the classifier's input, [B, F]. Raises ValueError if the net ends otherwise."""
        features = self._forward()[1]
        if features is None:
            raise ValueError("the net does not end in a linear classifier, so it has no features")
        return features

    @property
    def levels(self) -> list[Tensor]:
        """[h_1, ..., h_L, logits]: what each stage gives. Raises ValueError for a net that is not made of stages."""
        self._forward()
        if self._levels is None:
            raise ValueError("the net is not made of stages (an nn.Sequential of two or more)")
        return self._levels

    def tail(self, level: int, h: Tensor) -> Tensor:
        """The logits [B, classes] that the stages after `level` (1..L) make of h = h_level."""
        return self._call(h, level, None)[0]


Loss = Callable[[Net, Batch], Tensor]


def cross_entropy(net: Net, batch: Batch) -> Tensor:
    """Per sample, [B]."""
    return F.cross_entropy(net.logits, batch.y, reduction="none")


def soft_cross_entropy(net: Net, batch: Batch) -> Tensor:
    """-Σ_c y_c log(p_c + 1e-12) per sample, [B], where y are probabilities [B, classes] or labels [B] (Xu 2022)."""
    log_p = torch.log(torch.softmax(net.logits, -1) + 1e-12)
    if batch.y.is_floating_point():
        return -(batch.y * log_p).sum(-1)
    return -log_p.gather(-1, batch.y[:, None])[:, 0]


@dataclass(frozen=True)
class Facts:
    """What stays the same through a client's local training."""

    t: int | Tensor = 0
    lr: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    privacy: Privacy | None = None
    guarded: bool = False
    """Whether the rule may look at the examples through private gradients only."""
    x0: Tensor | None = None
    decayed: Tensor | None = None


class Task:
    """The training problem of one client in one round, as its rule sees it.

    `lr` is η_l, `steps` the number of local steps of this client, `t` the round that it began in (a tensor, as `steps`,
    inside a step under vmap of clients that began at different times, or on a GPU), `x0` [P] the run's initial
    parameters, `segments` the lengths of the named tensors in the flat vector, `buffers` [Q] this client's running
    statistics (the engine threads them; a rule never writes them), `received` [Q] those that came with the broadcast.
    """

    def __init__(self, model: Model, facts: Facts, received: Tensor | None = None, steps: int | Tensor = 0):
        self.model, self.facts, self.steps, self.received = model, facts, steps, received
        self.buffers = received
        self.segments = model.segments
        self.losses: list[Tensor] = []
        """Mean cross-entropy of each pass in train mode, without what a method adds to it."""

    @property
    def lr(self) -> float:
        return self.facts.lr

    @property
    def t(self) -> int | Tensor:
        return self.facts.t

    @property
    def x0(self) -> Tensor:
        assert self.facts.x0 is not None
        return self.facts.x0

    def grad(
        self, w: Tensor, batch: Batch, loss: Loss = cross_entropy, mode: Mode = "train", buffers: Tensor | None = None
    ) -> Tensor:
        """The gradient [P] at w [P] of the mean over the batch's real examples of `loss`, which gives one value
        for each example. Exactly one pass of a step is in mode "train"; `buffers` are for mode "eval".

        Where `privacy` is on, this is 1/B (Σ_k g_k min(1, C/‖g_k‖) + C sigma z), g_k the gradient of example k (Abadi
        2016), and there is no other pass than that in mode "train".
        """
        if self.facts.privacy is None:
            return self._grad(w, batch, loss, mode, buffers)
        if mode != "train":
            raise ValueError("privacy covers the gradient in mode 'train'; this rule takes one of the data beside it")
        return self._private_grad(w, batch, loss)

    def _grad(self, w: Tensor, batch: Batch, loss: Loss, mode: Mode, buffers: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _private_grad(self, w: Tensor, batch: Batch, loss: Loss) -> Tensor:
        privacy, count = self.facts.privacy, batch.size
        assert privacy is not None
        total, plain = torch.zeros_like(w), w.new_zeros(())
        for part in in_parts(batch, self.model.size) if loss is cross_entropy else [batch]:
            rows, values = self._sample_grads(w, part, loss, "train")
            total = total + clipped_sum(rows, privacy.clip, part.mask)
            plain = plain + (values if part.mask is None else values * part.mask).sum()
        self.losses.append((plain / count).detach())
        if privacy.clip is not None and batch.noise is not None:
            total = total + privacy.clip * privacy.sigma * batch.noise
        return total / count

    def sample_grads(
        self, w: Tensor, batch: Batch, loss: Loss = cross_entropy, mode: Mode = "eval", buffers: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The gradient of each example's loss, [B, P], and each example's cross-entropy, [B]. For nets in which
        examples do not meet (no BatchNorm in mode "train"). `buffers` are the client's own unless given."""
        self._guard("sample_grads")
        return self._sample_grads(w, batch, loss, mode, self.buffers if buffers is None else buffers)

    def _guard(self, method: str) -> None:
        if self.facts.guarded:
            raise ValueError(
                f"privacy does not cover what comes of task.{method}; name in the rule's `exposes` what it sends of it"
            )

    def _sample_grads(
        self, w: Tensor, batch: Batch, loss: Loss, mode: Mode, buffers: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        def total(each: Tensor) -> tuple[Tensor, Tensor]:
            net = Net(self.model, batch.x, _one_by_one(self.model, each, batch, mode, buffers))
            values = loss(net, batch)
            plain = values if loss is cross_entropy or mode != "train" else cross_entropy(net, batch)
            return values.sum(), plain.detach()

        return torch.func.grad(total, has_aux=True)(w.expand(len(batch.y), -1))

    def input_grad(self, w: Tensor, batch: Batch, loss: Loss = cross_entropy, buffers: Tensor | None = None) -> Tensor:
        """The gradient of each example's loss in its own pixels, [B, C, H, W], in mode "eval" with `buffers`."""
        raise NotImplementedError

    def fisher(self, w: Tensor, data: LocalData, augment: bool = False) -> Tensor:
        """The diagonal of the empirical Fisher information [P] at w: the mean over all of the client's examples of the
        squared gradient of log p(y | x), in mode "eval" with the client's own statistics. For `init` and `finish`."""
        self._guard("fisher")
        return self.squares(w, data.batches(augment=augment))

    def squares(self, w: Tensor, batches: Iterable[Batch]) -> Tensor:
        """The mean over all examples of these batches of their squared gradients [P] at w, in mode "eval"."""
        total, count = torch.zeros_like(w), 0
        for batch in batches:
            for part in in_parts(batch, self.model.size):
                rows, _ = self._sample_grads(w, part, cross_entropy, "eval", self.buffers)
                total, count = total + (rows * rows).sum(0), count + len(rows)
        return total / max(count, 1)

    def net(
        self, w: Tensor, batch: Batch, mode: Mode = "frozen", buffers: Tensor | None = None, dropout: bool = True
    ) -> Net:
        """The net at w [P] on a batch, as a constant: no gradient flows into w, only into what `tail` is given. Modes
        "frozen" and "eval" only."""
        raise NotImplementedError

    def full_grad(self, w: Tensor, data: LocalData) -> Tensor:
        """∇f_i(w) [P]: the mean over all of the client's examples as they are stored (no augmentation, no dropout),
        computed batch by batch and weighted by their sizes; BatchNorm takes each batch's statistics and keeps
        nothing. For `init` and `finish`, where a client is by itself."""
        self._guard("full_grad")
        total = torch.zeros_like(w)
        for batch in data.batches():
            total += self._grad(w, batch, cross_entropy, "frozen", None) * (len(batch.y) / data.n)
        return total

    def fresh_model(self) -> tuple[Tensor, Tensor]:
        """Parameters [P] and statistics [Q] of a net initialised anew, keyed by the client. For `init`."""
        raise NotImplementedError

    def zeros(self) -> Tensor:
        """A zero vector [P] for a rule's state."""
        return torch.zeros(self.model.size, dtype=self.model.dtype, device=self.model.device)

    def zero_buffers(self) -> Tensor:
        """A zero vector [Q] for running statistics in a rule's state."""
        return torch.zeros(self.model.buffer_size, dtype=self.model.dtype, device=self.model.device)

    def _downhill(self, w: Tensor, direction: Tensor) -> Tensor:
        if self.facts.clip is not None:
            norm = (direction * direction).sum().sqrt()
            factor = torch.clamp(self.facts.clip / norm.clamp(min=1e-30), max=1.0)
            direction = direction * torch.where(torch.isfinite(norm), factor, torch.nan)  # not 0, which would hide it
        if self.facts.decayed is not None:
            direction = direction + self.facts.weight_decay * self.facts.decayed * w
        return direction

    def descend(self, w: Tensor, direction: Tensor) -> Tensor:
        """w - lr * direction; the direction is clipped to the configured norm, then weight decay is added."""
        return torch.add(w, self._downhill(w, direction), alpha=-self.lr)


class LoopTask(Task):
    """One client at a time, on nets bound to flat vectors: one for the parameters in training, a few for others, of
    which those that `net` has given out are constants."""

    def __init__(self, model: Model, facts: Facts, chained: bool = False):
        """`chained`: the model `chain.agrees`, so that its gradients need no autograd."""
        super().__init__(model, facts)
        self.trained = Bound(model)
        self.chain = Chain(self.trained) if chained else None
        self.slopes = list(map(torch.empty_like, model.views(self.zeros()).values())) if chained else []
        self.x: Tensor | None = None
        self.unmoved = -1
        self.first: tuple[Batch, Loss, Tensor, int] | None = None
        """The gradient at x, where the vector in training begins, on the batch of the first step, and its version: at x
        itself it need not be found again (GradMA asks for both), unless the rule has made something else of it."""
        self.others: list[_Held] = []
        self.constants: list[_Held] = []

    def start(
        self,
        facts: Facts,
        x: Tensor,
        received: Tensor,
        steps: int,
        buffers: Tensor | None = None,
        fresh: Callable[[], tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """Begins with the next client: returns the vector in training, which holds a copy of x."""
        self.facts, self.steps, self.losses, self.received = facts, steps, [], received
        self.buffers = (received if buffers is None else buffers).clone()
        self._fresh, self.first = fresh, None
        self.x, w = x, self.trained.flat.copy_(x)
        self.unmoved = w._version
        return w

    def fresh_model(self) -> tuple[Tensor, Tensor]:
        assert self._fresh is not None
        return self._fresh()

    def descend_in_place(self, w: Tensor, direction: Tensor) -> None:
        w.add_(self._downhill(w, direction), alpha=-self.lr)

    def descend_plainly(self, batch: Batch) -> None:
        """`descend_in_place` along the gradient of the cross-entropy, unclipped and without decay: the same bits, but
        the gradient is never put together to one vector."""
        given = batch.x, batch.y, "train", self.buffers, batch.drop
        if self.chain is not None:
            loss, parts = self.chain.gradient(*given, self.slopes), self.slopes
        else:
            loss, parts = by_autograd(self.trained, *given)
        torch._foreach_add_(self.trained.views, parts, alpha=-self.lr)  # pyright: ignore[reportPrivateImportUsage]
        self.losses.append(loss)

    def _grad(self, w: Tensor, batch: Batch, loss: Loss, mode: Mode, buffers: Tensor | None) -> Tensor:
        bound, chain, statistics = self.trained, self.chain, self.buffers if mode == "train" else buffers
        if mode == "frozen" and w is self.x and self.first is not None:
            on, of, slope, version = self.first
            if on is batch and of is loss and slope._version == version:
                return slope.clone()
        if w is not bound.flat:
            held = self._held(w, self.others)
            bound, chain = held.bound, held.chain
        if chain is not None and loss is cross_entropy and not batch.y.is_floating_point():
            slope = torch.empty_like(bound.flat)
            plain = chain.gradient(
                batch.x, batch.y, mode, statistics, batch.drop, list(self.model.views(slope).values())
            )
        else:
            net = self._net(bound, batch, mode, statistics)
            value = loss(net, batch).mean()
            parts = torch.autograd.grad(value, bound.parameters, materialize_grads=True)
            plain = value if loss is cross_entropy or mode != "train" else cross_entropy(net, batch).mean()
            slope = torch.cat([p.reshape(-1) for p in parts])
        if mode == "train":
            self.losses.append(plain.detach())
            if w is self.trained.flat and w._version == self.unmoved:
                self.first = batch, loss, slope, slope._version
        return slope

    def input_grad(self, w: Tensor, batch: Batch, loss: Loss = cross_entropy, buffers: Tensor | None = None) -> Tensor:
        self._guard("input_grad")
        x = batch.x.detach().requires_grad_()
        net = self.net(w, replace(batch, x=x), "eval", buffers)
        return torch.autograd.grad(loss(net, batch).sum(), x)[0]

    def net(
        self, w: Tensor, batch: Batch, mode: Mode = "frozen", buffers: Tensor | None = None, dropout: bool = True
    ) -> Net:
        held = self._held(w, self.constants)
        net = self._net(held.bound, batch, mode, buffers, dropout)
        held.given_to.add(net)
        return net

    def _net(self, bound: Bound, batch: Batch, mode: Mode, buffers: Tensor | None, dropout: bool = True) -> Net:
        def call(x: Tensor, first: int, levels: list[Tensor] | None) -> tuple[Tensor, Tensor | None]:
            out = bound.forward(x, mode, buffers, batch.drop if dropout else (), first, levels)
            features, bound.frame.features = bound.frame.features, None
            return out, None if features is None else features.flatten(1)

        return Net(self.model, batch.x, call)

    def _held(self, w: Tensor, pool: list[_Held]) -> _Held:
        """A net at w. The vectors used last stay in place, so that frozen ones need no copy at each step; a net that
        somebody still has keeps its vector."""
        held = next((h for h in pool if h.w is w and h.version == w._version), None)
        if held is None:
            free = [h for h in pool if not h.given_to]
            held = free[0] if len(pool) >= HELD and free else _Held.of(self.model, self.chain)
            held.bound.flat.copy_(w)
            held.w, held.version = w, w._version
            if pool is self.constants:
                held.bound.module.requires_grad_(False)
        pool[:] = [h for h in pool if h is not held] + [held]
        return held


HELD = 3
"""Vectors beside the one in training whose nets are kept: GradMA's y, y_prev and x."""


@dataclass
class _Held:
    """A net at w. Keeping w itself makes sure that no other vector takes its identity."""

    bound: Bound
    chain: Chain | None
    w: Tensor | None = None
    version: int = -1
    given_to: weakref.WeakSet[Net] = field(default_factory=weakref.WeakSet)

    @classmethod
    def of(cls, model: Model, like: Chain | None) -> _Held:
        bound = Bound(model)
        return cls(bound, None if like is None else Chain(bound))


class VmapTask(Task):
    """One client of many, inside `torch.func.vmap`: everything is a pure function."""

    def _grad(self, w: Tensor, batch: Batch, loss: Loss, mode: Mode, buffers: Tensor | None) -> Tensor:
        statistics = self.buffers if mode == "train" else buffers

        def mean_loss(w: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            moved: list[Tensor] = []
            net = self._net(w, batch, mode, statistics, True, moved)
            value = batch.mean(loss(net, batch))
            plain = value if loss is cross_entropy or mode != "train" else batch.mean(cross_entropy(net, batch))
            return value, (moved[0] if moved else value.new_zeros(0), plain.detach())

        grad, (moved, value) = torch.func.grad(mean_loss, has_aux=True)(w)
        if mode == "train":
            self.buffers = moved
            self.losses.append(value)
        return grad

    def input_grad(self, w: Tensor, batch: Batch, loss: Loss = cross_entropy, buffers: Tensor | None = None) -> Tensor:
        self._guard("input_grad")

        def total(x: Tensor) -> Tensor:
            return loss(self.net(w, replace(batch, x=x), "eval", buffers), batch).sum()

        return torch.func.grad(total)(batch.x)

    def net(
        self, w: Tensor, batch: Batch, mode: Mode = "frozen", buffers: Tensor | None = None, dropout: bool = True
    ) -> Net:
        return self._net(w, batch, mode, buffers, dropout, [])

    def _net(
        self, w: Tensor, batch: Batch, mode: Mode, buffers: Tensor | None, dropout: bool, moved: list[Tensor]
    ) -> Net:
        """In mode "train" the new statistics are left in `moved`."""

        def call(x: Tensor, first: int, levels: list[Tensor] | None) -> tuple[Tensor, Tensor | None]:
            drop = batch.drop if dropout else ()
            return _pass(self.model, w, x, first, levels, mode, buffers, batch.mask, drop, moved)

        return Net(self.model, batch.x, call)


def _pass(
    model: Model,
    w: Tensor,
    x: Tensor,
    first: int,
    levels: list[Tensor] | None,
    mode: Mode,
    buffers: Tensor | None,
    mask: Tensor | None,
    drop: tuple[Tensor, ...],
    moved: list[Tensor],
) -> tuple[Tensor, Tensor | None]:
    """A forward pass as a pure function: the output, and the classifier's input."""
    frame = model.frame
    frame.mode, frame.in_place, frame.mask, frame.drop = mode, False, mask, drop
    frame.buffers, frame.moved, frame.calls = buffers, {}, model.dropouts_before[first]
    try:
        out = torch.func.functional_call(model.module, model.views(w), (x, first, levels))
        if mode == "train" and buffers is not None:
            moved.append(model.moved_buffers(frame))
        features = frame.features
        return out, None if features is None else features.flatten(1)
    finally:  # nothing of vmap's outlives it
        frame.mask, frame.drop, frame.buffers, frame.moved, frame.in_place = None, (), None, {}, True
        frame.features = None


def _one_by_one(
    model: Model, each: Tensor, batch: Batch, mode: Mode, buffers: Tensor | None
) -> Callable[[Tensor, int, list[Tensor] | None], tuple[Tensor, Tensor | None]]:
    """A forward pass in which every example has parameters of its own, the rows of `each` [B, P]."""

    def call(x: Tensor, first: int, levels: list[Tensor] | None) -> tuple[Tensor, Tensor | None]:
        with_features: list[bool] = []

        def one(w: Tensor, x: Tensor, drop: tuple[Tensor, ...]) -> list[Tensor]:
            found: list[Tensor] = []
            masks = tuple(m[None] for m in drop)
            out, features = _pass(
                model, w, x[None], first, None if levels is None else found, mode, buffers, None, masks, []
            )
            with_features.append(features is not None)
            return [t[0] for t in (out, *([] if features is None else [features]), *found)]

        out, *others = torch.func.vmap(one)(each, x, batch.drop)
        features = others.pop(0) if with_features[0] else None
        if levels is not None:
            levels += others
        return out, features

    return call


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
    except BaseException as error:
        reraise_stop(error)
        return in_a_line(error)
    if not (torch.isfinite(many).all() and torch.isfinite(alone).all()):
        return "its gradients on random images are not finite, so the two ways cannot be compared"
    if not torch.allclose(many, alone, rtol=1e-2, atol=1e-3 * float(alone.abs().max())):
        return "it computes other gradients under vmap than alone"
    return None
