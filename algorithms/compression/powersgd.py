"""PowerSGD (Vogels et al., NeurIPS 2019).

Each matrix M [n, m] of an update is sent as P [n, r] and Q [m, r], and decoded as P Qᵀ: P is the
orthogonalised M Q of a random Q, then Q = Mᵀ P. What is lost is added to the client's next update
(`error_feedback`). Vectors, and matrices that would not become smaller, are sent as they are. A
client compresses its own update: the server does not send the mean of P back, and Q is drawn anew.

Run: raysim run quickstart algorithm=fedavg 'local.upload=[{name: powersgd, rank: 2, error_feedback:
true}]'
"""

from dataclasses import dataclass, replace
from math import prod

import torch

from raysim.rules import PositiveInt, UploadStage


@dataclass(frozen=True)
class PowerSGD(UploadStage):
    """Low-rank matrices in place of those of an update."""

    rank: PositiveInt = 2
    """r, the rank."""
    iterations: PositiveInt = 1
    """Power iterations."""

    def saved(self, shape):
        return prod(shape) - self.rank * (shape[0] + prod(shape[1:]))

    def encode(self, update, rng):
        parts = list(update.split([prod(shape) for shape in self.shapes]))
        for k, shape in enumerate(self.shapes):
            if self.saved(shape) > 0:
                M = parts[k].reshape(shape[0], -1)
                Q = torch.from_numpy(rng.standard_normal((M.shape[1], self.rank))).to(M)
                P = M
                for _ in range(self.iterations):
                    P = torch.linalg.qr(M @ Q).Q
                    Q = M.T @ P
                parts[k] = (P @ Q.T).reshape(-1)
        return torch.cat(parts)

    def wire_format(self, before, encoded):
        saved = sum(max(self.saved(shape), 0) for shape in self.shapes)
        return replace(before, values=before.values - saved)
