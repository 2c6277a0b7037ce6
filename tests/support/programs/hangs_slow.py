import os
import time
from dataclasses import dataclass

from algorithms.fedavg import FedAvgClient


@dataclass(frozen=True)
class Slow(FedAvgClient):
    seconds: float = 0.0
    driver: int = 0

    def init(self, shared, client_state, data, task):
        if os.getpid() != self.driver:  # the dry run is the driver's
            time.sleep(self.seconds)
        return {}
