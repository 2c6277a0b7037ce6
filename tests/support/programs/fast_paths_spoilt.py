from dataclasses import dataclass

import torch

from raysim.rules import ClientRule, ServerRule


@dataclass(frozen=True)
class SpoiltClient(ClientRule):
    sizes: tuple[int, ...] = ()
    where: str = "delta"
    value: str = "nan"
    entries: int = 1

    sends = ("delta", "extra")

    def state(self, task):
        return {"kept": task.zeros()}

    def finish(self, shared, state, client_state, data, task):
        found = {
            "delta": shared["x"] - state["w"],
            "extra": torch.cos(state["w"]),
            "kept": client_state["kept"] + 1,
        }
        if data.n in self.sizes:
            sign = (-1) ** self.sizes.index(data.n)
            spoilt = found[self.where].clone()
            spoilt[-self.entries :] = sign * float(self.value)
            found[self.where] = spoilt
        return {"delta": found["delta"], "extra": found["extra"]}, {"kept": found["kept"]}


@dataclass(frozen=True)
class TakingServer(ServerRule):
    takes: str = "mean"

    @property
    def uploads(self):
        return {"delta": "mean", "extra": self.takes}

    def update(self, state, reports):
        extra = (
            reports.per_client("extra").sum(0)
            if self.takes == "per_client"
            else getattr(reports, self.takes)("extra")
        )
        return {
            **state,
            "x": state["x"] - reports.mean("delta") - 1e-3 * extra.to(state["x"].dtype),
        }
