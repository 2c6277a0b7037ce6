"""The local steps of several clients side by side, as one under vmap: for small nets, and on GPUs.

Clients with most steps come first, so that those still training are always the first ones. The
tensors that they received have a client axis too, unless all received the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from raysim.config.sections.local import Local
from raysim.errors import in_a_line
from raysim.models.flat import Model
from raysim.randomness import generator
from raysim.rules.batch import Batch
from raysim.rules.contract import ClientRule, State
from raysim.rules.errors.user_code import check_direction, check_passes, check_step
from raysim.rules.losses import Loss, Net, task_loss
from raysim.rules.task import PassMode
from raysim.system.signals import reraise_stop
from raysim.training.batches.batch_layouts import PaddedBatch
from raysim.training.client_start import PreparedClient
from raysim.training.groups import ClientGroup, WorkerParts
from raysim.training.messages import Block, Broadcast, ClientTask
from raysim.training.step_log import StepLog
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.tasks.task import ForwardPass, ModelTask, forward_pass
from raysim.training.trainers.cuda_graphs import CudaGraphCache
from raysim.training.trainers.trainer import Trainer
from raysim.training.uploads.client_update import ClientUpdate, failed_update


class VmapTask(ModelTask):
    """One client of many, inside `torch.func.vmap`: everything is a pure function."""

    def _grad(
        self, w: Tensor, batch: Batch, loss: Loss, mode: PassMode, buffers: Tensor | None
    ) -> Tensor:
        statistics = self._statistics(mode, buffers)
        gradient, moved, value = self._pass(w, batch, loss, mode, statistics)
        if mode == "train":
            self.buffers = moved
            self.losses.append(value)
        return gradient

    def _grad_and_buffers(
        self, w: Tensor, batch: Batch, loss: Loss, buffers: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._pass(w, batch, loss, "train", buffers)[:2]

    def _pass(
        self, w: Tensor, batch: Batch, loss: Loss, mode: PassMode, statistics: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradient [P], in mode "train" the new statistics [Q], and a loss for the log."""

        def mean_loss(w: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            moved: list[Tensor] = []
            net = self._net(w, batch, mode, statistics, True, moved)
            value = batch.mean(loss(net, batch))
            is_plain = self.model.is_own_loss(loss) or mode != "train"
            plain = value if is_plain else batch.mean(task_loss(net, batch))
            # torch.func.grad returns tensors only: no statistics are an empty one.
            return value, (moved[0] if moved else value.new_zeros(0), plain.detach())

        gradient, (moved, value) = torch.func.grad(mean_loss, has_aux=True)(w)
        return gradient, moved, value

    def input_grad(
        self, w: Tensor, batch: Batch, loss: Loss = task_loss, buffers: Tensor | None = None
    ) -> Tensor:
        """Compute the gradient of each example's loss with respect to its input.

        See `Task.input_grad`.
        """
        self._guard("input_grad")

        def total(x: Tensor) -> Tensor:
            return loss(self.net(w, replace(batch, x=x), "eval", buffers), batch).sum()

        return torch.func.grad(total)(batch.x)

    def net(
        self,
        w: Tensor,
        batch: Batch,
        mode: PassMode = "frozen",
        buffers: Tensor | None = None,
        dropout: bool = True,
    ) -> Net:
        """Return a forward pass with constant parameters. See `Task.net`."""
        return self._net(w, batch, mode, self._statistics(mode, buffers), dropout, [])

    def _net(
        self,
        w: Tensor,
        batch: Batch,
        mode: PassMode,
        buffers: Tensor | None,
        dropout: bool,
        moved: list[Tensor],
    ) -> ForwardPass:
        """In mode "train" the new statistics are left in `moved`."""

        def call(
            x: Tensor, first: int, levels: list[Tensor] | None
        ) -> tuple[Tensor, Tensor | None]:
            drop = batch.drop if dropout else ()
            return forward_pass(
                self.model, w, x, first, levels, mode, buffers, batch.mask, drop, moved
            )

        return ForwardPass(self.model, batch.x, call)


class VmapTrainer(Trainer):
    """Trains the clients of a block side by side, as one under vmap."""

    # Stacked images have five dimensions, and this memory format is for four.
    channels_last = False

    def __init__(self, group: ClientGroup, parts: WorkerParts):
        super().__init__(group, parts)
        self.cuda_graphs = CudaGraphCache() if self._records() else None

    def _records(self) -> bool:
        """Return True if steps are recorded as CUDA graphs.

        That is on a GPU, if steps are alike: else every block brings kinds of steps that never come
        again.
        """
        return (
            self.config.batching.cuda_graphs
            and self.config.steps_are_alike
            and self.model.device.type == "cuda"
        )

    def train_block(self, broadcasts: Mapping[int, Broadcast], block: Block) -> list[ClientUpdate]:
        """Train clients with equal constants side by side.

        Schedules over rounds may separate clients that started from different versions.

        See `Trainer.train_block`.
        """
        step_sizes = self.config.local.step_sizes

        def constants(client_task: ClientTask) -> tuple:
            return step_sizes.of_step(client_task.base), self.rule.at(client_task.base)

        alike: list[list[ClientTask]] = []
        for client_task in block.tasks:
            group = next(
                (
                    client_tasks
                    for client_tasks in alike
                    if constants(client_tasks[0]) == constants(client_task)
                ),
                None,
            )
            if group is None:
                alike.append(group := [])
            group.append(client_task)
        trained = {
            update.task.client: update
            for client_tasks in alike
            for update in self._train_alike(broadcasts, client_tasks)
        }
        return [trained[client_task.client] for client_task in block.tasks]

    def _train_alike(
        self, broadcasts: Mapping[int, Broadcast], client_tasks: list[ClientTask]
    ) -> list[ClientUpdate]:
        """Train clients with equal constants; the update of one that raised has an `error`."""
        version = client_tasks[0].base
        rule = self.rule.at(version)
        lr = self.config.local.step_sizes.of_step(version)
        settings = replace(self.settings, t=version, lr=lr)
        clients, failed = self._arrive_all(rule, broadcasts, client_tasks)
        if not clients:
            return failed
        try:
            block = VmapBlock(
                self.model, rule, settings, self.config.local, clients, self.cuda_graphs
            )
            block.train(
                self.client_batches.stacked(
                    [client.task for client in clients],
                    [client.mine for client in clients],
                    [client.prepared for client in clients],
                )
            )
        except BaseException as error:
            reraise_stop(error)
            return failed + [failed_update(client.task) for client in clients]
        return failed + [self._finish(block, k) for k in range(len(clients))]

    def _arrive_all(
        self,
        rule: ClientRule,
        broadcasts: Mapping[int, Broadcast],
        client_tasks: list[ClientTask],
    ) -> tuple[list[PreparedClient], list[ClientUpdate]]:
        """Prepare clients, those with most mini-batches first; also return those that raised."""
        clients: list[PreparedClient] = []
        failed: list[ClientUpdate] = []
        for client_task in sorted(client_tasks, key=lambda client_task: -client_task.steps):
            try:
                client = self.start.prepare(
                    self.task, rule, broadcasts[client_task.base], client_task
                )
                # Until now it is the vector in training, which the next client overwrites.
                client.state["w"] = client.local_params
                clients.append(client)
            except BaseException as error:
                reraise_stop(error)
                failed.append(failed_update(client_task))
        return clients, failed

    def _finish(self, block: VmapBlock, k: int) -> ClientUpdate:
        """Return the update of client `k` of a trained block."""
        client = block.clients[k]
        try:
            # `finish` runs for one client after the other, as in mode loop.
            task = self.task
            task.start(
                client.settings,
                client.broadcast.global_params,
                client.broadcast.buffers,
                self.config.local.n_updates(client.task.steps),
                block.buffers[k],
                client=client.task.client,
            )
            state = {key: value[k] for key, value in block.state.items()}
            rule_state, task.optimizer_state = _divided(state)
            task.logged = {**client.logged, **block.log.of(k)}
            return self.finish.update(client, rule_state, block.losses[k], task)
        except BaseException as error:
            reraise_stop(error)
            return failed_update(client.task)


Sent = tuple[int | Tensor, State, Tensor]
"""Broadcast that a client received: the version's number, the server rule's tensors, the BatchNorm
statistics [Q]."""


class VmapBlock:
    """K clients that train side by side: their states, and steps of those that still train.

    The client with most mini-batches is the first one, so those that still train are the first
    ones too.
    """

    def __init__(
        self,
        model: Model,
        rule: ClientRule,
        settings: LocalSettings,
        local: Local,
        clients: list[PreparedClient],
        cuda_graphs: CudaGraphCache | None = None,
    ):
        """Stack what the clients start with.

        Args:
            model: the net.
            rule: the client rule.
            settings: the constants of their training.
            local: step sizes and accumulation.
            clients: the clients, in decreasing order of mini-batches.
            cuda_graphs: runs the steps as CUDA graphs; None: they run without.
        """
        self.model = model
        self.local = local
        self.clients = clients
        self.cuda_graphs = cuda_graphs
        states = [client.state | _of_engine(client.optimizer_state) for client in clients]
        self.state = {key: torch.stack([state[key] for state in states]) for key in states[0]}
        """State of the rule and of the optimizer (`_of_engine`), [K, ...] each."""
        if local.accumulate > 1:
            self.state[ACCUMULATED] = torch.zeros_like(self.state["w"])
        self.buffers = torch.stack([client.buffers for client in clients])
        """BatchNorm statistics [K, Q]."""
        self.log = StepLog(len(clients))
        """What the rule logs in local steps."""
        self.losses = torch.zeros(len(clients), dtype=model.dtype, device=model.device)
        """Mean loss [K] of each client's mini-batches so far."""
        self.counts = [client.task.steps for client in clients]
        """Number of mini-batches of each client."""
        self.facts = torch.tensor(
            [(local.n_updates(client.task.steps), client.task.client) for client in clients],
            device=model.device,
        )
        """[K, 2], number of steps and number of each client."""
        self.same_broadcast = len({id(client.broadcast.shared) for client in clients}) == 1
        """Whether all clients received the same tensors, which then have no client axis."""
        self.sent: Sent = (
            _sent_to_all(clients[0], model.device, cuda_graphs)
            if self.same_broadcast
            else _sent_to_each(clients, model.device)
        )
        if local.step_sizes.varies_in_a_round:
            settings = replace(settings, lr=0.0)  # each step gets its own
        self._step = torch.func.vmap(
            _step_of(model, rule, settings),
            # Without a client axis the broadcast is in memory once, not K times.
            in_dims=(None if self.same_broadcast else 0, 0, 0, 0, 0, None),
        )
        self._kind = repr(rule), self.same_broadcast, *_constants(settings)

    def train(self, batches: Iterator[PaddedBatch]) -> None:
        """Make all local steps.

        Args:
            batches: for each mini-batch those of the clients that still train; see
                `ClientBatches.stacked`.
        """
        for i, batch in enumerate(batches):
            self.step(i, batch)
        if self.cuda_graphs is not None:  # a recorded step's output is that of the next one too
            self.state = {key: value.clone() for key, value in self.state.items()}

    def step(self, i: int, batch: PaddedBatch) -> None:
        """Train the clients that have a mini-batch `i` on it.

        Args:
            i: number of the mini-batch, from 0.
            batch: mini-batches of the first clients.
        """
        # Slices instead of a mask: clients that are done cost nothing.
        live = len(batch.x)
        arguments = (
            self.sent if self.same_broadcast else _to_the_first(self.sent, live),
            {key: value[:live] for key, value in self.state.items()},
            self.buffers[:live],
            self.facts[:live],
            batch.tensors() | _due(self.local, self.counts[:live], i, self.model.device),
            _numbers_of_step(self.model, self.local, self.clients[0].task.base, i),
        )
        state, buffers, losses, logged = (
            self.cuda_graphs.run(self._kind, self._step, *arguments)
            if self.cuda_graphs
            else self._step(*arguments)
        )
        if live < len(self.clients):
            state = {key: torch.cat([state[key], v[live:]]) for key, v in self.state.items()}
        self.state = state
        self.buffers = torch.cat([buffers, self.buffers[live:]])
        # A running mean, since clients are done after different numbers of mini-batches.
        self.losses[:live] += (losses - self.losses[:live]) / (i + 1)
        self.log.add(logged)


StepResult = tuple[State, Tensor, Tensor, State]
"""Next state, next BatchNorm statistics [Q], loss, and what the rule logged."""

Step = Callable[[Sent, State, Tensor, Tensor, dict[str, Any], State], StepResult]
"""One local step of a client, of what it received, its state, its BatchNorm statistics [Q], its
facts [2] (number of steps, number of the client), its batch's tensors and the numbers of this step.
"""


def _step_of(model: Model, rule: ClientRule, settings: LocalSettings) -> Step:
    """Return one client's local step as a pure function."""

    def step(
        sent: Sent,
        state: State,
        buffers: Tensor,
        facts: Tensor,
        tensors: dict[str, Any],
        numbers: State,
    ) -> StepResult:
        t, shared, received = sent
        lr = numbers.get("lr", settings.lr)
        task = VmapTask(model, replace(settings, t=t, lr=lr), received, facts)
        task.buffers = buffers
        task.logged = {}
        rule_state, task.optimizer_state = _divided(state)
        batch = PaddedBatch.of_one(tensors)
        if ACCUMULATED in state:
            after = _accumulated(rule, shared, state, batch, task, tensors["due"], numbers["count"])
        else:
            after = rule.step(shared, rule_state, batch, task)
            check_step(rule, rule_state, after)
            task.check_update(rule)
            after = after | _of_engine(task.optimizer_state)
        check_passes(rule, len(task.losses))
        # The copies leave the gradient's transform, in which `loss` has logged.
        logged = {name: number.clone() for name, number in task.logged.items()}
        return after, task.buffers, task.losses[0], logged

    return step


ENGINE = "engine/"
"""Beginning of the keys of a state that the rule does not see: the optimizer's."""

ACCUMULATED = "accumulated"
"""Key of the sum of the directions [P] of the mini-batches since the last step."""


def _of_engine(optimizer_state: State) -> State:
    """Return an optimizer's state under the keys that the rule does not see."""
    return {ENGINE + key: value for key, value in optimizer_state.items()}


def _divided(state: State) -> tuple[State, State]:
    """Return the rule's part of a state, and the optimizer's."""
    rule_state = {k: v for k, v in state.items() if not k.startswith(ENGINE)}
    rule_state.pop(ACCUMULATED, None)
    return rule_state, {k.removeprefix(ENGINE): v for k, v in state.items() if k.startswith(ENGINE)}


def _due(local: Local, counts: list[int], i: int, device: torch.device) -> dict[str, Tensor]:
    """Return which clients make a step after mini-batch `i`, [K]; {} without accumulation."""
    if local.accumulate == 1:
        return {}
    due = [(i + 1) % local.accumulate == 0 or i + 1 == count for count in counts]
    return {"due": torch.tensor(due, device=device)}


def _numbers_of_step(model: Model, local: Local, t: int, i: int) -> State:
    """Return the numbers that differ between the steps of a round, for mini-batch `i`.

    They are tensors, so that all steps have the same constants.
    """
    numbers = {}
    if local.step_sizes.varies_in_a_round:
        numbers["lr"] = local.step_sizes.of_step(t, i // local.accumulate)
    if local.accumulate > 1:
        numbers["count"] = i % local.accumulate + 1
    return {
        key: torch.tensor(number, dtype=model.dtype, device=model.device)
        for key, number in numbers.items()
    }


def _accumulated(
    rule: ClientRule,
    shared: State,
    state: State,
    batch: Batch,
    task: VmapTask,
    due: Tensor,
    count: Tensor,
) -> State:
    """Return the state after a mini-batch: after a step along the mean direction if it is due."""
    rule_state, _ = _divided(state)
    direction = rule.direction(shared, rule_state, batch, task)
    check_direction(rule, rule_state["w"], direction)
    total = state[ACCUMULATED] + direction
    # Both states are computed: under vmap a step cannot branch on whether it is due.
    stepped = {
        **state,
        "w": task.descend(rule_state["w"], total / count),
        **_of_engine(task.optimizer_state),
        ACCUMULATED: torch.zeros_like(total),
    }
    waiting = {**state, ACCUMULATED: total}
    return {key: torch.where(due, stepped[key], waiting[key]) for key in state}


def _constants(settings: LocalSettings) -> tuple:
    """Return the settings of a round that a step uses, except the constant x0 and decay."""
    privacy = settings.privacy and settings.privacy.model_dump_json()
    constants = settings.lr, settings.weight_decay, settings.clip, privacy, settings.guarded
    return *constants, settings.optimizer, settings.group


def _sent_to_all(
    client: PreparedClient, device: torch.device, cuda_graphs: CudaGraphCache | None
) -> Sent:
    """Return what all clients received, without a client axis."""
    # As a number, the version would be a constant of a recorded step.
    version = client.task.base
    recorded = version if cuda_graphs is None else torch.tensor(version, device=device)
    return recorded, client.broadcast.shared, client.broadcast.buffers


def _sent_to_each(clients: list[PreparedClient], device: torch.device) -> Sent:
    """Return what each client received, [K, ...]."""
    shared = [client.broadcast.shared for client in clients]
    return (
        torch.tensor([client.task.base for client in clients], device=device),
        {key: torch.stack([tensors[key] for tensors in shared]) for key in shared[0]},
        torch.stack([client.broadcast.buffers for client in clients]),
    )


def _to_the_first(sent: Sent, count: int) -> Sent:
    t, shared, buffers = sent
    assert isinstance(t, Tensor)
    return t[:count], {k: v[:count] for k, v in shared.items()}, buffers[:count]


def why_not_vmap(model: Model) -> str | None:
    """Return why clients cannot train side by side under vmap; None if they can.

    Gradients and statistics of two clients, of which one has fewer examples and is padded, are
    compared with those of each client alone.

    Args:
        model: the net.
    """
    if model.learning_task.loss_reduction == "batch":
        return f"the loss '{model.learning_task.name}' is one of all examples of a batch together"
    for larger, smaller, factor in PADDED_TRIALS:
        if larger > SMALL_TRIAL and model.size > MAX_PARAMETERS_OF_LARGE_TRIALS:
            continue
        if why := _why_not_padded(model, larger, smaller, factor):
            return why
    return None


PADDED_TRIALS = ((3, 2, 1.0), (3, 2, 8.0), (40, 9, 1.0), (40, 9, 8.0))
"""Numbers of examples of two clients, and a factor of their inputs: some nets couple the examples
of large batches only, or of large inputs."""

SMALL_TRIAL = 3
"""Number of examples of the larger client in a trial that every net can afford."""

MAX_PARAMETERS_OF_LARGE_TRIALS = 1_000_000
"""Larger nets make small trials only, since the others would take seconds."""


class _PaddedTrial:
    """Two clients with random examples, of which the smaller one is padded.

    Args:
        model: the net.
        larger: number of examples of the first client.
        smaller: number of examples of the second client.
        factor: factor of the inputs, if these are floats.
    """

    def __init__(self, model: Model, larger: int, smaller: int, factor: float):
        self.model = model
        x, y = model.trial(larger + smaller)
        if x.is_floating_point():
            x = x * factor
        self.examples = [(x[:larger], y[:larger]), (x[larger:], y[larger:])]
        w, self.buffers = model.initial()
        # Initial zeros would hide a difference.
        noise = generator(0, "dry run").standard_normal(model.size, dtype="float32")
        self.w = w + 0.02 * torch.from_numpy(noise).to(w)
        self.padded = [
            _stacked_with_last(first, second) for first, second in zip(*self.examples, strict=True)
        ]
        self.mask = w.new_ones(2, larger)
        self.mask[1, smaller:] = 0
        self.drops = tuple(w.new_ones(2, larger, *shape) for shape, _ in model.dropouts)

    def alone(self, client: int) -> tuple[Tensor, Tensor]:
        """Return the gradient [P] and the statistics [Q] of a client without padding."""
        task = LoopTask(self.model, LocalSettings())
        task.buffers = self.buffers.clone()
        x, y = self.examples[client]
        drop = tuple(masks[client, : len(y)] for masks in self.drops)
        gradient = task.grad(self.w, Batch(x, y, None, (drop,)))
        if task.unreached:
            name = self.model.names[task.unreached[0]].removeprefix("0.")
            raise ValueError(f"'{name}' has no gradient, which vmap takes for a gradient of 0")
        return gradient, task.buffers

    def side_by_side(self) -> tuple[Tensor, Tensor]:
        """Return the gradients [2, P] and the statistics [2, Q] of both clients under vmap."""

        def of_client(x: Tensor, y: Tensor, mask: Tensor, *drop: Tensor) -> tuple[Tensor, Tensor]:
            task = VmapTask(self.model, LocalSettings(), self.buffers)
            return task.grad(self.w, Batch(x, y, mask, (drop,))), task.buffers

        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns if it would fall back to a slow loop
            return torch.func.vmap(of_client)(*self.padded, self.mask, *self.drops)


def _stacked_with_last(larger: Tensor, smaller: Tensor) -> Tensor:
    """Return the rows of two clients as one tensor, the smaller one padded with its last row."""
    padding = [smaller[-1:]] * (len(larger) - len(smaller))
    return torch.stack([larger, torch.cat([smaller, *padding])])


def _why_not_padded(model: Model, larger: int, smaller: int, factor: float) -> str | None:
    """Return why two clients cannot train side by side; None if they can."""
    trial = _PaddedTrial(model, larger, smaller, factor)
    # A net need not take so many examples, or such large inputs; then a trial shows nothing.
    is_optional = larger > SMALL_TRIAL or factor != 1
    try:
        each = [torch.stack(parts) for parts in zip(trial.alone(0), trial.alone(1), strict=True)]
    except BaseException as error:
        reraise_stop(error)
        return None if is_optional else in_a_line(error)
    try:
        many = trial.side_by_side()
    except BaseException as error:
        reraise_stop(error)
        return in_a_line(error)
    tolerance = 1e-8 if model.dtype is torch.float64 else 1e-3
    for name, under_vmap, expected in zip(("gradients", "statistics"), many, each, strict=True):
        if not (torch.isfinite(under_vmap).all() and torch.isfinite(expected).all()):
            if is_optional:
                return None
            return f"its {name} on random inputs are not finite, so the two ways cannot be compared"
        if float((under_vmap - expected).norm()) > tolerance * float(expected.norm()):
            return (
                f"it computes other {name} for a padded batch under vmap than for the batch alone; "
                "examples may meet in the net"
            )
    return None
