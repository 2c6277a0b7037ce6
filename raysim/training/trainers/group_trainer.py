"""The trainer of a worker: blocks of clients of several groups, and the sums of their uploads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import torch

from raysim.data.examples import free_bytes
from raysim.models.checks.hidden_changes import HiddenChanges
from raysim.training.messages import Block, Broadcast, ClientEvaluation, WorkerResult
from raysim.training.trainers.trainer import Trainer
from raysim.training.uploads.client_update import ClientUpdate
from raysim.training.uploads.upload_sum import UploadSum

EvaluateBlock = Callable[[Mapping[int, Broadcast], Block], list[ClientEvaluation]]
"""Evaluation of the clients of a block, with the versions of the model by number."""


class GroupTrainer:
    """Trains the blocks of a worker, each client by the trainer of its group.

    Args:
        trainers: the trainer of the clients that are in no group, then one for each group in the
            order of the configuration.
        members: [N], the group of each client, from 1, and 0 for a client of none; None without
            groups.
    """

    def __init__(self, trainers: Sequence[Trainer], members: np.ndarray | None = None):
        self.trainers = list(trainers)
        self.members = members
        # A rule that changes frozen parameters changes the outputs too.
        changes_frozen = self.trainers[0].parts.server.changes_frozen
        watched = [] if changes_frozen else self.trainers
        self.watches = [HiddenChanges(trainer.task.trained, trainer.rule) for trainer in watched]
        self.serves_this_process = False
        """True if the engine runs in this process; only then may results hold tensors on a GPU."""
        self._states_stay: bool | None = None
        self.evaluate_block: dict[str, EvaluateBlock] = {}
        """Evaluate the clients of a block, by the examples on which they are evaluated."""
        if members is not None:
            self._pad_states()

    def _pad_states(self) -> None:
        """Let the clients of all groups keep the same tensors; those of other groups are zeros."""
        states = [trainer.new_state() for trainer in self.trainers]
        everything = {key: value for state in states for key, value in state.items()}
        for trainer, state in zip(self.trainers, states, strict=True):
            trainer.finish.padding = {
                key: torch.zeros_like(value)
                for key, value in everything.items()
                if key not in state
            }

    def states_stay(self, nbytes: int) -> bool:
        """Return whether what clients keep stays on the GPU, which is decided once.

        It does if the states of all clients fit into `client_state.memory` and into a quarter of
        the memory that is free: a round has the states of its clients before and after it.

        Args:
            nbytes: bytes of the state of one client.
        """
        if self._states_stay is None:
            config, clients = self.trainers[0].config, self.trainers[0].parts.clients
            self._states_stay = False
            if self.serves_this_process and config.resources.gpus:
                room = min(config.client_state.memory, free_bytes(config.resources.gpus) // 4)
                self._states_stay = nbytes * len(clients) <= room
        return self._states_stay

    def of_client(self, client: int) -> Trainer:
        """Return the trainer of a client's group.

        Args:
            client: number of the client.
        """
        return self.trainers[0 if self.members is None else self.members[client]]

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
            ConfigError: the net's passes depend on something that no vector holds.
        """
        began = time.perf_counter()
        uncaptured = self._uncaptured_steps()
        first = self.trainers[0]
        total = UploadSum(first.uploads, self.states_stay)
        evaluations = []
        is_last = max(broadcasts, default=0) + 1 >= first.config.rounds
        with ExitStack() as watches:
            for watch in self.watches:
                watches.enter_context(watch.watched(is_last))
            for block in blocks:
                if block.evaluates:
                    evaluations += self.evaluate_block[block.evaluates](broadcasts, block)
                elif self.members is None:
                    first.add_block(broadcasts, block, total)
                else:
                    total.add(self._train_by_group(broadcasts, block))
        outcome = total.outcome()
        outcome.evaluations = evaluations
        # Any client will do: what `sent_to` returns has the same shapes for all of them.
        a_client = next((task.client for block in blocks for task in block.tasks), 0)
        outcome.versions = {
            base: first.personal.received_bytes(first.start.sent_to(broadcast, a_client))
            for base, broadcast in broadcasts.items()
        }
        outcome.uncaptured_steps = self._uncaptured_steps() - uncaptured
        outcome.seconds = time.perf_counter() - began
        return outcome

    def _uncaptured_steps(self) -> int:
        """Return the number of local steps so far that lanes could not capture."""
        return sum(trainer.uncaptured_steps for trainer in self.trainers)

    def _train_by_group(
        self, broadcasts: Mapping[int, Broadcast], block: Block
    ) -> list[ClientUpdate]:
        """Divide a block by group, and return the updates in the order of the block."""
        assert self.members is not None
        updates = {}
        for k, trainer in enumerate(self.trainers):
            tasks = [task for task in block.tasks if self.members[task.client] == k]
            if tasks:
                of_group = trainer.train_and_measure(broadcasts, Block(block.index, tasks))
                updates |= {update.task.client: update for update in of_group}
        return [updates[task.client] for task in block.tasks]
