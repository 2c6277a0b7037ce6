from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgClient, FedAvgServer
from raysim.rules import Algorithm


@dataclass(frozen=True)
class Mine(FedAvgClient):
    strength: float = 0.5
    floor: float | None = 0.25


@dataclass(frozen=True)
class Asking(FedAvgClient):
    needs = ("x", "c")


@dataclass(frozen=True)
class Taking(FedAvgServer):
    beta: float = 0.5

    @property
    def uploads(self):
        return {"delta": "mean", "h": "mean"}


class Other:
    pass


both = Algorithm("both", Mine, FedAvgServer, "nobody 2024", defaults={"local": {"steps": 3}})
