from dataclasses import dataclass

import numpy as np
import torch

from raysim.rules import ClientRule


@dataclass(frozen=True)
class Swaps(ClientRule):
    """The vector of one step goes on under another name, as GradMA's last one."""

    def init(self, shared, client_state, data, task):
        return {"last": shared["x"], "before": torch.zeros_like(shared["x"])}

    def step(self, shared, state, batch, task):
        direction = task.grad(state["w"], batch) + 0.1 * (state["last"] - state["before"])
        w = task.descend(state["w"], direction)
        return {"w": w, "last": state["w"], "before": state["last"]}


@dataclass(frozen=True)
class Views(ClientRule):
    """State that is a part of the parameters, and a sum that it changes in place."""

    def init(self, shared, client_state, data, task):
        return {"head": shared["x"][:5], "sum": torch.zeros(5, dtype=shared["x"].dtype)}

    def step(self, shared, state, batch, task):
        direction = task.grad(state["w"], batch)
        direction[:5] += 0.1 * state["head"]
        w = task.descend(state["w"], direction)
        return {"w": w, "head": w[:5], "sum": state["sum"] + w[5:10]}

    def finish(self, shared, state, client_state, data, task):
        report, kept = super().finish(shared, state, client_state, data, task)
        moved = torch.zeros_like(report["delta"])
        moved[:5] = 0.01 * (state["sum"] + state["head"])
        return {**report, "delta": report["delta"] + moved}, kept


@dataclass(frozen=True)
class TwiceAtTheEnd(ClientRule):
    """Two gradients on one batch after the steps: at the trained parameters, and at those received."""

    def finish(self, shared, state, client_state, data, task):
        report, kept = super().finish(shared, state, client_state, data, task)
        batch = data.examples
        here, there = task.grad(state["w"], batch), task.grad(shared["x"], batch, mode="frozen")
        return {**report, "delta": report["delta"] + 0.1 * (here - there)}, kept


@dataclass(frozen=True)
class Remembers(ClientRule):
    """Copies a table to the device in its first step, and finds it there in later ones."""

    def step(self, shared, state, batch, task):
        tables = self.__dict__.setdefault("tables", {})
        device = state["w"].device
        if device not in tables:
            tables[device] = torch.tensor([0.5]).to(device)
        direction = task.grad(state["w"], batch) * tables[device]
        return {"w": task.descend(state["w"], direction)}


@dataclass(frozen=True)
class Masks(ClientRule):
    """Indexes by a mask, of which a GPU has to find the places first."""

    def step(self, shared, state, batch, task):
        direction = task.grad(state["w"], batch)
        direction[direction < 0] *= 0.5
        return {"w": task.descend(state["w"], direction)}


@dataclass(frozen=True)
class Centres(ClientRule):
    """Subtracts a number in the form of a vector, in place."""

    def direction(self, shared, state, batch, task):
        direction = task.grad(state["w"], batch)
        return direction.sub_(direction.mean().expand_as(direction))


@dataclass(frozen=True)
class Copies(ClientRule):
    """Copies a number to the device in each step, in a way that does not wait."""

    def direction(self, shared, state, batch, task):
        half = torch.from_numpy(np.full(1, 0.5, np.float32)).pin_memory()
        return task.grad(state["w"], batch) * half.to(state["w"].device, non_blocking=True)
