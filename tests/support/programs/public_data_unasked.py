from dataclasses import dataclass

from raysim.rules import ClientRule, ServerRule


@dataclass(frozen=True)
class ClientUnasked(ClientRule):
    def init(self, shared, client_state, data, task):
        return {"n": shared["x"][0] * len(task.public)}


@dataclass(frozen=True)
class Unasked(ServerRule):
    def update(self, state, reports):
        return {"x": state["x"] - len(reports.public) * reports.mean("delta")}


@dataclass(frozen=True)
class Typo(Unasked):
    needs_public_data = True  # type: ignore
