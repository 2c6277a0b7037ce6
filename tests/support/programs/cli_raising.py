from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgClient, FedAvgServer


@dataclass(frozen=True)
class Client(FedAvgClient):
    def finish(self, shared, state, client_state, data, task):
        raise ValueError("not today")


@dataclass(frozen=True)
class Server(FedAvgServer):
    def update(self, state, reports):
        raise ValueError("not today")
