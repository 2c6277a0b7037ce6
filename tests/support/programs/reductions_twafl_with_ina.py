from dataclasses import dataclass

from raysim.algorithms.twafl import TWAFLServer
from raysim.numerics import norm


@dataclass(frozen=True)
class WithINA(TWAFLServer):
    rho: float = 0.99

    @property
    def uploads(self):
        return {"delta": "per_client"}

    def update(self, state, reports):
        g, mean = reports.rows["delta"], reports.mean("delta")
        length = sum(norm(v) for v in g) / len(g)
        return {"x": state["x"] - self.lr * self.rho**reports.round * length / norm(mean) * mean}
