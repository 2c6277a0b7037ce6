"""ALIE as in Blades' code: the attackers know the benign updates."""

from dataclasses import dataclass
from statistics import NormalDist

from raysim.rules import ClientRule


@dataclass(frozen=True)
class Alie(ClientRule):
    """All attackers send the benign mean minus z benign deviations (divisor n - 1)."""

    attacks = True

    def collude(self, uploads, others, cohort):
        """Return what the attackers send instead of their updates; see `ClientRule.collude`."""
        own, benign = uploads["delta"], others["delta"]
        supporters = (len(own) + len(benign)) // 2 + 1 - len(own)
        z = NormalDist().inv_cdf((len(benign) - supporters) / len(benign))
        return {"delta": (benign.mean(0) - z * benign.std(0)).expand_as(own)}
