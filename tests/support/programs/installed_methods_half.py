from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule


@dataclass(frozen=True)
class HalfClient(ClientRule):
    share: float = 0.5

    def direction(self, shared, state, batch, task):
        return self.share * task.grad(state["w"], batch)


HALF = Algorithm("half", HalfClient, FedAvgServer, "nobody 2024", settings={"share": 0.25})
