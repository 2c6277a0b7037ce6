"""Selection rules of the gallery against their papers' formulas: probabilities on a pool, utilities
in a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from math import exp, log, sqrt

import numpy as np
import pytest
import torch
from oracle.nets import MLP
from support.examples import gallery
from support.oracle_cases import NETS
from support.server_rules import reports

from raysim.config.references import load_object
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare
from raysim.rules import SelectionPool
from raysim.rules.rule import Problem

SAMPLES = [4, 9, 16, 25, 36, 49]
LAST = [0, 2, -1, 1, 0, 0]
DURATION = [1.0, 2.0, np.nan, 0.5, 4.0, 1.0]
LOSS = [2.0, 1.0, np.nan, 0.3, 0.5, 0.4]
UTILITY = [3.0, 0.95, np.nan, 0.8, 2.0, 0.72]
DRAWS = 3000


def rule(path: str, **fields):
    return load_object(f"{gallery.FOLDER}/{path}", "server")(**fields)


def pool(size: int, seen: Sequence[int] = range(6)) -> SelectionPool:
    """Six clients with numbers from 10, of which the third and those outside of `seen` never took
    part."""
    known = np.isin(np.arange(6), list(seen))
    loss, duration, utility = (np.where(known, v, np.nan) for v in (LOSS, DURATION, UTILITY))
    last = np.where(known, LAST, -1)
    ids = np.arange(10, 16)
    metrics = {"U": utility, "loss": loss}
    samples, other = np.array(SAMPLES), np.full(6, np.nan)
    n_rounds = np.zeros(6, int)
    return SelectionPool(ids, samples, other, duration, last, other, metrics, n_rounds, size, 3)


def frequencies(server, clients: SelectionPool, state=None) -> np.ndarray:
    """Share of the draws in which each client was selected; all cohorts have the same size."""
    rng = np.random.default_rng(5)
    state = server.init(torch.zeros(3), Problem(16, 3, 3)) if state is None else state
    drawn = [server.select(state, clients, rng) for _ in range(DRAWS)]
    assert {len(set(cohort)) for cohort in map(tuple, drawn)} == {min(clients.size, 6)}
    return np.bincount(np.concatenate(drawn) - 10, minlength=6) / DRAWS


def inclusion(p: dict[int, float], m: int) -> np.ndarray:
    """Probability that each client is among m draws without replacement, in proportion to p."""
    found = np.zeros(6)
    for order in permutations(p, m):
        probability, left = 1.0, sum(p.values())
        for i in order:
            probability *= p[i] / left
            left -= p[i]
        found[list(order)] += probability
    return found


def test_afl_draws_as_algorithm_1_of_its_paper():
    """Goetz 2019: v = Σ loss / √n, α1 K smallest out, (1 - α3) m by exp(α2 v), α3 m uniformly from
    the others."""
    server = rule("selection/afl.py:AFLServer", alpha1=0.5, alpha2=0.8, alpha3=1 / 3)
    v = {i: n * loss / sqrt(n) for i, (n, loss) in enumerate(zip(SAMPLES, LOSS, strict=True))}
    known = sorted((i for i in v if LAST[i] >= 0), key=v.__getitem__)
    kept = {i: exp(0.8 * v[i]) for i in known[2:]}  # the unknown client is the third that is out
    by_value = inclusion(kept, 2)
    expected = by_value + (1 - by_value) / 4
    assert np.allclose(frequencies(server, pool(3)), expected, atol=0.035)
    assert np.ptp(expected) > 0.2


@pytest.mark.parametrize("path", ["afl.py:AFLServer", "oort.py:OortServer"])
def test_clients_that_nobody_knows_are_drawn_uniformly(path):
    assert np.allclose(frequencies(rule(f"selection/{path}"), pool(3, [])), 0.5, atol=0.035)


def test_oort_draws_by_utility_and_explores():
    """Lai 2021, algorithm 1: ε of the cohort is new, the others are above the cut."""
    server = rule("selection/oort.py:OortServer", T=1.5, alpha=2.0, epsilon=0.4, decay=1.0)
    utility = {
        i: (UTILITY[i] + sqrt(0.1 * log(4) / (LAST[i] + 1)))
        * ((1.5 / DURATION[i]) ** 2.0 if DURATION[i] > 1.5 else 1.0)
        for i in range(6)
        if LAST[i] >= 0
    }
    last = sorted(utility.values(), reverse=True)[1]  # of three, one is new
    above = {i: u for i, u in utility.items() if u >= 0.95 * last}
    assert set(above) == {0, 3, 5}, "two are slow, and one of the first two may be replaced"
    expected = inclusion(above, 2)
    expected[2] = 1.0
    assert 0.75 < expected[0] < 0.95
    assert np.allclose(frequencies(server, pool(3)), expected, atol=0.035)


def test_oort_selects_the_known_ones_if_there_are_not_enough_others():
    server = rule("selection/oort.py:OortServer", epsilon=0.5)
    assert frequencies(server, pool(6)).tolist() == [1.0] * 6
    state = server.init(torch.zeros(3), Problem(16, 3, 3))
    assert set(server.select(state, pool(5, [0, 1]), np.random.default_rng(0))) > {10, 11}


@pytest.mark.parametrize(
    ("epsilon", "decay", "least", "n_new"),
    [(0.9, 0.5, 0.2, 1), (0.9, 0.98, 0.2, 3), (1.0, 0.9, 0.0, 2), (0.9, 0.5, 0.6, 2)],
)
def test_oort_explores_less_from_round_to_round(epsilon, decay, least, n_new):
    """In the fourth round ε is max(least, ε decay³); of a cohort of three so many are new."""
    server = rule(
        "selection/oort.py:OortServer", epsilon=epsilon, decay=decay, epsilon_min=least, T=9.0
    )
    new = frequencies(server, pool(3, [0, 3, 5]))[[1, 2, 4]]
    assert new.sum() == pytest.approx(n_new)
    assert np.allclose(new, n_new / 3, atol=0.035)


def test_oort_cuts_large_utilities_off():
    """With clip 0.5 the third of the five known values is the largest that counts."""
    server = rule("selection/oort.py:OortServer", T=9.0, clip=0.5, epsilon=0.0, epsilon_min=0.0)
    third = sorted(u for i, u in enumerate(UTILITY) if LAST[i] >= 0)[2]
    utility = {
        i: min(UTILITY[i], third) + sqrt(0.1 * log(4) / (LAST[i] + 1))
        for i in range(6)
        if LAST[i] >= 0
    }
    last = sorted(utility.values(), reverse=True)[1]
    above = {i: u for i, u in utility.items() if u >= 0.95 * last}
    assert set(above) == {0, 4}, "client 0 would else be drawn more often"
    assert np.allclose(frequencies(server, pool(1)), inclusion(above, 1), atol=0.035)


def test_oort_does_not_prefer_clients_on_the_blacklist():
    """Of six at most one (30 %): that with the most rounds, not the other one above the limit."""
    server = rule("selection/oort.py:OortServer", T=9.0, blacklist=3, epsilon=0.0, epsilon_min=0.0)
    clients = pool(2)
    clients.n_rounds[[0, 4]] = 5, 4
    found = frequencies(server, clients)
    assert found[0] == 0 < found[4]
    clients.n_rounds[:] = 3
    assert frequencies(server, clients)[0] > 0.5


def test_the_pacer_of_oort():
    """T grows by Δ after a round if the sum of U over the last W rounds is below that before."""
    server = rule("selection/oort.py:OortServer", T=1.5, Delta=0.1, W=2)
    state = server.init(torch.zeros(3, dtype=torch.float64), Problem(4, 2, 3))
    U = [[3, 2], [1, 4], [5, 1], [2, 1], [4, 4], [9, 0], [0, 1]]
    T, sums = 1.5, np.sum(U, axis=1)
    for t, values in enumerate(U):
        done = sums[: t + 1]
        if t >= 3 and done[-4:-2].sum() > done[-2:].sum():
            T += 0.1
        received = reports(np.zeros((2, 3)), t=t)
        received.totals["sum", "U"] = torch.tensor([float(sum(values))])
        state = server.update(state, received)
        assert float(state["T"]) == pytest.approx(T, abs=1e-12)
        assert received.metrics["preferred_duration"] == pytest.approx(T)
    assert round(T, 9) == 1.7


@pytest.mark.parametrize(
    ("name", "metric", "value"),
    [
        ("oort.py:Oort", "client/U", lambda v: len(v) * sqrt(np.mean(np.square(v)))),
        ("afl.py:AFL", "client/loss", np.mean),
    ],
)
def test_clients_report_the_losses_of_the_received_model(name, metric, value, engine, ragged):
    """Oort: U = n √(mean of the examples' squared losses). AFL: the mean loss, so that v = √n loss."""
    path = f"{gallery.FOLDER}/selection/{name}"
    config = {"client": f"{path}Client", "server": f"{path}Server", "dtype": "float64",
              "rounds": 2, "model": NETS["mlp"][0], "partition": ragged([7, 12, 20]),
              "local": {"steps": 1, "lr": 0.2}, "schedule": {"cohort": 3}}  # fmt: skip
    run, records = engine(config)
    data, net = run.plan.dataset, NETS["mlp"][1]
    assert isinstance(net, MLP)
    scale, shift = (v.astype(np.float64)[:, None, None] for v in (data.scale, data.shift))
    x = (data.x.astype(np.float64) * scale + shift).reshape(len(data.y), -1)
    for t in range(2):
        found = []
        for i in range(3):
            losses = [
                net.loss(run.executor.xs[t], x[k : k + 1], data.y[k : k + 1])
                for k in run.plan.clients.client(i)
            ]
            found.append(value(losses))
        assert records[t + 1][metric] == pytest.approx(np.mean(found), rel=1e-9)


BATCH_NORM = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
"""


@pytest.mark.parametrize(
    ("name", "metric", "value"),
    [
        ("oort.py:Oort", "client/U", lambda v: len(v) * sqrt(np.mean(np.square(v)))),
        ("afl.py:AFL", "client/loss", np.mean),
    ],
)
def test_the_received_model_has_the_received_statistics(
    name, metric, value, engine, ragged, source
):
    """BatchNorm begins with mean 0, variance 1, weight 1 and bias 0."""
    path = f"{gallery.FOLDER}/selection/{name}"
    config = {"client": f"{path}Client", "server": f"{path}Server", "dtype": "float64",
              "rounds": 1, "model": f"{source('batch_norm', BATCH_NORM)}:Net",
              "partition": ragged([7, 12, 20]),
              "local": {"steps": 1, "lr": 0.2}, "schedule": {"cohort": 3}}  # fmt: skip
    run, records = engine(config)
    data, x0 = run.plan.dataset, torch.from_numpy(run.executor.xs[0])
    scale, shift = (v.astype(np.float64)[:, None, None] for v in (data.scale, data.shift))
    x = torch.from_numpy((data.x.astype(np.float64) * scale + shift).reshape(len(data.y), -1))
    logits = x / sqrt(1 + 1e-5) @ x0[128:768].reshape(10, 64).T + x0[768:]
    y = torch.from_numpy(np.asarray(data.y)).long()
    losses = torch.nn.functional.cross_entropy(logits, y, reduction="none").numpy()
    found = [value(losses[run.plan.clients.client(i)]) for i in range(3)]
    assert records[1][metric] == pytest.approx(np.mean(found), rel=1e-9)


@pytest.mark.parametrize("name", ["selection/oort.py:Oort", "personalised/fedproto.py:FedProto"])
def test_uploads_without_noise_are_refused_under_privacy(name, base, ragged):
    path = f"{gallery.FOLDER}/{name}"
    config = {**base, "client": f"{path}Client", "server": f"{path}Server", "rounds": 1,
              "model": NETS["mlp"][0], "partition": ragged([7, 12, 20]), "schedule": {"cohort": 3},
              "privacy": {"max_grad_norm": 1.0, "noise_multiplier": 1.0}}  # fmt: skip
    with pytest.raises(ConfigError, match="privacy: client rule"):
        prepare(config)
