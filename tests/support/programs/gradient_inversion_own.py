from dataclasses import dataclass

import torch

from raysim.rules import ClientRule


@dataclass(frozen=True)
class Rounded(ClientRule):
    def direction(self, shared, state, batch, task):
        return torch.round(task.grad(state["w"], batch).detach(), decimals=6)


@dataclass(frozen=True)
class Whole(ClientRule):
    def finish(self, shared, state, client_state, data, task):
        return {"delta": self.share * task.full_grad(shared["x"], data)}, {}

    share: float = 0.1

    def direction(self, shared, state, batch, task):
        return task.grad(state["w"], batch)
