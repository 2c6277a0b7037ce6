"""Nets that draw random numbers in training, beside PyTorch: the same numbers, on any workers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from support.plain_fedavg import blobs, check, cut, fedavg, run
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from raysim.data import import_torchvision
from raysim.errors import ConfigError
from raysim.models.checks.deterministic_layers import check_deterministic_layers
from raysim.models.flat import Model
from raysim.randomness import generator
from raysim.rules import Batch
from raysim.system.global_generators import (
    GENERATORS,
    GlobalGenerators,
    generators_kept,
    seed_generators,
)
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.tasks.pure_task import PureTask

StochasticDepth = import_torchvision().ops.StochasticDepth

DATA, PARTS = blobs(), cut([30, 40, 50])


def seed_as_documented(t: int, client: int, step: int) -> None:
    """Seed all libraries for a step: the numbers of a client come from one stream a round."""
    numbers = generator(0, "net", t, client).random(step + 1)
    number = int(numbers[step] * 2**32)
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


class Body(nn.Module):
    """A net with `layer` between its two linear ones."""

    def __init__(self, layer):
        super().__init__()
        self.body, self.layer, self.head = nn.Linear(6, 8), layer, nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer(torch.tanh(self.body(x))))


class Own(nn.Module):
    """Calls a function of the layer and its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, h):
        return self.function(self, h)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 5, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.lstm(x[..., None])[0][:, -1])


class Attention(nn.Module):
    """A transformer with dropout in its attention, which no layer of type Dropout draws."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        # Masks of these layers are raysim's own; only the attention's are PyTorch's.
        for name in ("dropout", "dropout1", "dropout2"):
            setattr(self.encoder, name, nn.Identity())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x[..., None])).mean(1))


class KeepsInEvaluation(nn.Dropout):
    """A subclass, which computes what it likes."""

    def forward(self, input):
        return F.dropout(input, self.p / 2, self.training)


def noisy(m, h):
    return h + 0.1 * torch.randn_like(h) if m.training else h


def skipped(m, h):
    return h * 2 if m.training and random.random() < 0.5 else h


def mixed(m, h):
    return h * np.random.beta(1, 1) if m.training else h


def two_libraries(m, h):
    return skipped(m, noisy(m, h))


def recomputed(m, h):
    return checkpoint(lambda h: F.dropout(torch.sin(h), 0.5, m.training), h, use_reentrant=False)


def dropped_at_times(m, h):
    return F.dropout(h, 0.5, m.training) if m.training and random.random() < 0.5 else h


NETS = {
    "functional dropout": lambda: Body(Own(lambda m, h: F.dropout(h, 0.5, m.training))),
    "functional dropout that Python's numbers choose": lambda: Body(Own(dropped_at_times)),
    "a rate that inputs choose": lambda: Body(
        Own(lambda m, h: F.dropout(h, 0.9 if len(h) > 30 else 0.1, m.training))
    ),
    "stochastic depth": lambda: Body(StochasticDepth(0.5, "row")),
    "attention": Attention,
    "recurrent": Recurrent,
    "alpha dropout": lambda: Body(nn.AlphaDropout(0.5)),
    "subclass of dropout": lambda: Body(KeepsInEvaluation(0.5)),
    "random slope": lambda: Body(nn.RReLU()),
    "noise": lambda: Body(Own(noisy)),
    "Python": lambda: Body(Own(skipped)),
    "NumPy": lambda: Body(Own(mixed)),
    "two libraries": lambda: Body(Own(two_libraries)),
    "recomputed": lambda: Body(Own(recomputed)),
}


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_passes_draw_what_pytorch_draws_from_the_same_seed(make):
    torch.manual_seed(0)
    net = make()
    truth = fedavg(net, DATA, PARTS, before_pass=seed_as_documented)
    check(run(net, DATA, PARTS), truth, DATA)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), Own(lambda m, h: F.dropout(h, 0.5))])
def test_the_numbers_before_a_run_do_not_decide_what_a_net_calls_first(layer):
    def at_times(m, h):
        return m.layer(h) if random.random() < 0.5 else h

    read = []
    with generators_kept():
        for state in range(4):
            random.seed(state)
            net = Own(at_times)
            net.layer = layer
            before = random.getstate()
            model = Model(Body(net), (6,), 3)
            assert random.getstate() == before
            read.append((model.dropouts, model.draws))
    assert read == [read[0]] * 4 and "torch" in model.draws


def test_the_numbers_of_two_clients_two_steps_and_two_rounds_differ():
    seen = []

    def note(m, h):
        if m.training and h.requires_grad:
            seen.append(float(torch.rand(())))
        return h if not m.training else h + 0 * torch.rand(())

    run(Body(Own(note)), DATA, PARTS)
    torch.manual_seed(0)
    of_checks = float(torch.rand(()))
    of_steps = [number for number in seen if number != of_checks]
    # Each of the 3 * 3 * 2 passes has numbers of its own.
    assert len(set(of_steps[-18:])) == 18


class MeansOfSome(nn.Module):
    """Moves its means in one of two training passes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("means", torch.zeros(8))

    def forward(self, h):
        if self.training and random.random() < 0.5:
            self.means += h.detach().mean(0)
        return h


def test_statistics_are_found_whatever_was_drawn_before():
    for state in range(8):
        random.seed(state)
        model = Model(Body(MeansOfSome()), (6,), 3)
        assert [statistic.name for statistic in model.statistics] == ["means"]


def test_the_bits_do_not_depend_on_blocks_or_on_what_was_drawn_before():
    net = Body(Own(two_libraries))
    results = []
    for clients in (1, 2, 3):
        torch.manual_seed(clients)
        random.seed(clients)
        keys = {"dtype": "float32", "batching": {"mode": "loop", "size": clients}}
        result = run(net, DATA, PARTS, **keys)
        results.append(result.digest)
    assert len(set(results)) == 1


def test_a_run_leaves_the_global_generators_as_they_were():
    net = Body(Own(two_libraries))
    seed_generators(GENERATORS, 7)
    before = GlobalGenerators()
    run(net, DATA, PARTS)
    assert before.drawn_from() == ()


def test_keyed_masks_stay_what_they_are_beside_other_draws():
    """The numbers of another layer do not move those of nn.Dropout."""
    data = tuple(part[:40] for part in DATA)

    class Noise(nn.Module):
        def forward(self, h):
            return h + 0.0 * torch.randn_like(h) if self.training else h

    def net(layer):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), layer, nn.Linear(8, 3))

    parts = cut([20, 20])
    assert run(net(Noise()), data, parts).digest == run(net(nn.Identity()), data, parts).digest


REFUSED = {
    "privacy": ({"privacy": {"noise_multiplier": 1.0}}, "privacy"),
    "pooling": ({"batching": {"mode": "pooled"}, "local": {"steps": 1, "lr": 0.1}}, "pooled"),
}


@pytest.mark.parametrize(("keys", "message"), REFUSED.values(), ids=REFUSED)
def test_examples_that_share_their_draws_have_no_gradients_of_their_own(keys, message):
    with pytest.raises(ConfigError, match=message):
        run(Body(StochasticDepth(0.5, "row")), DATA, PARTS, **keys)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["functional dropout", "attention"])
@pytest.mark.parametrize("kind", [LoopTask, PureTask])
def test_in_evaluation_nothing_is_drawn_and_each_example_has_its_gradient(name, kind):
    model = Model(NETS[name](), (6,), 3, torch.float64)
    w, buffers = model.initial()
    task = kind(model, LocalSettings())
    task.buffers = buffers
    x, y = torch.tensor(DATA[0][:3]).double(), torch.tensor(DATA[1][:3])
    batch = Batch(x, y, ((torch.tensor(7),),))
    rows, _ = task.sample_grads(w, batch)
    for k, row in enumerate(rows):
        one = Batch(x[k : k + 1], y[k : k + 1])
        torch.testing.assert_close(row, task.grad(w, one, mode="eval"), rtol=1e-9, atol=1e-12)
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_dropout_of_a_recurrent_layer_is_refused_on_a_gpu():
    """There, cuDNN keeps a state of its own."""
    net = Recurrent()
    model = Model(Recurrent(), (6,), 3)
    check_deterministic_layers(net, model)
    model.device = torch.device("cuda")
    with pytest.raises(
        ConfigError, match=r"the layers of lstm \(LSTM\) cannot be repeated on a GPU"
    ):
        check_deterministic_layers(net, model)
