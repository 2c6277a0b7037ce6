from dataclasses import dataclass

import torch

from raysim.rules import ClientRule, ServerRule, Upload


@dataclass(frozen=True)
class Tells(ClientRule):
    sends = {
        "delta": Upload("P"),
        "table": Upload(("C", 3), mode="sum"),
        "sizes": Upload(2, torch.int32, "per_client"),
        "number": Upload(()),
    }
    wrong: str = ""

    def finish(self, shared, state, client_state, data, task):
        n = data.n
        report = {
            "delta": shared["x"] - state["w"],
            "table": torch.arange(30.0).reshape(10, 3) * n,
            "sizes": torch.tensor([n, 2**30 + n], dtype=torch.int32),
            "number": torch.tensor(float(n)),
        }
        wrong = {
            "shape": {"table": report["table"].T},
            "type": {"sizes": report["sizes"].long()},
            "vector": {"delta": report["delta"][1:]},
        }
        return {**report, **wrong.get(self.wrong, {})}, {}


@dataclass(frozen=True)
class Hears(ServerRule):
    sizes: str = "per_client"

    @property
    def uploads(self):
        return {"delta": "mean", "table": "sum", "sizes": self.sizes, "number": "mean"}

    def init(self, x0, problem):
        sizes = torch.zeros(problem.cohort, 2, dtype=torch.int32)
        return {"x": x0, "table": x0.new_zeros(10, 3), "sizes": sizes, "number": x0.new_zeros(())}

    def update(self, state, reports):
        return {
            "x": state["x"] - reports.mean("delta"),
            "table": reports.sum("table"),
            "sizes": reports.per_client("sizes"),
            "number": reports.mean("number"),
        }


@dataclass(frozen=True)
class Declares(ClientRule):
    sends = {"delta": Upload()}


@dataclass(frozen=True)
class Names(ClientRule):
    pass
