"""Local training of the clients of a block, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from raysim.errors import ContractError
from raysim.models.default_device import tensors_on
from raysim.rules.batch import Batch
from raysim.rules.contract import ClientRule, State
from raysim.system.signals import reraise_stop
from raysim.training.batches.client_batches import PrefetchedBatches
from raysim.training.client_start import PreparedClient
from raysim.training.messages import Block, Broadcast, ClientTask
from raysim.training.step_log import StepLog
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.trainers.local_steps import LocalSteps, Place
from raysim.training.trainers.trainer import Trainer
from raysim.training.uploads.client_update import ClientUpdate, failed_update


class LoopTrainer(Trainer):
    """Trains one client after the other; the bits of a client do not depend on its block."""

    def train_block(self, broadcasts: Mapping[int, Broadcast], block: Block) -> list[ClientUpdate]:
        """Train the clients of a block one after the other. See `Trainer.train_block`."""
        rules = self.rules_of(block)
        prefetched = PrefetchedBatches(
            self.client_batches,
            block.tasks,
            self.examples_of(block.tasks),
        )
        return [
            self.train_client(
                self.task,
                rules[client_task.base],
                broadcasts[client_task.base],
                client_task,
                prefetched.batches(k),
            )
            for k, client_task in enumerate(block.tasks)
        ]

    def rules_of(self, block: Block) -> dict[int, ClientRule]:
        """Return the client rule in the round of each version that clients of a block start from.

        Args:
            block: the clients.
        """
        return {base: self.rule.at(base) for base in {task.base for task in block.tasks}}

    def train_client(
        self,
        task: LoopTask,
        rule: ClientRule,
        broadcast: Broadcast,
        client_task: ClientTask,
        batches: Iterator[Batch],
    ) -> ClientUpdate:
        """Train one client; an error becomes part of its update.

        Args:
            task: the nets to train on; becomes the task of the client.
            rule: the client rule in the round of the client's version.
            broadcast: the version that the client starts from.
            client_task: the task of the client.
            batches: the mini-batches of its local steps.
        """
        versions = {}
        for key, tensor in broadcast.shared.items():
            if not tensor.is_inference():  # which counts no changes
                versions[key] = tensor._version
        try:
            with tensors_on(self.model.device):
                client = self.start.prepare(task, rule, broadcast, client_task)
            state = self._make_local_steps(task, client, batches)
            losses = task.losses
            loss = self.x0.new_full((), torch.nan)
            if losses:  # a client without examples makes no step
                # A net may compute in bfloat16, in which a mean would be rounded.
                loss = torch.stack(losses).to(self.x0.dtype).mean()
            with tensors_on(self.model.device):
                update = self.finish.update(client, state, loss, task)
            _check_unchanged(rule, broadcast, versions)
            return update
        except BaseException as error:
            reraise_stop(error)
            return self.failed(client_task, error)

    def failed(self, client_task: ClientTask, error: BaseException) -> ClientUpdate:
        """Return the update of a client whose training raised `error`.

        Args:
            client_task: the task of the client.
            error: the exception.
        """
        return failed_update(client_task, error)

    def steps_of(self, task: LoopTask, client: PreparedClient) -> LocalSteps:
        """Return the local steps of a client.

        Args:
            task: the task of the client.
            client: the client before its steps.
        """
        return LocalSteps(self.config, task, client)

    def _make_local_steps(
        self, task: LoopTask, client: PreparedClient, batches: Iterator[Batch]
    ) -> State:
        """Make the local steps of a client; return its state after them."""
        local, prepared = self.config.local, client.prepared
        step_sizes = local.step_sizes
        steps = self.steps_of(task, client)
        task.in_steps = True
        log = StepLog()
        for i, batch in enumerate(batches):
            if step_sizes.varies_in_a_round:
                steps.set_step_size(step_sizes.of_step(client.task.base, i // local.accumulate))
            if prepared:
                # There are batches for one pass; later passes use them again.
                batch = replace(batch, prepared=prepared[i % len(prepared)])
            steps.make(batch, Place.of(i, local.accumulate, client.task.steps))
            log.add(task.logged or {})
        steps.end()
        # `finish` sees the mean step size again, not that of the last step.
        task.settings = client.settings
        task.logged = {**client.logged, **log.numbers()}
        return steps.state


def _check_unchanged(rule: ClientRule, broadcast: Broadcast, versions: Mapping[str, int]) -> None:
    """Raise ContractError if a client has changed a tensor of the broadcast in place."""
    for key, version in versions.items():
        if broadcast.shared[key]._version != version:
            raise ContractError(
                f"client rule '{rule.name}' changes shared[\"{key}\"] in place, which other "
                "clients and the server use; write x = x + y for x += y"
            )
