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
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from raysim.config.schema import Config
from raysim.config.sections.privacy import ClientPrivacy
from raysim.data import Examples
from raysim.data.clients import Clients, VirtualClients
from raysim.errors import ContractError
from raysim.models.build import make_net
from raysim.models.flat import Model
from raysim.randomness import generator
from raysim.rules.batch import Batch
from raysim.rules.contract import ClientRule, Report, ServerRule, State, overridden
from raysim.rules.public import PublicData
from raysim.rules.task import LocalData, Task
from raysim.rules.upload_stages import UploadStage
from raysim.rules.user_code import (
    breach,
    check_begin,
    check_dict,
    check_finish,
    check_sent_to,
    check_tensors,
    declared_noise,
    translate_errors,
)
from raysim.training.batches import ClientBatches
from raysim.training.client_privacy import CLIP_NORM, with_clipped_update
from raysim.training.client_update import ClientUpdate, PreparedClient, check_report
from raysim.training.fast_gradient import matches_autograd
from raysim.training.loop_task import LoopTask
from raysim.training.messages import (
    Block,
    Broadcast,
    ClientEvaluation,
    ClientTask,
    WorkerResult,
)
from raysim.training.optimizers import KEPT, kept, make_optimizer
from raysim.training.personal import PersonalParts, personal_parts
from raysim.training.task import LocalSettings
from raysim.training.upload_chain import EncodedReport, UploadChain
from raysim.training.upload_sum import UploadLayout, UploadSum

TrainingMode = Literal["loop", "vmap", "pooled"]
"""Mode in which the clients of a block train: one after the other, side by side, or as one."""
EvaluateBlock = Callable[[Mapping[int, Broadcast], Block], list[ClientEvaluation]]
"""Evaluation of the clients of a block, with the versions of the model by number."""


@dataclass(frozen=True)
class ReceivedModel:
    """A client with the model that it received, before its local steps."""

    broadcast: Broadcast
    """The version of the model, with the client's own parts in it."""
    data: LocalData
    """Its examples, as the rule sees them."""
    client_state: State
    """State that the client kept from earlier rounds."""
    start: tuple[Tensor, Tensor]
    """Parameters [P] and BatchNorm statistics [Q] that its local steps start from."""
    carried: State
    """What `begin` returned beside them, which the local steps carry."""


class Trainer(ABC):
    """Trains blocks of clients on one device, with the data, the net and the client rule of a run.

    A subclass implements `train_block`.
    """

    channels_last: ClassVar[bool] = True
    """Whether images of a convolutional net use this memory format on a CPU."""

    def __init__(
        self,
        config: Config,
        client: ClientRule,
        server: ServerRule,
        model: Model,
        x0: Tensor,
        examples: Examples,
        clients: Clients | VirtualClients,
        measures: Mapping[str, Measure] | None = None,
        stages: Sequence[UploadStage] = (),
        personal: PersonalParts | None = None,
        group: str = "",
        public: PublicData | None = None,
        all_per_client: bool = False,
        tests: Callable[[int], LocalData] | None = None,
    ):
        """Prepare to train.

        Args:
            config: the configuration of the run.
            client: the client rule.
            server: the server rule, which declares the uploads.
            model: the net.
            x0: [P], the initial parameters of the run.
            examples: the training set, on the device of the model.
            clients: the positions of each client's examples.
            measures: functions of probes that measure a client, by the name of the probe.
            stages: the stages that change a client's uploads.
            personal: the personal parts of the model; None: those of configuration and rule.
            group: name of the group whose clients are trained.
            public: the public examples, if a client rule needs them.
            all_per_client: whether the server receives every upload client by client.
            tests: returns the test examples of a client; None if clients have none.
        """
        self.config = config
        self.group = group
        self.groups: list[Trainer] = []
        """The trainer of each group; see `add_groups`."""
        self.members: np.ndarray | None = None
        """[N], the group of each client, 0 for none; None without groups."""
        self.padding: State = {}
        """State that clients of other groups keep; all clients keep the same tensors."""
        self.rule = client
        self.public = public if client.needs_public_data else None
        self.server = server
        self.tests = tests
        self.measures = measures or {}
        self.model = model
        self.x0 = x0
        self.clients = clients
        self.personal = personal or personal_parts(config, client, model)
        if config.local.buffers == "frozen":
            model.freeze_statistics()
        self.uploads = UploadLayout.of(
            config, client, server, model, len(clients), self.personal, all_per_client
        )
        self.sent = self.uploads.sent
        self.chain = (
            UploadChain(
                stages,
                client,
                self.sent,
                self.personal.compacted_shapes(model.shapes),
                config.seed,
                config.upload_key(group),
            )
            if stages
            else None
        )
        self.average = float(clients.sizes.sum() / clients.n_training)
        self.decayed = model.decayed() if config.local.weight_decay else None
        self.evaluate_block: dict[str, EvaluateBlock] = {}
        """Evaluate the clients of a block, by the examples on which they are evaluated."""
        self.optimizer = make_optimizer(config.local.optimizer)
        self.loop = LoopTask(model, LocalSettings(), fast=matches_autograd(model))
        channels_last = model.channels_last and model.device.type == "cpu" and self.channels_last
        self.loop.settings = self._settings(0)
        with translate_errors(ContractError):
            noise = declared_noise(client, client.noise(self.loop))
        self.client_batches = ClientBatches(
            config, model, examples, client.dropout_masks, channels_last, noise
        )

    def add_groups(self, groups: Sequence[Trainer], members: np.ndarray) -> None:
        """Let the clients of each group be trained by a trainer of their own.

        Args:
            groups: the trainers, in the order of the configuration.
            members: [N], the group of each client, from 1; 0 for a client of none.
        """
        self.groups = [self, *groups]
        self.members = members
        states = [trainer._new_state() for trainer in self.groups]
        for trainer, own in zip(self.groups, states, strict=True):
            trainer.padding = {
                key: torch.zeros_like(value)
                for state in states
                for key, value in state.items()
                if key not in own
            }

    def _new_state(self) -> State:
        """Return what rule, optimizer and stages keep of a client that has not trained yet."""
        state = dict(self.rule.state(self.loop))
        if self.optimizer is not None and self.config.local.optimizer.state == "keep":
            state |= kept(self.optimizer.start(self.x0))
        if self.chain is not None:
            state |= self.chain.new_memory(self.uploads.declared, self.x0)
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
                trainer._measure(of_group)
                updates |= {update.task.client: update for update in of_group}
        return [updates[task.client] for task in block.tasks]

    def train(self, broadcasts: Mapping[int, Broadcast], blocks: list[Block]) -> WorkerResult:
        """Train blocks and sum the uploads of their clients; evaluate the clients of other blocks.

        Args:
            broadcasts: the versions that the clients start from, by number.
            blocks: the blocks, which are computed in this order.

        Returns:
            The sums, and the result of each client.
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
            block: the block.
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
            block: the block.

        Returns:
            The single updates, in the order of the block. An update whose rule raised has an
            `error`.
        """

    def _settings(self, t: int, batches: int = 0) -> LocalSettings:
        """Return the constants of the training of a client.

        Args:
            t: the version that it starts from.
            batches: number of its mini-batches, which the mean step size may depend on.
        """
        local = self.config.local
        private = self.config.example_privacy
        guarded = private is not None and not self.rule.unprotected_uploads
        return LocalSettings(
            t,
            local.step_sizes.mean(t, local.n_updates(batches)),
            local.weight_decay,
            local.max_grad_norm,
            private,
            guarded,
            self.x0,
            self.decayed,
            self.config.seed,
            self.optimizer,
            self.group,
            self.public,
        )

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
            received.start,
            list(prepared),
            self.loop.optimizer_state,
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
        """
        data = LocalData(
            len(mine),
            self.average,
            lambda augment=False: self.client_batches.whole(mine, client_task if augment else None),
            self.tests and partial(self.tests, client_task.client),
        )
        broadcast = self.sent_to(broadcast, client_task.client)
        broadcast = self.personal.received(broadcast, client_task.client_state)
        self.loop.start(
            self._settings(client_task.base, client_task.steps),
            broadcast.global_params,
            broadcast.buffers,
            self.config.local.n_updates(client_task.steps),
            fresh=lambda: self._fresh(client_task.client),
            client=client_task.client,
            optimizer_state=self._kept_optimizer_state(client_task),
        )
        client_state = self._client_state(rule, self.loop, client_task)
        start, carried = self._begin(rule, broadcast, client_state, data)
        return ReceivedModel(broadcast, data, client_state, start, carried)

    def sent_to(self, broadcast: Broadcast, client: int) -> Broadcast:
        """Return what the server sends one client of a version of the model.

        What the engine has added to the broadcast goes to every client.

        Args:
            broadcast: the version.
            client: number of the client.
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
        stored = client_task.client_state or {}
        if self.optimizer is None or self.config.local.optimizer.state == "reset":
            return None
        new = self.optimizer.start(self.x0)
        if not all(KEPT + key in stored for key in new):
            return None
        return {key: torch.tensor(stored[KEPT + key]).to(value) for key, value in new.items()}

    def _begin(
        self, rule: ClientRule, broadcast: Broadcast, client_state: State, data: LocalData
    ) -> tuple[tuple[Tensor, Tensor], State]:
        """Return parameters [P] and statistics [Q] of the start, and what the steps carry.

        They are copied into `self.loop`, which starts from the broadcast else.
        """
        w, buffers = broadcast.global_params, broadcast.buffers
        carried: State = {}
        if overridden(rule, ["begin"]):
            begun = rule.begin(broadcast.shared, client_state, data, self.loop)
            check_begin(rule, begun, w, buffers)
            w, carried = begun[0], begun[2] if len(begun) == 3 else {}
            self.loop.local_params.copy_(w)
            if begun[1] is not None:
                buffers = begun[1]
                self.loop.buffers.copy_(buffers)
        return (w, buffers), carried

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

    def _leave(
        self, rule: ClientRule, state: State, client: PreparedClient, loss: Tensor
    ) -> ClientUpdate:
        """Return the update of a client after its local steps; `self.loop` is its task."""
        task = self.loop
        task.in_steps = False
        returned = rule.finish(
            client.broadcast.shared, state, client.client_state, client.data, task
        )
        check_finish(rule, returned)
        report, rows = returned
        check_report(rule, self.sent, self.uploads.declared, report, client.client_state, rows)
        report = self.personal.without(self.uploads.rounded(report), self.sent)
        # The next client overwrites the parameters in training.
        address = task.local_params.data_ptr()
        report, rows = (
            {k: v.clone() if v.data_ptr() == address else v for k, v in tensors.items()}
            for tensors in (report, rows)
        )
        encoded = EncodedReport(report)
        if self.chain is not None:
            compacted = self.personal.compacted(report, self.sent)
            encoded = self.chain.encode(compacted, client.task)
            report = self.personal.expanded(encoded.report, report)
        if self.config.client_privacy is not None:
            report = self._clipped(report, client.broadcast, self.config.client_privacy)
        client_state = {k: v for k, v in rows.items() if k != "seen"} | self.uploads.kept(report)
        client_state |= self.padding | self.personal.kept(state["w"], task.buffers)
        if self.config.local.optimizer.state == "keep":
            client_state |= kept(task.optimizer_state)
        update = ClientUpdate(
            client.task,
            {**report, "buffers": task.buffers},
            {**client_state, **encoded.memory},
            loss,
            encoded_bytes=encoded.nbytes,
        )
        if client.task.requests:
            update.client = client
            update.local_params = state["w"].clone()
        return update

    def _clipped(self, report: Report, broadcast: Broadcast, privacy: ClientPrivacy) -> Report:
        """Return a client's report with its one upload [P] clipped, for client-level privacy."""
        key = next(iter(self.server.uploads))
        if report[key].shape != (self.model.size,):
            raise ContractError(
                f"privacy.unit: 'client' needs an upload of the model's size, but client rule "
                f"'{self.rule.name}' sends '{key}' in the shape {list(report[key].shape)}"
            )
        norm = float(broadcast.shared.get(CLIP_NORM, privacy.clip_norm))
        return with_clipped_update(report, key, norm)

    def _measure(self, updates: list[ClientUpdate]) -> None:
        """Let probes measure the clients that they requested; an error of a probe ends the run."""
        for update in updates:
            if update.client is not None and update.error is None:
                for name, request in update.task.requests.items():
                    update.measured[name] = self.measures[name](
                        self, update.client, update, request
                    )

    def _fresh(self, client: int) -> tuple[Tensor, Tensor]:
        """Return the parameters and statistics of a new net, initialised for this client."""
        seed = int(generator(self.config.seed, "fresh", client).integers(2**63))
        config = self.config.model_copy(update={"seed": seed})
        net = make_net(config, self.model.shape, self.model.classes)
        return Model(
            net,
            self.model.shape,
            self.model.classes,
            self.model.dtype,
            self.model.device,
            learning_task=self.model.learning_task,
            sample=self.model.sample,
        ).initial()

    def _client_state(self, rule: ClientRule, task: Task, client_task: ClientTask) -> State:
        """Return the state that the client kept, or its initial state, with the flag "seen"."""
        client_state = rule.state(task)
        check_tensors(rule, "state", client_state)
        if client_task.client_state is not None:
            client_state = {
                k: torch.tensor(client_task.client_state[k]).to(v.device, v.dtype).reshape(v.shape)
                for k, v in client_state.items()
            }
        return {**client_state, "seen": torch.tensor(client_task.seen, device=self.x0.device)}


Measure = Callable[[Trainer, PreparedClient, ClientUpdate, Any], dict[str, Any]]
"""Measures a client after its training; the last argument is the probe's request."""
