from dataclasses import dataclass

import torch

from raysim.algorithms.fedavg import FedAvgServer


@dataclass(frozen=True)
class Clip(FedAvgServer):
    provides = ("x", "clip")

    def broadcast(self, state):
        return {"x": state["x"], "clip": torch.tensor(0.5)}


@dataclass(frozen=True)
class Gossip(FedAvgServer):
    provides = ("x", "models")

    def init(self, x0, problem):
        return {"x": x0, "models": x0.double().repeat(problem.n_clients, 1)}

    def broadcast(self, state):
        return {"x": state["x"], "models": state["models"]}

    def update(self, state, reports):
        return {**super().update(state, reports), "models": state["models"]}


@dataclass(frozen=True)
class Growing(FedAvgServer):
    def init(self, x0, problem):  # one more number is broadcast in every round
        return {"x": x0, "round": torch.tensor(0)}

    def broadcast(self, state):
        return {"x": state["x"], "more": torch.zeros(int(state["round"]), dtype=torch.float16)}

    def update(self, state, reports):
        return {**super().update({"x": state["x"]}, reports), "round": state["round"] + 1}
