"""Random numbers of local steps: one definition, the same numbers on a CPU and on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from raysim.data.examples import on_device
from raysim.numerics.normal_quantile import normal
from raysim.numerics.philox import WORDS_PER_COUNTER, random_words, uniform
from raysim.randomness import generator, key_words
from raysim.training.messages import ClientTask

NUMBERS_PER_CALL = 1 << 26
"""Numbers that a GPU computes together: 256 MB, unless one step needs more."""

NUMPY_DEVICES = frozenset({"cpu"})
"""Types of devices for which NumPy draws the random words, since that is faster there."""


class StepNumbers:
    """Random numbers of one purpose in the local steps of several tasks.

    Those of a task come from the words of `raysim.randomness.generator` for this purpose, its base
    version and its client, in the order in which it takes them. NumPy draws the words for a CPU. A
    GPU computes them from the same keys, because copying numbers costs far more than training.

    Args:
        seed: seed of the run.
        purpose: name of the stream.
        distribution: "normal" (standard) or "uniform", in [0, 1), of float32; or "uniform64", which
            is uniform of float64 and stays on the CPU.
        tasks: the tasks.
        counts: how many numbers each task takes in all.
        device: the device of the numbers.
    """

    def __init__(
        self,
        seed: int,
        purpose: str,
        distribution: str,
        tasks: Sequence[ClientTask],
        counts: Sequence[int],
        device: torch.device,
    ):
        self._distribution = distribution
        self._places = [(seed, purpose, task.base, task.client) for task in tasks]
        self._counts = counts
        self._device = torch.device("cpu") if distribution == "uniform64" else device
        self._generators: list[Generator] = []
        """The generators of the tasks; [] if the device computes the numbers."""
        if distribution == "uniform64" or device.type in NUMPY_DEVICES:
            self._generators = [generator(*place) for place in self._places]
        self._computed: dict[int, tuple[int, Tensor]] = {}
        """Numbers that the device has computed, of each task that has not taken all of them, with
        the index of the first one among all of the task."""
        self._taken = [0] * len(tasks)
        self._together = True
        """Whether one call computes the numbers of several tasks; it needs a common stream."""

    def take(self, k: int, *shape: int) -> Tensor:
        """Return the next numbers of a task.

        Args:
            k: index of the task.
            shape: shape of the result.

        Returns:
            The numbers, which the caller may change in place.
        """
        if self._generators:
            return self._draw(self._generators[k], shape)
        begin = self._taken[k]
        end = self._taken[k] = begin + math.prod(shape)
        if begin == end:
            return torch.empty(shape, device=self._device)
        if k not in self._computed or end > self._computed[k][0] + len(self._computed[k][1]):
            self._compute(k, begin, end)
        first, numbers = self._computed[k]
        if numbers.is_cuda:
            # They were computed on another stream if the task trains on a lane.
            numbers.record_stream(torch.cuda.current_stream(numbers.device))
        if end == self._counts[k]:
            del self._computed[k]  # the last of several tasks frees their memory
        return numbers[begin - first : end - first].view(shape)

    def _draw(self, rng: Generator, shape: tuple[int, ...]) -> Tensor:
        """Draw numbers of this shape on the CPU."""
        if self._distribution == "normal":
            words = rng.integers(0, 1 << 32, math.prod(shape), dtype=np.uint32)
            return normal(torch.from_numpy(words.view(np.int32))).view(shape)
        dtype = np.float64 if self._distribution == "uniform64" else np.float32
        return torch.from_numpy(np.asarray(rng.random(shape, dtype=dtype)))

    def compute_all(self) -> None:
        """Prepare for tasks on streams of their own: compute all numbers on the current stream.

        Numbers of more than one call are not computed before their task, since they take memory.
        Does nothing if NumPy draws the numbers.
        """
        if self._generators:
            return
        self._together = sum(self._counts) <= NUMBERS_PER_CALL
        for k, count in enumerate(self._counts):
            if self._together and count and k not in self._computed:
                self._compute(k)

    def _compute(self, k: int, begin: int = 0, end: int = 0) -> None:
        """Compute numbers of task `k` from `begin` on, perhaps with those of the next tasks."""
        first = begin // WORDS_PER_COUNTER * WORDS_PER_COUNTER
        # As many numbers are computed for each task as for the largest.
        width = min(self._counts[k] - first, max(end - first, NUMBERS_PER_CALL))
        after = k + 1
        if self._together and not begin:
            for count in self._counts[k + 1 :]:
                if max(width, count) * (after + 1 - k) > NUMBERS_PER_CALL:
                    break
                width = max(width, count)
                after += 1
        keys = np.stack([key_words(*place) for place in self._places[k:after]]).view(np.int64)
        words = random_words(on_device(keys, self._device), width, first)
        numbers = normal(words.flatten()) if self._distribution == "normal" else uniform(words)
        for i, row in enumerate(numbers.view(len(words), width), start=k):
            if self._counts[i]:
                self._computed[i] = first, row
