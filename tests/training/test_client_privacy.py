"""Client-level privacy: DP-FedAvg by hand, adaptive clipping by hand, ε of dp-accounting, and what
is refused."""

from __future__ import annotations

from itertools import pairwise
from math import inf, sqrt
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from support.cohorts import sample_cohort
from support.programs import program

from raysim.config.sections.privacy import AdaptiveClipping, ClientPrivacy
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare
from raysim.training.uploads.client_level_dp import client_epsilon

RULES = program("client_privacy_rules")
SIZES = [2, 5, 9, 14, 20, 30]
P = 310


@pytest.fixture
def waves(base, ragged, source) -> Any:
    """waves(privacy, **sections): six clients that send vectors of known norms, in float64."""
    path = source("rules", RULES)

    def make(privacy: Any, **sections: Any) -> dict[str, Any]:
        config = {
            **base, "rounds": 5, "dtype": "float64", "model": {"name": "mlp", "hidden": [4]},
            "partition": ragged(SIZES), "schedule": {"cohort": 3, "sampling": "poisson"},
            "client": f"{path}:Waves", "server": "fedavg", "local": {"steps": 1},
            "privacy": {"unit": "client", **privacy}, "batching": {"mode": "loop", "size": 2}, **sections,
        }  # fmt: skip
        return eval(repr(config).replace("FILE", path))

    return make


def wave(i: int, t: int) -> np.ndarray:
    return 0.1 * SIZES[i] * np.sin((t + 1) * np.arange(1, P + 1, dtype=np.float64))


def cohorts(run: Any) -> list[list[int]]:
    return [list(sample_cohort(run.schedule, t)) for t in range(run.config.rounds)]


def clip(v: np.ndarray, norm: float) -> np.ndarray:
    return v * min(1.0, norm / np.linalg.norm(v))


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_without_noise_the_sum_of_clipped_updates_is_divided_by_the_expected_cohort(
    mode, waves, engine
):
    """McMahan 2018, the estimator with a fixed denominator: x <- x - Σ clip(delta) / (q N), whoever
    takes part."""
    privacy = {"clip_norm": 8.0, "noise_multiplier": 0.0}
    run, records = engine(waves(privacy, batching={"mode": mode, "size": 2}))
    shares = []
    x = run.executor.xs[0]
    for t, cohort in enumerate(cohorts(run)):
        updates = [wave(i, t) for i in cohort]
        x = x - sum((clip(v, 8.0) for v in updates), np.zeros(P)) / 3
        assert np.allclose(run.executor.xs[t + 1], x, rtol=0, atol=1e-11)
        clipped = [np.linalg.norm(v) > 8.0 for v in updates]
        if cohort:
            shares.append(records[t + 1]["privacy/clipped_share"])
            assert shares[-1] == pytest.approx(np.mean(clipped))
    assert len({len(cohort) for cohort in cohorts(run)}) > 1 and 0 < np.mean(shares) < 1
    assert records[-1]["privacy/epsilon"] == inf


def test_noise_has_the_scale_of_the_clip_norm_and_is_keyed(waves, engine):
    """Two runs that differ in the noise alone differ by z sigma C / (q N), also in a round without
    clients."""
    many = {"rounds": 1, "model": {"name": "mlp", "hidden": [60]}, "client": "fedavg"}
    ends = [
        engine(waves({"clip_norm": 2.0, "noise_multiplier": z}, **many))[0].executor.xs[-1]
        for z in (0.0, 1.5, 1.5, 3.0)
    ]
    noise = (ends[1] - ends[0]) / (1.5 * 2.0 / 3)
    assert abs(noise.std() - 1) < 0.05 and abs(noise.mean()) < 0.05
    assert np.array_equal(ends[1], ends[2])
    assert np.allclose(ends[3] - ends[0], 2 * (ends[1] - ends[0]), atol=1e-11)


def test_a_round_without_clients_releases_noise(waves, engine):
    schedule = {"cohort": 1, "sampling": "poisson"}
    run, records = engine(waves({"noise_multiplier": 1.0}, schedule=schedule, rounds=8))
    empty = [t for t, cohort in enumerate(cohorts(run)) if not cohort]
    assert empty and len(empty) < 8
    for t in empty:
        step = run.executor.xs[t + 1] - run.executor.xs[t]
        assert 0.8 < step.std() < 1.2 and records[t + 1]["clients/used"] == 0
    changes = [b - a for a, b in pairwise(run.executor.xs)]
    assert len({change.tobytes() for change in changes}) == 8


@pytest.mark.parametrize("upload", [[], [{"name": "topk", "share": 0.1, "error_feedback": True}]])
def test_the_clip_norm_follows_the_quantile(upload, waves, engine):
    """Andrew 2021, algorithm 1 without noise: C <- C exp(-eta (b - gamma)), b = (Σ (b_i - 1/2)) /
    (q N) + 1/2."""
    adaptive = {"quantile": 0.3, "lr": 0.5}
    privacy = {"clip_norm": 6.0, "noise_multiplier": 0.0, "adaptive": adaptive}
    local = {"steps": 1, "upload": upload}
    run, records = engine(waves(privacy, local=local, rounds=8))
    norm = 6.0
    for t, cohort in enumerate(cohorts(run)):
        assert records[t + 1]["privacy/clip_norm"] == pytest.approx(norm, rel=1e-12)
        if upload:
            share = records[t + 1].get("privacy/clipped_share", 0.0)
            within = [0.5 - share] * len(cohort)
        else:
            within = [float(np.linalg.norm(wave(i, t)) <= norm) - 0.5 for i in cohort]
            step = sum((clip(wave(i, t), norm) for i in cohort), np.zeros(P)) / 3
            assert np.allclose(run.executor.xs[t] - run.executor.xs[t + 1], step, atol=1e-11)
        norm *= np.exp(-0.5 * (sum(within) / 3 + 0.5 - 0.3))
    assert norm != 6.0
    if not upload:
        used = sum(record["clients/used"] for record in records[1:])
        assert records[-1]["bytes_up"] == used * 8 * (P + 1)
        assert records[-1]["bytes_down"] == used * 8 * (P + 1)


def test_the_noise_of_both_releases_costs_what_one_costs():
    """Andrew 2021, theorem 1: 1 / z_delta² + 1 / (2 sigma_b)² = 1 / z²."""
    privacy = ClientPrivacy(unit="client", noise_multiplier=0.8, adaptive=AdaptiveClipping())
    for cohort in (4, 100):
        assert privacy.count_noise(cohort) == max(cohort / 20, 0.8)
        both = privacy.update_noise(cohort) ** -2 + (2 * privacy.count_noise(cohort)) ** -2
        assert both == pytest.approx(0.8**-2)
    assert ClientPrivacy(unit="client", noise_multiplier=0.8).update_noise(4) == 0.8


def test_epsilon_with_poisson_sampling_is_that_of_dp_accounting():
    accountant = RdpAccountant()
    gaussian = dp_accounting.GaussianDpEvent(1.1)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.2, gaussian), 7)
    found = client_epsilon("poisson", 20, 100, 1.1, 1e-5, 7)
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)
    assert client_epsilon("poisson", 20, 100, 1.1, 1e-5, 0) == 0
    assert client_epsilon("poisson", 20, 100, 0.0, 1e-5, 1) == inf


def test_epsilon_of_fixed_cohorts_counts_a_replaced_client_as_twice_the_clip_norm():
    accountant = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(3.0 / 2)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(50, 10, gaussian), 4)
    found = client_epsilon("uniform", 10, 50, 3.0, 1e-6, 4)
    assert found == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-12)


def test_epsilon_without_subsampling_is_bounded_by_that_of_the_gaussian():
    """If everybody takes part, T rounds are one Gaussian mechanism of sensitivity 2 sqrt(T) C."""
    exact = dp_accounting.get_epsilon_gaussian(3.0 / (2 * sqrt(4)), 1e-6)
    found = client_epsilon("uniform", 50, 50, 3.0, 1e-6, 4)
    assert exact <= found < 1.3 * exact


@pytest.mark.parametrize(("sampling", "cohort"), [("poisson", 3), ("uniform", 3)])
def test_a_run_logs_the_epsilon_of_its_sampling(sampling, cohort, waves, engine):
    schedule = {"cohort": cohort, "sampling": sampling}
    _, records = engine(waves({"noise_multiplier": 2.0}, schedule=schedule, rounds=2))
    for t in (1, 2):
        assert records[t]["privacy/epsilon"] == client_epsilon(sampling, 3, 6, 2.0, 1e-5, t)


def test_clients_that_never_train_do_not_amplify(waves, engine):
    """Cohorts are drawn from the other four clients."""
    held_out = {"every": 0, "clients": {"held_out": 0.34}}
    config = waves({}, evaluate=held_out, rounds=1)
    config["partition"] = {"name": "iid", "clients": 6, "test": {"fraction": 0.2}}
    _, records = engine(config)
    assert records[1]["privacy/epsilon"] == client_epsilon("poisson", 3, 4, 1.0, 1e-5, 1)


def test_privacy_of_examples_keeps_its_identity_and_pooled_is_not_chosen_for_clients(waves):
    privacy = {"max_grad_norm": 1.0}
    example = prepare({**waves({}), "client": "fedavg", "privacy": privacy, "batching": {}})
    assert "unit" not in example.config.identity()["privacy"]
    client = prepare(waves({}, client="fedavg", batching={}))
    assert client.mode != "pooled" and client.config.identity()["privacy"]["unit"] == "client"
    with pytest.raises(ConfigError, match=r"'pooled' is not possible .*privacy\.unit 'client'"):
        prepare(waves({}, client="fedavg", batching={"mode": "pooled"}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schedule": {"cohort": 3, "sampling": "samples"}}, r"schedule\.sampling 'samples'; use poisson"),
        ({"schedule": {"name": "kasync", "k": 2}}, "asynchronous schedule; use schedule=sync"),
        ({"schedule": {"cohort": 2, "client_dropout": {"rate": 0.1}}}, r"leave out schedule\.client_dropout"),
        ({"server": {"name": "fedavg", "weights": "samples"}}, "'fedavg' weighs clients by their samples"),
        ({"server": "FILE:Watches"}, "'watches' uses who takes part"),
        ({"server": "FILE:Weighs"}, "'weighs' weighs clients unequally"),
        ({"client": "scaffold", "server": "scaffold"}, "'scaffold' receives .*only the mean of one upload"),
    ],
)  # fmt: skip
def test_what_has_no_epsilon_is_refused_by_name(changes, said, waves):
    said = rf"privacy\.unit: 'client' is not possible in this run: .*{said}"
    with pytest.raises(ConfigError, match=said):
        prepare(waves({}, **changes))


@pytest.mark.parametrize("of", ["ids", "samples", "weights", "versions", "staleness"])
def test_a_server_rule_that_asks_for_the_participants_is_refused_before_the_run(of, waves):
    """Already their number tells whether somebody took part, if each does by chance."""
    said = rf"^server.*: server rule 'asks' reads reports\.{of}, and"
    with pytest.raises(ConfigError, match=said):
        prepare(waves({}, client="fedavg", server={"name": "FILE:Asks", "of": of}))


def test_without_privacy_a_server_rule_may_ask_for_the_participants(waves):
    config = waves({}, client="fedavg", server="FILE:Asks")
    assert prepare({**config, "privacy": None}).server.name == "asks"


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        ({"unit": "clint"}, r"privacy\.unit: unknown unit 'clint'; did you mean 'client'"),
        ({"max_grad_norm": 1.0}, r"privacy\.max_grad_norm: unknown key"),
        ({"clip_norm": 0}, r"privacy\.clip_norm: .*greater than 0"),
        ({"adaptive": {"quantile": 1.0}}, r"privacy\.adaptive\.quantile: .*less than 1"),
        ({"adaptive": {"noise_std": 0.4}}, r"privacy\.adaptive\.noise_std: .*more than half of noise_multiplier"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_with_their_key(privacy, said, waves):
    with pytest.raises(ConfigError, match=said):
        prepare(waves(privacy))


def test_clip_norm_belongs_to_clients(base):
    with pytest.raises(ConfigError, match=r"privacy\.clip_norm: unknown key"):
        prepare({**base, "algorithm": "fedavg", "rounds": 1, "privacy": {"clip_norm": 1.0}})


def test_an_update_of_another_size_is_refused(waves):
    with pytest.raises(ConfigError, match=r"needs an upload of the model's size, but .*'tiny'"):
        prepare(waves({}, client="FILE:Tiny"))
