from dataclasses import dataclass

import torch

from raysim.rules import ClientRule


@dataclass(frozen=True)
class Short(ClientRule):
    def personal(self, task):
        return torch.ones(3, dtype=torch.bool)


@dataclass(frozen=True)
class Floats(ClientRule):
    def personal(self, task):
        return task.part("classifier").float()


@dataclass(frozen=True)
class NoPart(ClientRule):
    def personal(self, task):
        return task.part("head")


@dataclass(frozen=True)
class Alone(ClientRule):
    def begin(self, shared, client_state, data, task):
        return shared["x"]


@dataclass(frozen=True)
class ShortStart(ClientRule):
    def begin(self, shared, client_state, data, task):
        return shared["x"][:-1], None
