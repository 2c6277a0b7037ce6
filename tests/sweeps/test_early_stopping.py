"""What must hold of trials that do not simply run to their end: ASHA stops those that it must, they
can go on to the bit, and trials that fail are tried again."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.sweeps import SMALL

import raysim
from raysim.config.tracking_uri import absolute_uri
from raysim.engine.state import checkpoint
from raysim.errors import RaysimError
from raysim.prepare import resolve
from raysim.runs import run as experiment
from raysim.sweeps.definition import Trial
from raysim.sweeps.early_stopping import WORST_VALUE, EarlyStopping, RungTracker
from raysim.sweeps.preparation import prepare_sweep
from raysim.sweeps.runner import run_sweep
from raysim.sweeps.summary import SweepResult
from raysim.sweeps.trials.trial import train_trial
from raysim.tracking import mlflow_client

URI = "sqlite:///mlflow.db"

LONGER = {**SMALL, "rounds": 12, "checkpoint": {"every": 5}, "tracking": {"experiment": "stopping"}}

STOPPING = {"metric": "loss", "grace_period": 2, "reduction_factor": 2}
"""Rungs after rounds 2, 4 and 8."""
LRS = [0.01, 0.05, 0.4, 1.6, 0.1, 0.2]

FLAKY = """
import os, signal
from dataclasses import dataclass
from pathlib import Path
from raysim.rules import ClientRule

@dataclass(frozen=True)
class Flaky(ClientRule):
    how: str = "kill"

    def direction(self, shared, state, batch, task):
        mark = Path(f"MARKS/{self.how}-{os.getpid()}")
        others = [each for each in mark.parent.glob(f"{self.how}-*") if each != mark]
        if task.t == 3 and (not others or self.how == "ever"):
            mark.touch()
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("no room today")
        return task.grad(state["w"], batch)
"""


@pytest.fixture(scope="module", params=["here", pytest.param("ray", marks=pytest.mark.ray)])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The folder of the sweeps, whose trials are processes of this machine, or on Ray Tune."""
    folder, before = tmp_path_factory.mktemp("stopping"), os.getcwd()
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "ray":
            request.getfixturevalue("local_ray")
        elif "ray" in sys.modules:  # another test may have started it
            patch.setattr(sys.modules["ray"], "is_initialized", lambda: False)
        yield folder
    os.chdir(before)


def alone(trial: Trial, tmp_path: Path) -> raysim.RunResult:
    """The same run by itself, to its end."""
    changes = {"run_dir": str(tmp_path / trial.folder.name), "tracking.experiment": "alone"}
    return experiment.execute(resolve.prepare(trial.config.model_dump(mode="json"), changes))


def halved(
    curves: Sequence[dict[int, float]], rungs: Sequence[int], factor: float
) -> list[int | None]:
    """ASHA over trials that run one after the other, as Ray Tune does it: at each rung a trial of a
    loss above the (1/factor)-quantile of the losses seen there before is stopped. The rung of each,
    None of those that go on."""
    seen: dict[int, list[float]] = {rung: [] for rung in rungs}
    ends: list[int | None] = []
    for losses in curves:
        end = None
        for rung in rungs:
            before = list(seen[rung])
            seen[rung].append(losses[rung])
            if before and losses[rung] > np.quantile(before, 1 / factor):
                end = rung
                break
        ends.append(end)
    return ends


@pytest.fixture(scope="module")
def halving(place: Path) -> SweepResult:
    """Six step sizes, one trial at a time, so that their order is known."""
    return run_sweep(
        prepare_sweep({**LONGER, "sweep": {"local.lr": LRS, "early_stopping": STOPPING}}),
        parallel=1,
    )


def test_asha_stops_whom_it_must_and_says_so(halving: SweepResult, tmp_path: Path):
    full = [alone(trial, tmp_path) for trial in halving.sweep.trials]
    ends = halved([{int(r["round"]): r["loss"] for r in run.history} for run in full], [2, 4, 8], 2)
    assert ends.count(None) >= 2 and len(set(ends)) >= 3, "the example is worth something"
    assert halving.counts == {
        "finished": ends.count(None),
        "stopped_early": 6 - ends.count(None),
        "failed": 0,
    }
    client = mlflow_client.connected(absolute_uri(URI))
    for trial, run, end, told in zip(
        halving.sweep.trials, full, ends, halving.as_object()["trials"], strict=True
    ):
        found, result = client.get_run(told["run_id"]), trial.result
        assert result is not None
        if end is None:
            assert (
                "stopped" not in result
                and result["digest"] == run.digest
                and found.info.status == "FINISHED"
            )
            continue
        loss = next(r["loss"] for r in run.history if r["round"] == end)
        assert (
            result["stopped"] == f"round {end}: loss {loss:.4g}" == found.data.tags["stopped_early"]
        )
        assert end <= result["rounds"] <= end + 3 and found.info.status == "KILLED", (
            "no round more than were out"
        )
        steps = sorted(metric.step for metric in client.get_metric_history(told["run_id"], "loss"))
        assert steps == list(range(result["rounds"] + 1))
    parent = client.get_run(halving.run_id)
    assert (
        parent.info.status == "FINISHED"
        and parent.data.params["sweep.early_stopping.metric"] == "loss"
    )
    assert parent.data.tags["stopped_early"] == str(6 - ends.count(None))
    assert halving.table.splitlines()[0].endswith("| not finished |")
    assert halving.table.count("1 stopped early") == 6 - ends.count(None)


def test_a_stopped_trial_counts_as_done_and_a_larger_sweep_knows_what_was_reached(
    halving: SweepResult,
):
    """The first trial of a fresh rung is never stopped; this one meets those of the sweep before."""
    larger = run_sweep(
        prepare_sweep({**LONGER, "sweep": {"local.lr": [*LRS, 1e-4], "early_stopping": STOPPING}}),
        parallel=1,
    )
    assert larger.reused == 6 and larger.run_id != halving.run_id
    assert [trial.config.local.lr for trial, why in larger.stopped if why.startswith("round 2")][
        -1
    ] == 1e-4


def test_a_stopped_trial_goes_on_to_the_bit(halving: SweepResult, tmp_path: Path):
    """By hand, and in a sweep that stops nobody."""
    (first, _), *others = halving.stopped
    done = raysim.resume(first.folder)
    assert done.digest == alone(first, tmp_path).digest and done.rounds == 12
    whole = prepare_sweep({**LONGER, "sweep": {"local.lr": LRS}})
    assert [whole.done(trial) for trial in whole.trials].count(False) == len(halving.stopped)
    after = run_sweep(whole, parallel=1)
    assert (
        after.run_id == halving.run_id
        and after.counts["finished"] == 6
        and "stopped" not in after.table
    )
    client = mlflow_client.connected(absolute_uri(URI))
    told = {each["run_dir"]: each for each in after.as_object()["trials"]}
    for trial, _ in others:
        found = client.get_run(told[str(trial.folder)]["run_id"])
        assert told[str(trial.folder)]["digest"] == alone(trial, tmp_path).digest
        assert found.info.status == "FINISHED" and found.data.tags["stopped_early"] == ""


def test_only_checkpoints_of_the_trials_own_rounds_count(here, caplog):
    """Somebody may have resumed its run for more rounds; and damaged ones displace no new ones."""
    keys = {"evaluate": {"every": 2}, "checkpoint": {"every": 1, "keep": 9}, "sweep": {"seed": [0]}}
    (trial,) = prepare_sweep({**SMALL, **keys}).trials

    def train(stopping: EarlyStopping | None = None, stop: str = "") -> dict[str, Any]:
        arguments = absolute_uri(URI), "swept", "", stopping, lambda figures: stop
        assert not train_trial(trial, *arguments) and trial.result
        return trial.result

    first = train()
    checkpoint.remove_after(trial.folder, 1)
    (trial.folder / "parameters.safetensors").unlink()
    assert raysim.resume(trial.folder, {"rounds": 7}).rounds == 7
    again = train()
    same = ("rounds", "digest", "metrics")
    assert [again[key] for key in same] == [first[key] for key in same] and again["rounds"] == 3
    for path in checkpoint.available_checkpoints(trial.folder):
        (path / "sums.json").write_text("{}")
    stopped = train(EarlyStopping(metric="train_loss", grace_period=1), "enough")
    assert "the trial starts again" in caplog.text and stopped["rounds"] < 3
    saved = checkpoint.read_latest(trial.folder)
    assert saved is not None and saved.facts["round"] == stopped["rounds"]


def test_trials_that_fail_are_tried_again(place: Path):
    """After an exception and after the process's death, from where they were; not more often than
    asked for."""
    (place / "marks").mkdir()
    Path("flaky.py").write_text(FLAKY.replace("MARKS", str(place / "marks")))
    varied = {
        "algorithm": "./flaky.py:Flaky",
        "algorithm.how": ["kill", "ever"],
        "checkpoint.every": 1,
    }
    told: list[str] = []
    planned = prepare_sweep({**LONGER, "rounds": 6, "sweep": {**varied, "retries": 1}})
    done = run_sweep(planned, parallel=1, watch=lambda trial, state, facts: told.append(state))
    assert (
        done.counts == {"finished": 1, "stopped_early": 0, "failed": 1} and told.count("again") == 2
    )
    ((ever, why),) = done.failed
    assert "no room today" in why and ever.failures == 1 and (ever.folder / "error.txt").exists()
    client = mlflow_client.connected(absolute_uri(URI))
    for trial, each in zip(planned.trials, done.as_object()["trials"], strict=True):
        found = client.get_run(each["run_id"])
        assert found.data.tags["failed_attempts"] == "1"
        assert found.info.status == ("FAILED" if trial is ever else "FINISHED")
        if trial is not ever:
            steps = sorted(
                metric.step for metric in client.get_metric_history(each["run_id"], "accuracy")
            )
            assert steps == list(range(7)), "each round once"
    died = (planned.trials[0].folder / "error-1.txt").read_text()
    assert died.startswith("its process") and "out of memory?" in died
    lines = (planned.folder / "trials.csv").read_text().splitlines()
    assert ["no room today" in line for line in lines[1:]] == [False, True]


# -- rungs -----------------------------------------------------------------------------------------


def test_rungs():
    plain = EarlyStopping(grace_period=3, reduction_factor=3)
    assert (
        plain.rungs(81) == [3, 9, 27] and plain.rungs(82) == [3, 9, 27, 81] and plain.rungs(3) == []
    )
    assert EarlyStopping(grace_period=3, reduction_factor=3, max_rounds=20).rungs(81) == [3, 9, 20]
    modes: Any = ("loss", None), ("loss", "max"), ("x/y", "min")
    assert [EarlyStopping(metric=metric, mode=mode).lower for metric, mode in modes] == [
        True,
        False,
        True,
    ]


def climbed(ladder: RungTracker, records: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    found = [ladder.climb(record) for record in records]
    return [(at["rung"], at["value"]) for at in found if at]


def test_a_rung_is_reached_once_with_the_first_value_there():
    records = [
        {"round": float(t), **({"loss": 1 / (t + 1)} if t % 4 == 0 else {})} for t in range(20)
    ]
    stopping = EarlyStopping(metric="loss", grace_period=2, reduction_factor=2)
    assert climbed(RungTracker(stopping, 20), records) == [(4, 1 / 5), (8, 1 / 9), (16, 1 / 17)]


@pytest.mark.parametrize(("metric", "worst"), [("loss", WORST_VALUE), ("accuracy", -WORST_VALUE)])
def test_what_is_not_finite_is_the_worst(metric, worst):
    stopping = EarlyStopping(metric=metric, grace_period=1)
    assert climbed(RungTracker(stopping, 9), [{"round": 1.0, metric: float("nan")}]) == [(1, worst)]


def test_a_metric_that_never_comes_is_named():
    ladder = RungTracker(EarlyStopping(metric="metric/qp_activ", grace_period=2), 9)
    assert ladder.climb({"round": 1.0, "metric/qp_active": 1.0}) is None
    with pytest.raises(
        RaysimError, match="round 2 there is no 'metric/qp_activ'; did you mean 'metric/qp_active'"
    ):
        ladder.climb({"round": 2.0, "metric/qp_active": 1.0})
