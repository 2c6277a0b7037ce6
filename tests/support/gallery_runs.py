"""Shared by the tests of the gallery: the net, and a run as an oracle sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from typing import Any

import numpy as np
import torch
from oracle.batches import batch_sizes

from raysim.randomness import generator
from support.oracle_cases import NETS, Feed, has_batch_norm

SIZES = [30, 9, 17, 12, 45, 8]
LR = 0.2
NET = NETS["mlp"][1]
BODY = 64 * 8 + 8
"""Parameters of the MLP below its classifier."""


def net(w: torch.Tensor, X: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features [n, 8] and the logits [n, 10] of the MLP, in torch."""
    W1, b1, W2, b2 = w.split(NET.segments)
    features = torch.relu(torch.from_numpy(X) @ W1.reshape(8, 64).T + b1)
    return features, features @ W2.reshape(10, 8).T + b2


def gradient(loss: Callable[[torch.Tensor], torch.Tensor], w: np.ndarray) -> np.ndarray:
    """Return the gradient of a function of the parameters [P], by autograd."""
    leaf = torch.from_numpy(w).clone().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0].numpy()


def check(found: Any, expected: Any, before: Any = 0.0) -> None:
    """Check that arrays are equal up to a billionth of the largest change from `before`, and have
    NaN at the same places."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    change = np.nanmax(np.abs(expected - before))
    assert change > 0 and np.nanmax(np.abs(found - expected)) <= 1e-9 * change


@dataclass
class Done:
    """A run as an oracle sees it."""

    engine: Any
    records: list[dict[str, float]]
    feed: Feed

    @property
    def xs(self) -> list[np.ndarray]:
        """x_0 .. x_T."""
        return self.engine.executor.xs

    @property
    def states(self) -> list[dict[str, np.ndarray]]:
        """The server's states 0 .. T."""
        snapshots = self.engine.executor.states
        return [
            {k.removeprefix("state/"): v.numpy() for k, v in snapshot.items()}
            for snapshot in snapshots
        ]

    def kept(self, client: int) -> dict[str, np.ndarray]:
        """Return the client state after the last round."""
        return self.engine.store.get(client)

    def batches(self, t: int, client: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the mini-batches (X, y) of a client's steps in round t."""
        x, y = self.feed.data[client]
        return [(x[b], y[b]) for b in self.feed.batches[t][client]]

    def prepared_batches(self, t: int, client: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the batches (X, y) of round t that the client's rule prepares from, one for each
        local step."""
        x, y = self.feed.data[client]
        size = self.engine.config.local.batch_size
        order = np.arange(len(y))
        if len(y) > size:
            order = generator(self.engine.config.seed, "made", t, client).permutation(len(y))
        batch_norm = has_batch_norm(self.engine.plan.net)
        cuts = np.cumsum([0, *batch_sizes(len(y), size, batch_norm)])
        parts = [order[a:b] for a, b in pairwise(cuts)]
        return [(x[p], y[p]) for p in islice(cycle(parts), len(self.feed.batches[t][client]))]

    def mean_test_loss(self, model: Callable[[int], np.ndarray]) -> float:
        """Return the mean over all clients of the test loss of `model(client)`."""
        losses = [NET.loss(model(i), X, y) for i, (X, y) in self.tests().items()]
        return float(np.mean(losses))

    def tests(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Return the test examples (X, y) of all clients that have some."""
        data, tests = self.engine.plan.dataset, self.engine.plan.clients.test
        scale, shift = (v.astype(np.float64)[:, None, None] for v in (data.scale, data.shift))
        found = {}
        for i in range(len(tests)):
            chosen = tests.client(i)
            if len(chosen):
                x = data.x_test[chosen].astype(np.float64) * scale + shift
                found[i] = x.reshape(len(x), -1), data.y_test[chosen]
        return found

    def averaged(
        self, local: Callable[[np.ndarray, int, list[tuple[np.ndarray, np.ndarray]]], np.ndarray]
    ) -> list[np.ndarray]:
        """Return x_0 .. x_T of uniform averaging, where `local(x, client, batches)` gives the
        client's last w."""
        xs = [self.feed.x0]
        for t, cohort in enumerate(self.feed.cohorts):
            xs.append(np.mean([local(xs[-1], i, self.batches(t, i)) for i in cohort], axis=0))
        return xs
