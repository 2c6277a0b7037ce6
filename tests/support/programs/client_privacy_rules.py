from dataclasses import dataclass

import torch

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import ClientRule


@dataclass(frozen=True)
class Waves(ClientRule):
    """Sends 0.1 n sin((t + 1) k), k = 1 .. P: known without any training."""

    def finish(self, shared, state, client_state, data, task):
        k = torch.arange(1, len(state["w"]) + 1, dtype=torch.float64)
        return {"delta": 0.1 * data.n * torch.sin((task.t + 1) * k)}, {}


@dataclass(frozen=True)
class Tiny(ClientRule):
    def finish(self, shared, state, client_state, data, task):
        return {"delta": torch.ones(3)}, {}


@dataclass(frozen=True)
class Watches(FedAvgServer):
    def before_round(self, state, cohort):
        return state


@dataclass(frozen=True)
class Asks(FedAvgServer):
    of: str = "ids"

    def update(self, state, reports):
        len(getattr(reports, self.of))
        return super().update(state, reports)


@dataclass(frozen=True)
class Weighs(FedAvgServer):
    def weigh(self, cohort):
        return [1.0] * len(cohort.ids)
