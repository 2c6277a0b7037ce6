import os
import time
from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgClient


@dataclass(frozen=True)
class Slow(FedAvgClient):
    driver: int = 0

    def init(self, shared, client_state, data, task):
        if os.getpid() != self.driver:  # the dry run is the driver's
            time.sleep(20)
        return {}
