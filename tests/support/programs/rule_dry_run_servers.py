import random
from dataclasses import dataclass

import numpy as np
import torch

from raysim.rules import ServerRule


@dataclass(frozen=True)
class Updates(ServerRule):
    what: str = ""

    def init(self, x0, problem):
        return {"x": x0, "memory": torch.zeros(problem.n_clients, 3)}

    def before_round(self, state, cohort):
        if self.what == "before":
            return {**state, "x": state["x"] + torch.randn(1)}
        if self.what == "few":
            raise ValueError("too few clients")
        if self.what == "before in place":
            state["memory"].numpy()[:] += 1
        return state

    def update(self, state, reports):
        x, step = state["x"], reports.mean("delta")
        match self.what:
            case "shape":
                x = (x - step)[None]
            case "type":
                x = (x - step).half()
            case "memory":
                return {**state, "memory": state["memory"][:1]}
            case "key":
                return {"x": x - step}
            case "nothing":
                return None
            case "in place":
                x -= step
            case "torch":
                x = x - step * torch.rand(1)
            case "NumPy":
                x = x - step * float(np.random.rand())
            case "Python":
                x = x - step * random.random()
            case "upload":
                x = x - reports.mean("deltas")
            case "name":
                x = x - stepp  # noqa: F821  # type: ignore
            case "keyed":
                x = x - step * float(reports.rng("scale").random())
            case "mismatch":
                x = x - step[:5]
            case "raises":
                raise ValueError("too few clients")
            case _:
                x = x - step
        memory = state["memory"]
        memory[reports.ids] += 1  # a large buffer may change in place
        return {"x": x, "memory": memory}
