"""ALIE, "a little is enough" (Baruch et al., NeurIPS 2019).

All attackers send the mean of their honest updates, minus z standard deviations, so that the
attack stays within the spread of the updates. The paper's z follows from the numbers of clients and
attackers: with them, a majority is further from the mean than the attack.

Run: raysim run quickstart algorithm=median 'groups.attackers={share: 0.4, client: alie}'
"""

from dataclasses import dataclass
from statistics import NormalDist

from raysim.rules import ClientRule, NonNegative


@dataclass(frozen=True)
class AlieClient(ClientRule):
    """All attackers send the mean of their honest updates, minus z standard deviations."""

    attacks = True
    z: NonNegative | None = None
    """None: that of the paper, from the numbers of clients and attackers; at least 0."""

    def deviations(self, attackers, others):
        """Return z for these numbers of clients in a round."""
        honest = max(others, 1)
        supporters = (attackers + honest) // 2 + 1 - attackers
        share = min(max((honest - supporters) / honest, 0.5), 0.999)
        return NormalDist().inv_cdf(share) if self.z is None else self.z

    def no_effect(self, attackers, others):
        return "" if self.deviations(attackers, others) else "z is 0; set z, or raise the share"

    def collude(self, uploads, others, cohort):
        own = uploads["delta"]
        z = self.deviations(len(own), len(others["delta"]))
        return {"delta": (own.mean(0) - z * own.std(0, correction=0)).expand_as(own)}
