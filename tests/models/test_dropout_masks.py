"""Dropout of any tensor: its mask has the shape that PyTorch gives it, and is an independent draw.

The truth is PyTorch: its own layers show which entries are dropped together, and federated
averaging with the user's module, given the masks that raysim drew, has the same result."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from support.plain_fedavg import blobs, check, cut, fedavg, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from raysim.errors import ClientError, ConfigError, RaysimError
from raysim.models.flat import Model
from raysim.models.keyed_layers import mask_shape
from raysim.rules import Batch
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.tasks.pure_task import PureTask

DATA, PARTS = blobs(), cut([60, 30, 20, 10])

LAYERS = [
    (nn.Dropout, (4, 5)),
    (nn.Dropout1d, (4, 5)),  # PyTorch: one example of 4 channels
    (nn.Dropout1d, (4, 5, 3)),
    (nn.Dropout2d, (4, 5)),
    (nn.Dropout2d, (4, 5, 3)),
    (nn.Dropout2d, (4, 5, 3, 2)),
    (nn.Dropout3d, (4, 5, 3, 2)),  # PyTorch: one example of 4 channels
    (nn.Dropout3d, (4, 5, 3, 2, 3)),
]


@pytest.mark.filterwarnings("ignore:dropout2d")
@pytest.mark.parametrize(("kind", "shape"), LAYERS)
def test_entries_that_pytorch_drops_together_have_one_mask(kind, shape):
    layer = kind(0.5)
    torch.manual_seed(0)
    drawn = torch.stack([layer(torch.ones(shape)) for _ in range(50)])
    together = []
    for axis in range(1, drawn.ndim):
        first = drawn.narrow(axis, 0, 1)
        together.append(bool((drawn == first).all()))
    expected = tuple(1 if tied else n for n, tied in zip(shape, together, strict=True))
    assert mask_shape(layer, torch.ones(shape)) == expected


class Drops(nn.Module):
    """A net with a dropout at some place."""

    def __init__(self, where, drop: nn.Module | None = None):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.position = nn.Parameter(torch.randn(8))
        self.drop, self.where = drop or nn.Dropout(0.5), where

    def forward(self, x):
        return self.head(torch.tanh(self.where(self, x)))


PLACES = {
    "activations": lambda net, x: net.drop(net.body(x)),
    "weight": lambda net, x: F.linear(x, net.drop(net.body.weight), net.body.bias),
    "vector": lambda net, x: net.body(x) + net.drop(net.position),
    "vector of a batch": lambda net, x: net.body(x) + net.drop(net.position[None]),
    "sequence first": lambda net, x: net.drop(net.body(x).expand(5, -1, -1)).mean(0),
    "all positions": lambda net, x: net.drop(net.body(x).repeat_interleave(5, 0)).view(-1, 5, 8)[
        :, 1
    ],
    "transposed": lambda net, x: net.drop(net.body(x).t()).t(),
}


DRAWN: list[Tensor] = []


def note(layer, inputs, output):
    mask = (output / inputs[0]).detach()
    # Checks of a run make passes without masks.
    if layer.training and torch.is_grad_enabled() and not torch.equal(mask, torch.ones_like(mask)):
        DRAWN.append(mask)


class GivenMasks(nn.Module):
    masks: ClassVar[Iterator[Tensor]]

    def forward(self, x):
        if not self.training:
            return x
        mask = next(self.masks)
        assert mask.shape == x.shape
        return x * mask


@pytest.mark.parametrize("parts", [PARTS, [[0], [1, 2]], [list(range(8)), list(range(8, 16))]])
@pytest.mark.parametrize("where", PLACES.values(), ids=PLACES)
def test_a_net_with_dropout_somewhere_trains_as_in_pytorch(where, parts):
    DRAWN.clear()
    net = Drops(where)
    net.drop.register_forward_hook(note)
    result = run(net, DATA, parts, 2)
    masks = DRAWN[-2 * 2 * len(parts) :]
    assert {0.0, 2.0} == set(torch.cat([mask.reshape(-1) for mask in masks]).tolist())
    GivenMasks.masks = iter(masks)
    right = fedavg(Drops(where, GivenMasks()), DATA, parts, 2)
    assert next(GivenMasks.masks, None) is None
    check(result, right, DATA)


@pytest.mark.parametrize("place", ["weight", "sequence first"])
def test_masks_that_are_not_of_examples_are_not_divided(place):
    """Neither over pooled clients nor over the gradients of single examples."""
    local = {"steps": 1, "batch_size": "full", "lr": 0.1}
    net = Drops(PLACES[place])
    result = run(net, DATA, PARTS, 1, local=local, batching={"size": 4})
    assert result.config.batching.mode == "loop"
    assert (
        run(Drops(PLACES["activations"]), DATA, PARTS, 1, local=local).config.batching.mode
        == "pooled"
    )
    privacy = {"unit": "example", "max_grad_norm": 1.0, "noise_multiplier": 1.0}
    with pytest.raises(ConfigError, match="random numbers that examples share"):
        run(net, DATA, PARTS, 1, privacy=privacy)


def test_a_dropout_of_rate_0_is_no_dropout():
    """Also where its calls depend on the inputs."""

    def where(net, x):
        h = net.body(x)
        return net.drop(h[h[:, 0] > 0]).sum(0) + h if (h[:, 0] > 0).any() else h

    net = Drops(where, nn.Dropout(0.0))
    check(run(net, DATA, PARTS), fedavg(net, DATA, PARTS), DATA)


def with_rate(net, small, large, x):
    net.drop.p = large if len(x) > 4 else small
    return net.drop(net.body(x))


def counted(net, x):
    """A captured step would not count on."""
    passes = net.drop.passes = getattr(net.drop, "passes", 0) + net.training
    net.drop.p = 0.5 if passes > 10 else 0.1
    return net.drop(net.body(x))


REFUSED = {
    "shape of the inputs": (
        lambda net, x: net.drop(net.body(x[(x > 1).any(1)])).sum(0) + net.body(x),
        "follow from the number of examples",
    ),
    "twice in the backward pass": (
        lambda net, x: checkpoint(net.drop, net.body(x), use_reentrant=False),
        "also works in torch.utils.checkpoint",
    ),
    "calls that depend on the inputs": (
        lambda net, x: net.drop(net.drop(net.body(x)) if len(x) > 4 else net.body(x)),
        r"drop \(Dropout\) with rate 0.5 where it called none",
    ),
    "with gradients only": (
        lambda net, x: net.drop(net.body(x)) if torch.is_grad_enabled() else net.body(x),
        r"drop \(Dropout\) with rate 0.5 where it called none",
    ),
    "a rate that rises from 0": (
        lambda net, x: with_rate(net, 0.0, 0.5, x),
        r"drop \(Dropout\) with rate 0.5 where it called none",
    ),
    "a rate that a counter raises": (counted, "changes the attribute 'passes' of drop"),
    "a rate that rises": (
        lambda net, x: with_rate(net, 0.1, 0.5, x),
        r"drop \(Dropout\) with rate 0.5 where it called drop with rate 0.1",
    ),
}


@pytest.mark.parametrize(("where", "message"), REFUSED.values(), ids=REFUSED)
def test_masks_that_cannot_be_drawn_before_a_pass_are_refused(where, message):
    with pytest.raises(RaysimError, match=message):
        run(Drops(where), DATA, PARTS)


@pytest.mark.parametrize("rates", [(0.1, 0.9), (0.5, 0.5)])
def test_a_dropout_gets_no_mask_of_another_one(rates):
    def where(net, x):
        return net.drop[int(len(x) > 4)](net.body(x))

    net = Drops(where, nn.ModuleList([nn.Dropout(rate) for rate in rates]))
    message = f"drop.1 (Dropout) with rate {rates[1]} where it called drop.0 with rate {rates[0]}"
    with pytest.raises(RaysimError, match=re.escape(message)):
        run(net, DATA, PARTS)


def for_sizes(*sizes):
    """A dropout of batches of these sizes, in which no check before a run passes examples."""
    return lambda net, x: net.drop(net.body(x)) if len(x) in sizes else net.body(x)


@pytest.mark.parametrize("mode", ["loop", "lanes", "pooled"])
def test_no_mode_leaves_out_a_dropout_that_the_first_pass_does_not_call(mode):
    local = {"steps": 1, "batch_size": "full", "lr": 0.1}
    with pytest.raises(ClientError, match="calls dropout drop"):
        run(Drops(for_sizes(60, 120)), DATA, PARTS, 1, local=local, batching={"mode": mode})


@pytest.mark.parametrize("kind", [LoopTask, PureTask])
def test_nor_do_gradients_of_single_examples(kind):
    model = Model(Drops(for_sizes(1)), (6,), 3, torch.float64)
    w, buffers = model.initial()
    batch = Batch(torch.tensor(DATA[0][:3]), torch.tensor(DATA[1][:3]))
    task = kind(model, LocalSettings())
    with pytest.raises(ValueError, match="calls dropout drop"):
        task.sample_grads(w, batch, mode="train", buffers=buffers)
    assert torch.isfinite(task.sample_grads(w, batch, mode="eval", buffers=buffers)[0]).all()
