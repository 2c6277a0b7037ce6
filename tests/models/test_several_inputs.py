"""Nets with several inputs, as a mapping or a tuple of arrays, beside plain PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.plain_fedavg import averaged, cut, run, sgd
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import raysim
from raysim.data.several_inputs import pack, unpacked
from raysim.errors import ConfigError

N, TEST = 60, 20
PARTS = cut([30, 20, 10])
RNG = np.random.default_rng(0)
INPUTS = {
    "image": RNG.normal(size=(N + TEST, 1, 4, 4)),
    "tokens": RNG.integers(0, 9, (N + TEST, 5)),
    "mask": RNG.random((N + TEST, 5)) < 0.7,
    "user": RNG.integers(0, 4, N + TEST),
    "age": RNG.normal(size=N + TEST),
}
Y = RNG.integers(0, 3, N + TEST)


class Fuses(nn.Module):
    """Takes an image, a sequence with its mask, an id and a number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.norm = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)
        self.words, self.users = nn.Embedding(9, 4), nn.Embedding(4, 3)
        self.head = nn.Linear(8 + 4 + 3 + 1, 3)

    def forward(self, tokens, mask, image, user, age):
        assert (tokens.dtype, mask.dtype, user.dtype) == (torch.int64, torch.bool, torch.int64)
        assert age.ndim == user.ndim == 1 and image.shape[1:] == (1, 4, 4)
        words = self.words(tokens).masked_fill(~mask[..., None], 0.0).sum(1)
        pixels = self.norm(self.conv(image)).relu().flatten(1)
        return self.head(torch.cat([pixels, words, self.users(user), age[:, None]], 1))


class TakesTwo(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.users, self.items = nn.Embedding(4, 3), nn.Embedding(9, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, user, items):
        return self.head(self.users(user) * self.items(items).mean(1))


def halves(keys: list[str] | None = None) -> tuple[Any, Any, Any, Any]:
    chosen = {key: INPUTS[key] for key in keys or INPUTS}
    train, test = ({k: v[s] for k, v in chosen.items()} for s in (slice(N), slice(N, None)))
    return train, Y[:N], test, Y[N:]


def tensors(x: Any) -> dict[str, Tensor]:
    values = {key: torch.tensor(value) for key, value in x.items()}
    return {k: v.double() if v.is_floating_point() else v for k, v in values.items()}


def plain(net: nn.Module, data: Any, call, rounds: int = 2) -> nn.Module:
    """FedAvg as a user writes it: two full-batch steps of SGD, means weighted by samples."""
    x, y = tensors(data[0]), torch.tensor(data[1])

    def losses(local, t, client):
        part = PARTS[client]
        for _ in range(2):
            yield F.cross_entropy(call(local, {k: v[part] for k, v in x.items()}), y[part])

    return averaged(net, [len(part) for part in PARTS], rounds, losses, sgd()).eval()


def by_name(net, x):
    return net(**x)


def in_order(net, x):
    return net(*x.values())


def as_mapping(net, x):
    return net(x)


def as_pair(net, x):
    return net(tuple(x.values()))


def compare(result: raysim.RunResult, truth: nn.Module, data: Any, call) -> None:
    for key, value in result.state_dict.items():
        if "tracked" not in key:
            torch.testing.assert_close(value.double(), truth.state_dict()[key], rtol=0, atol=1e-9)
    x, y = tensors(data[2]), torch.tensor(data[3])
    with torch.no_grad():
        outputs = call(truth, x)
        own = call(result.net().double(), x)  # the user's net takes its inputs as it did before
    torch.testing.assert_close(own, outputs, rtol=0, atol=1e-9)
    assert result.history[-1]["loss"] == pytest.approx(float(F.cross_entropy(outputs, y)), rel=1e-6)


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_a_mapping_reaches_forward_by_name(mode):
    data = halves()
    result = run(Fuses(), data, PARTS, 2, batching={"mode": mode})
    compare(result, plain(Fuses(), data, by_name), data, by_name)
    predicted = result.predict(data[2])
    torch.testing.assert_close(predicted, result.net().double()(**tensors(data[2])))


class TakesBatch(TakesTwo):
    def forward(self, batch, scale=1.0):
        return super().forward(batch["user"], batch["tokens"]) * scale


class TakesPair(TakesTwo):
    def forward(self, pair):
        return super().forward(*pair)


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_a_forward_with_one_argument_gets_the_mapping_or_the_tuple(mode):
    data = halves(["user", "tokens"])

    result = run(TakesBatch(), data, PARTS, 2, batching={"mode": mode})
    compare(result, plain(TakesBatch(), data, as_mapping), data, as_mapping)
    result = run(TakesPair(), as_tuples(data), PARTS, 2, batching={"mode": mode})
    compare(result, plain(TakesPair(), data, as_pair), data, as_pair)


class Distances(TakesTwo):
    def forward(self, user, tokens):
        return {"user": self.users(user), "tokens": self.items(tokens).mean(1)}


def test_a_net_of_several_inputs_may_have_several_outputs():
    def loss(outputs, y):
        return F.cosine_embedding_loss(outputs["user"], outputs["tokens"], 1.0 - 2 * (y > 1))

    data = halves(["user", "tokens"])
    result = run(Distances(), data, [range(N)], 1, task={"name": loss, "like": "any"})
    truth = Distances().double()
    optimizer = torch.optim.SGD(truth.parameters(), lr=0.1)
    x, y = tensors(data[0]), torch.tensor(data[1])
    for _ in range(2):
        optimizer.zero_grad()
        loss(truth(**x), y).backward()
        optimizer.step()
    torch.testing.assert_close(result.predict(data[2]), truth(**tensors(data[2])))


def as_tuples(data: Any) -> Any:
    return tuple(data[0].values()), data[1], tuple(data[2].values()), data[3]


class Examples(Dataset):
    """A data set of torch that gives several inputs for each example."""

    def __init__(self, x, y, named):
        self.x, self.y, self.named = tensors(x), y, named

    def __len__(self):
        return len(self.y)

    def __getitem__(self, k):
        x = {key: value[k] for key, value in self.x.items()}
        return (x if self.named else tuple(v.reshape(-1) for v in x.values())), self.y[k]


def test_a_tuple_reaches_forward_in_its_order():
    data = halves(["user", "tokens"])
    truth = plain(TakesTwo(), data, in_order)
    compare(run(TakesTwo(), as_tuples(data), PARTS, 2), truth, data, in_order)


def test_data_sets_of_torch_may_give_mappings_and_tuples():
    data = halves(["user", "tokens"])
    named = {"user": data[0]["user"], "items": data[0]["tokens"]}
    named_test = {"user": data[2]["user"], "items": data[2]["tokens"]}
    sets = Examples(named, data[1], True), Examples(named_test, data[3], True)
    compare(run(TakesTwo(), sets, PARTS, 2), plain(TakesTwo(), data, in_order), data, in_order)

    class FirstOf(TakesTwo):
        def forward(self, user, items):
            return super().forward(user[:, 0], items)

    sets = Examples(data[0], data[1], False), Examples(data[2], data[3], False)
    result = run(FirstOf(), sets, PARTS, 2)
    truth = plain(TakesTwo(), data, in_order).state_dict()
    for key, value in result.state_dict.items():
        torch.testing.assert_close(value.double(), truth[key], rtol=0, atol=1e-9)


def test_a_file_of_arrays_has_a_name_for_each_input(tmp_path):
    data = halves(["user", "tokens"])
    arrays = {"y": data[1], "y_test": data[3]}
    for half, x in (("x", data[0]), ("x_test", data[2])):
        arrays |= {f"{half}.user": x["user"], f"{half}.items": x["tokens"]}
    np.savez(tmp_path / "data.npz", allow_pickle=False, **arrays)
    section = {"name": "arrays", "path": str(tmp_path / "data.npz")}
    result = run(TakesTwo(), section, PARTS, 2)  # pyright: ignore[reportArgumentType]
    compare(result, plain(TakesTwo(), data, in_order), data, in_order)


@pytest.mark.parametrize(
    "keys",
    [
        {"privacy": {"noise_multiplier": 0.0, "max_grad_norm": 1e9}},
        {"dtype": "float32", "local": {"steps": 2, "lr": 0.1, "precision": "bf16"}},
        {"batching": {"mode": "pooled"}, "local": {"steps": 1, "batch_size": "full", "lr": 0.1}},
        {"evaluate": {"clients": {"every": 1}}, "partition": {"clients": 3, "test": "matched"}},
    ],
    ids=["privacy", "bf16", "pooled", "clients"],
)
def test_other_parts_of_a_run_take_them_too(keys):
    result = run(TakesTwo(), as_tuples(halves(["user", "tokens"])), PARTS, 2, **keys)
    assert np.isfinite(result.history[-1]["loss"])


def test_a_function_gets_the_shapes_of_the_inputs():
    seen = []

    def make(shape, classes):
        seen.append(shape)
        return Fuses()

    run(make, halves(), PARTS, 1)
    expected = {"image": (1, 4, 4), "tokens": (5,), "mask": (5,), "user": (), "age": ()}
    assert seen[0] == expected and list(seen[0]) == list(expected)


@pytest.mark.parametrize("beyond", [0, 2**24 + 1])
def test_packing_keeps_every_value(beyond):
    arrays = {
        **INPUTS,
        "age": INPUTS["age"].astype(np.float32),
        "big": np.arange(N + TEST) + beyond,
    }
    del arrays["image"]
    packed, inputs = pack(arrays)
    assert packed.dtype == (np.float64 if beyond else np.float32)
    for key, value in unpacked(packed, inputs).items():
        np.testing.assert_array_equal(value, arrays[key])
        assert value.dtype.kind == arrays[key].dtype.kind


def without_nan(key: str) -> Any:
    data = halves(["age", "user"])
    data[0][key] = np.where(np.arange(N) == 7, np.nan, data[0][key])
    return data


def changed(**parts: Any) -> Any:
    data = halves(["age", "user"])
    data[0].update(parts)
    return data


TEST_ONLY = halves(["age", "user"])[2]

REFUSED = {
    "NaN": (lambda: without_nan("age"), r"x\['age'\]\[7\] holds nan"),
    "lengths": (lambda: changed(age=np.ones(3)), "different numbers of examples: .*'age': 3"),
    "ragged": (lambda: changed(age=[[1], [1, 2]] * 30), r"x\['age'\] has rows of different"),
    "other inputs": (lambda: changed(height=np.ones(N)), r"x_test has the inputs age .* and x has"),
    "one input": (lambda: (TEST_ONLY["age"], Y[N:], TEST_ONLY, Y[N:]), "and x is one array"),
    "one test input": (lambda: (*halves()[:2], np.ones((TEST, 3)), Y[N:]), "x_test is one array"),
    "many ids": (lambda: changed(user=np.arange(N) + 2**24), "float32 has not beside floats"),
    "text": (lambda: changed(user=["a"] * N), r"x\['user'\] is of type <U1"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_packed_is_refused(make, message):
    with pytest.raises(ConfigError, match=f"^data.*{message}"):
        run(TakesTwo(), make(), PARTS, dtype="float32")


def test_a_net_of_one_input_is_refused():
    with pytest.raises(ConfigError, match="'mlp' has one input, and the data have user, tokens"):
        run("mlp", halves(["user", "tokens"]), PARTS)
    with pytest.raises(
        ConfigError, match=r"'tokens'; the data have the inputs user, tokens, which are arg"
    ):
        run(TakesTwo(), halves(["user", "tokens"]), PARTS)
    table = np.ones((N, 6)), Y[:N], np.ones((TEST, 6)), Y[N:]
    with pytest.raises(ConfigError, match=r"missing 1 .*'items'; x is one tensor: give the data"):
        run(TakesTwo(), table, PARTS)
