"""Uniform random numbers of dropout masks: drawn by NumPy for a CPU, computed on the spot by a GPU.

Both are the same numbers of the same keys. Copying them to a GPU costs far more than training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from raysim.numerics.philox import uniform

NUMBERS_PER_CALL = 1 << 26
"""Numbers that a GPU computes together, of whole tasks: 256 MB, unless one task needs more."""


class DropoutNumbers(Protocol):
    """Uniform numbers of one task, in [0, 1) and float32, in the order of its draws."""

    def compute(self) -> None:
        """Compute all numbers now, on the current stream, if they are not drawn one by one."""
        ...

    def take(self, count: int) -> Tensor:
        """Return the next numbers, [count]."""
        ...


class HostNumbers:
    """Numbers that NumPy draws.

    Args:
        rng: the generator of the task.
    """

    def __init__(self, rng: np.random.Generator):
        self._rng = rng

    def compute(self) -> None:
        """Do nothing: the numbers are drawn as they are taken."""

    def take(self, count: int) -> Tensor:
        """Return the next numbers, [count]."""
        return torch.from_numpy(self._rng.random(count, dtype=np.float32))


class DeviceNumbers:
    """Numbers of a task that are computed on a device, together with those of other tasks.

    Args:
        shared: the tasks whose numbers are computed together.
        k: index of this task among them.
    """

    def __init__(self, shared: _Tasks, k: int):
        self._shared: _Tasks | None = shared
        self._k = k
        self._taken = 0
        self._device = shared.device

    def compute(self) -> None:
        """Compute the numbers of all tasks that are computed together."""
        if self._shared is not None:
            self._shared.numbers(self._k)

    def take(self, count: int) -> Tensor:
        """Return the next numbers, [count]."""
        if not count:
            return torch.empty(0, device=self._device)
        assert self._shared is not None
        begin = self._taken
        self._taken += count
        numbers = self._shared.numbers(self._k)[begin : self._taken]
        if self._taken == self._shared.counts[self._k]:
            self._shared = None  # the last task of several frees their memory
        return numbers


class _Tasks:
    """Tasks whose numbers are computed together, when the first of them is needed."""

    def __init__(self, device: torch.device):
        self.keys: list[np.ndarray] = []
        self.counts: list[int] = []
        self.device = device
        self._numbers: Tensor | None = None

    def numbers(self, k: int) -> Tensor:
        """Return all numbers of task `k`, and perhaps more."""
        if self._numbers is None:
            keys = torch.from_numpy(np.stack(self.keys).view(np.int64))
            self._numbers = uniform(keys.to(self.device), max(self.counts))
        return self._numbers[k]


def device_numbers(
    keys: Sequence[np.ndarray], counts: Sequence[int], device: torch.device
) -> list[DeviceNumbers]:
    """Return the numbers of several tasks, which are computed when they are needed.

    Args:
        keys: for each task the key of its generator, see `raysim.randomness.key_words`.
        counts: how many numbers each task takes.
        device: device of the numbers.
    """
    numbers = []
    together = _Tasks(device)
    for key, count in zip(keys, counts, strict=True):
        # As many numbers are computed for each task as for the largest.
        width = max([count, *together.counts])
        if together.counts and width * (len(together.counts) + 1) > NUMBERS_PER_CALL:
            together = _Tasks(device)
        together.keys.append(key)
        together.counts.append(count)
        numbers.append(DeviceNumbers(together, len(together.counts) - 1))
    return numbers
