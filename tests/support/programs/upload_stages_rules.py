import math
import random
from dataclasses import dataclass, replace

import numpy as np
import torch

from raysim.rules import ClientRule, UploadStage


@dataclass(frozen=True)
class Waves(ClientRule):
    """Sends sin((t + 1) n k), k = 1 .. P: known without any training. Fails in one round if it has 9 examples."""

    fails: int = -1

    def finish(self, shared, state, client_state, data, task):
        k = torch.arange(1, len(state["w"]) + 1, dtype=torch.float64)
        wave = torch.sin((task.t + 1) * data.n * k)
        return {"delta": wave * (float("nan") if task.t == self.fails and data.n == 9 else 1.0)}, {}


@dataclass(frozen=True)
class Short(ClientRule):
    def finish(self, shared, state, client_state, data, task):
        return {"delta": torch.ones(3)}, {}


@dataclass(frozen=True)
class Half(UploadStage):
    returns: str = "half"

    def encode(self, update, rng):
        return {
            "half": update / 2,
            "short": update[:3],
            "double": update.double(),
            "number": 3,
            "whole": update,
        }[self.returns]


@dataclass(frozen=True)
class Shapes(UploadStage):
    def encode(self, update, rng):
        parts = update.split([math.prod(shape) for shape in self.shapes])
        return torch.cat(parts)


@dataclass(frozen=True)
class Fails(UploadStage):
    def encode(self, update, rng):
        raise ValueError("the dog ate my update")


@dataclass(frozen=True)
class Draws(UploadStage):
    draws: str = ""

    def encode(self, update, rng):
        draw = {
            "numpy": np.random.rand,
            "torch": lambda: torch.rand(()).item(),
            "random": random.random,
        }
        return update * draw[self.draws]()


@dataclass(frozen=True)
class Sizes(UploadStage):
    size: str = ""

    def encode(self, update, rng):
        return update

    def wire_format(self, before, encoded):
        return 17 if self.size == "17" else replace(before, values=-5)


@dataclass(frozen=True)
class Spoils(UploadStage):
    """Makes updates of a smaller norm NaN."""

    below: float = 0.0

    def encode(self, update, rng):
        return update * float("nan") if update.norm() < self.below else update
