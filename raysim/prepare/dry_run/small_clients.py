"""The two small clients on which a dry run tries rules."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch

from raysim.config.schema import Config
from raysim.config.sections.base import with_value
from raysim.data import Examples
from raysim.data.partition.clients import Clients, VirtualClients
from raysim.engine.plan import Plan
from raysim.engine.process_setup import make_public_data
from raysim.errors import RaysimError
from raysim.server.central_server import Server
from raysim.server.first_broadcast import first_broadcast
from raysim.server.round_cohort import RoundCohort
from raysim.training.batches.batch_order import batch_slice, batches_per_pass
from raysim.training.groups import ClientGroup, WorkerParts
from raysim.training.messages import Broadcast, ClientTask
from raysim.training.trainers.loop_trainer import LoopTrainer
from raysim.training.uploads.client_update import ClientUpdate

logger = logging.getLogger("raysim")

MAX_CLIENT_EXAMPLES = 5
"""Largest number of examples of the larger client; the smaller client has two fewer."""

LARGE_NET_PARAMETERS = 2_000_000
"""Number of parameters above which one client checks the contract."""


class SmallClients:
    """Two small clients of a plan, trained in this process.

    They have five and three of the run's examples.

    Args:
        plan: the plan of the run.
        group: the name of their group; "" is that of clients without one.
    """

    def __init__(self, plan: Plan, group: str = ""):
        self.plan = plan
        self.group = group
        self.config = plan.config
        batches = batch_sizes(self.config, plan.clients, plan.needs_two_examples)
        large = min(max(batches), MAX_CLIENT_EXAMPLES)
        small = max(large - 2, 1) if len(batches) > 1 else large
        self.large = plan.problem.size > LARGE_NET_PARAMETERS
        chosen = np.linspace(0, len(plan.dataset.y) - 1, large + small).astype(np.int64)
        self.clients = Clients(chosen, np.array([0, large, large + small]), np.empty(0, np.int64))

    def stage(self, device: str = "cpu") -> tuple[LoopTrainer, Broadcast, list[ClientTask]]:
        """Return trainer, first broadcast and client tasks; the broadcast is after `before_round`.

        Uploads keep the precision of the run: `local.upload_dtype` is not used.

        Args:
            device: name of the torch device to train on.

        Raises:
            RaysimError: the server rule fails, or breaks its contract.
        """
        plan = self.plan
        # The two clients have fewer examples than a large batch.
        config = with_value(self.config, "local.drop_last", False)
        plan = replace(plan, config=with_value(config, "local.upload_dtype", None))
        model = plan.model(device)
        x0, buffers = model.initial()
        examples = Examples.of(
            plan.dataset, "train", device, plan.dtype, plan.config.resources.gpus
        )
        public = make_public_data(plan.dataset, plan.dtype, device, [plan.client])
        group = ClientGroup(self.group, plan.client, plan.config)
        parts = WorkerParts(plan.server, model, x0, examples, self.clients, public=public)
        tasks = self._client_tasks()
        round = cohort_of(tasks, self.clients.sizes.tolist(), 0)
        try:
            broadcast = Server(plan.server, x0, buffers, plan.problem).broadcast(round)
        except RaysimError as error:  # `before_round` may need the clients of the run
            logger.debug("the first broadcast is tried without clients: %s", error)
            broadcast = first_broadcast(plan.server, x0, buffers, plan.problem)
        return LoopTrainer(group, parts), broadcast, tasks

    def _client_tasks(self) -> list[ClientTask]:
        """Return the tasks of both clients, with one local step each."""
        tasks = []
        for client, n in enumerate(self.clients.sizes.tolist()):
            tasks.append(ClientTask(client, 0, 0, 0.5, min(n, 1), share=1.0))
        return tasks


def device_of(gpus: float | bool) -> str:
    """Return the name of the device on which a rule is tried: a GPU if there is one for it.

    Args:
        gpus: the share of a GPU that the rule's process has in the run.
    """
    return "cuda:0" if gpus and torch.cuda.is_available() else "cpu"


def changed(broadcast: Broadcast) -> Broadcast:
    """Return a broadcast with other parameters.

    Args:
        broadcast: a version of the model.
    """
    x = broadcast.shared["x"]
    # Not the same everywhere, which the outputs of a softmax would not show. What else a server
    # sends may be flags and masks, which have no other values.
    steps = torch.linspace(0.01, 0.02, x.numel(), device=x.device, dtype=x.dtype)
    shared = {**broadcast.shared, "x": x + steps}
    return replace(broadcast, shared=shared)


def next_task(task: ClientTask, update: ClientUpdate) -> ClientTask:
    """Return the next task of a client, with the state that it kept in training."""
    kept = {key: value.cpu().numpy() for key, value in update.client_state.items()}
    return replace(task, client_state=kept or None, seen=True)


def cohort_of(tasks: list[ClientTask], samples: list[int], t: int) -> RoundCohort:
    """Return the clients of a synchronous round.

    Args:
        tasks: what each client is to do.
        samples: number of training examples of each client.
        t: the round.
    """
    return RoundCohort(
        t,
        ids=[task.client for task in tasks],
        bases=[t] * len(tasks),
        weights=[task.weight for task in tasks],
        samples=samples,
        steps=[task.steps for task in tasks],
    )


def batch_sizes(
    config: Config, clients: Clients | VirtualClients, needs_two: bool = False
) -> set[int]:
    """Return the sizes of the mini-batches in a run; see `batches_per_pass`.

    Args:
        config: the configuration, with `local.batch_size`.
        clients: the partition; clients without examples have no batches.
        needs_two: whether a last batch of one joins the batch before.
    """
    sizes = set()
    for n in np.unique(clients.sizes[clients.sizes > 0]).tolist():
        size, drops = config.local.size_of_batches(n), config.local.drop_last
        for i in (0, batches_per_pass(n, size, needs_two, drops) - 1):
            sizes.add(len(range(n)[batch_slice(i, n, size, needs_two, drops)]))
    return sizes or {1}
