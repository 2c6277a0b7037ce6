import time
from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgClient


@dataclass(frozen=True)
class Slow(FedAvgClient):
    def init(self, shared, client_state, data, task):
        time.sleep(0.005)
        return {}
