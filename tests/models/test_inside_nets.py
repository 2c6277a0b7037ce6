"""What a rule may see of the inside of a net: the representation, the levels of a net made of
stages, the rest of the net after a level, the gradient of all of a client's data, a fresh
initialisation, a projection head. Checked against the user's own module in PyTorch, one client
alone and side by side."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.programs import program
from torch import Tensor, nn
from torch.nn import functional as F

from raysim.errors import ConfigError, ContractError, RaysimError
from raysim.models.flat import Model
from raysim.models.nets import zoo
from raysim.prepare.resolve import prepare
from raysim.rules import Batch, LocalData
from raysim.training.client_start import fresh_model
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.tasks.pure_task import PureTask

SHAPE, CLASSES = (2, 4, 4), 5


def staged(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(6, CLASSES),
    ).double()  # fmt: skip


def example(n: int = 6) -> Batch:
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(n, *SHAPE, dtype=torch.float64, generator=rng)
    mask = 2.0 * (torch.rand(n, 6, generator=rng) > 0.5).double()
    return Batch(x, torch.randint(0, CLASSES, (n,), generator=rng), ((mask,),))


def made(net: nn.Module) -> Model:
    return Model(copy.deepcopy(net), SHAPE, CLASSES, torch.float64)


def task_for(way: str, model: Model) -> tuple[Any, Tensor]:
    w, buffers = model.initial()
    if way == "lanes":
        return PureTask(model, LocalSettings(), buffers), w
    task = LoopTask(model, LocalSettings())
    task.start(LocalSettings(), w, buffers, 1)
    return task, w


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


@pytest.mark.parametrize("way", ["loop", "lanes"])
def test_levels_features_and_tails_are_those_of_the_module(way):
    net, batch = staged().train(), example()
    task, w = task_for(way, made(net))
    ours = task.net(w, batch, "frozen", dropout=False)
    net[1][4].p = 0.0
    h1 = net[0](batch.x)
    h2 = net[1](h1)
    for a, b in zip(ours.levels, [h1, h2, net[2](h2)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(ours.logits, ours.levels[-1], rtol=0, atol=0)
    torch.testing.assert_close(ours.features, h2, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(
        ours.tail(1, h1.detach() + 0.1), net[2](net[1](h1 + 0.1)), rtol=1e-9, atol=1e-11
    )
    torch.testing.assert_close(
        ours.tail(2, h2.detach() + 0.1), net[2](h2 + 0.1), rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize("way", ["loop", "lanes"])
def test_levels_are_those_before_a_stage_in_place(way):
    net = nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(32, 6)), nn.SiLU(inplace=True), nn.Linear(6, CLASSES)
    ).double()
    task, w = task_for(way, made(net))
    ours, h = task.net(w, example()), net[0](example().x)
    torch.testing.assert_close(ours.levels[0], h, rtol=1e-10, atol=1e-12)
    again = ours.levels[0].detach().clone()
    torch.testing.assert_close(ours.tail(1, again), ours.logits, rtol=0, atol=0)
    torch.testing.assert_close(again, h, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", ["loop", "lanes"])
def test_a_gradient_flows_through_a_frozen_tail_into_the_level_only(way):
    """d/dw of CE(tail of ANOTHER net at h_1(w)): PyTorch's gradient with the other net's parameters
    held fixed. The loss never looks at the logits, so the trained net's later stages get exactly
    nothing."""
    net, other, batch = staged(0), staged(1), example()
    model = made(net)
    task, w = task_for(way, model)
    elsewhere = flat(other.parameters())
    frozen = task.net(elsewhere, batch, "frozen", dropout=False)
    trained = task.local_params if way == "loop" else w

    def loss(net, batch):
        return F.cross_entropy(frozen.tail(1, net.levels[0]), batch.y, reduction="none")

    grad = task.grad(trained, batch, loss)
    net.train(), other.train()
    other[1][4].p = 0.0
    value = F.cross_entropy(other[2](other[1](net[0](batch.x))), batch.y)
    first = list(net[0].parameters())
    expected = flat(torch.autograd.grad(value, first))
    torch.testing.assert_close(grad[: len(expected)], expected, rtol=1e-8, atol=1e-10)
    assert expected.abs().max() > 0 and not grad[len(expected) :].any()
    net[1][4].p = 0.5
    masked = net[1][:4](net[0](batch.x)) * batch.drop[0]
    plain = F.cross_entropy(
        net[2](masked), batch.y
    ).detach()  # what is reported leaves out what a method adds
    torch.testing.assert_close(task.losses[0], plain, rtol=1e-9, atol=0)


@pytest.mark.parametrize("way", ["loop", "lanes"])
def test_nets_elsewhere_do_not_move_the_statistics_and_do_not_mix(way):
    """Four nets in turn, more than are kept at hand, on vectors that are changed in place between
    the calls."""
    net, batch = staged(), example()
    task, w = task_for(way, made(net))
    before = task.buffers.clone()
    vectors = [w + 0.1 * k for k in range(4)]

    def logits(v: Tensor) -> Tensor:
        return task.net(v, batch, "frozen", dropout=False).logits.detach().clone()

    first = [logits(v) for v in vectors]
    again = [logits(v) for v in vectors[::-1]][::-1]
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
    assert len({tuple(a.reshape(-1).tolist()) for a in first}) == 4
    vectors[3].copy_(vectors[0])
    assert torch.equal(logits(vectors[3]), first[0])
    assert torch.equal(task.buffers, before) and task.losses == []


@pytest.mark.parametrize("way", ["loop", "lanes"])
def test_a_net_keeps_its_vector_as_long_as_somebody_has_it(way):
    """Six nets are made before any of them is asked for anything."""
    task, w = task_for(way, made(staged()))
    vectors, batch = [w + 0.1 * k for k in range(6)], example()
    together = [
        net.logits for net in [task.net(v, batch, "frozen", dropout=False) for v in vectors]
    ]
    for v, logits in zip(vectors, together, strict=True):
        assert torch.equal(task.net(v, batch, "frozen", dropout=False).logits, logits)
    first, twin = (task.net(vectors[0], batch, "frozen", dropout=False) for _ in range(2))
    del twin
    for k in range(1, 9):  # more than are kept at hand; the first is still somebody's
        _ = task.net(w + k, batch, "frozen", dropout=False).logits
    assert torch.equal(first.logits, together[0])
    if way == "loop":
        assert len(task.given_nets._copies) == 6
        for k in range(4):
            _ = task.net(w - k, batch, "frozen", dropout=False).logits
        assert len(task.given_nets._copies) == 6


GRADIENTS = {
    "grad": lambda task, w, batch, loss: task.grad(w, batch, loss),
    "frozen": lambda task, w, batch, loss: task.grad(w, batch, loss, "frozen"),
    "eval": lambda task, w, batch, loss: task.grad(w, batch, loss, "eval"),
    "and_buffers": lambda task, w, batch, loss: task.grad_and_buffers(w, batch, task.buffers, loss)[
        0
    ],
    "sample": lambda task, w, batch, loss: task.sample_grads(w, batch, loss)[0].mean(0),
    "joint": lambda task, w, batch, loss: task.joint_grad(
        w, batch, {}, lambda net, batch, _: loss(net, batch)
    )[0],
}


def two_views(trained: bool) -> tuple[nn.Sequential, Batch]:
    net = staged().train(trained)
    net[1][4].p = 0.0
    return net, Batch(example().x, example().y)


@pytest.mark.parametrize("place", ["here", "elsewhere", "constant", "received"])
@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("way", ["loop", "lanes"])
def test_in_a_loss_a_net_at_the_point_has_a_gradient(way, kind, place):
    """PyTorch's gradient of a loss of two views, of which the other is a constant if it is at
    another vector, or at that of the broadcast. Statistics of the second view do not count."""
    mode = "eval" if kind in ("eval", "sample") else "frozen"
    net, batch = two_views(mode == "frozen")
    task, w = task_for(way, made(net))
    points = {"elsewhere": w.clone(), "received": w}
    point = points.get(place, task.local_params if way == "loop" else w)
    is_constant = place == "constant" or (place == "received" and way == "loop")

    def loss(net, batch):
        views = Batch(1.5 * batch.x, batch.y)
        other = task.net(point if place != "constant" else 1 * point, views, mode).logits
        return (net.logits - other).square().sum(1)

    ours = GRADIENTS[kind](task, point, batch, loss)
    other = net(1.5 * batch.x)
    other = other.detach() if is_constant else other
    value = (net(batch.x) - other).square().sum(1).mean()
    expected = flat(torch.autograd.grad(value, net.parameters()))
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-10)
    outside = task.net(w, batch).logits
    assert not outside.requires_grad


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("at_start", [True, False])
def test_a_loss_of_the_point_itself_is_refused(kind, at_start):
    """Its gradient by the point, here 2 w, would be left out."""
    _, batch = two_views(True)
    task, w = task_for("loop", made(staged()))
    w = task.local_params if at_start else w.clone()

    def loss(net, batch, use=lambda w: w):
        return F.cross_entropy(net.logits, batch.y, reduction="none") + use(w).square().sum()

    name = r'state\["w"\]' if at_start else "w"
    with pytest.raises(ContractError, match=f"the loss depends on {name}, which is a constant"):
        GRADIENTS[kind](task, w, batch, loss)
    assert not w.requires_grad
    constant = GRADIENTS[kind](task, w, batch, lambda *both: loss(*both, use=Tensor.detach))
    plain = GRADIENTS[kind](task, w, batch, lambda *both: loss(*both, use=torch.zeros_like))
    assert torch.equal(constant, plain)


def test_a_joint_loss_that_reads_another_tensor_from_elsewhere_is_refused():
    task, w = task_for("loop", made(staged()))
    a = torch.ones(1, dtype=torch.float64)
    with pytest.raises(ContractError, match=r"third argument, others\['a'\]"):
        task.joint_grad(w, example(), {"a": a}, lambda net, batch, others: net.logits.sum(1) * a)
    task.received = (w, a)

    def loss(net, batch, others):
        return net.logits.sum(1) * (a + others["a"])

    _, gradients = task.joint_grad(w, example(), {"a": a}, loss)
    logits = task.net(w, example(), "frozen", dropout=True).logits
    torch.testing.assert_close(gradients["a"], logits.sum(1).mean().reshape(1))


@pytest.mark.parametrize("way", ["loop", "lanes"])
def test_a_tail_takes_the_dropout_masks_of_its_own_stages(way):
    net = nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(32, 6), nn.Dropout(0.5)),
        nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)),
        nn.Linear(6, CLASSES),
    ).double()  # fmt: skip
    x, y = example().x, example().y
    masks = tuple(2.0 * (torch.arange(36).reshape(6, 6) % k == 0).double() for k in (2, 3))
    task, w = task_for(way, made(net))
    ours = task.net(w, Batch(x, y, (masks,)))
    h = net[0][:2](x) * masks[0]
    expected = net[2](net[1][0](h) * masks[1])
    torch.testing.assert_close(ours.tail(1, ours.levels[0]), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours.logits, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", ["loop", "lanes"])
def test_a_dropout_that_a_stage_calls_twice_has_two_masks(way):
    class Twice(nn.Module):
        def __init__(self, size: int):
            super().__init__()
            self.a, self.b, self.drop = nn.Linear(size, 6), nn.Linear(6, 6), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.b(self.drop(self.a(x))))

    net = nn.Sequential(nn.Flatten(), Twice(32), Twice(6), nn.Linear(6, CLASSES)).double()
    numbers = torch.arange(36).reshape(6, 6)
    masks = tuple(2.0 * (numbers % k == 0).double() for k in (2, 3, 4, 5))
    task, w = task_for(way, made(net))
    ours = task.net(w, Batch(example().x, example().y, (masks,)))
    torch.testing.assert_close(ours.tail(2, ours.levels[1]), ours.logits, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["loop", "lanes"])
def test_clipping_comes_before_decay_and_never_hides_an_overflow(way):
    model = made(staged())
    task, w = task_for(way, model)
    task.settings = LocalSettings(lr=0.5, weight_decay=0.1, clip=2.0, decayed=model.decayed())
    d = torch.full_like(w, 3.0)
    expected = w - 0.5 * (d * 2.0 / d.norm() + 0.1 * model.decayed() * w)
    torch.testing.assert_close(task.descend(w, d), expected, rtol=1e-12, atol=1e-14)
    short = d / d.norm()
    torch.testing.assert_close(
        task.descend(w, short),
        w - 0.5 * (short + 0.1 * model.decayed() * w),
        rtol=1e-12,
        atol=1e-14,
    )
    assert task.descend(w, d * 1e200).isnan().all()


def test_what_a_net_has_not_is_refused_by_name():
    task, w = task_for(
        "loop",
        made(nn.Sequential(nn.Flatten(), nn.Linear(32, 7), nn.ReLU(), nn.Linear(7, CLASSES))),
    )
    assert len(task.net(w, example(), "eval", task.buffers).levels) == 4

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x.flatten(1)[:, :CLASSES]

    task, w = task_for("loop", made(Bare()))
    with pytest.raises(ValueError, match="stages"):
        _ = task.net(w, example()).levels
    with pytest.raises(ValueError, match="linear classifier"):
        _ = task.net(w, example()).features


def test_a_full_gradient_is_the_mean_over_all_examples(base, engine, ragged):
    """Whatever the batch size: 23 examples in batches of 4, 11 or all at once; a single one left
    over joins the last batch. Without BatchNorm it is PyTorch's gradient of the mean loss over the
    client's examples."""
    run, _ = engine({"rounds": 1, "dtype": "float64", "model": {"name": "mlp", "hidden": [5]}, "algorithm": "fedavg",
                     "partition": ragged([23, 9]), "schedule": {"cohort": 2}})  # fmt: skip
    trainer, plan = run.executor.trainer.trainers[0], run.plan
    task, mine = trainer.task, plan.clients.client(0)
    w = plan.initial[0] + 0.01
    task.start(LocalSettings(), w, torch.zeros(0), 1)
    x, y = trainer.client_batches.examples.batch(mine)
    net = copy.deepcopy(plan.net).double()
    nn.utils.vector_to_parameters(w, net.parameters())
    expected = flat(torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters())))
    for size in (4, 11, "full"):
        trainer.client_batches.config = plan.config.model_copy(
            update={"local": plan.config.local.model_copy(update={"batch_size": size})}
        )
        data = LocalData(
            len(mine), trainer.start.averages[0], lambda: trainer.client_batches.whole(mine)
        )
        sizes = [len(batch.y) for batch in data.batches()]
        assert sum(sizes) == data.n == 23 and trainer.start.averages == [16]
        assert sizes == {4: [4, 4, 4, 4, 4, 3], 11: [11, 12], "full": [23]}[size]
        torch.testing.assert_close(task.full_grad(w, data), expected, rtol=1e-10, atol=1e-13)
    assert not task.full_grad(w, LocalData(0)).any()


def test_a_fresh_model_is_keyed_by_the_client(base, engine):
    run, _ = engine({"rounds": 1, "model": "tinynn", "algorithm": "fedavg", "schedule": {"cohort": 2},
                     "partition": {"name": "iid", "clients": 4}})  # fmt: skip
    trainer = run.executor.trainer.trainers[0]
    (one, statistics), (again, _), (other, _) = (
        fresh_model(trainer.config, trainer.model, client) for client in (0, 0, 1)
    )
    assert (
        torch.equal(one, again)
        and not torch.equal(one, other)
        and not torch.equal(one, run.plan.initial[0])
    )
    assert torch.equal(statistics, run.plan.initial[1])
    assert 0.5 < one.std() / run.plan.initial[0].std() < 2


# --- the projection head


@pytest.mark.parametrize("name", ["mlp", "resnet20", "logistic"])
def test_a_projection_head_stands_below_the_classifier(name, base):
    given = {
        **base,
        "rounds": 1,
        "partition": {"name": "iid", "clients": 4},
        "schedule": {"cohort": 2},
    }
    plain = prepare({**given, "algorithm": "fedavg", "model": name})
    headed = prepare({**given, "algorithm": "moon", "model": {"name": name, "projection": 16}})
    width = {"mlp": 200, "resnet20": 64, "logistic": 64}[name]
    extra = width * width + width + width * 16 + 16 + 16 * 10 + 10 - (width * 10 + 10)
    assert headed.problem.size - plain.problem.size == extra
    assert headed.problem.levels == plain.problem.levels
    assert headed.config.fingerprint != plain.config.fingerprint
    model = headed.model()
    task = LoopTask(model, LocalSettings())
    w, buffers = model.initial()
    features = task.net(
        w, Batch(torch.randn(3, 1, 8, 8), torch.zeros(3).long()), "eval", buffers
    ).features
    assert features.shape == (3, 16)


def test_a_projection_needs_a_width_and_a_classifier(base, source):
    given = {**base, "rounds": 1, "algorithm": "fedavg", "schedule": {"cohort": 2}}
    with pytest.raises(ConfigError, match=r"model\.projection: .*greater than or equal to 1"):
        prepare({**given, "model": {"name": "mlp", "projection": 0}})
    layers = "nn.Flatten(), nn.Unflatten(1, (1, 64)), nn.Conv1d(1, 10, 64), nn.Flatten()"
    code = ("from torch import nn\n\n\nclass Net(nn.Sequential):\n    def __init__(self, shape, classes):\n"
            f"        super().__init__({layers})\n")  # fmt: skip
    net = source("bare", code)
    with pytest.raises(ConfigError, match=r"model\.projection: .*no linear classifier"):
        prepare({**given, "model": {"name": net + ":Net", "projection": 16}})


@pytest.mark.parametrize("algorithm", ["moon", "fedmlb"])
def test_a_method_that_looks_inside_refuses_a_net_that_cannot_be_looked_into(
    algorithm, base, source
):
    code = ("import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self, shape, classes):\n"
            "        super().__init__()\n        self.w = nn.Parameter(torch.zeros(64, classes))\n\n"
            "    def forward(self, x):\n        return x.flatten(1) @ self.w\n")  # fmt: skip
    given = {**base, "rounds": 1, "algorithm": algorithm, "model": source("bare", code) + ":Net"}
    with pytest.raises(ConfigError, match=rf"'{algorithm}' .*bare\.py:Net"):
        prepare({**given, "schedule": {"cohort": 2}})


def test_shipped_nets_have_features_and_stages_but_a_single_layer_has_learnt_none():
    for name, make in zoo.NETS.items():
        if name in ("lstm", "transformer"):
            continue  # nets for tokens, see tests/engine/test_tasks.py
        if name in (
            "cnn_dropout",
            "mnist_cnn",
            "fixup_resnet9",
            "ct_cnn",
            "densenet121_gn",
            "vit_b_32",
        ):
            continue  # large nets, see tests/models/test_nets_xu.py
        shape, classes = ((1, 1, 8), 2) if name == "quadratic" else ((3, 32, 32), 10)
        model = Model(make(shape, classes), shape, classes)
        assert (model.features > 0) == (name not in ("logistic", "quadratic")), name
        expected = {
            "logistic": 0,
            "mlp": 2,
            "tinynn": 2,
            "lenet5": 4,
            "vgg11": 6,
            "resnet20": 4,
            "lenet": 4,
        }
        assert model.levels == expected.get(name, model.levels), name


# --- mistakes in one's own rules

RULES = program("inside_nets_rules")


@pytest.fixture
def own(base, source, engine) -> Any:
    path = source("own_rules_inside", RULES)

    def run(client: Any = "fedavg", server: Any = "fedavg") -> Any:
        client, server = (
            {**r, "name": f"{path}:{r['name']}"} if isinstance(r, dict) else r
            for r in (client, server)
        )
        small = {
            "model": {"name": "mlp", "hidden": [4]},
            "partition": {"name": "iid", "clients": 3},
        }
        return engine(
            {"rounds": 2, "client": client, "server": server, "schedule": {"cohort": 2}, **small}
        )

    return run


def test_rules_that_keep_their_word_run(own):
    own({"name": "Keeper"}, {"name": "Server", "mode": "sum", "asks": "sum"})
    own({"name": "Keeper"}, {"name": "Server", "mode": "difference", "asks": "difference"})


@pytest.mark.parametrize(
    "client, server, error, said",
    [
        (
            {"name": "Keeper", "kept": 0},
            "fedavg",
            ConfigError,
            r"keeper.* keeps \{\}, but its `state` declares \{'v'",
        ),
        ({"name": "Keeper", "kept": 2}, "fedavg", ConfigError, r"keeps \{'v': \(3,\)\}"),
        ({"name": "Keeper", "kept": 3}, "fedavg", ConfigError, r"keeps .*'u'"),
        ({"name": "Silent"}, {"name": "Extra"}, ConfigError, r"silent.* sends no 'extra'"),
        (
            "fedavg",
            {"name": "Server", "mode": "total"},
            ConfigError,
            r"uploads 'delta' in an unknown mode 'total'",
        ),
        ("fedavg", {"name": "Server", "asks": "sum"}, RaysimError, r"asks for the sum of 'delta'"),
        (
            "fedavg",
            {"name": "Server", "drops": True},
            RaysimError,
            r"update .*must return the keys of init.* m",
        ),
        (
            {"name": "Bare", "rho": 0.1},
            "fedavg",
            ConfigError,
            r"put @dataclass\(frozen=True\) above class Bare",
        ),
    ],
)
def test_rules_that_break_it_are_told_how(client, server, error, said, own):
    with pytest.raises(error, match=said):
        own(client, server)


def test_fednova_refuses_a_proximal_term_that_jumps(base):
    """lr mu >= 1 makes (1 - lr mu)^k alternate, for the largest lr of a schedule."""
    given = {**base, "rounds": 9, "schedule": {"cohort": 2}, "local": {"lr": [[0, 0.05], [5, 0.1]]}}
    prepare({**given, "algorithm": {"name": "fednova", "mu": 9.9}})
    with pytest.raises(ConfigError, match=r"algorithm\.mu: must stay below 1 / local\.lr = 10"):
        prepare({**given, "algorithm": {"name": "fednova", "mu": 10.0}})


@pytest.mark.parametrize("name", ["moon", "feddecorr", "fedgen", "fedala", "fedbabu", "fedrod"])
def test_methods_of_features_refuse_a_net_that_learns_none(base, name):
    given = {
        **base,
        "rounds": 1,
        "schedule": {"cohort": 2},
        "algorithm": name,
        "model": "logistic",
    }
    with pytest.raises(
        ConfigError, match=rf"model: client rule '{name}' needs features, but 'logistic' does not"
    ):
        prepare(given)
