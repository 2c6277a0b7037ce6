"""The local steps of several clients side by side, as one under vmap: for small nets, and on GPUs.

Clients with most steps come first, so that those still training are always the first ones. What
they were sent has a client axis too, unless all were sent the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from raysim.config.sections.local import Local
from raysim.errors import ContractError, in_a_line
from raysim.models.flat import Model
from raysim.rules.batch import Batch
from raysim.rules.contract import ClientRule, State
from raysim.rules.losses import Loss, Net, task_loss
from raysim.rules.task import PassMode
from raysim.rules.user_code import check_direction, check_step
from raysim.signals import reraise_stop
from raysim.training.batches import PaddedBatch
from raysim.training.client_update import ClientUpdate, PreparedClient, failed_update
from raysim.training.cuda_graphs import CudaGraphCache
from raysim.training.loop_task import LoopTask
from raysim.training.messages import Block, Broadcast, ClientTask
from raysim.training.task import ForwardPass, LocalSettings, ModelTask, forward_pass
from raysim.training.trainer import Trainer


class VmapTask(ModelTask):
    """One client of many, inside `torch.func.vmap`: everything is a pure function."""

    def _grad(
        self, w: Tensor, batch: Batch, loss: Loss, mode: PassMode, buffers: Tensor | None
    ) -> Tensor:
        statistics = self._statistics(mode, buffers)

        def mean_loss(w: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            moved: list[Tensor] = []
            net = self._net(w, batch, mode, statistics, True, moved)
            value = batch.mean(loss(net, batch))
            is_plain = self.model.is_own_loss(loss) or mode != "train"
            plain = value if is_plain else batch.mean(task_loss(net, batch))
            return value, (moved[0] if moved else value.new_zeros(0), plain.detach())

        grad, (moved, value) = torch.func.grad(mean_loss, has_aux=True)(w)
        if mode == "train":
            self.buffers = moved
            self.losses.append(value)
        return grad

    def input_grad(
        self, w: Tensor, batch: Batch, loss: Loss = task_loss, buffers: Tensor | None = None
    ) -> Tensor:
        """Compute the gradient of each example's loss with respect to its input; see `Task`."""
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
        """Return a forward pass with constant parameters; see `Task`."""
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

    channels_last = False

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
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
            one.task.client: one
            for client_tasks in alike
            for one in self._train_alike(broadcasts, client_tasks)
        }
        return [trained[client_task.client] for client_task in block.tasks]

    def _train_alike(
        self, broadcasts: Mapping[int, Broadcast], client_tasks: list[ClientTask]
    ) -> list[ClientUpdate]:
        rule, settings = self.rule.at(client_tasks[0].base), self._settings(client_tasks[0].base)
        trained: list[ClientUpdate] = []
        arrived: list[PreparedClient] = []
        for client_task in sorted(client_tasks, key=lambda client_task: -client_task.steps):
            try:
                arrived.append(self.arrive(rule, broadcasts[client_task.base], client_task))
                arrived[-1].state["w"] = arrived[-1].start[0]
            except BaseException as error:
                reraise_stop(error)
                trained.append(failed_update(client_task))
        if not arrived:
            return trained
        client_tasks = [here.task for here in arrived]
        try:
            state, moved, losses = train_under_vmap(
                self.model,
                rule,
                settings,
                [
                    (here.task.base, here.broadcast.shared, here.broadcast.buffers)
                    for here in arrived
                ],
                [here.state | _of_engine(here.optimizer_state) for here in arrived],
                [here.start[1] for here in arrived],
                [(client_task.steps, client_task.client) for client_task in client_tasks],
                self.client_batches.stacked(
                    client_tasks,
                    [here.mine for here in arrived],
                    [here.prepared for here in arrived],
                ),
                self.config.local,
                self.cuda_graphs,
            )
        except BaseException as error:
            reraise_stop(error)
            return trained + [failed_update(client_task) for client_task in client_tasks]
        for i, here in enumerate(arrived):
            try:
                self.loop.start(
                    self._settings(here.task.base, here.task.steps),
                    here.broadcast.global_params,
                    here.broadcast.buffers,
                    self.config.local.n_updates(here.task.steps),
                    moved[i],
                    client=here.task.client,
                )
                own, self.loop.optimizer_state = _divided({k: v[i] for k, v in state.items()})
                trained.append(self._leave(rule, own, here, losses[i]))
            except BaseException as error:
                reraise_stop(error)
                trained.append(failed_update(here.task))
        return trained


Sent = tuple[int | Tensor, State, Tensor]
"""Broadcast that a client received: the version's number, the server rule's tensors, the BatchNorm
statistics [Q]."""


def train_under_vmap(
    model: Model,
    rule: ClientRule,
    settings: LocalSettings,
    received: list[tuple[int, State, Tensor]],
    states: list[State],
    statistics: list[Tensor],
    facts: list[tuple[int, int]],
    batches: Iterator[PaddedBatch],
    local: Local,
    cuda_graphs: CudaGraphCache | None = None,
) -> tuple[State, Tensor, Tensor]:
    """Train K clients side by side.

    Args:
        model: the net.
        rule: the client rule.
        settings: the constants of their training.
        received: what each one received.
        states: what each one's steps start with, with the optimizer's state (`_of_engine`).
        statistics: the BatchNorm statistics [Q] that each one's steps start with.
        facts: number of mini-batches and number of each one, the most mini-batches first.
        batches: for each step the batches of those that still train; see `ClientBatches.stacked`.
        local: step sizes and accumulation.
        cuda_graphs: runs the steps as CUDA graphs.

    Returns: Their states after the last step, [K, ...] each, their BatchNorm statistics [K, Q], and
        their mean losses [K].
    """
    device, size = model.device, len(states)
    state = {k: torch.stack([one[k] for one in states]) for k in states[0]}
    counts = [batches_of_client for batches_of_client, _ in facts]
    facts_of_all = torch.tensor(
        [(local.n_updates(count), client) for count, client in facts], device=device
    )
    buffers = torch.stack(statistics)
    losses = torch.zeros(size, dtype=model.dtype, device=device)
    together = len({id(shared) for _, shared, _ in received}) == 1
    sent = (
        _sent_to_all(received[0], device, cuda_graphs)
        if together
        else _sent_to_each(received, device)
    )
    if local.accumulate > 1:
        state[ACCUMULATED] = torch.zeros_like(state["w"])
    step = torch.func.vmap(
        _step_of(model, rule, settings), in_dims=(None if together else 0, 0, 0, 0, 0, None)
    )
    if local.step_sizes.varies_in_a_round:
        settings = replace(settings, lr=0.0)  # each step gets its own
    key = repr(rule), together, *_constants(settings)
    for i, batch in enumerate(batches):
        live = len(batch.x)
        now = sent if together else _to_the_first(sent, live)
        part = (
            now,
            {k: v[:live] for k, v in state.items()},
            buffers[:live],
            facts_of_all[:live],
            batch.tensors() | _due(local, counts[:live], i, device),
            _numbers_of_step(model, local, received[0][0], i),
        )
        after, moved, loss = cuda_graphs.run(key, step, *part) if cuda_graphs else step(*part)
        state = (
            after
            if live == size
            else {k: torch.cat([after[k], v[live:]]) for k, v in state.items()}
        )
        buffers = torch.cat([moved, buffers[live:]])
        losses[:live] += (loss - losses[:live]) / (i + 1)
    if cuda_graphs is not None:  # what a recorded step gave is the next one's too
        state = {k: v.clone() for k, v in state.items()}
    return state, buffers, losses


Step = Callable[[Sent, State, Tensor, Tensor, dict[str, Any], State], tuple[State, Tensor, Tensor]]
"""Takes what a client received, its state, its BatchNorm statistics [Q], its facts [2] (number of
steps, number of the client), its batch's tensors and the numbers of this step.

It returns the next state, the next statistics and the loss."""


def _step_of(model: Model, rule: ClientRule, settings: LocalSettings) -> Step:
    """Return one client's local step as a pure function."""

    def step(
        sent: Sent,
        state: State,
        buffers: Tensor,
        facts: Tensor,
        tensors: dict[str, Any],
        numbers: State,
    ) -> tuple[State, Tensor, Tensor]:
        t, shared, received = sent
        lr = numbers.get("lr", settings.lr)
        task = VmapTask(model, replace(settings, t=t, lr=lr), received, facts)
        task.buffers = buffers
        own, task.optimizer_state = _divided(state)
        batch = PaddedBatch.of_one(tensors)
        if ACCUMULATED in state:
            after = _accumulated(rule, shared, state, batch, task, tensors["due"], numbers["count"])
        else:
            after = rule.step(shared, own, batch, task)
            check_step(rule, own, after)
            task.check_update(rule)
            after = after | _of_engine(task.optimizer_state)
        if len(task.losses) != 1:
            raise ContractError(
                f"client rule '{rule.name}' makes {len(task.losses)} passes in mode 'train' in one "
                "step; make exactly one, the others 'frozen' or 'eval'"
            )
        return after, task.buffers, task.losses[0]

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
    own = {k: v for k, v in state.items() if not k.startswith(ENGINE)}
    own.pop(ACCUMULATED, None)
    return own, {k.removeprefix(ENGINE): v for k, v in state.items() if k.startswith(ENGINE)}


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
    own, _ = _divided(state)
    direction = rule.direction(shared, own, batch, task)
    check_direction(rule, own["w"], direction)
    total = state[ACCUMULATED] + direction
    stepped = {
        **state,
        "w": task.descend(own["w"], total / count),
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
    received: tuple[int, State, Tensor], device: torch.device, cuda_graphs: CudaGraphCache | None
) -> Sent:
    """Return what all clients received, without a client axis."""
    base, shared, buffers = received
    if cuda_graphs is None:
        return received
    return (
        torch.tensor(base, device=device),
        shared,
        buffers,
    )  # as a number it would be a constant of what is recorded


def _sent_to_each(received: list[tuple[int, State, Tensor]], device: torch.device) -> Sent:
    bases, shared, buffers = zip(*received, strict=True)
    return (
        torch.tensor(bases, device=device),
        {k: torch.stack([one[k] for one in shared]) for k in shared[0]},
        torch.stack(buffers),
    )


def _to_the_first(sent: Sent, count: int) -> Sent:
    t, shared, buffers = sent
    assert isinstance(t, Tensor)
    return t[:count], {k: v[:count] for k, v in shared.items()}, buffers[:count]


def why_not_vmap(model: Model) -> str | None:
    """Return why clients cannot train side by side under vmap; None if they can.

    The net's gradients under vmap are compared with those of one client at a time.

    Args:
        model: the net.
    """
    x, y = model.trial(6)
    x, y = x.unflatten(0, (2, 3)), y.unflatten(0, (2, 3))
    w, buffers = model.initial()
    mask, drops = x.new_ones(2, 3), tuple(x.new_ones(2, 3, *shape) for shape, _ in model.dropouts)

    def side_by_side(x: Tensor, y: Tensor, mask: Tensor, *drop: Tensor) -> Tensor:
        return VmapTask(model, LocalSettings(), buffers).grad(w, Batch(x, y, mask, (drop,)))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "error"
            )  # torch warns where it would fall back to a slow loop of its own
            many = torch.func.vmap(side_by_side)(x, y, mask, *drops)
        one = LoopTask(model, LocalSettings())
        one.buffers = buffers
        alone = torch.stack(
            [one.grad(w, Batch(x[i], y[i], None, (tuple(d[i] for d in drops),))) for i in (0, 1)]
        )
    except BaseException as error:
        reraise_stop(error)
        return in_a_line(error)
    if not (torch.isfinite(many).all() and torch.isfinite(alone).all()):
        return "its gradients on random inputs are not finite, so the two ways cannot be compared"
    if not torch.allclose(many, alone, rtol=1e-2, atol=1e-3 * float(alone.abs().max())):
        return "it computes other gradients under vmap than alone"
    return None
