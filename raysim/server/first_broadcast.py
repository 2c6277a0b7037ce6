"""The broadcast of round 0, with which the plan and the dry run begin."""

from __future__ import annotations

from torch import Tensor

from raysim.rules.contract import ServerRule
from raysim.rules.rule import Problem
from raysim.server.central_server import Server
from raysim.server.round_cohort import RoundCohort
from raysim.training.messages import Broadcast


def shapes_of_first_broadcast(
    rule: ServerRule, x0: Tensor, buffers: Tensor, problem: Problem
) -> Broadcast:
    """Return the broadcast of round 0 as tensors of the right shapes and types, without memory.

    A server rule may keep a state of many times P numbers, so the rule runs on tensors of device
    "meta" first. It runs on real tensors if it fails there, for example because it reads a value.

    Args:
        rule: the server rule.
        x0: [P], the initial parameters.
        buffers: [Q], the BatchNorm statistics.
        problem: the facts about data, clients and net.

    Raises:
        RaysimError: the rule fails, or breaks its contract.
    """
    try:
        return first_broadcast(rule, x0.to("meta"), buffers.to("meta"), problem)
    except Exception:
        # The rule may be users' code. If it has an error, the call with real tensors shows it.
        return first_broadcast(rule, x0, buffers, problem)


def first_broadcast(rule: ServerRule, x0: Tensor, buffers: Tensor, problem: Problem) -> Broadcast:
    """Return the broadcast of round 0, before `before_round` has run.

    Args:
        rule: the server rule.
        x0: [P], the initial parameters.
        buffers: [Q], the BatchNorm statistics.
        problem: the facts about data, clients and net.

    Raises:
        RaysimError: the rule fails, or breaks its contract.
    """
    return Server(rule, x0, buffers, problem).broadcast(RoundCohort(0, [], [], [], [], []))
