"""A run with more attackers in a round than its server rule is set for says so before it starts."""

from __future__ import annotations

import logging

import pytest

from raysim.cli.progress import notes_shown
from raysim.cli.terminal import Terminal
from raysim.prepare.resolve import prepare
from raysim.rules.contract import CLIENT_RULES
from raysim.rules.methods import registry
from raysim.rules.rule import family
from raysim.sweeps.preparation import prepare_sweep


@pytest.fixture
def notes(base, ragged, caplog):
    """notes(**sections): what is logged for 20 equal clients, all or 10 of them in a round."""
    caplog.set_level(logging.INFO, "raysim.notes")

    def logged(cohort=10, share=0.2, **sections):
        caplog.clear()
        config = {
            **base,
            "rounds": 1,
            "partition": ragged([5] * 20),
            "schedule": {"cohort": cohort},
            "model": "logistic",
            "groups": {"bad": {"share": share, "client": "sign_flip"}},
        }
        prepare({**config, "local": {"steps": 1, "batch_size": 4, "lr": 0.1}, **sections})
        return [record.message for record in caplog.records if record.name == "raysim.notes"]

    return logged


@pytest.mark.parametrize(
    ("sections", "fix"),
    [
        ({"algorithm": "krum"}, "about 2 are attackers (groups: bad); set algorithm.attackers=2,"),
        ({"client": "fedavg", "server": "dnc"}, "(groups: bad); set server.attackers=2,"),
        ({"algorithm": "krum", "cohort": 20}, "about 4 are attackers (groups: bad); set algorithm.attackers=4,"),
        ({"algorithm": {"name": "trimmed_mean", "beta": 0.05}, "cohort": 20}, "set algorithm.beta=0.2,"),
        ({"algorithm": "trimmed_mean", "share": 0.6}, "set algorithm.beta=0.6,"),
    ],
)  # fmt: skip
def test_it_names_the_number_and_the_key(sections, fix, notes):
    (message,) = notes(**sections)
    rule = sections.get("algorithm", "dnc")
    name = rule if isinstance(rule, str) else rule["name"]
    assert message.startswith(f"{name} expects ") and fix in message


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"name": "krum", "attackers": 2}},
        {"algorithm": {"name": "trimmed_mean", "beta": 0.2}},
        {"algorithm": "median"},
        {"algorithm": "krum", "groups": {}},
        {"algorithm": "krum", "groups": {"slow": {"share": 0.5, "client": "fedprox"}}},
    ],
)
def test_else_it_is_silent(sections, notes):
    assert not notes(**sections)


def test_an_attack_without_effect_is_named(notes):
    def noted(share=0.2, **values):
        client = {"name": "alie", **values}
        return notes(algorithm="median", groups={"bad": {"share": share, "client": client}})

    (message,) = noted()
    assert message.startswith("groups.bad.client: alie has no effect, as of the 10 clients of a ")
    assert message.endswith("about 2 are attackers: z is 0; set z, or raise the share")
    assert not noted(share=0.3) and not noted(z=0.5)


@pytest.mark.parametrize("buffers", ["averaged", "personal", "frozen"])
def test_attackers_reach_averaged_statistics_whatever_the_server_rule_does(buffers, notes):
    local = {"steps": 1, "batch_size": 4, "lr": 0.1, "buffers": buffers}
    said = notes(algorithm="median", model="tinynn", local=local)
    assert len(said) == (buffers == "averaged")
    assert all("averaged over all clients, whatever median does" in note for note in said)
    chosen = {"name": "krum", "attackers": 2}
    assert not notes(algorithm=chosen, model="tinynn", local=local)


FIRST = """
from dataclasses import dataclass
from raysim import ServerRule


@dataclass(frozen=True)
class First(ServerRule):
    uploads = {"delta": "per_client"}

    def update(self, state, reports):
        return {"x": state["x"] - reports.per_client("delta")[0]}


@dataclass(frozen=True)
class Chosen(First):
    weights_after_training = True
"""


def test_statistics_do_not_follow_a_rule_that_weighs_updates_itself(notes, source):
    path = source("first", FIRST)
    parts = {"groups": {}, "client": "fedavg", "model": "tinynn"}
    (message,) = notes(server=f"{path}:First", **parts)
    assert "whatever first does with the updates; for its own weights set weights_after" in message
    assert not notes(server=f"{path}:Chosen", **parts)
    assert not notes(server=f"{path}:First", **{**parts, "model": "logistic"})
    assert not notes(server="median", **parts)


def test_a_sweep_prints_it_once(base, ragged, capsys):
    config = {key: value for key, value in base.items() if key not in ("run_dir", "tracking")}
    config |= {
        "rounds": 1, "partition": ragged([5] * 20), "schedule": {"cohort": 10}, "model": "logistic",
        "algorithm": "krum", "groups": {"bad": {"share": 0.2, "client": "sign_flip"}},
        "sweep": {"groups.bad.client": ["sign_flip", "label_flip"], "seed": [0, 1]},
    }  # fmt: skip
    with notes_shown(Terminal(width=200)):
        assert len(prepare_sweep(config).trials) == 4
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("note: krum expects algorithm.attackers=1") == 1


def test_all_shipped_attackers_are_declared():
    registry.discover()
    for name, rule in CLIENT_RULES.items():
        assert rule.attacks == (family(rule.__module__) == "attackers"), name
