"""The hand-written gradients against central finite differences, and the parameter order against
PyTorch."""

import numpy as np
import pytest

from .nets import MLP, MLPBatchNorm, Softmax

NETS = [Softmax(4, 3), MLP(4, 5, 3), MLPBatchNorm(4, 5, 3)]


def name(net):
    return type(net).__name__


def draw(net, n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=net.size), rng.normal(size=(n, 4)), rng.integers(0, 3, size=n)


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("net", NETS, ids=name)
def test_gradient_is_the_slope_of_the_loss(net, n):
    w, x, y = draw(net, n)
    h = 1e-6
    slopes = [
        (net.loss(w + e, x, y) - net.loss(w - e, x, y)) / (2 * h) for e in h * np.eye(net.size)
    ]
    np.testing.assert_allclose(net.grad(w, x, y), slopes, rtol=2e-6, atol=2e-8)


@pytest.mark.parametrize("net", NETS, ids=name)
def test_segments_add_up_and_large_logits_do_not_overflow(net):
    assert sum(net.segments) == net.size
    w, x, y = draw(net, 6)
    assert np.isfinite(net.grad(1e4 * w, x, y)).all()


def test_batch_norm_statistics():
    net = MLPBatchNorm(4, 5, 3)
    w, x, y = draw(net, 6)
    u = x @ w[:20].reshape(5, 4).T + w[20:25]
    _, mean, variance = net.grad_and_statistics(w, x, y)
    np.testing.assert_allclose(mean, np.mean(u, axis=0), rtol=1e-13)
    np.testing.assert_allclose(variance, np.var(u, axis=0, ddof=1), rtol=1e-13)
    _, mean, variance = net.grad_and_statistics(w, x[:1], y[:1])
    np.testing.assert_allclose(mean, u[0], rtol=1e-13)
    assert (variance == 0).all()


@pytest.mark.parametrize("net", NETS, ids=name)
def test_order_and_gradient_are_those_of_pytorch(net):
    torch = pytest.importorskip("torch")
    nn = torch.nn
    module = {
        "Softmax": lambda: nn.Sequential(nn.Linear(4, 3)),
        "MLP": lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)),
        "MLPBatchNorm": lambda: nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)
        ),
    }[name(net)]().double()
    w, x, y = draw(net, 7)
    parameters = list(module.parameters())
    assert tuple(p.numel() for p in parameters) == net.segments
    torch.nn.utils.vector_to_parameters(torch.from_numpy(w), parameters)
    loss = nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y))
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)]).numpy()
    np.testing.assert_allclose(net.grad(w, x, y), expected, rtol=1e-10, atol=1e-13)
    if name(net) == "MLPBatchNorm":  # running = 0.9 * initial (0 and 1) + 0.1 * batch
        _, mean, variance = net.grad_and_statistics(w, x, y)
        np.testing.assert_allclose(
            module[1].running_mean.numpy(), 0.1 * mean, rtol=1e-12, atol=1e-15
        )
        np.testing.assert_allclose(module[1].running_var.numpy(), 0.9 + 0.1 * variance, rtol=1e-12)
