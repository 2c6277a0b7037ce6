"""What client rules log in local steps (`task.log`), summed up over a client's mini-batches."""

from __future__ import annotations

import torch

from raysim.rules.contract import State


class StepLog:
    """Mean of each logged number over the mini-batches of a client; of NAME_max the maximum.

    Args:
        n_clients: K, number of clients that train side by side, those with most mini-batches first.
    """

    def __init__(self, n_clients: int):
        self.n_clients = n_clients
        self.totals: State = {}
        self.counts: dict[str, list[int]] = {}

    def add(self, logged: State) -> None:
        """Add what the first clients logged on a mini-batch.

        Args:
            logged: [k] numbers by name, of the k <= K clients that still train.
        """
        for name, values in logged.items():
            is_max = name.endswith("_max")
            if name not in self.totals:
                start = -torch.inf if is_max else 0.0
                self.totals[name] = values.new_full((self.n_clients,), start)
                self.counts[name] = [0] * self.n_clients
            total = self.totals[name][: len(values)]
            if is_max:
                torch.maximum(total, values, out=total)
            else:
                total += values
            # For each name, since a rule may log one on some mini-batches only.
            for k in range(len(values)):
                self.counts[name][k] += 1

    def of(self, k: int) -> State:
        """Return the numbers of client `k` by name; those that it logged on some mini-batch."""
        numbers = {}
        for name, totals in self.totals.items():
            count = self.counts[name][k]
            if count:
                numbers[name] = totals[k] if name.endswith("_max") else totals[k] / count
        return numbers
