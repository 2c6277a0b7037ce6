"""What must hold of a run taken up again by its MLflow id, or as another one; and that a password
stays here."""

from __future__ import annotations

import base64
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.forked import call
from support.processes import basic, client_of, each_step_once, timeless, written

import raysim
from raysim.engine.state import checkpoint
from raysim.errors import ConfigError
from raysim.runs.resume import fork, forked, resume

pytestmark = pytest.mark.ray


def stopped(config: dict[str, Any], number: int) -> None:
    def progress(record: dict[str, float]) -> None:
        if record["round"] == number:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        raysim.run(config, progress=progress)


def id_of(folder: Path) -> str:
    saved = checkpoint.read_latest(folder)
    assert saved is not None
    return saved.facts["run_id"]


@pytest.fixture
def config(tmp_path: Path, uri: str) -> dict[str, Any]:
    return basic(tmp_path, uri) | {"rounds": 9, "checkpoint": {"every": 3}}


def test_a_run_goes_on_by_its_mlflow_id(config, uri, tmp_path):
    """Wherever the command is given; and if the folder is gone, it says where that was."""
    whole = raysim.run(config, run_dir=str(tmp_path / "whole"))
    stopped(config, 7)
    run_id = id_of(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    code, output = call("resume", run_id, f"tracking.uri={uri}", cwd=tmp_path / "elsewhere")
    assert code == 0, output
    found = client_of(uri).get_run(run_id)
    assert found.info.status == "FINISHED" and found.data.tags["digest"] == whole.digest
    each_step_once(uri, run_id, whole_history(tmp_path / "run"))
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=rf"{tmp_path / 'run'}.*not on this machine"):
        resume(run_id, {"tracking.uri": uri})
    with pytest.raises(ConfigError, match=r"is not found"):
        resume("0" * 32, {"tracking.uri": uri})


def whole_history(folder: Path) -> list[dict[str, float]]:
    saved = checkpoint.read_latest(folder)
    assert saved is not None
    return saved.facts["history"]


def test_reports_tell_a_fork_from_a_plain_run_and_use_the_last_rounds(config, uri, tmp_path):
    """Three runs end with local.lr=0.2 after 9 rounds: a plain one, a fork, and the plain one of
    another seed, which was begun with fewer rounds."""
    config |= {"local": config["local"] | {"lr": 0.2}}
    plain = raysim.run(config, run_dir=str(tmp_path / "plain"))
    raysim.run(config, {"local.lr": 0.05, "rounds": 6})
    forks = fork(
        tmp_path / "run", {"local.lr": 0.2, "rounds": 9, "run_dir": str(tmp_path / "fork")}
    )
    other = raysim.run(config, {"seed": 1, "rounds": 6}, run_dir=str(tmp_path / "other"))
    other = resume(tmp_path / "other", {"rounds": 9})
    table = raysim.report("table", tmp_path.name, uri=uri)
    rows = table[table["rounds"] == 9].fillna({"fork": ""}).set_index("fork")
    best = [run.metrics["accuracy"]["best"] for run in (plain, forks, other)]
    assert rows.loc[""]["seeds"] == 2 and len(rows) == 2
    assert rows.loc[""]["best"] == pytest.approx((best[0] + best[2]) / 2)
    (name,) = filter(None, rows.index)
    assert name.startswith("after round 6: ") and "local.lr: 0.05 -> 0.2" in name
    assert rows.loc[name]["best"] == pytest.approx(best[1])


def test_a_fork_is_a_new_run_under_the_old_one(config, uri, tmp_path, monkeypatch):
    """It has the old history to the fork, and from there on what the same change at that round
    would have given."""
    wanted = raysim.run(
        config, {"local.lr": [[0, 0.05], [6, 0.2]]}, run_dir=str(tmp_path / "wanted")
    )
    stopped(config, 7)
    monkeypatch.chdir(tmp_path)
    before = {
        p: p.read_bytes()
        for p in checkpoint.checkpoints_folder(tmp_path / "run").rglob("*")
        if p.is_file()
    }
    old = id_of(tmp_path / "run")
    told: list[float] = []
    done = fork("run", {"local.lr": 0.2}, progress=lambda record: told.append(record["round"]))
    assert done.run_dir.resolve() != tmp_path / "run" and done.run_id != old
    assert done.state_digest == wanted.state_digest and timeless(done.history) == timeless(
        wanted.history
    )
    assert told == list(range(10))
    run = client_of(uri).get_run(done.run_id)
    tags = run.data.tags
    assert tags["mlflow.parentRunId"] == old == tags["fork.of"] and tags["fork.round"] == "6"
    assert tags["fork.changes"] == "local.lr: 0.05 -> 0.2" and run.info.status == "FINISHED"
    each_step_once(uri, done.run_id, done.history)
    assert before == {
        p: p.read_bytes()
        for p in checkpoint.checkpoints_folder(tmp_path / "run").rglob("*")
        if p.is_file()
    }
    again = resume("run")
    assert again.run_id == old and again.digest != done.digest, (
        "the old run can still go on as it was"
    )


def test_a_fork_that_is_killed_goes_on_under_its_own_id(config, uri, tmp_path, monkeypatch):
    stopped(config, 7)
    monkeypatch.chdir(tmp_path)
    whole = fork("run", {"local.lr": 0.2, "run_dir": "whole"})

    def progress(record: dict[str, float]) -> None:
        if record["round"] == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fork("run", {"local.lr": 0.2, "run_dir": "half"}, progress=progress)
    done = resume("half")
    assert done.state_digest == whole.state_digest and done.run_id not in (
        whole.run_id,
        id_of(tmp_path / "run"),
    )
    each_step_once(uri, done.run_id, done.history)
    assert client_of(uri).get_run(done.run_id).data.tags["mlflow.parentRunId"] == id_of(
        tmp_path / "run"
    )


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ({"partition.alpha": 0.1}, "partition.alpha"),
        ({"data.augment": True}, "data.augment"),
        ({"model.hidden": [8]}, "model.hidden"),
        ({"model": "logistic"}, r"model\."),
        ({"rounds": 6}, "rounds"),
        ({"algorithm": "scaffold"}, r"algorithm.*'c' is missing"),
    ],
)
def test_what_a_fork_cannot_change_is_refused(config, tmp_path, monkeypatch, override, key):
    """With exit code 2, and nothing begins."""
    stopped(config, 7)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=key):
        fork("run", override)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("privacy", "overrides"),
    [
        (None, [{"privacy.noise_multiplier": 1.0}]),
        (
            {"noise_multiplier": 2.0},
            [{"privacy.noise_multiplier": 1.0}, {"local.batch_size": 3}],
        ),
        ({"unit": "client"}, [{"schedule.cohort": 2}, {"schedule.sampling": "poisson"}]),
    ],
)
def test_a_fork_keeps_what_epsilon_counts(config, tmp_path, privacy, overrides):
    """The ε of rounds with different noise is that of their composition, not that of all rounds
    with the new noise."""
    private = {"algorithm": "fedavg", "privacy": privacy, "checkpoint": {"every": 1}}
    stopped(config | private, 2)
    for override in overrides:
        key = next(iter(override))
        with pytest.raises(ConfigError, match=rf"^{key}.*: 'privacy/epsilon' counts"):
            forked(tmp_path / "run", override)
    without = {key: value for key, value in overrides[-1].items() if "privacy" not in key}
    without |= {"privacy": None, "run_dir": str(tmp_path / "fork")}
    assert forked(tmp_path / "run", without)[0].config.privacy is None


def test_a_fork_takes_up_what_clients_have_kept_or_nothing(config, tmp_path, monkeypatch):
    stopped(config | {"algorithm": "scaffold"}, 7)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"algorithm.*c_i.*x_prev"):
        fork("run", {"algorithm": "gradma_w"})
    done = fork("run", {"algorithm": "fedavg"})
    assert done.rounds == 9


def test_a_run_stays_in_its_folder(config, tmp_path):
    stopped(config, 7)
    with pytest.raises(ConfigError, match="run_dir: the run stays in"):
        resume(tmp_path / "run", {"run_dir": str(tmp_path / "other")})


def test_a_fork_on_the_command_line(config, uri, tmp_path):
    stopped(config, 7)
    code, output = call("resume", tmp_path / "run", "--fork", "local.lr=0.2", cwd=tmp_path)
    assert code == 0, output
    (made,) = [p.parent for p in (tmp_path / "runs").rglob("config.yaml")]
    assert str(made.relative_to(tmp_path)) in output
    code, output = call("resume", tmp_path / "run", "--fork", "partition.alpha=0.9", cwd=tmp_path)
    assert code == 2 and "error: partition.alpha: " in output and "Traceback" not in output


# -- passwords -------------------------------------------------------------------------------------

SECRET = "correct-horse-battery"


class Listener(http.server.BaseHTTPRequestHandler):
    """Answers nothing but refusals, and remembers what it was sent."""

    heard: list[bytes]

    def _hear(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.heard.append(self.path.encode() + b"\n" + body)
        self.send_error(503)

    do_GET = do_POST = do_PATCH = do_PUT = _hear

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[tuple[int, list[bytes]]]:
    Listener.heard = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Listener)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1], Listener.heard
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_password_in_an_address_is_not_said(config, tmp_path, refusing, monkeypatch):
    """Not where the server fails at once, nor where the run goes on without it, nor in `tracking
    sync`."""
    port, heard = refusing
    config["tracking"] = {
        "uri": f"http://user:{SECRET}@127.0.0.1:{port}",
        "experiment": "secret",
        "required": False,
    }
    code, output = call("run", written(tmp_path, config | {"rounds": 3}), cwd=tmp_path)
    assert code == 0 and heard and SECRET not in output, output
    code, output = call("tracking", "sync", tmp_path / "run", cwd=tmp_path)
    assert code == 2 and "MLFLOW_TRACKING_PASSWORD" in output and SECRET not in output, output
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "user")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRET)
    code, output = call("tracking", "sync", tmp_path / "run", cwd=tmp_path)
    assert code == 1 and SECRET not in output, output
    config["tracking"]["required"] = True
    code, output = call(
        "run", written(tmp_path, config), f"run_dir={tmp_path / 'required'}", cwd=tmp_path
    )
    assert code == 1 and f"127.0.0.1:{port}" in output and SECRET not in output, output
    assert not any(SECRET.encode() in body for body in heard)
    assert not any(base64.b64encode(SECRET.encode()) in body for body in heard)
