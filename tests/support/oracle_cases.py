"""Shared by the oracle tests, in which engine and oracle train the same clients: nets, sizes,
feeds, distances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from oracle.batches import batch_sizes
from oracle.nets import MLP, MLPBatchNorm, Softmax
from torch import nn

from raysim.training.batches.batch_order import batch_positions
from support.cohorts import sample_cohort

SIZES = [30, 1, 17, 2, 45, 0, 8, 23, 16, 5, 33, 12]
"""Beside batches of 16: less than one, exactly one, one and a single sample, more than two,
nothing."""


ROOMY = [41, 49, 17, 34, 65, 0, 45, 36, 54, 32, 33, 48]
"""For GradMA's clients. Those of `SIZES` with a handful of samples have learnt them all within a
step or two; then c is -lr b but for a part in a million, and the QP on [a, b, c] so nearly
degenerate that its answer is not defined to nine digits (tests/numerics/test_qp.py has what must
hold there). Sizes and seeds of these runs keep clear of that."""


NETS: dict[str, tuple[dict[str, Any], Any]] = {
    "logistic": ({"name": "logistic"}, Softmax(64, 10)),
    "mlp": ({"name": "mlp", "hidden": [8]}, MLP(64, 8, 10)),
}


MODES = ["loop", "lanes"]


STEPS = [[0, 0.2], [2, 0.8], [5, 0.5]]
"""A schedule: [first round, value]."""


def by_round(schedule: list) -> Callable[[int], float]:
    """Return the schedule as a function of the round, as the oracles expect it."""
    return lambda t: next(value for start, value in reversed(schedule) if start <= t)


@dataclass
class Feed:
    """The inputs of an oracle: run(x0, cohorts, sizes, batches, grad)."""

    x0: np.ndarray
    cohorts: list[list[int]]
    sizes: list[int]
    batches: list[dict[int, list[np.ndarray]]]
    data: list[tuple[np.ndarray, np.ndarray]]

    def of_clients(self, grad: Callable) -> Callable:
        """Convert a net's `grad(w, x, y)` to an oracle's `grad(w, client, batch)`."""

        def of_client(w, client, batch):
            x, y = self.data[client]
            return grad(w, x[batch], y[batch])

        return of_client

    def args(self, grad: Callable) -> tuple:
        return self.x0, self.cohorts, self.sizes, self.batches, self.of_clients(grad)


def feed(engine: Any, cohorts: list[list[int]] | None = None) -> Feed:
    """Return the oracle's inputs, with cohorts (by default) and batches as the engine draws them.

    A client's stream of batches continues where its last round stopped.
    """
    plan, local = engine.plan, engine.config.local
    d = plan.dataset
    scale, shift = (np.float64(v)[:, None, None] for v in (d.scale, d.shift))
    x = (d.x.astype(np.float64) * scale + shift).reshape(len(d.y), -1)
    mine = [plan.clients.client(i) for i in range(len(plan.clients))]
    sizes, drawn, batches = [len(m) for m in mine], [0] * len(mine), []
    batch_norm = local.buffers != "frozen" and has_batch_norm(plan.net)
    if cohorts is None:
        cohorts = [sample_cohort(engine.schedule, t) for t in range(engine.config.rounds)]
    for cohort in cohorts:
        batches.append({})
        for i in cohort:
            size = sizes[i] if local.batch_size == "full" else local.batch_size
            steps = local.steps or local.epochs * len(batch_sizes(sizes[i], size, batch_norm))
            batches[-1][i] = list(
                batch_positions(engine.config.seed, i, sizes[i], size, drawn[i], steps, batch_norm)
            )
            drawn[i] += steps
    return Feed(engine.executor.xs[0], cohorts, sizes, batches, [(x[m], d.y[m]) for m in mine])


def has_batch_norm(net: nn.Module) -> bool:
    """Whether a net has a layer that normalises by the batch."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())


class Watching:
    """A net's gradient that records the BatchNorm statistics of each batch, call by call."""

    def __init__(self, net: MLPBatchNorm):
        self.net, self.seen = net, []

    def __call__(self, w, x, y):
        gradient, mean, var = self.net.grad_and_statistics(w, x, y)
        self.seen.append((mean, var))
        return gradient


def distance(ours, theirs) -> float:
    """Return the largest difference of any round, relative to the largest entry of that round."""
    assert len(ours) == len(theirs)
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(ours, theirs, strict=True))


def in_both_modes(engine: Any, config: dict[str, Any], tolerance: float = 1e-8) -> list[Any]:
    """Run in mode loop and on lanes, one client after the other and side by side, and check that
    parameters and BatchNorm statistics agree in all rounds.

    Returns:
        What `engine` returns, for each of the two modes.
    """
    runs = []
    for mode in ("loop", "lanes"):
        runs.append(engine({**config, "batching": {**config["batching"], "mode": mode}}))
        assert runs[-1][0].plan.mode == mode
    looped, several = (run.executor for run, _ in runs)
    assert distance(several.xs, looped.xs) < tolerance
    if looped.statistics[0].size:
        assert distance(several.statistics, looped.statistics) < tolerance
    return runs


def differs(
    theirs: list[np.ndarray], other: Callable[[Feed], list[np.ndarray]], f: Feed, least=1e-5
) -> bool:
    """Return whether another oracle differs from x_0 .. x_T by more than `least` in some round. Two
    rounds often suffice."""
    for rounds in (2, len(f.cohorts)):
        xs = other(replace(f, cohorts=f.cohorts[:rounds]))
        if distance(theirs[: rounds + 1], xs) > least:
            return True
    return False


def assert_insensitive(
    theirs: list[np.ndarray], again: Callable[[Feed], list[np.ndarray]], f: Feed
) -> None:
    """Check that rounding decides nothing in a run: no x_t moves by much more than x_0 is moved.

    A projection on a cone that is nearly degenerate, or a choice on a tie, is another one on another
    CPU. In such a run engine and oracle can differ by any amount, and both be right.
    """
    for seed in range(3):
        noise = 1e-13 * np.random.default_rng(seed).standard_normal(len(f.x0))
        moved = again(replace(f, x0=f.x0 * (1 + noise)))
        assert distance(moved, theirs) < 1e-10, "rounding decides: choose another seed"


@dataclass
class Case:
    """A configuration, the oracle and its hyper-parameters, and the changes of those that must
    show."""

    algorithm: dict[str, Any]
    oracle: Callable
    hyper: dict[str, Any]
    matters: list[dict[str, Any]] = field(default_factory=list)
    local: dict[str, Any] = field(default_factory=dict)
    binds: tuple[str, ...] = ()
    """Metrics that must be above 0 in some round: the constraints were active."""
    net: str = "mlp"
    rounds: int = 6
    seed: int = 0
    sizes: list[int] = field(default_factory=lambda: SIZES)


def configuration(case: Any, mode: str, ragged: Callable, model: Any) -> dict[str, Any]:
    """Return the configuration of a case: ragged clients of the digits, in float64."""
    local = {"batch_size": 16, "steps": 3, **case.local}
    if "epochs" in local:
        del local["steps"]
    if case.algorithm["name"] == "fedsgd":  # which brings the size of its batches and its steps
        local = case.local
    return {
        "seed": case.seed, "rounds": case.rounds, "dtype": "float64", "partition": ragged(case.sizes), "model": model,
        "algorithm": case.algorithm, "schedule": {"cohort": 5}, "batching": {"mode": mode, "size": 3}, "local": local,
    }  # fmt: skip


def assert_papers_rounds(case: Case, engine: Any, ragged: Callable) -> Feed:
    """Check that x_1 .. x_T of the engine are those of the oracle in both modes, and would not be
    with another value of an option.

    Returns:
        The inputs of the oracle.
    """
    model, net = NETS[case.net]
    runs = [engine(configuration(case, mode, ragged, model)) for mode in MODES]
    f = feed(runs[0][0])

    def xs(f: Feed, **change: Any) -> list[np.ndarray]:
        return case.oracle(*f.args(net.grad), **{**case.hyper, **change})

    theirs = xs(f)
    assert len(theirs) == case.rounds + 1
    assert np.abs(theirs[-1] - theirs[0]).max() > 1e-4
    assert np.abs(theirs[-1]).max() < 1e3  # nothing runs away
    assert_insensitive(theirs, xs, f)
    for run, records in runs:
        assert distance(run.executor.xs, theirs) < 1e-9, run.plan.mode
        for metric in case.binds:
            assert max(record.get(metric, 0.0) for record in records) > 0, (
                f"{metric}: no constraint was ever active"
            )
    for change in case.matters:
        assert differs(theirs, partial(xs, **change), f), change
    return f


SAMPLES = {"weights": "samples"}


UNIFORM = {"weights": "uniform"}


BATCH_NORM = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, shape, classes, hidden: int = 6):
        super().__init__()
        self.lin, self.bn, self.lin2 = nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, classes)

    def forward(self, x):
        return self.lin2(torch.relu(self.bn(self.lin(x.flatten(1)))))
"""
