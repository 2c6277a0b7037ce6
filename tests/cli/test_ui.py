"""What must hold of `raysim ui`, and of every link that is printed: it opens MLflow's view of
metrics, at the place."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.command_line import assert_one_message
from support.forked import Forked
from support.processes import until

from raysim.config.sections.storage import Tracking
from raysim.errors import RaysimError
from raysim.tracking import charts, mlflow_client, ui

VIEW = "workflowType=machine_learning"
CHARTS = f"{VIEW}&compareRunsMode=CHART&orderByKey=metrics.%60accuracy%60&orderByAsc=false"


class Store:
    """What of MLflow's client is asked here."""

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="3", tags={}) if name == "mnist" else None

    def search_experiments(self) -> list[Any]:
        return [SimpleNamespace(name="mnist")]

    def get_run(self, run_id: str) -> Any:
        if run_id != "abc":
            raise OSError("there is no such run")
        return SimpleNamespace(
            info=SimpleNamespace(experiment_id="3"), data=SimpleNamespace(tags={})
        )


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_client, "connected", lambda uri: Store())


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was served; each server is ended by Ctrl-C."""
    calls = []

    @contextmanager
    def served(uri: str, port: int) -> Any:
        def wait() -> None:
            signal.raise_signal(signal.SIGINT)

        calls.append((uri, port))
        yield SimpleNamespace(wait=wait)

    monkeypatch.setattr(ui, "served", served)
    return calls


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The links that a browser was opened at."""
    links: list[str] = []
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open", links.append)
    return links


def test_a_database_is_served_until_ctrl_c(raysim_, store, serving, opened):
    Path("mlflow.db").touch()
    said = raysim_("ui", "mnist")
    ((uri, port),) = serving
    link = f"http://127.0.0.1:{port}/#/experiments/3/runs?{CHARTS}"
    assert (said.code, said.out, opened) == (0, f"{link}\n", [link])
    assert uri == f"sqlite:///{Path.cwd()}/mlflow.db"


def test_without_an_experiment_all_are_listed(raysim_, store, serving, opened):
    Path("other.db").touch()
    said = raysim_("ui", "--uri", "sqlite:///other.db", "--no-browser")
    assert said.code == 0 and opened == []
    assert said.out.endswith(f"/#/experiments?{VIEW}\n")


def test_of_a_server_only_the_link_is_shown(raysim_, store, serving, opened):
    said = raysim_("ui", "mnist", "--uri", "http://me:secret@host:5000")
    link = f"http://host:5000/#/experiments/3/runs?{CHARTS}"
    assert (said.code, said.out, opened, serving) == (0, f"{link}\n", [link], [])


def test_mistakes(raysim_, store, serving):
    missing = raysim_("ui")
    assert_one_message(missing)
    assert "mlflow.db" in missing.err and not list(Path().iterdir())
    Path("mlflow.db").touch()
    unknown = raysim_("ui", "mnits")
    assert_one_message(unknown)
    assert "did you mean 'mnist'" in unknown.err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert_one_message(raysim_("ui", "mnist", "--port", taken.getsockname()[1]))
    assert serving == []


def test_hints(store, here):
    assert ui.hint(Tracking(experiment="mnist"), "abc") == "raysim ui mnist   (run abc)"
    elsewhere = Tracking(uri="sqlite:////a/mlflow.db", experiment="mnist")
    assert ui.hint(elsewhere, "abc") == "raysim ui mnist --uri sqlite:////a/mlflow.db   (run abc)"
    server = Tracking(uri="http://me:secret@host:5000")
    assert ui.hint(server, "abc") == f"http://host:5000/#/experiments/3/runs/abc?{VIEW}"
    not_sent_yet = f"http://host:5000/#/experiments?{VIEW}   (run provisional)"
    assert ui.hint(server, "provisional") == not_sent_yet


@pytest.fixture
def database(here: Path, tables_made_once: None) -> Callable[[], str]:
    def make() -> str:
        uri = f"sqlite:///{here}/mlflow.db"
        mlflow_client.connected(uri).create_experiment("mnist", tags={charts.VIEW_TAG: "{}"})
        return uri

    return make


def test_trials_come_before_the_run_of_their_sweep(database):
    """Which is the newest and would else hide them; the charts' view has the order."""
    client = mlflow_client.connected(database())
    parent = client.create_run("1", start_time=2).info.run_id
    client.log_metric(parent, "trials_finished", 2)
    tags = {"mlflow.parentRunId": parent}
    trials = [client.create_run("1", start_time=0, tags=tags).info.run_id for _ in range(2)]
    for value, trial in enumerate(trials):
        client.log_metric(trial, "accuracy", value)
    view = json.loads(charts.view())
    order = f"{view['orderByKey']} {'ASC' if view['orderByAsc'] else 'DESC'}"
    runs = client.search_runs(["1"], order_by=[order])
    assert [run.info.run_id for run in runs] == [*reversed(trials), parent]


@pytest.mark.ray
def test_a_real_server_shows_the_experiment_and_leaves_nothing_behind(database, monkeypatch):
    # MLflow's own variable would make the server listen elsewhere.
    monkeypatch.setenv("MLFLOW_HOST", "127.0.0.2")
    uri = database()
    command = ("ui", "mnist", "--uri", uri, "--no-browser")
    process = Forked("-m", "raysim", *command, cwd=Path.cwd())
    until(lambda: "Ctrl-C" in process.output or not process.alive(), 120, "no link")
    link = process.output.splitlines()[0]
    address = link.partition("/#/")[0]
    order = "compareRunsMode=CHART&viewStateShareKey=raysim"
    assert link == f"{address}/#/experiments/1/runs?{VIEW}&{order}"
    with urllib.request.urlopen(f"{address}/health", timeout=30) as answer:
        assert answer.status == 200
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 0
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{address}/health", timeout=30)


@pytest.mark.ray
def test_a_server_that_does_not_start_is_one_message():
    with (
        pytest.raises(RaysimError, match="nonsense://store does not start"),
        ui.served("nonsense://store", ui.free_port(None)),
    ):
        pass
