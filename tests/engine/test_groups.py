"""Groups of clients: who is in them, what they train, and how a run with them is identified. The
battery has groups of every client rule.

The rules of the attack are those that docs/how-to/groups.md shows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.documents import blocks
from support.oracle_cases import MODES, NETS, distance, feed
from support.programs import program
from support.stopped_runs import stopped_and_resumed

import raysim
from raysim.config import explain
from raysim.data.partition.groups import group_members
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "groups.md"
SHOWN = {block.file: block.text for block in blocks(PAGE) if block.file.endswith(".py")}
SIZES = [30, 9, 17, 12, 45, 8, 23, 16, 20, 11]
BASE = {"data": "digits", "rounds": 2, "algorithm": "fedavg"}

OWN = program("groups_own")


@pytest.fixture
def config(ragged, source):
    """config(mode, **sections): rounds of the MLP in float64 with all ten clients."""

    def make(mode: str = "loop", **sections):
        return {
            "rounds": 4,
            "seed": 2,
            "dtype": "float64",
            "partition": ragged(SIZES),
            "schedule": {"cohort": 6},
            "model": NETS["mlp"][0],
            "client": "fedavg",
            "server": "fedavg",
            "local": {"steps": 3, "batch_size": 16, "lr": 0.2},
            "batching": {"mode": mode, "size": 3},
            **sections,
        }

    return make


def only_named(groups: dict) -> dict:
    """The groups, with the others' client rule where they give none."""
    return {name: {"client": None, **group} for name, group in groups.items()}


def members(groups: dict, n: int = 10, seed: int = 0) -> list[int]:
    config = explain.validate({**BASE, "seed": seed, "groups": only_named(groups)})
    found = group_members(config, n)
    assert found is not None
    return found.tolist()


# --- who is in a group


def test_shares_are_exact_and_keyed():
    groups = {"a": {"share": 0.2}, "b": {"share": 0.35}}
    drawn = np.array([members(groups, 40, seed) for seed in range(300)])
    assert (np.sum(drawn == 1, 1) == 8).all() and (np.sum(drawn == 2, 1) == 14).all()
    assert members(groups, 40, 7) == drawn[7].tolist()
    # each client is in a with probability 0.2: to five standard errors
    share = (drawn == 1).mean(0)
    assert np.abs(share - 0.2).max() < 5 * np.sqrt(0.2 * 0.8 / 300)
    assert np.bincount(members({"a": {"share": 0.5}, "b": {"share": 0.5}}, 7))[0:1] == [0]


def test_named_clients_come_first_and_shares_draw_from_the_others(tmp_path):
    file = tmp_path / "ids.txt"
    file.write_text("3\n4 5\n")
    groups = {"drawn": {"share": 0.5}, "one": {"ids": [0]}, "file": {"file": str(file)}}
    found = members(groups)
    assert found[0] == 2 and found[3:6] == [3, 3, 3] and found.count(1) == 5


# --- what they train


@pytest.mark.parametrize("mode", MODES)
def test_sign_flipping_attackers_against_the_median(mode, config, source, engine):
    """Attackers send -5 times their update; the server takes the median of each coordinate (Yin
    2018)."""
    paths = {name: source(name[:-3], text) for name, text in SHOWN.items()}
    attack = {"name": f"{paths['sign_flip.py']}:SignFlipClient", "factor": 5.0}
    run, _ = engine(
        config(
            mode,
            server=f"{paths['median.py']}:MedianServer",
            groups={"attackers": {"ids": [1, 4, 7], "client": attack}},
        )
    )
    assert distance(run.executor.xs, averaged(run, flipped=(1, 4, 7), middle=np.median)) < 1e-9


@pytest.mark.parametrize("mode", MODES)
def test_a_group_has_its_own_local_settings(mode, config, engine):
    """Other steps, other batches, another step size: each client's SGD with those of its group."""
    local = {"epochs": 1, "batch_size": "full", "lr": 0.5}
    run, _ = engine(config(mode, groups={"full": {"ids": [0, 2, 3, 8], "local": local}}))
    assert distance(run.executor.xs, averaged(run, full=(0, 2, 3, 8))) < 1e-9


def averaged(run, flipped=(), full=(), middle=np.mean) -> list[np.ndarray]:
    """x_0 .. x_T of local SGD: `flipped` send -5 delta, `full` make one step of 0.5 on all data."""
    f, net = feed(run), NETS["mlp"][1]
    xs = [f.x0]
    for cohort, batches in zip(f.cohorts, f.batches, strict=True):
        deltas = []
        for i in cohort:
            x, y = f.data[i]
            w = xs[-1]
            for batch in [np.arange(len(y))] if i in full else batches[i]:
                w = w - (0.5 if i in full else 0.2) * net.grad(w, x[batch], y[batch])
            deltas.append((-5 if i in flipped else 1) * (xs[-1] - w))
        xs.append(xs[-1] - middle(deltas, axis=0))
    return xs


@pytest.mark.parametrize("mode", MODES)
def test_a_rule_knows_its_group_and_keeps_a_state_of_its_own(mode, config, source, engine):
    rule = f"{source('own', OWN)}:Counting"
    groups = {"half": {"ids": [0, 1, 2], "client": rule}, "named": {"ids": [5], "client": None}}
    grouped, _ = engine(config(mode, client="scaffold", server="scaffold", groups=groups))
    took_part = [sum(i in c for c in feed(grouped).cohorts) for i in range(10)]
    for i in range(10):
        kept = grouped.store.get(i)
        if kept is None:
            assert not took_part[i]
            continue
        assert set(kept) == {"c_i", "rounds"}
        assert kept["rounds"] == (took_part[i] if i < 3 else 0)
        assert kept["c_i"].any() == (i >= 3)


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_a_group_with_the_rule_of_the_others_changes_nothing(name, config, engine):
    given = {"client": name, "server": name}
    plain, _ = engine(config(**given))
    named, _ = engine(config(**given, groups={"same": {"share": 0.3, "client": name}}))
    assert all(map(np.array_equal, plain.executor.xs, named.executor.xs))


# --- runs


@pytest.fixture
def attacked(config, source, base):
    rule = {"name": f"{source('sign_flip', SHOWN['sign_flip.py'])}:SignFlipClient", "factor": 2.0}
    groups = {"attackers": {"share": 0.3, "client": rule, "local": {"batch_size": 5}}}
    return {**base, **config(groups=groups)}


@pytest.mark.ray
@pytest.mark.parametrize("schedule", [{"cohort": 6}, {"name": "kasync", "k": 3}])
def test_actors_and_a_stop_do_not_change_the_bits(schedule, attacked, tmp_path, recycled_actors):
    given = {**attacked, "schedule": schedule}
    whole = raysim.run(given, run_dir=str(tmp_path / "whole"))
    assert stopped_and_resumed(given, tmp_path / "part").state_digest == whole.state_digest


def test_groups_and_the_files_that_they_name_are_part_of_the_identity(attacked, tmp_path):
    plain = prepare({k: v for k, v in attacked.items() if k != "groups"}).config
    assert "groups" not in plain.identity()
    assert prepare(attacked).config.fingerprint != plain.fingerprint
    file = tmp_path / "ids.txt"
    fingerprints = set()
    for text in ("1 2", "1 3"):
        file.write_text(text)
        fingerprints.add(
            prepare(
                {**attacked, "groups": only_named({"a": {"file": str(file)}})}
            ).config.fingerprint
        )
    moved = tmp_path / "moved.txt"
    moved.write_text("1 3")
    fingerprints.add(
        prepare({**attacked, "groups": only_named({"a": {"file": str(moved)}})}).config.fingerprint
    )
    assert len(fingerprints) == 2
    written = prepare(attacked).config
    again = explain.validate(written.model_dump(mode="json"))
    assert again.groups == written.groups


@pytest.mark.parametrize("main, group", [("fedavg", "gradma"), ("gradma", "fedavg")])
def test_metrics_that_one_group_reports_are_means_over_its_clients(main, group, config, engine):
    """Of a round with clients of both groups, and of one with clients of either."""
    clients = {"client": main, "server": "fedavg", "groups": {"a": {"ids": [0, 1, 2]}}}
    clients["groups"]["a"]["client"] = group
    _, records = engine({**config("loop", **clients), "schedule": {"cohort": 2}, "rounds": 4})
    assert any("client/qp_active" in record for record in records)
    assert all(0 <= record.get("client/qp_active", 0) <= 1 for record in records)


def test_privacy_counts_the_passes_of_each_group(config, engine):
    """A client with batches of 5 of its 30 examples makes fewer passes than one with full batches."""
    private = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    full = {"local": {"steps": 6, "batch_size": "full"}}
    _, few = engine(config(privacy=private, schedule={"cohort": 10}))
    _, many = engine(
        config(privacy=private, schedule={"cohort": 10}, groups={"a": {"ids": [4], **full}})
    )
    assert many[-1]["privacy/epsilon"] > few[-1]["privacy/epsilon"]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"a": {"share": 0.7}, "b": {"share": 0.4}}, r"groups: the shares of a and b add up to 1\.1"),
        ({"a": {"share": 1.2}}, r"groups\.a\.share: .*less than or equal to 1"),
        ({"a": {"share": 0.01}}, r"groups\.a\.share: 0\.01 of 10 clients is none"),
        ({"a": {"share": 0.9}, "b": {"ids": [0, 1]}}, r"groups: the shares of a need 9 clients"),
        ({"a": {"ids": [0, 10]}}, r"groups\.a: client 10 does not exist; .* 0 to 9"),
        ({"a": {"ids": [3, 3]}}, r"groups\.a: client 3 is twice"),
        ({"a": {"ids": [3]}, "b": {"ids": [3]}}, r"groups\.b: client 3 is in 'a' as well"),
        ({"a": {}}, r"groups\.a: give one of 'share', 'ids' and 'file'"),
        ({"a": {"share": 0.5, "ids": [1]}}, r"groups\.a: give one of .* here are share and ids"),
        ({"a": {"file": "missing.txt"}}, r"groups\.a\.file: .*missing\.txt cannot be read"),
        ({"a": {"file": "WORDS"}}, r"groups\.a\.file: .* contains 'from'"),
        ({"a": {"share": 0.5, "local": {"batch": 3}}}, r"groups\.a\.local\.batch: unknown key"),
        ({"a": {"share": 0.5, "local": {"steps": 1, "epochs": 1}}}, r"groups\.a\.local: give either"),
        ({"a": {"share": 0.5, "client": "fedproxx"}}, r"groups\.a\.client\.name: .*fedproxx.*fedprox"),
        ({"a": {"share": 0.5, "client": {"name": "fedprox", "nu": 1}}}, r"groups\.a\.client\.nu: unknown"),
        ({"a": {"share": 0.5, "client": "OWN:Silent"}}, r"groups\.a\.client: .*'delta'"),
        ({"a": {"share": 0.5, "client": "OWN:Wrong"}}, r"groups\.a\.client\.name: finish of .*'delta'"),
        ({"a": {"share": 0.5, "client": "OWN:Owner"}}, r"groups\.a\.client: .*'owner' declares personal"),
        (
            {"a": {"ids": [1], "client": "OWN:Counting"}, "b": {"ids": [2], "client": "OWN:OtherShape"}},
            r"groups\.b\.client: .*'othershape' keeps 'rounds'",
        ),
        ({"a": {"share": 0.5, "local": {"upload": "topq"}}}, r"groups\.a\.local\.upload\.0\.name: .*'topq'"),
        (
            {"a": {"share": 0.5, "local": {"upload": ["clip", {"name": "qsgd", "unbiased": True, "error_feedback": True, "bits": 2}]}}},
            r"groups\.a\.local\.upload\.1\.error_feedback: .*'qsgd'",
        ),
        ({"a": {"share": 0.5, "local": {"optimizer": "adma"}}}, r"groups\.a\.local\.optimizer\.name: .*'adma'"),
        (
            {"a": {"share": 0.5, "client": "gradma", "local": {"optimizer": "adam"}}},
            r"groups\.a: local\.optimizer: client rule 'gradma' needs plain SGD",
        ),
        (
            {"a": {"share": 0.5, "local": {"optimizer": "adamw", "weight_decay": 0.1}}},
            r"groups\.a: local: both 'weight_decay' and that of optimizer 'adamw'",
        ),
        ({"a.b": {"share": 0.5}}, r"groups\.a\.b"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_before_the_run(groups, message, config, base, source):
    own = source("own", OWN)
    text = repr(groups).replace("OWN", own).replace("WORDS", own)
    with pytest.raises(ConfigError, match=message):
        prepare({**base, **config(groups=only_named(eval(text)))})


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"attacker": {"share": 0.2}}, r"groups\.attacker: its clients .* give 'client' or"),
        ({"attacker": {"share": 0.2, "local": {}}}, r"groups\.attacker: its clients .* give 'client' or"),
        ({"attacker": {"client": "fedprox"}}, r"groups\.attacker: give one of"),
        ({"slow": {"share": 0.2}}, r"groups\.slow: its clients .*name\)$"),
    ],
)  # fmt: skip
def test_a_group_that_changes_nothing_is_refused(group, message, config, base):
    """It is a misspelled name, or lacks what it was made for."""
    groups = {"attackers": {"share": 0.2, "client": "fedprox"}, **group}
    with pytest.raises(ConfigError, match=message):
        prepare({**base, **config(groups=groups)})
    prepare({**base, **config(groups=only_named({"named": {"share": 0.2}}))})


def test_the_theorem_does_not_apply(config, base):
    from raysim.diagnostics.convergence import why_not

    assert "(groups)" not in str(why_not(prepare({**base, **config()})))
    groups = {"a": {"share": 0.5, "client": None}}
    assert "(groups)" in str(why_not(prepare({**base, **config(server="fedavgm", groups=groups)})))
