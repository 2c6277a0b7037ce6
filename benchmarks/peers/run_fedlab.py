"""FedLab: its standalone pipeline, one client after the other in one process."""

from __future__ import annotations

import logging
from importlib.metadata import version

import torch
from measure import Meter
from workloads import LR, arguments, clients, make_net


def main() -> None:
    # Beside a CPU build of torch, torchvision cannot be imported without these.
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )

    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler
    from fedlab.core.standalone import StandalonePipeline

    class Data:
        """Data set of the trainer: some batches for each client."""

        def get_dataloader(self, client: int, batch_size: int):
            return clients(work).batches(client)

    class Timed(StandalonePipeline):
        """Pipeline that reports each round to the meter in `evaluate`, which follows each round."""

        def evaluate(self) -> None:
            if not meter.round():
                self.handler.global_round = self.handler.round

    work, given = arguments()
    meter = Meter(given.seconds)
    torch.set_num_threads(1)
    logging.disable()
    trainer = SGDSerialClientTrainer(make_net(work), work.clients)
    trainer.setup_dataset(Data())
    trainer.setup_optim(epochs=1, batch_size=work.batch, lr=LR)
    handler = SyncServerHandler(
        make_net(work), global_round=1_000_000, sample_ratio=work.cohort / work.clients
    )
    Timed(handler, trainer).main()
    meter.report(f"fedlab {version('fedlab')}")


if __name__ == "__main__":
    main()
