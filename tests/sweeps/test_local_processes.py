"""What must hold of trials in processes of this machine when something breaks: the sweep ends, names
the trial and the cause, and leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest
import yaml
from support.forked import Forked
from support.processes import until
from support.sweeps import SMALL

import raysim
from raysim.errors import ConfigError
from raysim.sweeps.preparation import prepare_sweep
from raysim.system import lock

BAD = """
import os
from dataclasses import dataclass
from raysim.rules import ClientRule

@dataclass(frozen=True)
class Bad(ClientRule):
    def direction(self, shared, state, batch, task):
        if task.t >= 2:  # which no dry run reaches
            {how}
        return task.grad(state['w'], batch)
"""


def failed(how: str) -> tuple[str, str]:
    """The error of a trial with a rule that does this, and its error.txt."""
    Path("bad.py").write_text(BAD.format(how=how))
    outcome = raysim.sweep({**SMALL, "algorithm": "./bad.py:Bad"}, {"seed": [0]})
    ((trial, error),) = outcome.failed
    return error, (trial.folder / "error.txt").read_text()


def test_a_process_that_exits_is_named_with_its_code_and_output(here: Path):
    error, kept = failed("print('so long'); os._exit(3)")
    assert error == kept and error.startswith(
        "its process ended with exit code 3; its output is in"
    )
    assert Path(error.rpartition(" ")[2]).read_text().startswith("so long")


def test_a_full_disk_for_the_output_fails_no_trial(here: Path):
    """As in a run of its own."""
    Path("bad.py").write_text(BAD.format(how="print('x' * 100000)"))
    config, varied = {**SMALL, "algorithm": "./bad.py:Bad"}, {"seed": [0]}
    folder = prepare_sweep(config, varied).folder
    folder.mkdir(parents=True)
    (folder / "output.txt").symlink_to("/dev/full")
    assert not raysim.sweep(config, varied).failed


def test_a_dead_process_is_noticed_while_its_child_lives(here: Path):
    """The child holds the connection to the sweep."""
    error, kept = failed("os.system('sleep 400 & echo $! > child'); os.kill(os.getpid(), 9)")
    os.kill(int(Path("child").read_text()), signal.SIGKILL)  # which raises if it has ended
    assert error == kept == "its process was killed (out of memory?)"


@pytest.mark.parametrize("executor", ["inline", "ray"])
def test_an_object_that_cannot_be_sent_is_refused(executor: str, here: Path):
    mutex = threading.Lock()

    def lr(t: int) -> float:
        with mutex:
            return 0.1

    with pytest.raises(ConfigError, match=r"seed=0: .*lr.*cannot be sent.*cannot pickle"):
        raysim.sweep(SMALL, {"local.lr": lr, "seed": [0, 1], "resources.executor": executor})
    assert not [*here.glob("runs/*/sweeps/*/*")], "nothing has started"


IDLE = """
import os, time
from dataclasses import dataclass
from pathlib import Path
from raysim.rules import ClientRule

@dataclass(frozen=True)
class Idle(ClientRule):
    dies: bool = False

    def direction(self, shared, state, batch, task):
        if task.t >= 2 and not self.dies:
            Path("idle").write_text(str(os.getpid()))
        if task.t >= 2 and self.dies and not os.path.exists("spared"):
            while not os.path.exists("ended"):
                time.sleep(0.01)
            os.rename("ended", "spared")
            os.kill(os.getpid(), 9)
        return task.grad(state['w'], batch)
"""


def test_the_death_of_an_idle_process_is_no_attempt_of_a_trial(here: Path):
    """The retry of the second trial is given to the process that has ended the first."""
    Path("idle.py").write_text(IDLE)

    def watch(trial, state, facts):
        if state == "finished" and not Path("spared").exists():
            idle = int(Path("idle").read_text())
            os.kill(idle, signal.SIGKILL)
            os.waitid(os.P_PID, idle, os.WEXITED | os.WNOWAIT)
            Path("ended").touch()

    config = {**SMALL, "algorithm": "./idle.py:Idle", "sweep": {"retries": 1}}
    outcome = raysim.sweep(config, {"algorithm.dies": [False, True]}, parallel=2, watch=watch)
    assert not outcome.failed
    assert [trial.failures for trial in outcome.sweep.trials] == [0, 1]


def test_a_folder_that_cannot_be_created_is_a_mistake(here: Path):
    Path("runs").mkdir()
    Path("runs/swept").touch()
    with pytest.raises(ConfigError, match=r"--dir: .*cannot be created"):
        raysim.sweep(SMALL, {"seed": [0, 1]})


@pytest.mark.parametrize("parallel", [0, -1])
def test_no_trials_at_once_is_a_mistake(parallel: int, here: Path):
    with pytest.raises(ConfigError, match=f"parallel: {parallel}"):
        raysim.sweep(SMALL, {"seed": [0, 1]}, parallel=parallel)


def test_an_error_of_watch_ends_the_trials(here: Path):
    """And their records."""

    def spools() -> list[str]:
        return [path.read_text() for path in here.glob("runs/*/trials/*/spool.jsonl")]

    def all_started() -> bool:
        return sum('"start"' in spool for spool in spools()) == 2

    def watch(trial, state, facts):
        if state == "finished":
            until(all_started, 60, "both trials have records")
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        raysim.sweep(SMALL, {"rounds": [2, 9000]}, parallel=2, watch=watch)
    assert sorted(spool.count("KILLED") for spool in spools()) == [0, 1]


def test_what_a_trial_has_started_ends_with_its_sweep(here: Path):
    """As the processes of a DataLoader do."""
    child = Path("child")
    how = "os.system('sleep 900 & echo $! > new; mv new child'); import time; time.sleep(900)"
    Path("bad.py").write_text(BAD.format(how=how))

    def watch(trial, state, facts):
        if state == "finished":
            until(child.exists, 100, "the other trial does not train")
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        raysim.sweep(SMALL, {"algorithm": ["fedavg", "./bad.py:Bad"]}, parallel=2, watch=watch)
    started = int(child.read_text())
    until(lambda: not psutil.pid_exists(started), 20, "the trial's child outlives it")


def test_a_path_among_the_places_of_modules(here: Path, monkeypatch: pytest.MonkeyPatch):
    """Python ignores it."""
    monkeypatch.setattr(sys, "path", [*sys.path, here])
    assert not raysim.sweep(SMALL, {"seed": [0]}).failed


def test_a_trial_whose_sweep_is_killed_has_not_failed(here: Path):
    """It reports at each rung, which is each round here."""
    section = {
        "early_stopping": {"metric": "accuracy", "grace_period": 1, "reduction_factor": 1.0001}
    }
    config = {**SMALL, "rounds": 9000, "sweep": {"seed": [0], **section}}
    Path("long.yaml").write_text(yaml.safe_dump(config))
    driver = Forked("-m", "raysim", "sweep", "long.yaml", cwd=here)

    def rounds() -> int:
        """How many rounds the trial has recorded."""
        return sum(
            path.read_text().count("accuracy") for path in here.glob("runs/*/trials/*/spool.jsonl")
        )

    until(lambda: rounds() > 3 or not driver.alive(), 400, "no trial trains")
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    (trial,) = here.glob("runs/*/trials/*")
    until(lambda: not lock.running(trial), 60, "a trial outlives its sweep")
    assert not (trial / "error.txt").exists()
