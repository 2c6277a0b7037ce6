"""pfl-research: its simulated backend in one process, or in several over torch.distributed (gloo).

Users are sampled as its documentation advises, with as little reuse as possible. The evaluation,
which pfl always has in its first round, computes nothing.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.metadata import version

RANK, ADDRESSES = "PFL_WORKER_RANK", "PFL_WORKER_ADDRESSES"


def start_others(processes: int) -> list[subprocess.Popen]:
    """Make this process the first of `processes`, and start the others.

    pfl reads both environment variables when it is imported.
    """
    if processes == 1 or RANK in os.environ:
        return []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ[ADDRESSES] = ",".join(f"127.0.0.1:{port + i}" for i in range(processes))
    os.environ[RANK] = "0"
    ranks = [{**os.environ, RANK: str(rank)} for rank in range(1, processes)]
    return [
        subprocess.Popen([sys.executable, *sys.argv], env=env, stderr=subprocess.DEVNULL)
        for env in ranks
    ]


def main() -> None:
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(1)
    data, net = clients(work), make_net(work)
    net.loss = lambda x, y: F.cross_entropy(net(x), y)
    net.metrics = lambda x, y: {"samples": Weighted(0, len(x))}
    meter, first = Meter(given.seconds), os.environ.get(RANK, "0") == "0"

    class Timed(TrainingProcessCallback):
        """Reports each round to the meter; only the first process ends the run."""

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            return first and not meter.round(), Metrics()

    users = get_user_sampler("minimize_reuse", list(range(work.clients)))
    federated = FederatedDataset(
        lambda user: Dataset(list(data.examples(user)), user_id=str(user)), users
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=1_000_000,
            evaluation_frequency=1_000_000,
            train_cohort_size=work.cohort,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=federated, val_data=federated),
        PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
        NNTrainHyperParams(local_batch_size=work.batch, local_num_epochs=1, local_learning_rate=LR),
        NNEvalHyperParams(local_batch_size=None),
        [Timed()],
        send_metrics_to_platform=False,
    )
    meter.report(f"pfl {version('pfl')}")


if __name__ == "__main__":
    from measure import Meter
    from torch.nn import functional as F
    from workloads import LR, arguments, clients, make_net

    work, given = arguments()
    others = start_others(given.processes)
    try:
        main()
    finally:
        for other in others:
            other.kill()
