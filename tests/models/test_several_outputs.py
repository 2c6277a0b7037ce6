"""Nets that return tuples, mappings and objects of tensors, beside plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.plain_fedavg import averaged, blobs, cut, run, sgd
from torch import Tensor, nn
from torch.nn import functional as F

from raysim.errors import ConfigError
from raysim.rules import TaskMetric

DATA = blobs()
PARTS = cut([60, 40, 20])


@dataclass
class Heads:
    main: Any
    others: Any


class Pair(NamedTuple):
    main: Tensor
    score: Tensor


FORMS = {
    "tuple": lambda a, b, h: (a, b),
    "list and none": lambda a, b, h: [a, None, b],
    "mapping": lambda a, b, h: {"main": a, "more": (b, h[:, 0])},
    "named tuple": lambda a, b, h: Pair(a, b[:, 0]),
    "dataclass": lambda a, b, h: Heads(a, Heads(b, h.view(len(h), 2, 4))),
}


class ManyHeads(nn.Module):
    def __init__(self, form: str, only_in_training: bool = False):
        super().__init__()
        torch.manual_seed(1)
        self.form, self.only_in_training = form, only_in_training
        self.body, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.main, self.aux = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        h = self.norm(self.body(x)).relu()
        if self.only_in_training and not self.training:
            return self.main(h)
        return FORMS[self.form](self.main(h), self.aux(h), h)


def tensors_of(outputs: Any) -> list[Tensor]:
    """The tensors in order; fails if the form is not that of one of the `FORMS`."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, Heads):
        return [*tensors_of(outputs.main), *tensors_of(outputs.others)]
    if isinstance(outputs, dict):
        return [*tensors_of(outputs["main"]), *outputs["more"]]
    if isinstance(outputs, Pair):
        return [outputs.main, outputs.score]
    assert type(outputs) in (tuple, list)
    return [value for value in outputs if value is not None]


def loss(outputs: Any, y: Tensor) -> Tensor:
    main, *others = tensors_of(outputs)
    total = F.cross_entropy(main, y)
    for other in others:
        total = total + 0.1 * other.square().mean()
    return total


def hits(outputs: Any, y: Tensor) -> Tensor:
    return tensors_of(outputs)[0].argmax(1) == y


# Functions of a file are loaded from it again, with other classes; these are not.
TASK: Any = {
    "task": {"name": partial(loss), "like": "any"},
    "evaluate": {"metrics": [partial(hits)]},
}


def plain(net: nn.Module, rounds: int = 3) -> nn.Module:
    """FedAvg of full batches, two steps, with the net's own outputs and the loss above."""
    x, y = torch.tensor(DATA[0]), torch.tensor(DATA[1])

    def losses(local, t, client):
        for _ in range(2):
            yield loss(local(x[PARTS[client]]), y[PARTS[client]])

    return averaged(net, [len(part) for part in PARTS], rounds, losses, sgd()).eval()


@pytest.mark.parametrize("only_in_training", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_loss_gets_what_forward_returns(form, only_in_training):
    net = ManyHeads(form, only_in_training)
    result, truth = run(net, DATA, PARTS, **TASK), plain(net)
    for key, value in result.state_dict.items():
        if "tracked" not in key:
            torch.testing.assert_close(value, truth.state_dict()[key], rtol=0, atol=1e-9)
    with torch.no_grad():
        outputs, y = truth(torch.tensor(DATA[2])), torch.tensor(DATA[3])
    last = result.history[-1]
    assert last["loss"] == pytest.approx(float(loss(outputs, y)), rel=1e-9)
    assert last["hits"] == pytest.approx(float(hits(outputs, y).double().mean()))
    predicted = result.predict(DATA[2])
    assert type(predicted) is type(outputs) is type(result.net().double()(torch.tensor(DATA[2])))
    torch.testing.assert_close(tensors_of(predicted), tensors_of(outputs), rtol=0, atol=1e-9)


def test_a_model_output_of_transformers():
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Wrapped(ManyHeads):
        def forward(self, x):
            logits, hidden = super().forward(x)
            return outputs.SequenceClassifierOutput(logits=logits, hidden_states=(hidden, hidden))

    def of_logits(output, y):
        assert output.loss is None and len(output.hidden_states) == 2
        return loss((output.logits, output["hidden_states"][1]), y)

    result = run(Wrapped("tuple"), DATA, PARTS, task={"name": of_logits, "like": "any"})
    truth = plain(ManyHeads("tuple"))
    for key, value in result.state_dict.items():
        if "tracked" not in key:
            torch.testing.assert_close(value, truth.state_dict()[key], rtol=0, atol=1e-9)
    assert result.predict(DATA[2]).logits.shape == (len(DATA[3]), 3)


class OfTwo(TaskMetric):
    larger_is_better = False

    def rows(self, outputs, y):
        main, aux = outputs
        return (main - aux).square().mean(1)


def test_other_parts_of_a_run_take_them_too():
    result = run(
        ManyHeads("tuple"),
        DATA,
        PARTS,
        task=TASK["task"],
        evaluate={"metrics": [OfTwo], "batch_size": 7, "clients": {"every": 1}},
        partition={"clients": 3, "test": "matched"},
        algorithm="scaffold",
    )
    with torch.no_grad():
        main, aux = result.net().double()(torch.tensor(DATA[2]))
    expected = float((main - aux).square().mean())
    assert result.history[-1]["oftwo"] == pytest.approx(expected, rel=1e-6)


class Odd(ManyHeads):
    odd = ""

    def forward(self, x):
        main, aux = super().forward(x)
        odd = {
            "number": aux.mean(),
            "labels": aux.argmax(1),
            "word": "aux",
            "examples": aux.T @ aux,
            "pairs": aux @ aux.T,
        }
        return main, odd[self.odd]


REFUSED = {
    "number": r"outputs\[1\] is of shape \[\], .* one row for each example, \[2, \.\.\.\]",
    "labels": r"outputs\[1\] is torch.int64",
    "word": r"outputs\[1\] is of type str",
    "examples": r"outputs\[1\] is of shape \[3, 3\]",
}


@pytest.mark.parametrize(("odd", "message"), REFUSED.items(), ids=REFUSED)
def test_what_has_no_row_for_each_example_is_refused(odd, message):
    net = Odd("tuple")
    net.odd = odd
    with pytest.raises(ConfigError, match=f"^model: .*{message}"):
        run(net, DATA, PARTS, **TASK)


def test_forms_that_cannot_be_told_apart_are_refused():
    class Swaps(ManyHeads):
        def forward(self, x):
            main, aux = super().forward(x)
            return (main, aux) if self.training else torch.cat([main, aux], 1)

    with pytest.raises(ConfigError, match="two forms with as many numbers for each example"):
        run(Swaps("tuple"), DATA, PARTS, **TASK)


class DynamicCache:
    """What language models of transformers return beside their logits."""


def test_a_cache_among_the_outputs_is_named_with_the_way_out():
    class Caches(nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x.to(self.weight)), "cache": DynamicCache()}

    x, y, x_test, y_test = DATA
    tokens = x.astype(int), y, x_test.astype(int), y_test
    named = r"of type DynamicCache \(net\.config\.use_cache = False"
    with pytest.raises(ConfigError, match=named) as refusal:
        run(Caches(x.shape[1], 3), tokens, PARTS, **TASK)
    assert "int64" not in str(refusal.value)


def test_a_copy_of_a_class_is_refused():
    with pytest.raises(ConfigError, match="returns the class Heads of a net that was given as an"):
        run(ManyHeads("dataclass"), DATA, PARTS, task={"name": loss, "like": "any"})


def test_other_tasks_take_one_tensor():
    with pytest.raises(ConfigError, match=r"tuple, and task 'classification' takes one tensor; .*"):
        run(ManyHeads("tuple"), DATA, PARTS)
    with pytest.raises(ConfigError, match=r"give a loss function of \(tuple, y\) with task.like"):
        run(ManyHeads("tuple"), DATA, PARTS, task=loss)
    with pytest.raises(ConfigError, match="no example has a gradient that could be clipped"):
        privacy = {"noise_multiplier": 0.0, "max_grad_norm": 1.0}
        run(ManyHeads("tuple"), DATA, PARTS, **TASK, privacy=privacy)


def test_random_parts_of_batches_have_forms_too():
    local = {"steps": 3, "batch_size": 7, "lr": 0.1}
    assert np.isfinite(
        run(ManyHeads("mapping"), DATA, PARTS, **TASK, local=local).history[-1]["loss"]
    )
