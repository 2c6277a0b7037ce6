"""The forms in which users give examples, the tensors that are read, and users' data sets that
fail."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)

from raysim.data import import_torchvision
from raysim.data.own.reading import inputs_like, make_dataset
from raysim.errors import ConfigError

torchvision = import_torchvision()  # datasets imports it, and its operators may not load
import datasets  # noqa: E402

RNG = np.random.default_rng(2)
X, Y, USERS = RNG.normal(size=(6, 3)), np.arange(6) % 2, list("abacba")
PLAIN = make_dataset("mine", (X, Y, X, Y), "data")


def made(content: Any) -> Any:
    return make_dataset("mine", content, "data")


class Listed(Dataset):
    """Examples as they are given; an exception among them is raised."""

    def __init__(self, *examples: Any):
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, k: int) -> Any:
        if isinstance(self.examples[k], BaseException):
            raise self.examples[k]
        return self.examples[k]


# -- forms -----------------------------------------------------------------------------------------

TENSORS = TensorDataset(torch.tensor(X), torch.tensor(Y))
PAIRS = list(zip(X, Y, strict=True))
TABLE = pd.DataFrame({"length": X[:, 0], "kind": [*"abcabc"]})


@pytest.mark.parametrize(
    "half",
    [
        {"x": X, "y": Y},
        Listed(*({"x": x, "y": y} for x, y in PAIRS)),
        Listed(*map(list, PAIRS)),
        PAIRS,
        [{"x": x, "y": y} for x, y in PAIRS],
        ConcatDataset([Subset(TENSORS, range(2)), Subset(TENSORS, range(2, 6))]),
    ],
)
def test_halves_of_each_form_hold_the_same_examples(half):
    assert made({"train": half, "test": half}).digest == PLAIN.digest


@pytest.mark.parametrize(
    "half",
    [
        {"x": X, "y": Y, "user": USERS},
        {"x": X, "y": Y, "users": np.array(USERS, dtype=object)},
        Listed(*({"x": x, "y": y, "user": u} for (x, y), u in zip(PAIRS, USERS, strict=True))),
        StackDataset(
            x=TENSORS.tensors[0], y=TENSORS.tensors[1], user=torch.tensor([0, 1, 0, 2, 1, 0])
        ),
    ],
)
def test_a_half_may_bring_the_users_of_its_examples(half):
    dataset = made({"train": half, "test": (X, Y)})
    assert dataset.groups.tolist() == [0, 1, 0, 2, 1, 0] and len(dataset.group_names) == 3


def table_of(**columns: Any) -> Any:
    import_torchvision()  # datasets imports it, and its operators may not load
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist(), **columns})


BOTH = {"x": X, "y": Y, "user": USERS, "users": USERS}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: {"train": BOTH, "test": (X, Y)}, "the training half has both user and users"),
        (lambda: {"train": (X, Y), "test": BOTH}, "the test half has both user and users"),
        (
            lambda: (Listed({"x": X[0], "y": 0, "user": 0, "users": 0}), (X, Y)),
            "training example 0 has both user and users",
        ),
        (
            lambda: (table_of(user=USERS, users=USERS), (X, Y)),
            "the training examples have both user and users",
        ),
        (
            lambda: {
                "train": {"x": X, "y": Y, "user": USERS}, "test": (X, Y), "users": USERS,
            },
            "the mapping has users, and its training half has user",
        ),
        (
            lambda: {
                "train": {"x": X, "y": Y, "user": USERS},
                "test": {"x": X, "y": Y, "user": USERS},
                "users_test": USERS,
            },
            "the mapping has users_test, and its test half has user",
        ),
    ],
)  # fmt: skip
def test_users_that_are_given_twice_are_refused(content, message):
    with pytest.raises(ConfigError, match=f"^data: {message}; leave one"):
        made(content())


def test_a_third_split_is_named_and_not_used(caplog):
    import_torchvision()  # datasets imports it, and its operators may not load
    datasets = pytest.importorskip("datasets")
    half = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})
    content = datasets.DatasetDict(train=half, validation=half, test=half)
    with caplog.at_level(logging.WARNING, "raysim"):
        np.testing.assert_allclose(made(content).x_test, X, rtol=1e-6)
    assert "data: the split 'validation' is not used" in caplog.text
    with pytest.raises(ConfigError, match=r"^data: the training examples are an IterableDataset"):
        made((half.to_iterable_dataset(), half))


# -- arrays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(X, requires_grad=True),
        torch.tensor(X).to_sparse(),
        [torch.tensor(row, requires_grad=True) for row in X],
        tuple(X),
        np.array([*X, None], dtype=object)[:-1],
    ],
)
def test_tensors_and_lists_of_each_kind_are_read(x):
    assert made((x, Y, X, Y)).digest == PLAIN.digest


def test_bfloat16_is_read_without_loss():
    x = torch.tensor(X).bfloat16()
    dataset = made((x, torch.tensor(Y), list(x), Y))
    assert (
        dataset.x.dtype == np.float32
        and dataset.digest == made((dataset.x, Y, dataset.x, Y)).digest
    )
    np.testing.assert_array_equal(dataset.x, x.double().numpy())


# -- sequences -------------------------------------------------------------------------------------


def test_sequences_of_whole_numbers_are_padded_to_the_longest():
    x, y = [[1, 2, 3], [4], []], [[2, 3, 4], [5], []]
    x_test, y_test = np.array([[7, 8, 9, 1]]), torch.tensor([[8, 9, 1, 2]])
    dataset = made({"train": (x, y), "test": (x_test, y_test), "public": [[3, 1], [2], [5]]})
    assert dataset.x.tolist() == [[1, 2, 3, 0], [4, 0, 0, 0], [0, 0, 0, 0]]
    assert dataset.y.tolist() == [[2, 3, 4, -100], [5, -100, -100, -100], [-100] * 4]
    assert (dataset.x_test.tolist(), dataset.y_test.tolist()) == ([[7, 8, 9, 1]], [[8, 9, 1, 2]])
    assert dataset.public_x.tolist() == [[3, 1, 0, 0], [2, 0, 0, 0], [5, 0, 0, 0]]
    own_padding = ((dataset.x, dataset.y), (dataset.x_test, dataset.y_test))
    assert made(((x, y), (x_test, y_test))).digest == made(own_padding).digest
    rows = Listed(*((np.array(a), np.array(b, dtype=int)) for a, b in zip(x, y, strict=True)))
    assert made({"train": rows, "test": (x_test, y_test)}).x.tolist() == dataset.x.tolist()


def test_sequences_to_predict_are_padded_like_the_examples():
    half = [[1, 2, 3], [4]], [0, 1]
    dataset = made({"train": half, "test": half})
    assert inputs_like([[5], [6, 7]], dataset).tolist() == [[5, 0, 0], [6, 7, 0]]
    assert inputs_like([[5, 6]], dataset).tolist() == [[5, 6, 0]]
    for longer in ([[1, 2, 3, 4]], [[1, 2, 3, 4], [5]]):
        with pytest.raises(ConfigError, match=r"^predict: .* shape \[3\], x of shape \[4\]; give"):
            inputs_like(longer, dataset)
    with pytest.raises(ConfigError, match=r"^predict: x has rows of different lengths"):
        inputs_like([[1, 2, 3], [4]], PLAIN)
    table = made((np.arange(1, 13).reshape(4, 3), [0, 1, 0, 1]) * 2)
    with pytest.raises(ConfigError, match=r"^predict: .* shape \[3\], x of shape \[2\]; give"):
        inputs_like(np.ones((2, 2), int), table)


def test_sequences_may_have_one_label_each():
    dataset = made(([[1, 2], [3]], [0, 1], [[4], [5]], [1, 1]))
    assert dataset.x.tolist() == [[1, 2], [3, 0]] and dataset.x_test.tolist() == [[4, 0], [5, 0]]
    assert dataset.y.tolist() == [0, 1] and dataset.n_classes == 2


# -- several inputs --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [int, np.int64, torch.tensor])
def test_numbers_beside_arrays_in_a_tuple_are_several_inputs(number):
    ids = np.array([3, 1, 2, 0, 3, 1])
    rows = Listed(*(((number(k), x), y) for k, (x, y) in zip(ids, PAIRS, strict=True)))
    dataset = made((rows, rows))
    assert [(i.kind, i.shape) for i in dataset.inputs] == [("integer", ()), ("float", (3,))]
    assert dataset.digest == made({"train": ((ids, X), Y), "test": ((ids, X), Y)}).digest
    one = Listed(*(((number(k), number(k)), y) for k, y in zip(ids, Y, strict=True)))
    assert made((one, one)).inputs == ()  # numbers of one shape are one array


# -- refusals --------------------------------------------------------------------------------------

TWO = (X[0], 0), (X[1], 1)
SEQUENCES = [[1, 2], [3]]


def test_targets_where_there_is_no_token_are_refused():
    """All targets are as long as the longest inputs, so only x is padded."""
    padded = {"train": (SEQUENCES, [[5, 6], [7, -100]]), "test": (SEQUENCES, [[1, 2], [3, -100]])}
    assert made(padded).x.tolist() == [[1, 2], [3, 0]]
    assert made(padded).y.tolist() == [[5, 6], [7, -100]]
    labels = (SEQUENCES, [[1, 0, 1], [0, 1, 1]])  # three for each sequence
    assert made({"train": labels, "test": labels}).y.tolist() == labels[1]
    with pytest.raises(
        ConfigError, match=r"^data: x_test\[1\] has 1 tokens, y_test\[1\] has 2; give"
    ):
        made({**padded, "test": (SEQUENCES, [[1, 2], [3, 4]])})


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (Listed(*TWO, KeyError("label")), "training example 2 fails: KeyError: 'label'"),
        (Listed(*TWO, (X[2], None)), "y of training example 2 is a NoneType; give numbers"),
        (Listed(*((x, y, "ann") for x, y in PAIRS)), "training example 0 is a tuple of 3; .* mapping"),
        (TensorDataset(*TENSORS.tensors, torch.arange(6) % 3), "training example 0 is a tuple of 3"),
        (TensorDataset(*TENSORS.tensors, *TENSORS.tensors), "training example 0 is a tuple of 4"),
        (Listed(*TWO, (X[2],)), r"training example 2 is a tuple of 1; expected a pair \(x, y\)"),
        (Listed(*TWO, {"x": X[2], "label": 1}), "training example 2 has the unknown key 'label'"),
        (Listed(*TWO, {"x": X[2]}), "training example 2 has no y"),
        (Listed({"x": X[0], "y": 0}, {"x": X[1], "y": 1, "user": "ann"}), "only 1 of the 2 training examples have a user"),
        (Dataset(), "the training examples have no length .*; define __len__"),
        (X, "the training examples are a ndarray; expected"),
        ([X, Y, Y], "the training examples are a list of 3; expected"),
        ([{"x": X[0], "label": 1}] * 3, "training example 0 has the unknown key 'label'"),
        ([(X[0], [[1], [2, 3]])] * 3, "the training examples are a list of 3; expected"),
        ([(X, Y), (X, Y), (X, Y)], "these are 3 sets of examples, as if each client .*train.*client: set.* validation .* out"),
        (DataLoader(TENSORS), r"the training examples are a DataLoader.*\(its attribute dataset\)"),
        (Listed(((X[0], X[1]), 0), ((X[2], X[3]), 1)), "x_test is one array, and x has the inputs 0, 1"),
        (Listed(({"a": X[0], "b": X[1]}, 0), (X[2], 1)), r"x of training example 1 has other inputs than \['a', 'b'\]"),
        (Listed(((1, [2.0, 3.0]), 0)), r"x of training example 0: number 1 has .*, or give several inputs as a mapping"),
        (Listed((([2, 3], [4]), 0)), r"x of training example 0 has rows of .*, or give several inputs as a mapping"),
        ((X, np.array(list("abcabc"), dtype=object)), r".*is a str\); give numbers, the same in both"),
        ({"x": X, "Y": Y}, "the training half has the unknown key 'Y'"),
        ((X, np.array(["a", 1, None, 2, 3, 4], dtype=object)), "y is an array of Python objects"),
        ((X, None), "y is a NoneType; give numbers"),
        ((TABLE, Y), r"x is an array .* \(number 0 of the column 'kind' is a str\); give numbers"),
        ((TABLE.astype({"kind": "category"}), Y), "x is an array .*; give numbers, as .cat.codes of"),
        ({"x": X, "y": Y, "user": [1, "1", 2, 2, 1, 1]}, "users mixes integers and texts; give"),
        ((iter(X), Y), "x is a .*iterator; give numbers"),
        ((torch.tensor(X) + 1j, Y), "x is of type complex128; give numbers"),
        ({"x": X, "y": Y, "user": [*"abcab", float("nan")]}, r"users\[5\] is nan, a float; give"),
        ((SEQUENCES, [[1, 2], [3, 4]]), "x has sequences of different lengths, but x_test is flo"),
        ((SEQUENCES, [[1], [2, 3]]), r"x\[0\] has 2 tokens, y\[0\] has 1; give one target for each"),
        (([[1, 2], [3, 4]], [[1, 2], [3]]), r"x\[1\] has 2 tokens, y\[1\] has 1; give one target"),
        (([[1.5, 2], [3.0]], [0, 1]), r"x: number 1 has shape \[1\], number 0 \[2\]; crop or pad"),
        ((["a b", "c"], [0, 1]), "x is of type <U3; give numbers"),
        ((X, list("abcabc")), "y is of type <U1; give numbers, the same in both halves: names = np"),
        ((X, np.full(6, 2**63 + 5, np.uint64)), r"y\[0\] holds 9223372036854775813, .* for int64"),
        ((np.full((6, 3), np.longdouble("1e400")), Y), r"x\[0\] holds 1e\+400, .* large for float64"),
        (([[1, 2], [3, 10**20]], [0, 1]), r"x is an array .* \(number 1 is 10+, which has more"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_error_that_names_it(train, message):
    with pytest.raises(ConfigError, match=f"^data: {message}"):
        made({"train": train, "test": (X, Y)})


CLIENTS = [(X, Y), (X, Y), (X, Y), (X, Y)]


@pytest.mark.parametrize(
    "content",
    [CLIENTS, CLIENTS[:3], [TENSORS] * 4, [DataLoader(TENSORS)] * 4, dict(enumerate(CLIENTS))],
)
def test_the_examples_of_each_client_by_itself_are_refused(content):
    with pytest.raises(
        ConfigError, match=r"^data: these are . sets of examples, as if each client"
    ):
        made(content)


OF_ALL = {"train": (X, Y), "test": (X, Y), "users": [*"aabbbc"], "users_test": [*"aabbbc"]}
OF_EACH = {name: slice(a, b) for name, a, b in (("a", 0, 2), ("b", 2, 5), ("c", 5, 6))}
PAIRS_OF_EACH = {name: (X[own], Y[own]) for name, own in OF_EACH.items()}
FORMS_OF_EACH: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "pairs": lambda x, y: (x, y),
    "lists": lambda x, y: (x.tolist(), y.tolist()),
    "mappings": lambda x, y: {"x": x, "y": torch.tensor(y)},
    "torch": lambda x, y: TensorDataset(torch.tensor(x), torch.tensor(y)),
    "subsets": lambda x, y: Subset(Listed(*zip(x, y, strict=True)), range(len(x))),
    "tables": lambda x, y: datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()}),
}


@pytest.mark.parametrize("form", FORMS_OF_EACH.values(), ids=FORMS_OF_EACH)
def test_examples_of_each_client_are_those_of_users(form):
    truth = made(OF_ALL)
    of_each = {name: form(*pair) for name, pair in PAIRS_OF_EACH.items()}
    for content in (
        {"train": of_each, "test": of_each},
        {name: {"train": own, "test": own} for name, own in of_each.items()},
    ):
        data = made(content)
        assert data.digest == truth.digest and data.group_names == truth.group_names


def test_a_list_of_data_sets_is_that_of_clients():
    parts = random_split(TENSORS, [2, 3, 1], torch.Generator().manual_seed(0))
    positions = [k for part in parts for k in part.indices]
    of_all = {"train": (X[positions], Y[positions]), "test": (X, Y), "users": [0, 0, 1, 1, 1, 2]}
    assert made({"train": parts, "test": TENSORS}).digest == made(of_all).digest
    assert made({"train": parts[:2], "test": TENSORS}).group_names == ("0", "1")


def test_examples_of_each_client_may_have_several_inputs():
    one = made({**OF_ALL, "train": ((X, Y), Y), "test": ((X, Y), Y)})
    for row in (True, False):
        train = {
            name: ((x, y) if row else {"0": x, "1": y}, y) for name, (x, y) in PAIRS_OF_EACH.items()
        }
        assert made({"train": train, "test": train}).digest == one.digest


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ((X[2:4], Y[2:5]), "the training examples of client 'b' have x and y of 2 and 3 entries"),
        ((X[2:5], Y[2:5] * 1.0), "y is int64 in .* and float64 in .* client 'b'; give one kind"),
        ((X[2:5, :2], Y[2:5]), r"x: number 2 has shape \[2\], number 0 \[3\]"),
        ({"x": X[2:5], "y": Y[2:5], "user": Y[2:5]}, "client 'b' have users, .*leave them out"),
        (
            ({"a": X[2:5]}, Y[2:5]),
            "x of the training examples of client 'a' has not the inputs a",
        ),
        (Listed((X[2], 1, "b")), r"training \(client 'b'\) example 0 is a tuple of 3"),
    ],
)
def test_what_a_client_has_otherwise_is_named(own, message):
    with pytest.raises(ConfigError, match=f"^data: .*{message}"):
        made({"train": {**PAIRS_OF_EACH, "b": own}, "test": PAIRS_OF_EACH})


@pytest.mark.parametrize("as_mapping", [False, True])
@pytest.mark.parametrize("tensor", [np.asarray, torch.as_tensor])
@pytest.mark.parametrize("y", [X[:, :2], X[:, :1, None] > 0], ids=["numbers", "pixels"])
def test_a_list_of_examples_whose_targets_are_arrays(y, tensor, as_mapping):
    half = [(tensor(a), tensor(b)) for a, b in zip(X, y, strict=True)]
    given = [{"x": a, "y": b} for a, b in half] if as_mapping else half
    assert made((given, given)).digest == made((Listed(*half), Listed(*half))).digest


@pytest.mark.parametrize("as_mapping", [False, True])
def test_a_list_that_may_be_examples_or_sets_of_clients_is_refused(as_mapping):
    """Images and masks of one row, or clients with as many pairs of a row of pixels."""
    images = RNG.normal(size=(4, 1, 3, 3))
    half = [{"x": a, "y": a} if as_mapping else (a, a) for a in images]
    with pytest.raises(ConfigError, match=r"^data: these are 4 sets .* and stack single examples"):
        made((half, half))


def test_a_list_of_two_pairs_is_two_examples():
    data = made({"train": [(0.5, 1.5), (0.25, 0.5)] * 3, "test": [(0.5, 1.5), (0.25, 0.5)]})
    assert data.x_test.ravel().tolist() == [0.5, 0.25] and data.y_test.ravel().tolist() == [
        1.5,
        0.5,
    ]
