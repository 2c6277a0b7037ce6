"""Who a client is, and keyed random numbers in client rules and server rules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import ndtri
from support.batteries import NETS, SIZES
from support.oracle_cases import in_both_modes
from support.programs import program

import raysim
from raysim.errors import ClientError, ConfigError
from raysim.randomness import generator

RULES = program("chance_rules")


@pytest.fixture
def config(ragged, source):
    """config(**sections): rounds of ragged clients with the rules of this file."""
    rules, nets = source("rules", RULES), source("nets", NETS)

    def make(**sections):
        return {
            "rounds": 2,
            "seed": 4,
            "dtype": "float64",
            "model": {"name": f"{nets}:Net", "norm": False},
            "partition": ragged(SIZES),
            "schedule": {"cohort": 8},
            "client": f"{rules}:Noisy",
            "server": f"{rules}:Shaken",
            "local": {"steps": 2, "batch_size": 6, "lr": 0.05},
            "batching": {"mode": "loop", "size": 3},
            **sections,
        }

    return make


@pytest.mark.parametrize("local", [{"steps": 2}, {"epochs": 2}], ids=["steps", "epochs"])
def test_noise_and_client_are_the_same_bits_in_loop_and_lanes(local, config, engine):
    local = {**local, "batch_size": 6, "lr": 0.05}
    (looped, _), (several, _) = in_both_modes(engine, config(local=local), 1e-9)
    drawn, same = looped.final["state/drawn"], several.final["state/drawn"]
    assert torch.equal(drawn[:, 0], same[:, 0]) and torch.equal(drawn[:, 2:], same[:, 2:])
    assert torch.allclose(drawn[:, 1], same[:, 1], rtol=1e-14)


def test_each_stream_is_keyed_by_seed_name_round_and_client(config, engine):
    """The numbers of the last round, drawn again from the keys that are documented."""
    run, _ = engine(config(rounds=1))
    drawn = run.final["state/drawn"].numpy()
    size = run.plan.problem.size
    for client in (0, 4):
        z = generator(4, "client rule noise z", 0, client)
        words = z.integers(0, 2**32, 2 * size, dtype=np.uint32)
        # Each number is rounded to float32: at most 2e-7 each, most of which cancels.
        assert drawn[client, 0] == pytest.approx(ndtri((words + 0.5) / 2**32).sum(), abs=1e-5)
        u = generator(4, "client rule noise u", 0, client)
        assert drawn[client, 1] == pytest.approx(u.random(12, dtype=np.float32).sum(), rel=1e-6)
        assert drawn[client, 2] == 2 * client
        end = generator(4, "client rule end", 0, client).random()
        assert drawn[client, 3] == pytest.approx(end, rel=1e-6)
        assert drawn[client, 4] == client
    assert len(set(drawn[[0, 2, 4, 6, 7], 0])) == 5


def test_uniform_and_normal_have_their_moments(config, engine):
    """12 uniform numbers a client and 2 P normal ones: mean and variance to five standard errors."""
    run, _ = engine(config(rounds=1, schedule={"cohort": 8}))
    drawn = run.final["state/drawn"].numpy()[[0, 2, 4, 6, 7]]
    assert abs(drawn[:, 1].mean() - 6) < 5 * np.sqrt(12 / 12 / 5)
    n = 5 * 2 * run.plan.problem.size
    assert abs(drawn[:, 0].sum()) < 5 * np.sqrt(n)


def test_a_resumed_run_draws_the_same(config, base, tmp_path):
    given = {**base, **config(rounds=3), "checkpoint": {"every": 1}}
    whole = raysim.run(given, run_dir=str(tmp_path / "whole"))
    part = raysim.run(
        given, run_dir=str(tmp_path / "part"), progress=lambda record: record["round"] == 1
    )
    assert part.stopped and raysim.resume(tmp_path / "part").state_digest == whole.state_digest
    other = raysim.run({**given, "seed": 5}, run_dir=str(tmp_path / "other"))
    assert other.digest != whole.digest


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_a_generator_in_a_step_is_refused_and_noise_named(mode, config, source, engine):
    given = config(
        client=f"{source('rules', RULES)}:InStep",
        server="fedavg",
        batching={"mode": mode, "size": 3},
    )
    with pytest.raises((ClientError, ConfigError), match=r"task\.rng\('late'\).*`noise`"):
        engine(given)


@pytest.mark.parametrize("name", ["NoShape", "NoLaw"])
def test_a_wrong_noise_is_refused_before_the_run(name, config, source, engine):
    given = config(client=f"{source('rules', RULES)}:{name}", server="fedavg")
    with pytest.raises(ConfigError, match=rf"noise of client rule '{name.lower()}' returns 'z' as"):
        engine(given)
