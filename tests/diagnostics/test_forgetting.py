"""What clients forget, and what a curious server sees: recomputed from saved vectors, with plain
torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import raysim
from raysim import ClientRule
from raysim.diagnostics import forgetting, recorded_updates
from raysim.engine.plan import Plan
from raysim.errors import ConfigError
from raysim.models.flat import Model
from raysim.prepare.resolve import prepare
from raysim.runs.resume import resume

CONFIG = {
    "dtype": "float64",
    "rounds": 4,
    "partition": {"name": "dirichlet", "clients": 60, "alpha": 0.3},
    "model": {"name": "mlp", "hidden": [12]},
    "schedule": {"cohort": 4},
    "local": {"steps": 3, "batch_size": 16, "lr": 0.3},
}


def logits(model: Model, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The two-layer net by hand."""
    a, b, c, d = model.views(w).values()
    return torch.relu(x.flatten(1) @ a.T + b) @ c.T + d


def stored(plan: Plan, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    mine, data = plan.clients.client(client), plan.dataset
    return torch.from_numpy(data.x[mine] / 16.0), torch.from_numpy(data.y[mine])


def loss(plan: Plan, w: torch.Tensor, client: int) -> float:
    x, y = stored(plan, client)
    return float(F.cross_entropy(logits(plan.model(), w, x), y))


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_losses_before_and_after_are_those_of_the_saved_models(mode, base):
    config = {**base, **CONFIG, "algorithm": "fedprox", "batching": {"mode": mode, "size": 3}}
    config |= {
        "evaluate": {"every": 0, "forgetting": {"every": 2}},
        "record_updates": {"rounds": [1, 2], "clients": 4},
    }
    done = raysim.run(config)
    plan, folder = prepare(config), Path(base["run_dir"])
    assert list(forgetting.read_forgetting(folder)) == [
        2
    ]  # round 0 has no past, 1 and 3 are not asked for
    found, last, now = (
        forgetting.read_forgetting(folder)[2],
        recorded_updates.read_observations(folder, 1),
        recorded_updates.read_observations(folder, 2),
    )
    assert found["clients"] == [one.client for one in last] and found["fisher"] == []
    x = now[0].broadcast.global_params
    ends = [x - one.uploads["delta"] for one in now]
    for i, client in enumerate(one.client for one in last):
        assert found["before"][i] == pytest.approx(loss(plan, x, client), abs=1e-9)
        assert found["after"][i] == pytest.approx(
            np.mean([loss(plan, y, client) for y in ends]), abs=1e-9
        )
    record = done.history[3]
    assert record["forgetting/increase"] == pytest.approx(
        np.mean(found["after"]) - np.mean(found["before"])
    )
    assert "forgetting/before" not in done.history[2]
    assert (folder / "forgetting.png").stat().st_size > 1000


@dataclass(frozen=True)
class RefusesOnes(ClientRule):
    def direction(self, shared, state, batch, task):
        if (batch.x == 1).all():
            raise ValueError("ones")
        return task.grad(state["w"], batch)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_client_that_fails_leaves_the_measurement_to_others(bad):
    users = np.arange(8) % 2
    x = np.where(users[:, None] == bad, 1.0, np.linspace(0, 0.9, 16).reshape(8, 2))
    train = (x.astype("float32"), np.arange(8) // 4)
    result = raysim.run(
        {
            "data": {"train": train, "test": train, "users": users},
            "partition": "natural",
            "model": torch.nn.Linear(2, 2),
            "algorithm": RefusesOnes,
            "local": {"steps": 1, "batch_size": 4, "lr": 0.1},
            "schedule": {"cohort": 2},
            "rounds": 2,
            "evaluate": {"forgetting": {"every": 1}},
            "faults": {"on_client_error": "drop"},
            "resources": {"executor": "inline"},
        },
        tracking=False,
    )
    assert result.history[2]["clients/used"] == 1
    assert result.history[2]["forgetting/after"] > 0


def squares(plan: Plan, w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    """The mean of squared single gradients of log p, weighted by y [n, classes]."""
    total, model = torch.zeros_like(w), plan.model()
    for xs, ys in zip(x, y, strict=True):
        at = w.clone().requires_grad_()
        (ys * torch.log_softmax(logits(model, at, xs[None]), -1)[0]).sum().backward()
        total += at.grad**2
    return (total / len(x)).numpy()


@pytest.mark.parametrize("batch", ["full", 1])
def test_fisher_correlation_is_that_of_pseudo_and_past_data(batch, base):
    """With one local step a round, a client's upload is the model after its first step. The pseudo
    data are those of all its examples, though the step needs but what was made of one batch."""
    config = {
        **base,
        **CONFIG,
        "rounds": 3,
        "algorithm": {"name": "fedreg", "eta_s": 0.2, "ascent": 3, "gamma": 0.5},
    }
    config |= {
        "local": {"steps": 1, "batch_size": batch, "lr": 0.3},
        "record_updates": {"rounds": [2], "clients": 4},
    }
    config |= {"evaluate": {"every": 0, "forgetting": {"fisher": True, "window": 2}}}
    raysim.run(config)
    plan, folder = prepare(config), Path(base["run_dir"])
    model = plan.model()
    rounds, seen = forgetting.read_forgetting(folder), recorded_updates.read_observations(folder, 2)
    window = sorted({int(i) for t in (1, 2) for i in rounds[t]["clients"]})
    parts = [stored(plan, client) for client in window]
    past_x, past_y = (
        torch.cat([x for x, _ in parts]),
        F.one_hot(torch.cat([y for _, y in parts]), 10),
    )
    assert len(rounds[2]["fisher"]) == 4
    for one, correlation in zip(
        sorted(seen, key=lambda one: one.client), rounds[2]["fisher"], strict=True
    ):
        x0, (x, y) = one.broadcast.global_params, stored(plan, one.client)
        pseudo = x
        for _ in range(3):
            at = pseudo.clone().requires_grad_()
            F.cross_entropy(logits(model, x0, at), y, reduction="sum").backward()
            pseudo = pseudo + 0.2 * at.grad.sign()
        soft = torch.softmax(logits(model, x0, pseudo), -1).detach()
        after = x0 - one.uploads["delta"]
        a, b = squares(plan, after, pseudo, soft), squares(plan, after, past_x, past_y)
        assert correlation == pytest.approx(np.corrcoef(a, b)[0, 1], abs=1e-8)


@pytest.mark.ray
def test_actors_and_a_resume_see_the_same(base, recycled_actors):
    config = {**base, **CONFIG, "algorithm": "fedreg", "checkpoint": {"every": 1}}
    config |= {
        "evaluate": {"every": 0, "forgetting": {"fisher": True}},
        "record_updates": {"rounds": [0, 3], "clients": 2},
    }
    on_ray = {"resources": {"executor": "ray", "actors": 2, "threads": 1, "timeout": 300}}
    raysim.run({**config, "run_dir": base["run_dir"] + "-here"})
    raysim.run({**config, "rounds": 2})
    resume(base["run_dir"], ["rounds=4"])
    raysim.run({**config, **on_ray, "run_dir": base["run_dir"] + "-ray"})
    here = Path(base["run_dir"] + "-here")
    for other in (Path(base["run_dir"]), Path(base["run_dir"] + "-ray")):
        assert forgetting.read_forgetting(other) == forgetting.read_forgetting(here)
        for t in (0, 3):
            pairs = list(
                zip(
                    recorded_updates.read_observations(here, t),
                    recorded_updates.read_observations(other, t),
                    strict=True,
                )
            )
            assert len(pairs) == 2
            for ours, theirs in pairs:
                assert ours.client == theirs.client and ours.steps == theirs.steps == 3
                assert torch.equal(ours.uploads["delta"], theirs.uploads["delta"]) and torch.equal(
                    ours.x, theirs.x
                )
                assert torch.equal(ours.broadcast.global_params, theirs.broadcast.global_params)


def test_the_images_seen_are_those_trained_on(base):
    """One step on the whole of a client's data, whose gradient must then be what it sent."""
    config = {
        **base,
        **CONFIG,
        "rounds": 2,
        "algorithm": "fedsgd",
        "local": {"lr": 0.5},
        "record_updates": {"rounds": [1]},
    }
    raysim.run(config)
    plan = prepare(config)
    for one in recorded_updates.read_observations(Path(base["run_dir"])):
        at = one.broadcast.global_params.clone().requires_grad_()
        F.cross_entropy(logits(plan.model(), at, one.x), one.y).backward()
        assert torch.allclose(one.uploads["delta"], 0.5 * at.grad, atol=1e-12)


def test_observed_clients_of_a_k_async_round_keep_their_own_versions(base):
    config = {
        **base,
        **CONFIG,
        "algorithm": "fedavg",
        "rounds": 6,
        "record_updates": {"rounds": [5], "clients": 4},
    }
    raysim.run({**config, "schedule": {"name": "kasync", "k": 4}})
    seen = recorded_updates.read_observations(Path(base["run_dir"]))
    assert len({one.base for one in seen}) > 1
    by_base = {one.base: one.broadcast.global_params for one in seen}
    versions = list(by_base.values())
    assert not any(torch.equal(a, b) for i, a in enumerate(versions) for b in versions[:i])


def test_a_run_does_not_change_by_being_watched(base):
    config = {**base, **CONFIG, "algorithm": "fedreg"}
    watched = {
        "evaluate": {"every": 0, "forgetting": {"fisher": True}},
        "record_updates": {"rounds": [0, 1]},
    }
    plain = raysim.run(config)
    assert (
        raysim.run({**config, **watched, "run_dir": base["run_dir"] + "-2"}).digest == plain.digest
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schedule": {"name": "kasync", "k": 4}}, ("evaluate.forgetting", "sync")),
        ({"evaluate": {"forgetting": {"fisher": True}}}, ("evaluate.forgetting.fisher", "fedavg", "fedreg")),
        ({"evaluate": {"forgetting": {"every": 0}}}, ("evaluate.forgetting.every",)),
        ({"record_updates": {"rounds": [-1]}}, ("record_updates.rounds",)),
        ({"record_updates": {"rounds": []}}, ("record_updates.rounds",)),
        ({"record_updates": {"rounds": [4, 9]}}, ("record_updates.rounds", "0 to 3")),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(change, words, base):
    with pytest.raises(ConfigError) as refused:
        prepare(
            {
                **base,
                **CONFIG,
                "algorithm": "fedavg",
                "evaluate": {"forgetting": {"every": 1}},
                **change,
            }
        )
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_folder_without_updates_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"record_updates.rounds"):
        recorded_updates.read_observations(tmp_path)


def test_damaged_updates_are_refused_by_name(base):
    raysim.run(
        {**base, **CONFIG, "rounds": 1, "algorithm": "fedavg", "record_updates": {"rounds": [0]}}
    )
    folder = Path(base["run_dir"]) / "updates"
    (folder / "round-abc.safetensors").write_text("not ours")
    file = folder / "round-000000.safetensors"
    assert len(recorded_updates.read_observations(Path(base["run_dir"]))) == 4
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"round-000000\.safetensors is damaged"):
        recorded_updates.read_observations(Path(base["run_dir"]))


def test_files_are_one_for_each_round(tmp_path):
    found = forgetting.gather_losses(
        [3, 4],
        {
            7: {"after": [1.0, 3.0], "before": [1.5, 1.0]},
            8: {"after": [2.0, 5.0], "before": [0.5, 1.0]},
        },
    )
    assert found["after"] == [1.5, 4.0] and found["before"] == [1.0, 1.0]
    forgetting.write_forgetting(tmp_path, 12, found)
    forgetting.write_forgetting(tmp_path, 12, found)
    assert [path.name for path in (tmp_path / "forgetting").iterdir()] == ["round-000012.json"]
    assert (
        json.loads((tmp_path / "forgetting" / "round-000012.json").read_text())
        == forgetting.read_forgetting(tmp_path)[12]
    )
    assert forgetting.forgetting_metrics(found)["increase_q50"] == 1.75
