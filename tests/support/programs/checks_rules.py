from dataclasses import dataclass
from typing import ClassVar

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule


@dataclass(frozen=True)
class Plain(ClientRule):
    factor: float = 1.0

    def direction(self, shared, state, batch, task):
        return self.factor * task.grad(state["w"], batch)


@dataclass(frozen=True)
class Remembers(ClientRule):
    calls: ClassVar[list[int]] = []

    def init(self, shared, client_state, data, task):
        self.calls.clear()  # so that a client gives the same in each round
        return {}

    def direction(self, shared, state, batch, task):
        self.calls.append(1)
        return (1 + len(self.calls) % 3) * task.grad(state["w"], batch)


LAST_UPDATES = {}


@dataclass(frozen=True)
class Late(ClientRule):
    def finish(self, shared, state, client_state, data, task):
        client, delta = int(task.client), shared["x"] - state["w"]
        if int(task.t) >= 2 and client in LAST_UPDATES:
            delta = delta + 0.1 * LAST_UPDATES[client]
        LAST_UPDATES[client] = delta
        return {"delta": delta}, {}


MODELS = {}


@dataclass(frozen=True)
class KeepsModels(ClientRule):
    """Keeps what only the evaluation of clients uses."""

    def finish(self, shared, state, client_state, data, task):
        MODELS[task.client] = state["w"].clone()
        return super().finish(shared, state, client_state, data, task)

    def evaluated(self, shared, client_state, data, task):
        return MODELS.get(task.client, shared["x"])


models = Algorithm("models", KeepsModels, FedAvgServer, "")
plain = Algorithm("plain", Plain, FedAvgServer, "")
remembers = Algorithm("remembers", Remembers, FedAvgServer, "")
late = Algorithm("late", Late, FedAvgServer, "")
