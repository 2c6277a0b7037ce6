"""Methods of the gallery that treat body and classifier differently, against their papers'
formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.gallery_runs import BODY, LR, NET, gradient, net
from support.oracle_cases import MODES, distance
from torch.nn.functional import cross_entropy


@pytest.mark.parametrize("mode", MODES)
def test_lgfedavg(mode, train):
    """Liang 2020, algorithm 1: local SGD on (own representation, shared classifier); the
    classifiers are averaged."""
    done = train(mode, client="personalised/lgfedavg.py:LGFedAvgClient")
    bodies: dict[int, np.ndarray] = {}

    def local(x, i, batches):
        w = np.concatenate([bodies.setdefault(i, x[:BODY]), x[BODY:]])
        for X, y in batches:
            w = w - LR * NET.grad(w, X, y)
        bodies[i] = w[:BODY]
        return np.concatenate([x[:BODY], w[BODY:]])

    xs = done.averaged(local)
    assert distance(done.xs, xs) < 1e-9
    loss = done.mean_test_loss(
        lambda i: np.concatenate([bodies.setdefault(i, xs[0][:BODY]), xs[-1][BODY:]])
    )
    assert done.records[-1]["clients/loss"] == pytest.approx(loss)


@pytest.mark.parametrize("mode", MODES)
def test_fedbabu(mode, train):
    """Oh 2022, algorithm 1: the classifier stays as it was drawn; bodies are trained and averaged."""
    client, decay = "personalised/fedbabu.py:FedBABUClient", 0.1
    done = train(mode, client=client, local={"weight_decay": decay})

    def local(x, i, batches):
        w = x
        for X, y in batches:
            weights = np.where(np.arange(len(w)) < BODY - 8, w, 0)  # the biases do not decay
            w = w - LR * (NET.grad(w, X, y) + decay * weights)
            w = np.concatenate([w[:BODY], done.xs[0][BODY:]])
        return w

    assert distance(done.xs, done.averaged(local)) < 1e-9
    used = sum(map(len, done.feed.cohorts))
    for direction in ("bytes_up", "bytes_down"):
        assert done.records[-1][direction] == used * BODY * 8, "the classifier is never sent"


@pytest.mark.parametrize("mode", MODES)
def test_fedrod(mode, train):
    """Chen 2022, equations 6 to 8: body and generic head by balanced softmax, exp(z_c + log n_c);
    the personal head by the cross-entropy of the sum of both heads, with features and generic head
    fixed."""
    done = train(mode, client="personalised/fedrod.py:FedRoDClient")
    heads: dict[int, np.ndarray] = {}

    def local(w, i, batches):
        n = np.bincount(done.feed.data[i][1], minlength=10)
        log_n = torch.from_numpy(np.log(np.maximum(n, 1e-8)))
        head = heads.get(i, np.zeros(90))
        for X, y in batches:
            features, generic = net(torch.from_numpy(w), X)
            labels = torch.from_numpy(y)

            def personal(h, features=features, generic=generic, labels=labels):
                own = features @ h[:80].reshape(10, 8).T + h[80:]
                return cross_entropy(generic + own, labels)

            def balanced(w, X=X, labels=labels):
                return cross_entropy(net(w, X)[1] + log_n, labels)

            w, head = w - LR * gradient(balanced, w), head - LR * gradient(personal, head)
        heads[i] = head
        return w

    xs = done.averaged(local)
    assert distance(done.xs, xs) < 1e-9

    def model(i):
        return xs[-1] + np.concatenate([np.zeros(BODY), heads.get(i, np.zeros(90))])

    assert done.records[-1]["clients/loss"] == pytest.approx(done.mean_test_loss(model))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nearest", [True, False])
def test_fedproto(mode, nearest, train):
    """Tan 2022, algorithm 1: local steps on cross-entropy + λ d(f(x), prototype of y); prototypes
    are the mean features of a class, weighted by examples; models are never averaged. An example is
    of the class whose prototype is nearest."""
    done = train(
        mode,
        client={"name": "personalised/fedproto.py:FedProtoClient", "lam": 0.7, "nearest": nearest},
        server="personalised/fedproto.py:FedProtoServer",
        local={"personal": "*"},
    )
    x0, models = done.xs[0], {}
    prototypes = torch.full((10, 8), torch.nan, dtype=torch.float64)
    for t, cohort in enumerate(done.feed.cohorts):
        sums, counts = torch.zeros(10, 8).double(), torch.zeros(10, 1).double()
        for i in cohort:
            w = models.get(i, x0)
            for X, y in done.batches(t, i):

                def loss(w, X=X, y=y, prototypes=prototypes):
                    features, logits = net(w, X)
                    total = cross_entropy(logits, torch.from_numpy(y))
                    for f, label in zip(features, y, strict=True):
                        if not prototypes[label].isnan().any():
                            total = total + 0.7 * ((f - prototypes[label]) ** 2).mean() / len(y)
                    return total

                w = w - LR * gradient(loss, w)
            models[i] = w
            X, y = done.feed.data[i]
            for f, label in zip(net(torch.from_numpy(w), X)[0], y, strict=True):
                sums[label] += f
                counts[label] += 1
        new = sums / counts
        prototypes = torch.where(new.isnan(), prototypes, new)
    assert np.allclose(done.states[-1]["prototypes"], prototypes, rtol=1e-9, equal_nan=True)
    for i, w in models.items():
        assert np.allclose(done.kept(i)["personal parameters"], w, rtol=1e-9)
    assert np.array_equal(done.xs[-1], x0)
    if nearest:
        shares = []
        for i, (X, y) in done.tests().items():
            distances = torch.cdist(net(torch.from_numpy(models.get(i, x0)), X)[0], prototypes)
            shares.append((distances.nan_to_num(torch.inf).argmin(1).numpy() == y).mean())
        assert done.records[-1]["clients/accuracy"] == pytest.approx(np.mean(shares))
    else:
        loss = done.mean_test_loss(lambda i: models.get(i, x0))
        assert done.records[-1]["clients/loss"] == pytest.approx(loss)
    used = sum(map(len, done.feed.cohorts))
    assert done.records[-1]["bytes_up"] == used * (10 * 8 + 10) * 8
    assert done.records[-1]["bytes_down"] == used * 10 * 8 * 8
