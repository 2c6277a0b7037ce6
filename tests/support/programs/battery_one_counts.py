from dataclasses import dataclass

from raysim.rules import ServerRule, normalised


@dataclass(frozen=True)
class One(ServerRule):
    size: int = 0

    def weigh(self, cohort):
        return normalised(float(n == self.size) for n in cohort.samples)

    def update(self, state, reports):
        return {"x": state["x"] - reports.mean("delta")}
