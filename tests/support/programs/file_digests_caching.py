import functools
from dataclasses import dataclass
from typing import ClassVar

import scale  # type: ignore
import torch

from raysim.rules import ClientRule

HALF = torch.tensor(0.5)
same = lambda x: 1.0 * x  # noqa: E731


@functools.lru_cache(maxsize=None)  # noqa: UP033
def factor(n):
    return scale.double(n) / 2


@dataclass(frozen=True)
class Caching(ClientRule):
    seen: ClassVar[dict] = {}

    @classmethod
    @functools.cache
    def once(cls):
        return factor(2)

    def direction(self, shared, state, batch, task):
        import late  # type: ignore

        known = self.seen.setdefault("one", late.ONE)
        return HALF * factor(1) * self.once() * known * same(task.grad(state["w"], batch))
