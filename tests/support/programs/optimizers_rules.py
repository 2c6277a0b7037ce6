from dataclasses import dataclass

from raysim.rules import ClientRule


@dataclass(frozen=True)
class Bypass(ClientRule):
    def step(self, shared, state, batch, task):
        return {**state, "w": state["w"] - task.lr * task.grad(state["w"], batch)}


@dataclass(frozen=True)
class Twice(ClientRule):
    def step(self, shared, state, batch, task):
        w = task.descend(state["w"], task.grad(state["w"], batch))
        return {**state, "w": task.descend(w, w - shared["x"])}


@dataclass(frozen=True)
class Plain(ClientRule):
    @property
    def needs_plain_sgd(self):
        return "its paper says so"


@dataclass(frozen=True)
class ByStepSize(ClientRule):
    def step(self, shared, state, batch, task):
        return {**state, "w": state["w"] - task.lr * task.grad(state["w"], batch)}

    def finish(self, shared, state, client_state, data, task):
        delta = shared["x"] - state["w"]
        return {"delta": delta, "metric/lr": delta.new_tensor(task.lr)}, {}
