"""The tasks of all modes: forward passes, private gradients, and what a rule asks for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import SupportsFloat

import torch
from numpy.random import Generator
from torch import Tensor

from raysim.errors import ContractError
from raysim.models.flat import Model
from raysim.rules.batch import Batch
from raysim.rules.contract import ClientRule, State
from raysim.rules.errors.user_code import breach, function_defined_at
from raysim.rules.losses import JointLoss, Loss, Net, task_loss
from raysim.rules.public import PublicData
from raysim.rules.task import LocalData, PassMode, Task
from raysim.training.tasks.dp_sgd import clipped_sum, in_parts
from raysim.training.tasks.forward_pass import ForwardPass, one_by_one
from raysim.training.tasks.local_step import LocalSettings, downhill, stepped

NetAtPoint = Callable[[Batch | None, PassMode, Tensor, bool], Net]
"""Makes a net at the point of a gradient, of batch, mode, statistics [Q] and dropout."""


def losses_of(loss: Callable[..., Tensor], net: Net, batch: Batch, *others: State) -> Tensor:
    """Return the losses of a batch's examples, [B].

    Args:
        loss: the loss function.
        net: the forward pass.
        batch: the batch.
        others: further arguments of the loss.

    Raises:
        ContractError: the loss returns something else.
    """
    values = loss(net, batch, *others)
    if isinstance(values, Tensor) and values.shape == (batch.size,):
        return values
    kind = type(values).__name__
    # A mean would be divided by the number of examples once more.
    returned = f"a tensor {list(values.shape)}" if isinstance(values, Tensor) else f"a {kind}"
    raise ContractError(
        f"the loss returns {returned}; return a tensor, one value for each example, "
        f"[{batch.size}] ({function_defined_at(loss)})"
    )


class ModelTask(Task):
    """A client's problem on a `Model`; a subclass implements the gradient (`_grad`)."""

    def __init__(
        self,
        model: Model,
        settings: LocalSettings,
        global_buffers: Tensor | None = None,
        facts: tuple[int, int] | tuple[Tensor, Tensor] = (0, 0),
    ):
        """Describe one client's problem.

        Args:
            model: the net.
            settings: the constants of the client's training.
            global_buffers: [Q], the BatchNorm statistics that came with the broadcast; None: zeros.
            facts: number of local steps, and number of the client; in the steps of a lane tensors.
        """
        self.model = model
        self.settings = settings
        self.facts = facts
        self.global_buffers = self.zero_buffers() if global_buffers is None else global_buffers
        self.buffers = self.global_buffers
        self.segments = model.segments
        self.shapes = tuple(model.shapes)
        self.classes = model.classes
        self.features = model.features
        self.logged: State | None = None
        """What the rule has logged in this local step, or outside of them; None: it may not."""
        self.losses: list[Tensor] = []
        """The learning task's mean loss in each pass in mode "train", without terms of a method."""
        self.optimizer_state: State = {}
        """State of the optimizer after the last step; {} for plain SGD."""
        self.updates = 0
        """Number of directions that `descend` got."""
        self.unreached: list[int] | None = None
        """The parameters that no gradient since the last step depended on, as indices of
        `segments`; None before the first gradient."""
        self.received: tuple[Tensor, ...] = ()
        """Tensors of the broadcast, which a loss may use as constants."""
        self._point: tuple[Tensor, NetAtPoint] | None = None
        """While a loss is computed, the point of its gradient [P], and what makes nets there."""

    @property
    def client(self) -> int | Tensor:
        """Number of the client."""
        return self.facts[1]

    @property
    def group(self) -> str:
        """Name of the client's group."""
        return self.settings.group

    @property
    def steps(self) -> int | Tensor:
        """Local steps of this client in this round."""
        return self.facts[0]

    @property
    def lr(self) -> float | Tensor:
        """Step size; see `Task`."""
        return self.settings.lr

    @property
    def t(self) -> int | Tensor:
        """Round in which the client started."""
        return self.settings.t

    @property
    def x0(self) -> Tensor:
        """Initial parameters of the run, [P]."""
        assert self.settings.x0 is not None
        return self.settings.x0

    @property
    def initial_buffers(self) -> Tensor:
        """Initial BatchNorm statistics of the run, [Q]."""
        return self.model.initial_buffers()

    @property
    def public(self) -> PublicData:
        """Public examples of the data set. See `Task.public`."""
        if self.settings.public is None:
            raise ValueError(
                'task.public: set needs_public_data = "inputs" or "labels" in the class of the rule'
            )
        return self.settings.public

    def log(self, **numbers: float | Tensor) -> None:
        """Log numbers of this client. See `Task.log`."""
        if self.logged is None:
            raise ValueError(f"task.log({', '.join(numbers)}): not here; log where a client trains")
        for name, number in numbers.items():
            if not isinstance(number, Tensor | SupportsFloat) or isinstance(number, str):
                kind = type(number).__name__
                raise ValueError(f"task.log: {name} is a {kind}; log one real number")
            device = self.model.device
            if isinstance(number, float | int):
                # Filled, since a copy from the host would wait for a GPU.
                value = torch.full((), float(number), dtype=self.model.dtype, device=device)
            else:
                value = torch.as_tensor(number, device=device).detach()
            if value.numel() != 1 or value.is_complex():
                raise ValueError(
                    f"task.log: {name} is a tensor of shape {list(value.shape)} and type "
                    f"{value.dtype}; log one real number"
                )
            # A copy, because the vectors of a client are changed in place.
            self.logged[name] = value.to(self.model.dtype).reshape(()).clone()

    def rng(self, stream: str) -> Generator:
        """Refuse: a client has a generator outside of local steps only. See `Task.rng`."""
        raise ValueError(
            f"task.rng('{stream}'): not available in local steps, which may run for many clients "
            "at once; declare the numbers in `noise`, and read them from batch.noise"
        )

    def grad(
        self,
        w: Tensor,
        batch: Batch,
        loss: Loss = task_loss,
        mode: PassMode = "train",
        buffers: Tensor | None = None,
    ) -> Tensor:
        """Compute the gradient of the mean loss, private if configured. See `Task.grad`."""
        if mode != "train":
            self._refuse_under_privacy()
        elif self.settings.privacy is not None:
            return self._private_grad(w, batch, loss)
        return self._grad(w, batch, loss, mode, buffers)

    def grad_and_buffers(
        self, w: Tensor, batch: Batch, buffers: Tensor, loss: Loss = task_loss
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradient of a model of the client's own. See `Task.grad_and_buffers`."""
        self._refuse_under_privacy()
        size = self.model.buffer_size
        if not isinstance(buffers, Tensor) or buffers.shape != (size,):
            given = list(buffers.shape) if isinstance(buffers, Tensor) else type(buffers).__name__
            raise ValueError(
                f"task.grad_and_buffers: buffers is {given}; give the BatchNorm statistics of the "
                f"model, [{size}], such as task.initial_buffers before its first pass"
            )
        if not size:
            # The same gradient as in mode "train", without an entry in `losses`.
            return self._grad(w, batch, loss, "frozen", None), buffers
        return self._grad_and_buffers(w, batch, loss, buffers)

    def joint_grad(
        self, w: Tensor, batch: Batch, others: Mapping[str, Tensor], loss: JointLoss
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the gradient with respect to further tensors too. See `Task.joint_grad`."""
        if self.settings.privacy is not None:
            raise ValueError(
                "privacy does not cover task.joint_grad, whose gradients with respect to other "
                "tensors than the parameters are not clipped; use task.grad"
            )
        return self._joint_grad(w, batch, dict(others), loss)

    def _refuse_under_privacy(self) -> None:
        """Refuse a gradient that the accountant does not count."""
        if self.settings.privacy is not None:
            raise ValueError(
                "privacy covers the gradient in mode 'train' only; this rule uses another gradient "
                "of the data"
            )

    @abstractmethod
    def _grad_and_buffers(
        self, w: Tensor, batch: Batch, loss: Loss, buffers: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute gradient [P] and moved statistics [Q] of a net with BatchNorm."""

    @abstractmethod
    def _joint_grad(
        self, w: Tensor, batch: Batch, others: dict[str, Tensor], loss: JointLoss
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the gradients of `joint_grad` in mode "train", without privacy.

        It updates `buffers` and appends to `losses`.
        """

    @abstractmethod
    def _grad(
        self, w: Tensor, batch: Batch, loss: Loss, mode: PassMode, buffers: Tensor | None
    ) -> Tensor:
        """Compute the gradient [P] of the mean loss, without privacy; see `grad`.

        In mode "train" it updates `buffers` and appends to `losses`.
        """

    def _private_grad(self, w: Tensor, batch: Batch, loss: Loss) -> Tensor:
        """Compute the gradient [P] from clipped per-example gradients and noise."""
        privacy = self.settings.privacy
        is_sum = self.model.learning_task.loss_reduction == "sum"
        divisor = 1 if is_sum else batch.size
        assert privacy is not None
        total = torch.zeros_like(w)
        plain = w.new_zeros(())
        # A loss of the rule's may read noise or prepared batches, which `in_parts` does not cut.
        for part in in_parts(batch, self.model.size) if self.model.is_own_loss(loss) else [batch]:
            rows, values = self._sample_grads(w, part, loss, "train", self.buffers)
            total = total + clipped_sum(rows, privacy.max_grad_norm)
            plain = plain + values.sum()
        self.losses.append((plain / divisor).detach())
        if privacy.max_grad_norm is not None and batch.private_noise is not None:
            total = total + privacy.max_grad_norm * privacy.noise_multiplier * batch.private_noise
        return total / divisor

    def sample_grads(
        self,
        w: Tensor,
        batch: Batch,
        loss: Loss = task_loss,
        mode: PassMode = "eval",
        buffers: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradient of each example's loss. See `Task.sample_grads`."""
        self._guard("sample_grads")
        buffers = self.buffers if buffers is None else buffers
        return self._sample_grads(w, batch, loss, mode, buffers)

    def _guard(self, method: str, differentiated: Batch | None = None) -> None:
        """Refuse a method without privacy, if the rule declares no unprotected uploads.

        It also refuses integers as inputs by which it would differentiate.
        """
        if differentiated is not None and not differentiated.x.is_floating_point():
            raise ValueError(
                f"task.{method}: inputs of type {differentiated.x.dtype}, such as tokens, have no "
                "gradient; give examples of real numbers, or a method without gradients of inputs"
            )
        if self.settings.guarded:
            raise ValueError(
                f"privacy does not cover what comes of task.{method}; declare the uploads that "
                "depend on it in the rule's `unprotected_uploads`"
            )

    def _sample_grads(
        self, w: Tensor, batch: Batch, loss: Loss, mode: PassMode, buffers: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient [B, P] and the loss by the learning task [B] of every example.

        They depend on the example alone, so that a clipped gradient bounds its influence; see
        `LearningTask.single_losses`.
        """
        learning_task = self.model.learning_task
        if learning_task.loss_reduction == "batch":
            raise ValueError(
                f"the loss '{learning_task.name}' is one of all examples of a batch together, so "
                "single examples have no gradients"
            )

        def total(rows: Tensor) -> tuple[Tensor, Tensor]:
            def net_at(other: Batch | None, mode: PassMode, buffers: Tensor, dropout: bool) -> Net:
                if other is not None and len(other.y) != len(batch.y):
                    raise ValueError(
                        f"task.net at w, in a loss of single examples: {len(other.y)} examples for "
                        f"a batch of {len(batch.y)}; give one for each, or take the parameters of "
                        'another vector as constants, such as 1 * state["w"]'
                    )
                drop = (other or batch).drop if dropout else ()
                call = one_by_one(self.model, rows, drop, mode, buffers)
                net = ForwardPass(self.model, other and other.x, call)
                net.one_by_one = True
                return net

            net = net_at(batch, mode, buffers, True)
            with self._nets_at(w, net_at):
                values = losses_of(loss, net, batch)
            is_plain = self.model.is_own_loss(loss) or mode != "train"
            plain = values if is_plain else task_loss(net, batch)
            return values.sum(), plain.detach()

        # Each example has a row of parameters, so one backward pass of the sum gives all gradients.
        with self.model.passes():
            return self._grad_of_rows(total, loss, w, len(batch.y))

    def _grad_of_rows(
        self,
        total: Callable[[Tensor], tuple[Tensor, Tensor]],
        loss: Loss,
        w: Tensor,
        count: int,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of the first result at rows [B, P] of w, and the second result.

        The first one is a sum of `loss`.
        """
        return torch.func.grad(total, has_aux=True)(w.expand(count, -1))

    def net(
        self,
        w: Tensor,
        batch: Batch | None = None,
        mode: PassMode = "frozen",
        buffers: Tensor | None = None,
        dropout: bool = True,
    ) -> Net:
        """Return a forward pass at other parameters. See `Task.net`."""
        point = self._point
        make = point[1] if point is not None and w is point[0] else self._nets_of(w)
        return make(batch, mode, self._statistics(mode, buffers), dropout)

    @abstractmethod
    def _nets_of(self, w: Tensor) -> NetAtPoint:
        """Return what makes forward passes at constant parameters w [P]."""

    @contextmanager
    def _nets_at(self, w: Tensor, make: NetAtPoint) -> Iterator[None]:
        """Let `net` at the vector w return nets through which the gradient at w flows."""
        outer = self._point
        self._point = None if self._is_received(w) else (w, make)
        try:
            yield
        finally:
            self._point = outer

    def _is_received(self, tensor: Tensor) -> bool:
        """Return whether a tensor is one of the broadcast itself."""
        return any(tensor is other for other in self.received)

    def fisher(self, w: Tensor, data: LocalData, augment: bool = False) -> Tensor:
        """Compute the diagonal of the empirical Fisher information. See `Task.fisher`."""
        self._guard("fisher")
        return self.mean_squared_gradients(w, data.batches(augment=augment))

    def mean_squared_gradients(self, w: Tensor, batches: Iterable[Batch]) -> Tensor:
        """Return the mean squared gradient of the examples in these batches.

        Args:
            w: parameters [P].
            batches: batches of examples.

        Returns:
            The mean over all examples of their squared gradients at w, [P], in mode "eval".
        """
        total = torch.zeros_like(w)
        count = 0
        for batch in batches:
            for part in in_parts(batch, self.model.size):
                rows, _ = self._sample_grads(w, part, task_loss, "eval", self.buffers)
                total = total + (rows * rows).sum(0)
                count += len(rows)
        return total / max(count, 1)

    def full_grad(self, w: Tensor, data: LocalData) -> Tensor:
        """Compute the mean gradient over the client's examples. See `Task.full_grad`."""
        self._guard("full_grad")
        total = torch.zeros_like(w)
        for batch, count in self.model.learning_task.in_batches(data.batches, data.n):
            total += self._grad(w, batch, task_loss, "frozen", None) * (count / data.n)
        return total

    def full_loss(self, w: Tensor, data: LocalData) -> Tensor:
        """Compute the mean loss over the client's examples. See `Task.full_loss`."""
        self._guard("full_loss")
        total = w.new_zeros(())
        for batch, count in self.model.learning_task.in_batches(data.batches, data.n):
            losses = task_loss(self.net(w, batch, "eval", self.buffers), batch)
            total = total + losses.sum() * (count / len(batch.y))
        return total / data.n

    def fresh_model(self) -> tuple[Tensor, Tensor]:
        """Refuse: only the task of `init` has a fresh model. See `Task.fresh_model`."""
        raise ValueError(
            "task.fresh_model: there is one in `init` only, where a client is by itself"
        )

    def part(self, pattern: str) -> Tensor:
        """Return a mask of the parameters in a part of the net. See `Task.part`."""
        return self.model.part(pattern)

    def _statistics(self, mode: PassMode, buffers: Tensor | None) -> Tensor:
        """Return the BatchNorm statistics [Q] of a pass, by default the client's."""
        return self.buffers if mode == "train" or buffers is None else buffers

    def zeros(self) -> Tensor:
        """Return a zero vector [P]."""
        return torch.zeros(self.model.size, dtype=self.model.dtype, device=self.model.device)

    def zero_buffers(self) -> Tensor:
        """Return a zero vector [Q]."""
        return torch.zeros(self.model.buffer_size, dtype=self.model.dtype, device=self.model.device)

    def _downhill(self, w: Tensor, direction: Tensor) -> Tensor:
        """Return the direction of the step, and count the step. See `local_step.downhill`."""
        along, self.optimizer_state = downhill(
            w, direction, self.settings, self.optimizer_state, self._idle(direction)
        )
        self.unreached = None
        self.updates += 1
        return along

    def _idle(self, direction: Tensor) -> Tensor | None:
        """Return a mask [P] of the parameters that the optimizer has to leave alone, if any.

        The loss does not depend on them, and neither does the rule's direction move them.
        """
        if not self.unreached:
            return None
        mask = torch.zeros_like(direction, dtype=torch.bool)
        parts = mask.split(list(self.segments))
        for index, along in enumerate(direction.split(list(self.segments))):
            if index in self.unreached:
                parts[index].copy_(~along.any())
        return mask

    def descend(self, w: Tensor, direction: Tensor) -> Tensor:
        """Return the parameters after one step of the optimizer. See `Task.descend`."""
        return stepped(w, self._downhill(w, direction), self.lr)

    def check_update(self, rule: ClientRule) -> None:
        """Check that a rule's own step called `descend`, if that does more than plain SGD.

        The step began with `updates` at 0.

        Args:
            rule: the client rule.

        Raises:
            ContractError: it did not, so that settings would have been left out; or it called it
                twice, which would have moved the optimizer twice.
        """
        settings = self.settings
        if settings.optimizer is not None and self.updates != 1:
            raise breach(
                rule,
                "step",
                f"calls task.descend {self.updates} times; local.optimizer needs one call in each "
                "step: make the step by task.descend, or declare why the rule `needs_plain_sgd`",
            )
        used = {"weight_decay": settings.weight_decay, "max_grad_norm": settings.clip}
        key = next((f"local.{key}" for key, value in used.items() if value), None)
        if key is not None and not self.updates:
            raise breach(
                rule,
                "step",
                f"never calls task.descend, so {key} would be left out: make the step by "
                f"task.descend, or leave {key} out",
            )
