"""Flower: FedAvg over its message API on the Ray backend, one CPU for each actor.

Every actor keeps the data in memory. The strategy is Flower's own FedAvg; local training is the
plain loop of its tutorials.
"""

from __future__ import annotations

import os
from contextlib import suppress

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import flwr
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from measure import Meter
from torch.nn import functional as F
from workloads import LR, arguments, clients, make_net

work, given = arguments()
client, server = ClientApp(), ServerApp()


class Over(Exception):
    """The time of the measurement is over."""


class Timed(FedAvg):
    """FedAvg that reports each round to the meter."""

    def aggregate_train(self, server_round, replies):
        found = super().aggregate_train(server_round, replies)
        if not meter.round():
            meter.report(f"flwr {flwr.__version__}")
            raise Over
        return found


@client.train()
def train(message: Message, context: Context) -> Message:
    data, net = clients(work), make_net(work)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for x, y in data.batches(int(context.node_config["partition-id"])):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    upload = {
        "arrays": ArrayRecord(net.state_dict()),
        "metrics": MetricRecord({"num-examples": work.samples}),
    }
    return Message(RecordDict(upload), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = Timed(
        fraction_train=1e-9,
        min_train_nodes=work.cohort,
        min_available_nodes=work.clients,
        fraction_evaluate=0.0,
    )
    strategy.start(grid, ArrayRecord(make_net(work).state_dict()), num_rounds=1_000_000)


if __name__ == "__main__":
    meter = Meter(given.seconds)
    backend = {
        "init_args": {"num_cpus": given.processes},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    with suppress(Over):
        run_simulation(server, client, work.clients, backend_config=backend)
