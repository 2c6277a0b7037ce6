"""Nets and losses of a script that are given again, to the next run, to resume, to a new process."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from support.programs import program

import raysim
from raysim.config.objects import python_objects
from raysim.errors import ConfigError
from raysim.runs.artifacts.export import export

X = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
Y = np.arange(40) % 3

Script = dict[str, Any]
"""The variables of a script by name."""


@pytest.fixture
def new_process(source, monkeypatch) -> Callable[..., Script]:
    """Return a function that executes the script, edited, where no object is known yet."""

    def execute(old: str = "", new: str = "") -> Script:
        text = program("counting_script")
        assert old in text
        path = source(f"counting_script{len(new)}", text.replace(old, new))
        monkeypatch.setattr(python_objects, "_OBJECTS", weakref.WeakValueDictionary())
        script: Script = {"__name__": "__main__"}
        exec(compile(Path(path).read_text(), path, "exec"), script)
        return script

    return execute


@pytest.fixture
def train(base, tmp_path) -> Callable[..., raysim.RunResult]:
    """Return a function that trains a script's net with its loss, in a new folder."""

    def run(script: Script, **keys: Any) -> raysim.RunResult:
        config = {
            **base, "data": (X[:30], Y[:30], X[30:], Y[30:]), "algorithm": "fedavg", "rounds": 1,
            "partition": {"clients": 3}, "schedule": {"cohort": 2},
            "run_dir": str(tmp_path / f"run{len(list(tmp_path.iterdir()))}"),
            "model": script["Net"], "task": script["loss"],
        }  # fmt: skip
        return raysim.run(config, tracking=False, **keys)

    return run


def names(result: raysim.RunResult) -> tuple[str | None, str | None]:
    return result.config.model.name, result.config.task and result.config.task.name


def test_what_runs_have_counted_and_remembered_makes_no_other_object(new_process, train):
    script = new_process()
    first = train(script)
    first.predict(X)
    second = train(script, seed=1)
    assert script["calls"] > 0 and script["Net"].passes > 0 and script["meter"] and script["known"]
    assert names(first) == names(second)
    resumed = raysim.resume(
        second.run_dir, {"rounds": 2, "model": script["Net"], "task": script["loss"]}
    )
    again = new_process()
    whole = train(again, seed=1, rounds=2)
    assert names(whole) == names(first) and whole.digest == resumed.digest
    raysim.resume(whole.run_dir, {"rounds": 3, "model": again["Net"], "task": again["loss"]})


def test_rules_that_count_with_the_loss_are_given_again(new_process, train):
    script = new_process()
    first, second = [train(script, algorithm=script["pair"], seed=seed) for seed in (0, 1)]
    for section in ("algorithm", "client", "server", "task"):
        name = getattr(first.config, section).name
        assert name.startswith("python:") and getattr(second.config, section).name == name
    again = new_process()
    given = {"model": again["Net"], "task": again["loss"], "algorithm": again["pair"]}
    resumed = raysim.resume(second.run_dir, {"rounds": 2, **given})
    assert resumed.digest == train(script, algorithm=script["pair"], seed=1, rounds=2).digest


def test_a_loss_that_remembers_in_itself_stays_the_same(new_process, train):
    script = new_process()
    runs = [train(script, task=script["weighted"], seed=seed) for seed in (0, 1, 2)]
    assert vars(script["weighted"]) and len({names(run) for run in runs}) == 1
    given = {"model": script["Net"], "task": script["weighted"]}
    assert raysim.resume(runs[0].run_dir, {"rounds": 2, **given}).rounds == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda script: script.update(ALPHA=0.5),
        lambda script: script.update(calls=-1),
        lambda script: script["known"].update({7: 1.0}),
        lambda script: setattr(script["Net"], "passes", -1),
        lambda script: setattr(script["Net"], "width", 9),
    ],
    ids=["constant", "counter", "table", "class-counter", "class-attribute"],
)
def test_what_the_script_itself_has_set_after_a_run_does(change, new_process, train):
    script = new_process()
    first = train(script)
    change(script)
    changed = train(script)
    assert names(first) != names(changed) == names(train(script))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ALPHA = 1.0", "ALPHA = 2.0", "'scale' uses another value of ALPHA"),
        ("known = {}", "known = {1: 1.0}", "'loss' uses another value of known"),
        ("count = [0]", "count = [9]", "'counted.inner' uses another value of count"),
        ("passes = 0", "passes = 5", "'Net' uses another value of passes"),
        ("ALPHA / n", "ALPHA / n / n", "the source of 'scale' is another one"),
        ("return self", "return 2 * self", "the source of 'Net.forward' is another one"),
    ],
)
def test_a_refusal_names_what_is_not_as_it_was(old, new, message, new_process, train):
    run_dir = train(new_process()).run_dir
    script = new_process(old, new)
    given = {"model": script["Net"], "task": script["loss"]}
    for again in (lambda: raysim.resume(run_dir, {"rounds": 2, **given}),
                  lambda: raysim.fork(run_dir, {"rounds": 2, **given}),
                  lambda: raysim.load(run_dir, **given).net()):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{message}; give it as it was"):
            again()


def test_other_weights_of_a_net_are_named(new_process, train):
    script = new_process()
    kind, script["Net"] = script["Net"], script["Net"]()
    run_dir = train(script).run_dir
    new_process()
    with pytest.raises(ConfigError, match="its weights, attributes or arguments are others"):
        raysim.load(run_dir, model=kind(), task=script["loss"]).net()


def halving(t: int) -> float:
    return 0.1 * 0.5**t


def hits(outputs, y) -> float:
    return float((outputs.argmax(1) == y).float().mean())


@pytest.fixture
def stopped(new_process, train) -> tuple[Path, dict[str, Any]]:
    """The folder of a stopped run of four objects, and the names in a new process of its script."""
    keys = {"rounds": 2, "checkpoint.every": 1, "evaluate.metrics": ["accuracy", local_copy(hits)]}
    keys["local.lr"] = local_copy(halving)
    first = train(new_process(), overrides=keys, progress=lambda record: True)
    return first.run_dir, {"raysim": raysim, "halving": keys["local.lr"], **new_process()}


def local_copy(function: Any) -> Any:
    """Return a function as a script would define it, which no module has."""
    return types.FunctionType(function.__code__, globals(), function.__name__)


@pytest.mark.parametrize("way", ["resume", "fork"])
def test_all_missing_objects_are_named_with_a_call_that_continues(stopped, way, here):
    folder, script = stopped
    script["hits"] = local_copy(hits)
    with pytest.raises(ConfigError) as caught:
        getattr(raysim, way)(folder)
    message = str(caught.value)
    assert message.startswith("task, model, local.lr, evaluate.metrics: were given as objects")
    call = f"raysim.{way}({str(folder)!r}, {{'task': loss, 'model': Net, 'local.lr': halving, "
    assert call in message
    more = ", rounds=3)" if way == "fork" else ")"
    done = eval(message[message.index("raysim.") :].removesuffix(")") + more, script)
    assert done.rounds == (3 if way == "fork" else 2)


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_result_asks_for_what_its_net_needs_only(stopped, is_finished):
    folder, script = stopped
    if is_finished:
        given = {"local.lr": script["halving"], "evaluate.metrics": ["accuracy", local_copy(hits)]}
        raysim.resume(folder, {**given, "model": script["Net"], "task": script["loss"]})
        python_objects._OBJECTS.clear()
    with pytest.raises(ConfigError, match=r"^task, model: were given as objects") as caught:
        raysim.load(folder).net()
    call = str(caught.value).partition("; in Python, ")[2].partition(" gives the net")[0]
    with pytest.raises(ConfigError, match=r"^task, model: ") as caught:
        export(folder)
    assert f"in Python, {call} gives the net" in str(caught.value)
    expected = raysim.load(folder).state_dict if is_finished else None
    state = eval(call, script).state_dict()
    if expected is not None:
        assert all(torch.equal(expected[name], tensor) for name, tensor in state.items())
        assert "state_dict its parameters" in str(caught.value)


def test_another_class_of_a_name_is_refused_by_its_source(new_process, train):
    """Also in the process that still has the first one."""
    first, edited = new_process(), new_process("return self", "return 2 * self")
    folder = train(first).run_dir
    with pytest.raises(ConfigError, match=r"^model: .*: the source of 'Net.forward' is another on"):
        raysim.resume(folder, {"rounds": 2, "model": edited["Net"]})
    with pytest.raises(ConfigError, match=r"^model.name: would change .*; start a new run instead"):
        raysim.resume(folder, {"rounds": 2, "model": "logistic"})


def test_a_hash_that_a_library_keeps_is_another_in_each_process(new_process, train):
    """As in the `GenerationConfig` of a language model."""
    script = new_process()
    net = script["Net"]()
    net.settings = types.SimpleNamespace(width=3, _object_hash=hash("settings") | 2**40)
    folder = train({**script, "Net": net}).run_dir
    new_process()
    net.settings = types.SimpleNamespace(width=3, _object_hash=hash("others") | 2**41)
    given = {"model": net, "task": script["loss"]}
    assert raysim.resume(folder, {"rounds": 2, **given}).rounds == 2
    net.settings.width = 4
    with pytest.raises(ConfigError, match=r"^model"):
        raysim.resume(folder, {"rounds": 3, **given})


PARTS = """
import functools

@functools.lru_cache(maxsize=3)
def cached(x):
    return x + 1

@functools.singledispatch
def dispatched(x):
    return x

@dispatched.register
def _(x: int):
    return x + 1

class Made:
    @functools.cached_property
    def later(self):
        return 1

    @staticmethod
    @functools.cache
    def always():
        return 1

def made():
    return cached(0) + dispatched(0) + Made().later + Made.always()
"""


def test_what_remembers_results_reaches_a_process_with_another_main():
    script: Script = {"__name__": "__main__"}
    exec(PARTS, script)
    assert script["made"]() == 4
    sent = cloudpickle.dumps(script["made"])
    load = "import sys, cloudpickle; print(cloudpickle.load(sys.stdin.buffer)())"
    process = [sys.executable, "-c", load]
    assert subprocess.run(process, input=sent, capture_output=True, check=True).stdout == b"4\n"


def test_the_cache_of_an_imported_function_keeps_its_name():
    loaded = cloudpickle.loads(cloudpickle.dumps(remembered))
    assert loaded is remembered


@functools.cache
def remembered() -> int:
    """Return a number."""
    return 1


def test_large_objects_of_earlier_runs_are_forgotten(new_process, train, monkeypatch):
    """As many as fit into the limit stay, the last ones, and those of a result."""
    script = new_process()
    nets = [script["Net"]() for _ in range(4)]
    size = sum(parameter.nbytes for parameter in nets[0].parameters())
    monkeypatch.setattr(python_objects, "KEPT_BYTES", int(2.5 * size))
    runs = [train(script, model=net) for net in nets]
    assert all(run.predict(X).shape == (40, 3) for run in runs)
    folders = [run.run_dir for run in runs]
    del runs
    gc.collect()
    assert raysim.resume(folders[-1], {"rounds": 2}).rounds == 2
    with pytest.raises(ConfigError, match=r"^model.*object in Python, and this process has none"):
        raysim.resume(folders[0], {"rounds": 2})
    assert raysim.resume(folders[0], {"rounds": 2, "model": nets[0]}).rounds == 2
    alive = weakref.ref(nets[1])
    del nets
    gc.collect()
    assert alive() is None
