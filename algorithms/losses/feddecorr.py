"""FedDecorr (Shi et al., ICLR 2023).

Adds beta / F^2 |K|^2 to the loss, where K is the correlation matrix of the batch's F features and
|K| its Frobenius norm. Features then do not collapse to a few dimensions. This is the paper's
formula. The penalty of the authors' code is about N times as large for batches of N examples (it
squares sums over the batch and divides by N once), so for its beta = 0.1 set beta = 0.1 N.

Run: raysim run quickstart algorithm=feddecorr
"""

from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule, NonNegative, task_loss


@dataclass(frozen=True)
class FedDecorrClient(ClientRule):
    """Local SGD with decorrelated features."""

    needs_features = True
    supports_dp = False  # examples meet in K
    beta: NonNegative = 0.1
    """Weight of the penalty."""

    def loss(self, shared, state, net, batch, task):
        z = net.features - batch.mean(net.features)
        z = z / (batch.mean(z.square()) + 1e-8).sqrt()
        K = z.T @ z / batch.size
        return task_loss(net, batch) + self.beta * K.square().mean()


Algorithm("feddecorr", FedDecorrClient, FedAvgServer, "Shi 2023")
