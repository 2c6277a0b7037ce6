from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgClient


@dataclass(frozen=True)
class Failing(FedAvgClient):
    least: int = 0

    def finish(self, shared, state, client_state, data, task):
        report, kept = super().finish(shared, state, client_state, data, task)
        fails = float("nan") if data.n >= self.least else 1.0
        return {**report, "delta": report["delta"] * fails}, kept
