"""The oracles of the baselines against rounds worked by hand. Their gradients need no test here:
tests/rules compares them with autograd."""

import numpy as np
import pytest
from support.oracle_problems import CENTRES, quadratic, rounds

from . import fedavg, feddyn, fednova, fedopt, mifa, mimelite, scaffold


def test_scaffold_by_hand():
    """f_0 has its minimum at (1, 0), f_1 at (0, 2); lr 0.5, one step, then clients 0 and 1 once
    more."""
    cohorts = [[0, 1], [0]]
    args = ([0.0, 0.0], cohorts, [1, 3, 1, 1, 1], rounds(cohorts, 1), quadratic)
    out = scaffold.trace(*args, lr=0.5, server_lr=2.0)
    # y_0 = (.5, 0), y_1 = (0, 1), d = -y; K lr = .5: c_0 = (-1, 0), c_1 = (0, -2); x = 2 (.25, .5);
    # c = (-.2, -.4)
    np.testing.assert_allclose(out.x[1], [0.5, 1.0])
    np.testing.assert_allclose(out.c[0], [-0.2, -0.4])
    np.testing.assert_allclose(out.rows[0][1], [0.0, -2.0])
    # g = (-.5, 1); g - c_0 + c = (.3, .6); y = (.35, .7); c_0+ = (-1, 0) - (-.2, -.4) + (.3, .6) =
    # (-.5, 1)
    np.testing.assert_allclose(out.x[2], [0.2, 0.4])
    np.testing.assert_allclose(out.rows[1][0], [-0.5, 1.0])
    np.testing.assert_allclose(out.c[1], [-0.1, -0.2])
    samples = scaffold.trace(*args, lr=0.5, server_lr=2.0, weights="samples")
    np.testing.assert_allclose(samples.x[1], [0.25, 1.5])
    np.testing.assert_allclose(samples.c[0], out.c[0])


def test_feddyn_by_hand():
    """alpha 1, lr 0.5, one step. Then client 0 once more: its gradient has lambda_0 in it, and x
    has h."""
    cohorts = [[0, 1], [0]]
    args = ([0.0, 0.0], cohorts, [1, 3, 1, 1, 1], rounds(cohorts, 1), quadratic)
    out = feddyn.trace(*args, lr=0.5, alpha=1.0)
    # y_0 = (.5, 0), y_1 = (0, 1): a = (.25, .5), h = (.5, 1) / 5
    np.testing.assert_allclose(out.h[0], [0.1, 0.2])
    np.testing.assert_allclose(out.x[1], [0.35, 0.7])
    # g + lambda_0 = (-.65, .7) + (.5, 0); y = (.425, .35), y - x = (.075, -.35); h = (.115, .13)
    np.testing.assert_allclose(out.rows[1][0], [0.575, -0.35])
    np.testing.assert_allclose(out.x[2], [0.54, 0.48])
    np.testing.assert_allclose(
        feddyn.run(*args, lr=0.5, alpha=1.0, weights="samples")[1], [0.225, 0.95]
    )
    # scaled: n = 7 / 5, so alpha_0 = 1.4; the first step has no part of it, the second has
    scaled = feddyn.trace(*args, lr=0.5, alpha=1.0, scale_alpha=True)
    np.testing.assert_allclose(scaled.x[1], out.x[1])
    np.testing.assert_allclose(scaled.rows[1][0], [0.5 + 0.325 - 0.35, -0.35])


def test_mimelite_by_hand():
    """beta 0.5, lr 0.5, one step: the first round knows no m, the second one does."""
    cohorts = [[0, 1], [0]]
    args = ([0.0, 0.0], cohorts, [1, 3, 1, 1, 1], rounds(cohorts, 1), quadratic)
    xs = mimelite.run(*args, lr=0.5, beta=0.5)
    # steps .25 g: y_0 = (.25, 0), y_1 = (0, .5); m = .5 mean(q) = .5 (-.5, -1)
    np.testing.assert_allclose(xs[1], [0.125, 0.25])
    # q = (-.875, .25); direction .5 q + .5 m = (-.5625, -.125)
    np.testing.assert_allclose(xs[2], [0.40625, 0.3125])
    xs = mimelite.run(*args, lr=0.5, beta=0.5, damped=False)
    np.testing.assert_allclose(
        xs[1], [0.25, 0.5]
    )  # m = (-.5, -1); q = (-.75, .5), direction (-1, 0)
    np.testing.assert_allclose(xs[2], [0.75, 0.5])


def test_mifa_waits_for_everybody():
    """Four of five clients have samples; the last of the four comes in round 2. Client 0's row is
    then the one of round 1, taken at x_0 like all the others, with the lr of its round."""
    cohorts, sizes = [[0, 1], [0, 2], [4, 3], [0, 1]], [1, 2, 1, 0, 4]
    args = ([0.0, 0.0], cohorts, sizes, rounds(cohorts, 1), quadratic)
    xs = mifa.run(*args, lr=lambda t: 0.5 + 0.1 * t, wait=True)
    np.testing.assert_array_equal(xs[1:3], np.zeros((2, 2)))
    expected = (0.6 * CENTRES[0] + 0.5 * CENTRES[1] + 0.6 * CENTRES[2] + 0.7 * CENTRES[4]) / 4
    np.testing.assert_allclose(xs[3], expected)
    by_samples = mifa.run(*args, lr=0.5, wait=True, weights="samples")
    np.testing.assert_allclose(
        by_samples[3], 0.5 * (CENTRES[0] + 2 * CENTRES[1] + CENTRES[2] + 4 * CENTRES[4]) / 8
    )
    assert mifa.run(*args, lr=0.5)[1].any()
    m = mifa.mifam(*args, lr=lambda t: 0.5 + 0.1 * t, beta1=0.9, wait=True)
    np.testing.assert_allclose(m[:4], xs[:4])  # m stood still as well


def test_fedopt_by_hand():
    """One coordinate, d = 0.4 then d = -0.1 (from lr 1 clients at distance): v from tau^2, no bias
    correction."""
    ds = [0.4, -0.1]
    args = ([0.0], [[0], [0]], [1], [{0: [0]}, {0: [1]}], lambda w, i, batch: np.array([ds[batch]]))
    hyper = {"lr": 1.0, "server_lr": 0.1}
    m1, m2 = -0.04, -0.036 + 0.01
    v1 = 0.99e-6 + 0.01 * 0.16
    x1 = 0.1 * m1 / (np.sqrt(v1) + 1e-3)
    adam = fedopt.fedadam(*args, **hyper)
    np.testing.assert_allclose(
        np.ravel(adam)[1:], [x1, x1 + 0.1 * m2 / (np.sqrt(0.99 * v1 + 1e-4) + 1e-3)]
    )
    v1 = (
        1e-6 + 0.01 * 0.16
    )  # Yogi: v_0 < Delta^2, so it grows by all of 0.01 Delta^2; then v > 0.01 still below it
    v2 = v1 + 0.01 * 0.01
    x1 = 0.1 * m1 / (np.sqrt(v1) + 1e-3)
    yogi = fedopt.fedyogi(*args, **hyper)
    np.testing.assert_allclose(np.ravel(yogi)[1:], [x1, x1 + 0.1 * m2 / (np.sqrt(v2) + 1e-3)])
    v1, v2 = 1e-6 + 0.16, 1e-6 + 0.17
    x1 = -0.1 * 0.4 / (np.sqrt(v1) + 1e-3)
    adagrad = fedopt.fedadagrad(*args, **hyper)
    np.testing.assert_allclose(np.ravel(adagrad)[1:], [x1, x1 + 0.1 * 0.1 / (np.sqrt(v2) + 1e-3)])
    ams = fedopt.fedams(*args, **hyper)  # v_1 = .0016 > tau; v_2 = .00168
    v1 = 0.99e-6 + 0.0016
    x1 = 0.1 * m1 / np.sqrt(v1)
    np.testing.assert_allclose(np.ravel(ams)[1:], [x1, x1 + 0.1 * m2 / np.sqrt(0.99 * v1 + 1e-4)])
    floor = fedopt.fedams(*args, **hyper, tau=0.25)  # v_0 = .0625, v_1 = .063475: tau rules
    np.testing.assert_allclose(floor[1], 0.1 * m1 / 0.5)


@pytest.mark.parametrize("hyper", [{}, {"rho": 0.9}, {"rho": 0.3}, {"mu": 0.7}], ids=str)
@pytest.mark.parametrize("tau", [1, 2, 5])
def test_a_i_is_the_work_in_an_update(hyper, tau):
    """With a gradient of constant 1, d_i = lr a_i."""
    lr, zero = 0.2, np.zeros(1)

    def constant(w, client, batch):
        return np.ones(1)

    if "rho" in hyper:
        y = fednova.local_momentum(zero, 0, [None] * tau, constant, lr, hyper["rho"])
    else:
        y = fedavg.local_prox(zero, 0, [None] * tau, constant, lr, hyper.get("mu", 0.0))
    assert fednova.work(tau, lr=lr, **hyper) == pytest.approx(float(-y[0]) / lr, rel=1e-12)


def test_fednova_by_hand():
    """lr 0.5: client 0 takes 1 step to (.5, 0), client 1 two to (0, 1.5); tau_eff by samples (1·1 +
    3·2)/4 = 1.75."""
    args = ([0.0, 0.0], [[0, 1]], [1, 3, 1, 1, 1], [{0: [None], 1: [None] * 2}], quadratic)
    np.testing.assert_allclose(fednova.run(*args, lr=0.5)[1], 1.75 * np.array([0.125, 0.5625]))
    np.testing.assert_allclose(
        fednova.run(*args, lr=0.5, weights="uniform")[1], 1.5 * np.array([0.25, 0.375])
    )
    np.testing.assert_allclose(
        fednova.run(*args, lr=0.5, server_lr=2.0)[1], 3.5 * np.array([0.125, 0.5625])
    )
