"""Users' own examples: from a function, an .npz file, torch data sets; what is refused, and what
identifies them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import TypeAdapter
from support.damage import claiming
from support.programs import program

import raysim
from raysim.config.sections.base import named
from raysim.config.sections.data import AnyData, Partition
from raysim.data import (
    Dataset,
    Examples,
    dataset_summary,
    import_torchvision,
    load_dataset,
    plot_samples,
    split_dataset,
)
from raysim.data.own.reading import make_dataset
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare
from raysim.randomness import generator
from raysim.runs.python_inputs import named_inputs

RNG = np.random.default_rng(7)
X, X_TEST = RNG.normal(size=(24, 5)), RNG.normal(size=(9, 5))
Y, Y_TEST = np.arange(24) % 3, np.arange(9) % 3


def section(**keys: Any) -> Any:
    return TypeAdapter(AnyData).validate_python(named(keys))


def made(content: Any) -> Dataset:
    return make_dataset("mine", content, "data")


def saved(path: Path, **changes: Any) -> str:
    arrays = {"x": X, "y": Y, "x_test": X_TEST, "y_test": Y_TEST, **changes}
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return str(path)


FUNCTION = """
import numpy as np
import torch
from helper import SCALE

def load(path, n=24, scale: float = SCALE):
    table = np.loadtxt(path, delimiter=",")[:n]
    half = len(table) // 2
    x, y = scale * table[:, :-1], table[:, -1].astype(int)
    return x[:half], y[:half], x[half:], y[half:]

def mapping():
    return {"train": (np.ones((4, 2)), [0, 1, 0, 1]), "test": (np.ones((2, 2)), [0, 1]),
            "users": ["ann", "bob", "ann", "cem"], "public": np.zeros((3, 2))}

def torch_sets():
    half = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.arange(4))
    return half, half

def drawn():
    x = np.random.default_rng().normal(size=(6, 2))
    return x, np.arange(6) % 2, x, np.arange(6) % 2

def drawn_by_torch():
    return {**mapping(), "public": torch.rand(3, 2)}

def drawn_users():
    return {**mapping(), "users": np.random.randint(10**9, size=4).astype(str)}

def broken():
    return 1 / 0

TABLE = np.ones((6, 2))

def scaled():
    global TABLE
    TABLE /= 255
    return TABLE, np.arange(6) % 2, TABLE, np.arange(6) % 2

def wrong():
    return 3

number = 3
"""


@pytest.fixture
def files(here: Path) -> Path:
    """A folder with a user's function, the module that it imports, and the file that it reads."""
    (here / "mine.py").write_text(FUNCTION)
    (here / "helper.py").write_text("SCALE = 2.0")
    np.savetxt(here / "table.csv", np.column_stack([X, Y]), delimiter=",")
    return here


# -- what is read ----------------------------------------------------------------------------------


def test_a_function_gets_the_other_keys_and_returns_the_examples(files):
    dataset = load_dataset(section(name="mine.py:load", path="table.csv", n=20))
    assert dataset.name == "mine.py:load"
    np.testing.assert_allclose(np.concatenate([dataset.x, dataset.x_test]), 2 * X[:20])
    assert (dataset.y.tolist(), dataset.y_test.tolist()) == (Y[:10].tolist(), Y[10:20].tolist())
    assert (dataset.classes, dataset.shape, dataset.n_classes) == (("0", "1", "2"), (5,), 3)
    assert dataset.scale is None and dataset.groups is None
    halved = load_dataset(section(name="mine.py:load", path="table.csv", scale=0.5))
    np.testing.assert_allclose(halved.x, 0.5 * X[:12])


def test_a_function_may_return_a_mapping_or_torch_data_sets(files):
    dataset = load_dataset(section(name="mine.py:mapping"))
    assert dataset.groups is not None and dataset.groups.tolist() == [0, 1, 0, 2]
    assert dataset.group_names == ("ann", "bob", "cem")
    assert dataset.public_x is not None and dataset.public_x.shape == (3, 2)
    assert dataset.public_y is None
    dataset = load_dataset(section(name="mine.py:torch_sets"))
    assert dataset.x.shape == (4, 2) and dataset.y.tolist() == [0, 1, 2, 3]


def test_an_npz_file_has_the_arrays_by_name(tmp_path):
    path = saved(tmp_path / "a.npz", user=np.arange(24) // 8, public_x=X_TEST, public_y=Y_TEST)
    dataset = load_dataset(section(name="arrays", path=path))
    np.testing.assert_array_equal(dataset.x, X)
    np.testing.assert_array_equal(dataset.y_test, Y_TEST)
    assert dataset.name == "a.npz" and dataset.group_names == ("0", "1", "2")
    np.testing.assert_array_equal(dataset.public_y, Y_TEST)
    assert load_dataset(section(name="arrays", path=path, classes=7)).n_classes == 7


class Squares(torch.utils.data.Dataset):
    def __init__(self, n: int):
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, k: int):
        return torch.full((2, 3), float(k)), k % 2


def test_a_torch_data_set_is_stacked():
    dataset = made((Squares(6), Squares(2)))
    np.testing.assert_array_equal(dataset.x[:, 1, 2], np.arange(6))
    assert dataset.y.dtype == np.int64 and dataset.y.tolist() == [0, 1, 0, 1, 0, 1]
    assert dataset.x_test.shape == (2, 2, 3)


def test_keras_pairs_and_tensors_are_read():
    pairs = made(((X, Y), (X_TEST, Y_TEST)))
    tensors = made([torch.tensor(X), torch.tensor(Y), torch.tensor(X_TEST), torch.tensor(Y_TEST)])
    assert pairs.digest == tensors.digest == made((X, Y, X_TEST, Y_TEST)).digest
    named_ = {"x": X, "y": Y, "x_test": X_TEST, "y_test": Y_TEST, "classes": ["a", "b", "c"]}
    assert made(named_).classes == ("a", "b", "c")


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int32, np.int64, ">i4"])
def test_tokens_stay_integers(kind):
    tokens = RNG.integers(0, 100, (6, 4)).astype(kind)
    examples = Examples.of(made((tokens, Y[:6], tokens, Y[:6])), "train", dtype=torch.float64)
    x, y = examples.batch(np.array([2, 0]))
    assert x.dtype == y.dtype == torch.int64
    assert x.tolist() == tokens[[2, 0]].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.longdouble, bool])
def test_floats_become_the_dtype_of_the_run(kind, dtype):
    x = (X > 0).astype(kind) if kind is bool else X.astype(kind)
    targets = RNG.normal(size=(24, 2))
    batch, y = Examples.of(made((x, targets, x, targets)), "train", dtype=dtype).batch(np.arange(3))
    assert batch.dtype == y.dtype == dtype
    np.testing.assert_array_equal(batch.numpy(), x[:3].astype(str(dtype).removeprefix("torch.")))
    np.testing.assert_allclose(y.numpy(), targets[:3], rtol=1e-6)


def test_targets_of_any_kind_keep_their_shape():
    multi_hot = RNG.integers(0, 2, (24, 4)).astype(np.uint8)
    dataset = made((X, multi_hot, X, multi_hot))
    assert dataset.y.dtype == np.uint8 and dataset.y.shape == (24, 4)
    assert not dataset.are_labelled and dataset.n_classes == 0
    assert made((X, X[:, 0], X, X[:, 0])).y.dtype == np.float64
    assert not made((X, Y - 1, X, Y)).are_labelled  # whole numbers to regress on


def test_one_number_for_each_example_is_a_vector_of_one():
    assert made((X[:, 0], Y, X_TEST[:, 0], Y_TEST)).shape == (1,)


@pytest.mark.parametrize(
    ("shape", "read_as"),
    [((6, 4, 5), (1, 4, 5)), ((6, 3, 4, 5), (3, 4, 5)), ((6, 4, 5, 3), (3, 4, 5))],
)
def test_uint8_arrays_of_images_are_pixels(shape, read_as):
    """The mean and deviation are ImageNet's, as for folders of images."""
    x = RNG.integers(0, 256, shape, dtype=np.uint8)
    dataset = made((x, Y[:6], x, Y[:6]))
    assert dataset.shape == read_as and dataset.are_images
    first = x[0] if shape[1] == 3 else x[0].transpose(2, 0, 1) if len(shape) == 4 else x[0][None]
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    if len(shape) == 3:
        mean, std = (0.449,), (0.226,)
    expected = (first / 255 - np.reshape(mean, (-1, 1, 1))) / np.reshape(std, (-1, 1, 1))
    batch, _ = Examples.of(dataset, "train").batch(np.arange(1))
    np.testing.assert_allclose(batch[0].numpy(), expected, atol=1e-5)


def test_images_of_ones_own_are_scaled_and_augmented_as_others(tmp_path):
    x = RNG.integers(0, 256, (24, 8, 8), dtype=np.uint8)
    path = saved(tmp_path / "a.npz", x=x, x_test=x[:9])
    unit = load_dataset(section(name="arrays", path=path, scaling="unit", augment=True))
    assert (unit.pad, unit.flip) == (1, True)
    batch, _ = Examples.of(unit, "test").batch(np.arange(9))
    np.testing.assert_allclose(batch[:, 0].numpy(), x[:9] / 255, atol=1e-6)


def test_a_note_says_that_uint8_arrays_are_read_as_images(config, caplog):
    x, y = RNG.integers(0, 256, (40, 1, 4, 4), dtype=np.uint8), np.arange(40) % 2
    caplog.set_level(logging.INFO, "raysim.notes")

    def is_noted(data, **keys):
        caplog.clear()
        data = {**named_inputs({"data": data})["data"], **keys}
        prepare({**config, "data": data, "partition": {"clients": 4}, "model": "logistic"})
        return "x is uint8 [40, 1, 4, 4], read as images" in caplog.text

    assert is_noted((x, y, x, y))
    assert not is_noted((x, y, x, y), scaling="standard")
    floats = x.astype("float32")
    assert not is_noted((floats, y, floats, y))


def test_a_note_names_classes_without_a_training_example(config, caplog):
    caplog.set_level(logging.INFO, "raysim.notes")
    x, y = RNG.normal(size=(40, 4)), np.array([0, 2, 4, 5] * 10)
    data = named_inputs({"data": (x, y, x, np.array([0, 1, 3, 5] * 10))})["data"]
    prepare({**config, "data": data, "partition": {"clients": 4}, "model": "logistic"})
    assert "labels without a training example: 1, 3; 20 of the 40 test examples" in caplog.text


@pytest.mark.parametrize(
    ("partition", "is_noted"),
    [
        ({"clients": 4}, True),
        ({"name": "iid", "clients": 4}, False),
        ("natural", False),
    ],
)
def test_a_note_says_that_a_default_partition_makes_no_clients_of_users(
    config, caplog, partition, is_noted
):
    caplog.set_level(logging.INFO, "raysim.notes")
    x, y = RNG.normal(size=(40, 4)), np.arange(40) % 2
    of_each = {name: (x[k::4], y[k::4]) for k, name in enumerate("abcd")}
    data = named_inputs({"data": {"train": of_each, "test": (x, y)}})["data"]
    prepare({**config, "data": data, "partition": partition, "model": "logistic"})
    assert ("have 4 users, and partition 'iid', the default" in caplog.text) is is_noted


# -- what is refused -------------------------------------------------------------------------------


def with_nan(value: float) -> np.ndarray:
    x = X.copy()
    x[17, 3] = value
    return x


MASKED = np.ma.array(X, mask=False)
MASKED[5, 2] = np.ma.masked
OBJECTS = np.array([{}, 1], dtype=object)
RAGGED = [[1.0], [1.0, 2.0]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((X, Y[:-1], X_TEST, Y_TEST), "x has 24 examples, y has 23; give one target for each"),
        ((X, Y, X_TEST, Y_TEST[:-1]), "x_test has 9 examples, y_test has 8"),
        ((X, Y, X_TEST[:0], Y_TEST[:0]), "x_test has no examples"),
        ((X[:0], Y[:0], X_TEST, Y_TEST), "x has no examples; give at least one"),
        ((with_nan(np.nan), Y, X_TEST, Y_TEST), r"x\[17\] holds nan"),
        ((X, Y, with_nan(-np.inf), Y), r"x_test\[17\] holds -inf"),
        ((X, with_nan(np.inf), X, X), r"y\[17\] holds inf"),
        (
            (X, Y, X_TEST[:, :4], Y_TEST),
            r"x has examples of shape \[5\], x_test of shape \[4\]; give both one shape",
        ),
        ((X, Y, X_TEST, X_TEST[:, 0]), "y is int64, y_test is float64"),
        ((OBJECTS, Y[:2], X_TEST, Y_TEST), "x is an array of Python objects"),
        (
            (X.astype(object), Y, X_TEST, Y_TEST),
            r"x is an array of Python objects; give numbers, as .astype\(float\)",
        ),
        (
            (X, Y.astype(object), X_TEST, Y_TEST),
            r"y is an array .* numbers, as .astype\(int\) makes",
        ),
        (
            (RAGGED, Y[:2], X_TEST, Y_TEST),
            r"x: number 1 has shape \[2\], number 0 \[1\]; crop or pad",
        ),
        ((np.array(["a"]), Y[:1], X_TEST, Y_TEST), "x is of type <U1; give numbers"),
        ((X + 1j, Y, X_TEST, Y_TEST), "x is of type complex128"),
        ((X, 3, X_TEST, Y_TEST), "y is a single number"),
        ((X, Y, X_TEST), "expected x, y, x_test, y_test.*; got a tuple of 3"),
        ((X, Y), r"x and y have no test half; .*\(x, y, x_test, y_test\)"),
        (None, "got a NoneType"),
        ({"x": X, "y": Y}, "the mapping has no x_test and no y_test"),
        ({"train": (X, Y)}, r'the mapping has no test; give {"train": \(x, y\), "test": \(x, y\)}'),
        ({"train": (X, Y), "test": (X, Y), "user": Y}, "unknown key 'user'; did you mean 'users'"),
        ({"train": (X, Y), "test": (X, Y), "x": X}, "give either x or train"),
        ({"train": (X, Y), "test": (X, Y), "users": Y[:5]}, "users has 5 .* give one for each"),
        ({"train": (X, Y), "test": (X, Y), "users": X}, r"users is float64 \[24, 5\]"),
        ({"train": (X, Y), "test": (X, Y), "public": X[:, :3]}, "public x of shape"),
        ({"train": (X, Y), "test": (X, Y), "classes": 0}, "classes is 0"),
        ((Squares(0), Squares(2)), "x has no examples"),
        ((MASKED, Y, X_TEST, Y_TEST), r"x\[5, 2\] is masked, a missing value; remove the example"),
        ((X, np.ma.masked_equal(Y, 2), X_TEST, Y_TEST), r"y\[2\] is masked"),
        ((X, Y, MASKED, Y), r"x_test\[5, 2\] is masked"),
        ({"train": (X, Y), "test": (X, np.ma.masked_equal(Y, 1))}, r"y_test\[1\] is masked"),
        ({"train": (X, Y), "test": (X, Y), "public": MASKED}, r"x of public\[5, 2\] is masked"),
        (
            {"train": (X, Y), "test": (X, Y), "users": np.ma.masked_equal(Y, 0)},
            r"users\[0\] is mas",
        ),
    ],
)
def test_bad_examples_are_refused_by_name_and_place(content, message):
    with pytest.raises(ConfigError, match=f"^data: .*{message}"):
        made(content)


def test_masked_arrays_without_a_missing_value_are_arrays():
    arrays = [np.ma.array(array) for array in (X, Y, X_TEST, Y_TEST)]
    assert made(arrays).digest == made((X, Y, X_TEST, Y_TEST)).digest


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


class Growing(Squares):
    def __getitem__(self, k: int):
        return torch.zeros(k + 1), 0


class Single(Squares):
    def __getitem__(self, k: int):
        return torch.zeros(2)


@pytest.mark.parametrize(
    ("half", "message"),
    [
        (Stream(), "IterableDataset"),
        (Growing(3), r"number 1 has shape \[2\], number 0 \[1\]"),
        (Single(3), r"training example 0 is a Tensor; expected a pair \(x, y\)"),
    ],
)
def test_torch_data_sets_that_cannot_be_stacked_are_refused(half, message):
    with pytest.raises(ConfigError, match=message):
        made((half, half))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "none.py:load"}, "data.name: there is no file 'none.py'"),
        ({"name": "mine.py:lod"}, "data.name: mine.py defines no 'lod'"),
        ({"name": "mine.py:number"}, "data.name: mine.py:number is not a function"),
        ({"name": "mine.py:load"}, "data.path: missing; 'mine.py:load' needs it"),
        (
            {"name": "mine.py:load", "path": "table.csv", "m": 3},
            r"data.m: unknown key of 'mine.py:load'.*known: n, path, scale",
        ),
        (
            {"name": "mine.py:broken"},
            r"mine.py:broken failed: ZeroDiv.*\(mine.py, line 31: `return 1 / 0`\)",
        ),
        ({"name": "mine.py:drawn"}, "mine.py:drawn returns other examples when it is called again"),
        (
            {"name": "mine.py:scaled"},
            "mine.py:scaled returns other .* such as x / 255 for x /= 255",
        ),
        ({"name": "mine.py:drawn_by_torch"}, "drawn_by_torch returns other examples when it"),
        ({"name": "mine.py:drawn_users"}, "drawn_users returns other examples when it"),
        ({"name": "mine.py:wrong"}, "mine.py:wrong: expected x, y, x_test.*; got a int"),
        ({"name": "mine.py:mapping", "augment": True}, "data.augment: mine.py:mapping are not im"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused(files, keys, message):
    with pytest.raises(ConfigError, match=message):
        load_dataset(section(**keys))


def test_an_npz_file_that_cannot_be_used_is_refused(tmp_path):
    def refused(path: Path | str, message: str) -> None:
        with pytest.raises(ConfigError, match=rf"^data.path: {tmp_path}/.*{message}"):
            load_dataset(section(name="arrays", path=str(path)))

    refused(tmp_path / "none.npz", "cannot be read: No such file")
    refused(saved(tmp_path / "a.npz", y=None), "has no array y; it has x, x_test, y_test")
    refused(saved(tmp_path / "b.npz", usrs=Y), "unknown array usrs; did you mean 'users'")
    refused(saved(tmp_path / "g.npz", user=Y, users=Y), "has both an array user and users")
    refused(saved(tmp_path / "c.npz", x=OBJECTS), "holds an array of Python objects")
    refused(saved(tmp_path / "d.npz", user=Y[:3]), "users has 3 entries for 24")
    (tmp_path / "e.npz").write_text("no zip")
    refused(tmp_path / "e.npz", "is no whole .npz file; save x")
    np.save(tmp_path / "f.npy", X)
    refused(tmp_path / "f.npy", "is no whole .npz file")
    np.save(tmp_path / "h.npy", OBJECTS)
    refused(tmp_path / "h.npy", "is no whole .npz file")
    (tmp_path / "i.csv").write_text("a,b,label\n1,2,0\n")
    refused(tmp_path / "i.csv", r"is no whole .npz file; .*np.savez, or give a func")
    (tmp_path / "j.npz").write_bytes(b"")
    refused(tmp_path / "j.npz", "is no whole .npz file")
    (tmp_path / "k.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:300])
    refused(tmp_path / "k.npz", "is no whole .npz file")
    torch.save({"x": torch.tensor(X)}, tmp_path / "l.pt")
    refused(tmp_path / "l.pt", "has no array x and .*; it has l/data")
    (tmp_path / "m").mkdir()
    refused(tmp_path / "m", "cannot be read: Is a directory")
    refused(claiming(tmp_path / "n.npz", 10**12, x=X, y=Y), "has no array x_test and no y_test")
    refused(
        claiming(tmp_path / "o.npz", 10**12, x=X, y=Y, x_test=X, y_test=Y),
        "does not fit in memory: .*; if the array should be smaller, the file is damaged",
    )


HUGE = with_nan(1e39)


@pytest.mark.parametrize(
    ("data", "place", "task"),
    [
        ((HUGE, Y, X_TEST, Y_TEST), "x[17]", "classification"),
        ((X, Y, HUGE, Y), "x_test[17]", "classification"),
        ((-HUGE.astype(np.longdouble), Y, X_TEST, Y_TEST), "x[17]", "classification"),
        ((torch.tensor(HUGE), Y, X_TEST, Y_TEST), "x[17]", "classification"),
        ((X, HUGE[:, 3], X_TEST, X_TEST[:, 0]), "y[17]", "regression"),
        ((X, X, X, -HUGE), "y_test[17]", "regression"),
        ({"train": (X, Y), "test": (X, Y), "public": HUGE}, "public_x[17]", "classification"),
        (((X, X), (X, X), (X, HUGE)), "public_y[17]", "regression"),
    ],
)
def test_numbers_that_are_infinite_in_the_type_of_the_run_are_named(config, data, place, task):
    if isinstance(data, tuple) and len(data) == 3:
        data = {"train": data[0], "test": data[1], "public": data[2]}
    config = {**config, "data": data, "task": task, "dtype": "float32"}
    with pytest.raises(ConfigError) as error:
        raysim.run(config)
    assert str(error.value).startswith(f"data.name: {place} of python-")
    assert "1e+39, which is infinite in float32; scale the data, or set" in str(error.value)
    assert torch.tensor(1e39, dtype=torch.float64).float().isinf()
    made(data).check_range("float64")


def test_the_largest_numbers_of_the_type_are_read(tmp_path):
    largest = float(np.finfo(np.float32).max)
    for value in (largest, -largest, np.nextafter(largest, np.inf)):
        assert np.isfinite(np.float32(value))
        made((with_nan(value), Y, X_TEST, Y_TEST)).check_range("float32")


@pytest.mark.parametrize("name", ["dirichlet", "shards", "heavy_tail", "slow_class"])
@pytest.mark.parametrize(
    ("y", "y_test", "message"),
    [
        (X[:, 0], X_TEST[:, 0], r"integer class labels \[n\], but y of a.npz is float64 \[n\]"),
        (X, X_TEST, r"but y of a.npz is float64 \[n, 5\]"),
        (Y - 3 * (np.arange(24) == 5), Y_TEST, r"labels from 0 to 2, but y\[5\] of a.npz is -1"),
        (Y, Y_TEST + 4 * (np.arange(9) == 7), r"labels from 0 to 2, but y_test\[7\] of a.npz is 5"),
    ],
)
def test_partitions_by_class_need_labels(tmp_path, name, y, y_test, message):
    dataset = load_dataset(
        section(name="arrays", path=saved(tmp_path / "a.npz", y=y, y_test=y_test))
    )
    keys: dict[str, Any] = {"name": name, "clients": 3}
    keys |= {"alpha": 1.0} if name in ("dirichlet", "slow_class") else {}
    partition: Any = TypeAdapter(Partition).validate_python(keys)
    with pytest.raises(
        ConfigError, match=f"^partition.name: '{name}' divides by class .*{message}"
    ):
        split_dataset(partition, dataset, seed=0)


def test_what_is_no_image_has_no_picture_but_a_summary(tmp_path):
    dataset = made((X, X[:, 0], X_TEST, X_TEST[:, 0]))
    with pytest.raises(ConfigError, match=r"no labelled images to draw"):
        plot_samples(dataset, tmp_path / "a.png")
    summary = dataset_summary(dataset)
    assert (summary["train"], summary["test"], summary["counts"]) == (24, 9, {})


def test_large_integers_are_quantities_and_no_classes(tmp_path):
    """A name for each of 10**9 classes would fill the memory."""
    y, y_test = 10**9 + Y, 10**9 + Y_TEST
    dataset = made((X, y, X_TEST, y_test))
    assert (dataset.n_classes, dataset_summary(dataset)["counts"]) == (0, {})
    with pytest.raises(ConfigError, match="needs classes, but the labels of mine go up to 1000000"):
        dataset.check_labels("partition.name", "'shards' divides by class and")
    with pytest.raises(ConfigError, match="classes is 1000000000; at most 1000000 are possible"):
        made({"train": (X, Y), "test": (X_TEST, Y_TEST), "classes": 10**9})
    summary = dataset_summary(made((X, Y, X_TEST, Y_TEST - 1)))
    assert (summary["classes"], summary["counts"]) == (0, {})


def test_names_of_labels_are_no_classes_of_targets_of_another_shape():
    labelled = {"train": (X, Y), "test": (X_TEST, Y_TEST)}
    of_numpy = [
        made({**labelled, "classes": np.array(["a", "b", "c"])}),
        made({**labelled, "classes": np.int64(3)}),
    ]
    assert [len(dataset.classes) for dataset in of_numpy] == [3, 3]
    dataset = made({"train": (X, X), "test": (X_TEST, X_TEST), "classes": ["a", "b"]})
    assert dataset.n_classes == 2 and not dataset.are_labelled
    assert dataset_summary(dataset)["counts"] == {}


# -- runs, and what identifies them ----------------------------------------------------------------


@pytest.fixture
def config(base: dict[str, Any]) -> dict[str, Any]:
    return {
        **base,
        "rounds": 2,
        "model": {"name": "logistic"},
        "algorithm": "fedavg",
        "partition": {"clients": 4},
        "local": {"steps": 2, "batch_size": 4, "lr": 0.1},
        "schedule": {"cohort": 2},
        "evaluate": {"every": 1},
    }


def test_a_function_of_ones_own_trains_and_resumes(files, config):
    config["data"] = {"name": "mine.py:load", "path": "table.csv"}
    whole = raysim.run(config)
    stopped = raysim.run(config, {"rounds": 1, "run_dir": str(files / "b")})
    assert (stopped.run_dir / "source" / "data" / "mine.py").read_text() == FUNCTION
    assert raysim.resume(stopped.run_dir, {"rounds": 2}).digest == whole.digest
    assert "accuracy" in whole.metrics


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("mine.py", FUNCTION + "\n# a comment", "data: mine.py has changed"),
        ("helper.py", "SCALE = 3.0", "data: helper.py has changed"),
        ("table.csv", None, "data.path: table.csv has changed"),
    ],
)
def test_each_file_of_a_function_is_part_of_the_identity(files, config, file, text, message):
    config["data"] = {"name": "mine.py:load", "path": "table.csv"}
    before = raysim.run(config, {"rounds": 1})
    (files / file).write_text(text or (files / file).read_text().replace("1", "2", 1))
    assert prepare(config).config.fingerprint != before.config.fingerprint
    with pytest.raises(ConfigError, match=message):
        raysim.resume(before.run_dir, {"rounds": 2})


def test_what_a_function_reads_by_itself_is_part_of_the_identity(files, config):
    (files / "hidden.py").write_text(
        "import numpy as np\n"
        "def load():\n    x = np.loadtxt('table.csv', delimiter=',')\n    y = np.arange(24) % 3\n"
        "    return x, y, x, y\n"
    )
    config["data"] = "hidden.py:load"
    before = raysim.run(config, {"rounds": 1})
    np.savetxt(files / "table.csv", np.column_stack([2 * X, Y]), delimiter=",")
    assert prepare(config).config.fingerprint != before.config.fingerprint
    with pytest.raises(
        ConfigError, match=r"data.examples: what hidden.py:load returns has changed"
    ):
        raysim.resume(before.run_dir, {"rounds": 2})


def test_the_content_of_arrays_is_part_of_the_identity_and_not_their_place(tmp_path, config):
    config["data"] = {"name": "arrays", "path": saved(tmp_path / "a.npz")}
    first = raysim.run(config, {"rounds": 1})
    elsewhere = {"data.path": saved(tmp_path / "b.npz")}
    assert prepare(config, elsewhere).config.fingerprint == first.config.fingerprint
    saved(tmp_path / "a.npz", y=(Y + 1) % 3)
    assert prepare(config).config.fingerprint != first.config.fingerprint
    with pytest.raises(ConfigError, match=r"data.path: .*/a.npz has changed since this run began"):
        raysim.resume(first.run_dir, {"rounds": 2})
    saved(tmp_path / "a.npz")
    assert raysim.resume(first.run_dir, {"rounds": 2}).rounds == 2


def test_the_number_of_classes_is_part_of_the_identity(tmp_path, config):
    config["data"] = {"name": "arrays", "path": saved(tmp_path / "a.npz")}
    more = prepare(config, {"data.classes": 4})
    assert more.config.fingerprint != prepare(config).config.fingerprint
    assert more.problem.size == (5 + 1) * 4


def test_natural_clients_are_the_users(tmp_path, config):
    path = saved(tmp_path / "a.npz", user=np.array(["u", "v", "w"])[np.arange(24) % 3])
    plan = prepare(config, {"data": {"name": "arrays", "path": path}, "partition": "natural"})
    assert [plan.clients.client(i).tolist() for i in range(3)] == [
        list(range(k, 24, 3)) for k in range(3)
    ]


# -- torchvision -----------------------------------------------------------------------------------


class Pictures:
    """A stand-in for a class of torchvision: pictures whose brightness is their label."""

    def __init__(self, root: str, split: str = "train", bright: int = 1, download: bool = False):
        if split not in ("train", "val"):
            raise ValueError(f"no split {split}")
        self.n = {"train": 12, "val": 6}[split]
        self.bright = bright
        self.classes = ["dark", "dim", "light", "white"]
        if not download and not Path(root, "pictures").exists():
            raise RuntimeError("Dataset not found. You can use download=True to download it")
        Path(root, "pictures").mkdir(exist_ok=True)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, k: int):
        return Image.new("RGB", self.size(k), (k % 3 * self.bright, 0, 7)), k % 3

    def size(self, k: int) -> tuple[int, int]:
        return 4, 4


class Uneven(Pictures):
    def size(self, k: int) -> tuple[int, int]:
        return 4 + k, 9


class Boxes(Pictures):
    def __getitem__(self, k: int):
        return super().__getitem__(k)[0], {"boxes": []}


class Halves(Pictures):
    """A class with `train` instead of `split`."""

    def __init__(self, root: str, train: bool = True, download: bool = False):
        super().__init__(root, "train" if train else "val", download=download)


@pytest.fixture
def torchvision_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    module = import_torchvision().datasets
    made_up = (Pictures, Uneven, Boxes, Halves)
    for cls in made_up:
        monkeypatch.setattr(module, cls.__name__, cls, raising=False)
    monkeypatch.setattr(module, "__all__", (*module.__all__, *(c.__name__ for c in made_up)))
    (tmp_path / "root" / "pictures").mkdir(parents=True)
    return tmp_path / "root"


@pytest.mark.parametrize("name", ["Pictures", "Halves"])
def test_a_torchvision_data_set_is_read_by_its_class(torchvision_classes, name):
    keys = {"name": "torchvision", "dataset": name, "root": str(torchvision_classes)}
    dataset = load_dataset(section(**keys))
    assert dataset.x.shape == (12, 3, 4, 4) and dataset.are_images
    assert dataset.classes == ("dark", "dim", "light", "white")
    assert dataset.x[:, 0, 0, 0].tolist() == dataset.y.tolist() == [0, 1, 2] * 4
    assert dataset.x_test.shape[0] == 6 and (dataset.x[:, 2] == 7).all()


def test_further_arguments_and_the_side_of_images(torchvision_classes):
    keys = {"name": "torchvision", "root": str(torchvision_classes)}
    brighter = load_dataset(section(dataset="Pictures", arguments={"bright": 50}, **keys))
    assert brighter.x[:3, 0, 0, 0].tolist() == [0, 50, 100]
    # The shorter sides of the training images are 4, 5, 6, 7, 8, and seven times 9.
    assert load_dataset(section(dataset="Uneven", **keys)).shape == (3, 9, 9)
    assert load_dataset(section(dataset="Uneven", size=5, **keys)).shape == (3, 5, 5)


def test_halves_of_a_class_without_an_argument_for_them_have_arguments_of_their_own(config):
    size = [1, 4, 4]
    keys = {"name": "torchvision", "dataset": "FakeData"}
    keys["arguments"] = {"image_size": size, "num_classes": 3}
    keys["train_arguments"], keys["test_arguments"] = {"size": 9}, {"size": 5, "random_offset": 9}
    dataset = load_dataset(section(**keys))
    whole = import_torchvision().datasets.FakeData(14, size, 3)  # the test continues the training
    assert np.concatenate([dataset.y, dataset.y_test]).tolist() == [y for _, y in whole]
    assert dataset.x.shape == (9, 1, 4, 4) and len(dataset.x_test) == 5
    first = prepare({**config, "data": keys}).config
    keys["test_arguments"] = {"size": 5, "random_offset": 8}
    assert prepare({**config, "data": keys}).config.fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"dataset": "FakeData", "test_arguments": {"offset": 1}},
            "data.test_arguments.offset: unknown argument of FakeData",
        ),
        (
            {"dataset": "FakeData", "test_arguments": {"size": "5"}},
            "data.dataset: FakeData cannot be read",
        ),
        ({"dataset": "SVNH"}, "data.dataset: torchvision has no data set 'SVNH'; did you mean"),
        ({"dataset": "Boxes"}, "example 0 has a dict as label"),
        (
            {"dataset": "FakeData"},
            "FakeData has neither an argument train nor split.*set data.train_arguments and",
        ),
        (
            {"dataset": "Pictures", "arguments": {"brigth": 1}},
            "data.arguments.brigth: unknown argument of Pictures; did you mean 'bright'",
        ),
        ({"dataset": "Pictures", "arguments": {"root": "a"}}, "data.arguments.root: unknown"),
    ],
)
def test_a_torchvision_data_set_that_cannot_be_read_is_refused(torchvision_classes, keys, message):
    with pytest.raises(ConfigError, match=message):
        load_dataset(section(name="torchvision", root=str(torchvision_classes), **keys))


def test_a_missing_torchvision_data_set_is_refused_or_downloaded(torchvision_classes, tmp_path):
    keys = {"name": "torchvision", "dataset": "Pictures", "root": str(tmp_path / "empty")}
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ConfigError,
        match=r"Pictures cannot be read from .*/empty: files are missing or damaged; set data.d",
    ):
        load_dataset(section(**keys))
    assert len(load_dataset(section(**keys, download=True)).y) == 12


def test_a_torchvision_data_set_is_identified_by_its_content(torchvision_classes, config):
    keys = {"name": "torchvision", "dataset": "Pictures", "root": str(torchvision_classes)}
    first = prepare({**config, "data": keys}).config
    other = prepare({**config, "data": {**keys, "arguments": {"bright": 2}}}).config
    assert first.fingerprint != other.fingerprint
    assert first.files is not None and "data.dataset" in first.files


# -- partitions ------------------------------------------------------------------------------------

PARTITION = program("own_partition")


def test_a_partition_of_ones_own_gets_the_labels_and_a_keyed_generator(here, config, tmp_path):
    (here / "p.py").write_text(PARTITION)
    config["data"] = {"name": "arrays", "path": saved(tmp_path / "a.npz")}
    config["partition"] = {"name": "p.py:by_parity", "clients": 5, "start": 1}
    plan = prepare(config)
    order = generator(0, "partition").permutation(24)
    for k in range(5):
        assert plan.clients.client(k).tolist() == order[k + 1 :: 5].tolist()
    (here / "p.py").write_text(PARTITION + "# changed")
    assert prepare(config).config.fingerprint != plan.config.fingerprint
    with pytest.raises(ConfigError, match=r"partition: p.py has changed since"):
        prepare(plan.config.model_dump(mode="json"))


def test_an_argument_after_others_of_any_number_is_a_key(here, config, tmp_path):
    (here / "p.py").write_text(PARTITION)
    config["data"] = {"name": "arrays", "path": saved(tmp_path / "a.npz")}
    config["partition"] = {"name": "p.py:in_turn", "clients": 4, "start": 1}
    plan = prepare(config)
    assert [plan.clients.client(k).tolist() for k in range(4)] == [[1], [2], [3], [4]]


def test_clients_may_share_examples_if_that_is_asked_for(here, config, tmp_path):
    (here / "p.py").write_text(PARTITION)
    config["data"] = {"name": "arrays", "path": saved(tmp_path / "a.npz")}
    config["partition"] = {"name": "p.py:shared", "clients": 3, "overlap": True}
    plan = prepare(config)
    assert [plan.clients.client(k).tolist() for k in range(3)] == [[3, 1, 2], [2, 4], []]
    assert plan.problem.n_nonempty == 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "p.py:shared", "clients": 3}, "client 1 has example 2 which is also client 0's"),
        ({"name": "p.py:twice", "overlap": True}, "client 0 has example 3 twice"),
        ({"name": "p.py:outside"}, "client 1 has example 999, outside 0 to 23"),
        ({"name": "p.py:few"}, "returned 1 clients; partition.clients is 4"),
        ({"name": "p.py:none"}, "no client has an example; give each client the positions"),
        (
            {"name": "p.py:unkeyed"},
            "returned other lists when it was called again, .* last argument",
        ),
        ({"name": "p.py:words"}, "returned a int; return a list with the positions"),
        ({"name": "p.py:short"}, "takes 1 arguments; it is called with 3"),
        ({"name": "p.py:by_name"}, "takes 1 arguments; it is called with 3"),
        ({"name": "p.py:few", "bias": 1}, "bias: unknown key of 'p.py:few'"),
        ({"name": "p.py:nothing"}, "p.py defines no 'nothing'"),
        ({"name": "p.py:few", "overlap": True, "val_fraction": 0.1}, "cannot be held out"),
    ],
)
def test_a_partition_that_is_none_is_refused(here, config, tmp_path, keys, message):
    (here / "p.py").write_text(PARTITION)
    config["data"] = {"name": "arrays", "path": saved(tmp_path / "a.npz")}
    with pytest.raises(ConfigError, match=f"^partition.*{message}"):
        prepare({**config, "partition": {"clients": 4, **keys}})
