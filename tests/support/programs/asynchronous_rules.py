from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import ServerRule


@dataclass(frozen=True)
class Youngest(FedAvgServer):
    """Only the least stale count."""

    def weigh(self, cohort):
        least = min(cohort.staleness)
        young = [float(s == least) for s in cohort.staleness]
        return [w / sum(young) for w in young]


@dataclass(frozen=True)
class Bad(FedAvgServer):
    how: str = "short"

    def weigh(self, cohort):
        K = len(cohort.ids)
        wrong = {
            "short": [1.0] * (K - 1),
            "negative": [-1.0] * K,
            "nan": [float("nan")] * K,
            "zero": [0.0] * K,
        }
        return wrong[self.how]


@dataclass(frozen=True)
class Last(ServerRule):
    """Jumps to the model of whom arrived last."""

    needs_base_params = True
    weights_after_training = True

    @property
    def uploads(self):
        return {"delta": "per_client"}

    def update(self, state, reports):
        K = len(reports.ids)
        reports.set_weights([0.0] * (K - 1) + [1.0])
        return {"x": reports.bases[-1] - reports.rows["delta"][-1]}


@dataclass(frozen=True)
class Early(Last):
    weights_after_training = False


@dataclass(frozen=True)
class Heavy(Last):
    first: float = 1.0

    def update(self, state, reports):
        reports.set_weights([self.first] + [1.0] * (len(reports.ids) - 1))
        return {"x": state["x"]}


@dataclass(frozen=True)
class Short(Last):
    def update(self, state, reports):
        reports.set_weights([1.0])
        return {"x": state["x"]}
