"""What must hold of a net as a flat vector: it computes what the user's own module computes in
PyTorch, in train mode with batch statistics and the same dropout masks, in eval mode with running
ones; one client alone or many side by side, padded or not. What cannot be simulated is refused by
name."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raysim.errors import ConfigError
from raysim.models.checks.against_pytorch import check_reading
from raysim.models.flat import BoundModel, Model
from raysim.models.keyed_layers import DropoutMask
from raysim.models.nets import zoo
from raysim.prepare.resolve import prepare
from raysim.rules import Batch, Net
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.tasks.pure_task import PureTask

SHAPE, CLASSES = (3, 8, 8), 5


class Zoo(nn.Module):
    """Every module that is swapped: BatchNorm 1d, 2d, 3d (with and without gains, tracking or not,
    another momentum and eps), dropout of elements and of channels, at several rates."""

    def __init__(self, masks: Iterator[Tensor] | None = None):
        super().__init__()
        self.norm0 = nn.BatchNorm2d(3, affine=False, momentum=0.5)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(4, eps=1e-2)
        self.drop1 = nn.Dropout2d(0.25)
        self.norm3 = nn.BatchNorm3d(2)
        self.linear = nn.Linear(64, 6)
        self.norm2 = nn.BatchNorm1d(6, track_running_stats=False)
        self.drop2 = nn.Dropout(0.5)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.drop1(torch.relu(self.norm1(self.conv(self.norm0(x))))), 2)
        x = self.norm3(x.reshape(-1, 2, 2, 4, 4)).flatten(1)
        return self.last(self.drop2(torch.tanh(self.norm2(self.linear(x)))))


class Given(nn.Module):
    """Dropout by masks that were made elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask if self.training else x


def plain(seed: int = 0) -> nn.Module:
    """The user's own module, in float64, with no two gains alike."""
    torch.manual_seed(seed)
    net = Zoo().double()
    for name, p in net.named_parameters():
        if "norm" in name:
            p.data += 0.3 * torch.randn_like(p)
    return net


def with_masks(net: nn.Module, *masks: Tensor) -> nn.Module:
    """The same net in pure PyTorch, its two dropouts told what to drop."""
    net.drop1, net.drop2 = Given(), Given()
    for module, mask in zip((net.drop1, net.drop2), masks, strict=True):
        module.mask = mask
    return net


def made(net: nn.Module) -> Model:
    return Model(copy.deepcopy(net), SHAPE, CLASSES, torch.float64)


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def example(n: int, seed: int = 1) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """x, y and scaled dropout masks for `Zoo`."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((n, *SHAPE)) * [[[2.0]], [[1.0]], [[0.5]]] + 1)
    masks = [
        (rng.random((n, *shape)) >= rate) / (1 - rate)
        for shape, rate in (((4, 1, 1), 0.25), ((6,), 0.5))
    ]
    first, second = map(torch.from_numpy, masks)
    return x, torch.from_numpy(rng.integers(0, CLASSES, n)), (first, second)


def statistics(net: nn.Module) -> Tensor:
    """Running means and variances, in the order of the net."""
    norms = [
        m
        for m in net.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
    ]
    return torch.cat([part for m in norms for part in (m.running_mean, m.running_var)])  # type: ignore[misc]


def loop(model: Model, w: Tensor, buffers: Tensor) -> LoopTask:
    task = LoopTask(model, LocalSettings(lr=0.1))
    task.start(task.settings, w, buffers, 1)
    return task


# -- the nets of the papers


@pytest.mark.parametrize(
    ("name", "shape", "classes", "d"),
    [
        ("tinynn", (1, 28, 28), 10, 178_710),
        ("lenet5", (3, 32, 32), 10, 941_834),
        ("vgg11", (3, 32, 32), 100, 9_304_548),
        ("resnet20", (3, 64, 64), 200, 284_824),
        ("lenet", (3, 32, 32), 10, 62_006),
        ("mlp", (1, 28, 28), 10, 199_210),
        ("logistic", (1, 28, 28), 10, 7_850),
    ],
)
def test_sizes_of_the_papers_nets(name, shape, classes, d):
    net = zoo.NETS[name](shape, classes)
    model = Model(net, shape, classes)
    assert model.size == d == sum(model.segments) and len(model.initial()[0]) == d


def test_layers_of_the_papers_nets():
    """Section 10.1: where BatchNorm and dropout are, which d does not tell (dropout has no
    parameters).

    The papers have ReLU before max pooling; `test_relu_after_max_pooling_is_relu_before_it`.
    """

    def kinds(name: str, shape: tuple[int, int, int], classes: int) -> list[str]:
        found = [type(m).__name__ for m in zoo.NETS[name](shape, classes).modules()]
        return [k for k in found if k not in ("Sequential", "Flatten")]

    assert kinds("tinynn", (1, 28, 28), 10) == ["Linear", "BatchNorm1d", "ReLU"] * 2 + ["Linear"]
    pooled = ["Conv2d", "BatchNorm2d", "MaxPool2d", "ReLU"]
    assert kinds("lenet5", (3, 32, 32), 10) == [
        *pooled * 2,
        *["Linear", "BatchNorm1d", "ReLU", "Dropout"] * 2,
        "Linear",
    ]
    assert kinds("vgg11", (3, 32, 32), 100) == [
        *pooled * 2,
        *["Conv2d", "BatchNorm2d", "ReLU", *pooled] * 3,
        *["Linear", "ReLU", "Dropout", "Linear"],
    ]
    resnet = kinds("resnet20", (3, 64, 64), 200)
    assert resnet.count("Conv2d") == 1 + 18 + 2 and "Dropout" not in resnet
    lenet = zoo.lenet((1, 28, 28), 10)
    assert lenet[0][0].padding == (2, 2) and zoo.lenet((3, 32, 32), 10)[0][0].padding == (0, 0)


def test_relu_after_max_pooling_is_relu_before_it():
    """To the bit, gradients too, with ties and windows in which nothing is positive."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8).mul(2).round().div(2).requires_grad_()
    assert (x == 0.5).sum() > 20 and (F.max_pool2d(x, 2) <= 0).any()
    weight = torch.randn(4, 3, 4, 4)
    results = [
        (y, *torch.autograd.grad((y * weight).sum(), x))
        for y in (F.max_pool2d(x.relu(), 2), F.max_pool2d(x, 2).relu())
    ]
    assert all(torch.equal(papers, ours) for papers, ours in zip(*results, strict=True))


@pytest.fixture
def one(base: dict[str, Any]) -> dict[str, Any]:
    return {**base, "rounds": 1, "algorithm": "fedavg"}


def test_one_x0_for_all_algorithms_of_a_seed(one):
    def x0(*overrides: str) -> bytes:
        return prepare({**one, "model": "tinynn"}, overrides).initial[0].numpy().tobytes()

    first = x0()
    torch.manual_seed(99)  # what somebody else drew, and draws afterwards, is no matter
    expected = torch.rand(3)
    torch.manual_seed(99)
    same = [
        x0("algorithm=gradma", "algorithm.memory=10"),
        x0("client=fedprox", "server=fedavgm", "local.lr=1"),
    ]
    assert torch.equal(torch.rand(3), expected)
    assert {first, *same, x0("partition={name: dirichlet, clients: 10, alpha: 1}")} == {first}
    assert len({first, x0("seed=1"), x0("seed=2")}) == 3


# -- alone: what PyTorch computes


@pytest.mark.parametrize("n", [2, 7])
def test_forward_gradient_and_statistics_are_pytorchs(n):
    net, (x, y, masks) = plain(), example(n)
    model = made(net)
    w, buffers = model.initial()
    assert torch.equal(w, flat(net.parameters())) and torch.equal(buffers, statistics(net))
    assert [mask.rate for mask in model.dropouts] == [0.25, 0.5]
    assert [mask.shape(7) for mask in model.dropouts] == [(7, 4, 1, 1), (7, 6)]

    task = loop(model, w, buffers)
    logits: list[Tensor] = []

    def loss(net: Net, batch: Batch) -> Tensor:
        logits.append(net.logits.detach())
        return F.cross_entropy(net.logits, batch.y, reduction="none")

    grad = task.grad(task.local_params, Batch(x, y, (masks,)), loss)
    theirs = with_masks(net, *masks).train()
    output = theirs(x)
    value = F.cross_entropy(output, y)
    expected = flat(torch.autograd.grad(value, list(theirs.parameters())))
    torch.testing.assert_close(logits[0], output.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(task.losses[0], value.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(task.buffers, statistics(theirs), rtol=1e-12, atol=0)


@pytest.mark.parametrize("mode", ["frozen", "eval"])
@pytest.mark.parametrize("way", ["loop", "lanes"])
def test_frozen_and_eval_keep_nothing(mode, way):
    net, (x, y, masks) = plain(), example(6)
    model = made(net)
    w, buffers = model.initial()
    batch = Batch(x, y, (masks,))
    other = buffers + 0.5 * torch.rand(len(buffers), dtype=torch.float64)
    if way == "loop":
        task: Any = loop(model, w, buffers)
    else:
        task = PureTask(model, LocalSettings(), buffers.clone())
    kept, given = task.buffers.clone(), other.clone()
    grad = task.grad(w.clone(), batch, mode=mode, buffers=other if mode == "eval" else None)
    assert torch.equal(task.buffers, kept) and torch.equal(other, given) and task.losses == []

    theirs = with_masks(net, *masks).train()
    if mode == "eval":
        norms = [m for m in theirs.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        place = 0
        for m in (m for m in norms if m.track_running_stats):
            for name in ("running_mean", "running_var"):
                getattr(m, name).copy_(other[place : place + m.num_features])
                place += m.num_features
        theirs.eval()
    value = F.cross_entropy(theirs(x), y)
    expected = flat(torch.autograd.grad(value, list(theirs.parameters())))
    torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-11)


def test_a_net_starts_with_the_statistics_that_it_came_with():
    """Means and variances of a trained net are in the buffers, and evaluating with them gives
    PyTorch's logits. A fresh net has means 0 and variances 1."""
    trained, x = plain(), example(5)[0]
    _, fresh = made(plain()).initial()
    np.testing.assert_array_equal(np.unique(fresh), [0, 1])
    for _ in range(3):
        trained(x)
    model = made(trained)
    w, buffers = model.initial()
    bound = BoundModel(model)
    bound.w.copy_(w)
    torch.testing.assert_close(bound.forward(x, "eval", buffers), trained.eval()(x))
    assert (bound.forward(x, "eval", fresh) - trained(x)).abs().max() > 0.1


def test_no_dropout_in_eval_and_none_without_masks():
    model = made(plain())
    bound, (x, _, masks) = BoundModel(model), example(4)
    w, buffers = model.initial()
    bound.w.copy_(w)
    assert torch.equal(bound.forward(x, "eval", buffers, masks), bound.forward(x, "eval", buffers))
    with_drop = bound.forward(x, "frozen", buffers, masks)
    without = bound.forward(x, "frozen", buffers)
    assert not torch.allclose(with_drop, without)


def test_two_bound_nets_do_not_disturb_each_other():
    """GradMA's helper passes run on another copy; their frames and statistics are their own."""
    model = made(plain())
    w, buffers = model.initial()
    task, (x, y, masks) = loop(model, w, buffers), example(5)
    batch = Batch(x, y, (masks, tuple(torch.ones_like(m) for m in masks)))
    alone = loop(model, w, buffers)
    expected = alone.grad(alone.local_params, batch)
    helper = task.grad(w + 1, batch.masked(1), mode="frozen")
    got = task.grad(task.local_params, batch)
    assert torch.equal(got, expected) and torch.equal(task.buffers, alone.buffers)  # type: ignore[arg-type]
    assert torch.equal(task.grad(w + 1, batch.masked(1), mode="frozen"), helper)
    assert torch.equal(task.local_params, w)


# -- side by side


@pytest.mark.parametrize("size", [7, 1])
@pytest.mark.parametrize("mode", ["train", "frozen"])
def test_pure_functions_side_by_side_are_nets_one_by_one(size, mode):
    """To 1e-9 in float64. A batch of one sample is there too: BatchNorm over it (and over its
    pixels) is defined, PyTorch's own refuses it."""
    model, other = made(plain()), made(plain())
    model_w, model_buffers = model.initial()
    k = 3
    batches = [example(size, seed=i) for i in range(k)]
    w = model_w + 0.1 * torch.randn(
        k, model.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    buffers = model_buffers + torch.arange(1.0, k + 1, dtype=torch.float64)[:, None]
    x, y = (torch.stack([batch[i] for batch in batches]) for i in (0, 1))
    drops = tuple(torch.stack([batch[2][i] for batch in batches]) for i in (0, 1))

    def many(w: Tensor, buffers: Tensor, x: Tensor, y: Tensor, *drop: Tensor) -> tuple[Tensor, ...]:
        task = PureTask(model, LocalSettings(), buffers)
        grad = task.grad(w, Batch(x, y, (drop,)), mode=mode)
        assert task.buffers is not None
        return grad, task.buffers, task.losses[0] if task.losses else grad.sum()

    grads, moved, losses = torch.func.vmap(many)(w, buffers, x, y, *drops)
    for i, (x, y, drop) in enumerate(batches):
        alone = loop(other, w[i], buffers[i])
        grad = alone.grad(alone.local_params, Batch(x, y, (drop,)), mode=mode)
        assert torch.isfinite(grad).all()
        torch.testing.assert_close(grads[i], grad, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(moved[i], alone.buffers, rtol=1e-9, atol=1e-9)
        if mode == "train":
            torch.testing.assert_close(losses[i], alone.losses[0], rtol=1e-9, atol=1e-9)
    if mode == "train":
        assert not torch.allclose(moved, buffers)
    assert model.frame.buffers is None, "nothing of vmap's outlives it"


def test_alone_after_side_by_side():
    """A net that ran on lanes moves its statistics on afterwards as one that did not."""
    net, (x, y, masks) = plain(), example(5)
    used, fresh = made(net), made(net)
    w, buffers = used.initial()
    batch = Batch(x, y, (masks,))
    torch.func.vmap(lambda w: PureTask(used, LocalSettings(), buffers).grad(w, batch))(w[None])
    tasks = [loop(model, w, buffers) for model in (used, fresh)]
    grads = [task.grad(task.local_params, batch) for task in tasks]
    assert torch.equal(*grads) and torch.equal(tasks[0].buffers, tasks[1].buffers)  # type: ignore[arg-type]


def test_a_batch_of_one_sample_has_its_own_pixels_statistics():
    """BatchNorm2d of one image: mean and variance over its pixels, the unbiased variance is kept.
    BatchNorm1d of one example: it is its own mean, the variance is 0, and running ones move towards
    that."""
    net = nn.Sequential(
        nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(192, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)
    )
    model = Model(copy.deepcopy(net), SHAPE, CLASSES, torch.float64)
    w, buffers = model.initial()
    task, (x, y, _) = loop(model, w, buffers), example(1)
    grad = task.grad(task.local_params, Batch(x, y))
    assert torch.isfinite(grad).all() and task.buffers is not None
    mean, var = x[0].mean((1, 2)), x[0].var((1, 2), unbiased=True)
    torch.testing.assert_close(task.buffers[:3], 0.1 * mean)
    torch.testing.assert_close(task.buffers[3:6], 0.9 + 0.1 * var)
    normed = (x - mean[:, None, None]) / (
        x[0].var((1, 2), unbiased=False)[:, None, None] + 1e-5
    ).sqrt()
    hidden = net.double()[2](normed.flatten(1))[0]
    torch.testing.assert_close(task.buffers[6:12], 0.1 * hidden.detach())
    torch.testing.assert_close(task.buffers[12:], torch.full((6,), 0.9, dtype=torch.float64))


# -- back to the user's own module


def test_parameters_load_strictly_into_the_users_own_module():
    net = plain()
    model = made(net)
    w, buffers = model.initial()
    generator = torch.Generator().manual_seed(3)
    w = w + torch.randn(len(w), generator=generator, dtype=torch.float64)
    buffers = buffers + torch.rand(len(buffers), generator=generator, dtype=torch.float64)
    fresh = Zoo().double()
    fresh.load_state_dict(model.state_dict(w, buffers), strict=True)
    bound, x = BoundModel(model), example(4)[0]
    bound.w.copy_(w)
    torch.testing.assert_close(
        fresh.eval()(x), bound.forward(x, "eval", buffers), rtol=1e-10, atol=1e-12
    )


class PartlyFrozen(nn.Module):
    def __init__(self, shape: Any = None, classes: int = 10):
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(64, 6),
            nn.BatchNorm1d(6),
            nn.Linear(6, classes),
        )
        self.first.weight.requires_grad_(False)
        self.norm.weight.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x.flatten(1) * self.scale)))


def test_frozen_tensors_are_no_parameters():
    torch.manual_seed(0)
    net = PartlyFrozen().double()
    model = Model(copy.deepcopy(net), (1, 8, 8), 10, torch.float64)
    trained = [p for p in net.parameters() if p.requires_grad]
    assert model.size == sum(p.numel() for p in trained) == 6 + 6 + 70
    w, buffers = model.initial()
    x, y = torch.randn(5, 1, 8, 8, dtype=torch.float64), torch.arange(5)
    task = loop(model, w, buffers)
    grad = task.grad(task.local_params, Batch(x, y))
    expected = flat(torch.autograd.grad(F.cross_entropy(net.train()(x), y), trained))
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)
    one = torch.func.vmap(
        lambda x, y: PureTask(model, LocalSettings(), buffers).grad(w, Batch(x, y))
    )(x[None], y[None])[0]
    torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-11)


# -- what is refused


class Steady(nn.Module):
    """Buffers that stay are no harm."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 10)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.flatten(1) * self.scale)


class Output(nn.Module):
    """Ends like a net of Hugging Face: the logits are an attribute."""

    def forward(self, x: Tensor) -> Namespace:
        return Namespace(logits=x)


def head(*modules: nn.Module, classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *modules, nn.Linear(64, classes))


@pytest.mark.parametrize(
    ("net", "said"),
    [
        (
            lambda: head(classes=9),
            r"\[2, 9\], but task .classification. expects outputs of shape \[2, 10\]",
        ),
        (lambda: nn.Sequential(head(), nn.Unflatten(1, (10, 1))), r"\[2, 10, 1\]"),
        (lambda: nn.Sequential(nn.Flatten(), nn.LSTM(64, 10)), "turns two examples into tuple"),
        (
            lambda: nn.Sequential(head(), Output()),
            "two examples into Namespace, .*its logits, out.logits",
        ),
        (lambda: nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(10)), "no trainable parameters"),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(63, 10)),
            r"fails on two examples of shape \[1, 8, 8\]",
        ),
    ],
    ids=[
        "classes",
        "axes",
        "not a tensor",
        "output of a library",
        "empty",
        "width",
    ],
)
def test_refused(net, said):
    torch.manual_seed(5)
    made, state = net(), torch.get_rng_state()
    with pytest.raises(ConfigError, match=f"^model.*{said}"):
        check_reading(made, Model(copy.deepcopy(made), (1, 8, 8), 10))
    assert torch.equal(torch.get_rng_state(), state), (
        "the trial must leave the global generator as it was"
    )


def test_rounding_that_a_deep_net_makes_large_is_no_difference():
    """BatchNorm of four numbers, twenty times; the run's memory format rounds otherwise."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1)]
    for _ in range(20):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 4))
    check_reading(net, Model(copy.deepcopy(net), (3, 8, 8), 4))


class Sampled(nn.Module):
    """Draws from normal distributions whose widths a layer gives."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    def forward(self, x):
        width = self.layers(x).mul(5).exp()
        return torch.distributions.Normal(x, width).rsample() if self.training else x


def test_larger_parameters_at_which_a_net_cannot_sample_prove_nothing():
    torch.manual_seed(0)
    net = Sampled()
    check_reading(net, Model(copy.deepcopy(net), (6,), 6))


def test_ids_alone_reach_an_embedding_with_a_dimension_of_one():
    ids = Batch(torch.tensor([[3], [8]]), torch.tensor([0, 2]))
    said = r"into \[2, 1, 3\], but .* shape \[2, 3\]; x is \[2, 1\] here, so let forward take x"
    with pytest.raises(ConfigError, match=said):
        Model(nn.Embedding(9, 3), (1,), 3, sample=ids)


def test_buffers_that_stay_come_back_with_the_rest():
    model, fresh = Model(Steady(), (1, 8, 8), 10), Steady()
    assert model.size == 650 and model.buffer_size == 0
    fresh.load_state_dict(model.state_dict(*model.initial()), strict=True)


class Tied(nn.Module):
    """The classifier is the embedding, one BatchNorm is used twice, and a frozen bias has two names
    as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(CLASSES, 6, bias=False)
        self.norm, self.inner = nn.BatchNorm1d(6), nn.Sequential(nn.Linear(6, 6))
        self.inner.append(self.norm)
        self.last = nn.Linear(CLASSES, 6)
        self.last.weight = self.first.weight
        self.inner[0].bias = self.last.bias
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.flatten(1)[:, :CLASSES]))
        return F.linear(self.inner(x), self.last.weight.T)


def test_shared_tensors_come_back_under_each_of_their_names():
    torch.manual_seed(0)
    net = Tied().double()
    model, again = Model(copy.deepcopy(net), SHAPE, CLASSES, torch.float64), Tied().double()
    assert model.size == 30 + 36 + 6 + 6 and model.buffer_size == 12
    x, y, _ = example(4)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    for way in ("loop", "lanes"):
        w, buffers = model.initial()
        if way == "loop":
            task = loop(model, w, buffers)
            w, buffers = w - 0.1 * task.grad(w, Batch(x, y)), task.buffers
        else:

            def step(x: Tensor, y: Tensor, w: Tensor = w, buffers: Tensor = buffers) -> Any:
                task = PureTask(model, LocalSettings(), buffers)
                return w - 0.1 * task.grad(w, Batch(x, y)), task.buffers

            w, buffers = (part[0] for part in torch.func.vmap(step)(x[None], y[None]))
        again.load_state_dict(model.state_dict(w, buffers), strict=True)
        for name, value in net.state_dict().items():
            if value.is_floating_point():
                torch.testing.assert_close(again.state_dict()[name], value, rtol=1e-9, atol=1e-11)
        assert again.last.weight is again.first.weight
    assert bool(model.part("last.weight").equal(model.part("first"))), "a tensor of both parts"


def test_a_net_that_ends_in_a_swapped_module():
    model = Model(nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10)), (1, 8, 8), 10)
    assert model.buffer_size == 20

    last = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Dropout(0.5))
    assert Model(last, (1, 8, 8), 10).dropouts == [DropoutMask((1, 10), (True, False), 0.5, "2")]


def test_weight_decay_goes_by_the_tensors_own_name():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.debiased, self.head = nn.Linear(3, 2), nn.Linear(2, 2)
            nn.utils.parametrizations.weight_norm(self.head, "bias", dim=None)

        def forward(self, x):
            return self.head(self.debiased(x))

    model = Model(Net(), (3,), 2)
    decayed = dict(zip(model.names, model.decayed().split(list(model.segments)), strict=True))
    for name, flags in decayed.items():
        is_bias = name.endswith(".bias") or ".bias." in name
        assert flags.tolist() == [float(not is_bias)] * len(flags), name
    assert {"0.debiased.weight", "0.head.parametrizations.bias.original0"} <= set(decayed)
