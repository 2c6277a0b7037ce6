"""The oracles of the baselines: every gradient written by hand against central differences, both
losses against formulas of PyTorch's, and the methods against cases worked by hand, invariants, and
each other."""

import numpy as np
import pytest
from support.oracle_problems import CENTRES, problem, quadratic, rounds

from . import averaging, fedavg, feddyn, fedmlb, fednova, fedopt, mifa, mimelite, moon, scaffold
from .nets import MLP, Blocks, MLPBatchNorm

NETS = [
    Blocks(4, [5], 3),
    Blocks(4, [5, 6], 3),
    Blocks(4, [5], 3, norm=True),
    Blocks(4, [5, 6], 3, norm=True),
]


def name(net) -> str:
    return f"{'-'.join(map(str, net.hidden))}{' norm' if net.norm else ''}"


every_net = pytest.mark.parametrize("net", NETS, ids=name)


def draw(net, n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=net.size), rng.normal(size=(n, 4)), rng.integers(0, 3, size=n)


def slopes(value, w) -> np.ndarray:
    h = 1e-6
    return np.array([(value(w + e) - value(w - e)) / (2 * h) for e in h * np.eye(len(w))])


def statistics(net, seed=3) -> averaging.Statistics:
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=width), rng.uniform(0.5, 2.0, size=width)) for width in net.hidden]


def in_torch(net, w):
    """The same net in PyTorch, in train mode, and its parameters."""
    torch = pytest.importorskip("torch")
    nn = torch.nn
    blocks, before = nn.ModuleList(), 4
    for width in net.hidden:
        norm = [nn.BatchNorm1d(width)] if net.norm else []
        blocks.append(nn.Sequential(nn.Linear(before, width), *norm, nn.ReLU()))
        before = width
    blocks.append(nn.Linear(before, 3))
    blocks.double()
    parameters = list(blocks.parameters())
    assert tuple(p.numel() for p in parameters) == net.segments
    torch.nn.utils.vector_to_parameters(torch.from_numpy(np.array(w)), parameters)
    return torch, blocks, parameters


def through(blocks, x, start=0):
    """The outputs of all blocks from `start` on; the last one is the logits."""
    levels = []
    for block in list(blocks)[start:]:
        x = block(x)
        levels.append(x)
    return levels


def flat(torch, gradients) -> np.ndarray:
    return torch.cat([g.reshape(-1) for g in gradients]).numpy()


# --- the nets


@pytest.mark.parametrize("n", [1, 2, 7])
@every_net
def test_gradient_is_the_slope_of_the_loss(net, n):
    w, x, y = draw(net, n)
    np.testing.assert_allclose(
        net.grad(w, x, y), slopes(lambda w: net.loss(w, x, y), w), rtol=2e-6, atol=2e-8
    )


@pytest.mark.parametrize("n", [1, 2, 7])
def test_one_block_is_the_older_net(n):
    for net, older in (
        (Blocks(4, [5], 3), MLP(4, 5, 3)),
        (Blocks(4, [5], 3, norm=True), MLPBatchNorm(4, 5, 3)),
    ):
        assert net.segments == older.segments
        w, x, y = draw(net, n)
        assert net.loss(w, x, y) == pytest.approx(older.loss(w, x, y), rel=1e-14)
        np.testing.assert_allclose(net.grad(w, x, y), older.grad(w, x, y), rtol=1e-12, atol=1e-14)
    _, mean, var = older.grad_and_statistics(w, x, y)
    ((of_batch, unbiased),) = net.forward(w, x).seen
    np.testing.assert_allclose(of_batch, mean)
    np.testing.assert_allclose(unbiased, var)


@every_net
def test_order_levels_and_running_statistics_are_those_of_pytorch(net):
    w, x, y = draw(net, 7)
    torch, blocks, parameters = in_torch(net, w)
    levels = through(blocks, torch.from_numpy(x))
    out = net.forward(w, x)
    for ours, theirs in zip([*out.levels, out.logits], levels, strict=True):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-11, atol=1e-13)
    value = torch.nn.functional.cross_entropy(levels[-1], torch.from_numpy(y))
    expected = flat(torch, torch.autograd.grad(value, parameters))
    np.testing.assert_allclose(net.grad(w, x, y), expected, rtol=1e-9, atol=1e-13)
    running = averaging.moved(averaging.fresh(net), out.seen)
    norms = [block[1] for block in blocks[:-1]] if net.norm else []
    for (mean, var), norm in zip(running, norms, strict=True):
        np.testing.assert_allclose(norm.running_mean.numpy(), mean, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(norm.running_var.numpy(), var, rtol=1e-12)
    with torch.no_grad():
        frozen = through(blocks.eval(), torch.from_numpy(x))[-1].numpy()
    np.testing.assert_allclose(
        net.forward(w, x, running=running or None).logits, frozen, rtol=1e-11, atol=1e-13
    )
    assert net.norm == (np.abs(frozen - out.logits).max() > 0.1)


@every_net
def test_a_pass_may_begin_at_any_level(net):
    """From its own level on a net comes to its own logits; the gradient goes back to the level, and
    no further."""
    w, x, y = draw(net, 5)
    out = net.forward(w, x)
    for start in range(1, len(net.hidden) + 1):
        level = out.levels[start - 1]
        tail = net.forward(w, level, start=start)
        np.testing.assert_array_equal(tail.logits, out.logits)
        of_w, of_level = net.backward(w, tail, fedmlb.cross_entropy_gradient(tail.logits, y))

        def value(flat, start=start, shape=level.shape):
            return fedmlb.cross_entropy(net.forward(w, flat.reshape(shape), start=start).logits, y)

        # not at a kink: a dead unit's output is 0 and moves freely here, as an input
        np.testing.assert_allclose(
            of_level.ravel(), slopes(value, level.ravel()), rtol=2e-6, atol=2e-8
        )
        assert not of_w[: sum(net.segments[: (4 if net.norm else 2) * start])].any() and of_w.any()


# --- MOON


def moon_case(net, n=6):
    w, x, y = draw(net, n)
    rng = np.random.default_rng(9)
    others = [
        net.forward(rng.normal(size=net.size), x, running=statistics(net) if net.norm else None)
        for _ in "gp"
    ]
    return w, x, y, others[0].levels[-1], others[1].levels[-1]


@pytest.mark.parametrize("mu, temperature", [(1.0, 0.5), (5.0, 0.1)])
@every_net
def test_moon_gradient_is_the_slope_of_its_loss(net, mu, temperature):
    w, x, y, z_g, z_p = moon_case(net)
    hyper = {"mu": mu, "temperature": temperature}
    ours, _ = moon.gradient(net, w, x, y, z_g, z_p, **hyper)
    expected = slopes(lambda w: moon.loss(net, w, x, y, z_g, z_p, **hyper), w)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-7)
    assert np.abs(ours - net.grad(w, x, y)).max() > 1e-3


@every_net
def test_moon_is_a_cross_entropy_of_two_cosines(net):
    w, x, y, z_g, z_p = moon_case(net)
    torch, blocks, parameters = in_torch(net, w)
    F = torch.nn.functional
    *_, z, logits = through(blocks, torch.from_numpy(x))
    cosines = torch.stack(
        [F.cosine_similarity(z, torch.from_numpy(other), dim=1) for other in (z_g, z_p)], dim=1
    )
    zero = torch.zeros(len(x), dtype=torch.long)
    value = F.cross_entropy(logits, torch.from_numpy(y)) + 3.0 * F.cross_entropy(
        cosines / 0.4, zero
    )
    expected = flat(torch, torch.autograd.grad(value, parameters))
    hyper = {"mu": 3.0, "temperature": 0.4}
    assert moon.loss(net, w, x, y, z_g, z_p, **hyper) == pytest.approx(value.item(), rel=1e-12)
    np.testing.assert_allclose(
        moon.gradient(net, w, x, y, z_g, z_p, **hyper)[0], expected, rtol=1e-9, atol=1e-12
    )


def test_moon_contrast_at_its_edges():
    """z_p = z_g: log 2 and no gradient. A dead z: no gradient, and no 6e7 either. A hot softmax
    does not overflow."""
    rng = np.random.default_rng(0)
    z, a, b = rng.normal(size=(3, 4, 5))
    value, dz = moon.contrast(z, a, a, 0.5)
    assert value == pytest.approx(np.log(2)) and np.abs(dz).max() < 1e-16
    z[1] = 0.0
    value, dz = moon.contrast(z, a, b, 0.5)
    assert not dz[1].any() and dz[0].any() and np.isfinite(value)
    a[2] = 0.0  # only the cosine with it is gone
    assert moon.contrast(z, a, b, 0.5)[1][2].any()
    b[2] = 0.0
    assert not moon.contrast(z, a, b, 0.5)[1][2].any()
    value, dz = moon.contrast(z, a, b, 1e-4)
    assert np.isfinite(value) and np.isfinite(dz).all()
    assert moon.contrast(a[:1], a[:1], -a[:1], 0.5)[0] == pytest.approx(np.log1p(np.exp(-4)))


def small(net, n_rounds=6):
    """Ragged clients of a net, one of them empty."""
    rng = np.random.default_rng(4)
    sizes = [7, 3, 12, 0, 5]
    data = [(rng.normal(size=(n, 4)), rng.integers(0, 3, size=n)) for n in sizes]
    cohorts = [[int(i) for i in rng.permutation(5)[:3]] for _ in range(n_rounds)]
    batches = [
        {i: [rng.integers(0, n, size=4)] * 2 if n else [] for i, n in enumerate(sizes)}
        for _ in cohorts
    ]
    return (0.5 * rng.normal(size=net.size), cohorts, sizes, batches), data


def of_data(net, data):
    return lambda w, client, batch: net.grad(w, data[client][0][batch], data[client][1][batch])


@every_net
def test_moon_and_fedmlb_are_fedavg_without_their_terms(net):
    args, data = small(net)
    hyper = {"lr": 0.3, "server_lr": lambda t: 1.0 - 0.1 * t, "weights": "samples"}
    for beta1 in (None, 0.7):
        plain = fedavg.run(*args, of_data(net, data), beta1=beta1, **hyper)
        same = [
            moon.run(*args, net, data, mu=0.0, beta1=beta1, **hyper),
            fedmlb.run(*args, net, data, lambda2=0.0, lambda3=0.0, beta1=beta1, **hyper),
        ]
        for xs in same:
            np.testing.assert_allclose(xs, plain, rtol=1e-12, atol=1e-13)
        other = [
            moon.run(*args, net, data, mu=0.1, beta1=beta1, **hyper),
            fedmlb.run(*args, net, data, lambda2=0.0, lambda3=0.1, beta1=beta1, **hyper),
            fedmlb.run(*args, net, data, lambda2=0.1, lambda3=0.0, beta1=beta1, **hyper),
        ]
        for xs in other:
            assert np.abs(xs[-1] - plain[-1]).max() > 1e-4
    np.testing.assert_array_equal(
        moon.run(*args, net, data, beta1=0.0, **hyper),
        moon.run(*args, net, data, beta1=None, **hyper),
    )


@every_net
def test_moon_needs_a_previous_model_to_differ(net):
    """While no client has come back, the previous model is x itself, and the term vanishes."""
    args, data = small(net)
    x0, cohorts, sizes, batches = args
    cohorts = [[0, 1], [2], [4, 0], [1]]
    xs = moon.run(x0, cohorts, sizes, batches[:4], net, data, lr=0.3)
    plain = fedavg.run(x0, cohorts, sizes, batches[:4], of_data(net, data), lr=0.3)
    np.testing.assert_allclose(xs[:3], plain[:3], rtol=1e-12, atol=1e-13)
    assert np.abs(xs[3] - plain[3]).max() > 1e-4
    received = moon.run(x0, cohorts, sizes, batches[:4], net, data, lr=0.3, previous="received")
    assert net.norm == (np.abs(xs[3] - received[3]).max() > 1e-5)


def test_statistics_are_those_of_the_older_oracle():
    """MOON and FedMLB without their terms, on one block with BatchNorm: also the server's
    statistics are FedAvg's."""
    from . import batchnorm

    net, older = Blocks(4, [5], 3, norm=True), MLPBatchNorm(4, 5, 3)
    args, data = small(net)
    for weights in ("uniform", "samples"):
        xs, history = batchnorm.run(*args, older, data, lr=0.3, weights=weights)
        for ours, of_ours in (
            moon.trace(*args, net, data, mu=0.0, lr=0.3, weights=weights),
            fedmlb.trace(*args, net, data, lambda2=0.0, lambda3=0.0, lr=0.3, weights=weights),
        ):
            np.testing.assert_allclose(ours, xs, rtol=1e-12, atol=1e-13)
            for ((mean, var),), expected in zip(of_ours, history, strict=True):
                np.testing.assert_allclose(mean, expected.mean, rtol=1e-12, atol=1e-14)
                np.testing.assert_allclose(var, expected.var, rtol=1e-12, atol=1e-14)


# --- FedMLB

LAMBDAS = [
    {"lambda1": 1.0, "lambda2": 1.0, "lambda3": 1.0},
    {"lambda1": 0.0, "lambda2": 1.0, "lambda3": 0.0},
    {"lambda1": 0.0, "lambda2": 0.0, "lambda3": 2.0, "temperature": 0.5},
    {"lambda1": 0.7, "lambda2": 0.4, "lambda3": 1.3, "temperature": 3.0},
]


@pytest.mark.parametrize("hyper", LAMBDAS, ids=str)
@every_net
def test_fedmlb_gradient_is_the_slope_of_its_loss(net, hyper):
    w, x, y = draw(net, 6)
    x_t = draw(net, 6, seed=8)[0]
    ours, _ = fedmlb.gradient(net, w, x_t, x, y, **hyper)
    expected = slopes(lambda w: fedmlb.loss(net, w, x_t, x, y, **hyper), w)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-7)
    if hyper["lambda3"]:
        detached, _ = fedmlb.gradient(net, w, x_t, x, y, detach=True, **hyper)
        assert np.abs(ours - detached).max() > 1e-3


@pytest.mark.parametrize("hyper", LAMBDAS, ids=str)
@every_net
def test_fedmlb_is_what_pytorch_makes_of_its_formula(net, hyper):
    w, x, y = draw(net, 6)
    x_t = draw(net, 6, seed=8)[0]
    torch, blocks, parameters = in_torch(net, w)
    _, frozen, of_frozen = in_torch(net, x_t)
    F, labels = torch.nn.functional, torch.from_numpy(y)
    for p in of_frozen:
        p.requires_grad_(False)
    *levels, o = through(blocks, torch.from_numpy(x))
    T = hyper.get("temperature", 1.0)
    value = hyper["lambda1"] * F.cross_entropy(o, labels)
    for l, h_l in enumerate(levels, start=1):
        o_l = through(frozen, h_l, start=l)[-1]
        kl = F.kl_div(
            F.log_softmax(o / T, 1),
            F.log_softmax(o_l / T, 1),
            log_target=True,
            reduction="batchmean",
        )
        value = value + (
            hyper["lambda2"] * F.cross_entropy(o_l, labels) + hyper["lambda3"] * kl
        ) / len(levels)
    expected = flat(torch, torch.autograd.grad(value, parameters, materialize_grads=True))
    assert fedmlb.loss(net, w, x_t, x, y, **hyper) == pytest.approx(value.item(), rel=1e-12)
    np.testing.assert_allclose(
        fedmlb.gradient(net, w, x_t, x, y, **hyper)[0], expected, rtol=1e-9, atol=1e-12
    )


@every_net
def test_at_the_received_parameters_fedmlb_is_twice_the_cross_entropy_for_the_body(net):
    """y = x: all o_l = o, the divergence is 0 and at its least. What is left is CE(o), and (1/L)
    Σ_l CE(o_l), in which the blocks after l are frozen: the first block gets the whole of it once
    more, the classifier nothing."""
    w, x, y = draw(net, 6)
    plain = net.grad(w, x, y)
    both, _ = fedmlb.gradient(net, w, w, x, y)
    first, last = sum(net.segments[: 4 if net.norm else 2]), -sum(net.segments[-2:])
    np.testing.assert_allclose(both[:first], 2 * plain[:first], rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(both[last:], plain[last:], rtol=1e-9, atol=1e-13)
    assert fedmlb.loss(net, w, w, x, y) == pytest.approx(2 * net.loss(w, x, y), rel=1e-12)


# --- the methods by hand


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


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_keeps_c_the_mean_of_all_c_i(option):
    """c and the c_i start at 0 and c gets (1/N) of what each c_i gets: so c is their mean, those
    never seen at 0."""
    _, args = problem()
    out = scaffold.trace(*args, lr=0.3, weights="samples", option=option)
    for c, rows in zip(out.c, out.rows, strict=True):
        np.testing.assert_allclose(
            c, sum(rows.values()) / np.count_nonzero(args[2]), rtol=1e-12, atol=1e-15
        )
    other = scaffold.trace(*args, lr=0.3, weights="samples", option="II" if option == "I" else "I")
    assert not np.allclose(out.x[-1], other.x[-1])


def test_scaffold_of_one_client_is_fedavg():
    x0, cohorts, sizes, batches, grad = problem()[1]
    one = (x0, [[0]] * 8, sizes[:1], batches, grad)
    plain = fedavg.run(*one, lr=0.3)
    np.testing.assert_allclose(scaffold.run(*one, lr=0.3), plain, rtol=1e-10, atol=1e-12)
    everybody = (x0, cohorts, sizes, batches, grad)
    assert not np.allclose(scaffold.run(*everybody, lr=0.3)[-1], fedavg.run(*everybody, lr=0.3)[-1])


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


def test_feddyn_keeps_h_the_mean_of_all_lambda_i():
    _, args = problem()
    out = feddyn.trace(*args, lr=0.3, alpha=0.2, weights="samples")
    for h, rows in zip(out.h, out.rows, strict=True):
        np.testing.assert_allclose(
            h, sum(rows.values()) / np.count_nonzero(args[2]), rtol=1e-12, atol=1e-15
        )
    hyper = {"lr": 0.3, "alpha": 0.2, "weights": "samples"}
    for other in ({"alpha": 0.1}, {"scale_alpha": True}, {"weights": "uniform"}):
        assert not np.allclose(out.x[-1], feddyn.run(*args, **{**hyper, **other})[-1])


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


def test_mimelite_damped_is_undamped_at_another_lr():
    """m damped = (1 - beta) m undamped, so each damped step of lr is an undamped one of (1 - beta)
    lr."""
    _, args = problem()
    for weights in ("uniform", "samples"):
        damped = mimelite.run(*args, lr=0.5, beta=0.6, weights=weights)
        undamped = mimelite.run(*args, lr=0.2, beta=0.6, weights=weights, damped=False)
        np.testing.assert_allclose(damped, undamped, rtol=1e-11, atol=1e-13)
    assert not np.allclose(damped[-1], mimelite.run(*args, lr=0.5, beta=0.5, weights=weights)[-1])
    without = mimelite.run(*args, lr=0.5, beta=0.0, weights=weights)
    np.testing.assert_allclose(
        without, fedavg.run(*args, lr=0.5, weights=weights), rtol=1e-11, atol=1e-13
    )


def running_sum(x0, cohorts, sizes, batches, grad, *, lr, server_lr, weights):
    """MIFA in the words of Luo et al. 2023: the client keeps g_i (0) and uploads d_i - g_i, the
    server adds to D."""
    x = np.array(x0, dtype=np.float64)
    D, g, xs = np.zeros_like(x), np.zeros((len(sizes), len(x))), [x]
    for t, cohort in enumerate(cohorts):
        clients = fedavg.present(cohort, sizes, batches[t])
        for i in clients:
            d = x - fedavg.local_sgd(x, i, batches[t][i], grad, fedavg.at(lr, t))
            D = D + (d - g[i]) * (
                1 / np.count_nonzero(sizes) if weights == "uniform" else sizes[i] / sum(sizes)
            )
            g[i] = d
        if clients:
            x = x - fedavg.at(server_lr, t) * D
        xs.append(x)
    return xs


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_mifa_is_a_running_sum_and_full_participation_makes_it_fedavg(weights):
    x0, cohorts, sizes, batches, grad = problem()[1]
    hyper = {
        "lr": lambda t: 0.3 / (t + 1),
        "server_lr": lambda t: 0.5 + 0.1 * t,
        "weights": weights,
    }
    partial = mifa.run(x0, cohorts, sizes, batches, grad, **hyper)
    np.testing.assert_allclose(
        partial, running_sum(x0, cohorts, sizes, batches, grad, **hyper), rtol=1e-11, atol=1e-13
    )
    plain = fedavg.run(x0, cohorts, sizes, batches, grad, **hyper)
    assert not np.allclose(partial, plain)
    np.testing.assert_array_equal(
        partial, mifa.mifam(x0, cohorts, sizes, batches, grad, beta1=0.0, **hyper)
    )
    assert not np.allclose(
        partial[-1], mifa.mifam(x0, cohorts, sizes, batches, grad, beta1=0.5, **hyper)[-1]
    )

    def of_four(w, i, batch):  # without the empty client 3; client 4 takes its number
        return grad(w, 4 if i == 3 else i, batch)

    nobody_empty = (
        x0,
        [[3, 0, 2, 1]] * 8,
        sizes[:3] + sizes[4:],
        [{**b, 3: b[4]} for b in batches],
        of_four,
    )
    for beta1 in (None, 0.5):
        theirs = fedavg.run(*nobody_empty, beta1=beta1, **hyper)
        np.testing.assert_allclose(
            mifa.run(*nobody_empty, beta1=beta1, **hyper), theirs, rtol=1e-11, atol=1e-13
        )


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


def test_yogis_second_moment_comes_down_slowly_and_stays_positive():
    """v > Delta^2: Yogi takes 0.01 Delta^2 away, Adam 0.01 (v - Delta^2)."""
    args = ([0.0], [[0]] * 50, [1], [{0: [0]}] * 50, lambda w, i, batch: np.array([0.1]))
    hyper = {"lr": 1.0, "server_lr": 0.1, "beta1": 0.0, "tau": 1.0}
    yogi, adam = (np.ravel(run(*args, **hyper)) for run in (fedopt.fedyogi, fedopt.fedadam))
    v = 1.0 - 0.01 * 0.01 * np.arange(1, 51)
    np.testing.assert_allclose(np.diff(yogi), -0.01 / (np.sqrt(v) + 1))
    v = 0.01 + 0.99 * 0.99 ** np.arange(1, 51)
    np.testing.assert_allclose(np.diff(adam), -0.01 / (np.sqrt(v) + 1))


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


@pytest.mark.parametrize("beta1", [0.0, 0.6])
def test_fednova_with_equal_steps_is_fedavg_by_samples(beta1):
    x0, cohorts, sizes, batches, grad = problem()[1]
    hyper = {"lr": 0.3, "beta1": beta1, "server_lr": 0.8}
    equal = [{i: (b * 3)[:3] for i, b in of_round.items()} for of_round in batches]
    same = (x0, cohorts, sizes, equal, grad)
    np.testing.assert_allclose(
        fednova.run(*same, **hyper),
        fedavg.run(*same, weights="samples", **hyper),
        rtol=1e-11,
        atol=1e-13,
    )
    unequal = (x0, cohorts, sizes, batches, grad)
    assert not np.allclose(
        fednova.run(*unequal, **hyper), fedavg.run(*unequal, weights="samples", **hyper)
    )
    with pytest.raises(ValueError, match="both"):
        fednova.run(*same, lr=0.3, rho=0.5, mu=0.5)


def test_empty_rounds_change_nothing():
    """A round whose only client is empty: x stands still, and so does all that decays or adds up."""
    x0, cohorts, sizes, batches, grad = problem()[1]
    with_empty = (
        x0,
        [*cohorts[:2], [3], *cohorts[2:]],
        sizes,
        [*batches[:2], batches[0], *batches[2:]],
        grad,
    )
    for run in (
        lambda *a: scaffold.run(*a, lr=0.1),
        lambda *a: feddyn.run(*a, lr=0.1, alpha=0.1),
        lambda *a: mimelite.run(*a, lr=0.1, beta=0.5),
        lambda *a: mifa.mifam(*a, lr=0.1, beta1=0.5),
        lambda *a: fedopt.fedadam(*a, lr=0.1, server_lr=0.1),
        lambda *a: fedopt.fedams(*a, lr=0.1, server_lr=0.1),
        lambda *a: fednova.run(*a, lr=0.1, beta1=0.5),
    ):
        x = run(*with_empty)
        np.testing.assert_array_equal(x[2], x[3])
        np.testing.assert_array_equal([*x[:3], *x[4:]], run(x0, cohorts, sizes, batches, grad))
