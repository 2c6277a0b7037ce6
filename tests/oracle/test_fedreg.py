"""The oracles of FedReg, FedCurv and DP-SGD by themselves: finite differences, PyTorch, cases
worked by hand."""

import numpy as np
import pytest

from . import dpsgd, fedavg, fedcurv, fedreg
from .nets import MLP, Blocks, Softmax

NETS = [fedreg.OneLayer(4, 3), Blocks(4, [5], 3), Blocks(4, [6, 5], 3)]


def name(net):
    return f"{type(net).__name__}{len(net.shapes) // 2}"


every_net = pytest.mark.parametrize("net", NETS, ids=name)


def draw(net, n, seed=0):
    """Parameters, images, and a distribution over the classes for each."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=net.size), rng.normal(size=(n, 4)), rng.dirichlet(np.ones(3), size=n)


def slopes(f, at, h=1e-6):
    return np.array([(f(at + e) - f(at - e)) / (2 * h) for e in h * np.eye(at.size)])


# --- loss and its gradients


@pytest.mark.parametrize("eps", [1e-12, 0.0, 0.1])
@pytest.mark.parametrize("n", [1, 2, 7])
@every_net
def test_gradients_are_the_slopes_of_the_loss(net, n, eps):
    """In the parameters and in the images; eps 0.1 shows whether the 1e-12 is in the right place."""
    w, x, soft = draw(net, n)
    for targets in (soft, fedreg.onehot(np.arange(n) % 3, 3), np.full((n, 3), 1 / 3)):
        dw, dx = fedreg.gradients(net, w, x, targets, eps)
        in_w = slopes(lambda w, targets=targets: fedreg.loss(net, w, x, targets, eps), w)
        in_x = slopes(
            lambda v, targets=targets: fedreg.loss(net, w, v.reshape(x.shape), targets, eps),
            x.ravel(),
        )
        np.testing.assert_allclose(dw, in_w, rtol=5e-6, atol=2e-8)
        np.testing.assert_allclose(dx.ravel(), in_x, rtol=5e-6, atol=2e-8)


@every_net
def test_with_hard_labels_it_is_cross_entropy_but_for_the_1e_12(net):
    w, x, _ = draw(net, 6)
    w, y = 0.4 * w, np.array([0, 2, 1, 1, 0, 2])
    plain = Softmax(4, 3) if isinstance(net, fedreg.OneLayer) else net
    expected = plain.grad(w, x, y)
    exact = fedreg.gradients(net, w, x, fedreg.onehot(y, 3), 0.0)[0]
    np.testing.assert_allclose(exact, expected, rtol=1e-11, atol=1e-15)
    ours = fedreg.gradients(net, w, x, fedreg.onehot(y, 3))[0]
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-9)


def test_a_hopeless_sample_has_hardly_any_gradient():
    """p = e^-40 = 4e-18 of the true label: p/(p + 1e-12) of the usual gradient, 4e-6."""
    z, y = np.array([[0.0, 40.0]]), np.array([[1.0, 0.0]])
    np.testing.assert_allclose(fedreg.soft_loss(z, y), -np.log(1e-12), rtol=1e-6)
    np.testing.assert_allclose(
        fedreg.soft_loss_gradient(z, y), np.exp(-40) / 1e-12 * np.array([[-1, 1]]), rtol=1e-5
    )


@every_net
def test_gradients_are_those_of_pytorch(net):
    torch = pytest.importorskip("torch")
    w, x, soft = draw(net, 6)
    W, X, Y = (torch.from_numpy(v).requires_grad_(i < 2) for i, v in enumerate((w, x, soft)))
    v, start, tensors = X, 0, []
    for shape in net.shapes:
        length = int(np.prod(shape))
        tensors.append(W[start : start + length].reshape(shape))
        start += length
    for k in range(0, len(tensors), 2):
        v = v @ tensors[k].T + tensors[k + 1]
        v = torch.relu(v) if k + 2 < len(tensors) else v
    value = -(Y * torch.log(torch.softmax(v, 1) + 1e-12)).sum(1).mean()
    for ours, theirs in zip(
        fedreg.gradients(net, w, x, soft), torch.autograd.grad(value, (W, X)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(fedreg.loss(net, w, x, soft), value.item(), rtol=1e-13)


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


# --- whole runs


def problem(rounds=4, seed=3):
    """Ragged clients, batches of 4; x0, cohorts, sizes, batches, net, data, made."""
    net, rng = Blocks(4, [5], 3), np.random.default_rng(seed)
    sizes = [9, 1, 12, 0, 6]
    data = [(rng.normal(size=(n, 4)), rng.integers(0, 3, size=n)) for n in sizes]
    cohorts = [[int(i) for i in rng.permutation(5)[:4]] for _ in range(rounds)]

    def batches(steps):
        return [
            {i: [rng.choice(n, size=min(4, n), replace=False) for _ in range(steps)] if n else [] for i, n in
             enumerate(sizes)}
            for _ in cohorts
        ]  # fmt: skip

    return rng.normal(size=net.size), cohorts, sizes, batches(5), net, data, batches(3)


HYPER = {"lr": 0.3, "gamma": 0.4, "eta_s": 0.2, "ascent": 4}


@pytest.mark.parametrize("mg", [False, True])
def test_conditions_that_every_step_meets(mg):
    """MG: nothing of q is left in g. Then <θ - w_s g_s - θ0, g_s> = min(0, <θ - θ0, g_s>), and at
    the end the same of g_p for what the first projection left; a projection brings θ no farther
    from θ0. The second one binds in some steps and not in others; the first one in all of them
    (where pseudo labels are θ0's own, a loss that is convex in θ could do nothing else), so steps
    with labels from elsewhere are looked at beside them."""
    given = problem()
    out = fedreg.trace(*given, **HYPER, mg=mg)
    net, rng = given[4], np.random.default_rng(0)
    steps = [s for of_round in out.rounds for s in of_round]
    assert all(s.w_s > 0 for s in steps)
    for _ in range(20):
        theta0, away, pictures, labels = given[0], rng.normal(size=net.size), rng.normal(size=(3, 5, 4)), rng.dirichlet(
            np.ones(3), size=(3, 5)
        )  # fmt: skip
        made = fedreg.Made(pictures[1], labels[1], pictures[2], labels[2])
        u = pictures[1] if mg else None
        args = (net, theta0 + 0.1 * away, theta0, pictures[0], labels[0], made)
        steps.append(fedreg.step(*args, lr=0.3, gamma=0.4, uninformative=u))
    for s in steps:
        if mg:
            assert abs(s.g @ s.q) <= 1e-12 * np.linalg.norm(s.g + 1.0) * np.linalg.norm(s.q)
        v, between, end = s.theta - s.theta0, s.theta - s.w_s * s.g_s - s.theta0, s.end - s.theta0
        for before, after, g in ((v, between, s.g_s), (between, end, s.g_p)):
            assert abs(after @ g - min(0.0, before @ g)) <= 1e-12 * np.linalg.norm(
                before
            ) * np.linalg.norm(g)
            assert np.linalg.norm(after) <= np.linalg.norm(before) * (1 + 1e-12)
    for w in ([s.w_s for s in steps], [s.w_p for s in steps]):
        assert 0 < sum(value > 0 for value in w) < len(w)
        assert min(w) == 0.0
    assert any(s.w_s > 0 and s.w_p > 0 for s in steps)
    assert any(
        s.end @ s.g_s - s.theta0 @ s.g_s > 1e-6 for s in steps
    )  # the second one may undo the first


def test_options_and_mistakes_show():
    given = problem()
    base = fedreg.run(*given, **HYPER)
    np.testing.assert_array_equal(base, fedreg.run(*given, **HYPER, eta_p=0.002))
    for other in (
        {"gamma": 0.5}, {"eta_s": 0.1}, {"eta_p": 0.05}, {"ascent": 1}, {"pairing": "own"},
        {"mg": True}, {"weights": "samples"}, {"server_lr": 0.5},
        *({"mistake": mistake} for mistake in fedreg.MISTAKES[1:] if mistake not in ("plain loss", "clipped v")),
    ):  # fmt: skip
        assert np.abs(np.subtract(base, fedreg.run(*given, **{**HYPER, **other}))).max() > 1e-5, (
            other
        )
    mg = fedreg.run(*given, **HYPER, mg=True)
    for other in ({"fresh": True}, {"mistake": "clipped v"}):
        assert np.abs(mg[-1] - fedreg.run(*given, **HYPER, mg=True, **other)[-1]).max() > 1e-5
    own = {**HYPER, "pairing": "own", "mg": True}
    np.testing.assert_array_equal(fedreg.run(*given, **own), fedreg.run(*given, **own, fresh=True))
    far = {**HYPER, "eta_s": 1.0}
    assert (
        np.abs(fedreg.run(*given, **far)[-1] - fedreg.run(*given, **far, clamp=True)[-1]).max()
        > 1e-5
    )


def test_without_projections_it_is_fedavg():
    """γ = 1 and w = 0: but for log(p + 1e-12), to the last digits."""
    x0, cohorts, sizes, batches, net, data, _ = problem()

    def grad(w, client, batch):
        x, y = data[client]
        return net.grad(w, x[batch], y[batch])

    plain = fedavg.run(x0, cohorts, sizes, batches, grad, lr=0.3)
    same = {**HYPER, "gamma": 1.0, "mistake": "no projection"}
    np.testing.assert_allclose(fedreg.run(*problem(), **same), plain, rtol=0, atol=1e-9)
    frozen = fedreg.trace(*problem(), **{**same, "gamma": 0.0}).rounds[0]
    for s in frozen:  # the gradient at θ0, at every step
        assert s.g @ s.g > 0
    first = [s for s in frozen if s.client == frozen[0].client]
    moved = sum(grad(x0, first[0].client, b) for b in batches[0][first[0].client])
    np.testing.assert_allclose(first[-1].end, x0 - 0.3 * moved, rtol=0, atol=1e-9)


def test_made_batches_are_cycled():
    """Five steps and three stored batches: 0 1 2 0 1; shorter by those that no step comes to,
    nothing changes."""
    given = problem()
    made = given[-1]
    base = fedreg.run(*given, **HYPER)
    double = [{i: b + b for i, b in of_round.items()} for of_round in made]
    np.testing.assert_array_equal(base, fedreg.run(*given[:-1], double, **HYPER))
    reverse = [{i: b[::-1] for i, b in of_round.items()} for of_round in made]
    assert np.abs(base[-1] - fedreg.run(*given[:-1], reverse, **HYPER)[-1]).max() > 1e-4


# --- FedCurv


def curved(net=None, seed=4, rounds=4):
    x0, cohorts, sizes, batches, net, data, _ = problem(rounds, seed)

    def grad(w, client, batch):
        x, y = data[client]
        return net.grad(w, x[batch], y[batch])

    return (
        x0,
        cohorts,
        sizes,
        batches,
        grad,
        lambda w, client: fedcurv.diagonal(net, w, *data[client]),
    )


def test_fisher_is_the_mean_of_squared_slopes():
    net, rng = MLP(4, 5, 3), np.random.default_rng(1)
    w, x, y = rng.normal(size=net.size), rng.normal(size=(5, 4)), rng.integers(0, 3, size=5)
    squares = [
        slopes(lambda w, k=k: net.loss(w, x[k : k + 1], y[k : k + 1]), w) ** 2 for k in range(5)
    ]
    np.testing.assert_allclose(
        fedcurv.diagonal(net, w, x, y), np.mean(squares, axis=0), rtol=1e-5, atol=1e-8
    )
    assert not np.allclose(fedcurv.diagonal(net, w, x, y), net.grad(w, x, y) ** 2, rtol=0.1)


def test_penalty_is_that_of_every_client():
    """λ (y'(A y) - 2 b'y) and sum_j λ (y - y_j)' F_j (y - y_j) have the same slope, which is 2 λ (A
    y - b)."""
    rng = np.random.default_rng(2)
    F, ys, y = rng.uniform(size=(3, 6)), rng.normal(size=(3, 6)), rng.normal(size=6)
    A, b = F.sum(axis=0), (F * ys).sum(axis=0)
    long = slopes(
        lambda y: 0.3 * sum((y - y_j) @ (F_j * (y - y_j)) for F_j, y_j in zip(F, ys, strict=True)),
        y,
    )
    np.testing.assert_allclose(
        slopes(lambda y: fedcurv.penalty(y, A, b, 0.3), y), long, rtol=1e-6, atol=1e-8
    )
    np.testing.assert_allclose(fedcurv.penalty_gradient(y, A, b, 0.3), long, rtol=1e-6, atol=1e-8)


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


def test_fedcurv_reduces_and_its_options_show():
    args = curved()
    plain = fedavg.run(*args[:5], lr=0.3)
    np.testing.assert_array_equal(plain, fedcurv.run(*args, lr=0.3, lam=0.0))
    base = fedcurv.run(*args, lr=0.3, lam=0.3)
    np.testing.assert_array_equal(base[:2], plain[:2])
    for other in (
        {"lam": 0.2},
        {"own": False},
        {"over": "mean"},
        {"weights": "samples"},
        {"mistake": "half"},
    ):
        theirs = fedcurv.run(*args, **{"lr": 0.3, "lam": 0.3, **other})
        assert np.abs(base[-1] - theirs[-1]).max() > 1e-4
    without = {"lr": 0.3, "lam": 0.3, "own": False}
    stale = fedcurv.run(*args, **without, mistake="stale")
    assert np.abs(np.subtract(fedcurv.run(*args, **without), stale)).max() > 1e-4


def test_an_empty_round_changes_nothing():
    x0, cohorts, sizes, batches, grad, fisher = curved()
    cut = (
        [*cohorts[:2], [3], *cohorts[2:]],
        sizes,
        [*batches[:2], batches[0], *batches[2:]],
        grad,
        fisher,
    )
    for own in (True, False):
        x = fedcurv.run(x0, *cut, lr=0.3, lam=0.3, own=own)
        np.testing.assert_array_equal(x[2], x[3])
        np.testing.assert_array_equal(
            [*x[:3], *x[4:]],
            fedcurv.run(x0, cohorts, sizes, batches, grad, fisher, lr=0.3, lam=0.3, own=own),
        )


# --- DP-SGD


def private_case(n=6):
    net, rng = MLP(4, 5, 3), np.random.default_rng(7)
    x, y = rng.normal(size=(n, 4)), rng.integers(0, 3, size=n)
    return net, rng.normal(size=net.size), x, y, rng.normal(size=net.size)


def test_clipping_by_hand():
    g = np.array([3.0, 4.0])
    np.testing.assert_allclose(dpsgd.clipped(g, 1.0), [0.6, 0.8])
    np.testing.assert_array_equal(dpsgd.clipped(g, 5.0), g)
    np.testing.assert_array_equal(dpsgd.clipped(g, None), g)
    np.testing.assert_array_equal(dpsgd.clipped(0 * g, 1.0), [0, 0])


def test_private_gradient_reduces_to_the_plain_one():
    net, w, x, y, z = private_case()
    for clip, sigma in ((None, 0.0), (1e6, 0.0)):
        ours = dpsgd.gradient(net, w, x, y, z, clip=clip, sigma=sigma)
        np.testing.assert_allclose(ours, net.grad(w, x, y), atol=1e-14)
    lengths = np.linalg.norm(dpsgd.each(net, w, x, y), axis=1)
    clip = float(np.median(lengths))
    some = dpsgd.gradient(net, w, x, y, z, clip=clip, sigma=0.0)
    assert np.abs(some - net.grad(w, x, y)).max() > 1e-3
    for g_k in dpsgd.each(net, w, x, y):
        assert np.linalg.norm(dpsgd.clipped(g_k, clip)) <= clip * (1 + 1e-15)
    assert np.linalg.norm(some) <= clip
    # without one sample the sum changes by clip at most: what privacy is about
    fewer = dpsgd.gradient(net, w, x[1:], y[1:], z, clip=clip, sigma=0.0)
    assert np.linalg.norm(6 * some - 5 * fewer) <= clip * (1 + 1e-12)
    noisy = dpsgd.gradient(net, w, x, y, z, clip=clip, sigma=0.7)
    np.testing.assert_allclose(noisy - some, 0.7 * clip / 6 * z, atol=1e-14)
    for mistake in dpsgd.MISTAKES[1:]:
        other = dpsgd.gradient(net, w, x, y, z, clip=clip, sigma=0.7, mistake=mistake, n=20)
        assert np.abs(other - noisy).max() > 1e-3, mistake


def test_batches_with_noise():
    batches = [{0: [np.array([0, 1]), np.array([2])], 1: []}, {0: [np.array([1])]}]
    made = dpsgd.with_noise(batches, lambda t, i: [(t, i, k) for k in range(len(batches[t][i]))])
    assert [[z for _, z in made[t].get(0, [])] for t in (0, 1)] == [
        [(0, 0, 0), (0, 0, 1)],
        [(1, 0, 0)],
    ]
    with pytest.raises(ValueError):
        dpsgd.with_noise(batches, lambda t, i: [0])


def test_joint_projection_is_the_nearest_point():
    rng = np.random.default_rng(0)
    for _ in range(20):
        v, *G = rng.normal(size=(3, 4))
        w_s, w_p = fedreg.jointly(v, *G)
        left = v - w_s * G[0] - w_p * G[1]
        assert max(left @ G[0], left @ G[1]) <= 1e-10 and min(w_s, w_p) >= 0
        assert all(abs(w * (left @ g)) < 1e-10 for w, g in zip((w_s, w_p), G, strict=True))
