"""Data, nets and rules that are given from Python, as objects."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset

import raysim
from raysim.config.objects import python_objects
from raysim.data.own.stored import stored_arrays
from raysim.errors import ConfigError
from raysim.models import build
from raysim.prepare.resolve import prepare
from raysim.rules import Algorithm
from raysim.runs.python_inputs import named_inputs

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(40, 4)).astype(np.float32), np.arange(40) % 2
ARRAYS = (X[:30], Y[:30], X[30:], Y[30:])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of data sets."""
    monkeypatch.setenv("RAYSIM_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(python_objects, "_OBJECTS", {})
    return tmp_path / "data"


@pytest.fixture
def config(base: dict[str, Any]) -> dict[str, Any]:
    return {
        **base,
        "rounds": 2,
        "data": ARRAYS,
        "model": {"name": "logistic"},
        "algorithm": "fedavg",
        "partition": {"clients": 4},
        "local": {"steps": 2, "batch_size": 4, "lr": 0.1},
        "schedule": {"cohort": 2},
    }


@pytest.fixture
def another_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forgets the objects of this process, as a new one would."""
    return lambda: monkeypatch.setattr(python_objects, "_OBJECTS", {})


def bigger(factor: float) -> type:
    @dataclass(frozen=True)
    class Bigger(raysim.ClientRule):
        """Longer steps."""

        power: float = 1.0

        def direction(self, shared, state, batch, task):
            return factor**self.power * task.grad(state["w"], batch)

    return Bigger


# -- data ------------------------------------------------------------------------------------------


def test_arrays_train_resume_in_the_shell_and_are_stored_once(config, cache, tmp_path, raysim_):
    whole = raysim.run(config)
    stopped = raysim.run(config, {"rounds": 1, "run_dir": str(tmp_path / "b")})
    files = list(cache.rglob("*.npz"))
    assert len(files) == 1 and files[0].parent.name == "from_python"
    done = raysim.resume(stopped.run_dir, {"rounds": 2})
    assert done.digest == whole.digest
    assert len(list(cache.rglob("*"))) == 2


def test_the_same_arrays_are_stored_by_several_at_once(cache):
    """As by scripts that start together: none takes away what another one is writing."""
    arrays = {"x": np.arange(300_000.0)}
    for repetition in range(5):
        arrays["y"] = np.array([repetition])
        with ThreadPoolExecutor(8) as pool:
            (path,) = set(pool.map(lambda _: stored_arrays("data", arrays), range(8)))
        assert np.array_equal(np.load(path)["x"], arrays["x"])
    assert len([path for path in cache.rglob("*") if path.is_file()]) == 5


def test_paths_and_numbers_of_numpy_are_plain_values():
    inputs = {"run_dir": Path("runs/a"), "rounds": np.int64(3), "client_state": {"dir": Path("b")}}
    plain = {"run_dir": "runs/a", "rounds": 3, "client_state": {"dir": "b"}}
    assert named_inputs(inputs) == plain


def test_forms_of_the_same_examples_are_the_same_run(config):
    x, y, x_test, y_test = ARRAYS
    tensors = [torch.tensor(a) for a in ARRAYS]
    sets = [torch.utils.data.TensorDataset(*tensors[k : k + 2]) for k in (0, 2)]
    forms = [
        ARRAYS,
        ((x, y), (x_test, y_test)),
        {"x": x, "y": y, "x_test": x_test, "y_test": y_test},
        {"train": (x, y), "test": (x_test, y_test)},
        tensors,
        tuple(sets),
    ]
    prints = {prepare(named_inputs({**config, "data": form})).config.fingerprint for form in forms}
    assert len(prints) == 1
    other = (x + 1, y, x_test, y_test)
    assert prepare(named_inputs({**config, "data": other})).config.fingerprint not in prints


def test_examples_may_be_an_override_of_a_file(here, config):
    (here / "c.yaml").write_text(
        "data: digits\nmodel: logistic\nalgorithm: fedavg\nrounds: 1\npartition: {clients: 4}\n"
        "schedule: {cohort: 2}\nresources: {executor: inline}\nevaluate: {every: 0}\n"
    )
    keys = {k: config[k] for k in ("run_dir", "tracking")}
    assert raysim.run("c.yaml", data=ARRAYS, **keys).parameters.shape == (4 * 2 + 2,)


def test_users_of_examples_from_python_are_clients(config):
    content = {"train": ARRAYS[:2], "test": ARRAYS[2:], "users": ["b", "a", "c"] * 10}
    plan = prepare(named_inputs({**config, "data": content, "partition": "natural"}))
    assert plan.dataset.group_names == ("a", "b", "c")
    assert plan.clients.client(0).tolist() == list(range(1, 30, 3))


@pytest.mark.parametrize("users", [[10, 2, 9] * 10, ["10", "2", "9"] * 10])
def test_users_keep_the_order_of_their_numbers_or_words(config, users):
    """Whatever the examples come by: a mapping, or an .npz file with the same users."""
    content = {"train": ARRAYS[:2], "test": ARRAYS[2:], "users": users}
    by_file = Path(config["run_dir"]).with_name("users.npz")
    names = ("x", "y", "x_test", "y_test")
    np.savez(by_file, **dict(zip(names, ARRAYS, strict=True)), user=users)
    plans = [
        prepare(named_inputs({**config, "data": data, "partition": "natural"}))
        for data in (content, {"name": "arrays", "path": str(by_file)})
    ]
    names = [plan.dataset.group_names for plan in plans]
    assert names[0] == names[1] == tuple(map(str, sorted(set(users))))
    assert [plan.clients.client(0).tolist() for plan in plans] == [
        list(range(users.index(min(users)), 30, 3))
    ] * 2


def test_a_lost_or_changed_file_of_examples_is_named(config, cache):
    stopped = raysim.run(config, rounds=1)
    (file,) = cache.rglob("*.npz")
    np.savez(file, x=X + 1, y=Y, x_test=X, y_test=Y)
    with pytest.raises(ConfigError, match=rf"data.path: {file} has changed since this run began"):
        raysim.resume(stopped.run_dir, {"rounds": 2})
    file.unlink()
    with pytest.raises(ConfigError, match=rf"data.path: {file} cannot be read"):
        raysim.resume(stopped.run_dir, {"rounds": 2})


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("data", (X, Y), "data: x and y have no test half"),
        ("data", {"x": X, "y": Y}, "data: the mapping has no x_test"),
        ("data", 3, "data: expected x, y, x_test, y_test"),
        ("data", {0: (X, Y), 1: (X, Y)}, "data: these are 2 sets of examples, as if each client"),
        ("data", {0: {"x": X, "y": Y}}, "data: these are 1 sets of examples, as if each client"),
        ("partition", [{0, 1}, {2}], r"found a set; give sorted\(\) of it"),
        ("partition", [Subset(range(4), [0, 1])], "found a Subset; give its attribute indices"),
        ("partition", np.zeros(4, int), "give it as users of the data, with partition=natural"),
        ("local", {"optimizer": torch.optim.Adam}, "local.optimizer: a type is not possible"),
        (
            "local",
            {"lr": torch.optim.lr_scheduler.StepLR},
            "local.lr: a scheduler of PyTorch changes .* a function of the round",
        ),
        ("evaluate", {"metrics": [dict]}, "neither a name, a function of outputs and targets, nor"),
        ("evaluate", {"metrics": [lambda outputs, y: 1.0]}, "is a lambda, which has no name"),
        ("model", nn.Linear(4, 5), r"\[2, 5\].*give their number with the data, classes=5"),
        ("model", 3, "model: a int is neither a torch.nn.Module nor a function"),
        ("client", nn.Linear(2, 2), "client: a Linear is not a rule"),
        ("algorithm", dict, "algorithm: a type is not a rule"),
        ("server", bigger(1.0), "server.name: '.*Bigger.*' is not a ServerRule"),
        ("model", lambda: 3, "model.name: '.*lambda.*' is not a torch.nn.Module"),
    ],
)
def test_what_is_no_such_object_is_refused(config, section, value, message):
    with pytest.raises(ConfigError, match=message):
        raysim.run({**config, section: value})


def test_names_of_more_classes_than_the_net_has_are_explained(config):
    data = {"train": ARRAYS[:2], "test": ARRAYS[2:], "classes": 4}
    with pytest.raises(ConfigError, match=r"\[2, 4\]; .* the 4 that they name, .*, classes=2"):
        raysim.run({**config, "data": data, "model": nn.Linear(4, 2)})


# -- nets ------------------------------------------------------------------------------------------


def net(bias: float) -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 2))
    for p in made.parameters():
        p.data.fill_(bias)
    return made


def test_a_net_is_trained_from_its_own_weights_and_left_as_it_is(config, another_process):
    given = net(0.25)
    assert (prepare(named_inputs({**config, "model": given})).initial[0] == 0.25).all()
    done = raysim.run(config, model=given)
    assert all((p == 0.25).all() for p in given.parameters())
    stopped = raysim.run(config, model=given, rounds=1, run_dir=config["run_dir"] + "-b")
    another_process()
    with pytest.raises(
        ConfigError, match=r"^model: was given as an object .* \{'model': Sequential\}"
    ):
        raysim.resume(stopped.run_dir, {"rounds": 2})
    named_inputs({"model": given})
    with pytest.raises(ConfigError, match=r"^model: .* its weights, attributes or arguments are"):
        raysim.resume(stopped.run_dir, {"rounds": 2, "model": net(0.5)})
    another_process()
    assert raysim.resume(stopped.run_dir, {"rounds": 2, "model": net(0.25)}).digest == done.digest


def test_a_function_that_makes_nets_gets_the_shape_and_its_own_keys(config):
    def make(shape, classes, width: int = 3):
        return nn.Sequential(nn.Linear(shape[0], width), nn.Linear(width, classes))

    plan = prepare(named_inputs({**config, "model": {"name": make, "width": 5}}))
    assert plan.problem.size == (4 + 1) * 5 + (5 + 1) * 2
    assert (plan.config.model.parameters, prepare(plan.config.model_dump()).problem.size) == (
        {"width": 5},
        plan.problem.size,
    )
    other = prepare(named_inputs({**config, "model": {"name": make, "width": 5}, "seed": 1}))
    assert not torch.equal(other.initial[0], plan.initial[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made[0].weight.data.add_(1),
        lambda made: made[0].weight.requires_grad_(False),
        lambda made: made.append(nn.ReLU()),
        lambda made: made.append(nn.Dropout(0.1)),
        lambda made: setattr(made[0], "scale", 2.0),
    ],
)
def test_each_part_of_a_net_is_part_of_its_name(change):
    changed = net(0.5)
    assert python_objects.reference(net(0.5)) == python_objects.reference(changed)
    change(changed)
    assert python_objects.reference(net(0.5)) != python_objects.reference(changed)


# -- rules -----------------------------------------------------------------------------------------


def test_a_rule_and_its_values_are_part_of_the_run(config, another_process, here):
    rule = bigger(2.0)
    done = raysim.run(config, algorithm=rule(power=2.0))
    assert not torch.equal(done.parameters, raysim.run(config, run_dir=None).parameters)
    by_parts = {**config, "algorithm": None, "client": rule(power=2.0), "server": "fedavg"}
    del by_parts["algorithm"]
    stopped = raysim.run(by_parts, rounds=1, run_dir=config["run_dir"] + "-b")
    another_process()
    with pytest.raises(ConfigError, match=r"^client: was given as an object .*'client': Bigger"):
        raysim.resume(stopped.run_dir, {"rounds": 2})
    with pytest.raises(ConfigError, match="would change the result"):
        raysim.resume(stopped.run_dir, {"rounds": 2, "client.power": 3.0, "client.name": rule})
    again = raysim.resume(stopped.run_dir, {"rounds": 2, "client": bigger(2.0)(power=2.0)})
    assert again.digest == done.digest


def test_the_closure_of_a_rule_is_part_of_its_name():
    names = {python_objects.reference(bigger(factor)) for factor in (2.0, 2.0, 3.0)}
    assert len(names) == 2


def test_shipped_rules_and_algorithms_keep_their_names(config):
    from raysim.algorithms.fedprox import FedProxClient

    by_name = {**config, "client": {"name": "fedprox", "mu": 0.3}, "server": "fedavg"}
    as_object = {**config, "client": FedProxClient(mu=0.3), "server": "fedavg"}
    for given in (by_name, as_object):
        del given["algorithm"]
    prints = {prepare(named_inputs(c)).config.fingerprint for c in (by_name, as_object)}
    assert len(prints) == 1


def test_an_algorithm_of_ones_own(config):
    from raysim.algorithms.fedavg import FedAvgServer

    mine = Algorithm("mine", bigger(2.0), FedAvgServer, "", settings={"power": 3.0})
    plan = prepare(named_inputs({**config, "algorithm": mine}))
    assert plan.client.power == 3.0 and type(plan.server) is FedAvgServer
    # A written-out configuration means the same.
    assert (
        prepare(plan.config.model_dump(mode="json")).config.fingerprint == plan.config.fingerprint
    )


def test_a_class_of_an_imported_file_is_named_by_its_path(
    config, here, monkeypatch, another_process
):
    (here / "own_rule_of_test.py").write_text(
        "from dataclasses import dataclass\nfrom raysim import ClientRule\n\n"
        "@dataclass(frozen=True)\nclass Mine(ClientRule):\n    power: float = 1.0\n"
    )
    monkeypatch.syspath_prepend(here)
    import own_rule_of_test  # pyright: ignore[reportMissingImports]

    stopped = raysim.run(config, algorithm=own_rule_of_test.Mine, rounds=1)
    assert stopped.config.algorithm.name == f"{here}/own_rule_of_test.py:Mine"
    another_process()
    assert raysim.resume(stopped.run_dir, {"rounds": 2}).rounds == 2


SCRIPT = """
from raysim.config.objects.python_objects import reference

SCALE = 0.5
WEIGHTS = {"b": [1, 2], "a": {3.0, 4.0}}

def scaled(x):
    return SCALE * x

class Mine:
    def step(self, x):
        return [scaled(WEIGHTS["b"][0]) for _ in range(x)]

class Other:
    pass

print(reference(Mine))
"""


def test_an_object_of_a_script_has_the_same_name_in_the_next_process(here):
    """Hashes of texts differ between processes, and so does the order of sets."""

    def script(text: str) -> str:
        (here / "study.py").write_text(text)
        done = subprocess.run([sys.executable, "study.py"], capture_output=True, text=True)
        return done.stdout.strip()

    name = script(SCRIPT)
    assert name.startswith("python:Mine-")
    assert script(SCRIPT.replace("class Other", "# moved\n\nclass Another")) == name
    for old, new in (("= 0.5", "= 1"), ("* x", "+ x"), ("3.0", "5.0"), ("range(x)", "range(2)")):
        assert script(SCRIPT.replace(old, new)) not in (name, "")


def test_a_plan_brings_its_objects_to_another_process(config, another_process):
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    plan = prepare(named_inputs({**config, "model": net(0.5), "algorithm": bigger(2.0)}))
    content = cloudpickle.dumps(plan)
    another_process()
    loaded = pickle.loads(content)
    made = build.make_net(loaded.config, (4,), 2)
    assert all((p == 0.5).all() for p in made.parameters())
    assert loaded.client.power == 1.0 and loaded.label == plan.label


@pytest.mark.ray
@pytest.mark.usefixtures("recycled_actors")
def test_objects_give_the_same_bits_on_two_actors_and_after_resume(config):
    """The class of the rule and the net's forward pass are defined in no file that an actor has."""

    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x):
            return self.linear(x) / 2

    with torch.random.fork_rng():
        torch.manual_seed(0)
        given = {**config, "model": Halved(), "algorithm": bigger(2.0)}
    inline = raysim.run(given)
    on_actors = {"resources": {"executor": "ray", "actors": 2, "threads": 1}}
    stopped = raysim.run(given, {**on_actors, "rounds": 1, "run_dir": config["run_dir"] + "-ray"})
    objects = {key: given[key] for key in ("model", "algorithm")}
    resumed = raysim.resume(stopped.run_dir, {"rounds": 2, **objects})
    assert resumed.digest == inline.digest


def test_a_net_that_lacks_an_argument_says_how_to_give_it(config):
    class Net(nn.Module):
        def __init__(self, n_in, *, n_out, hidden=3):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(n_in, hidden), nn.Linear(hidden, n_out))

        def forward(self, x):
            return self.layers(x)

    with pytest.raises(ConfigError, match=r"^model\.n_in: n_in, n_out have no default") as caught:
        raysim.run({**config, "model": Net}, tracking=False)
    assert "{'name': Net, 'n_in': ..., 'n_out': ...}" in str(caught.value)
    given = {"name": Net, "n_in": 4, "n_out": 2}
    assert raysim.run({**config, "model": given}, tracking=False).parameters.shape == (23,)
