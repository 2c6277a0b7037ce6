"""Shared by the tests of all rules: nets, ragged sizes and poisoned clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raysim.engine.loop import Engine
from raysim.engine.plan import Plan
from raysim.rules import contract
from raysim.rules.methods import registry
from raysim.rules.rule import family
from raysim.schedule import Selection
from raysim.training.trainers.lane_trainer import LaneTrainer
from support.programs import program

SIZES = [20, 1, 9, 0, 14, 2, 7, 17]
"""Beside batches of 6: partial batches, a last one of a single sample, one sample, two, none."""


BAD = 4
"""The client that is made to fail; the only one of its size."""


NETS = program("batteries_nets")


def poisoned(plan: Plan) -> Plan:
    """Return the plan with images of client `BAD` whose first pixel is 255 / 16; digits end at 1."""
    x = plan.dataset.x.copy()
    assert not x[:, 0, 0, 0].any()
    x[plan.clients.client(BAD), 0, 0, 0] = 255
    return replace(plan, dataset=replace(plan.dataset, x=x))


def without(engine: Engine) -> None:
    """Leave client `BAD` out of every cohort."""
    select = engine.schedule.select

    def select_without(t: int) -> Selection:
        selection = select(t)
        return replace(selection, clients=[i for i in selection.clients if i != BAD])

    engine.schedule.select = select_without


def captured_trainer(run: Engine) -> LaneTrainer:
    """Return the trainer on lanes of a run without groups, which has captured all that it could."""
    (trainer,) = run.executor.trainer.trainers
    assert isinstance(trainer, LaneTrainer) and trainer.has_captured and not trainer.refusals
    return trainer


FEW: dict[str, dict[str, Any]] = {
    "bulyan": {"attackers": 0},  # five clients in a round
    "krum": {"attackers": 0},
    "fedmgda": {"lr": 0.05},  # its updates have length 1
    "fedlc": {"tau": 0.05},  # else clients of one class have no gradient
    "fedreg": {"ascent": 2},  # 10 steps for its images by default
    "fedreg_mg": {"ascent": 2},
    "fedrep": {"head_share": 0.3},  # one of three local steps
}
"""Settings of rules for short runs of few clients."""

FEW_OF_SERVERS = {"fedgen": {"generator_steps": 5, "hidden": 16}}
"""Further settings of server rules whose name is a client rule's too."""


def small(name: str) -> dict[str, Any]:
    """Return the settings of a rule or an algorithm for short runs of few clients."""
    return {"name": name, **FEW.get(name, {})}


def small_server(name: str) -> dict[str, Any]:
    """Return the settings of a server rule for short runs of few clients."""
    return small(name) | FEW_OF_SERVERS.get(name, {})


def is_plain(algorithm: contract.Algorithm) -> bool:
    """Return whether a method trains an MLP on digits: without BatchNorm, without public data."""
    needs = algorithm.client.needs_public_data or algorithm.server.needs_public_data
    return not needs and algorithm.defaults.get("local", {}).get("buffers") != "personal"


WITHOUT_A_GLOBAL_MODEL = (
    "apple", "cfl", "fedamp", "feddistill", "fedfomo", "fedmd", "fedproto", "ifca", "local_only",
    "pfedhn",
)  # fmt: skip
"""Methods whose "x" stays as it is; tests/gallery has theirs."""


def is_usual(rule: contract.ClientRule | contract.ServerRule) -> bool:
    """Return whether a rule trains one global model of any kind, on clients that it does not choose.

    Sub-models are for nets without BatchNorm.
    """
    selects = isinstance(rule, contract.ServerRule) and contract.overridden(
        rule, ["select", "candidates"]
    )
    special = selects or rule.needs_public_data or family(type(rule).__module__) == "submodels"
    return not special and rule.name not in WITHOUT_A_GLOBAL_MODEL


def algorithm_of_each_client_rule() -> list[str]:
    """Return algorithms that together use every client rule once; none is private by default.

    Left out are those that need public data, and sub-models, which are for nets without BatchNorm.
    """
    registry.discover()
    found: dict[type, str] = {}
    for name, algorithm in sorted(contract.ALGORITHMS.items()):
        special = not is_plain(algorithm) or family(algorithm.module) == "submodels"
        if "privacy" not in algorithm.defaults and not special:
            found.setdefault(algorithm.client, name)
    return sorted(found.values())
