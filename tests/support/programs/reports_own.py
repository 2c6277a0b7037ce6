"""A method and a metric of which smaller values are better."""

from dataclasses import dataclass

import torch

from raysim.algorithms.fedavg import FedAvgClient, FedAvgServer
from raysim.rules import Algorithm, Logged, TaskMetric


@dataclass(frozen=True)
class HalvingServer(FedAvgServer):
    """FedAvg that logs a share."""

    logs = (Logged("halves", "how much is halved", "share"),)

    def update(self, state, reports):
        reports.log(halves=0.5)
        return super().update(state, reports)


class Gap(TaskMetric):
    """Distance of the probability of the label from 1."""

    larger_is_better = False
    unit = "share"

    def rows(self, outputs, y):
        return 1 - torch.softmax(outputs, 1).gather(1, y[:, None])[:, 0]


halving = Algorithm("halving", FedAvgClient, HalvingServer, "Nobody 2026")
