from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import ClientRule, normalised


@dataclass(frozen=True)
class Same(ClientRule):
    hyper: float = 1.0


@dataclass(frozen=True)
class Direction(ClientRule):
    def direction(self, shared, state, batch, task):
        return 2 * task.grad(state["w"], batch)


@dataclass(frozen=True)
class Inherited(Direction):
    pass


@dataclass(frozen=True)
class Step(ClientRule):
    def step(self, shared, state, batch, task):
        return {**state, "w": task.descend(state["w"], 2 * task.grad(state["w"], batch))}


@dataclass(frozen=True)
class Finish(ClientRule):
    def finish(self, shared, state, client_state, data, task):
        return {"delta": 2 * (shared["x"] - state["w"])}, {}


@dataclass(frozen=True)
class Init(ClientRule):
    def init(self, shared, client_state, data, task):
        return {"anchor": 2 * shared["x"]}


@dataclass(frozen=True)
class Kept(ClientRule):
    def state(self, task):
        return {"kept": task.zeros()}

    def finish(self, shared, state, client_state, data, task):
        return {"delta": shared["x"] - state["w"]}, {"kept": client_state["kept"]}


@dataclass(frozen=True)
class DropoutMasks(ClientRule):
    @property
    def dropout_masks(self):
        return 2


@dataclass(frozen=True)
class Prepare(ClientRule):
    def prepare(self, shared, batch, task):
        return (batch,)


@dataclass(frozen=True)
class NothingServer(FedAvgServer):
    def weigh(self, cohort):  # client 4 weighs nothing
        return normalised(float(i != 4) for i in cohort.ids)


@dataclass(frozen=True)
class EachServer(FedAvgServer):
    @property
    def uploads(self):
        return {"delta": "per_client"}


@dataclass(frozen=True)
class TwoServer(FedAvgServer):
    @property
    def uploads(self):
        return {"delta": ("mean", "sum")}
