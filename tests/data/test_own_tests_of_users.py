"""Each user's own test examples, from every form of data, and the files of LEAF and PFLlib."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from raysim.config import explain
from raysim.data import Clients, load_dataset, split_dataset
from raysim.data.dataset import Dataset
from raysim.data.own.reading import make_dataset
from raysim.data.sources.leaf_pfllib import LEAF_LETTERS
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare

USERS = ["zoe", "adam", "zoe", "eve", "adam", "zoe", "eve"]
TEST_USERS = ["eve", "zoe", "eve", "adam", "eve"]
RNG = np.random.default_rng(0)
X, X_TEST = RNG.normal(size=(7, 4)), RNG.normal(size=(5, 4))
Y, Y_TEST = np.arange(7) % 3, np.arange(5) % 3
OWN = {"adam": [3], "eve": [0, 2, 4], "zoe": [1]}
"""Positions of each user's test examples, by hand."""


class Pairs:
    """A map-style data set of mappings with a user."""

    def __init__(self, x, y, users):
        self.rows = [{"x": a, "y": b, "user": u} for a, b, u in zip(x, y, users, strict=True)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, k):
        return self.rows[k]


def as_torch(x, y, users):
    from torch.utils.data import Dataset as TorchDataset

    return type("Own", (Pairs, TorchDataset), {})(x, y, users)


def as_table(x, y, users):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist(), "user": users})


FORMS = {
    "halves": lambda: {
        "train": {"x": X, "y": Y, "user": USERS},
        "test": {"x": X_TEST, "y": Y_TEST, "user": TEST_USERS},
    },
    "users_test": lambda: {
        "x": X, "y": Y, "x_test": X_TEST, "y_test": Y_TEST, "users": USERS, "users_test": TEST_USERS,
    },
    "torch": lambda: (as_torch(X, Y, USERS), as_torch(X_TEST, Y_TEST, TEST_USERS)),
    "hugging face": lambda: {
        "train": as_table(X, Y, USERS), "test": as_table(X_TEST, Y_TEST, TEST_USERS),
    },
}  # fmt: skip


def split(dataset: Dataset, **partition: Any) -> Clients:
    """Return the natural partition of a data set; each client has its own tests."""
    sections = {"name": "natural", "test": "natural", **partition}
    config = explain.validate(
        {"data": "digits", "rounds": 1, "algorithm": "fedavg", "partition": sections}
    )
    clients = split_dataset(config.partition, dataset, 3)
    assert isinstance(clients, Clients)
    return clients


def own_tests(dataset: Dataset, clients: Clients) -> dict[str, list[int]]:
    """Return positions of each user's test examples."""
    assert clients.test is not None and clients.test_half == "test"
    return {user: clients.test.client(k).tolist() for k, user in enumerate(dataset.group_names)}


@pytest.mark.parametrize("form", FORMS)
def test_each_user_has_its_own_test_examples(form):
    dataset = make_dataset("own", FORMS[form](), "data")
    assert own_tests(dataset, split(dataset)) == OWN


def test_a_client_of_several_users_has_the_tests_of_all_of_them():
    dataset = make_dataset("own", FORMS["halves"](), "data")
    clients = split(dataset, clients=2)
    assert clients.test is not None
    for k in range(2):
        users = {USERS[i] for i in clients.client(k)}
        expected = [i for i, user in enumerate(TEST_USERS) if user in users]
        assert clients.test.client(k).tolist() == expected
    assert clients.test.sizes.sum() == len(TEST_USERS)


@pytest.mark.parametrize("keys", [("user", "user_test"), ("users", "users_test")])
def test_a_file_of_arrays(tmp_path, keys):
    arrays = dict(zip(keys, (USERS, TEST_USERS), strict=True))
    np.savez(tmp_path / "a.npz", x=X, y=Y, x_test=X_TEST, y_test=Y_TEST, **arrays)
    data = {"name": "arrays", "path": str(tmp_path / "a.npz")}
    dataset = load_dataset(
        explain.validate({"data": data, "rounds": 1, "algorithm": "fedavg"}).data
    )
    assert own_tests(dataset, split(dataset)) == OWN


def test_users_tests_are_part_of_the_datas_identity_and_survive_being_stored(base):
    config = {
        **base, "data": FORMS["halves"](), "partition": {"name": "natural", "test": "natural"},
        "model": "logistic", "algorithm": "fedavg", "schedule": {"cohort": 2}, "rounds": 1,
        "local": {"steps": 1, "batch_size": 2, "lr": 0.1},
    }  # fmt: skip
    import raysim

    result = raysim.run(config, tracking=False)
    again = prepare(result.run_dir / "config.yaml")
    assert isinstance(again.clients, Clients)
    assert own_tests(again.dataset, again.clients) == OWN
    others = FORMS["halves"]()
    others["test"]["user"] = TEST_USERS[::-1]
    digests = {make_dataset("own", content, "data").digest for content in (FORMS["halves"](), others)}  # fmt: skip
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("partition", "said"),
    [
        ({"test": None}, r"partition\.test: the test examples of own have users; set .*=natural"),
        ({"test": {"matched": True}}, r"partition\.test: the test examples of own have users"),
        ({"test": {"fraction": 0.5}}, r"partition\.test: the test examples of own have users"),
        ({"name": "iid", "clients": 2, "test": None}, r"partition\.name: 'iid' does not use the"),
        ({"name": "virtual", "clients": 2, "test": None}, r"partition\.name: 'virtual' does not"),
    ],
)
def test_users_of_the_test_half_that_nothing_uses_are_refused(partition, said):
    with pytest.raises(ConfigError, match=said):
        split(make_dataset("own", FORMS["halves"](), "data"), **partition)


def test_natural_tests_need_users_on_both_sides():
    without = FORMS["halves"]()
    del without["test"]["user"]
    dataset = make_dataset("own", without, "data")
    assert split(dataset, test=None).test is None
    with pytest.raises(
        ConfigError, match=r"partition\.test\.natural: the test .* \('adam', 'eve', 'z"
    ):
        split(dataset)
    with pytest.raises(ConfigError, match=r"partition\.test\.natural: .* need clients that are us"):
        split(dataset, name="iid", clients=2)
    del without["train"]["user"]
    without["test"]["user"] = TEST_USERS
    with pytest.raises(ConfigError, match=r"^data: the test examples have users, but the training"):
        make_dataset("own", without, "data")


@pytest.mark.parametrize(
    ("users", "said"),
    [
        (["eve", "zoe", "eve", "bob", "eve"], "test example 3 is of user 'bob', who has no train"),
        (["eve", "zoe"], "users_test has 2 entries for 5 test examples"),
        ([1.5] * 5, r"users_test\[0\] is 1.5, a float"),
        ((np.ones((5, 3)), np.arange(5)), "users_test has rows of different shapes; give one"),
        (np.ma.masked_equal([1, 2, 3, 1, 2], 3), r"users_test\[2\] is masked"),
    ],
)
def test_wrong_users_of_test_examples_are_named(users, said):
    content = {**FORMS["users_test"](), "users_test": users}
    with pytest.raises(ConfigError, match=said):
        make_dataset("own", content, "data")


def test_new_users_in_the_test_half_are_no_clients(caplog):
    caplog.set_level("INFO", "raysim")
    content = {**FORMS["users_test"](), "users_test": ["bob", "dan", "bob", "fay", "gil"]}
    dataset = make_dataset("own", content, "data")
    test_users, training_users = "'bob', 'dan', 'fay', ...", "'adam', 'eve', 'zoe'"
    assert f"no user of the test examples ({test_users}) has training" in caplog.text
    assert f"those are of {training_users}. " in caplog.text
    assert "partition.test=natural" in caplog.text
    assert split(dataset, test=None).test is None
    said = rf"partition\.test\.natural: .*\({test_users}\) have no training .*\({training_users}\)"
    with pytest.raises(ConfigError, match=said):
        split(dataset)


# -- one table of images ---------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path):
    """Write images and a table of them; returns the table's path."""
    for k in range(12):
        Image.fromarray(RNG.integers(0, 256, (6, 6), dtype=np.uint8)).save(tmp_path / f"{k}.png")

    def write(rows, header=("user", "image", "class", "split"), name="images.csv"):
        with open(tmp_path / name, "w", newline="") as file:
            csv.writer(file).writerows([header, *rows])
        return tmp_path / name

    return write


ROWS = [
    *[(user, f"{k}.png", "ab"[k % 2], "train") for k, user in enumerate(USERS)],
    *[(user, f"{7 + k}.png", "ab"[k % 2], "test") for k, user in enumerate(TEST_USERS)],
]


def users(path: Path) -> Dataset:
    data = {"name": "users", "path": str(path)}
    return load_dataset(explain.validate({"data": data, "rounds": 1, "algorithm": "fedavg"}).data)


@pytest.mark.parametrize("by_folder", [False, True])
def test_one_table_with_a_column_split(table, by_folder):
    path = table(ROWS)
    dataset = users(path.parent if by_folder else path)
    assert own_tests(dataset, split(dataset)) == OWN
    assert dataset.x.shape == (7, 1, 6, 6) and dataset.y_test.tolist() == [0, 1, 0, 1, 0]


def test_a_folder_may_have_a_dot_in_its_name(table, tmp_path):
    path = table(ROWS)
    folder = path.parent.with_name("photos.v2")
    path.parent.rename(folder)
    assert users(folder).name == "photos.v2"
    assert users(folder / path.name).name == "images"


def test_two_tables_may_name_the_users_of_test_images(table):
    table([row[:3] for row in ROWS[:7]], ("user", "image", "class"), "train.csv")
    path = table([row[1:3] for row in ROWS[7:]], ("image", "class"), "test.csv")
    assert users(path.parent).test_groups is None
    table([row[:3] for row in ROWS[7:]], ("user", "image", "class"), "test.csv")
    dataset = users(path.parent)
    assert own_tests(dataset, split(dataset)) == OWN


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [*ROWS[:7], ("eve", "9.png", "a", "val")],
            r"images\.csv:9: split is 'val'; it is train o",
        ),
        (ROWS[:7], r"images\.csv: names no images of the split test"),
        ([("", "1.png", "a", "train"), *ROWS], r"images\.csv:2: no user"),
        ([*ROWS, ("", "1.png", "a", "test")], r"images\.csv:14: no user, but other test images ha"),
        (
            [*ROWS, ("bob", "1.png", "a", "test")],
            r"images\.csv:14: the image is of user 'bob', who",
        ),
        ([(user, image, name, "") for user, image, name, _ in ROWS], r"images\.csv:2: no split"),
    ],
)
def test_mistakes_in_one_table_name_its_line(table, rows, said):
    with pytest.raises(ConfigError, match=said):
        users(table(rows))


# -- LEAF and PFLlib -------------------------------------------------------------------------------


def leaf(folder: Path, half: str, clients: dict[str, Any], name: str = "all_data_0.json") -> None:
    """Write a file as LEAF's scripts do."""
    (folder / half).mkdir(parents=True, exist_ok=True)
    counts = [len(examples["y"]) for examples in clients.values()]
    content = {"users": list(clients), "num_samples": counts, "user_data": clients}
    (folder / half / name).write_text(json.dumps(content))


def pfllib(folder: Path, half: str, clients: dict[int, Any]) -> None:
    """Write files as PFLlib's scripts do."""
    (folder / half).mkdir(parents=True, exist_ok=True)
    for client, examples in clients.items():
        with open(folder / half / f"{client}.npz", "wb") as file:
            np.savez_compressed(file, data=examples)  # an object array of a mapping


def load(name: str, folder: Path, **keys: Any) -> Dataset:
    data = {"name": name, "path": str(folder), **keys}
    return load_dataset(explain.validate({"data": data, "rounds": 1, "algorithm": "fedavg"}).data)


def numbers(n: int, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {"x": RNG.normal(size=(n, *shape)).astype(np.float32), "y": RNG.integers(0, 3, n)}


def test_leafs_files(tmp_path):
    train = {f"f{k}": numbers(4 + k, (9,)) for k in (2, 0, 1)}
    test = {f"f{k}": numbers(1 + k, (9,)) for k in (0, 1, 2)}

    def plain(clients):
        return {u: {key: e[key].tolist() for key in e} for u, e in clients.items()}

    leaf(tmp_path, "train", plain({"f2": train["f2"]}), "all_data_0.json")
    leaf(tmp_path, "train", plain({u: train[u] for u in ("f0", "f1")}), "all_data_1.json")
    leaf(tmp_path, "test", plain(test))
    dataset = load("leaf", tmp_path)
    clients = split(dataset)
    assert dataset.group_names == ("f0", "f1", "f2") and clients.test is not None
    for k, user in enumerate(dataset.group_names):
        assert np.array_equal(dataset.x[clients.client(k)], train[user]["x"])
        assert np.array_equal(dataset.y[clients.client(k)], train[user]["y"])
        assert np.array_equal(dataset.x_test[clients.test.client(k)], test[user]["x"])
        assert np.array_equal(dataset.y_test[clients.test.client(k)], test[user]["y"])
    images = load("leaf", tmp_path, size=3)
    assert np.array_equal(images.x, dataset.x.reshape(-1, 1, 3, 3))
    with pytest.raises(ConfigError, match=r"data\.size: 4 is for inputs of 16 numbers"):
        load("leaf", tmp_path, size=4)


def test_leafs_shakespeare(tmp_path):
    leaf(tmp_path, "train", {"PUCK": {"x": ["Lord, wh", "ord, wha"], "y": ["a", "t"]}, "BOT": {"x": ["~ome ass"], "y": ["}"]}})  # fmt: skip
    leaf(tmp_path, "test", {"PUCK": {"x": ["what foo"], "y": ["l"]}})
    dataset = load("leaf", tmp_path)
    other = len(LEAF_LETTERS)
    assert other == 80 and dataset.n_classes == 81  # "~" is none of LEAF's characters

    def text(row):
        return "".join([*LEAF_LETTERS, "~"][k] for k in row)

    assert [text(row) for row in dataset.x] == ["Lord, wh", "ord, wha", "~ome ass"]
    assert text(dataset.y) == "at}" and text(dataset.x_test[0]) == "what foo"
    assert text(dataset.y_test) == "l"
    assert own_tests(dataset, split(dataset)) == {"BOT": [], "PUCK": [0]}


def test_pfllibs_files(tmp_path):
    train = {k: numbers(3 + k % 4, (1, 5, 5)) for k in range(11)}
    test = {k: numbers(1 + k % 2, (1, 5, 5)) for k in range(11)}
    pfllib(tmp_path, "train", train)
    pfllib(tmp_path, "test", test)
    (tmp_path / "config.json").write_text(json.dumps({"num_clients": 11, "num_classes": 5}))
    dataset = load("pfllib", tmp_path)
    clients = split(dataset)
    assert dataset.n_classes == 5 and len(clients) == 11 and clients.test is not None
    for k in range(11):  # client 10 is the last one, not the one after client 1
        assert np.array_equal(dataset.x[clients.client(k)], train[k]["x"])
        assert np.array_equal(dataset.y_test[clients.test.client(k)], test[k]["y"])


def test_a_client_without_a_test_is_named(tmp_path, caplog):
    pfllib(tmp_path, "train", {k: numbers(4, (2,)) for k in range(3)})
    pfllib(tmp_path, "test", {k: numbers(2, (2,)) for k in (0, 2)})
    dataset = load("pfllib", tmp_path)
    assert "1 of 3 clients have no test examples, such as client 1" in caplog.text
    assert [len(own) for own in own_tests(dataset, split(dataset)).values()] == [2, 0, 2]


@pytest.mark.parametrize(
    ("train", "test", "missing"),
    [([0, 1], [0, 1, 2], 2), ([1, 2], [0, 1, 2], 0), ([7, 9], [8, 9], 8)],
)
def test_a_client_of_pfllib_without_a_training_file_is_named(tmp_path, train, test, missing):
    pfllib(tmp_path, "train", {k: numbers(4, (2,)) for k in train})
    pfllib(tmp_path, "test", {k: numbers(2, (2,)) for k in test})
    with pytest.raises(ConfigError, match=rf"is of user '{missing}', who has no training examples"):
        load("pfllib", tmp_path)


def test_some_of_pfllibs_clients_may_be_given(tmp_path):
    for half in ("train", "test"):
        pfllib(tmp_path, half, {k: numbers(4, (2,)) for k in (3, 7)})
    assert len(split(load("pfllib", tmp_path))) == 2


def test_pfllibs_files_may_hold_plain_arrays(tmp_path):
    for half in ("train", "test"):
        (tmp_path / half).mkdir()
        for k in range(2):
            np.savez(tmp_path / half / f"train{k}.npz", **numbers(4, (3,)))
    assert load("pfllib", tmp_path).x.shape == (8, 3)


class Runs:
    """Pickled, it would call a function when it is read."""

    def __reduce__(self):
        return Path.touch, (Path("was_run"),)


def test_a_pickle_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pfllib(tmp_path, "test", {0: numbers(3, (2,))})
    pfllib(tmp_path, "train", {0: {"x": Runs(), "y": np.zeros(3)}})
    with pytest.raises(ConfigError, match=r"0\.npz is no file of PFLlib: UnpicklingError: it holds a pathlib\.\w*Path") as caught:  # fmt: skip
        load("pfllib", tmp_path)
    assert not Path("was_run").exists() and caught.value.exit_code == 2


def damage(folder: Path, file: str, content: bytes | None) -> None:
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("train/0.npz", b"", r"train/0\.npz is no file of PFLlib"),
        ("train/0.npz", b"PK\x03\x04 torn", r"train/0\.npz is no file of PFLlib"),
        ("train/0.npz", pickle.dumps({"x": [1], "y": [1]}), r"train/0\.npz is no file of PFLlib"),
        ("test/0.npz", None, r"/test has no \.npz files"),
        ("train/0.npz", None, r"/train has no \.npz files"),
    ],
)
def test_damaged_files_of_pfllib_are_named(tmp_path, file, content, said):
    for half in ("train", "test"):
        pfllib(tmp_path, half, {0: numbers(3, (2,))})
    damage(tmp_path, file, content)
    with pytest.raises(ConfigError, match=said):
        load("pfllib", tmp_path)


GOOD = {"x": [[1.0, 2.0]], "y": [0]}


@pytest.mark.parametrize(
    ("clients", "said"),
    [
        ({"a": {"x": [[1.0], [1.0, 2.0]], "y": [0, 1]}}, r"client 'a' has rows of different leng"),
        ({"a": {"x": ["000001.jpg"], "y": [1]}}, r"client 'a' has texts as x; those of Shakesp"),
        ({"a": {"x": [["12", "a tweet"]], "y": ["4"]}}, r"client 'a' has texts as x"),
        ({"a": {"x": ["ab", "c"], "y": ["c", "d"]}}, r"the texts have 1 to 2 characters"),
        ({"a": {"x": [[1.0, 2.0]], "y": [0, 1]}}, r"client 'a' has x of shape \[1, 2\] and y of"),
        ({"a": GOOD, "b": {"x": [[1.0]], "y": [0]}}, r"x differs between clients: shapes \[1\] an"),
        ({"a": [1]}, r"client 'a' has no x and y"),
        ({"a": {"x": [], "y": []}}, r"have no examples"),
    ],
)
def test_files_of_leaf_that_cannot_be_used_are_named(tmp_path, clients, said):
    (tmp_path / "train").mkdir()
    (tmp_path / "train/0.json").write_text(json.dumps({"users": [], "user_data": clients}))
    leaf(tmp_path, "test", {"a": GOOD})
    with pytest.raises(ConfigError, match=said):
        load("leaf", tmp_path)


@pytest.mark.parametrize("present", [None, "", "train", "test"])
@pytest.mark.parametrize(("name", "layout"), [("leaf", r"\.json files"), ("pfllib", r"N\.npz")])
def test_a_missing_folder_is_named_with_the_layout(tmp_path, name, layout, present):
    folder = tmp_path / "mine"
    if present is not None:
        (folder / present).mkdir(parents=True)
    missing = {None: "mine", "train": "mine/test"}.get(present, "mine/train")
    said = rf"^data\.path: there is no folder {tmp_path}/{missing}; .* train/ and test/, .*{layout}"
    with pytest.raises(ConfigError, match=said):
        load(name, folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, '{"users": []}'])
def test_files_that_are_not_leafs_are_named(tmp_path, text):
    leaf(tmp_path, "test", {"a": GOOD})
    (tmp_path / "train").mkdir()
    (tmp_path / "train/0.json").write_text(text)
    with pytest.raises(ConfigError, match=r"train/0\.json is (not JSON|no file of LEAF)"):
        load("leaf", tmp_path)
