"""Shared by the tests of all rules: nets, ragged sizes and poisoned clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raysim.engine.loop import Engine
from raysim.engine.plan import Plan
from raysim.rules import contract
from raysim.rules.methods import registry
from raysim.schedule import Selection
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


def small(name: str) -> dict[str, Any]:
    """Return the settings of a client rule or an algorithm with little work; FedReg makes its
    images in 10 steps by default."""
    return {"name": name, "ascent": 2} if name.startswith("fedreg") else {"name": name}


def algorithm_of_each_client_rule() -> list[str]:
    """Return algorithms that together use every client rule once; none is private by default."""
    registry.discover()
    found: dict[type, str] = {}
    for name, algorithm in sorted(contract.ALGORITHMS.items()):
        if "privacy" not in algorithm.defaults:
            found.setdefault(algorithm.client, name)
    return sorted(found.values())
