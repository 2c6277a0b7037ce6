"""Arguments of a server rule: the clients of a round, and their uploads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from numpy.random import Generator
from torch import Tensor

from raysim.errors import ContractError
from raysim.metrics import is_of_engine
from raysim.randomness import generator
from raysim.rules.public import PublicData
from raysim.rules.rule import place_of_metric
from raysim.rules.task import Task
from raysim.rules.unknown_attributes import SuggestsAttributes
from raysim.spelling import did_you_mean


@dataclass
class Cohort(SuggestsAttributes):
    """The clients of one round, in order of arrival (synchronous: of sampling)."""

    round: int
    """t, the number of rounds that are done before; 0 in the first."""
    ids: list[int]
    """The clients' numbers [K]."""
    n_clients: int
    """N, all clients that have training examples."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that `log` has recorded."""
    samples: list[int] = field(default_factory=list)
    """The clients' examples [K]."""
    steps: list[int] = field(default_factory=list)
    """The mini-batches of the clients [K]: their local steps, without `local.accumulate`."""
    staleness: list[int] = field(default_factory=list)
    """Rounds since the version that each client started from [K], from 0."""
    draws: list[int] = field(default_factory=list)
    """Number of times that each client was sampled [K]; above 1 only with replacement."""
    seed: int = 0
    """Seed of the run."""

    def rng(self, stream: str) -> Generator:
        """Return a generator that is keyed by seed, stream and round.

        The same stream starts at the same numbers again.

        Args:
            stream: the purpose of the numbers; different streams are independent.
        """
        return generator(self.seed, f"server rule {stream}", self.round)

    def log(self, **metrics: float | Tensor) -> None:
        """Log metrics of this round, as server/NAME.

        A size, whose name ends in _bytes, is logged as system/server_NAME.

        Args:
            metrics: numbers, or tensors of one number, by name.

        Raises:
            ContractError: the engine logs a metric of that name itself.
        """
        for name in metrics:
            if is_of_engine(place_of_metric("server", name)):
                raise ContractError(
                    f"log: '{name}' is a metric of the engine's in each round; give this one "
                    "another name"
                )
        self.metrics.update({k: float(v) for k, v in metrics.items()})


WEIGHT_TOLERANCE = 1e-6
"""Rounding in the sum of a round's weights."""


def _no_task() -> Task:
    """Refuse `reports.task` of a rule that has not asked for it."""
    raise ContractError(
        "a server rule reads reports.task, for which its class must say needs_task = True, or "
        'reports.public, for which it must say needs_public_data = "inputs" or "labels"'
    )


class Refused(Sequence):
    """Placeholder of facts about clients that a server rule may not read: to read it is an error.

    Args:
        why: the message of the `ContractError`.
    """

    def __init__(self, why: str):
        self.why = why

    def __getitem__(self, i: Any) -> Any:
        raise ContractError(self.why)

    def __len__(self) -> int:
        return self[0]

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self[0]


NOT_REQUESTED = Refused(
    "a server rule reads reports.bases, for which its class must say needs_base_params = True"
)
"""`Reports.bases` of a rule without `needs_base_params`."""


@dataclass
class Reports(Cohort):
    """The uploads of the K clients of a round, as the server receives them."""

    weights: list[float] = field(default_factory=list)
    """Weights of the means [K], from the rule's `weigh`."""
    versions: list[int] = field(default_factory=list)
    """Number of the model version that each client started from [K]."""
    bases: Sequence[Tensor] = NOT_REQUESTED
    """Parameters that each client started from, K times [P]; read-only, for `needs_base_params`."""
    totals: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    """Sums by mode and key; use `mean`, `sum` and `difference`."""
    rows: dict[str, list[Tensor]] = field(default_factory=dict)
    """Each client's upload by key, K tensors each; `per_client` without the stacking."""
    given_weights: list[float] | None = None
    """Weights from `set_weights`."""
    make_task: Callable[[], Task] = _no_task
    """Makes `task`."""

    @cached_property
    def task(self) -> Task:
        """The server's training problem: gradients, forward passes and steps of the model.

        It is for a rule with `needs_task` or `needs_public_data`. The batches are those of
        `public`, or the rule's own. Its BatchNorm statistics are the server's. `task.descend` makes
        steps as `local` configures them, from a new state of the optimizer in each round.
        """
        return self.make_task()

    @property
    def public(self) -> PublicData:
        """Public examples of the data set, for a rule with `needs_public_data`."""
        return self.task.public

    def set_weights(self, weights: Iterable[float]) -> None:
        """Set the weights that a rule with `weights_after_training` has computed.

        `mean` takes them from then on, and BatchNorm statistics are averaged with them. If they sum
        to less than one, the server's present statistics get the rest.

        Args:
            weights: p_i [K], in the order of `ids`.

        Raises:
            ContractError: they are not one number for each client, one is negative, or they sum to
                more than 1.
        """
        self.given_weights = [float(p) for p in weights]
        if len(self.given_weights) != len(self.ids):
            raise ContractError(
                f"reports.set_weights got {len(self.given_weights)} weights for "
                f"{len(self.ids)} clients; pass one weight per client"
            )
        # Else BatchNorm statistics would not be a mean: a variance might become negative.
        if any(p < 0 for p in self.given_weights):
            raise ContractError(
                f"reports.set_weights got {self.given_weights}; pass weights of which none is "
                "negative"
            )
        if (total := sum(self.given_weights)) > 1 + WEIGHT_TOLERANCE:
            raise ContractError(
                f"reports.set_weights got weights that sum to {total:g}, and reports.mean would be "
                "as many times a mean; divide them by their sum, raysim.rules.normalised(weights)"
            )

    def mean(self, key: str) -> Tensor:
        """Return Σ_i p_i u_i, the weighted mean of an upload over the clients, in a new tensor.

        p_i are the `weights`; after `set_weights` they are the weights given there.

        Args:
            key: an upload with mode "mean" or "per_client"; after `set_weights` with "per_client".

        Raises:
            ContractError: the rule has no such upload, or only its sum, after `set_weights`.
        """
        mean = self._total("mean", key)
        if self.given_weights is None:
            return mean
        if key not in self.rows:
            raise ContractError(
                f"a server rule asks for the mean of '{key}' after reports.set_weights, but that "
                f'mean was taken with the weights of `weigh`; set uploads["{key}"] = "per_client"'
            )
        total = torch.zeros_like(mean, dtype=torch.float64)
        for weight, row in zip(self.given_weights, self.rows[key], strict=True):
            total.add_(row, alpha=weight)
        return total.to(mean.dtype)

    def sum(self, key: str) -> Tensor:
        """Return the sum of an upload over the round's clients, in a new tensor.

        Args:
            key: an upload with mode "sum".
        """
        return self._total("sum", key)

    def difference(self, key: str) -> Tensor:
        """Return sum_i w_i (u_i - client i's last upload), float64, in the upload's shape.

        w_i is the client's weight among ALL clients: 1/N, or its share of all samples. Accumulated
        over the rounds it is the mean of the latest known upload of every client, with zero for
        clients that were never seen.

        Args:
            key: an upload with mode "difference".
        """
        return self._total("difference", key)

    def _total(self, mode: str, key: str) -> Tensor:
        self._check_requested(mode, key, (k for m, k in self.totals if m == mode))
        # A copy, which the rule may change in place before it asks again.
        return self.totals[mode, key].clone()

    def per_client(self, key: str) -> Tensor:
        """Return every client's upload, [K, ...], in the order of `ids`.

        Args:
            key: an upload with mode "per_client".
        """
        self._check_requested("per_client", key, self.rows)
        return torch.stack(self.rows[key])

    def _check_requested(self, mode: str, key: str, keys: Iterable[str]) -> None:
        """Raise ContractError if an upload is not among those that arrive in a mode."""
        if key not in (known := list(keys)):
            raise ContractError(
                f"a server rule asks for the {mode} of '{key}', which its `uploads` does not call "
                f'"{mode}"{did_you_mean(key, known)}'
            )
