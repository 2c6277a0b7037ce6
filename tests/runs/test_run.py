"""What must hold of a run from beginning to end: what it says and leaves behind, that it goes on
where it was stopped as if nothing had been, that it ends in order when told to, and that lost
workers do not show in the result.

All runs here share one MLflow database (its making takes seconds), each test with an experiment of
its own.
"""

from __future__ import annotations

import csv
import hashlib
import logging
import multiprocessing
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.batteries import is_usual, small
from support.forked import Forked
from support.processes import pid_of, processes_with_mark, until
from support.programs import program
from support.stopped_runs import same, stop_at

import raysim
from raysim.distributed.block_scheduler import BlockScheduler
from raysim.engine.inline_executor import Inline
from raysim.engine.state import checkpoint
from raysim.errors import ClientError, ConfigError, RaysimError, ServerStateLost
from raysim.models.flat import BoundModel
from raysim.prepare.resolve import prepare
from raysim.rules.contract import CLIENT_RULES, SERVER_RULES
from raysim.rules.methods.registry import discover
from raysim.runs import run as experiment
from raysim.runs.result import RunResult
from raysim.runs.resume import reopen, resume
from raysim.server.first_broadcast import first_broadcast, shapes_of_first_broadcast
from raysim.system.global_generators import one_thread
from raysim.tracking import mlflow_client
from raysim.tracking.spool import Tail

discover()

ALWAYS = {
    "round", "clients/used", "clients/never_seen", "bytes_down", "bytes_up", "train_loss",
    "client_loss/q10", "client_loss/q50", "client_loss/q90", "server/uploads",
    "system/round_seconds", "system/clients_per_second", "system/train_seconds",
    "system/overhead_seconds", "system/server_state_bytes",
}  # fmt: skip
"""What the record of every round holds."""
KEEPSAKES = [
    "config.yaml", "history.csv", "learning_curve.png", "parameters.safetensors", "partition.png",
    "requirements.txt",
]  # fmt: skip


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.getbasetemp()}/shared-mlflow.db"


def basic(folder: Path, uri: str) -> dict[str, Any]:
    """A run of few parameters with BatchNorm, of unequal clients."""
    return {
        "rounds": 4,
        "data": "digits",
        "partition": {"name": "dirichlet", "clients": 16, "alpha": 0.5, "min_samples": 2},
        "model": "tinynn",
        "algorithm": {"name": "fedavgm"},
        "local": {"steps": 2, "batch_size": 8, "lr": 0.05},
        "schedule": {"cohort": 6},
        "resources": {"executor": "inline", "threads": 1},
        "checkpoint": {"every": 0},
        "run_dir": str(folder / "run"),
        "tracking": {"uri": uri, "experiment": folder.name},
    }


@pytest.fixture
def config(tmp_path: Path, uri: str) -> dict[str, Any]:
    return basic(tmp_path, uri)


def mlflow(uri: str) -> Any:
    return mlflow_client.import_mlflow(uri).MlflowClient(tracking_uri=uri)


def logged(uri: str, run_id: str, key: str) -> list[tuple[int, float]]:
    """What MLflow has of a metric: (step, value), repetitions and all."""
    return sorted((m.step, m.value) for m in mlflow(uri).get_metric_history(run_id, key))


def table(run_dir: Path) -> list[dict[str, str]]:
    """Its history.csv."""
    return list(csv.DictReader((run_dir / "history.csv").read_text().splitlines()))


# -- uploads of fewer bits -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_what_goes_up_may_be_rounded(config, mode, kind):
    """One round of one client with a step of 1: the server has moved by what came, which is what
    there was, rounded."""
    config |= {
        "rounds": 1,
        "algorithm": "fedavg",
        "schedule": {"cohort": 1},
        "batching": {"mode": mode},
    }
    x0 = prepare(config).initial[0]
    whole = raysim.run({**config, "run_dir": f"{config['run_dir']}-whole"})
    rounded = raysim.run(config | {"local": config["local"] | {"upload_dtype": kind}})
    dtype = getattr(torch, kind)
    assert torch.allclose(
        rounded.parameters, x0 - (x0 - whole.parameters).to(dtype).float(), rtol=0, atol=1e-7
    )
    assert not torch.allclose(rounded.parameters, whole.parameters, rtol=0, atol=1e-6)
    statistics = whole.history[-1]["bytes_up"] - 4 * len(x0)
    assert statistics > 0 and rounded.history[-1]["bytes_up"] == 2 * len(x0) + statistics


# -- what is said and left behind ------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, uri: str
) -> tuple[RunResult, list[dict[str, float]], str]:
    seen: list[dict[str, float]] = []
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["/usr/bin/raysim", "run", "mine.yaml"])
        done = raysim.run(
            {**basic(folder, uri), "name": "mine"},
            progress=lambda record: seen.append(dict(record)),
        )
    return done, seen, uri


def test_a_record_for_each_round(finished):
    done, seen, _ = finished
    assert (
        [record["round"] for record in done.history]
        == [0, 1, 2, 3, 4]
        == [record["round"] for record in seen]
    )
    assert done.history == seen and done.rounds == 4
    first, *others = done.history
    assert set(first) == {"round", "accuracy", "loss"}
    for record in others:
        assert ALWAYS | {"accuracy", "loss"} <= set(record)
        assert all(np.isfinite(list(record.values())))
        assert (
            0 <= record["accuracy"] <= 1
            and record["clients/used"] == 6
            and "clients/failed" not in record
        )
        assert record["client_loss/q10"] <= record["client_loss/q50"] <= record["client_loss/q90"]
        assert record["client_loss/q10"] <= record["train_loss"] <= record["client_loss/q90"] * 6
        assert record["system/round_seconds"] > 0 and record[
            "system/clients_per_second"
        ] == pytest.approx(6 / record["system/round_seconds"])
        assert (
            record["system/train_seconds"] + record["system/overhead_seconds"]
            <= record["system/round_seconds"]
        )


def test_traffic_is_counted_to_the_byte(finished):
    """P floats and the BatchNorm statistics, down and up, for each client, from the beginning on."""
    done = finished[0]
    one = 4 * (len(done.parameters) + 2 * (200 + 100))
    for record in done.history[1:]:
        assert record["bytes_down"] == record["bytes_up"] == record["round"] * 6 * one


def test_gradma_sends_one_vector_down_and_one_up(config):
    done = raysim.run(
        config,
        ["algorithm=gradma", "algorithm.memory=8", "rounds=2", "model={name: mlp, hidden: [5]}"],
    )
    assert (
        done.history[-1]["bytes_down"]
        == done.history[-1]["bytes_up"]
        == 2 * 6 * 4 * len(done.parameters)
    )


BROADCASTS = program("run_broadcasts")


@pytest.mark.parametrize(
    ("rule", "more"),
    [
        ("Clip", lambda P, t: 4),
        ("Gossip", lambda P, t: 8 * 16 * P),
        ("Growing", lambda P, t: 2 * t),
    ],
)
def test_traffic_down_counts_the_tensors_that_are_broadcast(rule, more, config, source):
    """By shape and type, in every round: a number is 4 bytes and no vector, and 16 models are no
    two vectors."""
    given = {k: v for k, v in config.items() if k != "algorithm"} | {
        "rounds": 3,
        "client": "fedavg",
    }
    given |= {"server": source("broadcasts", BROADCASTS) + f":{rule}", "evaluate": {"every": 0}}
    plan = prepare(given)
    P, Q = (len(vector) for vector in plan.initial)
    assert plan.bytes_down == 4 * (P + Q) + more(P, 0)
    records = raysim.run(given).history[1:]
    expected = [6 * (4 * (P + Q) + more(P, t)) for t in range(3)]
    assert np.diff([0.0, *(record["bytes_down"] for record in records)]).tolist() == expected


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("server", sorted(k for k, v in SERVER_RULES.items() if is_usual(v())))
def test_the_first_broadcast_is_measured_without_memory(server, config, monkeypatch):
    """On tensors without memory every shipped server rule gives the shapes and types that the run
    then broadcasts."""
    client = next(
        name
        for name in sorted(CLIENT_RULES)
        if set(SERVER_RULES[server]().uploads) <= set(CLIENT_RULES[name].sends)
        and set(CLIENT_RULES[name].needs) <= set(SERVER_RULES[server].provides)
    )
    plan = prepare(
        {
            **{k: v for k, v in config.items() if k != "algorithm"},
            "client": client,
            "server": small(server),
        }
    )
    real = first_broadcast(plan.server, *plan.initial, plan.problem)
    measured = shapes_of_first_broadcast(plan.server, *plan.initial, plan.problem)
    assert {k: (v.shape, v.dtype) for k, v in measured.shared.items()} == {
        k: (v.shape, v.dtype) for k, v in real.shared.items()
    }
    assert measured.shared["x"].is_meta and measured.nbytes == real.nbytes
    mask = plan.personal.mask
    n_personal = 0 if mask is None else int(mask.sum())  # the client has them already
    assert plan.bytes_down == real.nbytes - 4 * n_personal


def test_what_a_run_leaves_in_its_folder(finished):
    done, _, uri = finished
    assert sorted(p.name for p in done.run_dir.iterdir() if p.name in KEEPSAKES) == KEEPSAKES
    rows = table(done.run_dir)
    read = [{k: float(v) for k, v in row.items() if v != ""} for row in rows]
    assert read == done.history
    for picture in ("learning_curve.png", "partition.png"):
        content = (done.run_dir / picture).read_bytes()
        assert content.startswith(b"\x89PNG\r\n") and len(content) > 2000
    again = prepare(done.run_dir / "config.yaml")
    given = prepare({**basic(done.run_dir.parent, uri), "name": "mine"})
    assert again.config.fingerprint == given.config.fingerprint
    assert (
        again.config.rounds == 4
        and again.client.name == "fedavg"
        and again.server.name == "fedavgm"
    )


def test_parameters_and_digest(finished):
    from raysim.models.nets import zoo

    done = finished[0]
    saved = load_file(done.run_dir / "parameters.safetensors")
    assert set(saved) == set(done.state_dict) and all(
        torch.equal(saved[k], v) for k, v in done.state_dict.items()
    )
    net = zoo.tinynn((1, 8, 8), 10)
    net.load_state_dict(saved, strict=True)
    flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    assert torch.equal(flat, done.parameters)
    assert done.digest == hashlib.sha256(flat.numpy().tobytes()).hexdigest()

    from raysim.data import Examples

    plan = prepare(done.run_dir / "config.yaml")
    examples = Examples.of(plan.dataset, "test", "cpu", torch.float32)
    x, y = examples.batch(torch.arange(len(examples)))
    with torch.no_grad():
        right = (net.eval()(x).argmax(1) == y).float().mean()
    assert float(right) == pytest.approx(done.history[-1]["accuracy"], abs=1e-6)


def test_what_mlflow_has(finished):
    done, _, uri = finished
    run = mlflow(uri).get_run(done.run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == "mine"
    assert sorted(a.path for a in mlflow(uri).list_artifacts(done.run_id)) == KEEPSAKES
    for key in sorted(ALWAYS - {"round"} | {"accuracy", "loss"}):
        wanted = [(int(r["round"]), r[key]) for r in done.history if key in r]
        got = logged(uri, done.run_id, key)
        assert [step for step, _ in got] == [step for step, _ in wanted], key
        assert [value for _, value in got] == pytest.approx([value for _, value in wanted]), key
    best = max(r["accuracy"] for r in done.history)
    assert logged(uri, done.run_id, "best_accuracy") == [(4, pytest.approx(best))]
    assert run.data.metrics["best_loss"] == pytest.approx(min(r["loss"] for r in done.history))
    assert run.data.params["local.lr"] == "0.05" and run.data.params["server.beta1"] == "0.9"
    tags = run.data.tags
    assert tags["client_rule"] == "fedavg" and len(tags["fingerprint"]) == 64
    assert tags["command"] == "raysim run mine.yaml"
    for name in ("torch", "numpy", "ray", "mlflow"):
        assert tags[name] == metadata.version(name)
    description = tags["mlflow.note.content"]
    for part in (
        "**mine** on **digits**",
        "| server rule | fedavgm (lr=1.0, ",
        "beta1=0.9",
        "| rounds | 4 |",
        tags["command"],
        f"raysim resume {done.run_dir}",
    ):
        assert part in description
    assert f"torch=={tags['torch']}\n" in (done.run_dir / "requirements.txt").read_text()
    assert {i.dataset.name for i in run.inputs.dataset_inputs} == {"digits", "partition-dirichlet"}


def test_best_and_last(finished):
    done = finished[0]
    accuracy = [r["accuracy"] for r in done.history]
    assert done.metrics["accuracy"] == {"last": accuracy[-1], "best": max(accuracy)}
    losses = [r["train_loss"] for r in done.history[1:]]
    assert done.metrics["train_loss"] == {"last": losses[-1], "best": min(losses)}


def test_run_takes_keywords(config, tmp_path):
    spelled = {
        "keywords": lambda d: raysim.run(config, rounds=2, run_dir=d, **{"local.lr": 0.25}),
        "texts": lambda d: raysim.run(config, ["rounds=2", f"run_dir={d}", "local.lr=0.25"]),
        "both": lambda d: raysim.run(config, {"rounds": 9, "local.lr": 0.25}, rounds=2, run_dir=d),
    }
    found = {name: run(str(tmp_path / name)) for name, run in spelled.items()}
    for name, done in found.items():
        assert isinstance(done, RunResult) and done.rounds == 2 and done.run_dir == tmp_path / name
        assert len(done.history) == 3 and done.parameters.ndim == 1 and done.run_id
        assert yaml.safe_load((done.run_dir / "config.yaml").read_text())["local"]["lr"] == 0.25
    assert (
        len({done.digest for done in found.values()}) == 1
        and len({done.run_id for done in found.values()}) == 3
    )


@pytest.mark.parametrize("sweeps", [False, True])
def test_a_folder_that_ray_deletes_with_a_job_is_named(tmp_path, monkeypatch, caplog, sweeps):
    copy = tmp_path / "working_dir_files" / "_ray_pkg_1"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    config = {"data": "digits", "rounds": 1, "algorithm": "fedavg"}
    config["resources"] = {"executor": "inline"}
    if sweeps:
        raysim.sweep(config, seed=[0, 1])
    else:
        raysim.run(config)
        raysim.run(config, run_dir=str(tmp_path / "kept"))
        raysim.run(config, run_dir=str(tmp_path / "untracked"), tracking=False)
    lost = [text for text in caplog.messages if "is deleted with this job" in text]
    assert all(str(copy) in warning for warning in lost)
    keys = ["--dir", "tracking.uri"] if sweeps else ["run_dir", "tracking.uri", "tracking.uri"]
    assert [next(key for key in keys if f"set {key} " in warning) for warning in lost] == keys


@pytest.mark.parametrize(
    ("every", "rounds", "expected"),
    [(3, 7, [0, 3, 6, 7]), (3, 6, [0, 3, 6]), (1, 2, [0, 1, 2]), (10, 3, [0, 3]), (0, 3, [])],
)
def test_when_the_test_set_is_seen(config, engine, every, rounds, expected):
    _, history = engine(
        {
            **config,
            "rounds": rounds,
            "evaluate": {"every": every},
            "local": {"steps": 1, "batch_size": 4},
        }
    )
    assert [r["round"] for r in history] == list(range(rounds + 1))
    for key in ("accuracy", "loss"):
        assert [r["round"] for r in history if key in r] == expected


def test_what_is_held_out_is_measured_beside_the_test_set(config, engine):
    """On the images as they are stored, however training augments them; and nobody trains on them."""
    changes = {
        "rounds": 2,
        "data": {"name": "digits", "augment": True},
        "partition": {"name": "iid", "clients": 20, "val_fraction": 0.3},
        "model": "logistic",
        "evaluate": {"every": 1, "batch_size": 100, "per_class": True},
    }
    run, history = engine({**config, **changes})
    plan = run.plan
    held_out = plan.clients.validation
    assert 350 < len(held_out) < 510
    x = torch.from_numpy(plan.dataset.x[held_out] / 16).float()
    y = torch.from_numpy(plan.dataset.y[held_out])
    bound = BoundModel(plan.model())
    for record, parameters in zip(history, run.executor.xs, strict=True):
        bound.w.copy_(torch.from_numpy(parameters))
        with torch.no_grad():
            logits = bound.forward(x, "eval", run.plan.initial[1])
        assert record["val/accuracy"] == pytest.approx(
            float((logits.argmax(1) == y).float().mean())
        )
        assert record["val/loss"] == pytest.approx(
            float(torch.nn.functional.cross_entropy(logits, y)), rel=1e-5
        )
        assert not any(key.startswith("val/accuracy/") for key in record)
    _, plain = engine({**config, "rounds": 1, "evaluate": {"every": 1}})
    assert not any(key.startswith("val/") for record in plain for key in record)


# -- when it goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "value"), [("0.0", "inf"), ("-1.0", "nan")])
def test_a_loss_that_is_not_finite_is_told_once(config, engine, source, caplog, where, value):
    """Its gradients are finite all the same, so that the run goes on."""
    code = f"""
        import torch
        def loss(outputs, y):
            mean = torch.nn.functional.cross_entropy(outputs, y)
            return mean - torch.log(outputs.new_tensor({where}))
    """
    file = source("mine", textwrap.dedent(code))
    config |= {"task": f"{file}:loss", "rounds": 2, "evaluate": {"every": 1}}
    with caplog.at_level(logging.WARNING):
        _, history = engine(config)
    told = [record.message for record in caplog.records if "finite" in record.message]
    assert len(told) == 1 and told[0].startswith(f"round 0: loss is {value}, though the parameters")
    assert str(history[-1]["train_loss"]) == value


def test_a_failed_run_keeps_what_was_done(config, uri, tmp_path):
    lr = [[0, 0.05], [2, 1e30]]
    with pytest.raises(ClientError, match=r"client \d+ failed in round 3: non-finite"):
        raysim.run(config, {"local.lr": lr, "checkpoint.every": 1})
    run = mlflow(uri).search_runs(
        [mlflow(uri).get_experiment_by_name(tmp_path.name).experiment_id]
    )[0]
    assert run.info.status == "FAILED"
    rows = table(tmp_path / "run")
    assert [row["round"] for row in rows][:2] == ["0.0", "1.0"]


def test_a_failed_run_says_how_to_continue_and_its_advice_works(config, tmp_path):
    lr, folder = [[0, 0.05], [2, 1e30]], tmp_path / "run"
    with pytest.raises(ClientError, match=r"lower the step size, local\.lr") as caught:
        raysim.run(config, {"local.lr": lr, "checkpoint.every": 1})
    (note,) = caught.value.__notes__
    assert f"`raysim resume {folder}` continues after round 2" in note
    assert f"`raysim resume {folder} --fork KEY=VALUE`" in note
    forked = raysim.fork(folder, {"local.lr": 0.05, "run_dir": str(tmp_path / "fork")})
    assert forked.rounds == config["rounds"]


def test_a_run_that_fails_in_its_first_round_has_no_round_to_continue_from(config, tmp_path):
    with pytest.raises(ClientError) as caught:
        raysim.run(config, {"local.lr": 1e30})
    (note,) = caught.value.__notes__
    assert "without a checkpoint" in note and "--fork" not in note and str(tmp_path / "run") in note
    with pytest.raises(ClientError) as caught:
        raysim.run({**config, "run_dir": None}, {"local.lr": 1e30}, tracking=False)
    assert not hasattr(caught.value, "__notes__"), "its folder is removed when Python exits"


def test_a_mistake_leaves_nothing_behind(config, tmp_path):
    with pytest.raises(ConfigError, match=r"tracking\.uri"):
        raysim.run(config, {"tracking.uri": "./mlruns"})
    assert not (tmp_path / "run").exists(), (
        "the same command, corrected, must not find its run_dir taken"
    )


# -- checkpoints -----------------------------------------------------------------------------------


REMEMBERING = program("run_remembering")
"""What a client kept, and whether it was there before, shows in every step (GradMA's x' seldom
does)."""


@pytest.mark.parametrize("algorithm", ["fedavgm", "gradma_w", "gradma", "Remembering"])
def test_resumed_is_uninterrupted(config, uri, tmp_path, source, algorithm):
    """Stopped in round 7, after the checkpoint of round 6: resumed in the same MLflow run, to the
    bit."""
    if algorithm == "Remembering":
        algorithm = f"{source('remembering', REMEMBERING)}:Remembering"
    config = {**config, "rounds": 10, "algorithm": {"name": algorithm}, "checkpoint": {"every": 3}}
    if algorithm == "gradma":
        config["algorithm"]["memory"] = 9  # rows are taken from others
    whole = raysim.run(config, run_dir=str(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        raysim.run(config, progress=stop_at(7))
    assert [p.name for p in checkpoint.available_checkpoints(tmp_path / "run")] == [
        "round-000003",
        "round-000006",
    ]
    _, _, saved = reopen(tmp_path / "run")
    assert saved is not None and saved.facts["round"] == 6
    assert mlflow(uri).get_run(saved.facts["run_id"]).info.status == "KILLED"
    seen: list[float] = []
    done = resume(tmp_path / "run", progress=lambda record: seen.append(record["round"]))
    assert seen == [7, 8, 9, 10]
    assert done.digest == whole.digest and torch.equal(done.parameters, whole.parameters)
    assert all(torch.equal(done.state_dict[k], v) for k, v in whole.state_dict.items())
    assert same(done.history, whole.history)
    assert (
        done.run_id == saved.facts["run_id"]
        and mlflow(uri).get_run(done.run_id).info.status == "FINISHED"
    )
    for key in ("accuracy", "train_loss", "bytes_up"):
        assert logged(uri, done.run_id, key) == logged(uri, whole.run_id, key)
    rows = table(tmp_path / "run")
    assert [float(row["round"]) for row in rows] == list(range(11))


def test_a_run_that_ends_says_why_even_if_its_state_is_lost_then(
    config, tmp_path, monkeypatch, caplog
):
    """A client fails, and the server's state cannot be had any more: the one is the error, the
    other a warning."""

    def lost(self: Inline) -> Any:
        raise ServerStateLost("the server's state failed")

    monkeypatch.setattr(Inline, "snapshot", lost)
    config |= {
        "checkpoint": {"every": 100},
        "local": {**config["local"], "lr": [[0, 0.05], [2, 1e30]]},
    }
    with pytest.raises(ClientError, match="in round 3"), caplog.at_level(logging.WARNING):
        raysim.run(config)
    assert "not saved: the server's state failed; `raysim resume`" in caplog.text


def test_a_finished_run_goes_on_to_more_rounds(config, tmp_path):
    config["checkpoint"] = {"every": 5}
    whole = raysim.run(config, rounds=6, run_dir=str(tmp_path / "whole"))
    first = raysim.run(config, rounds=3)
    with pytest.raises(ConfigError, match=r"rounds: 3 rounds are done.*rounds=N"):
        resume(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"rounds: 3 rounds are done"):
        resume(tmp_path / "run", {"rounds": 2})
    done = resume(tmp_path / "run", {"rounds": 6})
    assert done.digest == whole.digest != first.digest and done.run_id == first.run_id


def test_a_resume_that_is_refused_leaves_a_finished_run_as_it_was(config, tmp_path):
    """Neither a store that is not there nor rounds without a checkpoint cost its result."""
    config["checkpoint"] = {"every": 4}
    done = raysim.run(config)
    text = (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(RaysimError, match=r"tracking\.uri: .*127\.0\.0\.1:9 cannot be used"):
        resume(tmp_path / "run", {"rounds": 6, "tracking.uri": "http://127.0.0.1:9"})
    assert raysim.load(tmp_path / "run").digest == done.digest
    assert (tmp_path / "run" / "config.yaml").read_text() == text
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(ConfigError, match=r"is finished and has no checkpoint to continue from"):
        resume(tmp_path / "run", {"rounds": 6})
    with pytest.raises(ConfigError, match=r"a finished run, without a checkpoint to continue from"):
        raysim.run(config)
    assert raysim.load(tmp_path / "run").digest == done.digest


def test_a_run_that_is_killed_at_its_second_end_has_no_table_of_its_first(
    config, tmp_path, monkeypatch
):
    config["checkpoint"] = {"every": 2}
    raysim.run(config, rounds=2)

    def killed(*arguments: Any, **keys: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(experiment, "write_artifacts", killed)
        with pytest.raises(KeyboardInterrupt):
            resume(tmp_path / "run", {"rounds": 4})
    with pytest.raises(ConfigError, match=r"history\.csv is missing"):
        raysim.load(tmp_path / "run")
    assert [record["round"] for record in resume(tmp_path / "run").history] == [0, 1, 2, 3, 4]


def test_a_resumed_run_has_no_tags_of_its_former_end(config, tmp_path):
    config["checkpoint"] = {"every": 2}
    raysim.run(config, rounds=2)
    done = resume(tmp_path / "run", {"rounds": 9}, progress=lambda record: record["round"] > 2)
    tags = Tail(tmp_path / "run").tags()
    assert tags["stopped_early"] == done.stopped and tags["digest"] == tags["error_at_end"] == ""


def test_a_fork_is_not_ended_by_rounds_before_it_and_a_refused_one_leaves_nothing(config, tmp_path):
    config["checkpoint"] = {"every": 2}
    raysim.run(config, rounds=2)
    changes = {"rounds": 4, "run_dir": str(tmp_path / "fork")}
    with pytest.raises(RaysimError, match=r"tracking\.uri: .* cannot be used"):
        raysim.fork(tmp_path / "run", {**changes, "tracking.uri": "http://127.0.0.1:9"})
    assert not (tmp_path / "fork").exists()
    done = raysim.fork(tmp_path / "run", changes, progress=lambda record: record["round"] < 3)
    assert not done.stopped and done.rounds == 4


def test_a_run_has_the_id_of_a_store_that_was_away_at_its_start(config, tmp_path):
    blocked = tmp_path / "folder"
    blocked.write_text("")
    uri = f"sqlite:///{blocked}/mlflow.db"
    tracking = {"uri": uri, "experiment": "late", "required": False}
    done = raysim.run(
        config, rounds=1, tracking=tracking, progress=lambda record: blocked.unlink(missing_ok=True)
    )
    assert mlflow(uri).get_run(done.run_id).info.status == "FINISHED"
    assert raysim.load(done.run_dir).run_id == done.run_id


def test_a_run_that_wandb_follows_is_resumed(config, tmp_path):
    config["checkpoint"] = {"every": 2}
    raysim.run(config, rounds=2)
    logs = tmp_path / "run" / "wandb" / "offline-run"
    logs.mkdir(parents=True)
    logs.with_name("latest-run").symlink_to(logs.name)
    (logs / "debug.log").symlink_to("debug-internal.log")
    assert resume(tmp_path / "run", {"rounds": 4}).rounds == 4
    shutil.rmtree(logs.parent)
    logs.parent.symlink_to(tmp_path / "gone")  # as the link to rows whose disk was cleared
    assert resume(tmp_path / "run", {"rounds": 5}).rounds == 5
    (tmp_path / "run" / "clients").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"run/clients: is a symbolic link"):
        resume(tmp_path / "run", {"rounds": 6})


def test_runs_in_threads_are_those_of_one_after_the_other(config, caplog):
    del config["run_dir"]
    call = partial(raysim.run, config, rounds=2, tracking=False)
    expected = [call(seed=seed).digest for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(call, seed=seed) for seed in range(3)]
    assert [run.result().digest for run in runs] == expected
    assert "another thread of this process trains" in caplog.text
    nested = call(progress=lambda record: call(seed=1).digest != expected[1])
    assert nested.digest == expected[0] and not nested.stopped


def test_a_fork_does_not_wait_for_a_thread_that_it_lacks():
    """A forked process has only the thread that called fork."""
    entered, ended = threading.Event(), threading.Event()

    def trains() -> None:
        with one_thread():
            entered.set()
            ended.wait(60)

    thread = threading.Thread(target=trains)
    thread.start()
    entered.wait(60)

    def enters() -> None:
        with one_thread():
            pass

    fork = multiprocessing.get_context("fork").Process(target=enters)
    fork.start()
    fork.join(30)
    code = fork.exitcode
    fork.kill()
    ended.set()
    thread.join()
    assert code == 0


def test_what_progress_does_costs_no_round(config, tmp_path):
    """Neither a change of the record, nor an error, after which it is not called again."""
    config["checkpoint"] = {"every": 50}
    told: list[float] = []

    def progress(record: dict[str, float]) -> None:
        told.append(record["round"])
        record["note"] = "mine"  # pyright: ignore[reportArgumentType]
        if record["round"] == 1:
            raise ValueError("no plot")

    with pytest.raises(ValueError, match="no plot") as failed:
        raysim.run(config, progress=progress)
    assert told == [0, 1] and "continues after round" in failed.value.__notes__[0]
    _, _, saved = reopen(tmp_path / "run")
    assert saved is not None and 1 <= saved.facts["round"] < 4
    whole = raysim.run(config, run_dir=str(tmp_path / "whole"))
    assert resume(tmp_path / "run").digest == whole.digest

    def last(record: dict[str, float]) -> None:
        if record["round"] == config["rounds"]:
            raise ValueError("no plot")

    config |= {"checkpoint": {"every": 0}, "run_dir": str(tmp_path / "last")}
    with pytest.raises(ValueError, match="no plot"):
        raysim.run(config, progress=last)
    assert raysim.load(tmp_path / "last").digest == whole.digest


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory, uri: str) -> Path:
    """A run of six rounds that was stopped in the fifth; checkpoints of 2 and 4."""
    folder = tmp_path_factory.mktemp("halfway")
    with pytest.raises(KeyboardInterrupt):
        raysim.run(
            {**basic(folder, uri), "rounds": 6, "checkpoint": {"every": 2}}, progress=stop_at(5)
        )
    return folder / "run"


@pytest.fixture
def stopped(halfway: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "stopped"
    shutil.copytree(halfway, copy)
    return copy


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_all_checkpoints_damaged(stopped):
    for path in checkpoint.available_checkpoints(stopped):
        flip(path / "clients.safetensors")
    with pytest.raises(ConfigError, match=r"none of the 2 checkpoints in .* can be used"):
        reopen(stopped)


def test_what_a_crash_in_the_middle_of_writing_leaves(stopped):
    """Only whole folders have the name of a checkpoint."""
    torn = checkpoint.checkpoints_folder(stopped) / ".round-000006.partial"
    torn.mkdir()
    (torn / "server.safetensors").write_bytes(b"half")
    _, _, saved = reopen(stopped)
    assert saved is not None and saved.facts["round"] == 4


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("local.lr=0.1", "local"),
        ("seed=1", "seed"),
        ("server.beta1=0.5", "server"),
        ("algorithm=fedprox", "client"),
        ("partition.alpha=0.1", "partition"),
        ("resources.threads=2", "resources"),
        ("dtype=float64", "dtype"),
        ("data.augment=true", "data"),
    ],
)
def test_resume_refuses_another_experiment(halfway, override, key):
    with pytest.raises(ConfigError, match=rf"\b{key}\b.*would change the result"):
        reopen(halfway, [override])


@pytest.mark.parametrize(
    "override",
    [
        "rounds=9",
        "resources.actors=3",
        "checkpoint.every=1",
        "evaluate.every=2",
        "tracking.required=false",
    ],
)
def test_resume_takes_what_does_not_touch_the_result(halfway, override):
    assert reopen(halfway, [override])[2] is not None


@pytest.mark.parametrize(
    "changes", [{"evaluate.metrics": ["top5"]}, {"evaluate": {"metrics": "top5"}}]
)
def test_the_best_model_of_other_metrics_is_that_of_the_first(halfway, changes):
    """Unless another one was chosen."""
    assert reopen(halfway, changes)[0].config.evaluate.best_by.metric == "top5"
    chosen = {**changes, "evaluate.best.metric": "loss", "evaluate.best.mode": "min"}
    if "evaluate" not in changes:
        assert reopen(halfway, chosen)[0].config.evaluate.best_by.metric == "loss"


def test_resume_refuses_a_tampered_configuration(stopped):
    text = (stopped / "config.yaml").read_text()
    (stopped / "config.yaml").write_text(text.replace("lr: 0.05", "lr: 0.06"))
    with pytest.raises(ConfigError, match=r"another configuration than config\.yaml"):
        reopen(stopped)


def test_resume_where_no_run_is(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run \(no config"):
        resume(tmp_path)
    of_sweep = tmp_path / "defences" / "sweeps" / "0a1b2c"
    of_sweep.mkdir(parents=True)
    (tmp_path / "defences" / "trials").mkdir()
    for folder in (of_sweep, of_sweep.parents[1] / "trials", of_sweep.parents[1]):
        with pytest.raises(ConfigError, match=r"holds no run .* same `raysim sweep` again"):
            resume(folder)


def test_a_run_without_a_checkpoint_begins_again(config, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        raysim.run(config, progress=stop_at(2))
    done = resume(tmp_path / "run")
    assert done.digest == raysim.run(config, run_dir=str(tmp_path / "whole")).digest
    assert [r["round"] for r in done.history] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("keep", [1, 3])
def test_as_many_checkpoints_are_kept_as_asked_for(config, tmp_path, keep):
    raysim.run(config, {"rounds": 5, "checkpoint": {"every": 1, "keep": keep}})
    kept = [
        int(p.name.removeprefix("round-"))
        for p in checkpoint.available_checkpoints(tmp_path / "run")
    ]
    assert kept == list(range(6 - keep, 6))
    assert sorted(p.name for p in checkpoint.checkpoints_folder(tmp_path / "run").iterdir()) == [
        f"round-{n:06d}" for n in kept
    ]


@pytest.mark.parametrize(("every", "expected"), [(0, []), (2, [2, 4, 5]), (50, [5])])
def test_when_checkpoints_are_written(config, tmp_path, every, expected):
    raysim.run(config, {"rounds": 5, "checkpoint": {"every": every, "keep": 9}})
    assert [
        int(p.name.removeprefix("round-"))
        for p in checkpoint.available_checkpoints(tmp_path / "run")
    ] == expected


# -- told to end -----------------------------------------------------------------------------------


@dataclass
class Signalled:
    """A run on the command line that got a signal, and what came of it."""

    folder: Path
    mark: str
    process: Forked
    code: int


SIGNALS = {"inline-SIGINT": 130, "ray-SIGTERM": 143}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.ray) for name in SIGNALS]
)
def signalled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, uri: str
) -> Iterator[Signalled]:
    """An endless run that is sent its signal when it is well on its way. The signal goes to the
    whole process group, as Ctrl-C in a terminal does."""
    mlflow(uri).search_experiments()  # the database is made
    name, mark = request.param, uuid.uuid4().hex
    folder = tmp_path_factory.mktemp(name)
    executor, _, sent = name.partition("-")
    config = basic(folder, uri) | {
        "rounds": 1_000_000,
        "checkpoint": {"every": 20},
        "evaluate": {"every": 10},
        "resources": {"executor": executor, "actors": 1, "cpus": 0.5},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    run = ("-m", "raysim", "run", folder / "config.yaml")
    process = Forked(*run, cwd=folder, RAYSIM_TEST_MARK=mark)
    try:
        until(
            lambda: checkpoint.available_checkpoints(folder / "run") or not process.alive(),
            200,
            name,
        )
        if process.alive():
            process.signal(getattr(signal, sent))
        yield Signalled(folder, mark, process, SIGNALS[name])
    finally:
        if process.alive():
            process.signal(signal.SIGKILL)
            process.wait()


def test_a_signal_ends_a_run_with_its_code_and_one_line(signalled):
    run = signalled
    assert run.process.wait(60) == run.code, run.process.output
    said = run.process.output
    *_, last = said.rstrip().splitlines()
    assert "Traceback" not in said and last.startswith("stopped; what was done is kept"), said
    assert "not saved" not in said, "Ray must live until the progress is saved"
    assert f"`raysim resume {run.folder / 'run'}` continues after round " in last


def test_a_signal_leaves_a_killed_run_that_can_go_on(signalled, uri):
    run = signalled
    (found,) = mlflow(uri).search_runs(
        [mlflow(uri).get_experiment_by_name(run.folder.name).experiment_id]
    )
    assert found.info.status == "KILLED"
    assert "history.csv" in [a.path for a in mlflow(uri).list_artifacts(found.info.run_id)]
    _, _, saved = reopen(run.folder / "run")
    assert saved is not None and saved.facts["run_id"] == found.info.run_id


def test_a_signal_leaves_no_process_behind(signalled):
    mark = signalled.mark
    until(lambda: not processes_with_mark(mark), 10, f"still alive: {processes_with_mark(mark)}")


# -- lost and slow workers -------------------------------------------------------------------------


@pytest.fixture
def on_ray(
    local_ray: None, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """on_ray(config, hook): a run on two actors of the Ray that is there. `hook(executor, t)` is
    called when the blocks of round t have just been sent off. Gives what the run gave, and what it
    logged."""
    from raysim.distributed.ray_executor import RayExecutor

    class Hooked(RayExecutor):
        hook: Callable[[Any, int], None]

        def training(self, t: int) -> Any:
            training, hook = super().training(t), type(self).hook
            add = training.add
            training.add = lambda broadcasts, blocks: (add(broadcasts, blocks), hook(self, t))
            return training

    def run(
        config: dict[str, Any], hook: Callable[[Any, int], None]
    ) -> tuple[RunResult, list[str]]:
        said: list[str] = []
        Hooked.hook = staticmethod(hook)
        monkeypatch.setattr(experiment, "choose", lambda plan, log: Hooked(log))
        config = {
            **config,
            "resources": {"executor": "ray", "actors": 2, "cpus": 1, "timeout": 300},
        }
        return experiment.execute(prepare(config), log=said.append), said

    yield run


def clients(executor: Any) -> list[Any]:
    return [worker.actor for worker in executor.pool.workers.values()]


@pytest.mark.ray
@pytest.mark.long
def test_a_killed_actor_does_not_show(on_ray, config, tmp_path):
    """Nor does anything of it stay in a Ray that was there before the run."""
    import ray

    config = {
        **config,
        "rounds": 5,
        "algorithm": {"name": "gradma"},
        "batching": {"mode": "loop", "size": 1},
    }
    undisturbed = raysim.run({**config, "run_dir": str(tmp_path / "undisturbed")})
    everyone: list[int] = []

    def kill(executor: Any, t: int) -> None:
        if t == 0:
            pool = executor.pool
            everyone.extend(pid_of(pool, a) for a in (*clients(executor), pool.server, pool.eval))
        if t == 2:
            os.kill(everyone[0], signal.SIGKILL)

    done, said = on_ray(config, kill)
    assert done.digest == undisturbed.digest
    mended = ("system/actors_failed", "system/blocks_retried", "system/server_restarts")
    shared = [{k: v for k, v in r.items() if k not in mended} for r in done.history]
    assert same(shared, undisturbed.history)
    lost, retried, restarts = ([r.get(k) for r in done.history[1:]] for k in mended)
    assert (
        lost == [0, 0, 1, 1, 1]
        and retried[:2] == [0, 0]
        and 1 <= retried[-1] <= 6
        and set(restarts) == {0}
    )
    assert (
        len(said) == 1 and "ClientActor 0 failed (in round 3" in said[0] and "1 are left" in said[0]
    )
    assert ray.is_initialized() and len(set(everyone)) == 4
    until(lambda: not [p for p in everyone if Path(f"/proc/{p}").exists()], 15, "an actor lives on")


@pytest.mark.ray
@pytest.mark.usefixtures("recycled_actors")
@pytest.mark.parametrize("killed", [False, True])
def test_work_that_is_kept_back_does_not_show(on_ray, config, tmp_path, monkeypatch, killed):
    """From the second round on, when paces are known, half of the blocks go to who is done first;
    also while one of the two dies."""
    monkeypatch.setattr("raysim.distributed.block_scheduler.MIN_SECONDS_TO_HOLD_BACK", 0.0)
    monkeypatch.setattr("raysim.distributed.block_scheduler.MIN_BLOCKS_PER_WORKER", 1)
    monkeypatch.setattr("raysim.distributed.block_scheduler.MIN_MEASURED_SECONDS", 0.0)
    config = {
        **config,
        "rounds": 5,
        "algorithm": {"name": "gradma"},
        "batching": {"mode": "loop", "size": 1},
    }
    undisturbed = raysim.run({**config, "run_dir": str(tmp_path / "undisturbed")})

    def look(executor: Any, t: int) -> None:
        if killed and t == 2:
            os.kill(pid_of(executor.pool, clients(executor)[0]), signal.SIGKILL)

    helped: list[int] = []
    next_batch = BlockScheduler.next_batch
    monkeypatch.setattr(
        BlockScheduler,
        "next_batch",
        lambda self, n: helped.append(len(self._held_back)) or next_batch(self, n),
    )
    done, _ = on_ray(config, look)
    assert done.digest == undisturbed.digest and max(helped) >= 2
    assert (done.history[-1]["system/actors_failed"] == 1) == killed


SLOW = program("run_slow")


@pytest.mark.ray
def test_who_takes_too_long_or_is_lost_is_named(local_ray, config, source, monkeypatch):
    from raysim.distributed.heartbeats import Monitor
    from raysim.distributed.ray_executor import RayExecutor
    from raysim.engine.loop import Engine
    from raysim.engine.round_clients import make_cohort, make_tasks
    from raysim.schedule import synchronous_round
    from raysim.training.messages import cut_blocks

    resources = {"executor": "ray", "actors": 2, "cpus": 1, "timeout": 300, "call_timeout": 2}
    slow = {
        **config,
        "algorithm": {"name": f"{source('slow', SLOW)}:Slow", "driver": os.getpid()},
        "evaluate": {"every": 0},
        "resources": resources,
    }
    said: list[str] = []
    plan, executor = prepare(slow), RayExecutor(said.append)
    try:
        executor.open(plan)
        engine = Engine(plan, executor)
        round = make_cohort(engine.plan, synchronous_round(7, list(range(4))))
        training = executor.training(7)
        training.add(
            {7: executor.broadcast(round)},
            cut_blocks(make_tasks(engine.plan, engine.store, round), 1),
        )
        executor.pool.wanted = 0  # nobody comes in their place
        monkeypatch.setattr(Monitor, "start_s", 2.0)
        with pytest.raises(
            RaysimError, match=r"waited 2 s for a new ClientActor to replace the last one"
        ):
            training.get()
        why = r"in round 8, with 2 blocks: it has worked on one call for 2 s \(resources\.call_timeout\)"
        for number in (0, 1):
            assert re.search(rf"ClientActor {number} failed \({why}\)", "\n".join(said)), said
        server = pid_of(executor.pool, executor.pool.server)
        ray_kill(executor.pool.server)
        until(lambda: not Path(f"/proc/{server}").exists(), 30, "the server lives on")
        with pytest.raises(RaysimError, match=r"the server's state failed"):
            executor.snapshot().get()
    finally:
        executor.close()


def ray_kill(actor: Any) -> None:
    import ray

    ray.kill(actor.handle)


@pytest.mark.ray
def test_a_timeout_at_the_start(local_ray, config, monkeypatch):
    from raysim.distributed.heartbeats import Monitor

    monkeypatch.setattr(Monitor, "start_s", 0.001)
    late = "the ServerActor, ClientActor 0, ClientActor 1"
    with pytest.raises(
        RaysimError, match=rf"waited 0\.001 s for the start of {late}.*resources\.timeout"
    ):
        raysim.run(config, {"resources": {"executor": "ray", "actors": 2, "cpus": 0.5}})


def test_a_run_is_resumed_in_its_database_from_any_working_directory(config, here, monkeypatch):
    config["tracking"]["uri"] = "sqlite:///mlflow.db"
    stopped = raysim.run(config, rounds=2, checkpoint={"every": 2}, run_dir="run")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    with pytest.raises(ConfigError, match=r"tracking\.uri: there is no .*/elsewhere/other\.db"):
        raysim.resume(stopped.run_dir, {"rounds": 3, "tracking.uri": "sqlite:///other.db"})
    done = raysim.resume(stopped.run_dir, {"rounds": 3})
    assert done.run_id == stopped.run_id and not list(Path().iterdir())
    run = mlflow(f"sqlite:///{here}/mlflow.db").get_run(done.run_id)
    assert run.data.params["tracking.uri"] == f"sqlite:///{here}/mlflow.db"
    assert "resumed.tracking.uri" not in run.data.tags
    (here / "mlflow.db").unlink()
    with pytest.raises(ConfigError, match=r"tracking\.uri: there is no .*/here/mlflow\.db"):
        raysim.resume(stopped.run_dir, {"rounds": 4})
    assert not (here / "mlflow.db").exists()
