from dataclasses import dataclass

import torch

from raysim.rules import ClientRule, ServerRule


@dataclass(frozen=True)
class Noisy(ClientRule):
    sends = ("delta", "drawn")

    def noise(self, task):
        return {"z": (task.x0.shape, "normal"), "u": (("B",), "uniform"), "one": ((), "normal")}

    def init(self, shared, client_state, data, task):
        start = task.rng("start").standard_normal(len(task.x0))
        zeros = torch.zeros_like(task.x0)
        return {
            "start": torch.from_numpy(start).to(task.x0),
            "z": zeros,
            "u": zeros[0],
            "who": zeros[0],
        }

    def step(self, shared, state, batch, task):
        noise = batch.noise
        g = task.grad(state["w"], batch, lambda net, batch: loss(net, batch) * (1 + noise["u"]))
        g = g + 0.1 * noise["z"] + 0.1 * state["start"] + 0.01 * task.client * noise["one"]
        return {
            **state,
            "w": task.descend(state["w"], g),
            "z": state["z"] + noise["z"],
            "u": state["u"] + noise["u"].sum(),
            "who": state["who"] + task.client,
        }

    def finish(self, shared, state, client_state, data, task):
        drawn = torch.stack(
            [
                state["z"].sum(),
                state["u"],
                state["who"],
                torch.tensor(task.rng("end").random()).to(task.x0),
                torch.tensor(float(task.client)).to(task.x0),
            ]
        )
        return {"delta": shared["x"] - state["w"], "drawn": drawn}, {}


def loss(net, batch):
    return torch.nn.functional.cross_entropy(net.logits, batch.y, reduction="none")


@dataclass(frozen=True)
class Shaken(ServerRule):
    @property
    def uploads(self):
        return {"delta": "mean", "drawn": "per_client"}

    def init(self, x0, problem):
        return {"x": x0, "drawn": torch.zeros(problem.n_clients, 5, dtype=x0.dtype)}

    def before_round(self, state, cohort):
        return {**state, "x": state["x"] + 0.01 * cohort.rng("before").random()}

    def update(self, state, reports):
        shake = torch.from_numpy(reports.rng("shake").standard_normal(len(state["x"])))
        drawn = torch.zeros_like(state["drawn"])
        drawn[reports.ids] = reports.per_client("drawn")
        return {
            "x": state["x"] - reports.mean("delta") + 0.01 * shake.to(state["x"]),
            "drawn": drawn,
        }


@dataclass(frozen=True)
class InStep(ClientRule):
    def direction(self, shared, state, batch, task):
        return task.grad(state["w"], batch) * task.rng("late").random()


@dataclass(frozen=True)
class NoShape(ClientRule):
    def noise(self, task):
        return {"z": (task.x0, "normal")}


@dataclass(frozen=True)
class NoLaw(ClientRule):
    def noise(self, task):
        return {"z": (3, "cauchy")}
