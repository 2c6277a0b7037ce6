from dataclasses import dataclass

from raysim.rules import ServerRule


@dataclass(frozen=True)
class Middle(ServerRule):
    uploads = {"delta": "per_client"}

    def update(self, state, reports):
        return {"x": state["x"] - reports.per_client("delta").median(0).values}
