"""The local steps of several clients side by side, as one under vmap.

Clients with most steps come first, so that those still training are always the first ones. The
tensors that they received have a client axis too, unless all received the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from raysim.config.sections.local import Local
from raysim.models.flat import Model
from raysim.rules.batch import Batch
from raysim.rules.contract import ClientRule, State
from raysim.rules.errors.returned_values import check_direction, check_passes, check_step
from raysim.training.batches.batch_layouts import PaddedBatch
from raysim.training.client_start import PreparedClient
from raysim.training.step_log import StepLog
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.vmap_task import VmapTask
from raysim.training.trainers.cuda_graphs import CudaGraphCache

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
        rule_state, task.optimizer_state = divided(state)
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


def divided(state: State) -> tuple[State, State]:
    """Return the rule's part of a state, and the optimizer's.

    Args:
        state: the state of a client in a block, or of all.
    """
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
    rule_state, _ = divided(state)
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
