from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgClient
from raysim.rules import ClientRule, ServerRule


@dataclass(frozen=True)
class Keeper(FedAvgClient):
    kept: int = 1

    def state(self, task):
        return {"v": task.zeros()}

    def finish(self, shared, state, client_state, data, task):
        kept = {
            0: {},
            1: {"v": state["w"]},
            2: {"v": state["w"][:3]},
            3: {"v": state["w"], "u": state["w"]},
        }
        return {"delta": shared["x"] - state["w"]}, kept[self.kept]


@dataclass(frozen=True)
class Silent(FedAvgClient):
    sends = ("delta", "extra")


@dataclass(frozen=True)
class Server(ServerRule):
    mode: str = "mean"
    asks: str = "mean"
    drops: bool = False

    @property
    def uploads(self):
        return {"delta": self.mode}

    def init(self, x0, problem):
        return {"x": x0, "m": x0}

    def update(self, state, reports):
        new = {"x": state["x"] - getattr(reports, self.asks)("delta").to(state["x"].dtype)}
        return new if self.drops else {**state, **new}


@dataclass(frozen=True)
class Extra(ServerRule):
    @property
    def uploads(self):
        return {"delta": "mean", "extra": "mean"}

    def update(self, state, reports):
        return {"x": state["x"] - reports.mean("delta")}


class Bare(ClientRule):
    rho: float = 0.5
