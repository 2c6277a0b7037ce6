"""IPM, inner product manipulation (Xie et al., UAI 2020).

All attackers send -epsilon times the mean of the honest updates. They see those of the others.

Run: raysim run quickstart algorithm=median 'groups.attackers={share: 0.2, client: {name: ipm,
epsilon: 2.0}}'
"""

from dataclasses import dataclass

from raysim.rules import ClientRule, NonNegative


@dataclass(frozen=True)
class IpmClient(ClientRule):
    """All attackers send -epsilon times the mean of the others' updates."""

    attacks = True
    epsilon: NonNegative = 0.5
    """Length of the reversed mean."""

    def collude(self, uploads, others, cohort):
        if not len(others["delta"]):
            return uploads
        return {"delta": -self.epsilon * others["delta"].mean(0).expand_as(uploads["delta"])}
