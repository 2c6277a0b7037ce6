"""The oracles of FedAvg and GradMA against rounds worked by hand."""

import numpy as np
from support.oracle_problems import CENTRES, quadratic, rounds

from . import batchnorm, fedavg, gradma
from .nets import MLPBatchNorm


def test_fedavg_by_hand():
    cohorts = [[0, 1]]
    x = fedavg.fedavg(
        [0.0, 0.0], cohorts, [1, 3, 1, 1, 1], rounds(cohorts, 1), quadratic, lr=0.5, server_lr=2.0
    )
    np.testing.assert_allclose(x[1], [0.5, 1.0])  # y_0 = (.5, 0), y_1 = (0, 1), d = (-.25, -.5)
    x = fedavg.fedavg(
        [0, 0], cohorts, [1, 3, 1, 1, 1], rounds(cohorts, 1), quadratic, lr=0.5, weights="samples"
    )
    np.testing.assert_allclose(x[1], [0.125, 0.75])
    x = fedavg.fedprox([0.0, 0.0], [[0]], [1] * 5, rounds([[0]]), quadratic, lr=0.5, mu=1.0)
    np.testing.assert_allclose(x[1], [0.5, 0.0])  # y = .5, then .5 - .5 (-.5 + .5)
    x = fedavg.fedavgm(
        [0.0, 0.0], [[0], [0]], [1] * 5, rounds([0, 0], 1), quadratic, lr=0.5, beta1=0.5
    )
    np.testing.assert_allclose(
        x[2], [1.0, 0.0]
    )  # d = -.5, m = -.5, x = .5; d = -.25, m = -.5, x = 1


def test_memory_by_hand():
    """m = 2. Round 2 evicts 0: it ties with 1 and entered first. Round 4 evicts 2: count 1 against
    2."""
    cohorts = [[0], [1], [2], [1], [0], [0, 3]]
    sizes, batches = [1] * 5, rounds(cohorts)
    out = gradma.trace(
        np.zeros(2),
        cohorts,
        sizes,
        batches,
        quadratic,
        lr=0.1,
        variant="gradma_s",
        beta1=0.5,
        beta2=0.5,
        memory=2,
    )
    assert out.evicted == [[], [], [0], [], [2], [1]]
    assert out.memory == [[0], [0, 1], [1, 2], [1, 2], [1, 0], [0, 3]]
    assert out.counts[4] == {1: 2, 0: 1}
    assert out.counts[5] == {0: 2, 3: 1}
    d = [0.19 * (x - CENTRES[i]) for x, i in zip(out.x, [0, 1, 2, 1, 0], strict=False)]
    np.testing.assert_allclose(out.rows[3][1], 0.25 * d[1] + d[3])
    np.testing.assert_allclose(out.rows[3][2], 0.5 * d[2])
    np.testing.assert_allclose(out.rows[4][0], d[4])
    for before, after, m_tilde in zip(out.x, out.x[1:], out.momentum, strict=False):
        np.testing.assert_allclose(before - after, m_tilde, atol=1e-14)
    for rows, m_tilde in zip(out.rows, out.momentum, strict=True):
        assert all(row @ m_tilde >= -1e-12 for row in rows.values())


def test_worker_by_hand():
    """Round 1: g = (1, 0) - (0, 2) = (1, -2); at x' = x_0 = (0, 3), a = (0, 1); QP(g, a) = (1, 0)."""
    cohorts = [[0], [1]]
    args = ([0.0, 3.0], cohorts, [1] * 5, rounds(cohorts, 1), quadratic)
    np.testing.assert_allclose(gradma.gradma_w(*args, lr=1.0)[1:], [[1, 0], [0, 0]], atol=1e-15)
    np.testing.assert_allclose(
        gradma.gradma_w(*args, lr=1.0, first_previous="global")[2], [0, 2], atol=1e-15
    )
    # Two steps of lr 1.5 to client 1: (0, 1.5) is past the centre (0, 2), so g = (0, -.5) against
    # a = b = (0, 1): g~ = 0 and y stays.
    args = ([0.0, 3.0], [[1]], [1] * 5, rounds([[1]], 2), quadratic)
    np.testing.assert_allclose(gradma.gradma_w(*args, lr=1.5)[1], [0, 1.5], atol=1e-15)
    np.testing.assert_allclose(fedavg.fedavg(*args, lr=1.5)[1], [0, 2.25], atol=1e-15)


def test_reset_starts_with_plain_sgd():
    cohorts = [[0, 1], [2, 0], [1, 0]]
    args = (np.ones(2), cohorts, [1] * 5, rounds(cohorts, 1), quadratic)
    reset = gradma.gradma_w(*args, lr=0.1, previous="reset")
    np.testing.assert_allclose(reset, fedavg.fedavg(*args, lr=0.1), atol=1e-15)


def test_batch_norm_statistics():
    net, rng = MLPBatchNorm(3, 4, 2), np.random.default_rng(2)
    x, y = rng.normal(size=(5, 3)), rng.integers(0, 2, size=5)
    w = rng.normal(size=net.size)
    one = [np.array([2])]
    after, s = batchnorm.local_sgd(net, w, batchnorm.initial(net), (x, y), one, 0.1)
    hidden = x[2] @ w[:12].reshape(4, 3).T + w[12:16]
    np.testing.assert_allclose(s.mean, 0.1 * hidden)
    np.testing.assert_allclose(s.var, 0.9)
    np.testing.assert_allclose(after[:16], w[:16])  # no gradient passes a batch of one
    a = batchnorm.Statistics(np.ones(4), np.ones(4), 5)
    b = batchnorm.Statistics(np.zeros(4), 3 * np.ones(4), 6)
    mean = batchnorm.average({0: a, 1: b}, [1, 3])
    assert (mean.mean[0], mean.var[0], mean.batches) == (0.5, 2.0, 5)
    mean = batchnorm.average({0: a, 1: b}, [1, 3], "samples")
    assert (mean.mean[0], mean.var[0], mean.batches) == (0.25, 2.5, 5)
    assert batchnorm.average({i: a for i in range(49)}, [1] * 49).batches == 5
    xs, history = batchnorm.run(w, [[0, 1]], [5, 5], [{0: one, 1: one}], net, [(x, y)] * 2, lr=0.1)
    np.testing.assert_allclose(xs[1], after)
    np.testing.assert_allclose(history[1].mean, s.mean)
