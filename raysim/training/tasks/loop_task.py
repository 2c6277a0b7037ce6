"""Local training of one client after the other, on nets that are bound to flat vectors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from numpy.random import Generator
from torch import Tensor

from raysim.models.flat import BoundModel, Model
from raysim.randomness import generator
from raysim.rules.batch import Batch
from raysim.rules.contract import State
from raysim.rules.losses import JointLoss, Loss, Net, task_loss
from raysim.rules.task import PassMode
from raysim.training.batches.client_batches import CLIENT_RULE, NOISE
from raysim.training.tasks.constants import Constants
from raysim.training.tasks.fast_gradient import FastGradient, by_autograd
from raysim.training.tasks.forward_pass import ForwardPass, of_bound
from raysim.training.tasks.local_step import LocalSettings, step_in_place, steps_in_place
from raysim.training.tasks.task import ModelTask, NetAtPoint, losses_of


class LoopTask(ModelTask):
    """The task of one client at a time.

    It computes on nets that are bound to flat vectors: one net for the vector in training, and a
    few for other vectors. Those that `net` returns have constant parameters.
    """

    def __init__(self, model: Model, settings: LocalSettings, fast: bool = False):
        """Prepare the nets.

        Args:
            model: the net.
            settings: the constants of a client's training; `start` replaces them.
            fast: whether gradients come without autograd; only if `matches_autograd(model)`.
        """
        super().__init__(model, settings)
        self.trained = BoundModel(model)
        self.fast = FastGradient(self.trained) if fast else None
        # Memory for the gradients of `descend_plainly`, the same in every step.
        self.parts = [torch.empty_like(view) for view in self.trained.views] if fast else []
        self.in_steps = False
        """Whether the client makes its local steps now."""
        self.others = BoundCopies(model, fast)
        self.given_nets = BoundCopies(model, constant=True)

    def start(
        self,
        settings: LocalSettings,
        global_params: Tensor,
        global_buffers: Tensor,
        steps: int,
        fresh: Callable[[], tuple[Tensor, Tensor]] | None = None,
        client: int = 0,
        optimizer_state: State | None = None,
    ) -> Tensor:
        """Begin with the next client.

        Args:
            settings: the constants of its training.
            global_params: [P], the parameters that it received.
            global_buffers: [Q], the BatchNorm statistics that it received.
            steps: the number of its local steps.
            fresh: returns the parameters [P] and statistics [Q] of a new net for the rule's `init`;
                see `fresh_model`. None: `task.fresh_model` is refused.
            client: number of the client.
            optimizer_state: state of its optimizer; by default that before the first step.

        Returns:
            `local_params`, a copy of global_params. It is the same tensor for every client.
        """
        self.settings = settings
        self.facts: tuple[int, int] | tuple[Tensor, Tensor] = (steps, client)
        self.in_steps = False
        self.logged = {}
        self.losses = []
        self.global_buffers = global_buffers
        self.buffers = global_buffers.clone()
        self._fresh = fresh
        self.received = (global_params,)
        self.local_params.copy_(global_params)
        if optimizer_state is None and settings.optimizer is not None:
            optimizer_state = settings.optimizer.start(global_params)
        self.optimizer_state = optimizer_state or {}
        self.updates = 0
        self.unreached = None
        return self.local_params

    def forget(self) -> None:
        """Forget what earlier steps computed, so that the next one computes all that it needs.

        A captured step is replayed when what it was captured with may have changed.
        """
        self.unreached = None
        self.others.forget()
        self.given_nets.forget()

    @property
    def local_params(self) -> Tensor:
        """The parameters of the client in training, [P]."""
        return self.trained.w

    def fresh_model(self) -> tuple[Tensor, Tensor]:
        """Return parameters [P] and BatchNorm statistics [Q] of a new model (`init` only)."""
        return super().fresh_model() if self._fresh is None else self._fresh()

    def rng(self, stream: str) -> Generator:
        """Return a keyed generator. See `Task.rng`."""
        # Refused on every device, since a captured step would draw the same numbers each time.
        if self.in_steps:
            return super().rng(stream)
        if stream.startswith(NOISE):
            raise ValueError(
                f"task.rng('{stream}'): '{NOISE}NAME' are the numbers that `noise` of the rule "
                "declares; give this one another name"
            )
        return generator(
            self.settings.seed, f"{CLIENT_RULE}{stream}", int(self.t), int(self.facts[1])
        )

    def descend_in_place(self, w: Tensor, direction: Tensor) -> None:
        """Make the step of `descend` in w itself.

        Args:
            w: [P], the parameters; changed in place.
            direction: [P], the descent direction.
        """
        step_in_place(w, self._downhill(w, direction), self.lr)

    def descend_plainly(self, batch: Batch) -> None:
        """Make a step of plain SGD: no clipping, no decay, and no gradient vector.

        It gives the bits of `descend_in_place` along the gradient of the task's loss.

        Args:
            batch: the mini-batch.
        """
        inputs = batch.x, batch.y, "train", self.buffers, batch.drop
        if self.fast is not None and self.fast.supports(batch.x):
            loss, parts = self.fast.gradient(*inputs, self.parts), self.parts
            views = self.trained.views
        else:
            loss, gradients = by_autograd(self.trained, *inputs)
            # A parameter that the loss does not depend on stays as it is.
            pairs = zip(self.trained.views, gradients, strict=True)
            reached = [(view, part) for view, part in pairs if part is not None]
            views, parts = [view for view, _ in reached], [part for _, part in reached]
        steps_in_place(views, parts, self.settings.lr)
        self.losses.append(loss)

    def _grad(
        self, w: Tensor, batch: Batch, loss: Loss, mode: PassMode, buffers: Tensor | None
    ) -> Tensor:
        gradient, plain = self._pass(w, batch, loss, mode, self._statistics(mode, buffers))
        if mode == "train":
            self.losses.append(plain.detach())
        return gradient

    def _grad_of_rows(
        self,
        total: Callable[[Tensor], tuple[Tensor, Tensor]],
        loss: Loss,
        w: Tensor,
        count: int,
    ) -> tuple[Tensor, Tensor]:
        # In `torch.func.grad` a loss that asks for another net could not make it.
        leaves = w.detach().expand(count, -1).requires_grad_()
        with torch.enable_grad(), self._left_out(loss, w, {}) as constants:
            value, plain = total(leaves)
            (gradient,) = constants.gradients(value, [leaves])
        return torch.zeros_like(leaves) if gradient is None else gradient, plain

    def _grad_and_buffers(
        self, w: Tensor, batch: Batch, loss: Loss, buffers: Tensor
    ) -> tuple[Tensor, Tensor]:
        # The pass moves the statistics in place, and these belong to the rule.
        moved = buffers.clone()
        return self._pass(w, batch, loss, "train", moved)[0], moved

    def _pass(
        self, w: Tensor, batch: Batch, loss: Loss, mode: PassMode, statistics: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient [P] of the mean loss, and a mean for the log.

        Mode "train" moves the statistics in place.
        """
        bound, fast = self._bound(w)
        # The fast gradient is that of class labels; probabilities of classes are floats.
        has_labels = self.model.is_own_loss(loss) and not batch.y.is_floating_point()
        if fast is not None and has_labels and fast.supports(batch.x):
            # In a chain the loss depends on every parameter.
            self.unreached = []
            return self._without_autograd(fast, batch, mode, statistics)
        gradients, plain = self._by_autograd(bound, w, batch, loss, mode, statistics)
        return self._flat(gradients), plain

    def _bound(self, w: Tensor) -> tuple[BoundModel, FastGradient | None]:
        """Return the net at w [P], and its gradient without autograd if it has one."""
        if w is self.trained.w:
            return self.trained, self.fast
        copy = self.others.at(w)
        return copy.bound, copy.fast

    def _joint_grad(
        self, w: Tensor, batch: Batch, others: State, loss: JointLoss
    ) -> tuple[Tensor, State]:
        bound = self._bound(w)[0]
        gradients, plain = self._by_autograd(bound, w, batch, loss, "train", self.buffers, others)
        self.losses.append(plain.detach())
        count = len(self.segments)
        of_others = {
            name: torch.zeros_like(tensor) if gradient is None else gradient
            for (name, tensor), gradient in zip(others.items(), gradients[count:], strict=True)
        }
        return self._flat(gradients[:count]), of_others

    def _without_autograd(
        self, fast: FastGradient, batch: Batch, mode: PassMode, statistics: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient [P] of the mean cross-entropy, and that mean."""
        gradient = torch.empty_like(self.local_params)
        parts = list(self.model.views(gradient).values())
        return gradient, fast.gradient(batch.x, batch.y, mode, statistics, batch.drop, parts)

    def _by_autograd(
        self,
        bound: BoundModel,
        w: Tensor,
        batch: Batch,
        loss: Callable[..., Tensor],
        mode: PassMode,
        statistics: Tensor,
        others: Mapping[str, Tensor] | None = None,
    ) -> tuple[tuple[Tensor | None, ...], Tensor]:
        """Return gradients of the mean loss by parameters and others, and a mean for the log.

        That mean is the learning task's loss in mode "train", else the loss. The net is at w [P].
        With others the loss gets copies of them.
        """
        net = self._net(bound, batch, mode, statistics)
        of_task = self.model.learning_task.mean_loss
        if self.model.is_own_loss(loss):
            with self.model.passes():
                value = of_task(net.logits, batch)
                return torch.autograd.grad(value, bound.parameters, allow_unused=True), value
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in (others or {}).items()}
        of_others = () if others is None else (leaves,)
        with (
            self.model.passes(),
            self._left_out(loss, w, others or {}) as constants,
            self._nets_at(w, partial(self._net, bound)),
        ):
            value = losses_of(loss, net, batch, *of_others).mean()
            gradients = constants.gradients(value, [*bound.parameters, *leaves.values()])
        return gradients, of_task(net.logits, batch) if mode == "train" else value

    def _left_out(
        self, loss: Callable[..., Tensor], w: Tensor, others: Mapping[str, Tensor]
    ) -> Constants:
        """Return a context that refuses a loss which depends on variables that are not its own."""
        points = {"w": w, 'state["w"]': self.local_params}
        points, others = (
            {key: tensor for key, tensor in tensors.items() if not self._is_received(tensor)}
            for tensors in (points, others)
        )
        return Constants(loss, points, others)

    def _flat(self, gradients: tuple[Tensor | None, ...]) -> Tensor:
        """Return gradients as a vector [P], and note the parameters that none of a step reached."""
        missing = [k for k, gradient in enumerate(gradients) if gradient is None]
        # In a step with several gradients, one that reaches a parameter is enough.
        known = missing if self.unreached is None else self.unreached
        self.unreached = [k for k in known if k in missing]
        parts = [
            self.trained.w.new_zeros(size) if gradient is None else gradient.reshape(-1)
            for gradient, size in zip(gradients, self.segments, strict=True)
        ]
        return torch.cat(parts)

    def input_grad(
        self, w: Tensor, batch: Batch, loss: Loss = task_loss, buffers: Tensor | None = None
    ) -> Tensor:
        """Compute the gradient of each example's loss with respect to its input.

        See `Task.input_grad`.
        """
        self._guard("input_grad", batch)
        x = batch.x.detach().requires_grad_()
        net = self.net(w, replace(batch, x=x), "eval", buffers)
        net.one_by_one = True
        with self.model.passes():
            return torch.autograd.grad(losses_of(loss, net, batch).sum(), x)[0]

    def _nets_of(self, w: Tensor) -> NetAtPoint:
        """Return what makes forward passes on a copy of the net. See `ModelTask._nets_of`."""
        copy = self.given_nets.at(w)

        def make(*arguments: Any) -> Net:
            net = self._net(copy.bound, *arguments)
            copy.given_to.add(net)
            return net

        return make

    def _net(
        self,
        bound: BoundModel,
        batch: Batch | None,
        mode: PassMode,
        buffers: Tensor,
        dropout: bool = True,
    ) -> ForwardPass:
        drop = batch.drop if batch and dropout else ()
        return ForwardPass(self.model, batch and batch.x, of_bound(bound, mode, buffers, drop))


MAX_BOUND_COPIES = 3
"""Number of nets that are kept in addition to the one in training: GradMA's y, y_prev and x."""


class BoundCopies:
    """Nets at a few vectors in addition to the one in training.

    The vectors used last stay bound, so that one that does not change needs no copy at each step. A
    net whose forward pass a rule still has keeps its vector.
    """

    def __init__(self, model: Model, fast: bool = False, constant: bool = False):
        """Begin without copies.

        Args:
            model: the net.
            fast: whether their gradients come without autograd; see `LoopTask`.
            constant: no gradient flows into their parameters.
        """
        self.model, self.fast, self.constant = model, fast, constant
        self._copies: list[BoundCopy] = []
        """The copies, the one used last at the end."""

    def at(self, w: Tensor) -> BoundCopy:
        """Return a net with the parameters w [P].

        Args:
            w: [P], the parameters. The net is kept as long as `w` is not changed in place.
        """
        copy = next(
            (copy for copy in self._copies if copy.w is w and copy.version == w._version), None
        )
        if copy is None:
            copy = self._idle() or self._new()
            # It may require a gradient while a loss is computed.
            copy.bound.w.copy_(w.detach())
            copy.w, copy.version = w, w._version
        self._copies = [other for other in self._copies if other is not copy] + [copy]
        return copy

    def forget(self) -> None:
        """Forget the vectors, so that the next use of each copies it again."""
        for copy in self._copies:
            copy.w = None

    def _idle(self) -> BoundCopy | None:
        """Return the copy to bind anew: the free one used longest ago; None to make another."""
        if len(self._copies) < MAX_BOUND_COPIES:
            return None
        return next((copy for copy in self._copies if not copy.given_to), None)

    def _new(self) -> BoundCopy:
        bound = BoundModel(self.model)
        if self.constant:
            bound.module.requires_grad_(False)
        return BoundCopy(bound, FastGradient(bound) if self.fast else None)


@dataclass
class BoundCopy:
    """A net at a vector."""

    bound: BoundModel
    fast: FastGradient | None
    w: Tensor | None = None
    """The vector. Keeping it makes sure that no other tensor takes its identity."""
    version: int = -1
    given_to: weakref.WeakSet[Net] = field(default_factory=weakref.WeakSet)
    """The forward passes that a rule still has."""
