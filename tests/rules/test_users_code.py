"""A rule or a net is a user's code and may raise anything: that is the client's or the rule's
failure, by name, and no signal to the process. A run in which nothing was trained fails. A run that
`progress` ends returns its result."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import raysim
from raysim import cli
from raysim.engine.state.checkpoint import available_checkpoints
from raysim.errors import ClientError, ConfigError, RaysimError
from raysim.prepare.resolve import prepare
from raysim.runs.resume import resume
from raysim.runs.run_dir import PARAMETERS_FILE
from raysim.system.signals import reraise_stop, stoppable

ANYTHING = ["SystemExit(3)", "KeyboardInterrupt()", "CancelledError()", "Odd('x')"]

RAISING = """
from asyncio import CancelledError
from dataclasses import dataclass

from torch import nn

from raysim.algorithms.fedavg import FedAvgClient, FedAvgServer


class Odd(BaseException):
    pass


def leave(where):
    if where == "{hook}":
        raise {error}


"""

CLIENT = (
    RAISING
    + """
@dataclass(frozen=True)
class Mine(FedAvgClient):
    def state(self, task):
        return super().state(task)

    def init(self, shared, client_state, data, task):
        leave("init")
        return super().init(shared, client_state, data, task)

    def direction(self, shared, state, batch, task):
        leave("direction")
        return super().direction(shared, state, batch, task)

    def finish(self, shared, state, client_state, data, task):
        leave("finish")
        return super().finish(shared, state, client_state, data, task)
"""
)

SERVER = (
    RAISING
    + """
@dataclass(frozen=True)
class Mine(FedAvgServer):
    def weigh(self, cohort):
        leave("weigh")
        return super().weigh(cohort)

    def init(self, x0, problem):
        leave("init")
        return super().init(x0, problem)

    def broadcast(self, state):
        leave("broadcast")
        return super().broadcast(state)

    def update(self, state, reports):
        leave("update")
        return super().update(state, reports)

    def check(self, problem):
        leave("check")
"""
)

PROPERTIES = (
    RAISING
    + """
@dataclass(frozen=True)
class Client(FedAvgClient):
    @property
    def {hook}(self):
        leave("{hook}")


@dataclass(frozen=True)
class Server(FedAvgServer):
    @property
    def {hook}(self):
        leave("{hook}")
"""
)

NET = (
    RAISING
    + """
class Mine(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        leave("__init__")
        self.linear = nn.Linear(64, classes)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        batch = "dry run" if len(x) < 5 else "train" if len(x) < 100 else "eval"
        if "{hook}" == batch or "{hook}" == "dry run" or "{hook}" == "check" and len(x) == 4:
            raise {error}
        return self.linear(x.flatten(1))
"""
)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.getbasetemp()}/shared-mlflow.db"


@pytest.fixture
def engine(engine):
    """A run's handlers are in place, so a KeyboardInterrupt is no Ctrl-C."""
    with stoppable():
        yield engine


@pytest.fixture
def config(base, uri, tmp_path, monkeypatch) -> dict[str, Any]:
    return base | {
        "tracking": {"uri": uri, "experiment": tmp_path.name},
        "rounds": 4,
        "partition": {"name": "iid", "clients": 6},
        "model": "logistic",
        "algorithm": "fedavg",
        "local": {"steps": 1, "batch_size": 8, "lr": 0.1},
        "schedule": {"cohort": 3},
    }


def named(error: str) -> str:
    return error.partition("(")[0]


@pytest.mark.parametrize("mode", ["loop", "lanes"])
@pytest.mark.parametrize("error", ANYTHING)
@pytest.mark.parametrize("hook", ["init", "direction", "finish"])
def test_what_a_client_rule_raises_is_its_clients_failure(
    config, engine, source, hook, error, mode
):
    rule = source("client_rule", CLIENT.format(hook=hook, error=error))
    config |= {
        "client": f"{rule}:Mine",
        "server": "fedavg",
        "algorithm": None,
        "batching": {"mode": mode},
    }
    if mode == "lanes" and hook == "direction":
        config["batching"] |= {"size": 3}
    with pytest.raises(ClientError, match=rf"client \d+ failed in round 1: .*{named(error)}"):
        engine(config)


@pytest.mark.parametrize("error", ANYTHING)
@pytest.mark.parametrize("hook", ["weigh", "init", "broadcast", "update", "check"])
def test_what_a_server_rule_raises_is_its_failure(config, engine, source, hook, error):
    rule = source("server_rule", SERVER.format(hook=hook, error=error))
    config |= {"client": "fedavg", "server": f"{rule}:Mine", "algorithm": None}
    with pytest.raises(
        RaysimError, match=rf"{hook}.* of server rule 'mine' failed: {named(error)}"
    ):
        engine(config)


@pytest.mark.parametrize("error", [*ANYTHING, "AttributeError('y')"])
@pytest.mark.parametrize(
    ("kind", "hook"),
    [
        ("client", "dropout_masks"),
        ("client", "unprotected_uploads"),
        ("client", "prepares"),
        ("client", "needs"),
        ("server", "uploads"),
        ("server", "provides"),
    ],
)
def test_what_a_property_raises_is_a_mistake_in_the_rule(config, source, kind, hook, error):
    rule = source(f"{kind}_rule", PROPERTIES.format(hook=hook, error=error))
    config |= {"client": "fedavg", "server": "fedavg", "algorithm": None}
    message = rf"^{kind}\.name: {hook} of {kind} rule '{kind}' failed: {named(error)}"
    with stoppable(), pytest.raises(ConfigError, match=message):
        prepare(config | {kind: f"{rule}:{kind.title()}"})
    message = message.replace(f"{kind}\\.", "algorithm\\.", 1)
    with stoppable(), pytest.raises(ConfigError, match=message):
        prepare(config | {"algorithm": f"{rule}:{kind.title()}", "client": None, "server": None})


@pytest.mark.parametrize("error", ANYTHING)
@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("__init__", "model.name: '.*' cannot be built: "),
        ("dry run", "model: .* fails on two examples of shape .*: "),
        ("check", "model: .* fails on 4 examples: "),
        ("train", r"client \d+ failed in round 1: "),
        ("eval", "the evaluation of model '.*' failed: "),
    ],
)
def test_what_a_net_raises_is_its_failure(config, engine, source, hook, message, error):
    net = source("net", NET.format(hook=hook, error=error))
    config |= {"model": f"{net}:Mine", "evaluate": {"every": 1}, "batching": {"mode": "loop"}}
    line = r"net\.py, line \d+: `raise "
    with pytest.raises(RaysimError, match=message + f".*{named(error)}.*{line}"):
        engine(config)


@pytest.mark.parametrize("error", ANYTHING)
def test_what_a_file_raises_on_import_is_its_failure(config, source, error):
    rule = source(
        "leaves", f"from asyncio import CancelledError\nOdd = BaseException\nraise {error}"
    )
    message = (
        rf"algorithm.name: .* fails on import: (.*{named(error)}|BaseException)"
        r".*leaves\.py, line 3: `raise "
    )
    with stoppable(), pytest.raises(ConfigError, match=message):
        prepare(config | {"algorithm": f"{rule}:Mine"})


@pytest.mark.ray
def test_on_actors_it_is_the_same(config, source, recycled_actors):
    ray = {"executor": "ray", "actors": 1, "cpus": 0.5, "timeout": 120}
    for error in ("SystemExit(3)", "KeyboardInterrupt()"):
        rule = source(f"client_{named(error)}", CLIENT.format(hook="direction", error=error))
        mine = {"client": f"{rule}:Mine", "server": "fedavg", "algorithm": None, "resources": ray}
        with pytest.raises(ClientError, match=rf"client \d+ failed in round 1: {named(error)}"):
            raysim.run(config | mine, run_dir=config["run_dir"] + error)
    rule = source("server_rule", SERVER.format(hook="update", error="SystemExit(3)"))
    mine = {"client": "fedavg", "server": f"{rule}:Mine", "algorithm": None, "resources": ray}
    with pytest.raises(RaysimError, match=r"update of server rule '.*' failed: SystemExit: 3"):
        raysim.run(config | mine)


def test_on_the_command_line_it_is_a_failed_run(config, source, tmp_path, monkeypatch, capsys):
    rule = source("client_rule", CLIENT.format(hook="direction", error="SystemExit(0)"))
    path = tmp_path / "mine.yaml"
    path.write_text(str(config | {"client": f"{rule}:Mine", "server": "fedavg", "algorithm": None}))
    path.write_text(path.read_text().replace("None", "null"))
    monkeypatch.setattr("sys.argv", ["raysim", "run", str(path)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 1 and "failed in round 1: SystemExit: 0" in capsys.readouterr().err


def test_a_real_signal_is_none_of_a_rules_failures(config, source):
    """It comes while a rule runs that would be dropped for any failure."""
    rule = source(
        "client_rule", CLIENT.format(hook="", error="None").replace('leave("direction")', SENDS)
    )
    config |= {
        "client": f"{rule}:Mine",
        "server": "fedavg",
        "algorithm": None,
        "batching": {"mode": "loop"},
    }
    for number in (signal.SIGINT, signal.SIGTERM):
        os.environ["SIGNAL"] = str(int(number))
        folder = f"{config['run_dir']}-{number}"
        with pytest.raises(KeyboardInterrupt, match=rf"^stopped; what was done .*{folder}"):
            raysim.run(config, {"faults.on_client_error": "drop"}, run_dir=folder)


SENDS = """
        import os, signal, time
        if getattr(signal.getsignal(signal.SIGINT), "__name__", "") == "_handle":  # not while the run is prepared
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
            time.sleep(10)
"""


def test_an_interrupt_outside_of_a_run_is_one():
    """Python's own handler leaves no trace of itself."""

    def caught(code: Any) -> BaseException:
        try:
            code()
        except BaseException as error:
            return error
        raise AssertionError("nothing was raised")

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(5)

    handler = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            reraise_stop(caught(interrupt))
    finally:
        signal.signal(signal.SIGINT, handler)
    before = signal.signal(signal.SIGTERM, lambda number, frame: exit(number))  # as Ray's
    try:
        with pytest.raises(SystemExit):
            reraise_stop(caught(lambda: signal.raise_signal(signal.SIGTERM)))
    finally:
        signal.signal(signal.SIGTERM, before)
    reraise_stop(caught(lambda: exit(3)))

    def rule() -> None:
        raise KeyboardInterrupt

    reraise_stop(caught(rule))


def test_an_error_after_which_cuda_fails_is_none_of_the_rule(monkeypatch):
    error = torch.AcceleratorError("CUDA error: device-side assert triggered")

    def fails() -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    with pytest.raises(torch.AcceleratorError):
        reraise_stop(error)
    reraise_stop(torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    reraise_stop(torch.AcceleratorError("CUDA error: invalid device ordinal"))


# -- runs in which nothing was trained -------------------------------------------------------------

FAILING = {"faults.on_client_error": "drop", "local.lr": 1e30}
"""Every client's update overflows."""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            FAILING,
            r"no client's update was used in 4 rounds \(12 failed; the first: client \d+ in round 1: non-finite",
        ),
        (
            {"schedule.deadline": 0.5},
            r"no client's update was used in 4 rounds \(12 missed the deadline\)",
        ),
        (
            {"schedule.client_dropout.rate": 0.9999, "schedule.client_dropout.rejoin_after": 0.1},
            r"no client's update was used in 4 rounds \(12 dropped out\)",
        ),
    ],
    ids=["all fail", "all late", "all drop out"],
)
def test_a_run_that_trained_nothing_fails_unless_that_is_accepted(
    config, tmp_path, given, message, caplog, tracked
):
    with pytest.raises(RaysimError, match=message + r".*faults.on_empty_run=finish") as caught:
        raysim.run(config, given)
    assert caught.value.exit_code == 1
    assert status(config) == "FAILED" and not (tmp_path / "run" / PARAMETERS_FILE).exists()
    done = raysim.run(
        config, {**given, "faults.on_empty_run": "finish"}, run_dir=str(tmp_path / "accepted")
    )
    assert done.rounds == 4 and "no client's update was used" in caplog.text
    assert (
        done.digest
        == raysim.run(config, rounds=1, **{"local.lr": 1e-30}, run_dir=str(tmp_path / "0")).digest
    )


def test_a_run_that_trained_a_little_finishes(config):
    """Clients fail in all rounds but the first."""
    config["local"]["lr"] = [[0, 0.1], [1, 1e30]]
    assert raysim.run(config, {"faults.on_client_error": "drop"}).rounds == 4


def test_an_empty_run_that_is_resumed_with_the_key_finishes_and_one_with_a_trained_round_too(
    config, tmp_path
):
    with pytest.raises(RaysimError, match="no client's update was used"):
        raysim.run(config, FAILING)
    assert resume(tmp_path / "run", {"faults.on_empty_run": "finish", "rounds": 5}).rounds == 5


# -- runs that progress ends -----------------------------------------------------------------------


def status(config: dict[str, Any]) -> str:
    return runs(config)[0].info.status


def runs(config: dict[str, Any]) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(config["tracking"]["uri"])
    return client.search_runs(
        [client.get_experiment_by_name(config["tracking"]["experiment"]).experiment_id]
    )


SCHEDULES = {
    "sync": {"cohort": 3},
    "kasync": {"name": "kasync", "k": 2, "concurrency": 4, "client_speeds": {"name": "lognormal"}},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("executor", ["inline", pytest.param("ray", marks=pytest.mark.ray)])
def test_progress_that_returns_true_ends_the_run_with_its_result(
    config, tmp_path, schedule, executor, request, tracked
):
    config |= {"rounds": 9, "schedule": SCHEDULES[schedule], "checkpoint": {"every": 50}}
    whole = raysim.run(config, run_dir=str(tmp_path / "whole"))
    if executor == "ray":
        request.getfixturevalue("recycled_actors")
        config |= {"resources": {"executor": "ray", "actors": 2, "cpus": 0.5, "timeout": 120}}
    done = raysim.run(config, progress=lambda record: record["round"] == 3)
    assert 3 <= done.rounds < 9 and done.stopped == "round 3: progress returned True"
    assert [record["round"] for record in done.history] == list(range(done.rounds + 1))
    short = raysim.run(config, rounds=done.rounds, run_dir=str(tmp_path / "short"))
    assert done.digest == short.digest and torch.equal(done.parameters, short.parameters)
    assert done.as_object()["stopped"] and "stopped" not in short.as_object()
    assert available_checkpoints(tmp_path / "run")[-1].name == f"round-{done.rounds:06d}"
    assert not (tmp_path / "run" / PARAMETERS_FILE).exists()
    run = next(run for run in runs(config) if run.info.run_id == done.run_id)
    assert run.info.status == "KILLED" and run.data.tags["stopped_early"] == done.stopped
    again = resume(tmp_path / "run")
    assert again.digest == whole.digest and again.run_id == done.run_id and not again.stopped
    run = next(run for run in runs(config) if run.info.run_id == done.run_id)
    assert run.info.status == "FINISHED" and run.data.tags["stopped_early"] == ""


def test_progress_may_say_why_and_the_last_round_is_no_early_end(config, tmp_path):
    done = raysim.run(
        config, rounds=9, progress=lambda record: "good enough" if record["round"] == 2 else None
    )
    assert done.stopped == "good enough" and 2 <= done.rounds < 9
    whole = raysim.run(
        config, run_dir=str(tmp_path / "whole"), progress=lambda record: record["round"] == 4
    )
    assert not whole.stopped and (tmp_path / "whole" / PARAMETERS_FILE).exists()


def test_progress_that_leaves_is_no_signal(config, tracked):
    def leave(record: dict[str, float]) -> None:
        raise SystemExit(7)

    with pytest.raises(SystemExit) as left:
        raysim.run(config, progress=leave)
    assert left.value.code == 7 and status(config) == "KILLED"
