"""One plain step of many clients, computed as one gradient.

If every client makes one step of SGD from the broadcast, and the server uses only the weighted mean
of the updates, then that mean is lr times one gradient:

    Σ_i w_i lr ∇f_i(x) = lr ∇ Σ_i w_i / n_i Σ_k l(x; k),   k over the n_i examples of client i.

With weights of examples, as a loss with weights of classes has them, n_i is their sum.

Both sides are equal up to rounding, if the net treats every example separately. The cost of a
client then depends on its examples and not on P.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from raysim.config.schema import Config
from raysim.config.sections.optimizer import PLAIN_SGD
from raysim.errors import RaysimError, with_users_line
from raysim.models.checks.coupled_examples import couples_examples
from raysim.models.flat import BoundModel, Model
from raysim.rules.batch import Batch
from raysim.rules.contract import PLAIN_STEP, ClientRule, ServerRule, overridden
from raysim.rules.tasks.learning_task import LearningTask
from raysim.system.signals import reraise_stop
from raysim.training.batches.pooled_batch import PooledBatch
from raysim.training.messages import Block, Broadcast
from raysim.training.trainers.loop_trainer import LoopTrainer
from raysim.training.uploads.upload_sum import UploadSum

logger = logging.getLogger("raysim")

METHODS_NOT_OVERRIDDEN = (
    *PLAIN_STEP,
    "init",
    "finish",
    "prepare",
    "state",
    "dropout_masks",
    "noise",
    "begin",
    "personal",
    "collude",
)
"""Methods of `ClientRule` that a rule must not override to be pooled."""


class PooledTrainer(LoopTrainer):
    """Trains the clients of a block as one gradient, or one after the other if that fails."""

    has_warned = False
    """True after the first failure of pooling, which is a warning; later ones are debug lines."""

    def add_block(
        self, broadcasts: Mapping[int, Broadcast], block: Block, total: UploadSum
    ) -> None:
        """Train the clients of a block as one gradient. See `Trainer.add_block`.

        Raises:
            RaysimError: memory lacks for that, but not for any single client. Whether it lacks may
                change from one moment to the next, and a sum of single updates has other bits.
        """
        failure, lacks_memory = "", False
        try:
            if self._add_as_one(broadcasts, block, total):
                return
        except BaseException as error:
            reraise_stop(error)
            failure, lacks_memory = with_users_line(error), _lacks_memory(error)
        # Trained one after the other, the clients show which of them causes the error.
        updates = self.train_and_measure(broadcasts, block)
        total.add(updates)
        if not failure or any(update.error for update in updates):
            return
        if lacks_memory:
            raise RaysimError(
                f"batching.mode: one gradient of {len(updates)} clients fails: {failure}; resume "
                "the run when there is more memory, or use a smaller batching.size, with --fork"
            )
        level = logging.DEBUG if self.has_warned else logging.WARNING
        self.has_warned = True
        logger.log(
            level,
            "block %d is trained client by client, as batching.mode=loop does: %s",
            block.index,
            failure,
        )

    def _add_as_one(
        self, broadcasts: Mapping[int, Broadcast], block: Block, total: UploadSum
    ) -> bool:
        """Add the block as one gradient; return False, and add nothing, if it is not finite."""
        delta = torch.zeros_like(self.x0, dtype=torch.float64)
        losses = {}
        # Sorted, so that the order of the sum is fixed.
        for base in sorted({task.base for task in block.tasks}):
            tasks = [task for task in block.tasks if task.base == base]
            pool = self.client_batches.pool(tasks, self.examples_of(tasks))
            broadcast = broadcasts[base]
            self.task.local_params.copy_(broadcast.global_params)
            direction, client_losses = gradient(self.task.trained, broadcast.buffers, pool)
            delta.add_(direction, alpha=self.config.local.step_sizes.of_step(base))
            for task, loss in zip(tasks, client_losses, strict=True):
                losses[task.client] = loss
        return total.add_mean_delta(
            delta, {task.client: losses[task.client] for task in block.tasks}, self.x0.nbytes
        )


def _lacks_memory(error: BaseException) -> bool:
    """Return whether an error says that memory cannot be allocated, on a GPU or not."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = "allocate memory|ALLOC_FAILED|out of memory|not enough memory|bad_alloc"
    return re.search(said, str(error)) is not None


def gradient(bound: BoundModel, buffers: Tensor, pool: PooledBatch) -> tuple[Tensor, list[float]]:
    """Compute the weighted gradient of all clients in a pool.

    Args:
        bound: the net, at the parameters of the broadcast.
        buffers: [Q], the statistics of the broadcast.
        pool: the examples of the clients.

    Returns:
        Σ_i w_i ∇f_i [P], and every f_i, the mean loss of a client's examples.
    """
    bounds = np.cumsum([0, *pool.sizes])
    denominators = _denominators(bound.model.learning_task, pool, bounds)
    # If all examples have weight 0, so have their losses: the 1 only avoids 0 / 0. A client without
    # examples has no loss.
    denominators = np.where(denominators, denominators, np.where(pool.sizes, 1, np.nan))
    weights = np.repeat(np.array(pool.weights) / denominators, pool.sizes)
    example_weights = torch.from_numpy(weights).to(bound.w.device, bound.w.dtype)
    total = torch.zeros_like(bound.w)
    losses = []
    for x, y, drop, span in pool.parts():
        outputs = bound.forward(x, "train", buffers, drop)
        values = bound.model.learning_task.loss(outputs, Batch(x, y))
        weighted = values @ example_weights[span]
        # Zeros for parameters that the loss does not reach, so that the parts make a vector [P].
        with bound.model.passes():
            parts = torch.autograd.grad(weighted, bound.parameters, materialize_grads=True)
        total += torch.cat([part.reshape(-1) for part in parts])
        losses.append(values.detach())
    # It would keep the graph of the last pass in memory.
    bound.frame.features = None
    all_losses = torch.cat(losses).double().cpu().numpy()
    return total, [
        all_losses[start:stop].sum() / denominator
        for (start, stop), denominator in zip(pairwise(bounds), denominators.tolist(), strict=True)
    ]


def _denominators(task: LearningTask, pool: PooledBatch, bounds: np.ndarray) -> np.ndarray:
    """Return what the sum of each client's losses is divided by, [K]."""
    if task.loss_reduction == "sum":
        return np.ones(len(pool.sizes))
    weights = task.mean_weights(pool.y)
    if weights is None:
        return np.array(pool.sizes)
    weights = weights.double().cpu().numpy()
    return np.array([weights[start:stop].sum() for start, stop in pairwise(bounds)])


def why_not_pooled(
    config: Config, client: ClientRule, server: ServerRule, model: Model, probed: bool = False
) -> str | None:
    """Return the reason why clients cannot be trained as one gradient; None if they can.

    Args:
        config: the configuration, with the settings of local steps.
        client: the client rule.
        server: the server rule.
        model: the net.
        probed: whether a probe measures single clients, which needs their own updates.
    """
    if why := _why_not_one_plain_step(config, client, model.learning_task):
        return why
    if why := _why_not_mean(server):
        return why
    if why := _why_clients_differ(config):
        return why
    if probed:
        return "what each client does is looked at"
    if model.draws:
        return "the net draws random numbers in training, which clients do not share"
    if couples_examples(model):
        return "examples meet in the net (BatchNorm?), so that clients are not the same together"
    if model.buffer_size:
        return "the net has statistics, which every client moves by itself and uploads"
    return None


def _why_not_one_plain_step(config: Config, client: ClientRule, task: LearningTask) -> str | None:
    """Return why clients do not all make one plain step on a mean of losses; None if they do."""
    local = config.local
    if task.loss_reduction == "batch":
        return f"the loss '{task.name}' is one of all examples of a batch together"
    if config.groups:
        return "groups of clients train differently"
    if local.upload:
        return "local.upload changes what each client sends"
    if methods := overridden(client, METHODS_NOT_OVERRIDDEN):
        return f"client rule '{client.name}' has a {methods[0]} of its own"
    is_one_epoch_step = local.epochs == 1 and local.batch_size == "full"
    if local.steps != 1 and not is_one_epoch_step:
        return "clients make more than one step"
    return None


def _why_not_mean(server: ServerRule) -> str | None:
    """Return what a server rule needs besides the mean update; None if that is all."""
    if overridden(server, ["sent_to"]):
        return f"server rule '{server.name}' sends clients different models"
    if server.changes_frozen:
        return f"server rule '{server.name}' changes parameters that clients do not train"
    if dict(server.uploads) != {"delta": "mean"}:
        return f"server rule '{server.name}' takes more than the mean of delta"
    return None


def _why_clients_differ(config: Config) -> str | None:
    """Return which setting needs each client's own model, gradient or upload; None if none does."""
    local = config.local
    if local.personal or local.buffers != "averaged":
        return "clients keep parts of the model to themselves"
    if local.optimizer != PLAIN_SGD:
        return f"local.optimizer '{local.optimizer.name}' changes each client's gradient"
    if not config.takes_bare_gradients or local.upload_dtype:
        return "each client's gradient is changed before its step, or what it sends after it"
    if config.client_privacy:
        return "privacy.unit 'client' clips what each client sends"
    return None
