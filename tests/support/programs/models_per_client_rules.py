from dataclasses import dataclass

import torch

from raysim.rules import ClientRule, ServerRule


@dataclass(frozen=True)
class TwoModels(ServerRule):
    """Clients with even and odd numbers have models of their own."""

    provides = ("x", "models")
    uploads = {"delta": "per_client"}

    def init(self, x0, problem):
        return {"x": x0, "models": torch.stack([x0, 0.5 * x0])}

    def sent_to(self, shared, client):
        return {"x": shared["models"][client % 2]}

    def update(self, state, reports):
        models = state["models"].clone()
        for k in (0, 1):
            of_model = [d for i, d in zip(reports.ids, reports.per_client("delta")) if i % 2 == k]
            if of_model:
                models[k] -= torch.stack(of_model).mean(0)
        return {"x": models.mean(0), "models": models}


@dataclass(frozen=True)
class Based(TwoModels):
    """Compares each upload with where its client says that it started."""

    needs_base_params = True
    uploads = {"delta": "per_client", "start": "per_client"}

    def update(self, state, reports):
        bases = torch.stack(list(reports.bases))
        reports.log(far=(bases - reports.per_client("start")).abs().max())
        return super().update(state, reports)


@dataclass(frozen=True)
class Starts(ClientRule):
    sends = ("delta", "start")

    def finish(self, shared, state, client_state, data, task):
        return {"delta": shared["x"] - state["w"], "start": shared["x"]}, {}


@dataclass(frozen=True)
class NoX(TwoModels):
    def sent_to(self, shared, client):
        return {"model": shared["models"][0]}


@dataclass(frozen=True)
class All(TwoModels):
    def sent_to(self, shared, client):
        return {"x": shared["models"]}


@dataclass(frozen=True)
class Scaled(ClientRule):
    """Starts at a keyed multiple of the global model, which step and finish know."""

    def begin(self, shared, client_state, data, task):
        factor = shared["x"].new_tensor(task.rng("factor").uniform(0.5, 1.0))
        return factor * shared["x"], None, {"factor": factor}

    def direction(self, shared, state, batch, task):
        return state["factor"] * task.grad(state["w"], batch)

    def finish(self, shared, state, client_state, data, task):
        start = state["factor"] * shared["x"]
        return {"delta": start - state["w"], "metric/factor": state["factor"]}, {}


@dataclass(frozen=True)
class BadThird(ClientRule):
    third = ["factor"]

    def begin(self, shared, client_state, data, task):
        return shared["x"], None, self.third


@dataclass(frozen=True)
class CarriesW(BadThird):
    def begin(self, shared, client_state, data, task):
        return shared["x"], None, {"w": shared["x"]}
