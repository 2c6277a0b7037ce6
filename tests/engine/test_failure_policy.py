"""The failure policy: the table of failures, and how often the same work is attempted."""

from __future__ import annotations

import pytest

from raysim.engine.failure_policy import ActorDied, Decision, FailurePolicy, Work
from raysim.errors import ConfigError, RaysimError, ServerStateLost

DIED, LOST = ActorDied("the actor died"), ServerStateLost("a vector is lost")


@pytest.mark.parametrize(
    ("error", "work", "attempts", "decision"),
    [
        (DIED, Work.BLOCK, 0, Decision.RETRY),
        (DIED, Work.BLOCK, 2, Decision.RETRY),
        (DIED, Work.BLOCK, 3, Decision.RAISE),
        (LOST, Work.BLOCK, 1, Decision.RAISE),
        (DIED, Work.NODE_SUM, 100, Decision.RETRY),
        (LOST, Work.NODE_SUM, 1, Decision.RETRY),
        (DIED, Work.EVALUATION, 2, Decision.RETRY),
        (DIED, Work.EVALUATION, 3, Decision.RAISE),
        (DIED, Work.SERVER_START, 9, Decision.RETRY),
        (DIED, Work.SERVER_START, 10, Decision.RAISE),
        (DIED, Work.ROUNDS, 3, Decision.RECOVER),
        (LOST, Work.ROUNDS, 3, Decision.RECOVER),
        (LOST, Work.ROUNDS, 4, Decision.RAISE),
    ],
)
def test_the_policy_decides_by_the_error_and_the_attempts(error, work, attempts, decision):
    assert FailurePolicy("stop").decide(error, work, attempts) is decision


def test_clients_whose_actors_die_are_dropped_on_request():
    policy = FailurePolicy("drop")
    assert policy.decide(DIED, Work.BLOCK, 2) is Decision.RETRY
    assert policy.decide(DIED, Work.BLOCK, 3) is Decision.DROP
    assert policy.decide(DIED, Work.EVALUATION, 3) is Decision.RAISE


@pytest.mark.parametrize("work", Work)
@pytest.mark.parametrize("error", [RaysimError("a rule failed"), ConfigError("a wrong key")])
def test_an_error_that_would_come_again_is_raised(work, error):
    assert FailurePolicy("drop").decide(error, work) is Decision.RAISE
