"""Passes over a client's examples: the batches of PyTorch's DataLoader, with its `drop_last`."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.oracle_cases import BATCH_NORM, MODES, feed
from support.plain_fedavg import averaged, sgd
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import raysim
from raysim.config.identity import identity_of
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare
from raysim.randomness import generator
from raysim.training.batches.batch_order import batch_positions, batches_per_pass, local_steps

LR = 0.1
UNTRACKED = BATCH_NORM.replace(
    "BatchNorm1d(hidden)", "BatchNorm1d(hidden, track_running_stats=False)"
)
PLAIN = BATCH_NORM.replace("nn.BatchNorm1d(hidden)", "nn.LayerNorm(hidden)")
NETS = {"plain": PLAIN, "batch norm": BATCH_NORM, "untracked batch norm": UNTRACKED}


def passes(
    seed: int, client: int, n: int, size: int, first: int, count: int, joins: bool, drops=False
) -> Iterator[torch.Tensor]:
    """Positions of the batches of `count` passes from pass `first` on, as a DataLoader cuts them."""
    for number in range(first, first + count):
        order = torch.arange(n)
        if n > size:
            order = torch.from_numpy(generator(seed, "order", client, number).permutation(n))
        batches = list(order.split(size))
        if joins and len(batches) > 1 and size > 1 and len(batches[-1]) == 1:
            batches[-2:] = [torch.cat(batches[-2:])]
        yield from [batch for batch in batches if len(batch) == size] if drops else batches


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("net", "size", "buffers"),
    [
        ("plain", 16, "averaged"),
        ("plain", 2, "averaged"),
        ("plain", 1, "averaged"),
        ("batch norm", 16, "averaged"),
        ("batch norm", 4, "averaged"),
        ("batch norm", 16, "frozen"),
        ("untracked batch norm", 16, "averaged"),
    ],
)
def test_epochs_train_on_every_example(net, size, buffers, mode, engine, ragged, source):
    """FedAvg in plain PyTorch on clients of k B + 1 examples. Where BatchNorm normalises by the
    batch, the single example joins the batch before; with frozen statistics it need not."""
    sizes = [33, 17, 49, 3, 16, 20, 5]
    done, _ = engine({
        "rounds": 3, "seed": 4, "dtype": "float64", "partition": ragged(sizes), "algorithm": "fedavg",
        "model": {"name": source("net", NETS[net]) + ":Net"}, "schedule": {"cohort": len(sizes)},
        "local": {"epochs": 2, "batch_size": size, "lr": LR, "buffers": buffers},
        "batching": {"mode": mode, "size": 3},
    })  # fmt: skip
    data, joins = _examples(done), net != "plain" and buffers != "frozen"

    def losses(module, t, i):
        if buffers == "frozen":
            module.bn.eval()
        x, y = data[i]
        for batch in passes(4, i, sizes[i], size, 2 * t, 2, joins):
            yield nn.functional.cross_entropy(module(x[batch]), y[batch])

    assert_trained(done, averaged(done.plan.net, [1] * len(sizes), 3, losses, sgd(LR)))


def assert_trained(done, truth):
    """The run ends with the parameters and statistics of this net."""
    ours = done.plan.model().state_dict(
        torch.from_numpy(done.executor.xs[-1]), done.executor.server.buffers
    )
    for key, value in truth.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            assert torch.allclose(ours[key], value, rtol=0, atol=1e-10), key


def test_the_number_of_steps_is_known_before_the_run(base, ragged, source):
    """Groups have batch sizes of their own; `accumulate` counts the last batch too."""
    config = {
        **base, "rounds": 1, "partition": ragged([33, 17, 1, 0, 16]), "algorithm": "fedavg", "schedule": {"cohort": 5},
        "local": {"epochs": 2, "batch_size": 16},
    }  # fmt: skip
    for name, expected in (("plain", [6, 4, 2, 0, 2]), ("batch norm", [4, 2, 2, 0, 2])):
        plan = prepare({**config, "model": {"name": source("net", NETS[name]) + ":Net"}})
        steps = [
            plan.local_steps(plan.group(i).config.local, n)
            for i, n in enumerate(plan.clients.sizes)
        ]
        assert steps == expected
    full = prepare({**config, "local": {"epochs": 2, "batch_size": "full"}})
    assert [full.local_steps(full.group(0).config.local, n) for n in (33, 17, 1, 0)] == [2, 2, 2, 0]


# --- local.drop_last


@pytest.mark.parametrize("needs_two", [False, True])
@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_drop_last_leaves_the_batches_of_a_data_loader(size, needs_two):
    """Every n has the DataLoader's batches, in epochs and in a number of steps; passes are shuffled
    anew, so that over many of them each example is used."""
    for n in range(40):
        loader = DataLoader(TensorDataset(torch.arange(n)), batch_size=size, drop_last=True)
        expected = [len(batch) for (batch,) in loader]
        assert batches_per_pass(n, size, needs_two, drop_last=True) == len(expected) == len(loader)
        assert local_steps(n, size, None, 2, needs_two, drop_last=True) == 2 * len(expected)
        assert local_steps(n, size, 7, None, needs_two, drop_last=True) == (7 if expected else 0)
        if not expected:
            continue
        used = set()
        for number in range(60):
            first = number * len(expected)
            batches = list(
                batch_positions(3, 7, n, size, first, len(expected), needs_two, drop_last=True)
            )
            assert [len(batch) for batch in batches] == expected
            positions = np.concatenate(batches).tolist()
            assert len(set(positions)) == len(positions)
            used |= set(positions)
        assert used == set(range(n))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("net", "work"), [("plain", "epochs"), ("batch norm", "steps")])
def test_drop_last_trains_as_pytorch_does(net, work, mode, engine, ragged, source):
    """FedAvg by samples in plain PyTorch: weights count the examples that were dropped too, and
    clients without a full batch are left out."""
    sizes, size, steps = [33, 17, 3, 16, 20, 5], 8, 3
    done, _ = engine({
        "rounds": 2, "seed": 4, "dtype": "float64", "partition": ragged(sizes),
        "algorithm": {"name": "fedavg", "weights": "samples"},
        "model": {"name": source("net", NETS[net]) + ":Net"}, "schedule": {"cohort": len(sizes)},
        "local": {"batch_size": size, "lr": LR, "drop_last": True, **({"steps": steps} if work == "steps" else {"epochs": 1})},
        "batching": {"mode": mode, "size": 2},
    })  # fmt: skip
    data = _examples(done)
    trains = [i for i, n in enumerate(sizes) if n >= size]
    streams = {i: passes(4, i, sizes[i], size, 0, 6, joins=False, drops=True) for i in trains}

    def losses(module, t, client):
        i = trains[client]
        x, y = data[i]
        for _ in range(steps if work == "steps" else sizes[i] // size):
            batch = next(streams[i])
            yield nn.functional.cross_entropy(module(x[batch]), y[batch])

    weights = [sizes[i] for i in trains]
    assert_trained(done, averaged(done.plan.net, weights, 2, losses, sgd(LR)))


def _examples(done):
    """The examples of each client, those of clients that never train empty."""
    return [tuple(torch.from_numpy(part) for part in examples) for examples in feed(done).data]


def test_pooled_and_other_modes_drop_the_same_examples(ragged, base, tmp_path):
    config = {
        **base, "rounds": 2, "partition": ragged([19, 7, 16]), "algorithm": "fedsgd", "schedule": {"cohort": 3},
        "local": {"steps": 1, "epochs": None, "batch_size": 8, "drop_last": True},
    }  # fmt: skip
    ends = []
    for mode in ("pooled", "loop", "lanes"):
        batching, folder = {"mode": mode, "size": 2}, str(tmp_path / mode)
        result = raysim.run({**config, "batching": batching, "run_dir": folder}, tracking=False)
        assert [row["clients/used"] for row in result.history[1:]] == [2.0, 2.0]
        ends.append(result.parameters)
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=0, atol=1e-6)


def test_a_client_without_a_batch_counts_as_one_without_examples(base, ragged, caplog):
    """A group may have a key of its own; the log says how many never train."""
    config = {
        **base, "rounds": 1, "partition": ragged([33, 17, 1, 0, 16]), "algorithm": "fedavg",
        "schedule": {"cohort": 5}, "local": {"epochs": 2, "batch_size": 16, "drop_last": True},
    }  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="raysim"):
        plan = prepare(config)
    assert plan.clients.sizes.tolist() == [33, 17, 0, 0, 16]
    assert [plan.local_steps(plan.group(i).config.local, n) for i, n in enumerate(plan.clients.sizes)] == [
        4, 2, 0, 0, 2,
    ]  # fmt: skip
    assert plan.problem.n_nonempty == 3
    told = [r.getMessage() for r in caplog.records if "fewer examples than a batch" in r.message]
    assert len(told) == 1 and told[0].startswith("1 of 5 clients")
    grouped = prepare({
        **config, "local": {"epochs": 2, "batch_size": 16},
        "groups": {"exact": {"ids": [0, 2], "local": {"drop_last": True}}},
    })  # fmt: skip
    assert grouped.clients.sizes.tolist() == [33, 17, 0, 0, 16]
    steps = [
        grouped.local_steps(grouped.group(i).config.local, n)
        for i, n in enumerate(grouped.clients.sizes)
    ]
    assert steps == [4, 4, 0, 0, 2]


def test_drop_last_refuses_a_batch_that_nobody_fills(base, ragged):
    with pytest.raises(ConfigError, match=r"local\.drop_last: no client.*largest has 9 examples"):
        prepare({
            **base, "rounds": 1, "algorithm": "fedavg", "partition": ragged([9, 5]), "schedule": {"cohort": 2},
            "local": {"epochs": 1, "batch_size": 10, "drop_last": True},
        })  # fmt: skip


def test_only_a_run_that_drops_has_another_identity(base):
    plain, kept, dropped = (
        prepare(
            {
                **base,
                "rounds": 1,
                "algorithm": "fedavg",
                "local": {"steps": 1, "batch_size": 8, **local},
            }
        ).config
        for local in ({}, {"drop_last": False}, {"drop_last": True})
    )
    assert identity_of(plain) == identity_of(kept) != identity_of(dropped)
