"""Local training of the clients of a block, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from raysim.rules.batch import Batch
from raysim.rules.contract import PLAIN_STEP, ClientRule, State, overridden
from raysim.rules.errors.returned_values import check_direction, check_passes, check_step
from raysim.system.signals import reraise_stop
from raysim.training.batches.client_batches import PrefetchedBatches
from raysim.training.client_start import PreparedClient
from raysim.training.messages import Block, Broadcast, ClientTask
from raysim.training.step_log import StepLog
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.trainers.trainer import Trainer
from raysim.training.uploads.client_update import ClientUpdate, failed_update


class LoopTrainer(Trainer):
    """Trains one client after the other; the bits of a client do not depend on its block."""

    def train_block(self, broadcasts: Mapping[int, Broadcast], block: Block) -> list[ClientUpdate]:
        """Train the clients of a block one after the other. See `Trainer.train_block`."""
        rules = {
            base: self.rule.at(base) for base in {client_task.base for client_task in block.tasks}
        }
        prefetched = PrefetchedBatches(
            self.client_batches,
            block.tasks,
            [self.clients.client(client_task.client) for client_task in block.tasks],
        )
        return [
            self._train_client(
                rules[client_task.base],
                broadcasts[client_task.base],
                client_task,
                prefetched.batches(k),
            )
            for k, client_task in enumerate(block.tasks)
        ]

    def _train_client(
        self,
        rule: ClientRule,
        broadcast: Broadcast,
        client_task: ClientTask,
        batches: Iterator[Batch],
    ) -> ClientUpdate:
        """Train one client; an error becomes part of its update."""
        try:
            task = self.task
            client = self.start.prepare(task, rule, broadcast, client_task)
            state = self._make_local_steps(task, client, batches)
            losses = task.losses
            # A client without examples makes no step.
            loss = torch.stack(losses).mean() if losses else self.x0.new_tensor(float("nan"))
            return self.finish.update(client, state, loss, task)
        except BaseException as error:
            reraise_stop(error)
            return failed_update(client_task)

    def _make_local_steps(
        self, task: LoopTask, client: PreparedClient, batches: Iterator[Batch]
    ) -> State:
        """Make the local steps of a client; return its state after them."""
        rule, local = client.rule, self.config.local
        shared, state, prepared = client.broadcast.shared, client.state, client.prepared
        local_params = state["w"]
        plain = self.config.takes_bare_gradients and not overridden(rule, PLAIN_STEP)
        in_place = not overridden(rule, ["step"])
        step_sizes = local.step_sizes
        varies = step_sizes.varies_in_a_round
        mean = DirectionMean(local.accumulate, client.task.steps)
        task.in_steps = True
        log = StepLog(1)
        for passes, batch in enumerate(batches):
            if varies:
                lr = step_sizes.of_step(client.task.base, passes // local.accumulate)
                task.settings = replace(client.settings, lr=lr)
            if prepared:
                # There are batches for one pass; later passes use them again.
                batch = replace(batch, prepared=prepared[passes % len(prepared)])
            task.logged = {}
            if plain:
                task.descend_plainly(batch)
            elif in_place:
                direction = rule.direction(shared, state, batch, task)
                check_direction(rule, local_params, direction)
                if (direction := mean.after(direction)) is not None:
                    task.descend_in_place(local_params, direction)
            else:
                # `check_update` expects one call of `descend` in this step.
                task.updates = 0
                after = rule.step(shared, state, batch, task)
                check_step(rule, state, after)
                task.check_update(rule)
                state = after
            check_passes(rule, len(task.losses) - passes)
            log.add({name: number[None] for name, number in task.logged.items()})
        # `finish` sees the mean step size again, not that of the last step.
        task.settings = client.settings
        task.logged = {**client.logged, **log.of(0)}
        return state


class DirectionMean:
    """Mean direction of the mini-batches of a step (`local.accumulate`)."""

    def __init__(self, size: int, batches: int):
        """Begin with the first step.

        Args:
            size: mini-batches of a step.
            batches: mini-batches of all steps; the last step may have fewer.
        """
        self.size = size
        self.left = batches
        self.sum: Tensor | None = None
        self.count = 0

    def after(self, direction: Tensor) -> Tensor | None:
        """Add the direction [P] of the next mini-batch.

        Args:
            direction: [P], the descent direction of the mini-batch.

        Returns:
            The mean [P] if this completes a step, else None.
        """
        if self.size == 1:
            return direction
        self.sum = direction if self.sum is None else self.sum + direction
        self.count += 1
        self.left -= 1
        if self.count < self.size and self.left:
            return None
        mean = self.sum / self.count
        self.sum, self.count = None, 0
        return mean
