"""Gaussian attackers (Blanchard et al., NeurIPS 2017).

An attacker sends noise in place of its update: delta = mean + sigma z, where z is standard normal.
The paper has mean 0; Blades has 0.1.

Run: raysim run methods/gaussian_noise groups.attackers.share=0.3
"""

from dataclasses import dataclass

from raysim.rules import ClientRule, NonNegative


@dataclass(frozen=True)
class GaussianNoiseClient(ClientRule):
    """Trains, and sends noise."""

    name = "gaussian_noise"
    attacks = True
    sigma: NonNegative = 0.1
    """Standard deviation of each coordinate. The paper has 200."""
    mean: float = 0.0
    """Mean of each coordinate."""

    def finish(self, shared, state, client_state, data, task):
        z = task.rng("attack").standard_normal(len(state["w"]))
        return {"delta": self.mean + self.sigma * state["w"].new_tensor(z)}, {}
