"""Sign flip (Li et al., AAAI 2019).

An attacker trains honestly, and sends -factor times its update.

Run: raysim run quickstart algorithm=median 'groups.attackers={share: 0.2, client: sign_flip}'
"""

from dataclasses import dataclass

from raysim.rules import ClientRule, NonNegative


@dataclass(frozen=True)
class SignFlipClient(ClientRule):
    """Trains honestly, and sends -factor times its update."""

    name = "sign_flip"
    attacks = True
    factor: NonNegative = 1.0
    """Factor of the flipped update."""

    def finish(self, shared, state, client_state, data, task):
        report, kept = super().finish(shared, state, client_state, data, task)
        return {"delta": -self.factor * report["delta"]}, kept
