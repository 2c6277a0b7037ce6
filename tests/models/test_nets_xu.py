"""The nets of Xu 2022 (section 10.2): their sizes, how they begin, and that raysim can train them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raysim.config.sections.base import Named
from raysim.errors import ConfigError
from raysim.models.build import net_arguments
from raysim.models.checks.hidden_state import refuse_draws, refuse_hidden_state
from raysim.models.flat import Model
from raysim.models.initial.weights import read_state_dict
from raysim.models.nets import zoo
from raysim.prepare.resolve import prepare
from raysim.rules import Batch
from raysim.rules.tasks.shipped_tasks import NextToken
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.tasks.pure_task import PureTask


def kinds(net: nn.Module) -> list[str]:
    return [type(m).__name__ for m in net.modules() if type(m).__name__ != "Sequential"]


def of(net: nn.Module, kind: type) -> list[Any]:
    return [m for m in net.modules() if isinstance(m, kind)]


def seeded(name: str, shape: tuple[int, ...], classes: int, **keys: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return zoo.NETS[name](shape, classes, **keys)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "d"),
    [
        ("mnist_cnn", (1, 28, 28), 10, 228_010),
        ("fixup_resnet9", (3, 32, 32), 10, 6_568_673),
        ("fixup_resnet9", (3, 32, 32), 100, 6_614_843),
        ("ct_cnn", (3, 128, 128), 2, 15_676_418),
        ("densenet121_gn", (3, 224, 224), 2, 7_054_210),
        ("vit_b_32", (3, 384, 384), 100, 87_605_092),
    ],
)
def test_sizes(name, shape, classes, d):
    with torch.device("meta"):
        net = zoo.NETS[name](shape, classes)
    assert sum(p.numel() for p in net.parameters()) == d
    assert not list(net.buffers())


def test_mnist_cnn_is_the_papers_layer_by_layer():
    net = zoo.mnist_cnn((1, 28, 28), 10)
    expected = [
        "Conv2d",
        "ReLU",
        *["Conv2d", "MaxPool2d", "ReLU"] * 2,
        "Flatten",
        "Linear",
        "ReLU",
        "Linear",
    ]
    assert kinds(net) == expected and len(net) == 5
    assert [(c.in_channels, c.out_channels, c.kernel_size) for c in of(net, nn.Conv2d)] == [
        (1, 32, (5, 5)),
        (32, 32, (5, 5)),
        (32, 64, (5, 5)),
    ]
    assert [layer.in_features for layer in of(net, nn.Linear)] == [576, 256]
    with pytest.raises(
        ConfigError, match=r"model\.name: 'mnist_cnn' is too deep for images of 8×8"
    ):
        zoo.mnist_cnn((1, 8, 8), 10)


# -- Fixup


def fixup(x: Tensor, parameters: list[Tensor], classes: int) -> Tensor:
    """Section 10.2 as it is written, on parameters in the order of use."""
    rest = iter(parameters)

    def convolution(x: Tensor) -> Tensor:
        return F.conv2d(x, next(rest), padding=1)

    def layer(x: Tensor) -> Tensor:
        return torch.relu(convolution(x + next(rest)) * next(rest) + next(rest))

    def block(x: Tensor) -> Tensor:
        out = torch.relu(convolution(x + next(rest)) + next(rest))
        return torch.relu(convolution(out + next(rest)) * next(rest) + next(rest) + x)

    x = layer(x)
    x = block(F.max_pool2d(layer(x), 2))
    x = F.max_pool2d(layer(x), 2)
    x = block(F.max_pool2d(layer(x), 2))
    x = F.max_pool2d(x, 4).flatten(1) + next(rest)
    x = F.linear(x, next(rest), next(rest))
    assert next(rest, None) is None and x.shape[1] == classes
    return x


def test_fixup_resnet9_is_the_papers_function():
    """At parameters far from the first ones, where nothing is 0 or 1."""
    net = seeded("fixup_resnet9", (3, 32, 32), 10)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in net.parameters():
            p += (
                0.05 * torch.randn(p.shape, generator=rng)
                if p.dim() > 1
                else torch.rand(p.shape, generator=rng) - 0.5
            )
        x = torch.randn(2, 3, 32, 32, generator=rng)
        torch.testing.assert_close(net(x), fixup(x, list(net.parameters()), 10))


def test_fixup_begins_as_it_should():
    net = seeded("fixup_resnet9", (3, 32, 32), 10)
    gains = [1, 1, 2**-0.5, 0, 1, 1, 2**-0.5, 0]
    convolutions = of(net, nn.Conv2d)
    assert [c.out_channels for c in convolutions] == [64, 128, 128, 128, 256, 512, 512, 512]
    for c, gain in zip(convolutions, gains, strict=True):
        weight = c.weight.detach()
        assert c.bias is None and c.padding == (1, 1)
        std = gain * (2 / (9 * c.out_channels)) ** 0.5
        n = weight.numel()
        assert abs(float(weight.std()) - std) <= 5 * std / (2 * n) ** 0.5
        assert abs(float(weight.mean())) <= 5 * std / n**0.5
    single = {name: p for name, p in net.named_parameters() if p.numel() == 1}
    assert len(single) == 23
    assert all(p.item() == (0 if name.endswith("bias") else 1) for name, p in single.items())
    assert sum(name.endswith("scale") for name in single) == 6
    last = net[-1]
    assert not last.weight.any() and not last.bias.any()
    assert torch.equal(net(torch.randn(3, 3, 32, 32)), torch.zeros(3, 10)), (
        "so the first logits are 0"
    )


def test_fixup_blocks_begin_as_the_identity():
    net = seeded("fixup_resnet9", (3, 32, 32), 10)
    x = torch.rand(2, 128, 5, 5)
    assert torch.equal(net[1][-1](x), x)


# -- the CNN for CT images


def test_ct_cnn_is_the_papers_layer_by_layer():
    with torch.device("meta"):
        net = zoo.ct_cnn((3, 128, 128), 2)
        assert net(torch.zeros(1, 3, 128, 128)).shape == (1, 2)
    convolutions = of(net, nn.Conv2d)
    assert [c.in_channels for c in convolutions] == [3, 128, 256, 256, 512, 512, 512, 512, 512]
    assert {c.out_channels for c in convolutions[3:]} == {512} and {
        c.padding for c in convolutions
    } == {(1, 1)}
    normed = ["Conv2d", "GroupNorm", "ReLU"]
    plain = ["Conv2d", "ReLU"]
    assert kinds(net) == [
        *plain * 5,
        *normed,
        "MaxPool2d",
        *plain,
        *normed,
        *plain,
        "Flatten",
        "Linear",
    ]
    assert {(g.num_groups, g.num_channels) for g in of(net, nn.GroupNorm)} == {(1, 512)}
    assert of(net, nn.MaxPool2d)[0].kernel_size == 3 and net[-1].in_features == 42 * 42 * 512


def test_ct_cnn_small():
    net = zoo.ct_cnn((1, 128, 128), 2, width=24, downsample=2)
    assert sum(p.numel() for p in net.parameters()) == 573_266
    net = zoo.ct_cnn((1, 20, 26), 2, width=3, downsample=2)
    assert [c.out_channels for c in of(net, nn.Conv2d)] == [3, 6, 6, 12, 12, 12, 12, 12, 12]
    assert net(torch.zeros(2, 1, 20, 26)).shape == (2, 2)
    x = torch.arange(520.0).reshape(1, 1, 20, 26)
    assert torch.equal(net[0][0](x)[0, 0, 0, :2], torch.tensor([13.5, 15.5])), "means of 2×2 pixels"
    with pytest.raises(ConfigError, match=r"model\.downsample: 4 leaves too little of 8×8 pixels"):
        zoo.ct_cnn((1, 8, 8), 2, downsample=4)


# -- torchvision's


def test_densenet_has_group_norm_and_no_average_pool():
    net = seeded("densenet121_gn", (1, 64, 64), 7)
    norms = of(net, nn.GroupNorm)
    assert len(norms) == 121 and {g.num_groups for g in norms} == {4}
    assert not of(net, nn.BatchNorm2d) and not of(net, nn.AdaptiveAvgPool2d)
    assert all(g.weight.eq(1).all() and g.bias.eq(0).all() for g in norms)
    assert len(of(net, nn.Conv2d)) == 120 and net[0][0].in_channels == 1
    assert net[-1].in_features == 2 * 2 * 1024 and not net[-1].bias.any()
    assert net(torch.zeros(1, 1, 64, 64)).shape == (1, 7)
    with pytest.raises(ConfigError, match=r"'densenet121_gn' needs images of 32×32 at least"):
        zoo.densenet121_gn((3, 28, 28), 10)


def test_densenet_is_torchvisions_otherwise():
    """With its own norms put back, the feature maps are the same."""
    from raysim.data import import_torchvision

    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = import_torchvision().models.densenet121()
    ours = seeded("densenet121_gn", (3, 32, 32), 5)
    assert torch.equal(ours[0][0].weight, theirs.features.conv0.weight), (
        "the first thing that is drawn"
    )
    for module in [
        m for m in theirs.modules() if any(isinstance(c, nn.BatchNorm2d) for c in m.children())
    ]:
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(4, child.num_features))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours[:-1](x), torch.relu(theirs.features(x)).flatten(1))


@pytest.fixture
def shallow(monkeypatch):
    """ViT-B/32 with two narrow layers, which are made in milliseconds."""
    from raysim.data import import_torchvision

    transformers = import_torchvision().models.vision_transformer
    monkeypatch.setattr(
        transformers,
        "vit_b_32",
        lambda **keys: transformers.VisionTransformer(
            patch_size=32, num_layers=2, num_heads=2, hidden_dim=768, mlp_dim=16, **keys
        ),
    )


@pytest.fixture
def vit(shallow) -> nn.Module:
    return seeded("vit_b_32", (3, 64, 64), 5)


def test_no_net_keeps_something_between_passes(shallow):
    """They are not searched for it before a run."""
    of_net = {
        "quadratic": ((1, 1, 8), 2, {}),
        "ct_cnn": ((1, 20, 26), 2, {"width": 3, "downsample": 2}),
        "lstm": ((6,), 10, {}),
        "transformer": ((6,), 10, {}),
    }
    tokens = torch.arange(24).reshape(4, 6) % 10
    for name in zoo.NETS:
        shape, classes, keys = of_net.get(name, ((3, 32, 32), 10, {}))
        task, sample = None, None
        if shape == (6,):
            task, sample = NextToken(), Batch(tokens, tokens.roll(-1, 1))
        net = seeded(name, shape, classes, **keys)
        model = Model(copy.deepcopy(net), shape, classes, learning_task=task, sample=sample)
        x, _ = model.examples(4)
        refuse_draws(net, model, x)
        refuse_hidden_state(net, model, x)


def test_vit_has_twelve_layers():
    with torch.device("meta"):
        net = zoo.vit_b_32((3, 64, 64), 5)
    assert len(net.encoder.layers) == 12


def test_vit_begins_with_the_papers_classifier(vit):
    head = vit.heads.head
    assert head.weight.eq(1).all() and head.bias.eq(0).all() and head.weight.shape == (5, 768)
    assert vit.encoder.pos_embedding.shape == (1, 5, 768)
    assert vit.conv_proj.kernel_size == (32, 32)
    logits = vit(torch.rand(1, 3, 64, 64))
    # Each is a sum of 768 numbers that nearly cancel.
    torch.testing.assert_close(logits, logits[:, :1].expand(1, 5), atol=1e-4, rtol=0)
    for shape in ((3, 64, 96), (3, 48, 48)):
        with pytest.raises(ConfigError, match="'vit_b_32' needs squares of a multiple of 32"):
            zoo.vit_b_32(shape, 5)


def test_vit_enlarges_small_images(shallow):
    net = seeded("vit_b_32", (3, 16, 8), 5, image_size=32)
    with torch.no_grad():
        net.net.heads.head.weight.normal_(generator=torch.Generator().manual_seed(0))
        logits = net(torch.ones(1, 3, 16, 8))
        torch.testing.assert_close(logits, net.net(torch.ones(1, 3, 32, 32)))
    with pytest.raises(ConfigError, match=r"model\.image_size: .*multiple of 32"):
        net_arguments(Named.model_validate({"name": "vit_b_32", "image_size": 100}))


def test_vit_reads_weights_of_another_image_size(vit, tmp_path):
    """All but the classifier is taken; position embeddings are interpolated."""
    path = tmp_path / "vit.pt"
    torch.save(vit.state_dict(), path)
    net = zoo.vit_b_32((3, 96, 96), 7, weights=str(path))
    assert torch.equal(net.conv_proj.weight, vit.conv_proj.weight)
    assert torch.equal(net.encoder.layers[1].mlp[0].weight, vit.encoder.layers[1].mlp[0].weight)
    assert net.encoder.pos_embedding.shape == (1, 10, 768)
    assert torch.equal(net.encoder.pos_embedding[:, 0], vit.encoder.pos_embedding[:, 0])
    corners = net.encoder.pos_embedding[0, 1:].reshape(3, 3, 768)[::2, ::2].reshape(4, 768)
    torch.testing.assert_close(corners, vit.encoder.pos_embedding[0, 1:])
    assert net.heads.head.weight.shape == (7, 768) and net.heads.head.weight.eq(1).all()
    with pytest.raises(
        ConfigError,
        match=r"model\.weights: .*vit\.pt does not fit ViT-B/32 on images of \[1, 64, 64\]",
    ):
        zoo.vit_b_32((1, 64, 64), 5, weights=str(path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        (b"nothing", r"is not a state_dict \(\w+\); write it"),
        (b"", r"is not a state_dict \(EOFError\); write it"),
        ([1, 2], "is not a state_dict; write it"),
        ({"epoch": 3}, "is not a state_dict; write it"),
        ({"fc.weight": torch.zeros(2)}, "does not fit ViT-B/32"),
        ({"encoder.pos_embedding": torch.zeros(1, 4, 768)}, "does not fit ViT-B/32"),
    ],
    ids=str,
)
def test_vit_refuses_wrong_weights(content, said, tmp_path, monkeypatch, shallow):
    path = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    config = {"rounds": 1, "data": "digits", "algorithm": "fedavg", "model": "vit_b_32"}
    monkeypatch.setattr(
        "raysim.models.build.make_net", lambda *a: zoo.vit_b_32((3, 32, 32), 10, weights=str(path))
    )
    with pytest.raises(ConfigError, match=rf"^model\.weights: .*weights\.pt {said}"):
        prepare(config)


# -- in raysim


@pytest.mark.parametrize(
    ("name", "shape", "keys", "stages"),
    [
        ("mnist_cnn", (1, 28, 28), {}, 5),
        ("fixup_resnet9", (3, 32, 32), {}, 6),
        ("ct_cnn", (1, 24, 24), {"width": 4, "downsample": 2}, 10),
        ("densenet121_gn", (3, 32, 32), {}, 6),
    ],
)
def test_side_by_side_is_one_by_one(name, shape, keys, stages):
    """Also far from the beginning, where Fixup's gradients are 0 but in the classifier."""
    model = Model(seeded(name, shape, 4, **keys), shape, 4)
    assert (
        model.levels == stages - 1
        and model.features
        and not model.dropouts
        and not model.buffer_size
    )
    rng = torch.Generator().manual_seed(2)
    w, buffers = model.initial()
    w = w + 0.02 * torch.randn(2, len(w), generator=rng)
    x, y = torch.randn(2, 2, *shape, generator=rng), torch.tensor([[0, 1], [3, 2]])

    def one(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return PureTask(model, LocalSettings(), buffers).grad(w, Batch(x, y))

    many = torch.func.vmap(one)(w, x, y)
    task = LoopTask(model, LocalSettings())
    task.buffers = buffers
    alone = torch.stack([task.grad(w[i], Batch(x[i], y[i])) for i in (0, 1)])
    torch.testing.assert_close(many, alone, rtol=1e-2, atol=2e-4 * float(alone.abs().max()))
    parts = torch.split(alone[0], list(model.segments))
    assert all(part.any() for part in parts), "every tensor is in use"


def test_vit_trains_one_by_one(vit):
    model = Model(copy.deepcopy(vit), (3, 64, 64), 5)
    assert model.features and not model.levels and not model.dropouts
    task = LoopTask(model, LocalSettings())
    task.start(task.settings, *model.initial(), 1)
    grad = task.grad(task.local_params, Batch(torch.randn(2, 3, 64, 64), torch.tensor([0, 3])))
    assert torch.isfinite(grad).all() and grad.any()


def test_a_run_on_small_images(base, engine):
    """8×8 digits: a CNN with keys of its own, chosen by name."""
    config = {
        "rounds": 2,
        "algorithm": "fedavg",
        "model": {"name": "ct_cnn", "width": 2},
        "schedule": {"cohort": 2},
    }
    run, _ = engine({**base, **config})
    assert run.plan.config.model.parameters == {"width": 2, "downsample": 1}
    assert (run.executor.xs[2] != run.executor.xs[0]).any()
    with pytest.raises(ConfigError, match=r"model\.width: .*greater than or equal to 1"):
        prepare({**base, **config, "model": {"name": "ct_cnn", "width": 0}})


def test_weights_that_need_too_much_memory_are_no_other_kind_of_file(tmp_path, monkeypatch):
    def load(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(
        ConfigError, match=r"^key: \S*net\.pt is damaged, or does not fit in memory"
    ):
        read_state_dict(str(tmp_path / "net.pt"), "key")
