"""LG-FedAvg (Liang et al., arXiv:2001.01523, 2020).

Each client has a representation of its own, and all share the classifier on top of it: FedAvg
averages the classifier, and everything below it is personal.

Run: raysim run quickstart algorithm=lgfedavg partition.test.fraction=0.2 evaluate.clients.every=20
"""

from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule


@dataclass(frozen=True)
class LGFedAvgClient(ClientRule):
    """Local SGD; all parameters below the classifier are personal."""

    def personal(self, task):
        return ~task.part("classifier")


Algorithm(
    "lgfedavg",
    LGFedAvgClient,
    FedAvgServer,
    "Liang 2020",
    state="server 0, client its body",
    traffic="down the classifier, up the classifier",
)
