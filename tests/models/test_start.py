"""What must hold of where a net starts and of frozen parts: values, sizes, bytes, bits, and clear
errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.configurations import DIGITS_MLP
from torch import nn

import raysim
from raysim.data import import_torchvision
from raysim.errors import ConfigError
from raysim.models.flat import BoundModel
from raysim.models.initial.adapters import merged
from raysim.models.initial.start import freeze, load_weights
from raysim.prepare.resolve import prepare
from raysim.runs.artifacts.export import export
from raysim.runs.python_inputs import named_inputs


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_a_run_starts_where_another_one_ended(uri: str, tracked: None):
    first = raysim.run(DIGITS_MLP, run_dir="first", **{"tracking.uri": uri})
    contents = set()
    for source in ("first/parameters.safetensors", "first", first.run_id):
        model = DIGITS_MLP["model"] | {"init_from": source}
        plan = prepare(DIGITS_MLP | {"model": model}, {"tracking.uri": uri})
        assert torch.equal(plan.initial[0], first.parameters), source
        contents |= set((plan.config.files or {})["model.init_from"].values())
    assert len(contents) == 1, "the weights are the identity, not the run's other files"
    second = raysim.run(DIGITS_MLP | {"model": model}, run_dir="second", **{"tracking.uri": uri})
    assert second.history[0]["accuracy"] == first.history[-1]["accuracy"]
    Path("first/parameters.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"raysim resume first finishes it"):
        load_weights(normed(), "first")
    with pytest.raises(ConfigError, match=r"model\.init_from: run 0{32} is not found"):
        model = {"name": "mlp", "init_from": "0" * 32}
        prepare(DIGITS_MLP | {"model": model}, {"tracking.uri": uri})


def test_weights_of_torchvision_are_those_in_the_cache_of_torch(monkeypatch: Any):
    net: Any = normed()
    monkeypatch.setattr(torch.hub, "get_dir", lambda: "hub")
    Path("hub/checkpoints").mkdir(parents=True)
    torch.save(normed().state_dict(), "hub/checkpoints/resnet18-f37072fd.pth")
    for source in ("torchvision:resnet18", "torchvision:resnet18.IMAGENET1K_V1"):
        load_weights(net, source)
        assert torch.equal(
            net[1].weight, torch.load("hub/checkpoints/resnet18-f37072fd.pth")["1.weight"]
        )
    for source, said in {
        "torchvision:resnet19": "torchvision has no net 'resnet19'.*did you mean 'resnet1",
        "torchvision:resnet18.V3": "no weights 'V3' of resnet18; it has IMAGENET1K_V1",
    }.items():
        with pytest.raises(ConfigError, match=said):
            load_weights(net, source)

    def offline(url: str, *arguments: Any, **named: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(
        ConfigError, match=r"resnet34 cannot be downloaded from https.*no network.*put the file at"
    ):
        load_weights(net, "torchvision:resnet34")


def test_weights_are_those_of_the_part_with_the_most_names():
    """Here the net around the part has two of its names, too."""

    class Wrapped(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Identity(), nn.Linear(2, 2))
            self.body = normed()

    source, net = normed().state_dict(), Wrapped()
    torch.save(source, "weights.pt")
    load_weights(net, "weights.pt", ["1"])
    assert all(torch.equal(net.body.state_dict()[name], value) for name, value in source.items())
    with pytest.raises(ConfigError, match=r"no tensor of the net matches '3'; .*body\.3\.weight"):
        load_weights(net, "weights.pt", ["1", "3"])  # which would be loaded, as body.3


def test_weights_of_hugging_face_may_be_those_of_a_part(monkeypatch: Any):
    """A folder of the hub; names without the net around; tensors in several files; one that is to
    be left out."""
    hub: Any = pytest.importorskip("huggingface_hub")
    from safetensors.torch import save_file

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = normed(), nn.Linear(2, 5)

    source, net = normed().state_dict(), Wrapped()
    Path("folder").mkdir()
    shards = [dict(list(source.items())[:2]), dict(list(source.items())[2:])]
    for i, shard in enumerate(shards, 1):
        save_file(
            shard | ({"pooler.bias": torch.ones(2)} if i == 2 else {}),
            f"folder/model-0000{i}-of-00002.safetensors",
        )
    index = {
        name: f"model-0000{i}-of-00002.safetensors"
        for i, shard in enumerate(shards, 1)
        for name in shard
    }
    Path("folder/model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(
        ConfigError,
        match=r"does not fit the net: it lacks head\.weight, head\.bias; .* lacks pooler\.bias;",
    ):
        load_weights(net, "folder")
    load_weights(net, "folder", ["head", "pooler"])
    assert all(torch.equal(net.body.state_dict()[name], value) for name, value in source.items())
    asked = []
    monkeypatch.setattr(
        hub,
        "snapshot_download",
        lambda name, **options: asked.append((name, options["revision"])) or "folder",
    )
    load_weights(Wrapped(), "hf:me/net@v1", ["head", "pooler"])
    load_weights(Wrapped(), "hf:net", ["head", "pooler"])
    assert asked == [("me/net", "v1"), ("net", None)]
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: 1 / 0)
    with pytest.raises(
        ConfigError, match=r"hf:net cannot be read from the Hugging Face hub: .*zero"
    ):
        load_weights(net, "hf:net")


TIED = """
from raysim.models.nets.sequence import transformer

def tied(shape, classes):
    net = transformer(shape, classes, width=8, heads=2, layers=1)
    net[-1][-1].weight = net[0].tokens.weight
    return net
"""


def sentences() -> tuple[Any, ...]:
    tokens = np.random.default_rng(0).integers(0, 7, (40, 6))
    return tokens[:32, :-1], tokens[:32, 1:], tokens[32:, :-1], tokens[32:, 1:]


def test_a_head_that_is_the_embedding_survives_the_run_and_the_file():
    """One vector holds the shared tensor once; net, file and a run from it have it under both
    names."""
    Path("tied.py").write_text(TIED)
    keys = {**DIGITS_MLP, "task": "next_token", "model": "./tied.py:tied", "dtype": "float64"}
    results = [
        raysim.run(keys, data=sentences(), run_dir=mode, tracking=False, **{"batching.mode": mode})
        for mode in ("loop", "lanes")
    ]
    torch.testing.assert_close(*(result.parameters for result in results), rtol=1e-10, atol=1e-12)
    first = results[0]
    net: Any = first.net()
    assert net[-1][-1].weight is net[0].tokens.weight
    x = torch.arange(5)[None]
    again = raysim.load("loop").net()
    plan = prepare("loop/config.yaml")
    start: Any = plan.net
    assert len(first.parameters) == sum(p.numel() for p in net.parameters())
    assert not torch.equal(net[0].tokens.weight, start.double()[0].tokens.weight)
    bound = plan.model().state_dict(*plan.initial)  # the head's value is not that of the start
    assert torch.equal(first.state_dict["2.1.weight"], first.state_dict["0.tokens.weight"])
    assert bound.keys() == first.state_dict.keys()
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert torch.equal(flat, first.parameters)
    with torch.no_grad():
        assert torch.equal(net(x), again(x))
    model = {"name": "./tied.py:tied", "init_from": "loop"}
    from_run = prepare({**keys, "model": model}, {"data": plan.config.data.model_dump()})
    assert torch.equal(from_run.initial[0], first.parameters)
    assert torch.equal(from_run.net[-1][-1].weight, from_run.net[0].tokens.weight)  # type: ignore[index]


def test_a_file_may_have_either_name_of_a_shared_tensor_but_not_two_values():
    def tied() -> Any:
        net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        net[1].weight = net[0].weight
        return net

    value = torch.arange(9.0).view(3, 3)
    for name in ("0.weight", "1.weight"):
        net = tied()
        torch.save({name: value}, "w.pt")
        load_weights(net, "w.pt")
        assert torch.equal(net[0].weight, value) and net[1].weight is net[0].weight
    torch.save({"0.weight": value, "1.weight": value + 1}, "w.pt")
    with pytest.raises(ConfigError, match=r"0\.weight and 1\.weight are one tensor in the net"):
        load_weights(tied(), "w.pt")


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


@pytest.mark.parametrize("mode", ["loop", "lanes"])
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
        ({"init_from": "none.pt"}, r"model\.init_from: \S*none\.pt cannot be read: No such file"),
        (
            {"init_from": "."},
            r"model\.init_from: /\S* is a folder without weights.*parameters\.safetensors",
        ),
        ({"init_from": "text.pt"}, r"model\.init_from: \S*text\.pt is not a state_dict"),
        (
            {"init_from": "text.safetensors"},
            r"model\.init_from: \S*text\.safetensors cannot be read",
        ),
        ({"init_skip": "1"}, r"model\.init_skip: there is no model\.init_from"),
        ({"frozen": "1"}, r"model\.frozen: unknown key.*did you mean 'freeze'"),
    ],
)
def test_bad_input_is_named(model: dict[str, Any], said: str):
    Path("text.pt").write_text("hello")
    Path("text.safetensors").write_text("hello")
    with pytest.raises(ConfigError, match=said):
        prepare({**DIGITS_MLP, "model": {"name": "mlp", **model}})


def test_parts_of_a_sequential_net_are_named_by_numbers():
    others = {name: value + 1 for name, value in prepare(DIGITS_MLP).net.state_dict().items()}
    torch.save(others, "w.pt")
    start = {**DIGITS_MLP["model"], "init_from": "w.pt"}
    for names in (1, [1]):
        assert prepare(DIGITS_MLP, {"model.freeze": names}).net[1].weight.requires_grad is False
        assert prepare(DIGITS_MLP, {"local.personal": names}).config.local.personal == ("1",)
        net = prepare({**DIGITS_MLP, "model": {**start, "init_skip": names}}).net
        skipped = [
            name for name, value in net.state_dict().items() if (value != others[name]).any()
        ]
        assert skipped == ["1.weight", "1.bias"]
    with pytest.raises(ConfigError, match=r"""personal\S*: .* string; write "1\.5", on the"""):
        prepare(DIGITS_MLP, {"local.personal": 1.5})


def test_an_edited_file_of_weights_is_another_run():
    net = prepare(DIGITS_MLP).net
    torch.save(net.state_dict(), "w.pt")
    keys = {**DIGITS_MLP, "model": {**DIGITS_MLP["model"], "init_from": "w.pt"}}
    before = prepare(keys).config.fingerprint
    assert before != prepare(DIGITS_MLP).config.fingerprint
    torch.save({k: v + 1 for k, v in net.state_dict().items()}, "w.pt")
    assert prepare(keys).config.fingerprint != before


@pytest.mark.parametrize("mode", ["loop", "lanes"])
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
from peft import LoraConfig, get_peft_model
from torch import nn

def adapted(shape, classes):
    layers = OrderedDict(flat=nn.Flatten(), hidden=nn.Linear(64, 16), relu=nn.ReLU(), head=nn.Linear(16, classes))
    return get_peft_model(nn.Sequential(layers), LoraConfig(r=2, target_modules=["hidden"], modules_to_save=["head"]))
"""


def adapted_net() -> Any:
    """Return a net of `LORA` whose adapters are not zero."""
    import_torchvision()
    pytest.importorskip("peft")
    space: dict[str, Any] = {}
    exec(LORA, space)
    torch.manual_seed(0)
    net = space["adapted"]((1, 8, 8), 10).eval()
    torch.nn.init.normal_(net.get_parameter("base_model.model.hidden.lora_B.default.weight"))
    return net


class Around(nn.Module):
    """A net that holds a net with adapters as a part."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@pytest.mark.parametrize("around", [False, True])
def test_merged_adapters_are_in_the_weights_of_the_base_net(around: bool):
    """W + lora_alpha / r B A, with peft's default lora_alpha of 8 and r = 2."""
    adapted = adapted_net()
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    plain = merged(Around(adapted) if around else adapted)
    hidden = {name.partition("hidden.")[2]: value for name, value in before.items()}
    update = hidden["lora_B.default.weight"] @ hidden["lora_A.default.weight"]
    tensors = plain.state_dict()
    prefix = "body." if around else ""
    assert set(tensors) == {
        f"{prefix}{n}.{k}" for n in ("hidden", "head") for k in ("weight", "bias")
    }
    expected = hidden["base_layer.weight"] + 4 * update
    torch.testing.assert_close(tensors[f"{prefix}hidden.weight"], expected)
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(plain(x), adapted(x))
    after = adapted.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert merged(plain) is plain


@pytest.mark.parametrize("around", [False, True])
def test_a_net_with_adapters_starts_from_the_weights_of_its_base_net(around: bool):
    """The adapters keep their new values, and the trained copy of a layer starts from it too."""
    adapted = adapted_net()
    base = merged(adapted_net())
    for value in base.parameters():
        nn.init.normal_(value)
    torch.save(base.state_dict(), "base.pt")
    load_weights(Around(adapted) if around else adapted, "base.pt")
    tensors, given = adapted.state_dict(), base.state_dict()
    part = "base_model.model."
    assert torch.equal(tensors[f"{part}hidden.base_layer.weight"], given["hidden.weight"])
    for copy in ("original_module", "modules_to_save.default"):
        assert torch.equal(tensors[f"{part}head.{copy}.weight"], given["head.weight"])
    fresh = adapted_net().state_dict()
    name = f"{part}hidden.lora_A.default.weight"
    assert torch.equal(tensors[name], fresh[name])


def test_weights_that_do_not_fit_the_base_net_are_named_as_it_names_them():
    torch.save({"hidden.weight": torch.zeros(16, 64), "hidden.bia": torch.zeros(16)}, "w.pt")
    with pytest.raises(
        ConfigError,
        match=r"lacks hidden\.bias, head\.weight, head\.bias; the net lacks hidden\.bia;",
    ):
        load_weights(adapted_net(), "w.pt")
    load_weights(adapted_net(), "w.pt", ["head", "hidden.bia*"])


ADAPTED = """
from peft import LoraConfig, get_peft_model
from raysim.models.nets.sequence import transformer

def adapted(shape, classes):
    net = transformer(shape, classes, width=8, heads=2, layers=1)
    return get_peft_model(net, LoraConfig(r=2, target_modules=["project", "out"]))
"""


def test_adapters_of_a_transformer_are_all_that_is_trained():
    """P is r (inputs + outputs) for each adapted layer; the base is the same tensors in every copy of the net."""
    import_torchvision()
    pytest.importorskip("peft")
    Path("adapted.py").write_text(ADAPTED)
    keys = {**DIGITS_MLP, "task": "next_token", "model": "./adapted.py:adapted", "dtype": "float64"}
    keys |= {"data": named_inputs({"data": sentences()})["data"], "checkpoint": {"every": 1}}
    loop, lanes = (
        raysim.run(keys, run_dir=mode, tracking=False, **{"batching.mode": mode})
        for mode in ("loop", "lanes")
    )
    assert len(loop.parameters) == 2 * (8 + 24) + 2 * (8 + 8)
    torch.testing.assert_close(loop.parameters, lanes.parameters, rtol=1e-10, atol=1e-12)
    model = prepare("loop/config.yaml").model()
    frozen = [
        {id(p) for p in BoundModel(model).module.parameters() if not p.requires_grad}
        for _ in range(2)
    ]
    assert frozen[0] == frozen[1] and len(frozen[0]) > 10
    raysim.run(keys, rounds=1, run_dir="half", tracking=False, **{"batching.mode": "loop"})
    assert raysim.resume("half", {"rounds": 2}).digest == loop.digest
    net = raysim.load("loop").net()
    again = prepare("loop/config.yaml").net.double().eval()
    again.load_state_dict(torch.load(export("loop", keep_adapters=True), weights_only=True))
    x = torch.arange(5)[None]
    with torch.no_grad():
        assert torch.equal(net(x), again(x))
