"""What must hold of where a net starts and of frozen parts: values, sizes, bytes, bits, and clear errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.configurations import DIGITS_MLP
from torch import nn

import raysim
from raysim.data import import_torchvision
from raysim.engine.resolve import prepare
from raysim.errors import ConfigError
from raysim.models.start import freeze, load_weights


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_a_run_starts_where_another_one_ended():
    first = raysim.run(DIGITS_MLP, run_dir="first")
    model = DIGITS_MLP["model"] | {"init_from": "first/parameters.safetensors"}
    second = raysim.run(DIGITS_MLP | {"model": model}, run_dir="second")
    assert second.history[0]["accuracy"] == first.history[-1]["accuracy"]
    assert torch.equal(prepare("second/config.yaml").initial[0], first.parameters)


def test_the_result_gives_the_net():
    result = raysim.run(DIGITS_MLP, run_dir="first")
    net: Any = result.net()
    x = torch.randn(50, 1, 8, 8)
    again = raysim.load("first").net()
    with torch.no_grad():
        assert torch.equal(net(x), again(x)) and net(x).shape == (50, 10)
    assert not net.training and type(net[0]) is nn.Sequential, "the net as it was written"


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_weights_come_with_their_statistics(suffix: str):
    from safetensors.torch import save_file

    source, net = normed(), normed()
    source.train()(torch.randn(16, 4) * 3 + 1)
    (torch.save if suffix == "pt" else save_file)(source.state_dict(), f"w.{suffix}")
    load_weights(net, f"w.{suffix}")
    for key, value in source.state_dict().items():
        assert torch.equal(net.state_dict()[key], value), key


def test_a_classifier_of_another_size_is_skipped():
    source: Any = normed()
    net: Any = nn.Sequential(*list(normed())[:3], nn.Linear(3, 5))
    torch.save(source.state_dict(), "w.pt")
    before = net[3].weight.clone()
    with pytest.raises(
        ConfigError, match=r"3\.weight is \[2, 3\] there, \[5, 3\] in the net.*init_skip"
    ):
        load_weights(net, "w.pt")
    load_weights(net, "w.pt", ["3"])
    assert torch.equal(net[1].weight, source[1].weight) and torch.equal(net[3].weight, before)


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_frozen_parts_are_neither_trained_nor_sent(mode: str):
    frozen = raysim.run(
        DIGITS_MLP,
        run_dir="frozen",
        **{"model.freeze": ["*", "!classifier"], "batching.mode": mode},
    )
    P = 12 * 10 + 10
    assert frozen.parameters.shape == (P,)
    assert frozen.history[-1]["bytes_up"] == 2 * 4 * P * 4, "2 rounds, 4 clients, 4 bytes each"
    start = prepare(DIGITS_MLP).net.state_dict()
    for name, value in frozen.state_dict.items():
        kept = torch.equal(value, start[name])
        assert kept == (not name.startswith("1.")), name


def test_training_the_classifier_alone_is_logistic_regression_on_frozen_features():
    """One full-batch step of one client, by hand: W - lr (p - y) hᵀ / n."""
    one = {
        **DIGITS_MLP,
        "partition": {"clients": 1},
        "schedule": {"cohort": 1},
        "rounds": 1,
        "dtype": "float64",
    }
    one["local"] = {"steps": 1, "batch_size": "full", "lr": 0.5}
    frozen = one["model"] | {"freeze": "0"}
    result = raysim.run(one | {"model": frozen}, run_dir="one")
    plan = prepare(one)
    net: Any = plan.net.double()
    y = torch.as_tensor(plan.dataset.y)
    with torch.no_grad():
        features = net[0](plan_inputs(plan))
        logits = net[1](features)
        error = torch.softmax(logits, 1) - nn.functional.one_hot(y.long(), 10)
        weight = net[1].weight - 0.5 * error.T @ features / len(y)
        bias = net[1].bias - 0.5 * error.mean(0)
    torch.testing.assert_close(result.state_dict["1.weight"], weight, rtol=0, atol=1e-12)
    torch.testing.assert_close(result.state_dict["1.bias"], bias, rtol=0, atol=1e-12)


def plan_inputs(plan: Any) -> torch.Tensor:
    """All training images as the net sees them."""
    data = plan.dataset
    scale, shift = (
        torch.as_tensor(v, dtype=torch.float64)[:, None, None] for v in (data.scale, data.shift)
    )
    return torch.as_tensor(data.x).double() * scale + shift


def test_a_frozen_part_may_train_again_and_names_are_patterns():
    net = normed()
    freeze(net, ["*", "!norm"], 2)
    assert [n for n, p in net.named_parameters() if p.requires_grad] == ["2.weight", "2.bias"]
    net = normed()
    freeze(net, ["*.bias"], 2)
    assert [n for n, p in net.named_parameters() if p.requires_grad] == [
        "1.weight",
        "2.weight",
        "3.weight",
    ]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"freeze": ["*"]}, r"model\.freeze: nothing is left to train"),
        (
            {"freeze": ["body"]},
            r"model\.freeze: no parameter of the net matches 'body'.*0\.1\.weight",
        ),
        ({"init_from": "none.pt"}, r"model\.init_from: none\.pt cannot be read: No such file"),
        ({"init_from": "."}, r"model\.init_from: \. is a folder; .*parameters\.safetensors"),
        ({"init_from": "text.pt"}, r"model\.init_from: text\.pt is not a state_dict"),
        ({"init_from": "text.safetensors"}, r"model\.init_from: text\.safetensors cannot be read"),
        ({"init_skip": "1"}, r"model\.init_skip: there is no model\.init_from"),
        ({"frozen": "1"}, r"model\.frozen: unknown key.*did you mean 'freeze'"),
    ],
)
def test_bad_input_is_named(model: dict[str, Any], said: str):
    Path("text.pt").write_text("hello")
    Path("text.safetensors").write_text("hello")
    with pytest.raises(ConfigError, match=said):
        prepare({**DIGITS_MLP, "model": {"name": "mlp", **model}})


def test_an_edited_file_of_weights_is_another_run():
    net = prepare(DIGITS_MLP).net
    torch.save(net.state_dict(), "w.pt")
    keys = {**DIGITS_MLP, "model": {**DIGITS_MLP["model"], "init_from": "w.pt"}}
    before = prepare(keys).config.fingerprint
    assert before != prepare(DIGITS_MLP).config.fingerprint
    torch.save({k: v + 1 for k, v in net.state_dict().items()}, "w.pt")
    assert prepare(keys).config.fingerprint != before


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_only_adapters_of_peft_are_trained(mode: str):
    import_torchvision()  # peft imports it, and its operators may not load
    pytest.importorskip("peft")
    Path("lora.py").write_text(LORA)
    keys = {**DIGITS_MLP, "model": "./lora.py:adapted", "batching": {"mode": mode}}
    result = raysim.run(keys, run_dir="lora")
    assert len(result.parameters) == 2 * 64 + 16 * 2 + 16 * 10 + 10, "A, B, and the classifier"
    start = prepare(keys).net.state_dict()
    changed = {
        name for name, value in result.state_dict.items() if not torch.equal(value, start[name])
    }
    assert changed and all("lora" in name or "modules_to_save" in name for name in changed)


LORA = """
from collections import OrderedDict
from raysim.data import import_torchvision
import_torchvision()  # peft imports it, and its operators may not load
from peft import LoraConfig, get_peft_model
from torch import nn

def adapted(shape, classes):
    layers = OrderedDict(flat=nn.Flatten(), hidden=nn.Linear(64, 16), relu=nn.ReLU(), head=nn.Linear(16, classes))
    return get_peft_model(nn.Sequential(layers), LoraConfig(r=2, target_modules=["hidden"], modules_to_save=["head"]))
"""
