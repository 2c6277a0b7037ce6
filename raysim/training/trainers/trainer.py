"""The base class of the trainers of all modes.

A block is the unit of work. Its result is a pure function of the broadcast, its tasks, the data and
the seed of the run. Any worker can therefore compute it, and compute it again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_map_only

from raysim.errors import ContractError
from raysim.models.default_device import brought_to, tensors_on
from raysim.rules.contract import State
from raysim.rules.errors.returned_values import declared_noise
from raysim.rules.errors.user_code import translate_errors
from raysim.training.batches.client_batches import ClientBatches
from raysim.training.client_start import ClientStart, PreparedClient
from raysim.training.groups import ClientGroup, WorkerParts
from raysim.training.messages import Block, Broadcast, ClientTask
from raysim.training.personal import personal_parts
from raysim.training.tasks.fast_gradient import matches_autograd
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.tasks.optimizers import kept, make_optimizer
from raysim.training.uploads.client_finish import ClientFinish
from raysim.training.uploads.client_update import ClientUpdate
from raysim.training.uploads.upload_chain import UploadChain
from raysim.training.uploads.upload_sum import UploadLayout, UploadSum

TrainingMode = Literal["loop", "lanes", "pooled"]
"""Mode in which the clients of a block train: one after the other, side by side, or as one."""


class Trainer(ABC):
    """Trains the clients of one group on one device, with the data, the net and the client rule.

    A subclass implements `train_block`.
    """

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
        self.settings = self._constants()
        """The constants of the training of all clients, for version 0 of the model."""
        self.task = LoopTask(model, self.settings, fast=matches_autograd(model))
        """The nets on which one client after the other trains; each client's start sets them."""
        channels_last = model.channels_last and model.device.type == "cpu"
        # `noise` is code of the rule's, and may raise anything.
        with tensors_on(model.device), translate_errors(ContractError):
            noise = declared_noise(client, client.noise(self.task))
        self.client_batches = ClientBatches(
            config, model, parts.examples, client.dropout_masks, channels_last, noise
        )
        self.start = ClientStart(config, parts, self.personal, self.settings, self.client_batches)
        self.finish = ClientFinish(config, parts.server, self.uploads, self._chain())

    def _constants(self) -> LocalSettings:
        """Return the constants of the training of all clients, for version 0 of the model."""
        local, rule, parts = self.config.local, self.rule, self.parts
        privacy = self.config.example_privacy
        return LocalSettings(
            t=0,
            lr=local.step_sizes.of_step(0),
            weight_decay=local.weight_decay,
            clip=local.max_grad_norm,
            privacy=privacy,
            guarded=privacy is not None and not rule.unprotected_uploads,
            x0=parts.x0,
            decayed=parts.model.decayed() if local.weight_decay else None,
            seed=self.config.seed,
            optimizer=make_optimizer(local.optimizer),
            group=self.group.name,
            public=parts.public if rule.needs_public_data else None,
        )

    def _chain(self) -> UploadChain | None:
        """Return the stages of the uploads of the group; None if there are none."""
        group = self.group
        if not group.stages:
            return None
        shapes = self.personal.compacted_shapes(self.model.shapes)
        key = self.config.upload_key(group.name)
        return UploadChain(group.stages, group.rule, self.sent, shapes, self.config.seed, key)

    def examples_of(self, tasks: Sequence[ClientTask]) -> list[np.ndarray]:
        """Return the positions [n] of the examples of each client in the round of its version.

        Args:
            tasks: the tasks of the clients.
        """
        return [self.clients.at(task.base).client(task.client) for task in tasks]

    @property
    def uncaptured_steps(self) -> int:
        """Number of local steps so far that lanes could not capture as CUDA graphs."""
        return 0

    def new_state(self) -> State:
        """Return what rule, optimizer and stages keep of a client that has not trained yet."""
        with tensors_on(self.model.device):
            state = brought_to(self.rule.state(self.task), self.model.device)
        optimizer, chain = self.settings.optimizer, self.finish.chain
        if optimizer is not None and self.config.local.optimizer.state == "keep":
            state |= kept(optimizer.start(self.x0), self.task.segments)
        if chain is not None:
            state |= chain.new_memory(self.uploads.declared, self.x0)
        return state

    def add_block(
        self, broadcasts: Mapping[int, Broadcast], block: Block, total: UploadSum
    ) -> None:
        """Train a block and add the uploads of its clients to `total`.

        Args:
            broadcasts: the versions that the clients start from, by number.
            block: the clients to train.
            total: the sum of the worker's blocks; changed in place.
        """
        total.add(self.train_and_measure(broadcasts, block))

    def train_and_measure(
        self, broadcasts: Mapping[int, Broadcast], block: Block
    ) -> list[ClientUpdate]:
        """Train a block, and let probes measure the clients that they requested.

        Args:
            broadcasts: the versions that the clients start from, by number.
            block: the clients to train.

        Returns:
            The single updates, as of `train_block`.

        Raises:
            ProbeError: a probe failed at a client, which ends the run.
        """
        updates = self.train_block(broadcasts, block)
        for update in updates:
            client = update.client
            if client is not None and update.error is None:
                for name, request in update.task.requests.items():
                    measure = self.parts.measures[name]
                    with tensors_on(self.model.device):
                        measured = measure(self, client, update, request)
                    # Another process may have no GPU, or another one.
                    update.measured[name] = tree_map_only(Tensor, Tensor.cpu, measured)
        return updates

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


Measure = Callable[[Trainer, PreparedClient, ClientUpdate, Any], dict[str, Any]]
"""Measures a client after its training; the last argument is the probe's request."""
