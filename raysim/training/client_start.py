"""The start of a client: the model that it receives, its state, and a newly initialised net."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from raysim.config.schema import Config
from raysim.data.examples import own_copy
from raysim.data.partition.clients import mean_size
from raysim.models.build import make_net
from raysim.models.default_device import brought_to, tensors_on
from raysim.models.flat import Model
from raysim.randomness import generator
from raysim.rules.batch import Batch
from raysim.rules.contract import ClientRule, State, overridden
from raysim.rules.errors.returned_values import (
    check_begin,
    check_sent_to,
    check_tensors,
)
from raysim.rules.errors.user_code import breach
from raysim.rules.task import LocalData
from raysim.training.batches.client_batches import ClientBatches
from raysim.training.groups import WorkerParts
from raysim.training.messages import Broadcast, ClientTask
from raysim.training.personal import PersonalParts
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.tasks.optimizers import kept_state


@dataclass(frozen=True)
class ReceivedModel:
    """A client with the model that it received, before its local steps."""

    task: ClientTask
    """The task of the client."""
    rule: ClientRule
    """The client rule in the round of the version that the client starts from."""
    broadcast: Broadcast
    """The version of the model that the client received, with its own personal parts in it."""
    mine: np.ndarray
    """[n], positions of its examples in the training set."""
    data: LocalData
    """Its examples, as the rule sees them."""
    client_state: State
    """State that the client kept from earlier rounds."""
    local_params: Tensor
    """[P], parameters before the first local step."""
    buffers: Tensor
    """[Q], BatchNorm statistics before the first local step."""
    names_buffers: bool = False
    """True if the rule's `begin` returned these statistics; else they are those received."""
    carried: State = field(default_factory=dict)
    """Tensors that `begin` returned in addition, which the local steps carry."""


@dataclass(frozen=True, kw_only=True)
class PreparedClient(ReceivedModel):
    """A client that is ready to train."""

    state: State
    """State before the first local step."""
    settings: LocalSettings
    """The constants of its local training."""
    prepared: list[tuple[Batch, ...]]
    """Batches that the rule prepared, a tuple for each batch of a pass."""
    optimizer_state: State = field(default_factory=dict)
    """State of the optimizer before the first local step; {} for plain SGD."""
    logged: State = field(default_factory=dict)
    """What the rule has logged before the first local step."""


class ClientStart:
    """Starts the clients of a group.

    Args:
        config: the configuration of the group.
        parts: what all groups share.
        personal: the parts of the model that clients keep to themselves.
        settings: the constants of the training of all clients, for version 0 of the model.
        client_batches: the batches of each client.
    """

    def __init__(
        self,
        config: Config,
        parts: WorkerParts,
        personal: PersonalParts,
        settings: LocalSettings,
        client_batches: ClientBatches,
    ):
        self.config = config
        self.parts = parts
        self.personal = personal
        self.settings = settings
        self.client_batches = client_batches
        self.sizes = parts.clients.sizes_by_round
        self.averages = [mean_size(sizes) for sizes in self.sizes.phases]
        """Mean number of examples of the clients that have any, in each phase."""

    def prepare(
        self, task: LoopTask, rule: ClientRule, broadcast: Broadcast, client_task: ClientTask
    ) -> PreparedClient:
        """Prepare a client for its local steps.

        Args:
            task: becomes the task of the client.
            rule: the client rule in the round of the client's version.
            broadcast: the version that the client starts from.
            client_task: the task of the client.

        Returns:
            The client with its state before the first local step.

        Raises:
            ContractError: the rule returns something that its contract forbids.
        """
        mine = self.parts.clients.at(client_task.base).client(client_task.client)
        received = self.receive(task, rule, broadcast, client_task, mine)
        shared = received.broadcast.shared
        state = rule.init(shared, {**received.client_state}, received.data, task)
        check_tensors(rule, "init", state)
        state = brought_to(state, task.model.device)
        if "w" in state:
            raise breach(
                rule,
                "init",
                'returns "w", which the engine sets: local steps start at what `begin` returns, by '
                'default shared["x"]; omit it',
            )
        prepared = []
        if rule.prepares:
            # A pass may have more batches than the client makes steps.
            prepared = list(islice(self.prepared_batches(task, received), client_task.steps))
        return PreparedClient(
            **vars(received),
            state={"w": task.local_params, **received.carried, **state},
            settings=task.settings,
            prepared=prepared,
            optimizer_state=task.optimizer_state,
            logged=task.logged or {},
        )

    def receive(
        self,
        task: LoopTask,
        rule: ClientRule,
        broadcast: Broadcast,
        client_task: ClientTask,
        mine: np.ndarray,
        of_round: int | None = None,
    ) -> ReceivedModel:
        """Give a client the broadcast, or what the rule's `begin` makes of it.

        Args:
            task: becomes the task of the client.
            rule: the client rule in the round of the client's version.
            broadcast: the version of the model.
            client_task: the task of the client.
            mine: [n], positions of the client's examples.
            of_round: the round whose test and validation examples it has; None: that in which
                it trains from the version.

        Returns:
            The client with its parameters, statistics, state and examples before its local steps.

        Raises:
            ContractError: the rules' `sent_to`, `state` or `begin` returns something that is
                forbidden.
        """
        t, client, local = client_task.base, client_task.client, self.config.local
        tests, vals = self.parts.tests, self.parts.vals
        of_round = t if of_round is None else of_round
        data = LocalData(
            len(mine),
            self.averages[self.sizes.phase(of_round)],
            partial(self._whole, mine, client_task),
            tests and partial(tests, client, of_round),
            vals and partial(vals, client, of_round),
        )
        broadcast = self.personal.received(
            self.sent_to(broadcast, client), client_task.client_state
        )
        # A dict of the client's own, since other clients get the tensors of this version too.
        broadcast = replace(broadcast, shared={**broadcast.shared})
        if self.parts.server.changes_frozen:
            self.parts.model.set_frozen(broadcast.shared["frozen"])
        w, buffers = broadcast.global_params, broadcast.buffers
        n_updates = local.n_updates(client_task.steps)
        task.start(
            # Outside of local steps `task.lr` is their mean, if it varies within the round.
            replace(self.settings, t=t, lr=local.step_sizes.mean(t, n_updates)),
            w,
            buffers,
            n_updates,
            fresh=lambda: fresh_model(self.config, self.parts.model, client),
            client=client,
            optimizer_state=self._kept_optimizer_state(client_task),
        )
        task.received = tuple(broadcast.shared.values())
        client_state = kept_or_new_state(rule, task, client_task)
        received = ReceivedModel(client_task, rule, broadcast, mine, data, client_state, w, buffers)
        return begun_by_rule(task, received) if overridden(rule, ["begin"]) else received

    def _whole(
        self, mine: np.ndarray, client_task: ClientTask, augment: bool = False
    ) -> Iterator[Batch]:
        """Return all examples of a client, as `LocalData.batches` does."""
        if self.settings.guarded:
            raise ValueError(
                "privacy does not cover what comes of data.batches and data.examples; declare the "
                "uploads that depend on it in the rule's `unprotected_uploads`"
            )
        return self.client_batches.whole(mine, client_task if augment else None)

    def sent_to(self, broadcast: Broadcast, client: int) -> Broadcast:
        """Return what the server sends one client of a version of the model.

        What the engine has added to the broadcast goes to every client.

        Args:
            broadcast: the version.
            client: number of the client.

        Raises:
            ContractError: `sent_to` returns something that its contract forbids.
        """
        rule = self.parts.server
        if not overridden(rule, ["sent_to"]):
            return broadcast
        device = broadcast.global_params.device
        with tensors_on(device):
            shared = rule.sent_to(broadcast.shared, client)
        check_sent_to(rule, shared, broadcast.global_params)
        shared = brought_to(shared, device)
        of_engine = {k: v for k, v in broadcast.shared.items() if k not in rule.provides}
        return Broadcast({**of_engine, **shared}, broadcast.buffers)

    def _kept_optimizer_state(self, client_task: ClientTask) -> State | None:
        """Return the state of the optimizer that a client kept; None if it starts anew."""
        optimizer = self.settings.optimizer
        if optimizer is None or self.config.local.optimizer.state == "reset":
            return None
        model = self.parts.model
        return kept_state(optimizer, client_task.client_state or {}, self.parts.x0, model.segments)

    def prepared_batches(
        self, task: LoopTask, client: ReceivedModel
    ) -> Iterator[tuple[Batch, ...]]:
        """Yield the batches that the rule prepares for each batch of one pass.

        Args:
            task: the task of the client.
            client: the client.
        """
        for batch in self.client_batches.one_pass(client.task, client.mine):
            yield client.rule.prepare(client.broadcast.shared, batch, task)


def begun_by_rule(task: LoopTask, client: ReceivedModel) -> ReceivedModel:
    """Return a client at the model that its rule's `begin` returns.

    Args:
        task: the task of the client; set to that model.
        client: the client at the model that it received.

    Raises:
        ContractError: `begin` returns something that its contract forbids.
    """
    rule = client.rule
    begun = rule.begin(client.broadcast.shared, {**client.client_state}, client.data, task)
    check_begin(rule, begun, client.local_params, client.buffers)
    device = task.model.device
    w, buffers, *carried = begun
    w, buffers = w.to(device), None if buffers is None else buffers.to(device)
    task.local_params.copy_(w)
    if buffers is not None:
        task.buffers.copy_(buffers)
    return replace(
        client,
        local_params=w,
        buffers=client.buffers if buffers is None else buffers,
        names_buffers=buffers is not None,
        carried=brought_to(carried[0], device) if carried else {},
    )


def kept_or_new_state(rule: ClientRule, task: LoopTask, client_task: ClientTask) -> State:
    """Return the state that a client kept, or its initial state, with the flag "seen".

    Args:
        rule: the client rule.
        task: the task of the client.
        client_task: what the client is asked to do, with the state that it kept.

    Raises:
        ContractError: the rule's `state` is not a dict of tensors, or has a key of the engine's.
    """
    task.logged = None  # `state` belongs to no round
    client_state = rule.state(task)
    task.logged = {}
    check_tensors(rule, "state", client_state)
    for key in client_state:
        # The engine keeps more under keys with a space, such as the state of the optimizer.
        if key == "seen" or " " in key:
            raise breach(
                rule,
                "state",
                f"returns '{key}', which is a key of the engine's; give it another name, without "
                'spaces; client_state["seen"] is set by the engine',
            )
    # Copies, because `state` may return `task.x0`, and the client may change its state in place.
    client_state = {k: v.to(task.model.device, copy=True) for k, v in client_state.items()}
    if client_task.client_state is not None:
        # What `state` returns tells the type and the device of kept values.
        client_state = {
            k: own_copy(client_task.client_state[k], v).reshape(v.shape)
            for k, v in client_state.items()
        }
    # Filled, since a copy from the host would wait for a GPU.
    seen = torch.full((), client_task.seen, device=task.model.device)
    return {**client_state, "seen": seen}


def fresh_model(config: Config, model: Model, client: int) -> tuple[Tensor, Tensor]:
    """Return parameters [P] and statistics [Q] of a new net, initialised for one client.

    Args:
        config: the configuration of the run.
        model: the net of the run.
        client: number of the client, which keys the initialisation.
    """
    seed = int(generator(config.seed, "fresh", client).integers(2**63))
    config = config.model_copy(update={"seed": seed})
    return Model(
        make_net(config, model.shape, model.classes, model.inputs),
        model.shape,
        model.classes,
        model.dtype,
        model.device,
        learning_task=model.learning_task,
        sample=model.sample,
    ).initial()
