from dataclasses import dataclass

import torch

from raysim.rules import ClientRule, ServerRule


@dataclass(frozen=True)
class Own(ClientRule):
    def state(self, task):
        return {"v": task.x0}

    def init(self, shared, client_state, data, task):
        return {"v": client_state["v"]}

    def step(self, shared, state, batch, task):
        v = state["v"] - task.lr * task.grad(state["v"], batch, mode="frozen")
        return {**super().step(shared, state, batch, task), "v": v}

    def finish(self, shared, state, client_state, data, task):
        return {"delta": shared["x"] - state["w"]}, {"v": state["v"]}

    def evaluated(self, shared, client_state, data, task):
        return client_state["v"]


@dataclass(frozen=True)
class OnceSeen(Own):
    def evaluated(self, shared, client_state, data, task):
        return torch.where(client_state["seen"], client_state["v"], shared["x"])


@dataclass(frozen=True)
class Stepped(ClientRule):
    def evaluated(self, shared, client_state, data, task):
        return shared["x"] - 0.1 * task.full_grad(shared["x"], data)


@dataclass(frozen=True)
class Begun(ClientRule):
    def begin(self, shared, client_state, data, task):
        return 0.5 * shared["x"], None


@dataclass(frozen=True)
class Named(Own):
    def evaluated(self, shared, client_state, data, task):
        return client_state["v"], task.buffers


@dataclass(frozen=True)
class BegunNamed(ClientRule):
    def begin(self, shared, client_state, data, task):
        return 0.5 * shared["x"], task.buffers


@dataclass(frozen=True)
class Received(ClientRule):
    def evaluated(self, shared, client_state, data, task):
        return shared["x"].clone()


@dataclass(frozen=True)
class Wrong(ClientRule):
    def step(self, shared, state, batch, task):
        task.grad_and_buffers(state["w"], batch, torch.zeros(3))
        return super().step(shared, state, batch, task)


@dataclass(frozen=True)
class Pairs(ServerRule):
    provides = ("x", "models")
    uploads = {"delta": "mean"}

    def init(self, x0, problem):
        return {"x": x0, "models": torch.stack([x0, x0])}

    def sent_to(self, shared, client):
        return {"x": shared["models"][client % 2]}

    def update(self, state, reports):
        return state
