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
from raysim.data.examples import NUMBERS_PER_AUGMENTATION
from raysim.models.flat import Model
from raysim.numerics.inner_products import ROW_ALIGNMENT
from raysim.randomness import generator, key_words
from raysim.rules.batch import Batch
from raysim.training.batches.batch_layouts import PaddedBatch, PooledBatch
from raysim.training.batches.batch_order import batch_positions, batch_slice, batches_per_pass
from raysim.training.batches.dropout_numbers import DropoutNumbers, HostNumbers, device_numbers
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

    def stacked(
        self,
        tasks: list[ClientTask],
        mine: list[np.ndarray],
        prepared: list[list[tuple[Batch, ...]]],
    ) -> Iterator[PaddedBatch]:
        """Yield the batches of several clients side by side, step by step.

        Args:
            tasks: the clients, in decreasing order of steps: those that still train are the first.
            mine: [n] for each client, positions of its examples.
            prepared: for each client the batches that its rule prepared, a tuple for each batch of
                its pass; [] for none.

        Yields:
            The batches of the clients that still train.
        """
        places = [
            list(self.positions(task, indices)) for task, indices in zip(tasks, mine, strict=True)
        ]
        draws = self.draws(tasks, [sum(map(len, batches)) for batches in places])
        for step in range(tasks[0].steps):
            live = sum(task.steps > step for task in tasks)
            indices = [mine[k][places[k][step]] for k in range(live)]
            sizes = [len(part) for part in indices]
            x, y = self._padded_examples(indices, draws)
            drops = self._padded_drops(draws[:live], sizes)
            private = self._private_noise_of_all(draws[:live])
            due = [batches[step % len(batches)] for batches in prepared[:live] if batches]
            yield PaddedBatch(
                x,
                y,
                self._real(sizes),
                drops,
                private,
                *self._padded_prepared(due),
                self._padded_noise(draws[:live], sizes),
            )

    def _padded_examples(
        self, indices: list[np.ndarray], draws: list[RandomStreams]
    ) -> tuple[Tensor, Tensor]:
        """Gather x and y, [K, B, ...] each, padded with the last example of each client."""
        sizes = [len(part) for part in indices]
        width = max(sizes)
        padded = np.stack([np.pad(part, (0, width - len(part)), mode="edge") for part in indices])
        x, y = self.examples.batch(padded.reshape(-1), _crops(draws, sizes, width))
        return x.unflatten(0, (-1, width)), y.unflatten(0, (-1, width))

    def _padded_drops(
        self, draws: list[RandomStreams], sizes: list[int]
    ) -> tuple[tuple[Tensor, ...], ...]:
        """Draw the dropout masks, [K, B, ...] each, as sets of one mask for each layer."""
        of_clients = [self.masks(d, n, max(sizes)) for d, n in zip(draws, sizes, strict=True)]
        return tuple(
            tuple(torch.stack(masks) for masks in zip(*same_set, strict=True))
            for same_set in zip(*of_clients, strict=True)
        )

    def _private_noise_of_all(self, draws: list[RandomStreams]) -> Tensor | None:
        """Draw the noise of private steps, [K, P]; None without it."""
        if not self.noisy:
            return None
        noise = [self.private_noise(d) for d in draws]
        return torch.stack([z for z in noise if z is not None])

    def _padded_noise(
        self, draws: list[RandomStreams], sizes: list[int]
    ) -> dict[str, Tensor] | None:
        """Draw the numbers that the rule declares, [K, ...] each; None without them."""
        if not self.noise_specs:
            return None
        of_clients = [self.noise(d, n, max(sizes)) for d, n in zip(draws, sizes, strict=True)]
        return {key: torch.stack([z[key] for z in of_clients]) for key in self.noise_specs}

    def _padded_prepared(
        self, due: list[tuple[Batch, ...]]
    ) -> tuple[tuple[tuple[Tensor, Tensor], ...], Tensor | None]:
        """Stack the batches that rules prepared for a step: x and y of each, and their mask."""
        prepared = tuple(
            (_padded([b.x for b in same]), _padded([b.y for b in same]))
            for same in zip(*due, strict=True)
        )
        return prepared, self._real([len(batches[0].y) for batches in due]) if due else None

    def _real(self, sizes: list[int]) -> Tensor | None:
        """Return the mask [K, B], 1 for real examples and 0 for padding; None without padding."""
        if min(sizes) == max(sizes):
            return None
        real = np.arange(max(sizes)) < np.array(sizes)[:, None]
        return torch.from_numpy(real).to(self.model.device, self.model.dtype)

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
        x, y = self.images(np.concatenate(indices), _crops(draws, sizes, None))
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
        return torch.from_numpy(noise).to(self.model.device, self.model.dtype)

    def noise(self, draws: RandomStreams, n: int, width: int | None = None) -> dict[str, Tensor]:
        """Draw the random numbers of one step that the rule declares.

        Args:
            draws: the streams of the task.
            n: number of examples, for shapes that begin with "B".
            width: number of examples to which these are padded with zeros; None: no padding.

        Returns:
            The numbers by name; {} without any.
        """
        drawn = {}
        for key, (shape, distribution) in self.noise_specs.items():
            rng = draws.noise[key]
            draw = rng.standard_normal if distribution == "normal" else rng.random
            # Padding follows the draw, so the numbers do not depend on the other clients of a
            # block.
            numbers = draw(tuple(n if size == "B" else size for size in shape), dtype=np.float32)
            numbers = np.asarray(numbers)
            if shape[:1] == ("B",):
                numbers = _padded_rows(numbers, width)
            drawn[key] = torch.from_numpy(numbers).to(self.model.device, self.model.dtype)
        return drawn

    def masks(
        self, draws: RandomStreams, n: int, width: int | None = None
    ) -> tuple[tuple[Tensor, ...], ...]:
        """Draw the dropout masks of one step, scaled to keep the mean.

        Args:
            draws: the streams of the task.
            n: number of examples.
            width: number of examples to which the masks are padded with zeros; None: no padding.

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
                if width is not None and width > n:
                    mask = torch.cat([mask, mask.new_zeros(width - n, *shape)])
                masks.append(mask)
            sets.append(tuple(masks))
        return tuple(sets)


class PrefetchedBatches:
    """Batches of several tasks that train one after the other.

    A few batches are gathered and normalised together, also those of different clients. Every batch
    starts at a memory boundary, so that its bits do not depend on the batches before it.
    """

    def __init__(
        self, client_batches: ClientBatches, tasks: list[ClientTask], mine: list[np.ndarray]
    ):
        """Plan the batches of all tasks.

        Args:
            client_batches: gathers the examples.
            tasks: the tasks, in the order in which they train.
            mine: [n] for each client, positions of its examples.
        """
        self.client_batches = client_batches
        by_task = [
            [positions[batch] for batch in client_batches.positions(task, positions)]
            for task, positions in zip(tasks, mine, strict=True)
        ]
        examples = [sum(map(len, batches)) for batches in by_task]
        self.draws = client_batches.draws(tasks, examples)
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
                range(len(self.indices)), key=lambda i: ends[i] // PREFETCH_EXAMPLES
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
                None,
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


def _padded_rows(numbers: np.ndarray, width: int | None) -> np.ndarray:
    """Return an array [n, ...] padded with zeros to `width` rows; None: as it is."""
    if width is None or width == len(numbers):
        return numbers
    return np.pad(numbers, ((0, width - len(numbers)), *[(0, 0)] * (numbers.ndim - 1)))


def _padded(parts: Sequence[Tensor]) -> Tensor:
    """Stack K tensors [b_k, ...] to [K, B, ...], each padded with its last entry."""
    width = max(len(part) for part in parts)
    return torch.stack([torch.cat([p, p[-1:].expand(width - len(p), *p.shape[1:])]) for p in parts])


def _crops(draws: list[RandomStreams], sizes: list[int], width: int | None) -> np.ndarray | None:
    """Draw the augmentation numbers of one step, [B, 3] per client; None without augmentation.

    With `width`, those of each client are padded to this number of examples, like its batch.
    """
    # Empty without augmentation. In `stacked`, clients that are done have a generator but no size.
    generators = [d.augment for d in draws if d.augment is not None]
    of_clients = [
        _padded_rows(g.random((n, NUMBERS_PER_AUGMENTATION)), width)
        for g, n in zip(generators, sizes, strict=False)
    ]
    return np.concatenate(of_clients) if of_clients else None
