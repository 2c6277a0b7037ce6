"""The `Task`: a client's training problem in one round, as its rule sees it.

A rule calls these methods and nothing else of raysim. The same rule then trains one client after
the other, or many side by side on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from numpy.random import Generator
from torch import Tensor

from raysim.rules.batch import Batch
from raysim.rules.losses import JointLoss, Loss, Net, task_loss
from raysim.rules.public import PublicData
from raysim.rules.unknown_attributes import SuggestsAttributes

PassMode = Literal["train", "frozen", "eval"]
"""How a forward pass treats BatchNorm and dropout.

train: batch statistics and dropout; the running statistics are updated. frozen: the same, but
nothing is updated. eval: running statistics, no dropout.
"""


@dataclass(frozen=True)
class LocalData:
    """A client's examples, for `init` and `finish`.

    `task.full_grad`, `task.full_loss` and `task.fisher` compute on the examples themselves.
    """

    n: int
    """Number of the client's examples."""
    average: float = 0.0
    """Mean number of such examples of the clients that have any."""
    batches: Callable[..., Iterator[Batch]] = lambda augment=False: iter(())
    """One pass over all examples, not shuffled, without dropout; augmented with `augment=True`."""
    tests: Callable[[], LocalData] | None = None
    """Returns the client's test examples; None if clients have none."""
    vals: Callable[[], LocalData] | None = None
    """Returns the client's validation examples; None if clients have none."""

    @cached_property
    def test(self) -> LocalData:
        """The client's own test examples (`partition.test`).

        A method that trains or chooses by them makes the metrics of `evaluate.clients` too good.

        Raises:
            ValueError: the clients of the run have no test examples.
        """
        if self.tests is None:
            raise ValueError(
                "data.test: clients have no test examples in this run; set partition.test, as "
                "partition.test.fraction=0.2"
            )
        return self.tests()

    @cached_property
    def val(self) -> LocalData:
        """The client's own validation examples (`partition.val`), by which a method may choose.

        Raises:
            ValueError: the clients of the run have no validation examples.
        """
        if self.vals is None:
            raise ValueError(
                "data.val: clients have no validation examples in this run; set "
                "partition.val.fraction=0.1"
            )
        return self.vals()

    @cached_property
    def examples(self) -> Batch:
        """All examples in one batch, neither shuffled nor augmented.

        A forward pass on them needs memory for all of them; `batches` does not.

        Raises:
            ValueError: the client has none.
        """
        batches = list(self.batches())
        if not batches:
            raise ValueError(
                "data.examples: this client has no such examples; look at n first, as in "
                "`if data.val.n:`"
            )
        return Batch(torch.cat([b.x for b in batches]), torch.cat([b.y for b in batches]))


class Task(SuggestsAttributes, ABC):
    """The training problem of one client in one round."""

    segments: tuple[int, ...]
    """Lengths of the named tensors in the flat parameter vector; their sum is P."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the named tensors in the flat parameter vector, in its order."""
    classes: int
    """C, classes of the data; for other tasks than classification the net's outputs."""
    features: int
    """F, numbers in the representation of an example below the classifier; 0 if there is none."""
    buffers: Tensor
    """This client's BatchNorm statistics, [Q]; the engine updates them, a rule only reads them."""
    global_buffers: Tensor
    """BatchNorm statistics of the broadcast, [Q]."""

    @property
    @abstractmethod
    def client(self) -> int | Tensor:
        """Number of the client, from 0; a tensor inside a step on lanes of a GPU."""

    @property
    @abstractmethod
    def group(self) -> str:
        """Name of the client's group in the configuration; "" if it is in none."""

    @property
    @abstractmethod
    def steps(self) -> int | Tensor:
        """Local steps of this client in this round; a tensor inside a step on lanes of a GPU."""

    @property
    @abstractmethod
    def lr(self) -> float | Tensor:
        """Step size of the local step; in `init` and `finish` the mean over the round's steps.

        It is a tensor inside a step on lanes of a GPU if the step sizes of a run differ.
        """

    @property
    @abstractmethod
    def t(self) -> int | Tensor:
        """The round in which the client started.

        It is a tensor inside a step on lanes of a GPU.
        """

    @property
    @abstractmethod
    def x0(self) -> Tensor:
        """Initial parameters of the run, [P]."""

    @property
    @abstractmethod
    def initial_buffers(self) -> Tensor:
        """Initial BatchNorm statistics of the run, [Q]: those that go with `x0`."""

    @property
    @abstractmethod
    def public(self) -> PublicData:
        """Public examples of the data set, the same for all clients.

        Raises:
            ValueError: the rule's class does not set `needs_public_data`.
        """

    @abstractmethod
    def rng(self, stream: str) -> Generator:
        """Return a generator that is keyed by seed, stream, round and client.

        The same stream starts at the same numbers again. It is for methods in which a client is
        alone (`state`, `begin`, `init`, `prepare` and `finish`); for random numbers in local steps
        see `ClientRule.noise`.

        Args:
            stream: the purpose of the numbers; different streams are independent.

        Raises:
            ValueError: inside a local step.
        """

    @abstractmethod
    def log(self, **numbers: float | Tensor) -> None:
        """Log numbers of this client, as the metrics client/NAME of its round.

        The metric is the unweighted mean over the round's clients whose updates are used and that
        logged it; of a name that ends in "_max" it is the maximum. A client that logs NaN has none:
        the metric is NaN only if all clients log that. What is logged in local steps
        (`direction`, `step`, `loss`) is first averaged over the client's mini-batches, or their
        maximum is taken. Of several calls with one name in a local step, or outside of them, the
        last one counts, and `finish` counts more than local steps. Nothing is logged while clients
        are evaluated. The numbers reach the engine, and neither the server rule nor the traffic.
        Under `privacy` they are not protected: ε does not cover metrics.

        Args:
            numbers: numbers, or real tensors of one element, by name.

        Raises:
            ValueError: a value is not one real number, or there is no client's round: in `state`,
                and on the server, which has `reports.log`.
        """

    @abstractmethod
    def grad(
        self,
        w: Tensor,
        batch: Batch,
        loss: Loss = task_loss,
        mode: PassMode = "train",
        buffers: Tensor | None = None,
    ) -> Tensor:
        """Compute the gradient of the mean loss over the batch's real examples.

        Under `privacy` it is 1/B (Σ_k g_k min(1, C/‖g_k‖) + C sigma z), where g_k is the gradient
        of example k (Abadi 2016), and only mode "train" is allowed.

        Args:
            w: [P], the point.
            batch: the mini-batch.
            loss: returns one value for each example, [B].
            mode: exactly one pass of a step has mode "train".
            buffers: [Q], the BatchNorm statistics for mode "eval"; the client's own by default.

        Returns:
            The gradient, [P], in a new tensor: the rule may change it in place, which saves a pass
            over memory.

        Raises:
            ValueError: under `privacy`, mode is not "train".
            ContractError: in all methods with a loss but `input_grad`, the loss depends on `w` or
                `state["w"]` other than through nets, such as by a penalty on `w`. It would have no
                gradient, so the rule adds that of the penalty to the result.
        """

    @abstractmethod
    def grad_and_buffers(
        self, w: Tensor, batch: Batch, buffers: Tensor, loss: Loss = task_loss
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradient of a model that the client keeps beside the one in training.

        The model has BatchNorm statistics of its own, which move in the pass as those of a PyTorch
        module in training do. The gradient is that of `grad` in mode "frozen". The pass does not
        count as the step's pass in mode "train", and `task.buffers` stay.

        Args:
            w: [P], the parameters of the model.
            batch: the mini-batch.
            buffers: [Q], the statistics of the model; not changed.
            loss: returns one value for each example, [B].

        Returns:
            The gradient [P], and the model's statistics after the pass [Q].

        Raises:
            ValueError: under `privacy`.
        """

    @abstractmethod
    def joint_grad(
        self, w: Tensor, batch: Batch, others: Mapping[str, Tensor], loss: JointLoss
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the gradient with respect to the parameters and to further tensors.

        It is for tensors that a method trains beside the net, such as a small net on its features
        or a vector that is added to them. The rule keeps them in its state and makes their steps.
        This is the step's pass in mode "train", in the place of `grad`.

        Args:
            w: [P], the point.
            batch: the mini-batch.
            others: the further tensors by name, of the parameters' type; not changed.
            loss: a function of net, batch and `others` that returns one value for each example,
                [B].

        Returns:
            The gradient [P] of the mean loss over the batch, and its gradients with respect to
            `others` by name, in their shapes; zeros where the loss does not depend on a tensor.

        Raises:
            ValueError: under `privacy`.
            ContractError: the loss uses one of these tensors from elsewhere than its third
                argument, where it is a constant.
        """

    @abstractmethod
    def sample_grads(
        self,
        w: Tensor,
        batch: Batch,
        loss: Loss = task_loss,
        mode: PassMode = "eval",
        buffers: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradient of each example's loss, for nets in which examples do not meet.

        They meet in BatchNorm in the modes "train" and "frozen".

        Args:
            w: [P], the point.
            batch: the mini-batch.
            loss: returns one value for each example, [B].
            mode: see `PassMode`.
            buffers: [Q], the BatchNorm statistics for mode "eval"; the client's own by default.

        Returns:
            The gradients, [B, P], and each example's loss by the learning task, [B].

        Raises:
            ValueError: examples meet in BatchNorm or share random numbers; or under `privacy`, the
                rule names nothing in `unprotected_uploads`.
        """

    @abstractmethod
    def input_grad(
        self, w: Tensor, batch: Batch, loss: Loss = task_loss, buffers: Tensor | None = None
    ) -> Tensor:
        """Compute the gradient of each example's loss with respect to its input, in mode "eval".

        The losses are those of `sample_grads`. A learning task's loss that couples the examples of
        a batch counts once for each of them.

        Args:
            w: [P], the parameters.
            batch: the mini-batch.
            loss: returns one value for each example, [B].
            buffers: [Q], the BatchNorm statistics; the client's own by default.

        Returns:
            The gradients, in the shape of the inputs, [B, ...].

        Raises:
            ValueError: under `privacy`, the rule names nothing in `unprotected_uploads`.
        """

    @abstractmethod
    def full_grad(self, w: Tensor, data: LocalData) -> Tensor:
        """Compute ∇f_i(w), the mean gradient over the client's examples (`init` and `finish`).

        The examples are neither augmented nor subject to dropout. BatchNorm uses the statistics of
        each batch and keeps nothing.

        Args:
            w: [P], the point.
            data: the argument of `init` or `finish`.

        Returns:
            The gradient, [P].

        Raises:
            ValueError: under `privacy`, the rule names nothing in `unprotected_uploads`.
        """

    @abstractmethod
    def full_loss(self, w: Tensor, data: LocalData) -> Tensor:
        """Compute f_i(w), the mean loss over the client's examples (not in local steps).

        The examples are not augmented. The mode is "eval", with the client's own BatchNorm
        statistics.

        Args:
            w: [P], the point.
            data: the client's examples, as `begin`, `init` and `finish` get them.

        Returns:
            The mean of the learning task's loss, a scalar.

        Raises:
            ValueError: under `privacy`, the rule names nothing in `unprotected_uploads`.
        """

    @abstractmethod
    def fisher(self, w: Tensor, data: LocalData, augment: bool = False) -> Tensor:
        """Compute the diagonal of the empirical Fisher information. For `init` and `finish`.

        It is the mean over all of the client's examples of the squared gradient of an example's
        loss by the learning task, in mode "eval" with the client's own BatchNorm statistics. For
        the cross-entropy, without weights or smoothing, that loss is -log p(y | x).

        Args:
            w: [P], the point.
            data: the argument of `init` or `finish`.
            augment: whether the examples are augmented.

        Returns:
            The diagonal, [P].

        Raises:
            ValueError: under `privacy`, the rule names nothing in `unprotected_uploads`.
        """

    @abstractmethod
    def net(
        self,
        w: Tensor,
        batch: Batch | None = None,
        mode: PassMode = "frozen",
        buffers: Tensor | None = None,
        dropout: bool = True,
    ) -> Net:
        """Return a forward pass at any parameters, such as a second view of the batch.

        In a loss, at the very vector whose gradient the task computes, the gradient flows through
        this pass too; write `.detach()` behind its outputs for constants. At another vector, such
        as `1 * state["w"]`, always at `shared["x"]`, and outside of losses the parameters are
        constants, and gradients flow only into the activations that `Net.tail` receives.

        Args:
            w: [P], the parameters.
            batch: the mini-batch; None for a net whose `classify` alone is called.
            mode: "frozen" or "eval".
            buffers: [Q], the BatchNorm statistics for mode "eval"; the client's own by default.
            dropout: whether mode "frozen" applies dropout.
        """

    @abstractmethod
    def fresh_model(self) -> tuple[Tensor, Tensor]:
        """Return parameters [P] and BatchNorm statistics [Q] of a new model (`init` only).

        Each client always gets the same one.

        Raises:
            ValueError: outside of `init`.
        """

    @abstractmethod
    def part(self, pattern: str) -> Tensor:
        """Return a mask of the parameters in a part of the net, bool [P].

        Args:
            pattern: "classifier" (the last linear layer with one output per class), "norm" (the
                normalisation layers), or a pattern with `*` and `?` that matches the name of a
                parameter or of a module around it, such as "fc*".

        Raises:
            ValueError: no parameter matches.
        """

    @abstractmethod
    def zeros(self) -> Tensor:
        """Return a zero vector [P] for a rule's state."""

    @abstractmethod
    def zero_buffers(self) -> Tensor:
        """Return a zero vector [Q] for BatchNorm statistics in a rule's state."""

    @abstractmethod
    def descend(self, w: Tensor, direction: Tensor) -> Tensor:
        """Return w - lr u, where the configured optimizer computes u from the direction.

        Clipping and weight decay come first, if configured. Plain SGD has u = direction. An
        optimizer with state needs exactly one call in each step.

        Args:
            w: [P], the parameters.
            direction: [P], the descent direction.

        Returns:
            The next parameters, [P].
        """
