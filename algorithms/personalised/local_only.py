"""Local training only (a baseline of most papers on personalisation, such as Li et al., ICML 2021).

Each client trains its own model and nothing is averaged: FedAvg with `local.personal: "*"`. A
client goes on from its model in every round in which it takes part. The global model stays the
initial one, so evaluate the clients.

Run: raysim run quickstart algorithm=local_only partition.test.fraction=0.2 evaluate.every=0
evaluate.clients.every=20
"""

from raysim.algorithms.fedavg import FedAvgClient, FedAvgServer
from raysim.rules import Algorithm

Algorithm(
    "local_only",
    FedAvgClient,
    FedAvgServer,
    "Li T. 2021",
    state="server 0, client P + Q",
    traffic="down 0, up 0",
    defaults={"local": {"personal": ["*"]}},
)
