"""What must hold of sweeps: the grid is what was written, mistakes come before anything starts,
each trial is the run it would be alone, and what was done once is never done again.

One sweep is run on Ray, with everything in it that can befall a trial; the tests look at what it
left.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.sweeps import SMALL, trained_in_this_process, written

from raysim import cli
from raysim.config.tracking_uri import absolute_uri
from raysim.errors import RaysimError
from raysim.prepare import resolve
from raysim.runs import run as experiment
from raysim.sweeps import runner
from raysim.sweeps.definition import Trial
from raysim.sweeps.preparation import prepare_sweep
from raysim.sweeps.runner import run_sweep
from raysim.sweeps.search_space import as_text
from raysim.sweeps.summary import SweepResult
from raysim.sweeps.trials import trial as one
from raysim.tracking import mlflow_client
from raysim.tracking import spool_sender as tracking
from raysim.tracking.recorder import Recorder
from raysim.tracking.spool import Spool
from raysim.tracking.spool_sender import Writer

DEADLY = """
import os, signal
from dataclasses import dataclass
from raysim.rules import ClientRule

@dataclass(frozen=True)
class Deadly(ClientRule):
    def direction(self, shared, state, batch, task):
        if task.t >= 2 and not os.path.exists("spared"):  # which no dry run reaches
            os.kill(os.getpid(), signal.SIGKILL)
        return task.grad(state['w'], batch)
"""


# -- a sweep on Ray --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that the sweep is run in."""
    folder = tmp_path_factory.mktemp("sweep")
    before = os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


SWEPT = {
    **SMALL,
    "sweep": [
        {"local.lr": [0.05, 0.1], "seed": "0..1"},
        {"local.lr": 1e30},
        {"seed": 3, "rounds": 60, "checkpoint.every": 20},
        {"seed": 4, "resources.executor": "ray", "resources.actors": 1},
        {"algorithm": "./deadly.py:Deadly"},
    ],
}


def half_way(trial: Trial) -> None:
    """Runs a trial until it is stopped in round 30, as it would be in its own process."""

    def stop(record: dict[str, float]) -> None:
        if record["round"] == 30:
            raise KeyboardInterrupt

    recorder = Recorder(absolute_uri("sqlite:///mlflow.db"), "swept", trial.folder)
    with pytest.raises(KeyboardInterrupt):
        experiment.execute(
            resolve.prepare(trial.config.model_dump(mode="json")),
            trial.folder,
            progress=stop,
            tracker=recorder,
        )


@pytest.fixture(scope="module")
def swept(place: Path, local_ray: None) -> SweepResult:
    """What that sweep left: one trial fails, one kills its process, one was stopped before, one is
    on actors."""
    Path("deadly.py").write_text(DEADLY)
    planned = prepare_sweep(SWEPT)
    half_way(next(trial for trial in planned.trials if trial.config.rounds == 60))
    told: list[tuple[str, str]] = []
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        done = run_sweep(
            planned, parallel=2, watch=lambda trial, state, facts: told.append((trial.title, state))
        )
    assert not [line for line in printed.getvalue().splitlines() if "(raylet)" not in line], (
        "Tune says nothing"
    )
    assert (
        sorted(state for _, state in told if state != "running")
        == ["failed"] * 2 + ["finished"] * 6
    )
    return done


@pytest.fixture
def mlflow(swept: SweepResult) -> Any:
    return mlflow_client.connected(absolute_uri("sqlite:///mlflow.db"))


def runs_of(mlflow: Any) -> list[Any]:
    return mlflow.search_runs([mlflow.get_experiment_by_name("swept").experiment_id])


@pytest.mark.ray
def test_each_trial_is_the_run_it_would_be_alone(swept: SweepResult, tmp_path: Path):
    for trial in swept.sweep.trials:
        if trial.result:
            alone = resolve.prepare(
                trial.config.model_dump(mode="json"),
                {
                    "run_dir": str(tmp_path / trial.folder.name),
                    "resources.executor": "inline",
                    "tracking.experiment": "alone",
                },
            )
            done = experiment.execute(alone)
            assert trial.result["digest"] == done.digest
            assert trial.result["metrics"] == done.metrics and trial.result["rounds"] == done.rounds


@pytest.mark.ray
def test_failures_are_told_and_stop_nobody(swept: SweepResult):
    failed = {trial.title: error.splitlines()[0] for trial, error in swept.failed}
    deadly = "algorithm=./deadly.py:Deadly"
    assert set(failed) == {"local.lr=1e+30", deadly}
    assert (
        "non-finite" in failed["local.lr=1e+30"]
        and "its process died, or its node" in failed[deadly]
    )
    assert swept.as_object()["finished"] == 6 and swept.as_object()["failed"] == 2


@pytest.mark.ray
def test_one_parent_and_its_children(swept: SweepResult, mlflow: Any):
    runs = {run.info.run_id: run for run in runs_of(mlflow)}
    parent = runs.pop(swept.run_id)
    assert parent.info.status == "FAILED" and parent.data.tags["raysim.sweep"] == "true"
    assert (
        parent.data.params["sweep.seed"] == "[0, 1, 3, 4]"
        and parent.data.params["model.name"] == "mlp"
    )
    varied = ("algorithm", "client.", "server.", "local.lr", "seed", "rounds")
    assert not [key for key in parent.data.params if key.startswith(varied)]
    assert parent.data.params["local.steps"]
    assert all(run.data.tags.get("command", "none") for run in runs.values())
    assert "table.md" in [file.path for file in mlflow.list_artifacts(swept.run_id)]
    ended = [
        result["metrics"]["accuracy"]["best"]
        for trial in swept.sweep.trials
        if (result := trial.result)
    ]
    metrics = parent.data.metrics
    assert (metrics["trials_finished"], metrics["trials_failed"]) == (6, 2)
    assert metrics["best_accuracy"] == max(ended)
    description = parent.data.tags["mlflow.note.content"]
    assert "a sweep of 8 trials" in description and swept.table in description
    assert len(runs) == 8 and {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {
        swept.run_id
    }
    for told in swept.as_object()["trials"]:
        run = runs[told["run_id"]]
        assert run.info.status == ("FAILED" if "error" in told else "FINISHED")
        for key, value in told["values"].items():
            assert run.data.tags[f"sweep.{key}"] == as_text(value)
        if "error" not in told:
            assert run.data.metrics["best_accuracy"] == told["metrics"]["accuracy"]["best"]
            assert run.data.params["local.lr"] and run.data.tags["digest"] == told["digest"]
            steps = [m.step for m in mlflow.get_metric_history(run.info.run_id, "accuracy")]
            assert sorted(steps) == list(range(told["rounds"] + 1)), (
                "each round once, also of the one that was stopped"
            )
            names = {file.path for file in mlflow.list_artifacts(run.info.run_id)}
            assert {"config.yaml", "history.csv", "parameters.safetensors"} <= names
            assert not any(name.endswith(".png") for name in names), "the sweep draws them together"
            assert len(run.inputs.dataset_inputs) == 2


@pytest.mark.ray
def test_the_table(swept: SweepResult):
    assert swept.table == (swept.sweep.folder / "table.md").read_text().strip()
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in swept.table.splitlines()
    )
    figures = ["best accuracy %", "last accuracy %", "rounds done", "not finished"]
    assert head == ["algorithm", "rounds", "local.lr", "seeds", *figures]
    assert [[*row[:4], row[-1]] for row in rows] == [
        ["fedavg", "3", "0.05", "3", ""],
        ["fedavg", "3", "0.1", "2", ""],
        ["fedavg", "3", "1e+30", "1", "1 failed"],
        ["fedavg", "60", "0.05", "1", ""],
        ["Deadly", "3", "0.05", "1", "1 failed"],
    ]
    assert rows[-1][4:7] == ["–", "–", "0"], "a trial that failed has no figures"


@pytest.mark.ray
@pytest.mark.usefixtures("pictures")
def test_each_trial_has_a_line_and_the_pictures_are_kept(swept: SweepResult, mlflow: Any):
    with (swept.sweep.folder / "trials.csv").open(newline="") as file:
        lines = {line["run"]: line for line in csv.DictReader(file)}
    assert set(lines) == {told["run_id"] for told in swept.as_object()["trials"]}
    for told in swept.as_object()["trials"]:
        line = lines[told["run_id"]]
        if "error" in told:
            assert (line["state"], line["why"], line["rounds"]) == (
                "failed",
                told["error"].splitlines()[0],
                "",
            )
        else:
            assert (line["state"], line["rounds"]) == ("finished", str(told["rounds"]))
            assert float(line["best accuracy"]) == told["metrics"]["accuracy"]["best"]
    kept = {file.path: file.file_size for file in mlflow.list_artifacts(swept.run_id)}
    assert set(kept) == {"table.md", "table.csv", "trials.csv", "curves.png"}, (
        "three keys vary: no heatmap"
    )
    assert kept["curves.png"] > 10_000
    parent = mlflow.get_run(swept.run_id)
    assert [parent.data.tags[key] for key in ("finished", "stopped_early", "failed")] == [
        "6",
        "0",
        "2",
    ]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """The trials that were started, from now on in this process."""
    return trained_in_this_process(monkeypatch.setattr)


@pytest.mark.ray
def test_again_only_what_is_missing_is_done(swept: SweepResult, mlflow: Any, started: list[Trial]):
    """The failed ones are tried again, in the same MLflow runs; then, in a larger sweep, nothing of
    the smaller one."""
    Path("spared").touch()
    before = {run.info.run_id for run in runs_of(mlflow)}
    again = run_sweep(prepare_sweep(SWEPT))
    assert [trial.label for trial in started] == ["fedavg", "Deadly"]
    assert again.run_id == swept.run_id and again.reused == 6 and len(again.failed) == 1
    assert {run.info.run_id for run in runs_of(mlflow)} == before
    deadly = next(told for told in again.as_object()["trials"] if "Deadly" in told["run_dir"])
    assert mlflow.get_run(deadly["run_id"]).info.status == "FINISHED"

    started.clear()
    larger = run_sweep(prepare_sweep({**SMALL, "sweep": {"local.lr": [0.1, 0.05], "seed": "0..2"}}))
    assert [(t.config.local.lr, t.config.seed) for t in started] == [
        (0.1, 2),
        (0.05, 2),
    ] and larger.reused == 4
    children = [
        r for r in runs_of(mlflow) if r.data.tags.get("mlflow.parentRunId") == larger.run_id
    ]
    assert len(children) == 6 and larger.run_id != swept.run_id

    started.clear()
    shutil.rmtree(larger.sweep.trials[0].folder)
    run_sweep(prepare_sweep({**SMALL, "sweep": {"local.lr": [0.1, 0.05], "seed": "0..2"}}))
    assert started == larger.sweep.trials[:1]


def test_the_figures_of_a_sweep_are_those_of_its_last_call(here, started: list[Trial], monkeypatch):
    """A call on the same sweep has figures of its own at the same numbers of ended trials."""
    planned = prepare_sweep({**SMALL, "sweep": {"seed": [0, 1]}})
    train = one.train_trial
    with monkeypatch.context() as patch:
        fail = lambda trial, *others: "no room" if trial.config.seed else train(trial, *others)  # noqa: E731
        patch.setattr(one, "train_trial", fail)
        assert len(run_sweep(planned).failed) == 1
    done = run_sweep(planned)
    metrics = mlflow_client.connected(absolute_uri("sqlite:///mlflow.db")).get_run(done.run_id)
    figures = [metrics.data.metrics[key] for key in ("trials_finished", "trials_failed")]
    assert figures == [2, 0] and len(started) == 3


def test_a_sweep_without_a_global_model_is_compared_by_its_clients(here, started: list[Trial]):
    """Ditto trains what FedAvg does; the models of the clients differ."""
    clients = {"every": 0, "clients": {"every": 1}}
    keys = {"partition": {"name": "iid", "clients": 4, "test": {"fraction": 0.2}}}
    methods = {"algorithm": ["fedavg", "ditto"], "seed": [0]}
    planned = prepare_sweep({**SMALL, **keys, "evaluate": clients, "sweep": methods})
    head = run_sweep(planned).table.splitlines()[0]
    assert "best clients/accuracy %" in head and len(started) == 2


def test_one_sweep_at_a_time_in_a_folder(place: Path):
    planned = prepare_sweep(SMALL, ["seed=8..9"])
    with (
        runner._lock_trials(planned.folder),
        pytest.raises(RaysimError, match="another sweep is at work"),
    ):
        run_sweep(planned)


@pytest.mark.ray
def test_the_command(
    swept: SweepResult,
    place: Path,
    started: list[Trial],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["raysim", "sweep", *arguments])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    written(place / "grid.yaml", sweep={"local.lr": [0.05, 0.1], "seed": "0..1"})
    code, out, _ = call("grid.yaml", "local.lr=0.05,0.1,0.2", "--dry-run")
    assert code == 0 and "6 trials (4 already there)" in out and out.count("done ") == 4
    code, out, err = call("grid.yaml", "--json")
    told = json.loads(out.splitlines()[-1])
    assert code == 0 and len(out.splitlines()) == 1 and told["reused"] == told["finished"] == 4
    assert "| local.lr | seeds |" in err and "raysim ui" in err
    code, _, err = call("grid.yaml", "local.lr=1e30", "seed=5")
    assert (
        code == 1
        and err.count("failed: fedavg") == 1
        and "non-finite" in err
        and "Traceback" not in err
    )


@pytest.mark.ray
def test_stopped(
    swept: SweepResult,
    mlflow: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    started: list[Trial],
):
    """Ctrl-C ends it in order: what is finished is kept, the parent run is closed."""
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)
    monkeypatch.setattr(sys, "argv", ["raysim", "sweep", "stopped.yaml", "seed=0,1,9"])
    written(Path("stopped.yaml"))
    train = one.train_trial

    def stop(trial: Trial, *given: Any) -> str:
        if trial.config.seed == 9:
            os.kill(os.getpid(), signal.SIGINT)
        return train(trial, *given)

    monkeypatch.setattr(one, "train_trial", stop)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130 and "the same command runs the rest" in capsys.readouterr().err
    parent = max(runs_of(mlflow), key=lambda run: run.info.start_time)
    assert parent.info.run_name == "stopped" and parent.info.status == "KILLED"
    monkeypatch.setattr(one, "train_trial", train)
    again = run_sweep(prepare_sweep("stopped.yaml", ["seed=0,1,9"]))
    assert again.run_id == parent.info.run_id and again.reused == 2 and not again.failed
    assert [trial.config.seed for trial in started] == [9, 9]


@pytest.mark.ray
def test_a_signal_that_stops_a_sweep_on_ray_keeps_its_number(swept: SweepResult):
    """Ray's waits turn every signal into a KeyboardInterrupt; the exit code must tell them apart."""
    planned = prepare_sweep({**SMALL, "rounds": 100_000, "sweep": {"seed": "11..12"}})
    sent = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))

    def watch(trial: Trial, state: str, facts: Mapping[str, Any]) -> None:
        if state == "running" and not sent.ident:
            sent.start()

    with pytest.raises(KeyboardInterrupt) as stop:
        run_sweep(planned, parallel=2, watch=watch)
    assert getattr(stop.value, "signal", None) == signal.SIGTERM
    assert not any(trial.result for trial in planned.trials)


# -- what is spooled is sent -----------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "FLUSH_INTERVAL_S", 0.05)
    monkeypatch.setattr(tracking, "DRAIN_TIMEOUT_S", {"up": 5.0, "down": 0.5})


def test_a_dead_server_loses_nothing(
    place: Path,
    tmp_path: Path,
    quick: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    uri = f"sqlite:///{place}/mlflow.db"
    client = type(mlflow_client.connected(uri))
    down = True

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*arguments: Any, **options: Any) -> Any:
            if down:
                raise ConnectionError("connection refused")
            return call(*arguments, **options)

        return attempt

    monkeypatch.setattr(client, "create_run", failing(client.create_run))
    recorders = [Recorder(uri, "dead", tmp_path / name, parent="p" * 32) for name in ("one", "two")]
    writer = Writer(uri, "dead")
    for recorder in recorders:
        recorder.start("run", {"a": 1}, {})
        recorder.metrics({"loss": 1.0}, 0)
        writer.follow(tmp_path / ("one" if recorder is recorders[0] else "two"))
    writer.finish()
    assert (
        caplog.text.count("tracking is down") == 1
        and "records of 2 runs were not all sent" in caplog.text
    )
    down, writer = False, Writer(uri, "dead")
    for name in ("one", "two"):
        writer.follow(tmp_path / name)
    for recorder in recorders:  # still going on meanwhile
        recorder.metrics({"loss": 2.0}, 1)
        recorder.finish("FINISHED")
    writer.finish()
    mlflow = mlflow_client.connected(uri)
    runs = mlflow.search_runs([mlflow.get_experiment_by_name("dead").experiment_id])
    assert len(runs) == 2
    for run in runs:
        assert run.info.status == "FINISHED" and run.data.tags["mlflow.parentRunId"] == "p" * 32
        assert sorted(
            (m.step, m.value) for m in mlflow.get_metric_history(run.info.run_id, "loss")
        ) == [(0, 1.0), (1, 2.0)]


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path):
    recorder = Recorder("sqlite:///x.db", "e", tmp_path)
    recorder.start("run", {}, {})
    tail = tracking.Tail(tmp_path)
    assert [record["kind"] for record in tail.head()] == ["start", "params", "tags"]
    tail.acknowledge(3, "r")
    with (tmp_path / "spool.jsonl").open("ab") as file:
        file.write(b'{"kind": "metr')
    assert tail.head() == [] and tail.pending == 0
    recorder.close()
    spool = Spool(tmp_path)
    spool.append({"kind": "finish", "status": "FINISHED", "time": 0})
    assert (
        [record["kind"] for record in tail.head()] == ["finish"]
        and spool.run_id == "r"
        and spool.pending == 1
    )
    spool.close()


def test_a_call_from_python_names_its_failed_trials(tmp_path: Path, monkeypatch, caplog):
    """The command prints them; a call would otherwise return without a word."""

    def fail(sweep: Any, *others: Any) -> SweepResult:
        failed = [(trial, "client.name: no such rule\n\nTraceback") for trial in sweep.trials]
        return SweepResult(sweep, "", 0, failed=failed)

    monkeypatch.setattr(runner, "run_sweep", fail)
    runner.sweep({**SMALL}, {"seed": [0, 1]}, folder=tmp_path)
    warnings = [record.getMessage() for record in caplog.records]
    assert [line.partition(" (")[0] for line in warnings] == [
        f"failed: seed={seed}: client.name: no such rule" for seed in (0, 1)
    ]
