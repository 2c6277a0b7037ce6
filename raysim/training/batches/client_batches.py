"""Batches of the clients' examples, with augmentation, dropout masks and noise.

Order and random numbers depend on the seed of the run, the client and the round only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.config.schema import Config
from raysim.data import Examples
from raysim.data.examples import NUMBERS_PER_AUGMENTATION
from raysim.models.flat import Model
from raysim.numerics.inner_products import ROW_ALIGNMENT
from raysim.randomness import generator
from raysim.rules.batch import Batch
from raysim.training.batches.batch_order import batch_positions, batch_slice, batches_per_pass
from raysim.training.batches.pooled_batch import PooledBatch
from raysim.training.batches.step_numbers import StepNumbers
from raysim.training.messages import ClientTask

MAX_SEED = 2**32
"""Seeds of a net that draws are below this number, as NumPy's have to be."""

PREFETCH_EXAMPLES = 1024
"""Number of examples that are gathered and normalised together in loop mode, in whole batches."""

CLIENT_RULE, NOISE = "client rule ", "noise "
"""Beginnings of the purposes of numbers that a client rule draws, and of those that it declares."""

AUGMENT, DROPOUT, PRIVATE_NOISE, RULE_NOISE = "augment", "dropout", "noise", CLIENT_RULE + NOISE
NET = "net"
"""Purposes of random numbers in a step; names of a rule's follow the last."""


class ClientBatches:
    """Gathers the batches of tasks. `mine` [n] are the positions of a client's examples."""

    def __init__(
        self,
        config: Config,
        model: Model,
        examples: Examples,
        masks: int,
        channels_last: bool,
        noise: Mapping[str, tuple[tuple[Any, ...], str]] | None = None,
    ):
        """Store the data and the settings of a run.

        Args:
            config: the configuration.
            model: the net.
            examples: the training set, on the device of the model.
            masks: number of independent sets of dropout masks in a step.
            channels_last: whether images use this memory format.
            noise: shape and distribution of the random numbers of a step that the rule declares, by
                name; None: none.
        """
        self.config = config
        self.model = model
        self.examples = examples
        self.sets = masks
        self.channels_last = channels_last
        self.noise_specs = noise or {}
        self.purposes = self._purposes()
        """Shape and distribution of the random numbers of a step, by purpose."""
        self.needs_two = model.needs_two_examples
        """True if a last batch of one joins the batch before."""
        self.drop_last = config.local.drop_last
        """True if a last batch that is not full is left out."""

    def _purposes(self) -> dict[str, tuple[tuple[Any, ...], str]]:
        """Return shape and distribution of the random numbers of a step, by purpose."""
        purposes: dict[str, tuple[tuple[Any, ...], str]] = {}
        private = self.config.example_privacy
        if self.examples.pad or self.examples.flip:
            purposes[AUGMENT] = ("B", NUMBERS_PER_AUGMENTATION), "uniform64"
        if self.model.dropouts:
            purposes[DROPOUT] = (), "uniform"  # see `_count`
        if self.model.draws:
            purposes[NET] = (self.sets,), "uniform64"
        if private is not None and private.noise_multiplier > 0:
            purposes[PRIVATE_NOISE] = (self.model.size,), "normal"
        for key, spec in self.noise_specs.items():
            purposes[RULE_NOISE + key] = spec
        return purposes

    def size(self, mine: np.ndarray) -> int:
        """Return the batch size of a client.

        Args:
            mine: [n], positions of the client's examples.
        """
        return self.config.local.size_of_batches(len(mine))

    def images(
        self, indices: np.ndarray, draws: np.random.Generator | np.ndarray | None
    ) -> tuple[Tensor, Tensor]:
        """Return examples in the memory format of the net.

        Args:
            indices: [n], positions in the training set.
            draws: random numbers of the augmentation, or their generator; None: no augmentation.

        Returns:
            Images x [n, C, H, W] and labels y [n].
        """
        x, y = self.examples.batch(indices, draws)
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last else x, y

    def batches(self, task: ClientTask, mine: np.ndarray) -> Iterator[Batch]:
        """Yield the batches of one client, one for each local step.

        Args:
            task: the client and its local steps.
            mine: [n], positions of the client's examples.

        Yields:
            Batches with inputs [B, ...], targets, dropout masks and noise. B is the batch size, or
            fewer in the last batch of a pass (one more where a single example joins it).
        """
        return PrefetchedBatches(self, [task], [mine]).batches(0)

    def whole(self, mine: np.ndarray, augmented: ClientTask | None = None) -> Iterator[Batch]:
        """Yield all examples of a client once, in batches of the configured size.

        On every net a single example that is left joins the last batch. None is left out, whatever
        `local.drop_last` is.

        Args:
            mine: [n], positions of the client's examples.
            augmented: the task for which the images are augmented; None: no augmentation.

        Yields:
            Batches with x and y in the order of the client's examples, without dropout masks and
            noise.
        """
        draws = augmented and generator(
            self.config.seed, "augment whole", augmented.base, augmented.client
        )
        for part in self._slices(mine, needs_two=True, drop_last=False):
            yield Batch(*self.images(mine[part], draws))

    def one_pass(self, task: ClientTask, mine: np.ndarray) -> Iterator[Batch]:
        """Yield a shuffled and augmented pass over a client's examples, without dropout.

        Rules prepare batches from it, see `ClientRule.prepare`.

        Args:
            task: the client; its number and base version key the order and the augmentation.
            mine: [n], positions of the client's examples.

        Yields:
            Batches with x and y in the order of the pass, without dropout masks and noise.
        """
        size, seed = self.size(mine), self.config.seed
        rng = generator(seed, "made", task.base, task.client)
        shuffled = rng.permutation(len(mine)) if len(mine) > size else np.arange(len(mine))
        draws = generator(seed, "augment made", task.base, task.client)
        for part in self._slices(mine, self.needs_two, self.drop_last):
            yield Batch(*self.images(mine[shuffled[part]], draws))

    def _slices(self, mine: np.ndarray, needs_two: bool, drop_last: bool) -> Iterator[slice]:
        """Yield the place of each batch in one pass over a client's examples."""
        n, size = len(mine), self.size(mine)
        for i in range(batches_per_pass(n, size, needs_two, drop_last)):
            yield batch_slice(i, n, size, needs_two, drop_last)

    def pool(self, tasks: list[ClientTask], mine: list[np.ndarray]) -> PooledBatch:
        """Gather the batches of tasks with one step each.

        Args:
            tasks: the clients; one without examples has an empty batch.
            mine: [n] for each client, positions of its examples.

        Returns:
            The examples of all clients, one client after the other.
        """
        indices = []
        for task, positions in zip(tasks, mine, strict=True):
            # A client without examples makes no step; its batch is empty.
            indices.append(positions[next(self.positions(task, positions), slice(0))])
        sizes = [len(batch) for batch in indices]
        draws = self.draws(tasks, [[size] for size in sizes])
        crops, masks = [], []
        for k, n in enumerate(sizes):
            if AUGMENT in draws:
                crops.append(draws[AUGMENT].take(k, n, NUMBERS_PER_AUGMENTATION))
            # Pooled rules have one set of masks; () if the net has no dropout.
            masks += self.masks(draws, k, n)
        x, y = self.images(np.concatenate(indices), np.concatenate(crops) if crops else None)
        drop = tuple(torch.cat(parts) for parts in zip(*masks, strict=True))
        return PooledBatch(x, y, sizes, [task.weight for task in tasks], drop)

    def positions(self, task: ClientTask, mine: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the positions of the batches of a task, see `batch_positions`.

        Args:
            task: the client, its local steps and where its stream of batches continues.
            mine: [n], positions of the client's examples.

        Yields:
            [B], positions within `mine`.
        """
        cursor = task.cursor
        if self.config.local.epochs is not None:
            # A pass had another number of batches in an earlier phase, or before a fork.
            per_pass = batches_per_pass(len(mine), self.size(mine), self.needs_two, self.drop_last)
            cursor -= cursor % max(per_pass, 1)
        return batch_positions(
            self.config.seed,
            task.client,
            len(mine),
            self.size(mine),
            cursor,
            task.steps,
            self.needs_two,
            self.drop_last,
        )

    def draws(
        self, tasks: list[ClientTask], sizes: Sequence[Sequence[int]]
    ) -> dict[str, StepNumbers]:
        """Return the random numbers of the local steps of tasks, by purpose.

        Args:
            tasks: the tasks; their clients and base versions key the numbers.
            sizes: for each task the sizes of its batches.
        """
        draws = {}
        for purpose, (shape, distribution) in self.purposes.items():
            counts = [sum(self._count(purpose, shape, n) for n in of_task) for of_task in sizes]
            draws[purpose] = StepNumbers(
                self.config.seed, purpose, distribution, tasks, counts, self.model.device
            )
        return draws

    def _count(self, purpose: str, shape: Sequence[int | str], n: int) -> int:
        """Return how many random numbers a step with n examples needs for a purpose."""
        if purpose == DROPOUT:
            return self.sets * sum(math.prod(mask.shape(n)) for mask in self.model.dropouts)
        return math.prod(_of_batch(shape, n))

    def private_noise(self, draws: Mapping[str, StepNumbers], k: int) -> Tensor | None:
        """Draw standard normal noise [P] for one private step; None without noise.

        Args:
            draws: the random numbers of tasks, as `draws` returns them.
            k: index of the task.
        """
        if PRIVATE_NOISE not in draws:
            return None
        return draws[PRIVATE_NOISE].take(k, self.model.size).to(self.model.dtype)

    def noise(self, draws: Mapping[str, StepNumbers], k: int, n: int) -> dict[str, Tensor]:
        """Draw the random numbers of one step that the rule declares.

        Args:
            draws: the random numbers of tasks.
            k: index of the task.
            n: number of examples, for shapes that begin with "B".

        Returns:
            The numbers by name; {} without any.
        """
        drawn = {}
        for key, (shape, _) in self.noise_specs.items():
            numbers = draws[RULE_NOISE + key].take(k, *_of_batch(shape, n))
            drawn[key] = numbers.to(self.model.dtype)
        return drawn

    def masks(
        self, draws: Mapping[str, StepNumbers], k: int, n: int
    ) -> tuple[tuple[Tensor, ...], ...]:
        """Draw the dropout masks of one step, scaled to keep the mean, and the seeds of the net.

        Args:
            draws: the random numbers of tasks.
            k: index of the task.
            n: number of examples.

        Returns:
            The masks of all layers, [n, ...] where each example has one of its own, for each
            independent set; of a net that draws, an integer on the CPU comes last, the seed of a
            pass. () without both.
        """
        if not draws.keys() & {DROPOUT, NET}:
            return ()
        sets = []
        for _ in range(self.sets):
            masks = []
            for mask in self.model.dropouts:
                # In place, which is several times as fast on a CPU.
                kept = draws[DROPOUT].take(k, *mask.shape(n)).ge_(mask.rate)
                # The limit avoids 0 / 0 at rate 1.
                masks.append(kept.to(self.model.dtype).mul_(1 / max(1 - mask.rate, 1e-30)))
            if NET in draws:
                masks.append(draws[NET].take(k, 1).mul_(MAX_SEED).long())
            sets.append(tuple(masks))
        return tuple(sets)


def _of_batch(shape: Sequence[int | str], n: int) -> tuple[int, ...]:
    """Return the shape of numbers in a batch of `n` examples, where "B" stands for `n`."""
    return tuple(n if isinstance(size, str) else size for size in shape)


class PrefetchedBatches:
    """Batches of several tasks that train one after the other.

    A few batches are gathered and normalised together, also those of different clients. Every batch
    starts at a memory boundary, so that its bits do not depend on the batches before it.
    """

    def __init__(
        self,
        client_batches: ClientBatches,
        tasks: list[ClientTask],
        mine: list[np.ndarray],
        apart: bool = False,
    ):
        """Plan the batches of all tasks.

        Args:
            client_batches: gathers the examples.
            tasks: the tasks, in the order in which they train.
            mine: [n] for each client, positions of its examples.
            apart: whether batches of different tasks are gathered apart, because the tasks train on
                streams of their own.
        """
        self.client_batches = client_batches
        by_task = [
            [positions[batch] for batch in client_batches.positions(task, positions)]
            for task, positions in zip(tasks, mine, strict=True)
        ]
        sizes = [[len(indices) for indices in batches] for batches in by_task]
        self.draws = client_batches.draws(tasks, sizes)
        if apart:
            # On one stream, before those of the tasks start.
            for numbers in self.draws.values():
                numbers.compute_all()
        self.indices = [indices for batches in by_task for indices in batches]
        """Positions in the training set, for each batch of all tasks."""
        self.owners = [k for k, batches in enumerate(by_task) for _ in batches]
        """Index of the task of each batch."""
        self.firsts = list(accumulate(map(len, by_task), initial=0))
        """Index of the first batch of each task, and the number of all batches."""
        self.groups = self._groups(apart)
        """Batches that are gathered together, by their index."""
        self.ready: dict[int, tuple[Tensor, Tensor]] = {}
        """The x and y of the batches of the last group that was gathered."""
        self.unit = ROW_ALIGNMENT // math.gcd(client_batches.examples.x[:1].numel(), ROW_ALIGNMENT)
        """Number of examples; every multiple of it ends at a memory boundary."""

    def _groups(self, apart: bool) -> list[list[int]]:
        """Return the batches that are gathered together, about `PREFETCH_EXAMPLES` examples."""
        groups: dict[tuple[int, int], list[int]] = {}
        n_before = 0
        for i, (owner, indices) in enumerate(zip(self.owners, self.indices, strict=True)):
            key = (owner if apart else 0, n_before // PREFETCH_EXAMPLES)
            groups.setdefault(key, []).append(i)
            n_before += len(indices)
        return list(groups.values())

    def batches(self, k: int) -> Iterator[Batch]:
        """Yield the batches of task `k`. Call it in the order of the tasks.

        A task that fails may leave batches unused; the next task skips them.

        Args:
            k: index of the task.

        Yields:
            The batches of the task's local steps, as from `ClientBatches.batches`.
        """
        client_batches, draws = self.client_batches, self.draws
        for i in range(self.firsts[k], self.firsts[k + 1]):
            while i not in self.ready:
                self.ready = self._gather(self.groups[0])
                self.groups.pop(0)
            x, y = self.ready[i]
            yield Batch(
                x,
                y,
                client_batches.masks(draws, k, len(y)),
                noise=client_batches.noise(draws, k, len(y)),
                private_noise=client_batches.private_noise(draws, k),
            )

    def _gather(self, group: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """Gather the batches of a group: x [B, C, H, W] and y [B] by index of the batch."""
        sizes = [len(self.indices[i]) for i in group]
        starts = list(accumulate((-(-size // self.unit) * self.unit for size in sizes), initial=0))
        # The gaps up to the next memory boundary hold some example that nobody reads.
        places = np.repeat(self.indices[group[0]][:1], starts[-1])
        augment = self.draws.get(AUGMENT)
        crops = None if augment is None else np.zeros((starts[-1], NUMBERS_PER_AUGMENTATION))
        spans = {}
        for i, start, size in zip(group, starts, sizes, strict=False):
            span = spans[i] = slice(start, start + size)
            places[span] = self.indices[i]
            if augment is not None and crops is not None:
                crops[span] = augment.take(self.owners[i], size, NUMBERS_PER_AUGMENTATION)
        x, y = self.client_batches.images(places, crops)
        return {i: (x[span], y[span]) for i, span in spans.items()}
