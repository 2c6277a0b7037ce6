from dataclasses import dataclass

from raysim.rules import ClientRule


@dataclass(frozen=True)
class Client(ClientRule):
    free: float = 0.5

    def init(self, shared, row, data, task):
        return {"scale": shared["x"].new_tensor(self.free)}

    def direction(self, broadcast, local, minibatch, problem):
        return local["scale"] * problem.grad(local["w"], minibatch)

    def finish(self, shared, state, row, data, task):
        return super().finish(shared, state, row, data, task)
