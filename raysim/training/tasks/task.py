"""The tasks of all modes: forward passes, private gradients, and what a rule asks for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import SupportsFloat

import torch
from numpy.random import Generator
from torch import Tensor

from raysim.models.flat import Model
from raysim.rules.batch import Batch
from raysim.rules.contract import ClientRule, State
from raysim.rules.errors.user_code import breach
from raysim.rules.losses import Loss, Net, task_loss
from raysim.rules.public import PublicData
from raysim.rules.task import LocalData, PassMode, Task
from raysim.training.tasks.dp_sgd import clipped_sum, in_parts
from raysim.training.tasks.local_step import LocalSettings, downhill, stepped


class ModelTask(Task):
    """A client's problem on a `Model`; a subclass implements the gradient (`_grad`)."""

    def __init__(
        self,
        model: Model,
        settings: LocalSettings,
        global_buffers: Tensor | None = None,
        facts: tuple[int, int] | Tensor = (0, 0),
    ):
        """Describe one client's problem.

        Args:
            model: the net.
            settings: the constants of the client's training.
            global_buffers: [Q], the BatchNorm statistics that came with the broadcast; None: zeros.
            facts: number of local steps, and number of the client; under vmap a tensor [2].
        """
        self.model = model
        self.settings = settings
        self.facts = facts
        self.global_buffers = self.zero_buffers() if global_buffers is None else global_buffers
        self.buffers = self.global_buffers
        self.segments = model.segments
        self.shapes = tuple(model.shapes)
        self.classes = model.classes
        self.logged: State | None = None
        """What the rule has logged in this local step, or outside of them; None: it may not."""
        self.losses: list[Tensor] = []
        """The learning task's mean loss in each pass in mode "train", without terms of a method."""
        self.optimizer_state: State = {}
        """State of the optimizer after the last step; {} for plain SGD."""
        self.updates = 0
        """Number of directions that went through the optimizer."""
        self.unreached: list[int] | None = None
        """The parameters that no gradient since the last step depended on, as indices of
        `segments`; None before the first gradient."""

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
    def lr(self) -> float:
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
            value = torch.as_tensor(number, device=self.model.device).detach()
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
    def _grad(
        self, w: Tensor, batch: Batch, loss: Loss, mode: PassMode, buffers: Tensor | None
    ) -> Tensor:
        """Compute the gradient [P] of the mean loss, without privacy; see `grad`.

        In mode "train" it updates `buffers` and appends to `losses`.
        """

    def _private_grad(self, w: Tensor, batch: Batch, loss: Loss) -> Tensor:
        """Compute the gradient [P] from clipped per-example gradients and noise."""
        privacy = self.settings.privacy
        count = batch.size
        assert privacy is not None
        total = torch.zeros_like(w)
        plain = w.new_zeros(())
        # A loss of the rule's may read noise or prepared batches, which `in_parts` does not cut.
        for part in in_parts(batch, self.model.size) if self.model.is_own_loss(loss) else [batch]:
            rows, values = self._sample_grads(w, part, loss, "train")
            total = total + clipped_sum(rows, privacy.max_grad_norm, part.mask)
            plain = plain + (values if part.mask is None else values * part.mask).sum()
        self.losses.append((plain / count).detach())
        if privacy.max_grad_norm is not None and batch.private_noise is not None:
            total = total + privacy.max_grad_norm * privacy.noise_multiplier * batch.private_noise
        is_sum = self.model.learning_task.loss_reduction == "sum"
        return total if is_sum else total / count

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
        return self._sample_grads(
            w, batch, loss, mode, self.buffers if buffers is None else buffers
        )

    def _guard(self, method: str) -> None:
        """Refuse a method without privacy, if the rule declares no unprotected uploads."""
        if self.settings.guarded:
            raise ValueError(
                f"privacy does not cover what comes of task.{method}; declare the uploads that "
                "depend on it in the rule's `unprotected_uploads`"
            )

    def _sample_grads(
        self, w: Tensor, batch: Batch, loss: Loss, mode: PassMode, buffers: Tensor | None = None
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
            net = ForwardPass(
                self.model, batch.x, one_by_one(self.model, rows, batch, mode, buffers)
            )
            net.one_by_one = True
            values = loss(net, batch)
            is_plain = self.model.is_own_loss(loss) or mode != "train"
            plain = values if is_plain else task_loss(net, batch)
            return values.sum(), plain.detach()

        # Each example has a row of parameters, so one backward pass of the sum gives all gradients.
        return torch.func.grad(total, has_aux=True)(w.expand(len(batch.y), -1))

    def fisher(self, w: Tensor, data: LocalData, augment: bool = False) -> Tensor:
        """Compute the diagonal of the empirical Fisher information. See `Task.fisher`."""
        self._guard("fisher")
        return self.mean_squared_gradients(w, data.batches(augment=augment))

    def mean_squared_gradients(self, w: Tensor, batches: Iterable[Batch]) -> Tensor:
        """Return the mean squared gradient of the examples in these batches.

        Args:
            w: parameters [P].
            batches: batches of examples, without padding.

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

    def _statistics(self, mode: PassMode, buffers: Tensor | None) -> Tensor | None:
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
        self.updates += self.settings.optimizer is not None
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
            if index in self.unreached and not along.any():
                parts[index].fill_(True)
        return mask

    def descend(self, w: Tensor, direction: Tensor) -> Tensor:
        """Return the parameters after one step of the optimizer. See `Task.descend`."""
        return stepped(w, self._downhill(w, direction), self.lr)

    def check_update(self, rule: ClientRule) -> None:
        """Check that a rule's own step called `descend` once, if the optimizer has state.

        The step began with `updates` at 0.

        Args:
            rule: the client rule.

        Raises:
            ContractError: it did not; the optimizer would have been left out, or moved twice.
        """
        if self.settings.optimizer is not None and self.updates != 1:
            raise breach(
                rule,
                "step",
                f"calls task.descend {self.updates} times; local.optimizer needs one call in each "
                "step: make the step by task.descend, or declare why the rule `needs_plain_sgd`",
            )


Call = Callable[[Tensor, int, list[Tensor] | None], tuple[Tensor, Tensor | None]]
"""`call(x, first, levels)` runs the stages of a net from `first` and appends outputs to `levels`.

It returns the output of the last stage and the input of the classifier, None if there is none.
"""


class ForwardPass(Net):
    """Lazy forward pass: the function `call` runs when an output is first read.

    Args:
        model: the net.
        x: [B, ...], the inputs.
        call: runs the net; see `Call`.
    """

    def __init__(self, model: Model, x: Tensor, call: Call):
        self.learning_task = model.learning_task
        self._model = model
        self._x = x
        self._call = call
        self._out: tuple[Tensor, Tensor | None] | None = None
        self._levels: list[Tensor] | None = [] if model.levels else None

    def _forward(self) -> tuple[Tensor, Tensor | None]:
        if self._out is None:
            self._out = self._call(self._x, 0, self._levels)
        return self._out

    @property
    def logits(self) -> Tensor:
        """Outputs of the net [B, classes]."""
        return self._forward()[0]

    @property
    def features(self) -> Tensor:
        """Input of the classifier [B, F]. See `Net.features`."""
        features = self._forward()[1]
        if features is None:
            raise ValueError("the net does not end in a linear classifier, so it has no features")
        return features

    @property
    def levels(self) -> list[Tensor]:
        """Output of each stage, the logits last. See `Net.levels`."""
        self._forward()
        if self._levels is None:
            raise ValueError("the net is not made of stages (an nn.Sequential of two or more)")
        return self._levels

    def tail(self, level: int, h: Tensor) -> Tensor:
        """Run the stages after `level` on the activations h. See `Net.tail`."""
        return self._call(h, level, None)[0]


def forward_pass(
    model: Model,
    w: Tensor,
    x: Tensor,
    first: int,
    levels: list[Tensor] | None,
    mode: PassMode,
    buffers: Tensor | None,
    mask: Tensor | None,
    drop: tuple[Tensor, ...],
    moved: list[Tensor],
) -> tuple[Tensor, Tensor | None]:
    """Run a forward pass as a pure function.

    Args:
        model: the net.
        w: [P], the parameters.
        x: images [B, C, H, W], or the input of stage `first`.
        first: first stage that runs.
        levels: list to which the output of every stage is appended; None stores none.
        mode: mode of the pass.
        buffers: [Q], the running BatchNorm statistics; None if the pass uses none.
        mask: [B], 1 for real examples; None if all are real.
        drop: dropout masks, in the order of calls.
        moved: list to which mode "train" appends the new statistics [Q].

    Returns:
        The output, and the input of the classifier [B, F], None if there is none.
    """
    frame, module = model.frame, model.pure_module
    # Only if it changes: setting the mode visits every module of the net.
    if (mode != "eval") != module.training:
        model.set_training(module, mode != "eval")
    frame.mode = mode
    frame.in_place = False
    frame.mask = mask
    frame.drop = drop
    frame.buffers = buffers
    frame.moved = {}
    frame.calls = model.dropouts_before[first]
    tensors = model.views(w)
    if buffers is not None:
        tensors |= model.unkeyed_statistics(buffers, mode)
    try:
        out = model.in_precision(
            lambda: torch.func.functional_call(module, tensors, (x, first, levels)),
            frame,
            levels,
        )
        if mode == "train" and buffers is not None:
            moved.append(model.moved_buffers(frame))
        features = frame.features
        return out, None if features is None else features.flatten(1)
    finally:
        # Tensors of `torch.func.vmap` must not outlive it.
        frame.mask = None
        frame.drop = ()
        frame.buffers = None
        frame.moved = {}
        frame.in_place = True
        frame.features = None


def one_by_one(
    model: Model, params: Tensor, batch: Batch, mode: PassMode, buffers: Tensor | None
) -> Call:
    """Return a forward pass with separate parameters for every example.

    Args:
        model: the net.
        params: [B, P], the parameters of each example.
        batch: the examples, with their dropout masks.
        mode: mode of the pass.
        buffers: [Q], the running BatchNorm statistics; None if the pass uses none.

    Returns:
        The pass as a `Call`: it returns outputs [B, classes] and inputs of the classifier [B, F].
    """

    def call(x: Tensor, first: int, levels: list[Tensor] | None) -> tuple[Tensor, Tensor | None]:
        # vmap passes on tensors only; the list says whether one of them is the features.
        with_features: list[bool] = []

        def call_example(w: Tensor, x: Tensor, drop: tuple[Tensor, ...]) -> list[Tensor]:
            outputs: list[Tensor] = []
            # The net gets a batch of one example.
            masks = tuple(m[None] for m in drop)
            out, features = forward_pass(
                model,
                w,
                x[None],
                first,
                None if levels is None else outputs,
                mode,
                buffers,
                None,
                masks,
                [],
            )
            with_features.append(features is not None)
            return [t[0] for t in (out, *([] if features is None else [features]), *outputs)]

        out, *others = torch.func.vmap(call_example)(params, x, batch.drop)
        features = others.pop(0) if with_features[0] else None
        if levels is not None:
            levels += others
        return out, features

    return call
