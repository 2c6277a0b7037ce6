"""Gradients of dense nets without autograd are autograd's to the bit, on batches of any size.

Other nets keep to autograd. Either way a step is the one that PyTorch makes of the user's own
module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raysim.models.flat import BoundModel, Model
from raysim.models.nets import zoo
from raysim.rules import Batch, Net, PassMode, cross_entropy
from raysim.training.tasks.fast_gradient import (
    MAX_PARAMETERS,
    FastGradient,
    by_autograd,
    matches_autograd,
)
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask

SHAPE, CLASSES, LR = (1, 16, 16), 5, 0.1
MODES: tuple[PassMode, ...] = ("train", "frozen", "eval")


class Given(nn.Module):
    """Dropout by a mask that was made elsewhere."""

    mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Halved(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class Careful(nn.Module):
    """Known to the user alone: a branch with a parameter, BatchNorm and dropout inside."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.7))
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.norm(x * self.scale))


def head(*modules: nn.Module, **how: Any) -> nn.Sequential:
    """256 -> 7 -> what is given -> CLASSES."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(256, 7, **how), *modules, nn.Linear(7, CLASSES, **how)
    )


def convolutional() -> nn.Module:
    body = nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout2d(0.4)
    )
    return nn.Sequential(
        body, nn.Flatten(), nn.Sequential(nn.Linear(75, 9), nn.ReLU()), nn.Linear(9, CLASSES)
    )


def frozen(*which: str) -> nn.Module:
    net = nn.Sequential(
        nn.Flatten(),
        nn.Linear(256, 9),
        nn.ReLU(),
        nn.Linear(9, 7),
        nn.ReLU(),
        nn.Linear(7, CLASSES),
    )
    for name in which:
        net.get_parameter(name).requires_grad_(False)
    return net


def shared_layer() -> nn.Module:
    layer = nn.Linear(7, 7)
    return head(layer, nn.ReLU(), layer, nn.ReLU())


def shared_activation() -> nn.Module:
    relu = nn.ReLU()
    return head(relu, nn.Linear(7, 7), relu, nn.Linear(7, 7), relu)


def patched(kind: type[nn.Module]) -> nn.Module:
    """The first module of this kind inside is given another `forward`, which negates its output."""
    net = nn.Sequential(
        nn.Flatten(), nn.Sequential(nn.Linear(256, 7), nn.ReLU()), nn.Linear(7, CLASSES)
    )
    module = next(m for m in list(net.modules())[1:] if type(m) is kind)
    module.forward = MethodType(lambda self, x: -kind.forward(self, x), module)
    return net


def tied(bias: bool) -> nn.Module:
    net = head(
        nn.ReLU(), nn.Linear(7, 7, bias=bias), nn.ReLU(), nn.Linear(7, 7, bias=bias), bias=bias
    )
    net[5].weight = net[3].weight
    return net


def tied_biases() -> nn.Module:
    net = head(nn.ReLU(), nn.Linear(7, 7), nn.Linear(7, 7))
    net[4].bias = net[1].bias
    return net


DENSE: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: zoo.mlp(SHAPE, CLASSES, (9, 7)),
    "logistic": lambda: zoo.logistic(SHAPE, CLASSES),
    "tinynn": lambda: zoo.tinynn(SHAPE, CLASSES),
    "no bias": lambda: head(nn.ReLU(), bias=False),
    "no ReLU": lambda: head(nn.Linear(7, 7), nn.Linear(7, 7)),
    "no bias, no ReLU": lambda: head(
        nn.Linear(7, 7, bias=False), nn.ReLU(), nn.Linear(7, 7, bias=False), bias=False
    ),
    "no bias below a bias": lambda: head(nn.Linear(7, 9, bias=False), nn.ReLU(), nn.Linear(9, 7)),
    "ReLU in place": lambda: head(nn.ReLU(inplace=True), nn.Linear(7, 7), nn.ReLU(inplace=True)),
    "ReLU twice": lambda: head(nn.ReLU(), nn.ReLU()),
    "ReLU first": lambda: nn.Sequential(nn.ReLU(), *head(nn.ReLU())),
    "ReLU on top": lambda: nn.Sequential(*head(nn.ReLU()), nn.ReLU()),
    "one ReLU for all": shared_activation,
    "dropout first and last": lambda: nn.Sequential(
        nn.Dropout(0.3), *head(nn.ReLU(), nn.Dropout(0.2)), nn.Dropout(0.1)
    ),
    "BatchNorm first and last": lambda: nn.Sequential(
        nn.BatchNorm2d(1), *head(nn.ReLU()), nn.BatchNorm1d(CLASSES)
    ),
    "BatchNorm untracked": lambda: head(nn.BatchNorm1d(7, track_running_stats=False), nn.ReLU()),
    "BatchNorm's other numbers": lambda: head(nn.BatchNorm1d(7, eps=0.1, momentum=0.7), nn.ReLU()),
    "BatchNorm and dropout": lambda: head(nn.BatchNorm1d(7), nn.ReLU(), nn.Dropout(0.4)),
}
OTHER: dict[str, Callable[[], nn.Module]] = {
    "lenet5": lambda: zoo.lenet5(SHAPE, CLASSES, 0.4),
    "convolutional": convolutional,
    "LeakyReLU": lambda: head(nn.LeakyReLU(0.3)),
    "a layer of its own": lambda: head(nn.ReLU(), Halved(7, 7), nn.ReLU()),
    "a sequence of its own inside": lambda: nn.Sequential(
        nn.Flatten(), Doubled(nn.Linear(256, 7), nn.ReLU()), nn.Linear(7, CLASSES)
    ),
    "its own layers in the middle": lambda: head(
        nn.ReLU(), Careful(7), nn.Tanh(), nn.ReLU(), nn.Linear(7, 7)
    ),
    "softmax on top": lambda: nn.Sequential(*head(nn.ReLU()), nn.Softmax(1)),
    "BatchNorm without weights": lambda: head(nn.BatchNorm1d(7, affine=False), nn.ReLU()),
    "shared layer": shared_layer,
    "tied": lambda: tied(True),
    "tied, no bias": lambda: tied(False),
    "tied biases": tied_biases,
    "frozen first": lambda: frozen("1.weight", "1.bias"),
    "frozen last": lambda: frozen("5.weight", "5.bias"),
    "frozen bias": lambda: frozen("5.bias"),
    "a sequence of its own": lambda: Doubled(*head(nn.ReLU())),
    "a patched stage": lambda: patched(nn.Sequential),
    "a patched layer": lambda: patched(nn.Linear),
    "a patched ReLU": lambda: patched(nn.ReLU),
}

NETS = {**DENSE, **OTHER}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make().double()


def model_of(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> Model:
    return Model(seeded(make), SHAPE, CLASSES, dtype)


def drawn(model: Model, n: int, seed: int = 5, sets: int = 1) -> Batch:
    """n random images with their dropout masks."""
    rng = np.random.default_rng((seed, n))
    drops = tuple(
        tuple(
            torch.from_numpy((rng.random(m.shape(n)) >= m.rate) / (1 - m.rate)).to(model.dtype)
            for m in model.dropouts
        )
        for _ in range(sets)
    )
    x = torch.from_numpy(2 * rng.standard_normal((n, *model.shape))).to(model.dtype)
    return Batch(x, torch.from_numpy(rng.integers(0, model.classes, n)), drops)


def same(a: Tensor, b: Tensor) -> bool:
    """The same numbers; NaN is one."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def same_bits(
    model: Model, sizes: tuple[int, ...], change: Callable[[Tensor], Tensor] = lambda x: x
) -> None:
    """Compare gradients and statistics to the bit, over several steps and in every mode.

    Nothing given may be changed, and nothing of `out` left as it was.
    """
    bound = BoundModel(model)
    fast = FastGradient(bound)
    assert fast.layers
    bound.w.copy_(model.initial()[0])
    statistics = model.initial()[1]
    for n in sizes:
        batch = drawn(model, n)
        x = change(batch.x)
        if not fast.supports(x):
            assert n == 1
            continue
        kept, masks = x.clone(), [m.clone() for m in batch.drop]
        following = torch.zeros_like(bound.w)
        for mode in MODES:
            ours, theirs, w = statistics.clone(), statistics.clone(), bound.w.clone()
            out = torch.full_like(bound.w, 12345.0)
            parts_of_out = list(model.views(out).values())
            loss = fast.gradient(x, batch.y, mode, ours, batch.drop, parts_of_out)
            wanted, parts = by_autograd(bound, x, batch.y, mode, theirs, batch.drop)
            where = f"{n} images, {mode}"
            for (name, found), part in zip(model.views(out).items(), parts, strict=True):
                assert same(found, part), f"{name}: {where}"
            assert same(ours, theirs), where
            assert mode == "train" or same(ours, statistics), where
            assert float(loss) == pytest.approx(float(wanted), rel=1e-5, nan_ok=True), where
            assert not loss.requires_grad
            assert same(x, kept) and same(bound.w, w)
            assert all(torch.equal(m, k) for m, k in zip(batch.drop, masks, strict=True))
            if mode == "train" and out.isfinite().all():
                statistics, following = ours, out
        bound.w.sub_(following, alpha=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("net", DENSE)
def test_the_gradient_of_a_dense_net_is_autograds_to_the_bit(net, dtype):
    model = model_of(DENSE[net], dtype)
    assert matches_autograd(model)
    same_bits(model, (1, 2, 5, 16, 33))


@pytest.mark.parametrize(
    "net", ["mlp", "tinynn", "BatchNorm first and last", "dropout first and last"]
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30, 0.0, -0.0])
def test_the_gradient_of_odd_numbers_is_autograds(net, value):
    def spoilt(x: Tensor) -> Tensor:
        x = x.clone()
        x[0, :, 3:9, 3:9] = value
        return x

    same_bits(model_of(DENSE[net], torch.float32), (2, 5), spoilt)


@pytest.mark.parametrize("normalized", [True, False])
def test_batch_statistics_of_one_example_need_autograd(normalized):
    fast = FastGradient(BoundModel(model_of(DENSE["tinynn" if normalized else "mlp"])))
    assert fast.supports(torch.zeros(2, *SHAPE))
    assert fast.supports(torch.zeros(1, *SHAPE)) is not normalized


def test_large_nets_keep_to_autograd(monkeypatch):
    model = model_of(NETS["mlp"])
    assert model.size <= MAX_PARAMETERS and matches_autograd(model)
    monkeypatch.setattr("raysim.training.tasks.fast_gradient.MAX_PARAMETERS", model.size)
    assert matches_autograd(model)
    monkeypatch.setattr("raysim.training.tasks.fast_gradient.MAX_PARAMETERS", model.size - 1)
    assert not matches_autograd(model)


@pytest.mark.parametrize("net", OTHER)
def test_an_odd_net_keeps_to_autograd(net):
    assert not matches_autograd(model_of(NETS[net]))


@pytest.mark.parametrize("part", ["first", "last", "statistics", "fails"])
@pytest.mark.parametrize("in_mode", MODES)
@pytest.mark.parametrize(("net", "n"), [("mlp", 1), ("mlp", 3), ("tinynn", 3)])
def test_one_wrong_bit_is_found(part, in_mode, net, n, monkeypatch):
    """In any parameter, any statistic, any mode, for one image or for several; also a failure."""
    model = model_of(NETS[net])
    if part == "statistics" and not model.buffer_size:
        pytest.skip("this net has none")
    right = FastGradient.gradient

    def gradient(
        self: FastGradient,
        x: Any,
        y: Any,
        mode: PassMode,
        buffers: Any,
        drop: Any,
        out: list[Tensor],
    ) -> Tensor:
        loss = right(self, x, y, mode, buffers, drop, out)
        if mode == in_mode and len(x) == n:
            if part == "fails":
                raise RuntimeError("no such kernel")
            spoilt = {"first": out[0], "last": out[-1], "statistics": buffers}[part].view(-1)
            spoilt[-1] = torch.nextafter(spoilt[-1], spoilt[-1] + 1)
        return loss

    assert matches_autograd(model)
    monkeypatch.setattr(FastGradient, "gradient", gradient)
    assert not matches_autograd(model)


# -- steps


def with_given_masks(net: nn.Module) -> list[Given]:
    """Puts modules that are given their masks in the place of the net's dropouts, in order."""
    found = []
    for parent in list(net.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Dropout | nn.Dropout2d):
                setattr(parent, name, Given())
                found.append(getattr(parent, name))
    return found


def compared(
    net: nn.Module, steps: int = 4, lr: float = LR, watched: Callable[[], None] = lambda: None
) -> None:
    """Takes steps on batches of several sizes with a `LoopTask` and with autograd on the user's own
    module, and finds the same losses, parameters and running statistics after every step. `watched`
    is called before each of PyTorch's steps and before and after each of ours. No small batches
    under BatchNorm, whose gradient they make chaotic."""
    model = Model(copy.deepcopy(net), SHAPE, CLASSES, torch.float64)
    task = LoopTask(model, LocalSettings(lr=lr), fast=matches_autograd(model))
    x0, statistics = model.initial()
    task.start(task.settings, x0, statistics, steps)
    theirs = copy.deepcopy(net).train()
    given = with_given_masks(theirs)
    assert len(given) == len(model.dropouts)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    norms = [m for m in theirs.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for i, n in enumerate([6, 9 if norms else 1, 11, 6][:steps]):
        batch = drawn(model, n, seed=i)
        for module, mask in zip(given, batch.drop, strict=True):
            module.mask = mask
        watched()
        loss = F.cross_entropy(theirs(batch.x), batch.y)
        grads = torch.autograd.grad(loss, trained, allow_unused=True)
        with torch.no_grad():
            for p, g in zip(trained, grads, strict=True):
                p -= 0 if g is None else lr * g
        watched()
        task.descend_plainly(batch)
        watched()
        assert len(task.losses) == i + 1 and (task.losses[-1] - loss).abs() < 1e-11
        ours = model.views(task.local_params)
        for name, p in zip(model.names, trained, strict=True):
            assert (ours[name] - p).abs().max() < 1e-10, f"{name} after step {i + 1}"
        tracked = [
            part for m in norms if m.track_running_stats for part in (m.running_mean, m.running_var)
        ]
        if tracked:
            assert (task.buffers - torch.cat(tracked)).abs().max() < 1e-10
    assert (task.local_params - x0).abs().max() > 1e-4
    assert torch.equal(model.initial()[0], x0) and torch.equal(model.initial()[1], statistics)


@pytest.mark.parametrize("net", NETS)
def test_a_step_is_that_of_the_users_own_net(net):
    compared(seeded(NETS[net]))


@pytest.mark.parametrize("net", ["mlp", "lenet5", "BatchNorm and dropout"])
def test_a_large_step_with_dead_units(net):
    """Many units give exactly 0, whose gradient is 0 in PyTorch too; the step size is no factor of
    the loss."""
    made = seeded(NETS[net])
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "bias" in name and p.numel() != CLASSES:
                p[::2] = -100
    compared(made, lr=0.37)


def test_exact_zeros_below_a_relu_have_no_gradient():
    made = seeded(lambda: head(nn.ReLU(), nn.Linear(7, 7), nn.ReLU()))
    with torch.no_grad():
        made[1].weight[2:4], made[1].bias[2:4] = 0, 0
        made[3].weight[0], made[3].bias[0] = 0, 0
    compared(made)


PLACES = ["0", "1", "1.0", "1.1", "2", "3", "3.0", "3.1", "4", "5", ""]
"""In `hooked`: stages, dense layers, ReLUs, a flatten, the net as a whole."""


def hooked(place: str, kind: str, calls: list[str], first: nn.Module) -> nn.Module:
    """A net with a user's hook, which changes what passes by."""
    net = seeded(
        lambda: nn.Sequential(
            first,
            nn.Sequential(nn.Flatten(), nn.Linear(256, 8)),
            nn.ReLU(),
            nn.Sequential(nn.Linear(8, 7), nn.ReLU()),
            nn.Linear(7, 7),
            nn.Linear(7, CLASSES),
        )
    )

    def changed(*args: Any) -> Any:
        calls.append(kind)
        value = args[-1] if kind != "full_backward" else args[-2]
        return (
            tuple(None if v is None else 3 * v for v in value)
            if isinstance(value, tuple)
            else 3 * value
        )

    module = net.get_submodule(place)
    if kind == "forward":
        module.register_forward_hook(lambda module, given, out: changed(out))
    elif kind == "forward_pre":
        module.register_forward_pre_hook(lambda module, given: changed(given))
    elif kind == "full_backward":
        module.register_full_backward_hook(lambda module, below, above: changed(below, above))
    else:
        module.register_full_backward_pre_hook(lambda module, grad: changed(grad))
    return net


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward_pre", "full_backward"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("first", [nn.Tanh, nn.ReLU])
def test_a_users_hook_is_called_and_heeded(place, kind, first):
    calls: list[str] = []
    net = hooked(place, kind, calls, first())
    counts: list[int] = []
    compared(net, watched=lambda: counts.append(len(calls)))
    theirs, ours = np.diff(counts)[::3].tolist(), np.diff(counts)[1::3].tolist()
    assert ours == theirs and sum(theirs) in (0, 4)
    assert not matches_autograd(Model(net, SHAPE, CLASSES, torch.float64))


# -- tasks


def begun(
    fast: bool, make: Callable[[], nn.Module] = NETS["BatchNorm and dropout"], lr: float = LR
) -> tuple[LoopTask, Tensor]:
    """A task at x (the initial parameters), and x. Both kinds of task stand at the same place."""
    model = model_of(make, torch.float32)
    task = LoopTask(model, LocalSettings(lr=lr), fast=fast)
    x, statistics = model.initial()
    task.start(task.settings, x, statistics, 4)
    return task, x


def soft(net: Net, batch: Batch) -> Tensor:
    return F.cross_entropy(net.logits, batch.y, reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize(
    "net", ["mlp", "tinynn", "BatchNorm and dropout", "dropout first and last"]
)
def test_every_gradient_of_a_task_is_that_of_one_by_autograd(net):
    """In all modes, at the vector in training and at others, of one image or many, of other losses
    and soft labels."""
    (ours, x), (theirs, same_x) = begun(True, NETS[net]), begun(False, NETS[net])
    assert ours.fast is not None and ours.fast.layers and theirs.fast is None
    for i, n in enumerate((6, 1, 9, 1)):
        batch = drawn(ours.model, n, seed=i)
        likely = torch.softmax(
            torch.randn(n, CLASSES, generator=torch.Generator().manual_seed(i)), 1
        )
        found = []
        for task, start in ((ours, x), (theirs, same_x)):
            w, elsewhere = task.local_params, start * 0.9
            grads = [
                task.grad(w, batch, mode="frozen"),
                task.grad(elsewhere, batch, mode="eval", buffers=task.buffers),
                task.grad(start, batch, mode="frozen"),
                task.grad(elsewhere, batch, soft, mode="frozen"),
                task.grad(w, replace(batch, y=likely), mode="frozen"),
                task.grad(w, batch, soft if i == 2 else cross_entropy),
                task.grad(start, batch, mode="frozen"),
            ]
            before = w.clone()
            task.descend_in_place(w, grads[-2])
            assert not torch.equal(w, before)
            found.append([*grads, w.clone(), task.buffers.clone()])
        assert all(map(torch.equal, *found))
        assert [float(loss) for loss in ours.losses] == pytest.approx(
            [float(loss) for loss in theirs.losses], rel=1e-5
        )


@pytest.mark.parametrize("fast", [True, False])
def test_a_plain_step_is_one_along_the_gradient(fast):
    """Also the next client's, and without autograd as with it."""
    (plain, x), (other, _) = begun(fast), begun(not fast)
    for client in range(2):
        for task in (plain, other):
            task.start(task.settings, x, task.model.initial()[1], 3)
        for i in range(3):
            batch = drawn(plain.model, 6 - i, seed=client)
            plain.descend_plainly(batch)
            other.descend_in_place(other.local_params, other.grad(other.local_params, batch))
            assert torch.equal(plain.local_params, other.local_params)
            assert torch.equal(plain.buffers, other.buffers)
        assert len(plain.losses) == 3


@pytest.mark.parametrize("net", ["mlp", "ReLU first", "BatchNorm first and last"])
def test_images_that_want_gradients_of_their_own(net):
    """A rule may have made them so; the gradient is the same."""
    (task, _), (other, _) = begun(True, NETS[net]), begun(False, NETS[net])
    batch = drawn(task.model, 4)
    wanting = replace(batch, x=batch.x.clone().requires_grad_())
    assert torch.equal(task.grad(task.local_params, wanting), other.grad(other.local_params, batch))
    assert not task.losses[0].requires_grad and wanting.x.grad is None


def test_labels_that_are_none_are_an_error_either_way():
    for fast in (True, False):
        task, _ = begun(fast)
        batch = drawn(task.model, 4)
        with pytest.raises(IndexError, match="out of bounds"):
            task.grad(task.local_params, replace(batch, y=batch.y + CLASSES))


# -- gradients after others


def alone(x: Tensor, batch: Batch, mode: PassMode = "frozen") -> Tensor:
    """The gradient of `soft` at x, by a task that has done nothing else."""
    task, _ = begun(False)
    return task.grad(x.clone(), batch, soft, mode, task.model.initial()[1])


BEFORE = [
    "batch", "masks", "mode", "vector", "other start", "step", "plain step", "moved before",
    "elsewhere first", "frozen first", "next client", "same vector, changed",
]  # fmt: skip


@pytest.mark.parametrize("case", BEFORE)
def test_a_gradient_does_not_depend_on_those_before(case):
    task, x = begun(False)
    w, batch = task.local_params, drawn(task.model, 6, sets=2)
    where, on, mode = x, batch, "frozen"
    if case == "moved before":
        w.add_(0.1)
    if case == "elsewhere first":
        task.grad(x * 1.1, batch, soft)
    elif case == "frozen first":
        task.grad(w, batch, soft, mode="frozen")
        w.add_(0.1)
    else:
        g = task.grad(w, batch, soft)
    if case == "batch":
        on = replace(batch)
    elif case == "masks":
        on = batch.masked(1)
    elif case == "mode":
        mode = "eval"
    elif case == "vector":
        where = x.clone()
    elif case == "other start":
        where = x * 1.1
    elif case in ("step", "plain step"):
        if case == "step":
            task.descend_in_place(w, g)
        else:
            task.start(task.settings, x, task.model.initial()[1], 4)
            task.descend_plainly(batch)
        on = drawn(task.model, 6, seed=8)
        task.grad(w, on, soft)
    elif case in ("next client", "same vector, changed"):
        if case == "next client":
            where = x * 1.1
        else:
            x.mul_(1.1)
        task.start(task.settings, where, task.model.initial()[1], 4)
    found = task.grad(where, on, soft, mode, task.model.initial()[1])
    assert torch.equal(found, alone(where, on, mode))


# -- runs


RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"algorithm": "fedprox"},
    "gradma": {"algorithm": "gradma"},
    "gradma's authors": {"algorithm": {"name": "gradma", "preset": "authors_code"}},
    "gradma, with statistics": {"algorithm": "gradma", "model": {"name": "tinynn"}},
    "scaffold": {"algorithm": "scaffold"},
    "moon": {"algorithm": "moon"},
    "clipped": {"local": {"steps": 3, "batch_size": 8, "lr": 0.1, "max_grad_norm": 0.1, "weight_decay": 0.01}},
    "asynchronous": {"schedule": {"name": "kasync", "k": 2, "concurrency": 4}},
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_a_run_without_autograd_is_one_by_autograd(case, engine, monkeypatch):
    given = {
        "rounds": 4, "partition": {"name": "dirichlet", "clients": 8, "alpha": 0.5}, "algorithm": "fedavg",
        "model": {"name": "mlp", "hidden": [12, 9]}, "local": {"steps": 3, "batch_size": 8, "lr": 0.1}, "schedule": {"cohort": 4},
        "batching": {"mode": "loop"}, **RUNS[case],
    }  # fmt: skip
    ours, records = engine(given)
    with monkeypatch.context() as patch:
        patch.setattr("raysim.training.trainers.trainer.matches_autograd", lambda model: False)
        theirs, wanted = engine(given)
    for a, b in zip(ours.executor.xs, theirs.executor.xs, strict=True):
        assert np.array_equal(a, b)
    ours_task, their_task = (run.executor.trainer.trainers[0].task for run in (ours, theirs))
    assert ours_task.fast and not their_task.fast
    assert not np.array_equal(ours.executor.xs[0], ours.executor.xs[-1])
    assert records[-1]["train_loss"] == pytest.approx(wanted[-1]["train_loss"], rel=1e-5)
