"""Who trains when. Synchronous rounds draw their cohort from keyed randomness."""

from __future__ import annotations

import numpy as np

from raysim.config import Config
from raysim.randomness import generator


class Synchronous:
    """`cohort` clients a round, uniformly without replacement, in sampling order; every algorithm of a seed sees the
    same cohorts. Sampled clients without data are left out, so a round may have fewer, or none."""

    def __init__(self, config: Config, sizes: np.ndarray):
        self.seed, self.size, self.sizes = config.seed, config.schedule.cohort, sizes

    def cohort(self, t: int) -> list[int]:
        """Client ids of round `t`."""
        drawn = generator(self.seed, "cohort", t).choice(len(self.sizes), self.size, replace=False)
        return [int(client) for client in drawn if self.sizes[client] > 0]
