"""FedBN (Li et al., ICLR 2021).

Normalisation layers are personal, with their statistics: FedAvg with `local.personal: norm`.

Run: raysim run quickstart algorithm=fedbn model=tinynn partition.test.fraction=0.2
evaluate.clients.every=20
"""

from raysim.algorithms.fedavg import FedAvgClient, FedAvgServer
from raysim.rules import Algorithm

Algorithm(
    "fedbn",
    FedAvgClient,
    FedAvgServer,
    "Li X. 2021",
    state="server 0, client its norm layers",
    traffic="down the rest, up the rest",
    defaults={"local": {"personal": ["norm"], "buffers": "personal"}},
)
