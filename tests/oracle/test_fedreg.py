"""The oracles of FedReg, FedCurv and DP-SGD against cases worked by hand."""

import numpy as np
import pytest

from . import dpsgd, fedcurv, fedreg
from .nets import Blocks


def test_a_hopeless_sample_has_hardly_any_gradient():
    """p = e^-40 = 4e-18 of the true label: p/(p + 1e-12) of the usual gradient, 4e-6."""
    z, y = np.array([[0.0, 40.0]]), np.array([[1.0, 0.0]])
    np.testing.assert_allclose(fedreg.soft_loss(z, y), -np.log(1e-12), rtol=1e-6)
    np.testing.assert_allclose(
        fedreg.soft_loss_gradient(z, y), np.exp(-40) / 1e-12 * np.array([[-1, 1]]), rtol=1e-5
    )


# --- made images


def test_sign_steps_by_hand():
    """Logits (x, -x) and label 0: uphill is downwards, always; with label 1 upwards."""
    net, theta0 = fedreg.OneLayer(1, 2), np.array([1.0, -1.0, 0.0, 0.0])
    x, y = np.array([[0.5], [-0.25]]), fedreg.onehot(np.array([0, 1]), 2)
    np.testing.assert_allclose(fedreg.ascend(net, theta0, x, y, 0.2, 3), [[-0.1], [0.35]])
    np.testing.assert_array_equal(x, [[0.5], [-0.25]])
    np.testing.assert_allclose(
        fedreg.ascend(net, theta0, x, y, 0.2, 3, clamp=True), [[-0.1], [0.35]]
    )
    np.testing.assert_allclose(
        fedreg.ascend(net, theta0, x, y, 0.2, 9, clamp=True), [[-0.25], [0.5]]
    )
    made = fedreg.make(net, theta0, x, y, eta_s=0.2, eta_p=0.002, ascent=3)
    np.testing.assert_allclose(made.x_p, [[0.494], [-0.244]])
    p = 1 / (1 + np.exp(-2 * made.x_s[:, 0]))
    np.testing.assert_allclose(made.y_s, np.stack([p, 1 - p], axis=1))
    np.testing.assert_array_equal(made.y_p, y)


def test_where_the_gradient_is_0_nothing_moves():
    """The second pixel has no weight: sign(0) = 0. The hidden unit is dead for the second image: it
    stays."""
    net = Blocks(2, [1], 2)
    theta0 = np.array([1.0, 0.0, 0.0, 1.0, -1.0, 0.0, 0.0])
    x, y = np.array([[0.5, 3.0], [-0.5, 3.0]]), fedreg.onehot(np.array([1, 1]), 2)
    np.testing.assert_allclose(fedreg.ascend(net, theta0, x, y, 0.1, 2), [[0.7, 3.0], [-0.5, 3.0]])
    np.testing.assert_allclose(fedreg.ascend(net, theta0, -x, 1 - y, 0.1, 20)[:, 1], [-3.0, -3.0])


def test_clamping_is_done_at_every_step():
    """In [0, 1] with a gradient that turns at 0.9: clamped at each step the image goes on from 1,
    not from beyond."""

    class Turning:
        shapes = ((2, 1), (2,))

        def forward(self, w, x):
            self.x = x
            return type("Out", (), {"logits": np.zeros((len(x), 2))})

        def backward(self, w, out, dz):
            return None, np.where(self.x < 0.9, 1.0, -1.0)

    x, y = np.array([[0.0], [1.0]]), np.eye(2)
    each = fedreg.ascend(Turning(), None, x, y, 0.4, 5, clamp=True)
    np.testing.assert_allclose(each, [[1.0], [0.6]])  # .4 .8 1 .6 1 and .6 1 .6 1 .6
    free = fedreg.ascend(Turning(), None, x, y, 0.4, 5)
    np.testing.assert_allclose(free, [[1.2], [0.6]])  # .4 .8 1.2 .8 1.2


# --- the step


def scalar(theta0, x, y, *, lr, gamma, eta_s, eta_p, ascent, steps, mg=False):
    """One image x, logits ±(a x + b): FedReg on (a, b) with p = P(label 0) = s(2 (a x + b)), s the
    logistic function.

    Gradient of -sum_k y_k log p_k in the four parameters (a, -a, b, -b): c (x, -x, 1, -1), c = p -
    y_0. So all of them lie in one plane; inner products are twice those of (x, 1). One image: the
    mean is it.
    """

    def p(theta, x):
        return 1 / (1 + np.exp(-2 * (theta[0] * x + theta[1])))

    def grad(theta, x, y0):
        return (p(theta, x) - y0) * np.array([x, 1.0])

    theta0 = np.array(theta0)
    s = x
    r = x
    for _ in range(ascent):
        s = s + eta_s * np.sign((p(theta0, s) - y) * theta0[0])
        r = r + eta_p * np.sign((p(theta0, r) - y) * theta0[0])
    label = p(theta0, s)
    theta = theta0
    for _ in range(steps):
        mixed = gamma * theta + (1 - gamma) * theta0
        g = grad(mixed, x, y)
        if mg:
            q = grad(mixed, s, 0.5)
            g = g - (g @ q) / (q @ q) * q
        theta = theta - lr * g
        middle = (theta + theta0) / 2
        g_s, g_p = grad(middle, s, label), grad(middle, r, y)
        w_s = max(0, (theta - theta0) @ g_s / (g_s @ g_s + 1e-30))
        w_p = max(0, (theta - w_s * g_s - theta0) @ g_p / (g_p @ g_p + 1e-30))
        theta = theta - w_s * g_s - w_p * g_p
    return theta, w_s, w_p


@pytest.mark.parametrize("mg", [False, True])
@pytest.mark.parametrize("gamma", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(
    "a, b, x, y", [(0.7, 0.2, 1.1, 1), (0.7, 0.2, 1.1, 0), (-0.4, 0.3, 0.5, 1), (0.3, -1.0, 2.0, 0)]
)
def test_one_image_and_two_classes_by_hand(a, b, x, y, gamma, mg):
    net, data = fedreg.OneLayer(1, 2), [(np.array([[x]]), np.array([1 - y]))]
    hyper = {"lr": 0.3, "gamma": gamma, "eta_s": 0.2, "ascent": 3, "mg": mg}
    one = [np.array([0])]
    x0 = np.array([a, -a, b, -b])
    out = fedreg.trace(x0, [[0]], [1], [{0: one * 3}], net, data, [{0: one}], **hyper)
    theta, w_s, w_p = scalar(
        (a, b), x, y, lr=0.3, gamma=gamma, eta_s=0.2, eta_p=0.002, ascent=3, steps=3, mg=mg
    )  # fmt: skip
    np.testing.assert_allclose(out.x[1], [theta[0], -theta[0], theta[1], -theta[1]], rtol=1e-9)
    last = out.rounds[0][-1]
    if (
        mg
    ):  # what is left of g does not move the logits of the pseudo image: g_s is 0 but for the 1e-12
        assert np.abs(last.g_s).max() < 1e-11
    else:
        np.testing.assert_allclose([last.w_s, last.w_p], [w_s, w_p], rtol=1e-8, atol=1e-12)
    assert out.closest > 0.5


def test_parallel_and_zero_gradients():
    g = np.array([3.0, -4.0])
    np.testing.assert_allclose(fedreg.without(2.5 * g, g), 0.0, atol=1e-14)
    np.testing.assert_allclose(fedreg.without(-2.5 * g, g), 0.0, atol=1e-14)  # v < 0 counts
    np.testing.assert_array_equal(fedreg.without(-2.5 * g, g, clipped=True), -2.5 * g)
    np.testing.assert_array_equal(fedreg.without(g, np.zeros(2)), g)
    assert fedreg.share(g, np.zeros(2)) == 0.0
    assert fedreg.share(2 * g, g) == pytest.approx(2.0)


# --- FedCurv


def test_fedcurv_by_hand():
    """f_0 = y²/2 from 4, lr 1/2, one step: y = 2. F = y² = 4, so A = 4 and b = 8. Then, λ = 1/8,
    from x = 2: y = 2 - 1/2 (2 + 1/4 (8 - 8)) = 1, F = 1. A = 1, b = 1, from 1: the same place, y =
    1/2; then A = 1/4, b = 1/8 and y = 1/2 - 1/2 (1/2 + 0) = 1/4. With a second client that pulls
    up, f_1 = (y - 6)²/2, x differs from both y_j."""
    one = [{0: [None], 1: [None]} for _ in range(4)]

    def grad(w, client, batch):
        return w - 6.0 * client

    def fisher(w, client):
        return w**2

    x = fedcurv.run([4.0], [[0]] * 4, [1, 1], one, grad, fisher, lr=0.5, lam=0.125)
    np.testing.assert_allclose(np.ravel(x), [4, 2, 1, 0.5, 0.25])
    # y_0 = 2, y_1 = 5, x = 7/2; A = 4 + 25, b = 8 + 125; λ = 1/64: 2 λ (A x - b) = (203/2 - 133)/32
    # = -63/64
    out = fedcurv.trace([4.0], [[0, 1]] * 2, [1, 1], one, grad, fisher, lr=0.5, lam=1 / 64)
    assert (out.x[1], out.A[1], out.b[1]) == (3.5, 29.0, 133.0)
    np.testing.assert_allclose(out.x[2], 3.5 - 0.5 * ((3.5 - 2.5) / 2 - 63 / 64))
    mean = fedcurv.trace(
        [4.0], [[0, 1]] * 2, [1, 1], one, grad, fisher, lr=0.5, lam=1 / 64, over="mean"
    )
    np.testing.assert_allclose(mean.x[2], 3.5 - 0.5 * ((3.5 - 2.5) / 2 - 63 / 128))
    # without own: client 0 sees 25 and 125, client 1 sees 4 and 8: (87.5 - 125)/32 and (14 - 8)/32
    other = fedcurv.trace(
        [4.0], [[0, 1]] * 2, [1, 1], one, grad, fisher, lr=0.5, lam=1 / 64, own=False
    )
    np.testing.assert_allclose(other.x[2], 3.5 - 0.5 * ((3.5 - 2.5) / 2 + (-37.5 + 6) / 64))
    # it did not take part in the last round: its term of the round before is not in A, and is not
    # taken off
    alone = fedcurv.trace(
        [4.0], [[0], [1], [0]], [1, 1], one, grad, fisher, lr=0.5, lam=1 / 64, own=False
    )
    every = fedcurv.trace([4.0], [[0], [1], [0]], [1, 1], one, grad, fisher, lr=0.5, lam=1 / 64)
    np.testing.assert_array_equal(alone.x, every.x)


# --- DP-SGD


def test_clipping_by_hand():
    g = np.array([3.0, 4.0])
    np.testing.assert_allclose(dpsgd.clipped(g, 1.0), [0.6, 0.8])
    np.testing.assert_array_equal(dpsgd.clipped(g, 5.0), g)
    np.testing.assert_array_equal(dpsgd.clipped(g, None), g)
    np.testing.assert_array_equal(dpsgd.clipped(0 * g, 1.0), [0, 0])
