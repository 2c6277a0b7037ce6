"""Evaluation of single clients: the model that a client would use, on the client's test examples.

It runs on the workers, in blocks of their own. Like a block of training, such a block is a pure
function of the broadcast, the clients' states, the data and the seed of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from raysim.config.schema import Config
from raysim.data import Examples
from raysim.data.clients import ExampleLists, VirtualClients
from raysim.models.flat import BoundModel
from raysim.rules.contract import ClientRule, ServerRule, overridden
from raysim.rules.learning_task import TaskMetric
from raysim.rules.user_code import check_evaluated, with_traceback
from raysim.signals import reraise_stop
from raysim.training.client_update import ClientUpdate
from raysim.training.evaluation import measure
from raysim.training.messages import Block, Broadcast, ClientEvaluation, ClientTask
from raysim.training.trainer import Trainer


class ClientEvaluator:
    """Evaluates the clients of a block, one after the other.

    Args:
        trainer: the worker's trainer, with the net and the client rule.
        tests: the examples of each client on which it is evaluated.
        examples: the half of the data set that has them.
        own: training examples of each client, also of those that never train.
        batch_size: examples in a batch.
        metrics: the metrics of the learning task; the loss comes besides.
        tuner: trains clients from the global model by plain SGD; None: no fine-tuning.
    """

    def __init__(
        self,
        trainer: Trainer,
        tests: ExampleLists | VirtualClients,
        examples: Examples,
        own: ExampleLists | VirtualClients,
        batch_size: int,
        metrics: Sequence[TaskMetric],
        tuner: Trainer | None,
    ):
        self.trainer = trainer
        self.tests = tests
        self.examples = examples
        self.own = own
        self.batch_size = batch_size
        self.metrics = metrics
        self.tuner = tuner
        self.has_own_models = any(
            uses_own_models(one.config, one.rule, trainer.server)
            for one in trainer.groups or [trainer]
        )
        self.net = BoundModel(trainer.model.with_autocast(None))

    def evaluate_block(
        self, broadcasts: Mapping[int, Broadcast], block: Block
    ) -> list[ClientEvaluation]:
        """Evaluate the clients of a block.

        Args:
            broadcasts: the versions of the global model, by number.
            block: the clients; each `base` is the version that is evaluated.

        Returns:
            The metrics of each client, or its error.
        """
        tuned: dict[int, ClientUpdate] = {}
        if self.tuner is not None:
            # With a request, an update keeps the parameters after the local steps.
            tasks = [replace(task, requests={"evaluation": None}) for task in block.tasks]
            updates = self.tuner.train_block(broadcasts, Block(block.index, tasks))
            tuned = {update.task.client: update for update in updates}
        return [
            self._evaluate(broadcasts[task.base], task, tuned.get(task.client))
            for task in block.tasks
        ]

    def _evaluate(
        self, broadcast: Broadcast, task: ClientTask, tuned: ClientUpdate | None
    ) -> ClientEvaluation:
        """Evaluate one client; an error becomes part of the result."""
        result = ClientEvaluation(task.client, len(self.tests.client(task.client)))
        try:
            result.metrics = self._measure(task.client, *self._model(broadcast, task))
            if tuned is not None:
                result.error = tuned.error
            if tuned is not None and tuned.local_params is not None:
                result.fine_tuned = self._measure(
                    task.client, tuned.local_params, tuned.report["buffers"]
                )
        except BaseException as error:
            reraise_stop(error)
            result.error = with_traceback(error)
        return result

    def _model(self, broadcast: Broadcast, task: ClientTask) -> tuple[Tensor, Tensor]:
        """Return the parameters [P] and BatchNorm statistics [Q] that a client would use."""
        if not self.has_own_models:
            return broadcast.global_params, broadcast.buffers
        trainer = self.trainer.of_client(task.client)
        rule = trainer.rule.at(task.base)
        mine = self.own.client(task.client)
        received = trainer.receive(rule, broadcast, task, mine)
        w, buffers = received.start
        if overridden(rule, ["evaluated"]):
            shared, client_state = received.broadcast.shared, received.client_state
            w = rule.evaluated(shared, client_state, received.data, trainer.loop)
            check_evaluated(rule, broadcast.global_params, w)
        return w, buffers

    @torch.no_grad()
    def _measure(self, client: int, w: Tensor, buffers: Tensor) -> dict[str, float]:
        """Return the metrics of a model on the test examples of a client."""
        self.net.flat.copy_(w)
        positions = torch.from_numpy(self.tests.client(client).copy())
        return measure(
            self.net, buffers, self.examples, self.batch_size, self.metrics, positions=positions
        )


def uses_own_models(config: Config, rule: ClientRule, server: ServerRule) -> bool:
    """Return whether clients use other models than the global one.

    Args:
        config: the configuration of the run.
        rule: the client rule.
        server: the server rule.
    """
    local = config.local
    of_engine = bool(local.personal) or local.buffers == "personal"
    of_rule = overridden(rule, ["begin", "evaluated", "personal"]) + overridden(server, ["sent_to"])
    return of_engine or bool(of_rule)
