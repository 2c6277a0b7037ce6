from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import ServerRule


@dataclass(frozen=True)
class Boom(FedAvgServer):
    def weigh(self, cohort):
        return [1 / s for s in cohort.staleness]


@dataclass(frozen=True)
class Bang(FedAvgServer):
    def update(self, state, reports):
        raise ValueError("bang")


@dataclass(frozen=True)
class Unasked(ServerRule):
    def update(self, state, reports):
        return {"x": reports.bases[0]}
