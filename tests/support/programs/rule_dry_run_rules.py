import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional as F

from raysim.rules import ClientRule, ServerRule


def cross_entropy(net, batch):
    return F.cross_entropy(net.logits, batch.y, reduction="none")


class Plain(ClientRule):
    loss = staticmethod(cross_entropy)  # type: ignore

    def direction(self, shared, state, batch, task):
        return task.grad(state["w"], batch, self.loss)  # type: ignore


@dataclass(frozen=True)
class StartsElsewhere(ClientRule):
    def init(self, shared, client_state, data, task):
        return {"w": 0.5 * shared["x"]}


@dataclass(frozen=True)
class Slow(Plain):
    def init(self, shared, client_state, data, task):
        time.sleep(3)
        return {}


@dataclass(frozen=True)
class Remembers(ClientRule):
    calls: ClassVar[list[int]] = []

    def init(self, shared, client_state, data, task):
        self.calls.clear()  # so that a client gives the same in each round
        return {}

    def direction(self, shared, state, batch, task):
        self.calls.append(1)
        return task.grad(state["w"], batch) * (1 + len(self.calls) % 3)


@dataclass(frozen=True)
class TakesANumber(ClientRule):
    def state(self, task):
        return {"count": torch.zeros(())}

    def init(self, shared, client_state, data, task):
        self.counts[0] = 0.0  # so that a client gives the same in each round
        return {"count": client_state["count"]}

    counts: ClassVar[list[float]] = [0.0]

    def step(self, shared, state, batch, task):
        after = super().step(shared, state, batch, task)
        self.counts[0] = self.counts[0] + 1
        return {**after, "count": state["count"] + self.counts[0]}

    def finish(self, shared, state, client_state, data, task):
        return super().finish(shared, state, client_state, data, task)[0], {"count": state["count"]}


@dataclass(frozen=True)
class Branches(ClientRule):
    def direction(self, shared, state, batch, task):
        g = task.grad(state["w"], batch)
        return g / 2 if g.norm() > 1 else g


@dataclass(frozen=True)
class Right(Plain):
    @staticmethod
    def loss(net, batch):
        spread = (batch.mean(net.logits) ** 2).sum()
        return (
            cross_entropy(net, batch) + 0.1 * spread + 0.01 * batch.size * (net.logits**2).sum(-1)
        )


@dataclass(frozen=True)
class Signs(ClientRule):
    def direction(self, shared, state, batch, task):
        return torch.sign(task.grad(state["w"], batch))


@dataclass(frozen=True)
class Single(ClientRule):
    def state(self, task):
        return {"v": torch.zeros(task.x0.numel())}

    def init(self, shared, client_state, data, task):
        return {"v": client_state["v"]}

    def step(self, shared, state, batch, task):
        v = (0.5 * state["v"] + task.grad(state["w"], batch)).float()
        return {**state, "v": v, "w": task.descend(state["w"], v)}

    def finish(self, shared, state, client_state, data, task):
        return super().finish(shared, state, client_state, data, task)[0], {"v": state["v"]}


@dataclass(frozen=True)
class Picky(ClientRule):
    def step(self, shared, state, batch, task):
        raise ValueError("not today")


@dataclass(frozen=True)
class Sends(ClientRule):
    what: str = "int"
    sends = ("delta", "more")

    def finish(self, shared, state, client_state, data, task):
        report, client_state = super().finish(shared, state, client_state, data, task)
        more = {
            "int": torch.arange(3),
            "matrix": torch.zeros(2, 5),
            "scalar": torch.tensor(1.0),
            "ragged": torch.zeros(data.n),
            "vector": torch.zeros(5),
            "bool": torch.zeros(5, dtype=torch.bool),
            "half": torch.zeros(5).half(),
            "sparse": torch.zeros(5).to_sparse(),
        }
        return {**report, "more": more[self.what]}, client_state


@dataclass(frozen=True)
class Returns(ClientRule):
    method: str = ""
    what: str = "none"

    def returned(self, method, right):
        wrong = {"none": None, "list": [torch.zeros(3)]}
        return right if self.method != method else wrong[self.what]

    def state(self, task):
        return self.returned("state", {})

    def init(self, shared, client_state, data, task):
        return self.returned("init", {})

    def finish(self, shared, state, client_state, data, task):
        report, kept = super().finish(shared, state, client_state, data, task)
        if self.method == "report":
            return self.returned("report", report), kept
        return self.returned("finish", (report, kept))


@dataclass(frozen=True)
class Measures(ClientRule):
    what: str = "vector"

    def finish(self, shared, state, client_state, data, task):
        report, kept = super().finish(shared, state, client_state, data, task)
        metrics = {
            "vector": torch.zeros(3),
            "word": "high",
            "number": 1,
            "complex": torch.tensor(1j),
            "scalar": torch.tensor(1.0),
            "one": torch.ones(1),
        }
        return {**report, "metric/m": metrics[self.what]}, kept


@dataclass(frozen=True)
class Broadcasts(ServerRule):
    method: str = "broadcast"
    provides = ("x", "eta")

    def init(self, x0, problem):
        return {"x": x0, "eta": 0.5 if self.method == "init" else x0.new_tensor(0.5)}

    def before_round(self, state, cohort):
        return [*state] if self.method == "before_round" else state

    def broadcast(self, state):
        return {"x": state["x"], "eta": 0.5} if self.method == "broadcast" else state

    def update(self, state, reports):
        return {**state, "eta": 0.5} if self.method == "update" else state


@dataclass(frozen=True)
class Takes(ServerRule):
    mode: str = "mean"

    @property
    def uploads(self):
        return {"delta": "mean", "more": self.mode}

    def update(self, state, reports):
        reports.mean("more")
        return {"x": state["x"] - reports.mean("delta")}


@dataclass(frozen=True)
class NoNumber(ClientRule):
    where: str = "step"

    def direction(self, shared, state, batch, task):
        gradient = task.grad(state["w"], batch)
        moved = state["w"] - shared["x"]
        if self.where == "step":
            return gradient + moved / moved.norm()
        if self.where == "few examples" and len(batch.y) <= 5:
            return gradient / torch.zeros_like(gradient)
        return gradient

    def finish(self, shared, state, client_state, data, task):
        delta = shared["x"] - state["w"]
        return {"delta": torch.log(-delta.norm()) * delta if self.where == "end" else delta}, {}


@dataclass(frozen=True)
class NoNumberOfTwo(NoNumber):
    sends: ClassVar[tuple[str, ...]] = ("delta", "more")

    def finish(self, shared, state, client_state, data, task):
        report, kept = super().finish(shared, state, client_state, data, task)
        return {**report, "more": report["delta"]}, kept
