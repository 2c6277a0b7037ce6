from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgServer


@dataclass(frozen=True)
class Selecting(FedAvgServer):
    def select(self, state, pool, rng):
        return rng.choice(pool.ids, pool.size, replace=False).tolist()
