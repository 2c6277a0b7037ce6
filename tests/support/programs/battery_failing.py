from dataclasses import dataclass

import torch

from raysim.algorithms.fedavg import FedAvgClient


@dataclass(frozen=True)
class Failing(FedAvgClient):
    size: int = 0
    since: int = 0

    def init(self, shared, client_state, data, task):
        return {"fails": torch.tensor(data.n == self.size and task.t >= self.since)}

    def step(self, shared, state, batch, task):
        if state["fails"]:
            raise ValueError("the dog ate my gradient")
        return super().step(shared, state, batch, task)
