"""What a rule's author reads about a mistake: the rule, the method, their own line, and what to
write."""

from __future__ import annotations

import re
from typing import Any

import pytest

from raysim.errors import ClientError, ConfigError, RaysimError
from raysim.prepare.dry_run.client_rule import try_captures
from raysim.prepare.resolve import prepare

CLIENT = """
from dataclasses import dataclass

import torch

from raysim.rules import ClientRule


{decorator}
class MineClient(ClientRule):
    mu: float = 0.1

{body}
"""

SERVER = """
from dataclasses import dataclass

from raysim.rules import ServerRule


@dataclass(frozen=True)
class MineServer(ServerRule):
    def update(self, state, reports):
        return {{"x": state["x"] - self.lr * reports.mean("delta")}}

{body}
"""

BODIES = {
    "state": "    def state(self, task): ...",
    "init": "    def init(self, shared, client_state, data, task): ...",
    "step": "    def step(self, shared, state, batch, task):\n        task.grad(state['w'], batch)",
    "step loses": "    def step(self, shared, state, batch, task):\n"
    "        return {'v': task.grad(state['w'], batch)}",
    "step shrinks": "    def step(self, shared, state, batch, task):\n"
    "        return {'w': task.grad(state['w'], batch)[1:]}",
    "finish": "    def finish(self, shared, state, client_state, data, task):\n"
    "        delta = shared['x'] - state['w']",
    "finish forgets": "    def finish(self, shared, state, client_state, data, task):\n"
    "        return {'delta': shared['x'] - state['w']}",
    "direction": "    def direction(self, shared, state, batch, task):\n        task.grad(state['w'], batch)",
    "norm": "    def direction(self, shared, state, batch, task):\n"
    "        return task.grad(state['w'], batch).norm()",
    "short": "    def direction(self, shared, state, batch, task):\n"
    "        return task.grad(state['w'], batch)[:3]",
    "twice": "    def direction(self, shared, state, batch, task):\n"
    "        return task.grad(state['w'], batch) + task.grad(shared['x'], batch)",
    "never": "    def direction(self, shared, state, batch, task):\n"
    "        return task.grad(state['w'], batch, mode='frozen')",
    "branch": "    def direction(self, shared, state, batch, task):\n"
    "        g = task.grad(state['w'], batch)\n"
    "        return g / 2 if g.norm() > 1 else g",
    "item": "    def direction(self, shared, state, batch, task):\n"
    "        g = task.grad(state['w'], batch)\n"
    "        return g / g.norm().item()",
    "in place": "    def direction(self, shared, state, batch, task):\n"
    "        g = task.grad(state['w'], batch)\n"
    "        torch.zeros(len(g)).add_(g)\n"
    "        return g",
    "raises": "    def direction(self, shared, state, batch, task):\n"
    "        return self.scaled(task.grad(state['w'], batch))\n\n"
    "    def scaled(self, g):\n"
    "        raise ValueError(self.mu)",
}
DEF = 13
"""The line of the rule's file at which a method of `BODIES` begins."""


@pytest.fixture
def given(base, source):
    """given(case, **sections): a configuration whose client rule is `BODIES[case]`."""

    def of(case: str, decorator: str = "@dataclass(frozen=True)", **sections: Any) -> dict:
        path = source("mine", CLIENT.format(decorator=decorator, body=BODIES[case]))
        return {
            **base, "rounds": 1, "model": "logistic", "partition": {"name": "iid", "clients": 4},
            "schedule": {"cohort": 2}, "client": f"{path}:MineClient", "server": "fedavg",
            "local": {"steps": 2, "batch_size": 8, "lr": 0.1}, **sections,
        }  # fmt: skip

    return of


def test_a_forgotten_decorator_is_told_with_its_line(given):
    with pytest.raises(ConfigError) as refused:
        prepare(given("init", decorator=""))
    message = (
        r"client.name: put @dataclass\(frozen=True\) above class MineClient \(.*mine\.py, line 10\)"
    )
    assert re.match(message, str(refused.value))


@pytest.mark.parametrize("mode", ["loop", "lanes"])
@pytest.mark.parametrize(
    ("case", "expected", "line"),
    [
        ("state", "state of client rule 'mine' returns nothing; end it with `return {}`", DEF),
        ("init", "init of client rule 'mine' returns nothing; end it with `return {}`", DEF),
        (
            "step",
            "step of client rule 'mine' returns nothing; end it with `return {**state, \"w\": task.descend(",
            DEF,
        ),
        ("step loses", "step of client rule 'mine' returns another state than it was given", DEF),
        (
            "step shrinks",
            "step of client rule 'mine' returns w as torch.float32 [649]; return torch",
            DEF,
        ),
        (
            "finish",
            "finish of client rule 'mine' returns nothing; return the uploads and the state to keep, for example "
            '`return {"delta": shared["x"] - state["w"]}, {}`',
            DEF,
        ),
        ("finish forgets", "finish of client rule 'mine' returns a dict; return the uploads", DEF),
        (
            "direction",
            "direction of client rule 'mine' returns nothing; end it with `return task.grad(state[\"w\"], batch)`",
            DEF,
        ),
        (
            "norm",
            "direction of client rule 'mine' returns a tensor of shape []; return one of the shape of "
            'state["w"], [650]',
            DEF,
        ),
        (
            "twice",
            "direction of client rule 'mine' makes 2 passes in mode 'train' in a step, in place of one; "
            'compute the other gradients by task.grad(w, batch, mode="frozen")',
            DEF,
        ),
        (
            "never",
            "direction of client rule 'mine' makes 0 passes in mode 'train' in a step, in place of one; "
            "compute one gradient by task.grad(w, batch)",
            DEF,
        ),
        ("short", "direction of client rule 'mine' returns a tensor of shape [3]", DEF),
    ],
)
def test_what_a_method_returns_is_refused_before_the_run(mode, case, expected, line, given):
    with pytest.raises(ConfigError) as refused:
        prepare(given(case, batching={"mode": mode}))
    message = str(refused.value)
    assert message.startswith(f"client.name: {expected}")
    assert re.search(rf"mine\.py, line {line}\)", message)


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("branch", "line 15: `return g / 2 if g.norm() > 1 else g`"),
        ("item", "line 15: `return g / g.norm().item()`"),
    ],
)
def test_what_a_gpu_cannot_capture_is_told_with_its_line_and_trains(case, line, given):
    plan = prepare(given(case, batching={"mode": "lanes", "size": 2}))
    said = try_captures(plan)
    assert said.startswith("steps run one kernel at a time on a GPU: ") and line in said


def test_a_change_in_place_of_a_tensor_of_its_own_is_captured(given):
    plan = prepare(given("in place", batching={"mode": "lanes", "size": 2}))
    assert try_captures(plan).startswith("captured, with the same bits")


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_an_exception_is_told_with_the_users_frames_only(mode, given, engine):
    with pytest.raises(ClientError) as failed:
        engine(
            given(
                "raises", batching={"mode": mode, "size": 2} if mode == "lanes" else {"mode": mode}
            )
        )
    first, *rest = str(failed.value).splitlines()
    assert re.fullmatch(
        r"client \d failed in round 1: ValueError: 0\.1 "
        r"\(direction of client rule 'mine', .*mine\.py, line 17: `raise ValueError\(self\.mu\)`\)",
        first,
    )
    text = "\n".join(rest)
    assert "in direction" in text and "in scaled" in text and "raysim/training" not in text
    assert rest[0].startswith("In the rule") and rest[-2] == "ValueError: 0.1"


@pytest.mark.parametrize("method", ["init", "broadcast", "before_round", "update"])
def test_what_a_server_rule_returns_is_refused(method, given, engine, source):
    arguments = {"init": "x0, problem", "broadcast": "state", "before_round": "state, cohort"}
    body = f"    def {method}(self, {arguments.get(method, 'state, reports')}): ..."
    server = source("server", SERVER.format(body=body)) + ":MineServer"
    with pytest.raises(RaysimError) as refused:
        engine({**given("raises"), "client": "fedavg", "server": server})
    assert re.search(
        rf"{method} of server rule 'mine' returns nothing; end it with `return .*` \(.*server\.py, line 12\)",
        str(refused.value),
    )


def test_what_a_server_rule_raises_is_told_with_its_line(given, engine, source):
    body = "    def weigh(self, cohort):\n        return [1 / 0]"
    server = source("server", SERVER.format(body=body)) + ":MineServer"
    with pytest.raises(RaysimError, match=r"weigh of server rule 'mine' failed: ZeroDivisionError: .*"
                       r"server\.py, line 13: `return \[1 / 0\]`\)"):  # fmt: skip
        engine({**given("raises"), "client": "fedavg", "server": server})


def test_a_hyperparameter_of_a_replaced_half_is_refused():
    message = (
        "algorithm.beta1: unknown key of 'gradma', of which `client` or `server` replaces a rule"
    )
    with pytest.raises(ConfigError, match=message):
        prepare("quickstart", {"server": "fedavg"})
