"""Batches of the clients' examples, with augmentation, dropout masks and noise.

Order and random numbers depend on the seed of the run, the client and the round only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.config.schema import Config
from raysim.data import Examples
from raysim.data.examples import NUMBERS_PER_AUGMENTATION, on_device
from raysim.models.flat import Model
from raysim.numerics.inner_products import ROW_ALIGNMENT
from raysim.randomness import generator, key_words
from raysim.rules.batch import Batch
from raysim.training.batches.batch_order import batch_positions, batch_slice, batches_per_pass
from raysim.training.batches.dropout_numbers import DropoutNumbers, HostNumbers, device_numbers
from raysim.training.batches.pooled_batch import PooledBatch
from raysim.training.messages import ClientTask

PREFETCH_EXAMPLES = 1024
"""Number of examples that are gathered and normalised together in loop mode, in whole batches."""


@dataclass
class RandomStreams:
    """Keyed streams of random numbers of one task; None where it needs none."""

    augment: np.random.Generator | None
    """Crops and flips of the images."""
    dropout: DropoutNumbers | None
    """Dropout masks."""
    private_noise: np.random.Generator | None
    """Noise of private steps."""
    noise: dict[str, np.random.Generator] = field(default_factory=dict)
    """Random numbers that the rule declares, by name."""


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
        self.needs_two = model.needs_two_examples
        """True if a last batch of one joins the batch before."""

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

        On every net a single example that is left joins the last batch.

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
        for part in self._slices(mine, needs_two=True):
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
        for part in self._slices(mine, self.needs_two):
            yield Batch(*self.images(mine[shuffled[part]], draws))

    def _slices(self, mine: np.ndarray, needs_two: bool) -> Iterator[slice]:
        """Yield the place of each batch in one pass over a client's examples."""
        n, size = len(mine), self.size(mine)
        for i in range(batches_per_pass(n, size, needs_two)):
            yield batch_slice(i, n, size, needs_two)

    def pool(self, tasks: list[ClientTask], mine: list[np.ndarray]) -> PooledBatch:
        """Gather the batches of tasks with one step each.

        Args:
            tasks: the clients; one without examples has an empty batch.
            mine: [n] for each client, positions of its examples.

        Returns:
            The examples of all clients, one client after the other.
        """
        # A client without examples makes no step; its batch is empty.
        indices = [
            positions[next(self.positions(task, positions), slice(0))]
            for task, positions in zip(tasks, mine, strict=True)
        ]
        sizes = [len(batch) for batch in indices]
        draws = self.draws(tasks, sizes)
        x, y = self.images(np.concatenate(indices), _crops(draws, sizes))
        masks = [self.masks(d, n) for d, n in zip(draws, sizes, strict=True)]
        drop = tuple(
            torch.cat(parts) for parts in zip(*(sets[0] for sets in masks if sets), strict=True)
        )
        return PooledBatch(x, y, sizes, [task.weight for task in tasks], drop)

    def positions(self, task: ClientTask, mine: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the positions of the batches of a task, see `batch_positions`.

        Args:
            task: the client, its local steps and where its stream of batches continues.
            mine: [n], positions of the client's examples.

        Yields:
            [B], positions within `mine`.
        """
        return batch_positions(
            self.config.seed,
            task.client,
            len(mine),
            self.size(mine),
            task.cursor,
            task.steps,
            self.needs_two,
        )

    def draws(self, tasks: list[ClientTask], examples: list[int]) -> list[RandomStreams]:
        """Return the keyed streams of random numbers of tasks.

        Args:
            tasks: the clients; their numbers and base versions key the streams.
            examples: for each task the number of examples in all its batches.
        """
        seed = self.config.seed
        augments = self.examples.pad or self.examples.flip
        dropouts = self._dropout_numbers(tasks, examples)
        streams = []
        for task, dropout in zip(tasks, dropouts, strict=True):
            place = task.base, task.client
            noise = {}
            for key in self.noise_specs:
                noise[key] = generator(seed, f"client rule noise {key}", *place)
            streams.append(
                RandomStreams(
                    generator(seed, "augment", *place) if augments else None,
                    dropout,
                    generator(seed, "noise", *place) if self.noisy else None,
                    noise,
                )
            )
        return streams

    def _dropout_numbers(
        self, tasks: list[ClientTask], examples: list[int]
    ) -> Sequence[DropoutNumbers | None]:
        """Return the numbers of the dropout masks of each task; None without dropout."""
        if not self.model.dropouts:
            return [None] * len(tasks)
        places = [("dropout", task.base, task.client) for task in tasks]
        seed, device = self.config.seed, self.model.device
        if device.type == "cpu":
            return [HostNumbers(generator(seed, *place)) for place in places]
        of_example = self.sets * sum(math.prod(shape) for shape, _ in self.model.dropouts)
        keys = [key_words(seed, *place) for place in places]
        return device_numbers(keys, [n * of_example for n in examples], device)

    @property
    def noisy(self) -> bool:
        """Whether local steps add noise for privacy."""
        private = self.config.example_privacy
        return private is not None and private.noise_multiplier > 0

    def private_noise(self, draws: RandomStreams) -> Tensor | None:
        """Draw standard normal noise [P] for one private step; None without noise.

        Args:
            draws: the streams of the task, as `draws` returns them.
        """
        if draws.private_noise is None:
            return None
        # Drawn on the CPU, in float32: the numbers are the same on any device and for any dtype.
        noise = draws.private_noise.standard_normal(self.model.size, dtype=np.float32)
        return on_device(noise, self.model.device, self.model.dtype)

    def noise(self, draws: RandomStreams, n: int) -> dict[str, Tensor]:
        """Draw the random numbers of one step that the rule declares.

        Args:
            draws: the streams of the task.
            n: number of examples, for shapes that begin with "B".

        Returns:
            The numbers by name; {} without any.
        """
        drawn = {}
        for key, (shape, distribution) in self.noise_specs.items():
            rng = draws.noise[key]
            draw = rng.standard_normal if distribution == "normal" else rng.random
            numbers = draw(tuple(n if size == "B" else size for size in shape), dtype=np.float32)
            drawn[key] = on_device(np.asarray(numbers), self.model.device, self.model.dtype)
        return drawn

    def masks(self, draws: RandomStreams, n: int) -> tuple[tuple[Tensor, ...], ...]:
        """Draw the dropout masks of one step, scaled to keep the mean.

        Args:
            draws: the streams of the task.
            n: number of examples.

        Returns:
            The masks [n, ...] of all layers, for each independent set; () without dropout.
        """
        numbers = draws.dropout
        if numbers is None:
            return ()
        sets = []
        for _ in range(self.sets):
            masks = []
            for shape, rate in self.model.dropouts:
                kept = numbers.take(n * math.prod(shape)).view(n, *shape) >= rate
                # The limit avoids 0 / 0 at rate 1.
                mask = kept.to(self.model.dtype) * (1 / max(1 - rate, 1e-30))
                masks.append(mask)
            sets.append(tuple(masks))
        return tuple(sets)


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
        examples = [sum(map(len, batches)) for batches in by_task]
        self.draws = client_batches.draws(tasks, examples)
        if apart:
            for draw in self.draws:
                if draw.dropout is not None:
                    draw.dropout.compute()
        self.indices = [indices for batches in by_task for indices in batches]
        """Positions in the training set, for each batch of all tasks."""
        self.owners = [k for k, batches in enumerate(by_task) for _ in batches]
        """Index of the task of each batch."""
        self.firsts = list(accumulate(map(len, by_task), initial=0))
        """Index of the first batch of each task, and the number of all batches."""
        ends = list(accumulate(map(len, self.indices), initial=0))
        self.groups = [
            list(group)
            for _, group in groupby(
                range(len(self.indices)),
                key=lambda i: (self.owners[i] if apart else 0, ends[i] // PREFETCH_EXAMPLES),
            )
        ]
        """Batches that are gathered together, by their index."""
        self.ready: dict[int, tuple[Tensor, Tensor]] = {}
        """The x and y of the batches of the last group that was gathered."""
        self.unit = ROW_ALIGNMENT // math.gcd(client_batches.examples.x[:1].numel(), ROW_ALIGNMENT)
        """Number of examples; every multiple of it ends at a memory boundary."""

    def batches(self, k: int) -> Iterator[Batch]:
        """Yield the batches of task `k`. Call it in the order of the tasks.

        A task that fails may leave batches unused; the next task skips them.

        Args:
            k: index of the task.

        Yields:
            The batches of the task's local steps, as from `ClientBatches.batches`.
        """
        client_batches = self.client_batches
        draws = self.draws[k]
        for i in range(self.firsts[k], self.firsts[k + 1]):
            while i not in self.ready:
                self.ready = self._gather(self.groups[0])
                self.groups.pop(0)
            x, y = self.ready[i]
            yield Batch(
                x,
                y,
                client_batches.masks(draws, len(y)),
                noise=client_batches.noise(draws, len(y)),
                private_noise=client_batches.private_noise(draws),
            )

    def _gather(self, group: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """Gather the batches of a group: x [B, C, H, W] and y [B] by index of the batch."""
        sizes = [len(self.indices[i]) for i in group]
        starts = list(accumulate((-(-size // self.unit) * self.unit for size in sizes), initial=0))
        # The gaps up to the next memory boundary hold some example that nobody reads.
        places = np.repeat(self.indices[group[0]][:1], starts[-1])
        augments = self.draws[0].augment is not None
        numbers = np.zeros((starts[-1], NUMBERS_PER_AUGMENTATION)) if augments else None
        spans = {}
        for i, start, size in zip(group, starts, sizes, strict=False):
            span = spans[i] = slice(start, start + size)
            places[span] = self.indices[i]
            stream = self.draws[self.owners[i]].augment
            if numbers is not None and stream is not None:
                numbers[span] = stream.random((size, NUMBERS_PER_AUGMENTATION))
        x, y = self.client_batches.images(places, numbers)
        return {i: (x[span], y[span]) for i, span in spans.items()}


def _crops(draws: list[RandomStreams], sizes: list[int]) -> np.ndarray | None:
    """Draw the augmentation numbers of one step, [n, 3]; None without augmentation."""
    of_clients = [
        draw.augment.random((size, NUMBERS_PER_AUGMENTATION))
        for draw, size in zip(draws, sizes, strict=True)
        if draw.augment is not None
    ]
    return np.concatenate(of_clients) if of_clients else None
