from dataclasses import dataclass

import numpy as np

from raysim.rules import ClientSampling


@dataclass(frozen=True)
class Newest(ClientSampling):
    skip: int = 0

    def sample(self, pool, size, t, rng):
        return pool.ids[::-1][self.skip : self.skip + size]


@dataclass(frozen=True)
class Stranger(ClientSampling):
    def sample(self, pool, size, t, rng):
        return [99]


@dataclass(frozen=True)
class Crowd(ClientSampling):
    def sample(self, pool, size, t, rng):
        return pool.ids


@dataclass(frozen=True)
class Unkeyed(ClientSampling):
    def sample(self, pool, size, t, rng):
        return np.random.choice(pool.ids, size, replace=False)


class NoRule:
    pass
