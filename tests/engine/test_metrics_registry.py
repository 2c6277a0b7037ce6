"""The registry of metrics: short runs log nothing that it lacks, and nothing that is always zero."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import programs

import raysim
from raysim import metrics
from raysim.algorithms.fedavg import FedAvgServer
from raysim.config.explain import validate
from raysim.engine.round_metrics import virtual_time_metric
from raysim.metrics import (
    METRICS,
    all_metrics,
    find_metric,
    is_share,
    lower_is_better,
    name_taken,
)
from raysim.rules import Logged
from raysim.rules.methods import registry
from raysim.schedule import make_schedule

OWN = Path(programs.__file__).with_name("sampling_own.py")
ASYNCHRONOUS = {"name": "kasync", "k": 2, "concurrency": 4}
RUNS: dict[str, dict[str, Any]] = {
    "sync": {"algorithm": "scaffold"},
    "deadline": {"schedule": {"cohort": 3, "deadline": 1.0, "client_speeds": "lognormal"}},
    "dropout": {"schedule": {"cohort": 3, "client_dropout": {"rate": 0.5}}},
    "kasync": {"algorithm": "fedhist", "schedule": ASYNCHRONOUS | {"max_staleness": 3}},
    "buffered": {"algorithm": "fedbuff", "schedule": {"name": "buffered", "buffer_size": 2}},
    "fedasync": {"algorithm": "fedasync", "schedule": ASYNCHRONOUS},
    "wkafl": {"algorithm": "wkafl", "schedule": ASYNCHRONOUS},
    "refl": {"algorithm": "refl", "schedule": ASYNCHRONOUS},
    "privacy": {"privacy": {"max_grad_norm": 1.0, "noise_multiplier": 1.0}},
    "drop": {"faults": {"on_client_error": "drop"}, "partition": {"val_fraction": 0.1, "clients": 20}},
    "forgetting": {"evaluate": {"forgetting": {"fisher": True}}, "algorithm": "fedreg"},
    "theory": {"evaluate": {"theory": {"every": 1}, "per_class": True}, "algorithm": "gradma", "local": {"steps": 2}},
    "clients": {
        "partition": {"clients": 20, "test": {"fraction": 0.2}},
        "evaluate": {"clients": {"held_out": 0.2, "fine_tune": {"steps": 1}}},
    },
    "fednova": {"algorithm": "fednova"},
    "fedreg_mg": {"algorithm": "fedreg_mg"},
    "fedcurv": {"algorithm": "fedcurv"},
    "mifa": {"algorithm": "mifa"},
}  # fmt: skip


def finished(base: dict[str, Any], **changes: Any) -> list[dict[str, float]]:
    small = {"rounds": 3, "algorithm": "fedavg", "schedule": {"cohort": 3}}
    return raysim.run({**base, **small, **changes}, tracking=False).history


def assert_listed(history: list[dict[str, float]]) -> None:
    for name in {key for record in history for key in record}:
        entry = find_metric(name)
        assert entry is not None and not entry.users_own, f"{name} is not in the registry"


@pytest.mark.parametrize("kind", RUNS)
def test_runs_log_nothing_unlisted(kind, base):
    assert_listed(finished(base, **RUNS[kind]))


@pytest.mark.ray
def test_a_run_on_ray_logs_nothing_unlisted(base, recycled_actors):
    history = finished(base, resources={"executor": "ray", "actors": 2, "cpus": 1})
    assert_listed(history)
    assert (
        "system/actors_failed" in history[-1] and 0 < history[-1]["system/worker_utilization"] <= 1
    )


def test_what_cannot_happen_is_not_counted(base):
    names = set(finished(base)[-1])
    assert {"clients/used", "clients/never_seen", "system/round_seconds"} <= names
    parts = {name.partition("/")[0] for name in names}
    assert "staleness" not in parts and "virtual_time" not in names
    machinery = {name for name in names if name.endswith(("_seconds", "_second", "_utilization"))}
    assert machinery and all(name.startswith("system/") for name in machinery)
    assert not {name for name in names if "state_bytes" in name} - {"system/server_state_bytes"}
    counts = {metric.name for metric in METRICS if metric.is_count}
    assert counts and not counts & names


@pytest.mark.parametrize(
    ("schedule", "is_rounds"),
    [
        ({}, True), ({"sampling": "samples"}, True), ({"sampling": "poisson"}, False),
        ({"sampling": {"name": f"{OWN}:Newest", "skip": 9}}, False),
        ({"deadline": 0.5}, False), ({"client_speeds": "lognormal"}, False),
        ({"client_dropout": {"rate": 0.9, "rejoin_after": 3.5}}, False),
        ({"availability": {"period": 9.0, "open": 0.5}}, False),
    ],
)  # fmt: skip
def test_virtual_time_is_logged_unless_it_is_the_number_of_rounds(base, schedule, is_rounds):
    config = validate({**base, "rounds": 20, "schedule": {"name": "sync", "cohort": 2, **schedule}})
    clock = make_schedule(config, np.array([5, 6, 7, 8]))
    times = [clock.next_round(t).time for t in range(20)]
    assert (times == [t + 1 for t in range(20)]) == is_rounds
    logged = virtual_time_metric(config, times[-1])
    assert logged == ({} if is_rounds else {"virtual_time": times[-1]})


def test_clients_that_were_never_seen_become_fewer(base):
    history = finished(base, rounds=40, partition={"clients": 20})
    left = [record["clients/never_seen"] for record in history[1:]]
    assert left[0] == 17 and left == sorted(left, reverse=True) and left[-1] == 0


@pytest.mark.parametrize(
    ("name", "lower"),
    [
        ("loss", True), ("val/loss", True), ("train_loss", True), ("clients/loss_worst10", True),
        ("held_out_fine_tuned/loss_weighted", True), ("clients/accuracy_std", True),
        ("client_loss/q50", True), ("theory/f", True), ("forgetting/increase_q90", True),
        ("accuracy", False), ("clients/accuracy_q10", False), ("participation_gap/accuracy", False),
    ],
)  # fmt: skip
def test_losses_and_deviations_are_better_when_lower(name, lower):
    assert lower_is_better(name) == lower


def test_one_letter_in_braces_is_a_number():
    top = find_metric("top5")
    assert top is not None and top.name == "top{k}" and is_share("top5")
    for name in ("topology", "top_error"):
        assert name_taken(name) is None and not is_share(name)
    kind = find_metric("theory/eps_local")
    assert kind is not None and kind.name == "theory/eps_{kind}"


def test_each_metric_has_one_line():
    names = [metric.name for metric in all_metrics()]
    assert max(Counter(names).values()) == 1
    assert all(metric.meaning and metric.logged for metric in all_metrics())


def test_a_rule_declares_what_it_logs(monkeypatch):
    """Once a class is made; of one that is not shipped, rows of ledgers keep all rounds."""
    registry.discover()
    monkeypatch.setattr(metrics, "_DECLARED", dict(metrics._DECLARED))

    class DeclaringServer(FedAvgServer):
        logs = (
            Logged("kept_parts", "parts that were kept", "parts"),
            Logged("own_bytes", "size"),
            Logged("tau_eff", "of a shipped method"),
            Logged("uploads", "of the engine"),
        )

    entry, size = find_metric("server/kept_parts"), find_metric("system/server_own_bytes")
    assert entry is not None and size is not None and size.users_own
    assert (entry.unit, entry.logged, entry.users_own) == ("parts", "every round, declaring", True)
    for name in ("tau_eff", "uploads"):
        known = find_metric(f"server/{name}")
        assert known is not None and not known.users_own and not known.meaning.startswith("of ")
    fresh = find_metric("server/fresh")
    assert fresh is not None and fresh.logged == "every round, fedhist and refl"


@pytest.mark.parametrize("logs", [Logged("a", "b"), (("a", "b"),), ("tau",)])
def test_what_is_no_tuple_of_logged_is_refused(logs):
    with pytest.raises(TypeError, match=r"^MineServer\.logs is not a tuple of Logged; write"):
        type("MineServer", (FedAvgServer,), {"logs": logs})
