"""Failure policy of a run: it decides on retry, recovery, drop or error.

What was lost is computed again, with the same result:

    a ClientActor      other workers train its blocks again; a new ClientActor replaces it
    a NodeAggregator   workers train its blocks again and upload them without aggregation
    the EvalActor      a new EvalActor repeats the evaluation
    the ServerActor    `ServerStateLost`: the engine resumes from a checkpoint, with a new server
    a stored vector    `ServerStateLost`, likewise; for a node's sum, its blocks are trained again

Only blocks that kill several workers in turn end the run, or their clients are dropped.
"""

from __future__ import annotations

from enum import Enum, auto

from raysim.errors import RaysimError, ServerStateLost


class ActorDied(ServerStateLost):
    """Error of a call or a wait whose actor has died."""


class Work(Enum):
    """Work that a failure interrupts, and that can be done again."""

    ROUNDS = auto()
    """The rounds since the last one that was completed."""
    BLOCK = auto()
    """The training of a block on a ClientActor."""
    NODE_SUM = auto()
    """The sum of a node's uploads, with the training of its blocks."""
    EVALUATION = auto()
    """An evaluation on the EvalActor."""
    SERVER_START = auto()
    """The start of a new server after one has failed."""


class Decision(Enum):
    """Decision of the policy on a failure."""

    RETRY = auto()
    """Another actor does the work again."""
    RECOVER = auto()
    """A new server starts, and the run resumes from its last checkpoint."""
    DROP = auto()
    """The round continues without the clients of the block."""
    RAISE = auto()
    """The error is raised. In a run, a `ServerStateLost` then interrupts the rounds."""


MAX_ATTEMPTS = {Work.ROUNDS: 4, Work.BLOCK: 3, Work.EVALUATION: 3, Work.SERVER_START: 10}
"""How often the same work is attempted. For a `NODE_SUM` there is no limit: its node does not
aggregate any more in the round."""


class FailurePolicy:
    """Decides how a run continues after a failure.

    Args:
        on_client_error: `faults.on_client_error`, "stop" or "drop": what follows if actors die
            again and again during the same block.
    """

    def __init__(self, on_client_error: str):
        self._drops_clients = on_client_error == "drop"

    def decide(self, error: RaysimError, work: Work, attempts: int = 1) -> Decision:
        """Return how the run continues after a failure.

        Args:
            error: the failure. Only `ServerStateLost` and `ActorDied` come from the machines; other
                errors would come again.
            work: the work that it interrupted.
            attempts: how often this work was attempted in turn.
        """
        if not isinstance(error, ServerStateLost):
            return Decision.RAISE
        if work is Work.NODE_SUM:
            return Decision.RETRY
        if work is Work.ROUNDS:
            return Decision.RECOVER if attempts < MAX_ATTEMPTS[work] else Decision.RAISE
        # If the actor lives, what it needs is lost: another one could not do the work either.
        if not isinstance(error, ActorDied):
            return Decision.RAISE
        if attempts < MAX_ATTEMPTS[work]:
            return Decision.RETRY
        if work is Work.BLOCK and self._drops_clients:
            return Decision.DROP
        return Decision.RAISE
