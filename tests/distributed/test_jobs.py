"""What must hold on a real cluster of three nodes: a run on all of them is the one of a single
process, and commands work as jobs."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient, JobType
from ray.runtime_env import RuntimeEnv
from support.forked import Forked, call
from support.mlflow_server import Server
from support.processes import client_of, steps_of, until
from support.programs import program

import raysim
from raysim.cli.jobs import checked_command
from raysim.distributed.cluster import versions
from raysim.distributed.cluster.jobs import JobClient
from raysim.errors import ConfigError
from raysim.runs.resume import resume

pytestmark = pytest.mark.ray

TOKEN = "0123456789" * 4

STARTED = "Ray runtime started"
"""Output of `ray start` once its node has joined the cluster."""

METHOD = program("jobs_method")


def free_ports(count: int) -> list[int]:
    """Between the ports that Ray gives its workers and those that the system gives away, so that no
    other process takes one before it is used."""
    free: list[int] = []
    while len(free) < count:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            free.append(port)
    return sorted(set(free)) if len(set(free)) == count else free_ports(count)


@dataclass
class Nodes:
    """`ray start` three times, each in a process group of its own, by which it is ended. The first
    node, `head`, has no CPUs for actors; `second` and `third` have two each."""

    folder: Path
    address: str = ""
    dashboard: str = ""
    processes: list[subprocess.Popen] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        patience = {"RAY_raylet_start_wait_time_s": "180", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, **patience}

    def start(self) -> None:
        port, dashboard, client = free_ports(3)
        self.address, self.dashboard = f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}"
        head = [
            "--head",
            f"--port={port}",
            f"--dashboard-port={dashboard}",
            f"--ray-client-server-port={client}",
        ]
        self._join(*head, "--dashboard-host=127.0.0.1", name="head", cpus=0)
        until(lambda: self._answer("jobs/") is not None, 120, "the head does not answer")
        # A job that begins before they have joined is refused: the head has no CPUs.
        for name in ("second", "third"):
            self._join(f"--address={self.address}", name=name, cpus=2)

    def _join(self, *options: str, name: str, cpus: int) -> None:
        """Start a node, again if `ray start` gives up, as it does on a busy machine."""
        said = self.folder / "nodes.txt"
        self._node(*options, name=name, cpus=cpus)
        before = said.read_text().count(STARTED)

        def has_joined() -> bool:
            if self.processes[-1].poll() is not None:
                self._node(*options, name=name, cpus=cpus)
            return said.read_text().count(STARTED) > before

        try:
            until(has_joined, 300, "no node joins")
        except AssertionError:
            pytest.fail(f"no node joins: {said.read_text()}")

    def _node(self, *options: str, name: str, cpus: int) -> None:
        agent, grpc, environment, metrics = free_ports(4)
        ports = [f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={grpc}"]
        ports += [f"--runtime-env-agent-port={environment}", f"--metrics-export-port={metrics}"]
        ports += [
            f"--temp-dir={self.folder}/{len(self.processes)}"
        ]  # each removes what it does not need itself
        ray = Path(sys.executable).with_name("ray")
        with (self.folder / "nodes.txt").open("a") as said:
            self.processes.append(
                subprocess.Popen(
                    [
                        ray,
                        "start",
                        *options,
                        *ports,
                        f"--node-name={name}",
                        f"--num-cpus={cpus}",
                        "--node-ip-address=127.0.0.1",
                        "--block",
                    ],
                    env={
                        **os.environ,
                        **self.environment,
                        "PATH": f"{ray.parent}:{os.environ['PATH']}",
                    },
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )
            )

    def _answer(self, path: str) -> Any:
        """Return what the dashboard answers to whom has the token; None if it does not."""
        asked = urllib.request.Request(
            f"{self.dashboard}/api/{path}", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        try:
            with urllib.request.urlopen(asked, timeout=5) as answer:
                return json.load(answer)
        except (OSError, ValueError, http.client.HTTPException):
            return None

    def stop(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):  # it gave up
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = Path("/tmp") / f"raysim-{os.getpid()}"  # Ray's sockets want a short path
    folder.mkdir()
    made = Nodes(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"))
    made.start()
    try:
        made.wait()
        yield made
    finally:
        made.stop()


def config(uri: str, **more: Any) -> dict[str, Any]:
    return {
        "rounds": 4,
        "data": "digits",
        "partition": {"name": "dirichlet", "clients": 12, "alpha": 0.5, "min_samples": 2},
        "model": {"name": "mlp", "hidden": [8]},
        "local": {"steps": 2, "batch_size": 8, "lr": 0.05},
        "schedule": {"cohort": 6},
        "resources": {"executor": "ray", "actors": 1, "cpus": 1, "timeout": 120},
        "checkpoint": {"every": 0},
        "tracking": {"uri": uri, "experiment": "cluster"},
        **more,
    }


def written(folder: Path, **what: Any) -> Path:
    (folder / "mine.yaml").write_text(yaml.safe_dump(config(**what)))
    (folder / "mymethod.py").write_text(METHOD)
    return folder


def runs_in(uri: str) -> list[Any]:
    client = client_of(uri)
    return client.search_runs([client.get_experiment_by_name("cluster").experiment_id])


WORDS = 64 * 8 + 8 + 8 * 10 + 10  # of the net: 64 pixels, 8 hidden units, 10 classes


def values(uri: str, run: Any, metric: str) -> list[float]:
    """The values of a metric after each training round."""
    history = client_of(uri).get_metric_history(run.info.run_id, metric)
    return [record.value for record in sorted(history, key=lambda r: r.step) if record.step]


def test_a_job_with_a_method_of_ones_own_on_three_nodes_is_the_run_of_one_process(
    nodes, server, tmp_path
):
    """It is packed and sent off, what it says comes back, and MLflow has all of it. A node with two
    actors sends one sum, in float64, for all of its clients, and gets the parameters once."""
    parts = {
        "schedule": {"cohort": 12},
        "batching": {"mode": "loop", "size": 1},
        "resources": {"executor": "ray", "actors": 4, "cpus": 1, "server_node": "head"},
    }
    written(tmp_path, uri=server.uri, algorithm="./mymethod.py:lazy", **parts)
    parts["resources"] = {"executor": "inline"}
    whole = raysim.run(
        config(server.uri, algorithm=f"{tmp_path}/mymethod.py:lazy", **parts),
        run_dir=str(tmp_path / "whole"),
    )
    code, said = call(
        *("submit", "--wait", "--address", nodes.dashboard, "--working-dir", tmp_path, "--"),
        *("run", "mine.yaml", "name=a job"),
        cwd=nodes.folder,
        **nodes.environment,
    )
    assert code == 0 and "round 4/4" in said and "run directory" in said, said
    (run,) = (r for r in runs_in(server.uri) if r.info.run_name == "a job")
    assert run.info.status == "FINISHED" and run.data.tags["digest"] == whole.digest
    assert steps_of(server.uri, run.info.run_id)["accuracy"] == [0, 1, 2, 3, 4]
    assert values(server.uri, run, "system/network/bytes_up") == [2 * 8 * WORDS] * 4
    assert values(server.uri, run, "system/network/bytes_down") == [2 * 4 * WORDS] * 4
    for name in ("second", "third"):
        assert values(server.uri, run, f"system/node/{name}/bytes_up") == [8 * WORDS] * 4
        assert min(values(server.uri, run, f"system/node/{name}/busy_seconds")) > 0
    trained = [
        values(server.uri, run, f"system/node/{name}/clients") for name in ("second", "third")
    ]
    assert [*map(sum, zip(*trained, strict=True))] == values(server.uri, run, "clients/used")
    utilization = values(server.uri, run, "system/worker_utilization")
    assert min(utilization) > 0 and max(utilization) <= 1
    number = re.search(r"job (\S+)", said)[1]  # type: ignore[index]
    code, said = call(
        "job", "list", "--address", nodes.dashboard, cwd=tmp_path, **nodes.environment
    )
    assert code == 0 and re.search(rf"{number}\s+succeeded\s+run mine.yaml", said)


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["data.root=/nowhere", "data=mnist"], 2, "/nowhere"),
        pytest.param(
            ["local.lr=1e30", "resources.executor=inline"],
            1,
            "failed in round 1: non-finite",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_job_that_fails_says_why_and_its_exit_code_comes_back(
    nodes, server, tmp_path, overrides, code, message
):
    written(tmp_path, uri=server.uri, algorithm="fedavg")
    submit = ("submit", "--wait", "--address", nodes.dashboard, "--", "run", "mine.yaml")
    ran, said = call(*submit, *overrides, cwd=tmp_path, **nodes.environment)
    assert ran == code and message in said and "has failed" in said, said


def test_a_job_that_is_stopped_keeps_what_is_done(nodes, server, tmp_path):
    run = tmp_path / "run"
    written(
        tmp_path,
        uri=server.uri,
        algorithm="fedavg",
        rounds=100_000,
        resources={"executor": "inline"},
        checkpoint={"every": 1_000_000},
    )
    place = ("--address", nodes.dashboard)
    code, said = call(
        "submit",
        *place,
        "--",
        "run",
        "mine.yaml",
        f"run_dir={run}",
        cwd=tmp_path,
        **nodes.environment,
    )
    assert code == 0, said
    number = re.search(r"job (\S+)", said)[1]  # type: ignore[index]
    until(lambda: b'"step": 3,' in spool(run), 120, "no round is done")
    code, said = call("job", "stop", number, *place, cwd=tmp_path, **nodes.environment)
    assert code == 0, said
    code, said = call("job", "logs", number, *place, cwd=tmp_path, **nodes.environment)
    assert code != 0 and "what was done is kept" in said and "has stopped" in said, said
    done = int(re.findall(r"continues after round (\d+)", said)[0])
    assert resume(run, {"rounds": done + 1, "resources.executor": "inline"}).rounds == done + 1 > 3


def spool(run: Path) -> bytes:
    path = run / "spool.jsonl"
    return path.read_bytes() if path.exists() else b""


def test_who_may_not_or_asks_for_nothing(nodes, tmp_path):
    wrong = {**nodes.environment, "RAY_AUTH_TOKEN": "9" * 40}
    code, said = call("job", "list", "--address", nodes.dashboard, cwd=tmp_path, **wrong)
    assert code == 2 and "token" in said.splitlines()[-1] and "Traceback" not in said, said
    for command in ("logs", "stop"):
        code, said = call(
            "job",
            command,
            "nosuch",
            "--address",
            nodes.dashboard,
            cwd=tmp_path,
            **nodes.environment,
        )
        assert code == 2 and said.splitlines()[-1].startswith("error: there is no job 'nosuch'"), (
            said
        )


def test_what_a_job_needs_is_packed_along(monkeypatch, tmp_path):
    sent = []

    class Client(JobSubmissionClient):
        def __init__(self, address: str):
            pass

        def submit_job(self, *, entrypoint: str, runtime_env: dict[str, Any], **_: Any) -> str:
            sent.append((entrypoint, RuntimeEnv(**runtime_env).to_dict()))
            return "1"

        def get_job_info(self, job_id: str) -> JobDetails:
            return JobDetails(
                submission_id=job_id,
                type=JobType.SUBMISSION,
                status=JobStatus.PENDING,
                entrypoint="",
            )

    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Client)
    needed = tmp_path / "requirements.txt"
    with pytest.raises(ConfigError, match="--requirements: there is no file"):
        checked_command(["run", "quickstart"], tmp_path, needed)
    needed.write_text("einops==0.8\n")
    JobClient("http://head:8265").submit(["run", "mine.yaml"], tmp_path, needed)
    JobClient("http://head:8265").submit(["run", "mine.yaml"], tmp_path)
    (entrypoint, environment), (_, bare) = sent
    assert entrypoint.endswith("run mine.yaml") and environment["working_dir"] == str(tmp_path)
    assert environment["pip"]["packages"] == ["einops==0.8"] and "pip" not in bare
    assert versions.EXPECTED_VERSIONS_VARIABLE in environment["env_vars"]


OLDER = """
import ray, raysim
from raysim.cli import main

{}
main()
"""


@pytest.mark.parametrize(
    ("older", "more", "said"),
    [
        (
            "from raysim.distributed.cluster import versions; versions.__version__ = '0.0.1'",
            {},
            "it has raysim .*, here is 0.0.1; install the same on both",
        ),
        pytest.param(
            "ray.__version__ = '0.0.1'",
            {},
            "Ray: .* Ray: 0.0.1 .*; install the same on both",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "",
            {"RAY_AUTH_TOKEN": "9" * 40},
            "RAY_AUTH_MODE=token and its ~/.ray/auth_token",
            marks=pytest.mark.long,
        ),
        ("", {"RAY_ADDRESS": "127.0.0.1:1"}, "is it running"),
    ],
    ids=["raysim", "ray", "token", "address"],
)
def test_a_run_that_cannot_join_says_why(nodes, tmp_path, older, more, said):
    written(tmp_path, uri=f"sqlite:///{tmp_path}/mlflow.db", algorithm="fedavg")
    place = {**nodes.environment, "RAY_ADDRESS": nodes.address, **more}
    arguments = ("run", "mine.yaml", "run_dir=run")
    code, output = Forked("-c", OLDER.format(older), *arguments, cwd=tmp_path, **place).ended()
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1 and re.search(said, errors[0]), output
    assert "Traceback" not in output and not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["raysim", "ray", "python"])
def test_a_job_that_others_sent_off_is_refused(monkeypatch, name):
    monkeypatch.setenv(
        versions.EXPECTED_VERSIONS_VARIABLE, json.dumps(versions.installed_versions())
    )
    versions.check_versions()
    monkeypatch.setenv(
        versions.EXPECTED_VERSIONS_VARIABLE,
        json.dumps({**versions.installed_versions(), name: "0.0.1"}),
    )
    with pytest.raises(
        ConfigError, match=f"submitted with {name} 0.0.1, .*install the same version on both"
    ):
        versions.check_versions()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("rnu mine.yaml", "did you mean 'run'"),
        ("run mine.yaml tracking.uri=mlruns", "tracking.uri: 'mlruns' is a folder"),
        ("resume /shared/run tracking.uri=mlruns", "tracking.uri: 'mlruns' is a folder"),
        ("run mine.yaml tracking.uri=sqlite:///mlflow.db", "tracking.uri: .*would be deleted"),
        ("run nosuch.yaml", "nosuch"),
        ("run mine.yaml roudns=3", "did you mean 'rounds'"),
        ("run mine.yaml algorithm=/tmp/x.py:Y", "/tmp/x.py"),
        ("run ../outside.yaml", "outside of --working-dir"),
        ("run mine.yaml seed=0..4", "seed: .*integer"),
        ("sweep mine.yaml seed=4..0", "write 0..4"),
        ("sweep mine.yaml algorithm=fedavg,/tmp/x.py:Y", "/tmp/x.py"),
        ("sweep mine.yaml local.lr=uniform(0.1,1)", "sweep.samples"),
        ("sweep mine.yaml seed=0,1 --ledger mine.jsonl", "--ledger: mine.jsonl would be deleted"),
        ("run mine.yaml run_dir=mine", "run_dir: mine would be deleted"),
        ("sweep mine.yaml seed=0,1 --dir trials", "--dir: trials would be deleted"),
        ("resume /shared/run --fork run_dir=mine", "run_dir: mine would be deleted"),
        ("run mine.yaml run_dir=~/mine", "run_dir: ~/mine would be deleted"),
        ("run child.yaml", "outside.yaml: is outside of --working-dir"),
        ("run left_out.yaml", "base.yaml is not uploaded with the job"),
    ],
)
def test_what_cannot_work_as_a_job_is_refused_here(tmp_path, command, said):
    (tmp_path / "in").mkdir()
    written(tmp_path / "in", uri="http://tracking:5000", algorithm="fedavg")
    mine = (tmp_path / "in" / "mine.yaml").read_text()
    (tmp_path / "outside.yaml").write_text(mine)
    (tmp_path / "in" / "child.yaml").write_text("extends: ../outside.yaml")
    (tmp_path / "in" / "base.yaml").write_text(mine)
    (tmp_path / "in" / ".rayignore").write_text("base.yaml")
    (tmp_path / "in" / "left_out.yaml").write_text("extends: base.yaml")
    with pytest.raises(ConfigError, match=said):
        checked_command(command.split(), tmp_path / "in")
    assert checked_command(
        ["run", str(tmp_path / "in" / "mine.yaml"), "rounds=3"], tmp_path / "in"
    ) == [
        "run",
        "mine.yaml",
        "rounds=3",
    ]
    assert (
        checked_command(["run", "quickstart", "tracking.uri=http://x:5000"], tmp_path / "in")[1]
        == "quickstart"
    )
    (tmp_path / "in" / "child.yaml").write_text(f"extends: {tmp_path}/outside.yaml")
    assert checked_command(["run", "child.yaml"], tmp_path / "in") == ["run", "child.yaml"]
    several = ["sweep", "mine.yaml", "local.lr=uniform(0.1,1)", "sweep.samples=3", "seed=0..4"]
    several += ["--ledger", "/shared/mine.jsonl"]
    assert checked_command(several, tmp_path / "in") == several
