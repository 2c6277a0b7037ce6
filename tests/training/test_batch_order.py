"""Passes over a client's examples: the batches of PyTorch's DataLoader, none left out."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from support.oracle_cases import BATCH_NORM, MODES, feed
from torch import nn

from raysim.prepare.resolve import prepare
from raysim.randomness import generator

LR = 0.1
UNTRACKED = BATCH_NORM.replace(
    "BatchNorm1d(hidden)", "BatchNorm1d(hidden, track_running_stats=False)"
)
PLAIN = BATCH_NORM.replace("nn.BatchNorm1d(hidden)", "nn.LayerNorm(hidden)")
NETS = {"plain": PLAIN, "batch norm": BATCH_NORM, "untracked batch norm": UNTRACKED}


def passes(
    seed: int, client: int, n: int, size: int, first: int, count: int, joins: bool
) -> Iterator[torch.Tensor]:
    """Positions of the batches of `count` passes from pass `first` on, as a DataLoader cuts them."""
    for number in range(first, first + count):
        order = torch.arange(n)
        if n > size:
            order = torch.from_numpy(generator(seed, "order", client, number).permutation(n))
        batches = list(order.split(size))
        if joins and len(batches) > 1 and size > 1 and len(batches[-1]) == 1:
            batches[-2:] = [torch.cat(batches[-2:])]
        yield from batches


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
    start = copy.deepcopy(done.plan.net).double()
    data, joins = feed(done).data, net != "plain" and buffers != "frozen"
    for t in range(3):
        trained = []
        for i, n in enumerate(sizes):
            module = copy.deepcopy(start).train()
            if buffers == "frozen":
                module.bn.eval()
            sgd = torch.optim.SGD(module.parameters(), LR)
            x, y = (torch.from_numpy(part) for part in data[i])
            for batch in passes(4, i, n, size, 2 * t, 2, joins):
                sgd.zero_grad()
                nn.functional.cross_entropy(module(x[batch]), y[batch]).backward()
                sgd.step()
            trained.append(module.state_dict())
        mean = {
            key: torch.stack([state[key].double() for state in trained]).mean(0)
            for key in trained[0]
        }
        start.load_state_dict(mean)
    ours = done.plan.model().state_dict(
        torch.from_numpy(done.executor.xs[-1]), done.executor.server.buffers
    )
    for key, value in start.state_dict().items():
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
        steps = [plan.local_steps(plan.local(i), n) for i, n in enumerate(plan.clients.sizes)]
        assert steps == expected
    full = prepare({**config, "local": {"epochs": 2, "batch_size": "full"}})
    assert [full.local_steps(full.local(0), n) for n in (33, 17, 1, 0)] == [2, 2, 2, 0]
