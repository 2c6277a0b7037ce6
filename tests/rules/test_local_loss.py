"""Rules that change the local loss, sizes of features in uploads, and the loss over all of a
client's examples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.oracle_cases import MODES, NETS, distance, feed
from support.programs import program

from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare
from raysim.rules import Batch, Upload
from raysim.rules.rule import Problem

LR = 0.2
NET = NETS["mlp"][1]

RULES = program("local_loss_rules")


@pytest.fixture
def config(small_mlp):
    return small_mlp(RULES, rounds=2)


@pytest.mark.parametrize("mode", MODES)
def test_local_steps_minimise_the_loss_of_the_rule(mode, config, engine):
    """The gradient at w of the loss of 3 z is that of a net with three times the last layer, by the
    chain rule."""
    done, _ = engine(config(mode, client="FILE:Sharp"))
    f, body = feed(done), 64 * 8 + 8
    scale = np.where(np.arange(NET.size) < body, 1.0, 3.0)
    xs = [f.x0]
    for t, cohort in enumerate(f.cohorts):
        ends = []
        for i in cohort:
            w, (x, y) = xs[-1], f.data[i]
            for b in f.batches[t][i]:
                w = w - LR * scale * NET.grad(scale * w, x[b], y[b])
            ends.append(w)
        xs.append(np.mean(ends, axis=0))
    assert distance(done.executor.xs, xs) < 1e-9


def test_the_loss_of_the_task_is_local_sgd(config, engine):
    plain, _ = engine(config())
    same, _ = engine(config(client="FILE:Same"))
    assert distance(same.executor.xs, plain.executor.xs) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_uploads_of_features_and_the_loss_before_training(mode, config, engine):
    done, records = engine(config(mode, client="FILE:Tells", server="FILE:Means"), states=True)
    f = feed(done)
    x, cohort = done.executor.xs[-2], f.cohorts[-1]
    W1, b1 = x[: 64 * 8].reshape(8, 64), x[64 * 8 : 64 * 8 + 8]
    mean = np.mean([np.maximum(f.data[i][0] @ W1.T + b1, 0).mean(0) for i in cohort], axis=0)
    assert np.allclose(done.executor.states[-1]["state/mean"], mean, rtol=1e-9)
    loss = np.mean([NET.loss(x, *f.data[i]) for i in cohort])
    assert records[-1]["client/loss_before"] == pytest.approx(loss)


def test_the_loss_of_all_examples_is_not_private(config, engine):
    privacy = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    with pytest.raises(ConfigError, match=r"task\.full_loss.*`unprotected_uploads`"):
        engine(config(client="FILE:Unprotected", privacy=privacy))


def test_features_of_a_net_without_a_classifier_on_them_are_refused(config, base):
    given = config(client="FILE:Tells", server="FILE:Means", model={"name": "logistic"})
    with pytest.raises(
        ConfigError, match=r"model: client rule 'tells' needs features, but 'logistic'"
    ):
        prepare({**base, **given})


def test_declared_sizes():
    sizes = Problem(n_clients=9, cohort=3, size=50, classes=4, features=7)
    assert Upload(("C", "F", 2)).resolved(sizes, torch.float32).shape == (4, 7, 2)
    with pytest.raises(ValueError, match=r'"F" \(the number of features'):
        Upload("Q")


def test_positions_of_the_classifier():
    names = {"names": ("a", "b.weight", "b.bias"), "segments": (3, 4, 2)}
    problem = Problem(n_clients=9, cohort=3, size=9, classifier=("b.weight", "b.bias"), **names)
    assert problem.classifier_positions.tolist() == [3, 4, 5, 6, 7, 8]
    assert Problem(n_clients=9, cohort=3, size=9, **names).classifier_positions.tolist() == []


def test_sums_of_classes():
    values = torch.tensor([[1.0, 2.0], [3.0, 5.0], [10.0, 20.0]])
    sums, counts = Batch(values, torch.tensor([2, 0, 2])).class_sums(values, 4)
    assert sums.tolist() == [[3, 5], [0, 0], [11, 22], [0, 0]]
    assert counts.tolist() == [[1], [0], [2], [0]]


def test_numbers_for_the_servers_state_are_keyed():
    draw = [
        Problem(n_clients=9, cohort=3, size=50, seed=seed).rng(name).random()
        for seed, name in ((1, "a"), (1, "a"), (2, "a"), (1, "b"))
    ]
    assert draw[0] == draw[1] and len(set(draw)) == 3
