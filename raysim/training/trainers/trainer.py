"""The base class of the trainers of all modes.

A block is the unit of work. Its result is a pure function of the broadcast, its tasks, the data and
the seed of the run. Any worker can therefore compute it, and compute it again. In loop mode the
bits of a client do not depend on the other clients of its block. Under vmap they do, so the block
size is then part of the identity of the run.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from raysim.data import Examples
from raysim.data.partition.clients import Clients, VirtualClients
from raysim.errors import ContractError
from raysim.models.flat import Model
from raysim.rules.batch import Batch
from raysim.rules.contract import ClientRule, ServerRule, State, overridden
from raysim.rules.errors.user_code import (
    breach,
    check_dict,
    check_sent_to,
    declared_noise,
    translate_errors,
)
from raysim.rules.public import PublicData
from raysim.rules.task import LocalData
from raysim.training.batches.client_batches import ClientBatches
from raysim.training.client_start import ReceivedModel, begin_client, fresh_model, kept_or_new_state
from raysim.training.groups import ClientGroup
from raysim.training.messages import (
    Block,
    Broadcast,
    ClientEvaluation,
    ClientTask,
    WorkerResult,
)
from raysim.training.personal import PersonalParts, personal_parts
from raysim.training.tasks.fast_gradient import matches_autograd
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.tasks.optimizers import kept, kept_state, make_optimizer
from raysim.training.uploads.client_finish import ClientFinish
from raysim.training.uploads.client_update import ClientUpdate, PreparedClient
from raysim.training.uploads.upload_chain import UploadChain
from raysim.training.uploads.upload_sum import UploadLayout, UploadSum

TrainingMode = Literal["loop", "vmap", "pooled"]
"""Mode in which the clients of a block train: one after the other, side by side, or as one."""
EvaluateBlock = Callable[[Mapping[int, Broadcast], Block], list[ClientEvaluation]]
"""Evaluation of the clients of a block, with the versions of the model by number."""


@dataclass(frozen=True)
class WorkerParts:
    """What the trainers of all groups of a worker share."""

    server: ServerRule
    """The server rule, which declares the uploads."""
    model: Model
    """The net."""
    x0: Tensor
    """[P], the initial parameters of the run."""
    examples: Examples
    """The training set, on the device of the model."""
    clients: Clients | VirtualClients
    """The positions of each client's examples."""
    personal: PersonalParts | None = None
    """The personal parts of the model; None: those of configuration and rule."""
    public: PublicData | None = None
    """The public examples, if a client rule needs them."""
    tests: Callable[[int], LocalData] | None = None
    """Returns the test examples of a client; None if clients have none."""
    vals: Callable[[int], LocalData] | None = None
    """Returns the validation examples of a client; None if clients have none."""
    measures: Mapping[str, Measure] = field(default_factory=dict)
    """Functions of probes that measure a client, by the name of the probe."""
    all_per_client: bool = False
    """Whether the server receives every upload client by client."""


class Trainer(ABC):
    """Trains blocks of clients on one device, with the data, the net and the client rule of a run.

    A subclass implements `train_block`.
    """

    channels_last: ClassVar[bool] = True
    """Whether images of a convolutional net use this memory format on a CPU."""

    def __init__(self, group: ClientGroup, parts: WorkerParts):
        """Prepare to train.

        Args:
            group: the clients to train, with their rule and configuration.
            parts: what all groups share.

        Raises:
            ConfigError: the personal parameters are invalid.
            ContractError: the rule's `noise` fails, or returns something that is forbidden.
        """
        config, client, model = group.config, group.rule, parts.model
        self.group = group
        self.parts = parts
        self.config = config
        self.rule = client
        self.server = parts.server
        self.model = model
        self.x0 = parts.x0
        self.clients = parts.clients
        self.groups: list[Trainer] = []
        """The trainer of each group; see `add_groups`."""
        self.members: np.ndarray | None = None
        """[N], the group of each client, 0 for none; None without groups."""
        self.evaluate_block: dict[str, EvaluateBlock] = {}
        """Evaluate the clients of a block, by the examples on which they are evaluated."""
        self.average = float(parts.clients.sizes.sum() / parts.clients.n_nonempty)
        self.personal = parts.personal or personal_parts(config, client, model)
        if config.local.buffers == "frozen":
            # The task and the batches, which are made below, depend on it.
            model.freeze_statistics()
        self.uploads = UploadLayout.of(
            config,
            client,
            parts.server,
            model,
            len(parts.clients),
            self.personal,
            parts.all_per_client,
        )
        self.sent = self.uploads.sent
        self.constants = self._constants(group, parts)
        self.loop = LoopTask(model, self.constants, fast=matches_autograd(model))
        self.finish = ClientFinish(config, parts.server, self.uploads, self._chain(group))
        channels_last = model.channels_last and model.device.type == "cpu" and self.channels_last
        # `noise` is code of the rule's, and may raise anything.
        with translate_errors(ContractError):
            noise = declared_noise(client, client.noise(self.loop))
        self.client_batches = ClientBatches(
            config, model, parts.examples, client.dropout_masks, channels_last, noise
        )

    @staticmethod
    def _constants(group: ClientGroup, parts: WorkerParts) -> LocalSettings:
        """Return the constants of the training of all clients, for version 0 of the model."""
        local, rule = group.config.local, group.rule
        privacy = group.config.example_privacy
        return LocalSettings(
            t=0,
            lr=local.step_sizes.of_step(0),
            weight_decay=local.weight_decay,
            clip=local.max_grad_norm,
            privacy=privacy,
            guarded=privacy is not None and not rule.unprotected_uploads,
            x0=parts.x0,
            decayed=parts.model.decayed() if local.weight_decay else None,
            seed=group.config.seed,
            optimizer=make_optimizer(local.optimizer),
            group=group.name,
            public=parts.public if rule.needs_public_data else None,
        )

    def _chain(self, group: ClientGroup) -> UploadChain | None:
        """Return the stages of the uploads of a group; None if there are none."""
        if not group.stages:
            return None
        shapes = self.personal.compacted_shapes(self.model.shapes)
        config = group.config
        key = config.upload_key(group.name)
        return UploadChain(group.stages, group.rule, self.sent, shapes, config.seed, key)

    def add_groups(self, groups: Sequence[Trainer], members: np.ndarray) -> None:
        """Train the clients of each group by another trainer.

        Args:
            groups: the trainers, in the order of the configuration.
            members: [N], the group of each client, from 1; 0 for a client of none.
        """
        self.groups = [self, *groups]
        self.members = members
        states = [trainer._new_state() for trainer in self.groups]
        for trainer, group_state in zip(self.groups, states, strict=True):
            trainer.finish.padding = {
                key: torch.zeros_like(value)
                for state in states
                for key, value in state.items()
                if key not in group_state
            }

    def _new_state(self) -> State:
        """Return what rule, optimizer and stages keep of a client that has not trained yet."""
        state = dict(self.rule.state(self.loop))
        optimizer, chain = self.constants.optimizer, self.finish.chain
        if optimizer is not None and self.config.local.optimizer.state == "keep":
            state |= kept(optimizer.start(self.x0))
        if chain is not None:
            state |= chain.new_memory(self.uploads.declared, self.x0)
        return state

    def of_client(self, client: int) -> Trainer:
        """Return the trainer of a client's group.

        Args:
            client: number of the client.
        """
        return self if self.members is None else self.groups[self.members[client]]

    def _train_groups(
        self, broadcasts: Mapping[int, Broadcast], block: Block
    ) -> list[ClientUpdate]:
        """Cut a block by group, and return the updates in the order of the block."""
        assert self.members is not None
        updates = {}
        for k, trainer in enumerate(self.groups):
            tasks = [task for task in block.tasks if self.members[task.client] == k]
            if tasks:
                of_group = trainer.train_block(broadcasts, Block(block.index, tasks))
                # A probe gets the trainer of the client's own group.
                trainer._measure(of_group)
                updates |= {update.task.client: update for update in of_group}
        return [updates[task.client] for task in block.tasks]

    def train(self, broadcasts: Mapping[int, Broadcast], blocks: list[Block]) -> WorkerResult:
        """Train blocks and sum the uploads of their clients; evaluate the clients of other blocks.

        Args:
            broadcasts: the versions that the clients start from, by number.
            blocks: the blocks, in the order in which they are computed.

        Returns:
            The sums, and the result of each client.

        Raises:
            ProbeError: a probe failed at a client.
            ContractError: the server rule's `sent_to` returns something that is forbidden.
        """
        began = time.perf_counter()
        total = UploadSum(self.uploads)
        evaluations = []
        for block in blocks:
            if block.evaluates:
                evaluations += self.evaluate_block[block.evaluates](broadcasts, block)
            else:
                self.add_block(broadcasts, block, total)
        outcome = total.outcome()
        outcome.evaluations = evaluations
        # Any client will do: what `sent_to` returns has the same shapes for all of them.
        a_client = next((task.client for block in blocks for task in block.tasks), 0)
        outcome.versions = {
            base: self.personal.received_bytes(self.sent_to(broadcast, a_client))
            for base, broadcast in broadcasts.items()
        }
        outcome.seconds = time.perf_counter() - began
        return outcome

    def add_block(
        self, broadcasts: Mapping[int, Broadcast], block: Block, total: UploadSum
    ) -> None:
        """Train a block and add the uploads of its clients to `total`.

        Args:
            broadcasts: the versions that the clients start from, by number.
            block: the clients to train.
            total: the sum of the worker's blocks; changed in place.
        """
        if self.groups:
            total.add(self._train_groups(broadcasts, block))
            return
        updates = self.train_block(broadcasts, block)
        self._measure(updates)
        total.add(updates)

    @abstractmethod
    def train_block(self, broadcasts: Mapping[int, Broadcast], block: Block) -> list[ClientUpdate]:
        """Train the clients of a block.

        Args:
            broadcasts: the versions that the clients start from, by number.
            block: the clients to train.

        Returns:
            The single updates, in the order of the block. An update whose rule raised has an
            `error`.
        """

    def arrive(
        self, rule: ClientRule, broadcast: Broadcast, client_task: ClientTask
    ) -> PreparedClient:
        """Prepare a client for its local steps; afterwards `self.loop` is its task.

        Args:
            rule: the client rule in the round of the client's version.
            broadcast: the version that the client starts from.
            client_task: the task of the client.

        Returns:
            The client with its state before the first local step.

        Raises:
            ContractError: the rule returns something that its contract forbids.
        """
        mine = self.clients.client(client_task.client)
        received = self.receive(rule, broadcast, client_task, mine)
        broadcast, data, client_state = received.broadcast, received.data, received.client_state
        state = rule.init(broadcast.shared, client_state, data, self.loop)
        check_dict(rule, "init", state)
        if "w" in state:
            raise breach(
                rule,
                "init",
                'returns "w", which the engine sets: local steps start at what `begin` returns, by '
                'default shared["x"]; omit it',
            )
        state = {"w": self.loop.local_params, **received.carried, **state}
        prepared = (
            # A pass may have more batches than the client makes steps.
            islice(self.prepare_batches(rule, broadcast, client_task, mine), client_task.steps)
            if rule.prepares
            else ()
        )
        return PreparedClient(
            client_task,
            rule,
            broadcast,
            mine,
            data,
            client_state,
            state,
            received.local_params,
            received.buffers,
            self.loop.settings,
            list(prepared),
            self.loop.optimizer_state,
            self.loop.logged or {},
        )

    def receive(
        self, rule: ClientRule, broadcast: Broadcast, client_task: ClientTask, mine: np.ndarray
    ) -> ReceivedModel:
        """Give a client the broadcast; afterwards `self.loop` is its task.

        Args:
            rule: the client rule in the round of the client's version.
            broadcast: the version of the model.
            client_task: the task of the client.
            mine: [n], positions of the client's examples.

        Returns:
            The client with its parameters, statistics, state and examples before its local steps.

        Raises:
            ContractError: the rules' `sent_to`, `state` or `begin` returns something that is
                forbidden.
        """
        t, client, local = client_task.base, client_task.client, self.config.local
        tests, vals = self.parts.tests, self.parts.vals
        data = LocalData(
            len(mine),
            self.average,
            lambda augment=False: self.client_batches.whole(mine, client_task if augment else None),
            tests and partial(tests, client),
            vals and partial(vals, client),
        )
        broadcast = self.personal.received(
            self.sent_to(broadcast, client), client_task.client_state
        )
        n_updates = local.n_updates(client_task.steps)
        self.loop.start(
            # Outside of local steps `task.lr` is their mean, if it varies within the round.
            replace(self.constants, t=t, lr=local.step_sizes.mean(t, n_updates)),
            broadcast.global_params,
            broadcast.buffers,
            n_updates,
            fresh=lambda: fresh_model(self.config, self.model, client),
            client=client,
            optimizer_state=self._kept_optimizer_state(client_task),
        )
        client_state = kept_or_new_state(rule, self.loop, client_task)
        return begin_client(rule, broadcast, client_state, data, self.loop)

    def sent_to(self, broadcast: Broadcast, client: int) -> Broadcast:
        """Return what the server sends one client of a version of the model.

        What the engine has added to the broadcast goes to every client.

        Args:
            broadcast: the version.
            client: number of the client.

        Raises:
            ContractError: `sent_to` returns something that its contract forbids.
        """
        rule = self.server
        if not overridden(rule, ["sent_to"]):
            return broadcast
        shared = rule.sent_to(broadcast.shared, client)
        check_sent_to(rule, shared, broadcast.global_params)
        of_engine = {k: v for k, v in broadcast.shared.items() if k not in rule.provides}
        return Broadcast({**of_engine, **shared}, broadcast.buffers)

    def _kept_optimizer_state(self, client_task: ClientTask) -> State | None:
        """Return the state of the optimizer that a client kept; None if it starts anew."""
        optimizer = self.constants.optimizer
        if optimizer is None or self.config.local.optimizer.state == "reset":
            return None
        return kept_state(optimizer, client_task.client_state or {}, self.x0)

    def prepare_batches(
        self, rule: ClientRule, broadcast: Broadcast, client_task: ClientTask, mine: np.ndarray
    ) -> Iterator[tuple[Batch, ...]]:
        """Yield the batches that the rule prepares for each batch of one pass.

        `self.loop` has to be the task of the client.

        Args:
            rule: the client rule in the round of the client's version.
            broadcast: the version that the client starts from.
            client_task: the task of the client.
            mine: [n], positions of the client's examples.
        """
        return (
            rule.prepare(broadcast.shared, batch, self.loop)
            for batch in self.client_batches.one_pass(client_task, mine)
        )

    def _measure(self, updates: list[ClientUpdate]) -> None:
        """Let probes measure the clients that they requested; an error of a probe ends the run."""
        for update in updates:
            if update.client is not None and update.error is None:
                for name, request in update.task.requests.items():
                    update.measured[name] = self.parts.measures[name](
                        self, update.client, update, request
                    )


Measure = Callable[[Trainer, PreparedClient, ClientUpdate, Any], dict[str, Any]]
"""Measures a client after its training; the last argument is the probe's request."""
