"""A sweep whose driver is killed in the middle is completed by the same command: nothing twice,
nothing missing.

And what a person sees of it in MLflow's pages.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.forked import Forked, call
from support.mlflow_server import Server
from support.processes import client_of, steps_of, until

from raysim.system import lock
from raysim.system.processes import Process, descendants

pytestmark = pytest.mark.ray

GRID = {
    "rounds": 20,
    "data": "digits",
    "partition": {"name": "iid", "clients": 20},
    "model": {"name": "mlp", "hidden": [8]},
    "algorithm": "fedavg",
    "local": {"steps": 2, "batch_size": 8},
    "schedule": {"cohort": 4},
    "checkpoint": {"every": 2},
    "tracking": {"experiment": "killed"},
}

THREE_TRIALS = {"local.lr": [0.05, 0.1, 0.2]}
LARGE = {"algorithm": ["fedavg", "fedavgm"], "local.lr": [0.02, 0.05, 0.1, 0.2], "seed": "0..5"}
"""48 trials."""


def results(folder: Path) -> dict[Path, int]:
    """The trials that are finished, and when they were."""
    return {
        path: path.stat().st_mtime_ns for path in folder.glob("runs/killed/trials/*/result.json")
    }


def killed_and_resumed(
    folder: Path, varied: dict[str, Any], count: int, parallel: int
) -> tuple[str, str]:
    """The address of the database and the id of the parent run."""
    (folder / "grid.yaml").write_text(json.dumps({**GRID, "sweep": varied}))  # JSON is YAML
    command = ("sweep", "grid.yaml", "--parallel", parallel)
    driver = Forked("-m", "raysim", *command, cwd=folder)
    until(
        lambda: len(results(folder)) >= count // 3 or not driver.alive(), 400, "no trial finishes"
    )
    there = Process.at(driver.pid)
    assert driver.alive() and there is not None, driver.output
    started = descendants([there])[1:]
    os.kill(driver.pid, signal.SIGKILL)
    assert driver.wait() == -signal.SIGKILL
    trials = [path.parent for path in folder.glob("runs/killed/trials/*/config.yaml")]
    until(lambda: not any(map(lock.running, trials)), 60, "a trial outlives its driver")
    # A trial that has ended writes its result after it has released its folder.
    until(lambda: not any(one.alive for one in started), 60, "a process outlives the driver")
    before = results(folder)
    assert count // 3 <= len(before) < count
    code, output = call(*command, "--json", cwd=folder, seconds=580)
    assert code == 0, output
    told = json.loads(output.splitlines()[-1])
    assert (told["finished"], told["reused"]) == (count, len(before)), output
    after = results(folder)
    assert len(after) == count and {path: after[path] for path in before} == before, (
        "finished trials are not run again"
    )
    uri = f"sqlite:///{folder}/mlflow.db"
    check(uri, told, count)
    return uri, told["run_id"]


def check(uri: str, told: dict[str, Any], count: int) -> None:
    """MLflow has one parent and all its children, each whole."""
    client = client_of(uri)
    runs = client.search_runs(
        [client.get_experiment_by_name("killed").experiment_id], max_results=1000
    )
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run is not parent]
    assert parent.info.run_id == told["run_id"] and parent.info.status == "FINISHED"
    assert len(children) == count and {run.info.status for run in children} == {"FINISHED"}
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert {run.info.run_id for run in children} == {each["run_id"] for each in told["trials"]}
    for run in children:
        assert steps_of(uri, run.info.run_id)["accuracy"] == list(range(21)), "each round once"
    kept = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert {"table.md", "table.csv", "trials.csv", "curves.png"} <= kept
    assert ("heatmap.png" in kept) == ("algorithm" in told["trials"][0]["values"]), "of two keys"


def test_a_sweep_whose_driver_is_killed_is_completed(tmp_path: Path):
    killed_and_resumed(tmp_path, THREE_TRIALS, 3, parallel=1)


@pytest.mark.long
def test_a_sweep_of_48_trials_and_what_mlflow_shows_of_it(tmp_path: Path):
    uri, parent = killed_and_resumed(tmp_path, LARGE, 48, parallel=2)
    browser = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if browser is None:
        pytest.skip(
            "the sweep is complete, but there is no Chromium to look at MLflow's pages with"
        )
    experiment = client_of(uri).get_experiment_by_name("killed").experiment_id
    server = Server(tmp_path)
    server.start(uri)
    try:
        server.wait()
        look(browser, f"{server.uri}/#/experiments/{experiment}/runs", parent, tmp_path)
    finally:
        server.stop()


def look(browser: str, runs: str, parent: str, folder: Path) -> None:
    """At the pages of the runs, of the parent with its children, and of the picture that compares
    them; screenshots are left in the folder."""
    options = [
        "--headless",
        "--no-sandbox",
        "--window-size=1500,1000",
        "--virtual-time-budget=60000",
    ]

    def page(place: str, name: str) -> str:
        """The page, once it has come to rest, as HTML."""
        called = [browser, *options, f"--user-data-dir={folder}/browser"]
        subprocess.run(
            [*called, f"--screenshot={folder}/{name}.png", runs + place], check=True, timeout=200
        )
        shown = subprocess.run(
            [*called, "--dump-dom", runs + place], check=True, timeout=200, stdout=subprocess.PIPE
        )
        return html.unescape(shown.stdout.decode())

    def words(place: str, name: str) -> str:
        return " ".join(re.sub(r"<[^>]*>", " ", page(place, name)).split())

    table = words("", "runs")
    assert "Training runs" in table and " grid " in table and "49 matching runs" in table, table
    overview = words(f"/{parent}", "parent")
    assert (
        parent in overview
        and re.search(r"Status Finished\b", overview)
        and re.search(r"\bfinished ?: 48\b", overview)
    )
    children = re.search("Child runs (.*?) Source raysim", overview)
    assert children and children[1].endswith("Load more"), overview
    assert len(re.findall(r"algorithm=fedavgm? local\.lr=0\.\d+ seed=\d", children[1])) == 10, (
        "they come in tens"
    )
    for name in ("curves.png", "heatmap.png"):
        picture = page(f"/{parent}/artifacts/{name}", name.removesuffix(".png"))
        assert re.search(rf'<img alt="{name}" src="blob:', picture) and "trials.csv" in picture
