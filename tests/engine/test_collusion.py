"""Attackers that collude: ALIE and IPM of the how-to page against NumPy, their bits, and errors."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm
from support import softmax_regression
from support.documents import blocks
from support.softmax_regression import SIZES, local_models
from support.stopped_runs import stopped_and_resumed

import raysim
from raysim.errors import ConfigError, RaysimError
from raysim.prepare.resolve import prepare

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "groups.md"
SHOWN = {block.file: block.text for block in blocks(PAGE) if block.file.endswith(".py")}
ATTACKERS, HONEST = [1, 4, 5], [0, 2, 3]

OWN = """
from dataclasses import dataclass

import torch

from raysim.rules import ClientRule


@dataclass(frozen=True)
class Noisy(ClientRule):
    def collude(self, uploads, others, cohort):
        noise = torch.from_numpy(cohort.rng("noise").standard_normal(uploads["delta"].shape))
        return {"delta": uploads["delta"].mean(0) + sum(cohort.ids) * noise.to(uploads["delta"])}


@dataclass(frozen=True)
class Answers(ClientRule):
    def collude(self, uploads, others, cohort):
        return ANSWER
"""


@pytest.fixture
def config(base, tmp_path):
    return partial(softmax_regression.config, tmp_path, base)


@pytest.fixture
def rule(source):
    """rule(file, Class, **parameters): a rule of the how-to page."""
    return lambda file, cls, **values: {
        "name": f"{source(Path(file).stem, SHOWN[file])}:{cls}",
        **values,
    }


def alie(updates: np.ndarray, z: float = 1.3) -> np.ndarray:
    """Baruch 2019, Alg. 3: mean - z * standard deviation of the attackers' own gradients, which are
    -updates."""
    return -((-updates[ATTACKERS]).mean(0) - z * (-updates[ATTACKERS]).std(0))


def alie_of_the_paper(updates: np.ndarray) -> np.ndarray:
    """The largest z with Φ(z) <= (n - m - s) / (n - m), for s = floor(n/2 + 1) - m supporters."""
    n, m = len(updates), len(ATTACKERS)
    s = np.floor(n / 2 + 1) - m
    return alie(updates, float(norm.ppf((n - m - s) / (n - m))))


def ipm(updates: np.ndarray) -> np.ndarray:
    """Xie 2020: -ε times the mean of the honest updates."""
    return -0.5 * updates[HONEST].mean(0)


@pytest.mark.parametrize("server", ["fedavg", "samples", "median"])
@pytest.mark.parametrize(
    ("file", "cls", "values", "attack"),
    [
        ("alie.py", "AlieClient", {"z": 1.3}, alie),
        ("alie.py", "AlieClient", {}, alie_of_the_paper),
        ("ipm.py", "IpmClient", {"epsilon": 0.5}, ipm),
    ],
)
def test_the_server_receives_what_the_attackers_agree_on(
    server, file, cls, values, attack, config, rule, engine
):
    groups = {"attackers": {"ids": ATTACKERS, "client": rule(file, cls, **values)}}
    servers = {
        "fedavg": "fedavg",
        "samples": {"name": "fedavg", "weights": "samples"},
        "median": rule("median.py", "MedianServer"),
    }
    run, _ = engine(config(groups=groups, server=servers[server]))
    x = run.executor.xs[0]
    for t in range(3):
        updates = local_models(x) - x
        updates[ATTACKERS] = attack(updates)
        if server == "median":
            x = x + np.quantile(updates, 0.5, axis=0)
        else:
            x = x + np.average(updates, axis=0, weights=SIZES if server == "samples" else None)
        assert np.allclose(run.executor.xs[t + 1], x, rtol=0, atol=1e-10)


def test_a_group_sees_the_uploads_as_they_arrived(config, source, engine):
    swap = OWN.replace("ANSWER", '{"delta": -others["delta"].mean(0).expand(len(cohort.ids), -1)}')
    path = f"{source('swap', swap)}:Answers"
    groups = {"a": {"ids": [0], "client": path}, "b": {"ids": [3, 5], "client": path}}
    run, _ = engine(config(groups=groups, rounds=1))
    x = run.executor.xs[0]
    arrived = local_models(x) - x
    updates = arrived.copy()
    updates[0] = -arrived[[1, 2, 3, 4, 5]].mean(0)
    updates[[3, 5]] = -arrived[[0, 1, 2, 4]].mean(0)
    assert np.allclose(run.executor.xs[1], x + updates.mean(0), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("None", "must return a dict with keys among delta"),
        ('{"other": 1}', "must return a dict with keys among delta"),
        ('{"delta": uploads["delta"][0]}', r"returns 'delta' as \[18\]; return \[2, 18\]"),
        ('{"delta": uploads["delta"] / 0}', "'delta' is not finite"),
        ("uploads.length", "collude of client rule 'answers', .*line"),
    ],
)
def test_a_collude_that_is_wrong_is_refused(answer, message, config, source):
    client = f"{source('own', OWN.replace('ANSWER', answer))}:Answers"
    with pytest.raises(RaysimError, match=message):
        raysim.run(config(groups={"a": {"ids": ATTACKERS, "client": client}}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"server": "mifa"}, r"groups\.a\.client: .* server rule 'mifa' receives 'delta' as the dif"),
        (
            {"privacy": {"unit": "client", "clip_norm": 1.0, "noise_multiplier": 1.0}},
            r"groups\.a\.client: .* privacy\.unit 'client'",
        ),
    ],
)  # fmt: skip
def test_what_excludes_collusion_refuses_it_by_name(sections, message, config, source):
    groups = {"a": {"ids": ATTACKERS, "client": f"{source('own', OWN)}:Noisy"}}
    with pytest.raises(ConfigError, match=message):
        prepare(config(groups=groups, **sections))


def cases(config, source, **schedule):
    groups = {"a": {"ids": ATTACKERS, "client": f"{source('own', OWN)}:Noisy"}}
    return config(groups=groups, schedule=schedule, checkpoint={"every": 1}, batching={"size": 1})


@pytest.mark.ray
@pytest.mark.parametrize("schedule", [{"cohort": 4}, {"name": "kasync", "k": 2}])
def test_actors_a_stop_and_blocks_do_not_change_the_bits(
    schedule, config, source, recycled_actors, tmp_path
):
    given = cases(config, source, **schedule)
    whole = raysim.run(given, run_dir=str(tmp_path / "whole"))
    assert stopped_and_resumed(given, tmp_path / "part").state_digest == whole.state_digest
    large = {**given, "batching": {"mode": "loop", "size": 6}}
    assert raysim.run(large, run_dir=str(tmp_path / "large")).digest == whole.digest
