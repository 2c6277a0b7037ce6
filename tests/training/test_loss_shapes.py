"""A user's loss function gets outputs and targets in the shapes that a plain loop gives them.

The truth is FedAvg in plain PyTorch, which calls function(net(x), y) on the same batches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.plain_fedavg import Losses, averaged, sgd
from torch import nn

import raysim
from raysim.errors import ConfigError
from raysim.training.batches.batch_order import batch_positions

SIZES = [9, 14, 5]
N, TEST = sum(SIZES), 11
PARTS = [part.tolist() for part in np.split(np.arange(N), np.cumsum(SIZES)[:-1])]
RNG = np.random.default_rng(4)
X = RNG.normal(size=(N + TEST, 5))
IMAGES = RNG.normal(size=(N + TEST, 1, 4, 4))
SEQUENCES = RNG.normal(size=(N + TEST, 6, 3))
NUMBERS = X @ RNG.normal(size=5) + 1
LABELS = RNG.integers(0, 3, N + TEST)
COUNTS = RNG.integers(0, 5, (N + TEST, 3))
RARE = np.where(np.arange(N + TEST) % 13 == 4, 3.0, 0.0)
"""Numbers most of which are equal, so that few pairs of them differ."""


def dense(outputs: int, *layers: nn.Module) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs), *layers)

    return make


class Squeezes(nn.Module):
    """One number for each example, without a column, and none at all for a batch of one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(5, 1)

    def forward(self, x):
        return self.layer(x).squeeze()


def convolution(channels: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Conv2d(1, channels, 3, padding=1)

    return make


class Integers(nn.Module):
    """A net whose inputs are numbers, not tokens."""

    def __init__(self, outputs: int):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(3, outputs)

    def forward(self, x):
        return self.layer(x.to(self.layer.weight))


def integers(outputs: int) -> Callable[[], nn.Module]:
    return lambda: Integers(outputs)


def frames() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 4)


class TwoHeads(nn.Module):
    """Has a second head in training only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.head, self.extra = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        head = self.head(x)
        return torch.stack([head, self.extra(x)], 1) if self.training else head


def of_heads(outputs, y):
    if outputs.ndim == 2:
        return F.cross_entropy(outputs, y)
    return F.cross_entropy(outputs[:, 0], y) + 0.3 * F.cross_entropy(outputs[:, 1], y)


def correlation(outputs, y):
    a, b = outputs.squeeze(1) - outputs.mean(), y - y.mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm() + 1e-8)


def quantiles(outputs, y):
    q = torch.tensor([0.1, 0.5, 0.9], dtype=outputs.dtype)
    error = y[:, None] - outputs
    return torch.maximum(q * error, (q - 1) * error).mean()


def triplets(outputs, y):
    apart, same = torch.cdist(outputs, outputs), y[:, None] == y
    furthest = (apart * same).max(1).values
    nearest = torch.where(same, 9.0, apart).min(1).values
    return F.relu(furthest - nearest + 0.5).mean()


def ctc(outputs, y):
    n = len(y)
    scores = outputs.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, y, torch.full((n,), 6), torch.full((n,), 2))


@dataclass(eq=False)
class Case:
    make: Callable[[], nn.Module]
    loss: Any
    y: np.ndarray
    x: np.ndarray = field(default_factory=lambda: X)
    like: str | None = None


CASES = {
    "squeeze": Case(dense(1), lambda o, y: F.mse_loss(o.squeeze(1), y), NUMBERS),
    "flatten": Case(dense(1), lambda o, y: F.mse_loss(o.flatten(), y), NUMBERS),
    "column": Case(dense(1), lambda o, y: F.smooth_l1_loss(o[:, 0], y), RARE),
    "unsqueeze": Case(dense(1), lambda o, y: F.smooth_l1_loss(o, y.unsqueeze(1)), NUMBERS),
    "both flat": Case(dense(1), lambda o, y: (o.flatten() - y.flatten()).square().mean(), NUMBERS),
    "one logit": Case(dense(1), lambda o, y: F.binary_cross_entropy_with_logits(o.squeeze(1), y.to(o)), LABELS % 2),
    "one weighted logit": Case(dense(1), nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0])), LABELS[:, None] % 2.0),
    "net flattens a logit": Case(dense(1, nn.Flatten(0)), nn.BCEWithLogitsLoss(), LABELS % 2.0),
    "computes in float32": Case(
        dense(1),
        lambda o, y: F.binary_cross_entropy_with_logits(o.flatten().float(), y.float()).double(),
        LABELS % 2,
    ),
    "whole numbers": Case(dense(1), lambda o, y: F.mse_loss(o.squeeze(1), y.to(o)), LABELS),
    "couples": Case(dense(1), correlation, NUMBERS),
    "net squeezes": Case(Squeezes, nn.MSELoss(), NUMBERS),
    "net flattens": Case(dense(1, nn.Flatten(0)), nn.HuberLoss(), NUMBERS),
    "mean and variance": Case(dense(2), lambda o, y: F.gaussian_nll_loss(o[:, 0], y, F.softplus(o[:, 1])), NUMBERS),
    "quantiles": Case(dense(3), quantiles, NUMBERS, like="any"),
    "embeddings": Case(dense(4), triplets, LABELS, like="any"),
    "a head in training": Case(TwoHeads, of_heads, LABELS, like="any"),
    "autoencoder": Case(convolution(1), nn.MSELoss(), IMAGES, IMAGES),
    "segmentation": Case(
        convolution(3),
        nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]), ignore_index=255),
        np.where(IMAGES[:, 0] > 1, 255, RNG.integers(0, 3, (N + TEST, 4, 4))),
        IMAGES,
    ),
    "labels as wide as integers": Case(
        integers(3), lambda o, y: F.binary_cross_entropy_with_logits(o, y.to(o)), COUNTS % 2, COUNTS
    ),
    "counts as wide as integers": Case(integers(3), nn.MSELoss(), COUNTS, COUNTS[::-1].copy()),
    "classes as wide as integers": Case(
        integers(3), lambda o, y: F.cross_entropy(o, y.to(o)), np.eye(3, dtype=int)[LABELS], COUNTS - 2
    ),
    "CTC": Case(frames, ctc, RNG.integers(1, 4, (N + TEST, 2)), SEQUENCES),
}  # fmt: skip


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.tensor(values).double() if values.dtype.kind == "f" else torch.tensor(values)


def fedavg(case: Case, function: Any, rounds: int, steps: int, size: int) -> nn.Module:
    x, y = tensor(case.x), tensor(case.y)

    def losses(local: nn.Module, t: int, client: int) -> Losses:
        part = np.array(PARTS[client])
        for chosen in batch_positions(0, client, len(part), size, t * steps, steps):
            batch = part[chosen]
            with warnings.catch_warnings():  # of a squeezed batch of one
                warnings.filterwarnings("ignore", "Using a target size")
                value = function(local(x[batch]), y[batch])
            yield value

    return averaged(case.make(), [len(part) for part in PARTS], rounds, losses, sgd(0.05))


def config(case: Case, mode: str = "auto", size: int = 4) -> dict[str, Any]:
    like = {"like": case.like} if case.like else {}
    return {
        "data": (case.x[:N], case.y[:N], case.x[N:], case.y[N:]), "model": case.make(),
        "task": {"name": case.loss, **like}, "partition": PARTS, "rounds": 2, "dtype": "float64",
        "local": {"steps": 3, "batch_size": size, "lr": 0.05}, "schedule": {"cohort": len(PARTS)},
        "algorithm": {"name": "fedavg", "weights": "samples"}, "batching": {"mode": mode},
        "evaluate": {"batch_size": 10}, "resources": {"executor": "inline"},
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_loss_gets_what_a_plain_loop_gives_it(case):
    # Batches of 4 leave one example of the first client, and those of 10 one of the test.
    result = raysim.run(config(case), tracking=False)
    function = copy.deepcopy(case.loss).double() if isinstance(case.loss, nn.Module) else case.loss
    server = fedavg(case, function, 2, 3, 4)
    expected = nn.utils.parameters_to_vector(server.parameters()).detach()
    torch.testing.assert_close(result.parameters.double(), expected, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        loss = float(function(server.eval()(tensor(case.x[N:])), tensor(case.y[N:])))
    assert result.history[-1]["loss"] == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize(
    ("loss", "y", "is_label"),
    [
        (nn.BCEWithLogitsLoss(), LABELS % 2, True),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0])), LABELS % 2.0, True),
        (lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y), LABELS % 2, True),
        (nn.SoftMarginLoss(), LABELS % 2, False),  # its labels are 1 and -1
        (nn.MSELoss(), LABELS % 2, False),
        (nn.BCEWithLogitsLoss(), LABELS / 2, False),
    ],
)
def test_one_logit_of_zeros_and_ones_has_the_metrics_of_a_label(loss, y, is_label):
    result = raysim.run(config(Case(dense(1), loss, y)), tracking=False)
    last = result.history[-1]
    assert ("subset_accuracy" in last, "mse" in last) == (is_label, not is_label)
    if is_label:
        with torch.no_grad():
            logits = result.net().double()(tensor(X[N:])).flatten()
        right = (logits > 0).numpy() == (y[N:] > 0)
        assert last["subset_accuracy"] == pytest.approx(right.mean())


@pytest.mark.parametrize("mode", ["lanes", "loop"])
def test_targets_keep_their_shape_in_every_mode(mode):
    case = CASES["squeeze"]
    result = raysim.run(config(case, mode), tracking=False)
    expected = nn.utils.parameters_to_vector(fedavg(case, case.loss, 2, 3, 4).parameters())
    torch.testing.assert_close(result.parameters.double(), expected.detach(), rtol=1e-9, atol=1e-9)


def test_a_squeezed_net_has_gradients_of_single_examples():
    """They are those of the same net whose outputs have a column."""

    class Column(Squeezes):
        def forward(self, x):
            return self.layer(x)

    privacy = {"max_grad_norm": 1.0, "noise_multiplier": 0.1}
    results = []
    for net in (Squeezes(), Column()):
        keys = {**config(CASES["net squeezes"]), "model": net, "privacy": privacy}
        results.append(raysim.run(keys, tracking=False).parameters)
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-9)


def test_several_outputs_need_a_loss_of_any_outputs():
    class Tuple(Squeezes):
        def forward(self, x):
            return self.layer(x), x

    keys = {**config(CASES["squeeze"]), "model": Tuple()}
    with pytest.raises(
        ConfigError, match=r"into tuple, and task .* takes one tensor; .*task\.like: any"
    ):
        raysim.run(keys, tracking=False)


def test_outputs_of_any_shape_have_an_entry_for_each_example():
    keys = {**config(CASES["quantiles"]), "model": Averages()}
    with pytest.raises(
        ConfigError, match=r"into \[3\], but .* expects outputs of shape \[2, \.\.\.\]"
    ):
        raysim.run(keys, tracking=False)


class Averages(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x).mean(0)


class OfClasses(nn.Module):
    """Its argument `classes` is its number of outputs, three by default."""

    def __init__(self, shape: tuple[int, ...], classes: int = 3):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(shape[0], classes)

    def forward(self, x):
        return self.layer(x)


def of_classes(shape: tuple[int, ...], classes: int) -> nn.Module:
    return OfClasses(shape, classes)


@pytest.mark.parametrize(
    "model", [OfClasses, {"name": of_classes, "classes": 3}, {"name": OfClasses, "classes": 3}]
)
def test_a_net_has_its_own_number_of_outputs_where_the_data_have_no_classes(model):
    case = Case(lambda: OfClasses((5,)), quantiles, NUMBERS, like="any")
    found = raysim.run({**config(case), "model": model}, tracking=False)
    assert len(found.parameters) == 5 * 3 + 3


def test_a_net_without_a_default_needs_its_number_of_outputs():
    case = Case(lambda: OfClasses((5,)), quantiles, NUMBERS, like="any")
    with pytest.raises(ConfigError, match=r"^model\.classes: classes has no default"):
        raysim.run({**config(case), "model": of_classes}, tracking=False)


def test_a_net_gets_the_classes_of_the_data_unless_a_key_gives_others():
    case = Case(lambda: OfClasses((5,)), triplets, LABELS, like="any")
    labelled = {**config(case), "model": OfClasses}
    assert len(raysim.run(labelled, tracking=False).parameters) == 5 * 3 + 3
    wider = {**labelled, "model": {"name": OfClasses, "classes": 7}}
    assert len(raysim.run(wider, tracking=False).parameters) == 5 * 7 + 7
