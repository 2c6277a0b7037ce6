"""What client rules log in local steps (`task.log`), summed up over a client's mini-batches."""

from __future__ import annotations

import torch

from raysim.rules.contract import State


class StepLog:
    """Mean of each logged number over the mini-batches of a client; of NAME_max the maximum."""

    def __init__(self) -> None:
        self.totals: State = {}
        self.counts: dict[str, int] = {}

    def add(self, logged: State) -> None:
        """Add what the client logged on a mini-batch.

        Args:
            logged: numbers by name, each a tensor without dimensions.
        """
        for name, number in logged.items():
            total = self.totals.get(name)
            if name.endswith("_max"):
                self.totals[name] = number if total is None else torch.maximum(total, number)
            else:
                # The sum begins with 0, so that a first -0 counts as 0.
                self.totals[name] = (0.0 if total is None else total) + number
            # For each name, since a rule may log one on some mini-batches only.
            self.counts[name] = self.counts.get(name, 0) + 1

    def numbers(self) -> State:
        """Return the numbers by name; those that the client logged on some mini-batch."""
        return {
            name: total if name.endswith("_max") else total / self.counts[name]
            for name, total in self.totals.items()
        }
