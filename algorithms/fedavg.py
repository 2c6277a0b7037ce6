"""FedAvg and FedSGD: average the clients' local training (McMahan et al., AISTATS 2017).

    client   y <- x;    y <- y - lr grad f_i(y; batch), I times;    d_i = x - y
    server   x <- x - server.lr sum_i w_i d_i

State: none. Traffic: P down, P up.

The weights w_i are 1/S (`weights: uniform`, as in Luo 2023 and Xu 2022) or n_i / sum n_j
(`weights: samples`, as in McMahan 2017). FedSGD makes one step on all of the client's data.
"""

from dataclasses import dataclass

from raysim.rules import Algorithm, ClientRule, Reports, ServerRule, State


@dataclass(frozen=True)
class FedAvgClient(ClientRule):
    """Local SGD, the default of every client rule."""


@dataclass(frozen=True)
class FedAvgServer(ServerRule):
    """Weighted average of the clients' updates."""

    @property
    def heavy_ball(self) -> tuple[float, float]:
        return 0.0, 0.0

    def update(self, state: State, reports: Reports) -> State:
        return {**state, "x": state["x"] - self.lr * reports.mean("delta")}


AUTHORS_CODE = {"authors_code": {"weights": "samples"}}
"""Preset of every method that Luo 2023 compares with: the code of Luo 2023 weights clients by
samples, its text says 1/S. Differences of the code of a method's own paper are its
hyper-parameters."""

Algorithm("fedavg", FedAvgClient, FedAvgServer, "McMahan 2017", presets=AUTHORS_CODE)
Algorithm(
    "fedsgd",
    FedAvgClient,
    FedAvgServer,
    "McMahan 2017",
    defaults={"local": {"steps": 1, "batch_size": "full"}},
)
