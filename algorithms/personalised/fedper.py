"""FedPer (Arivazhagan et al., arXiv:1912.00818, 2019).

The body of the net is shared, the classifier is personal: FedAvg with `local.personal: classifier`.

Run: raysim run quickstart algorithm=fedper partition.test.fraction=0.2 evaluate.clients.every=20
"""

from raysim.algorithms.fedavg import FedAvgClient, FedAvgServer
from raysim.rules import Algorithm

Algorithm(
    "fedper",
    FedAvgClient,
    FedAvgServer,
    "Arivazhagan 2019",
    state="server 0, client its classifier",
    traffic="down the body, up the body",
    defaults={"local": {"personal": ["classifier"]}},
)
