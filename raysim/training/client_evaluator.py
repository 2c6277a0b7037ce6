"""Evaluation of single clients: the model that a client would use, on the client's own examples.

It runs on the workers, in blocks of their own. Like a block of training, such a block is a pure
function of the broadcast, the clients' states, the data and the seed of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from raysim.config.schema import Config
from raysim.data import Examples
from raysim.data.partition.clients import ExampleLists, VirtualClients
from raysim.metrics import VALIDATION
from raysim.models.default_device import tensors_on
from raysim.models.flat import BoundModel
from raysim.rules.contract import ClientRule, ServerRule, overridden
from raysim.rules.errors.returned_values import (
    check_evaluated,
    check_predicted,
    check_statistics_named,
)
from raysim.rules.errors.user_code import with_traceback
from raysim.rules.losses import Net
from raysim.rules.tasks.learning_task import TaskMetric
from raysim.system.signals import reraise_stop
from raysim.training.evaluation import Predict, measure
from raysim.training.messages import Block, Broadcast, ClientEvaluation, ClientTask
from raysim.training.personal import PARAMETERS_KEY, STATISTICS_KEY
from raysim.training.trainers.group_trainer import GroupTrainer
from raysim.training.trainers.trainer import Trainer


class ClientEvaluator:
    """Evaluates the clients of a block, one after the other.

    Args:
        trainer: the worker's trainer, with the nets and the client rules.
        tests: positions of the examples on which each client is evaluated, in `examples`; None:
            there are none.
        examples: the half of the data set that `tests` refers to.
        val: positions of the validation examples of each client in the training half; None: there
            are none.
        training: positions of the training examples of each client, also of those that never train.
        batch_size: examples in a batch.
        metrics: the metrics of the learning task; the loss is always measured too.
        tuner: trains clients by plain SGD, for fine-tuning; None: no fine-tuning.
        after_rounds: whether a version has the examples of the round that led to it, as in
            `ExampleLists.after_rounds`, and not of that which it starts.
    """

    def __init__(
        self,
        trainer: GroupTrainer,
        tests: ExampleLists | VirtualClients | None,
        examples: Examples,
        val: ExampleLists | None,
        training: ExampleLists | VirtualClients,
        batch_size: int,
        metrics: Sequence[TaskMetric],
        tuner: Trainer | None,
        after_rounds: bool = False,
    ):
        self.trainer = trainer
        self.after_rounds = after_rounds
        self.tests = tests
        self.examples = examples
        self.val = val
        self.training = training
        self.batch_size = batch_size
        self.metrics = metrics
        self.tuner = tuner
        self.has_own_models = any(
            uses_own_models(t.config, t.rule, t.server) for t in trainer.trainers
        )
        first = trainer.trainers[0]
        self.training_half = first.client_batches.examples
        # `local.precision` is for local training.
        self.net = BoundModel(first.model.with_precision("float32"))

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
        with tensors_on(self.net.model.device):
            evaluations = []
            own_models: dict[int, dict[str, np.ndarray]] = {}
            for task in block.tasks:
                result = ClientEvaluation(
                    task.client,
                    _n_examples(self.tests, task),
                    _n_examples(self.val, task),
                )
                try:
                    predict = self._prediction(broadcasts[task.base], task)
                    w, buffers = self._model(broadcasts[task.base], task)
                    result.metrics = self._measure(task, w, buffers, predict)
                    if self.tuner is not None and self.has_own_models:
                        # Copies: tensors that a rule returns may be those of the trainer, which the
                        # next client overwrites.
                        own_models[task.client] = {
                            PARAMETERS_KEY: w.numpy(force=True).copy(),
                            STATISTICS_KEY: buffers.numpy(force=True).copy(),
                        }
                except BaseException as error:
                    reraise_stop(error)
                    result.error = with_traceback(error)
                evaluations.append(result)
            if self.tuner is not None:
                self._fine_tune(self.tuner, broadcasts, block, evaluations, own_models)
            return evaluations

    def _fine_tune(
        self,
        tuner: Trainer,
        broadcasts: Mapping[int, Broadcast],
        block: Block,
        evaluations: Sequence[ClientEvaluation],
        own_models: Mapping[int, dict[str, np.ndarray]],
    ) -> None:
        """Add the metrics after fine-tuning to the evaluations of a block's clients.

        Steps start from the client's own model, if there is one, else from the global one.
        """
        results = {result.client: result for result in evaluations if result.error is None}
        before = {task.client: task for task in block.tasks}
        tasks = []
        for task in block.tasks:
            if task.client not in results:
                continue
            result = results[task.client]
            if not len(self.training.at(task.base).client(task.client)):
                result.fine_tuned = dict(result.metrics)  # it has nothing to train on
            else:
                client_state = own_models.get(task.client, task.client_state)
                # With a request, an update keeps the parameters after the local steps.
                requests = {"evaluation": None}
                tasks.append(replace(task, requests=requests, client_state=client_state))
        if not tasks:
            return
        for update in tuner.train_block(broadcasts, Block(block.index, tasks)):
            result = results[update.task.client]
            result.error = update.error
            if update.local_params is None:
                continue
            task, buffers = before[result.client], update.report["buffers"]
            try:
                # Made anew: the task that the rule reads there has become another client's.
                predict = self._prediction(broadcasts[task.base], task)
                result.fine_tuned = self._measure(task, update.local_params, buffers, predict)
            except BaseException as error:
                reraise_stop(error)
                result.error = with_traceback(error)

    def state_dict(self, broadcast: Broadcast, task: ClientTask) -> dict[str, Tensor]:
        """Return a copy of the model that a client would use, by the names of the net's tensors.

        Args:
            broadcast: the version of the global model.
            task: the client, whose `base` is the number of the version.

        Raises:
            ContractError: see `own_model`.
        """
        with tensors_on(self.net.model.device):
            w, buffers = self._model(broadcast, task)
            return self.net.model.state_dict(w.detach(), buffers.detach())

    def _model(self, broadcast: Broadcast, task: ClientTask) -> tuple[Tensor, Tensor]:
        """Return the parameters [P] and BatchNorm statistics [Q] that a client would use.

        The net gets the frozen parameters that belong to them.
        """
        parts = self.trainer.trainers[0].parts
        if parts.server.changes_frozen:
            parts.model.set_frozen(broadcast.shared["frozen"])
        if not self.has_own_models:
            return broadcast.global_params, broadcast.buffers
        trainer = self.trainer.of_client(task.client)
        mine = self.training.at(task.base).client(task.client)
        return own_model(trainer, broadcast, task, mine, self._of_round(task))

    def _of_round(self, task: ClientTask) -> int:
        """Return the round whose examples a client has when its version is evaluated."""
        return max(task.base - self.after_rounds, 0)

    def _prediction(self, broadcast: Broadcast, task: ClientTask) -> Predict | None:
        """Return the client's own way from a forward pass to outputs; None for the net's."""
        trainer = self.trainer.of_client(task.client)
        rule = trainer.rule.at(task.base)
        if not overridden(rule, ["predict"]):
            return None
        mine = self.training.at(task.base).client(task.client)
        received = trainer.start.receive(
            trainer.task, rule, broadcast, task, mine, self._of_round(task)
        )
        shared, client_state = received.broadcast.shared, received.client_state

        def predict(net: Net) -> Tensor:
            outputs = rule.predict(shared, client_state, net, trainer.task)
            check_predicted(rule, outputs, net.logits.shape)
            return outputs

        return predict

    @torch.no_grad()
    def _measure(
        self, task: ClientTask, w: Tensor, buffers: Tensor, predict: Predict | None
    ) -> dict[str, float]:
        """Return the metrics of a model on the test and validation examples of a client."""
        self.net.w.copy_(w)
        metrics: dict[str, float] = {}
        for prefix, lists, examples in (
            ("", self.tests, self.examples),
            (VALIDATION, self.val, self.training_half),
        ):
            positions = () if lists is None else lists.at(task.base).client(task.client)
            if not len(positions):
                continue
            values = measure(
                self.net,
                buffers,
                examples,
                self.batch_size,
                self.metrics,
                # A copy, because lists of examples may be read-only, of which torch warns.
                positions=torch.from_numpy(np.array(positions)),
                predict=predict,
            )
            metrics |= {f"{prefix}{name}": value for name, value in values.items()}
        return metrics


def _n_examples(lists: ExampleLists | VirtualClients | None, task: ClientTask) -> int:
    """Return how many examples a client has in lists of examples, in the round of its version."""
    return 0 if lists is None else len(lists.at(task.base).client(task.client))


def own_model(
    trainer: Trainer,
    broadcast: Broadcast,
    client_task: ClientTask,
    mine: np.ndarray,
    of_round: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the parameters [P] and BatchNorm statistics [Q] that a client's rule evaluates.

    Args:
        trainer: the trainer of the client's group.
        broadcast: the version of the model.
        client_task: the client, with its state.
        mine: [n], positions of the client's training examples.
        of_round: see `ClientStart.receive`.

    Raises:
        ContractError: `evaluated` of the rule returns something that its contract forbids, or the
            model is the client's own and has no BatchNorm statistics.
    """
    rule = trainer.rule.at(client_task.base)
    task = trainer.task
    received = trainer.start.receive(task, rule, broadcast, client_task, mine, of_round)
    w, buffers = received.local_params, received.buffers
    method, names_buffers = "begin", received.names_buffers
    if overridden(rule, ["evaluated"]):
        shared, client_state = received.broadcast.shared, received.client_state
        evaluated = rule.evaluated(shared, client_state, received.data, task)
        check_evaluated(rule, broadcast.global_params, broadcast.buffers, evaluated)
        method, names_buffers = "evaluated", isinstance(evaluated, tuple)
        w, buffers = evaluated if isinstance(evaluated, tuple) else (evaluated, buffers)
    if trainer.uploads.averages_statistics and not names_buffers:
        check_statistics_named(rule, method, w, received.broadcast.global_params)
    return w, buffers


def uses_own_models(config: Config, rule: ClientRule, server: ServerRule) -> bool:
    """Return whether clients use other models than the global one.

    Args:
        config: the configuration of the run.
        rule: the client rule.
        server: the server rule.
    """
    local = config.local
    if local.personal or local.buffers == "personal" or overridden(server, ["sent_to"]):
        return True
    return bool(overridden(rule, ["begin", "evaluated", "personal", "predict"]))
