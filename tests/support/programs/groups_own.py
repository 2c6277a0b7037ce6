from dataclasses import dataclass

from raysim.rules import ClientRule


@dataclass(frozen=True)
class Counting(ClientRule):
    sends = ("delta", "delta_c")

    def state(self, task):
        return {"rounds": task.zeros()[:1]}

    def direction(self, shared, state, batch, task):
        factor = 1.0 if task.group == "half" else float("nan")
        return factor * task.grad(state["w"], batch)

    def finish(self, shared, state, client_state, data, task):
        report = {"delta": shared["x"] - state["w"], "delta_c": task.zeros()}
        return report, {"rounds": client_state["rounds"] + (task.group == "half")}


@dataclass(frozen=True)
class Wrong(ClientRule):
    def finish(self, shared, state, client_state, data, task):
        return {"update": shared["x"]}, {}


@dataclass(frozen=True)
class Silent(ClientRule):
    sends = ("nothing",)


@dataclass(frozen=True)
class OtherShape(ClientRule):
    def state(self, task):
        return {"rounds": task.zeros()}


@dataclass(frozen=True)
class Owner(ClientRule):
    def personal(self, task):
        return task.part("classifier")
