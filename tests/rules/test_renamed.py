"""A rule that was written for the contract's former names is refused, and is told the present ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raysim.config.renamed import CONTRACT, UPLOAD_MODES
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare
from raysim.rules import Batch, ClientRule, Reports, ServerRule
from raysim.rules.reports import Cohort
from raysim.training.tasks.task import ModelTask

FILE = """
from dataclasses import dataclass

from raysim.rules import ClientRule, ServerRule


@dataclass(frozen=True)
class Mine({family}):
    {former} = {value}
"""

OWN_NAMES = """
from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import ClientRule


@dataclass(frozen=True)
class Client(ClientRule):
    free: float = 0.5

    def init(self, shared, row, data, task):
        return {"scale": shared["x"].new_tensor(self.free)}

    def direction(self, broadcast, local, minibatch, problem):
        return local["scale"] * problem.grad(local["w"], minibatch)

    def finish(self, shared, state, row, data, task):
        return super().finish(shared, state, row, data, task)


@dataclass(frozen=True)
class Server(FedAvgServer):
    mode: str = "mean"

    @property
    def uploads(self):
        return {"delta": self.mode}

    def update(self, state, reports):
        reports.weigh([1.0])
        return super().update(state, reports)
"""


@pytest.fixture
def given(base) -> dict[str, Any]:
    return {
        **base,
        "rounds": 1,
        "model": "logistic",
        "partition": {"name": "iid", "clients": 4},
        "schedule": {"cohort": 2},
        "client": "fedavg",
        "server": "fedavg",
        "local": {"steps": 1, "batch_size": 8, "lr": 0.1},
    }


@pytest.mark.parametrize(
    ("family", "former", "present"),
    [
        (family, *names)
        for family in ("ClientRule", "ServerRule")
        for names in CONTRACT[family].items()
    ],
)
def test_a_rule_with_a_former_name_is_refused(family, former, present, given, source):
    half = family.removesuffix("Rule").lower()
    for value, kind in (("lambda *given: ()", "method"), ("('x',)", "attribute")):
        text = FILE.format(family=family, former=former, value=value)
        name = source(f"{kind}_{former}", text) + ":Mine"
        with pytest.raises(ConfigError) as refused:
            prepare(given | {half: name})
        assert str(refused.value) == (
            f"{half}.name: Mine: {family} {kind} `{former}` is now called `{present}`"
        )


@pytest.mark.parametrize(("former", "present"), UPLOAD_MODES.items())
def test_a_former_mode_is_refused(former, present, given, source):
    server = {"name": source("own", OWN_NAMES) + ":Server", "mode": former}
    said = f"server rule 'server': uploads 'delta' in an unknown mode '{former}', which is now called '{present}'"
    with pytest.raises(ConfigError, match=said):
        prepare(given | {"server": server})


def test_a_former_name_that_update_reads_is_told(given, source, engine):
    server = source("own", OWN_NAMES) + ":Server"
    said = r"^server\.name: .*`weigh` is now called `set_weights`"
    with pytest.raises(ConfigError, match=said):
        engine(given | {"server": server})


A_TASK = ModelTask.__new__(
    type("ATask", (ModelTask,), {name: None for name in ModelTask.__abstractmethods__})
)


@pytest.mark.parametrize(
    ("given_to_rule", "family"),
    [
        (Cohort(0, [], 1), "Cohort"),
        (Reports(0, [], 1), "Cohort"),
        (Reports(0, [], 1), "Reports"),
        (Batch(torch.zeros(1), torch.zeros(1)), "Batch"),
        (A_TASK, "Task"),
    ],
)  # fmt: skip
def test_what_a_rule_is_given_tells_the_present_names(given_to_rule, family):
    for former, present in CONTRACT[family].items():
        with pytest.raises(AttributeError, match=f"`{former}` is now called `{present}`"):
            getattr(given_to_rule, former)
    with pytest.raises(AttributeError, match="object has no attribute 'nothing'"):
        given_to_rule.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("given_to_rule", "misspelled", "meant"),
    [
        (A_TASK, "gradd", "grad"),
        (Reports(0, [], 1), "weight", "weights"),
        (Reports(0, [], 1), "stalenes", "staleness"),
        (Batch(torch.zeros(1), torch.zeros(1)), "noises", "noise"),
    ],
)  # fmt: skip
def test_a_misspelled_attribute_is_told_the_nearest_one(given_to_rule, misspelled, meant):
    with pytest.raises(AttributeError, match=f"'{misspelled}'; did you mean '{meant}'"):
        getattr(given_to_rule, misspelled)


def test_present_names_exist():
    given = (*Reports.__mro__, *ModelTask.__mro__, Batch, ClientRule, ServerRule)
    classes = {cls.__name__: cls for cls in given}
    for family, names in CONTRACT.items():
        known = {*dir(classes[family]), *getattr(classes[family], "__annotations__", {})}
        assert set(names.values()) <= known and not set(names) & known


def test_parameters_and_hyperparameters_may_have_any_names(given, source, engine):
    """A rule's methods are called with positions, so `row` for `client_state` still works."""
    client = {"name": source("own", OWN_NAMES) + ":Client", "free": 0.0}
    for mode in ("loop", "vmap"):
        run, _ = engine(given | {"client": client, "batching": {"mode": mode}})
        assert torch.equal(run.final["state/x"], run.plan.model().initial()[0])
