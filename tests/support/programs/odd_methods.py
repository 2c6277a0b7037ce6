"""Methods as researchers write them: some are right, the others are refused."""

import random
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from raysim import Probe
from raysim.algorithms.fedprox import FedProxClient
from raysim.rules import (
    Algorithm,
    ClientRule,
    ClientSampling,
    PositiveScheduled,
    ServerRule,
    Upload,
    UploadStage,
)

MEANS: dict[Any, Tensor] = {}
SEEN: list[Any] = []
NUMBERS = np.random.default_rng(0)


def halfway(key: Any, value: Tensor) -> Tensor:
    """A mean of all values so far, which is the value itself if it is given twice."""
    MEANS[key] = 0.5 * MEANS.get(key, value) + 0.5 * value
    return MEANS[key]


# -- right: what a plain loop gives


@dataclass(frozen=True)
class Views(ClientRule):
    """Sends and keeps views of w, which the next client overwrites."""

    sends = {"delta": Upload("P"), "last": Upload(2)}

    def state(self, task):
        return {"kept": task.x0[-2:]}

    def init(self, shared, client_state, data, task):
        return {"kept": client_state["kept"]}

    def direction(self, shared, state, batch, task):
        g = task.grad(state["w"], batch)
        g[-2:] += 0.5 * (state["w"][-2:] - state["kept"])
        return g

    def finish(self, shared, state, client_state, data, task):
        w = state["w"]
        task.log(first=w[0])
        return {"delta": shared["x"] - w, "last": w[-2:], "metric/second": w[1]}, {"kept": w[-2:]}


@dataclass(frozen=True)
class TakesLast(ServerRule):
    uploads = {"delta": "mean", "last": "mean"}
    eta: PositiveScheduled = field(default_factory=lambda: [[0, 1.0], [2, 0.5]])  # type: ignore
    pairs: list[tuple[int, float]] = field(default_factory=lambda: [(0, 0.0), (9, 0.25)])

    def update(self, state, reports):
        half = reports.mean("delta")
        half *= 0.5  # the mean that is read next is not this tensor
        x = state["x"] - self.eta * (half + 0.5 * reports.mean("delta"))
        x[-2:] = self.pairs[1][1] * x[-2:] + 0.75 * reports.mean("last")
        return {"x": x}


@dataclass(frozen=True, slots=True)
class KeepsInPlace(ClientRule):
    """Changes its own state in place, which begins as the initial parameters."""

    mu: float = 0.5

    def state(self, task):
        return {"w": task.x0}

    def begin(self, shared, client_state, data, task):
        return client_state["w"], None

    def direction(self, shared, state, batch, task):
        return task.grad(state["w"], batch) + self.mu * (state["w"] - shared["x"])

    def finish(self, shared, state, client_state, data, task):
        client_state["w"].copy_(state["w"])
        return {"delta": shared["x"] - state["w"]}, client_state


@dataclass(frozen=True)
class Backwards(ClientSampling):
    """Changes the arrays of the pool in place."""

    def sample(self, pool, size, t, rng):
        pool.ids[:] = pool.ids[::-1].copy()
        pool.samples[:] = 0
        return pool.ids[:size]


@dataclass
class Replaces(Probe):
    def request(self, round):
        return dict.fromkeys(round.ids, True)

    def measure(self, trainer, client, update, request):
        update.report["delta"] = 0 * update.report["delta"]
        return {}


# -- client rules that are refused


@dataclass(frozen=True)
class AddsToState(ClientRule):
    def finish(self, shared, state, client_state, data, task):
        client_state["last"] = state["w"].clone()
        return {"delta": shared["x"] - state["w"]}, client_state


@dataclass(frozen=True)
class AddsInStep(ClientRule):
    def step(self, shared, state, batch, task):
        g = task.grad(state["w"], batch)
        state["last"] = 0.5 * state.get("last", g) + 0.5 * g
        state["w"] = task.descend(state["w"], state["last"])
        return state


@dataclass(frozen=True)
class Counts(ClientRule):
    start: str = "int64"

    def state(self, task):
        return {"n": torch.zeros((), dtype=getattr(torch, self.start))}

    def finish(self, shared, state, client_state, data, task):
        return {"delta": shared["x"] - state["w"]}, {"n": client_state["n"] + 0.5}


@dataclass(frozen=True)
class HasGraph(ClientRule):
    def direction(self, shared, state, batch, task):
        return task.grad(state["w"], batch) + 0.1 * state["w"].clone().requires_grad_()


@dataclass(frozen=True)
class Single(ClientRule):
    def step(self, shared, state, batch, task):
        return {**state, "w": task.descend(state["w"], task.grad(state["w"], batch)).half()}


@dataclass(frozen=True)
class Untyped(FedProxClient):
    mu = 0.5  # type: ignore


@dataclass(frozen=True)
class NamesMethod(ClientRule):
    noise: float = 0.1  # type: ignore


@dataclass(frozen=True)
class Misspelt(ClientRule):
    send = ("delta", "c")


@dataclass(frozen=True)
class SmoothProx(FedProxClient):
    def loss(self, shared, state, net, batch, task):
        return F.cross_entropy(net.logits, batch.y, label_smoothing=0.1, reduction="none")


@dataclass(frozen=True)
class TwoSteps(ClientRule):
    def direction(self, shared, state, batch, task):
        return 2 * task.grad(state["w"], batch)

    def step(self, shared, state, batch, task):
        return {**state, "w": task.descend(state["w"], task.grad(state["w"], batch))}


@dataclass(frozen=True)
class MeanOfGradients(ClientRule):
    def direction(self, shared, state, batch, task):
        return halfway(int(task.client), task.grad(state["w"], batch))


@dataclass(frozen=True)
class Later(ClientRule):
    """Does something wrong after the first round."""

    what: str = ""
    after: int = 1

    def direction(self, shared, state, batch, task):
        g = task.grad(state["w"], batch)
        if task.t < self.after:
            return g
        match self.what:
            case "draws":
                return g * random.random()
            case "own generator":
                return g * float(NUMBERS.random())
            case "in place":
                shared["x"].mul_(0.5)
        return g


@dataclass(frozen=True)
class ScaledByNumber(ClientRule):
    scales: ClassVar[dict[int, float]] = {0: 2.0, 1: 3.0}

    def direction(self, shared, state, batch, task):
        return self.scales.get(task.client, 1.0) * task.grad(state["w"], batch)  # type: ignore


@dataclass(frozen=True)
class FloatLoss(ClientRule):
    what: str = "float"

    def loss(self, shared, state, net, batch, task):
        values = F.cross_entropy(net.logits, batch.y, reduction="none")
        if self.what == "classes":
            return values[:, None] * net.logits
        if self.what == "mean":
            return values.mean()
        return values.detach() if self.what == "detached" else float(values.mean())


@dataclass(frozen=True)
class DrawsInStep(ClientRule):
    def direction(self, shared, state, batch, task):
        return task.grad(state["w"], batch) * float(task.rng("scale").random())


@dataclass(frozen=True)
class SendsData(ClientRule):
    def finish(self, shared, state, client_state, data, task):
        return {"delta": shared["x"] - state["w"] + data.examples.x.mean()}, {}


@dataclass(frozen=True)
class MetricNamedWrongly(ClientRule):
    def finish(self, shared, state, client_state, data, task):
        return {"delta": shared["x"] - state["w"], "metrics/a": state["w"][0]}, {}


@dataclass(frozen=True)
class HoldsTensor(ClientRule):
    v: Any = field(default_factory=lambda: torch.ones(3))


@dataclass(frozen=True)
class NoInit(ClientRule):
    k: float = field(init=False, default=2.0)


@dataclass(frozen=True)
class OwnLr(ClientRule):
    lr: float = 0.5


@dataclass(frozen=True)
class OneText(ClientRule):
    sends = "delta"  # type: ignore


@dataclass(frozen=True)
class Colludes(ClientRule):
    what: str = "draws"

    def collude(self, uploads, others, cohort):
        delta = uploads["delta"]
        match self.what:
            case "draws":
                delta = delta + torch.randn_like(delta)
            case "remembers":
                delta = -halfway("collude", delta.mean(0)).expand_as(delta)
            case "mean":
                delta = delta.mean(0)
            case "graph":
                delta = -delta.clone().requires_grad_()
        return {"delta": delta}


# -- server rules that are refused


class Base(ServerRule):
    def update(self, state, reports):
        return {**state, "x": state["x"] - self.lr * reports.mean("delta")}


@dataclass(frozen=True)
class ServerDoes(Base):
    what: str = ""

    def init(self, x0, problem):
        if self.what == "no x":
            return {"models": torch.stack([x0, x0])}
        return {"x": x0.half() if self.what == "half" else x0}

    def broadcast(self, state):
        return {"x": state["models"][0]} if self.what == "no x" else super().broadcast(state)

    def weigh(self, cohort):
        weights = np.ones(len(cohort.ids)) / len(cohort.ids)
        match self.what:
            case "weigh draws":
                weights = weights * random.random()
            case "weigh remembers":
                SEEN.extend(cohort.ids)
                return weights / len(set(SEEN))
            case "weigh nothing":
                return None
            case "weigh too much":
                return 2 * weights
        return weights

    def before_round(self, state, cohort):
        if self.what == "before_round adds":
            state["ids"] = torch.tensor(cohort.ids)
        if self.what == "before_round in place" and cohort.round == 3:
            state["x"].mul_(0.5)
        return state

    def update(self, state, reports):
        match self.what:
            case "adds":
                state["m"] = reports.mean("delta")
            case "casts":
                state["x"] = (state["x"] - reports.mean("delta")).half()
                return state
            case "graph":
                return {"x": torch.nn.Parameter(state["x"])}
            case "remembers":
                return {"x": state["x"] - halfway("update", reports.mean("delta"))}
            case "in place late":
                if reports.round == 2:
                    state["x"].mul_(0.5)
        state["x"] = state["x"] - self.lr * reports.mean("delta")
        return state


@dataclass(frozen=True)
class SendsItsMomentum(Base):
    """Broadcasts it under another key than that of its state."""

    method: str = "update"
    provides = ("x", "m")

    def init(self, x0, problem):
        return {"x": x0, "momentum": torch.ones_like(x0)}

    def before_round(self, state, cohort):
        if cohort.round == 3 and self.method == "before_round":
            state["momentum"].mul_(0.5)
        return state

    def broadcast(self, state):
        return {"x": state["x"].clone(), "m": state["momentum"]}

    def update(self, state, reports):
        if reports.round == 2 and self.method == "update":
            state["momentum"].mul_(0.5)
        if reports.round == 2 and self.method == "update of x":
            state["x"].mul_(0.5)
        return {**state, "x": state["x"] - reports.mean("delta")}


@dataclass(frozen=True)
class NamesAMetricOfTheEngine(Base):
    def update(self, state, reports):
        reports.log(uploads=-1)
        return {"x": state["x"] - reports.mean("delta")}


@dataclass(frozen=True)
class Spans(Base):
    """Has hyper-parameters that look like schedules."""

    spans: int | list[list[int]] = 1
    scales: float | list[float] = 1.0

    def update(self, state, reports):
        assert self.spans == [[0, 64], [64, 128]] and self.scales == [0.1, 0.2]
        return {"x": state["x"] - reports.mean("delta")}


@dataclass(frozen=True)
class NumberInState(ClientRule):
    def init(self, shared, client_state, data, task):
        return {"k": 0}


@dataclass(frozen=True)
class NoisyShape(ClientRule):
    shape: str = "none"

    def noise(self, task):
        shape = {"none": None, "word": "P", "numpy": np.int64(3)}[self.shape]
        return {"z": (shape, "normal")}  # type: ignore


misspelt_setting = Algorithm("mine", AddsInStep, Spans, settings={"spanns": 2})
misspelt_preset = Algorithm("mine", AddsInStep, Spans, presets={"paper": {"scale": 0.5}})


@dataclass(frozen=True)
class SelectsBySeen(Base):
    def select(self, state, pool, rng):
        losses = torch.from_numpy(np.nan_to_num(pool.loss, nan=9.0))
        best = np.argsort(-halfway("select", losses).numpy(), kind="stable")
        return pool.ids[best[: pool.size]]


@dataclass(frozen=True)
class UntypedServer(Base):
    weights = "samples"


@dataclass(frozen=True)
class SetOfUploads(Base):
    uploads = {"delta"}


@dataclass(frozen=True)
class NotFinite(ServerRule):
    uploads = {"delta": "per_client"}
    weights_after_training = True

    def update(self, state, reports):
        reports.set_weights([float("nan")] * len(reports.ids))
        return {"x": state["x"] - reports.per_client("delta").mean(0)}


# -- sampling and stages that are refused


@dataclass(frozen=True)
class Samples(ClientSampling):
    what: str = "mask"

    def sample(self, pool, size, t, rng):
        match self.what:
            case "mask":
                return pool.ids < 3
            case "floats":
                return [0.9, 1.9]
            case "texts":
                return ["0", "1"]
            case "later" if t == 1:
                SEEN.append(t)
                return [len(SEEN) % 4]
        return [0, 1]


@dataclass(frozen=True)
class MeanOfUpdates(UploadStage):
    def encode(self, update, rng):
        return halfway("stage", update).clone()


@dataclass(frozen=True)
class UntypedStage(UploadStage):
    error_feedback = True

    def encode(self, update, rng):
        return update.round()


views = Algorithm("views", Views, TakesLast)
"""Views of w reach a server rule that changes means in place."""
