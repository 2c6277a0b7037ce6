"""The names that a user imports from raysim, and a run's result when it is loaded again."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.sweeps import SMALL, trained_in_this_process

import raysim
from raysim.errors import ConfigError
from raysim.runs.result import digest_of_state
from raysim.sweeps import preparation, search_space
from raysim.tracking.mlflow_client import MLFLOW_ENVIRONMENT


@pytest.fixture
def config(base: dict[str, Any]) -> dict[str, Any]:
    """Three rounds on a net with BatchNorm statistics, with a checkpoint after the second."""
    return {
        **base,
        "algorithm": "fedavgm",
        "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 6},
        "schedule": {"cohort": 3},
        "local": {"epochs": 1, "batch_size": 32},
        "rounds": 3,
        "evaluate": {"every": 2},
        "checkpoint": {"every": 2},
    }


def stopped(config: dict[str, Any]) -> raysim.RunResult:
    return raysim.run(config, progress=lambda record: "enough" if record["round"] == 1 else None)


def test_the_public_names_and_the_rooms_beside_them():
    """`raysim.sweep` is a function whatever was imported; the package of sweeps has another name."""
    for name in ("run", "resume", "fork", "sweep", "load", "quadratic_problem"):
        assert callable(getattr(raysim, name)) and name in raysim.__all__ and name in dir(raysim)
    for name in ("ClientRule", "ServerRule", "Algorithm", "Probe", "RunResult"):
        assert isinstance(getattr(raysim, name), type) and name in raysim.__all__
    assert raysim.sweeps.search_space is search_space
    with pytest.raises(AttributeError, match="simulate"):
        raysim.simulate  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_a_report_leaves_the_environment_as_it_was(config, monkeypatch):
    """A script may call MLflow as well, with the retries that its user has set."""

    def environment() -> dict[str, str]:
        """Environment without what MLflow writes there for its own use."""
        return {k: v for k, v in os.environ.items() if not k.startswith("_MLFLOW_")}

    monkeypatch.setenv("_MLFLOW_TELEMETRY_SESSION_ID", "of an import before")  # MLflow removes it
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    for name in MLFLOW_ENVIRONMENT.keys() - {"MLFLOW_HTTP_REQUEST_TIMEOUT"}:
        monkeypatch.delenv(name, raising=False)
    before = environment()
    run_id = raysim.run(config).run_id
    assert len(raysim.report("table", run_id, uri=config["tracking"]["uri"])) == 1
    with pytest.raises(ConfigError):
        raysim.report("table", "none", uri=config["tracking"]["uri"])
    assert environment() == before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators")
def test_a_run_leaves_the_allocator_returning_memory(config):
    def kept() -> float:
        """Megabytes of 200 that this process has after it has freed them, and did not have before."""
        before, arrays = memory(), [None] * 200
        arrays[:] = [np.ones(2**17) for _ in arrays]
        del arrays
        return memory() - before

    raysim.run(config, tracking=False)
    assert kept() < 100


def memory() -> float:
    """Resident megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_the_quadratics_of_a_methods_test():
    """H_i and a_i come with the shapes of the keys; the mean's gradient vanishes at its optimum."""
    f = raysim.quadratic_problem(clients=3, dimensions=2)
    assert f.H.shape == (3, 2, 2) and f.a.shape == (3, 2)
    at_optimum = sum(H @ (f.optimum - a) for H, a in zip(f.H, f.a, strict=True))
    assert abs(at_optimum).max() < 1e-12
    with pytest.raises(ConfigError, match="dimension"):
        raysim.quadratic_problem(dimension=2)


def test_a_finished_run_is_loaded_as_it_was_returned(config):
    done = raysim.run(config)
    for loaded in (
        raysim.load(done.run_dir),
        raysim.load(done.run_id, tracking_uri=config["tracking"]["uri"]),
    ):
        assert torch.equal(loaded.parameters, done.parameters) and loaded.digest == done.digest
        assert loaded.state_digest == done.state_digest != ""
        assert list(loaded.state_dict) == list(done.state_dict), "the net's order"
        assert all(
            torch.equal(loaded.state_dict[name], value) for name, value in done.state_dict.items()
        )
        assert (
            loaded.history == done.history and loaded.rounds == 3 and loaded.metrics == done.metrics
        )
        assert loaded.config.dump() == done.config.dump() and loaded.config.rounds == 3
        assert (loaded.run_id, loaded.run_dir.resolve()) == (done.run_id, done.run_dir.resolve())
        assert not loaded.stopped


def test_the_state_digest_tells_of_models_that_the_digest_leaves_out(config):
    done = [
        raysim.run(
            {**config, "algorithm": "local_only", "local": {"lr": lr}},
            run_dir=f"{config['run_dir']}-{k}",
        )
        for k, lr in enumerate((0.1, 0.2, 0.1))
    ]
    assert len({result.digest for result in done}) == 1
    assert done[0].state_digest == done[2].state_digest != done[1].state_digest


def test_a_stopped_run_is_loaded_from_its_checkpoint_and_resumed(config):
    first = stopped(config)
    loaded = raysim.load(first.run_dir)
    assert loaded.rounds == first.rounds < 3 and "of 3" in loaded.stopped
    assert loaded.state_digest == first.state_digest == ""
    assert torch.equal(loaded.parameters, first.parameters) and loaded.history == first.history
    assert all(
        torch.equal(loaded.state_dict[name], value) for name, value in first.state_dict.items()
    )
    whole = raysim.run({**config, "run_dir": config["run_dir"] + "-whole"})
    forked = raysim.fork(first.run_dir, {"run_dir": config["run_dir"] + "-fork"})
    resumed = raysim.resume(first.run_dir)
    assert resumed.digest == whole.digest == forked.digest
    assert resumed.state_digest == whole.state_digest == forked.state_digest
    assert forked.run_id != first.run_id


def test_a_run_without_a_result_is_refused(config, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere holds no run"):
        raysim.load(tmp_path / "nowhere")
    done = raysim.run(config)
    (done.run_dir / "history.csv").unlink()
    with pytest.raises(ConfigError, match=r"history\.csv is missing.*`raysim resume .*` writes it"):
        raysim.load(done.run_dir)
    assert raysim.resume(done.run_dir).history == raysim.load(done.run_dir).history
    (done.run_dir / "history.csv").write_bytes(b"round\nx")
    with pytest.raises(ConfigError, match=r"history\.csv cannot be read"):
        raysim.load(done.run_dir)
    (done.run_dir / "parameters.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match=r"parameters\.safetensors cannot be read"):
        raysim.load(done.run_dir)


def test_a_stopped_run_without_a_checkpoint_is_refused(config):
    def interrupt(record: dict[str, float]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        raysim.run({**config, "checkpoint": {"every": 0}}, progress=interrupt)
    with pytest.raises(ConfigError, match="before its first checkpoint"):
        raysim.load(config["run_dir"])


@pytest.mark.parametrize("is_tracked", [True, False])
def test_ctrl_c_ends_a_script_with_one_line_that_continues_the_run(config, is_tracked):
    def interrupt(record: dict[str, float]) -> None:
        if record["round"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        raysim.run(config, progress=interrupt, tracking=config["tracking"] if is_tracked else False)
    assert type(caught.value) is KeyboardInterrupt and caught.value.__context__ is None
    shown = [
        f for f in caught.traceback if str(f.path).startswith(os.path.dirname(raysim.__file__))
    ]
    assert len(shown) == 1
    call = f"raysim.resume({str(config['run_dir'])!r})"
    assert f"{call} continues after round 2" in str(caught.value)
    resumed = eval(call, {"raysim": raysim})
    again = {**config, "run_dir": None}
    assert resumed.digest == raysim.run(again, tracking=False).digest


@pytest.mark.parametrize("call", ["run", "sweep", "fork", "resume"])
def test_a_file_that_trains_is_refused_where_a_class_of_it_is_needed(config, here: Path, call):
    lines = ["import raysim, torch", "class Net(torch.nn.Linear):", "    pass"]
    (here / "study.py").write_text("\n".join([*lines, f"raysim.{call}('quickstart')"]))
    with pytest.raises(ConfigError) as caught:
        raysim.run(config, model="./study.py:Net", tracking=False)
    message = str(caught.value)
    assert message.startswith("model.name: ") and f"raysim.{call} would train" in message
    assert 'below `if __name__ == "__main__":`' in message and "line 4" in message
    assert not (here / "runs").exists()


def test_an_untracked_run_is_forked_untracked_and_calls_take_keywords(here: Path):
    given = {key: value for key, value in SMALL.items() if key not in ("tracking", "checkpoint")}
    given |= {"algorithm": "fedavg", "rounds": 1, "checkpoint.every": 1}
    first = raysim.run(**given, **{"resources.executor": "inline"}, tracking=False)
    resumed = raysim.resume(first.run_dir, rounds=2)
    forked = raysim.fork(first.run_dir, {"local.lr": 0.01}, rounds=3)
    assert (resumed.rounds, forked.rounds, forked.run_id) == (2, 3, "")
    assert not (here / "mlflow.db").exists()
    tracked = raysim.fork(first.run_dir, rounds=3, tracking={"experiment": "shown"})
    assert tracked.run_id
    assert not raysim.fork(tracked.run_dir, rounds=4, tracking=False).run_id
    # What a fork has computed stays, also that of a run whose folder is removed when Python exits.
    assert all(run.run_dir.is_relative_to(here / "runs") for run in (forked, tracked))


def test_overrides_of_a_sweep_are_texts_or_a_mapping(here: Path):
    texts = preparation.prepare_sweep(SMALL, ["seed=0..1", "local.lr=0.1,0.2", "rounds=1"])
    mapping = preparation.prepare_sweep(
        SMALL, {"seed": "0..1", "local.lr": [0.1, 0.2], "rounds": 1}
    )
    assert [trial.folder for trial in mapping.trials] == [trial.folder for trial in texts.trials]
    assert mapping.axes == {"seed": [0, 1], "local.lr": [0.1, 0.2]}


def test_a_sweep_from_python(here: Path, monkeypatch: pytest.MonkeyPatch):
    trained_in_this_process(monkeypatch.setattr)
    done = raysim.sweep(SMALL, {"local.lr": [0.1, 0.2], "rounds": 1}, parallel=1)
    assert done.counts == {"finished": 2, "stopped_early": 0, "failed": 0}
    assert raysim.load(done.sweep.trials[0].folder).config.local.lr == 0.1


def test_a_result_prints_in_one_line(config):
    done = raysim.run(config)
    accuracies = [record["accuracy"] for record in done.history if "accuracy" in record]
    assert (
        repr(done)
        == str(done)
        == (
            f"RunResult({done.run_dir}, {done.rounds} rounds, accuracy {accuracies[-1]:.4f}, "
            f"best {max(accuracies):.4f}, digest {done.digest[:8]})"
        )
    )
    stopped = raysim.run(
        config, run_dir=config["run_dir"] + "-2", progress=lambda r: r["round"] > 0
    )
    assert f" {stopped.rounds} of {config['rounds']} rounds" in repr(stopped)


@pytest.mark.ray
def test_an_untracked_run_computes_the_same_and_leaves_mlflow_alone(config, tmp_path: Path):
    tracked = raysim.run(config)
    code = f"""
import sys, raysim
import subprocess
import sys
from pathlib import Path
config = { ({**config, "run_dir": None})!r}
config["tracking"] = {{"uri": "sqlite:///{tmp_path}/nothing.db", "also": ["wandb"]}}
done = raysim.run(config, tracking=False)
assert done.run_dir.is_dir() and (done.run_id, done.stopped) == ("", "")
assert raysim.load(done.run_dir).digest == done.digest
kept = raysim.run(config, tracking=False, run_dir={str(tmp_path / "kept")!r})
assert not {{"mlflow", "ray", "matplotlib", "wandb"}} & set(sys.modules)
config["rounds"] += 1
folder = {str(tmp_path / "resumed")!r}
half = raysim.run(
    config, tracking=False, run_dir=folder, progress=lambda record: record["round"] == 1
)
assert half.stopped and raysim.resume(folder, {{"rounds": config["rounds"] - 1}}).run_id == ""
assert not {{"mlflow", "ray", "matplotlib", "wandb"}} & set(sys.modules)
print(done.run_dir, done.digest, kept.digest, raysim.load(folder).digest)
"""
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=100
    )
    assert said.returncode == 0, said.stderr
    folder, *digests = said.stdout.split()
    assert set(digests) == {tracked.digest}
    assert not Path(folder).exists() and not (tmp_path / "nothing.db").exists()
    assert not (tmp_path / "runs").exists() and not (tmp_path / "kept" / "spool.jsonl").exists()
    assert (tmp_path / "kept" / "history.csv").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_the_state_digest_takes_tensors_of_any_type(dtype):
    sums = np.array([-1, 3])
    digests = {
        digest_of_state({"a": values}, sums)
        for values in (
            torch.tensor([1, 0], dtype=dtype),
            torch.tensor([0, 1], dtype=dtype),
            torch.tensor([[1, 0]], dtype=dtype),
            torch.tensor(1, dtype=dtype),
            torch.zeros(0, dtype=dtype),
        )
    }
    assert len(digests) == 5
    turned = torch.tensor([[1, 0], [1, 1]], dtype=dtype)
    assert digest_of_state({"a": turned.T}, sums) == digest_of_state({"a": turned.T.clone()}, sums)
