"""The clients of a block side by side on a GPU, each on a lane of its own.

On a CPU clients train one after the other, as in mode loop.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping

import torch

from raysim.training.batches.client_batches import PrefetchedBatches
from raysim.training.client_start import PreparedClient
from raysim.training.groups import ClientGroup, WorkerParts
from raysim.training.messages import Block, Broadcast, ClientTask
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.trainers.cuda_graphs import CudaGraphs, Graphs
from raysim.training.trainers.host_graphs import HostGraphs, rehearses
from raysim.training.trainers.lane import CaptureError, Captures, Lane
from raysim.training.trainers.local_steps import LocalSteps
from raysim.training.trainers.loop_trainer import LoopTrainer
from raysim.training.uploads.client_update import ClientUpdate

logger = logging.getLogger("raysim")

MAX_LANES = 16
"""Limit on the lanes of a trainer; more of them would wait for Python, which launches kernels."""

MEMORY_MARGIN = 2
"""Factor of the memory that the first client took: captured steps hold memory of their own."""


def graphs_of(device: torch.device) -> Graphs | None:
    """Return streams and graphs of a device; None for a CPU that does not rehearse a GPU.

    Args:
        device: the device.
    """
    if device.type == "cuda":
        return CudaGraphs()
    return HostGraphs() if rehearses() else None


class LaneTrainer(LoopTrainer):
    """Trains the clients of a block side by side; the bits of a client do not depend on its block.

    Args:
        group: the clients to train, with their rule and configuration.
        parts: what all groups share.
    """

    def __init__(self, group: ClientGroup, parts: WorkerParts):
        super().__init__(group, parts)
        graphs = graphs_of(self.model.device)
        self.captures: Captures | None = None
        if graphs is not None:
            self.captures = Captures(graphs, self.config.batching.capture)
            if self.model.draws:  # a graph would not seed the generators again
                self.captures.reason = (
                    "the net draws random numbers, other than masks of nn.Dropout"
                )
        self.lanes: list[Lane] = []
        self.limit: int | None = self.config.batching.lanes
        """Largest number of lanes; None until the first client has shown what one needs."""
        self.taken: Callable[[], int] | None = None
        """Returns the bytes that the first client took; None before it trains."""

    @property
    def uncaptured_steps(self) -> int:
        """Number of local steps that could not be captured so far."""
        return 0 if self.captures is None else self.captures.uncaptured

    @property
    def refusals(self) -> list[str]:
        """Why local steps cannot be captured, with the line of the rule; [] if they can."""
        return [] if self.captures is None else self.captures.reasons

    @property
    def has_captured(self) -> bool:
        """Whether at least one local step has a graph."""
        return any(lane.has_captured for lane in self.lanes)

    def train_block(self, broadcasts: Mapping[int, Broadcast], block: Block) -> list[ClientUpdate]:
        """Train the clients of a block side by side. See `Trainer.train_block`."""
        if self.captures is None:
            return super().train_block(broadcasts, block)
        while True:
            try:
                return self._train_on_lanes(self.captures, broadcasts, block)
            except torch.OutOfMemoryError:
                if self.limit == 1 and len(self.lanes) <= 1:
                    raise
                self.limit = max(1, len(self.lanes) // 2)
                logger.warning(
                    "the GPU is out of memory: block %d trains again, on lanes=%d (batching.lanes)",
                    block.index,
                    self.limit,
                )
            except CaptureError as error:
                self.captures.enabled = False
                logger.warning("block %d trains again without captures: %s", block.index, error)
            # Outside of the handlers nothing refers to the tensors of the failed attempt.
            self._start_over()

    def _start_over(self) -> None:
        """Take new streams, and new memory for graphs, after the failed attempt has ended."""
        graphs = graphs_of(self.model.device)
        assert self.captures is not None and graphs is not None
        # Its kernels may still write to the nets of the first lane, which are used again.
        self.captures.graphs.wait()
        self.lanes.clear()
        gc.collect()
        self.captures.graphs = graphs

    def _train_on_lanes(
        self, captures: Captures, broadcasts: Mapping[int, Broadcast], block: Block
    ) -> list[ClientUpdate]:
        """Train a block; raise OutOfMemoryError if fewer lanes may help."""
        graphs, rules = captures.graphs, self.rules_of(block)
        updates: list[ClientUpdate] = []
        used: list[Lane] = []
        mine = self.examples_of(block.tasks)
        batches = PrefetchedBatches(self.client_batches, block.tasks, mine, apart=True)
        for k, client_task in enumerate(block.tasks):
            lane = self._lane(captures, k)
            if lane not in used:
                graphs.fork(lane.stream)
                used.append(lane)
            with graphs.on(lane.stream):
                update = self.train_client(
                    lane.task,
                    rules[client_task.base],
                    broadcasts[client_task.base],
                    client_task,
                    batches.batches(k),
                )
            updates.append(update)
        for lane in used:
            graphs.join(lane.stream)
        return updates

    def _lane(self, captures: Captures, k: int) -> Lane:
        """Return the lane of client `k` of a block."""
        if k and self.limit is None:
            self.limit = self._affordable(captures.graphs)
        k %= self.limit or 1
        if k == len(self.lanes):
            if self.taken is None:
                self.taken = captures.graphs.watch_memory()
            # The first lane has the nets that are there anyway.
            task = self.task
            if k:
                task = LoopTask(self.model, self.settings, fast=task.fast is not None)
            self.lanes.append(Lane(self.config, task, captures))
        return self.lanes[k]

    def _affordable(self, graphs: Graphs) -> int:
        """Return how many lanes there is memory for, after the first client on the first one."""
        assert self.taken is not None
        more = graphs.free_bytes(self.config.resources.gpus) // (
            MEMORY_MARGIN * max(self.taken(), 1)
        )
        return max(1, min(MAX_LANES, 1 + more))

    def steps_of(self, task: LoopTask, client: PreparedClient) -> LocalSteps:
        """Return the local steps of a client on its lane. See `LoopTrainer.steps_of`."""
        for lane in self.lanes:
            if lane.task is task:
                return lane.steps_of(client)
        return super().steps_of(task, client)

    def failed(self, client_task: ClientTask, error: BaseException) -> ClientUpdate:
        """Return the update of a client that raised, unless the block can train again.

        See `LoopTrainer.failed`.
        """
        on_fewer = isinstance(error, torch.OutOfMemoryError) and len(self.lanes) > 1
        if on_fewer or isinstance(error, CaptureError):
            try:
                raise error
            finally:
                # This frame is in the traceback: the circle would keep the attempt's memory.
                del error
        return super().failed(client_task, error)
