"""The clients of a block side by side, as one under vmap: for small nets, and on GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from raysim.rules.contract import ClientRule
from raysim.system.signals import reraise_stop
from raysim.training.client_start import PreparedClient
from raysim.training.groups import ClientGroup, WorkerParts
from raysim.training.messages import Block, Broadcast, ClientTask
from raysim.training.trainers.cuda_graphs import CudaGraphCache
from raysim.training.trainers.trainer import Trainer
from raysim.training.trainers.vmap_block import VmapBlock, divided
from raysim.training.uploads.client_update import ClientUpdate, failed_update


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
            rule_state, task.optimizer_state = divided(state)
            task.logged = {**client.logged, **block.log.of(k)}
            return self.finish.update(client, rule_state, block.losses[k], task)
        except BaseException as error:
            reraise_stop(error)
            return failed_update(client.task)
