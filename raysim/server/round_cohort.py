"""The clients of a round, as the server knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from raysim.rules.reports import Cohort
from raysim.rules.rule import Problem


@dataclass
class RoundCohort:
    """Clients whose updates arrive in a round. The lists have one entry per client."""

    t: int
    """The round."""

    ids: list[int]
    """Ids of the clients."""

    bases: list[int]
    """Version of the global model from which each client started."""

    weights: list[float]
    """Aggregation weight of each client."""

    samples: list[int]
    """Number of training examples of each client."""

    steps: list[int]
    """Number of local steps of each client."""

    draws: list[int] = field(default_factory=list)
    """How often each client was drawn; empty means once."""

    dropped: set[int] = field(default_factory=set)
    """Ids of the clients whose updates are left out."""

    @property
    def remaining(self) -> list[int]:
        """Positions of the clients that are not dropped."""
        return [i for i, client in enumerate(self.ids) if client not in self.dropped]

    def cohort(self, problem: Problem, stay: list[int] | None = None) -> Cohort:
        """Return the facts about the clients that a rule may use before they train.

        Args:
            problem: the facts about the run.
            stay: positions of the clients to include; None includes all.
        """
        positions = list(range(len(self.ids))) if stay is None else stay
        return Cohort(
            self.t,
            [self.ids[i] for i in positions],
            problem.n_nonempty,
            samples=[self.samples[i] for i in positions],
            steps=[self.steps[i] for i in positions],
            staleness=[self.t - self.bases[i] for i in positions],
            draws=[self.draws[i] for i in positions] if self.draws else [1] * len(positions),
            seed=problem.seed,
        )
