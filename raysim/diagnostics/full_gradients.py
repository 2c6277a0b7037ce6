"""Clients' full gradients at a model, and the curvature of their objectives.

Convergence theory needs both. f_i is the mean loss of client i over its examples without
augmentation and dropout; BatchNorm uses the statistics of the client's batches, and a net that
reads running statistics those of the global model. f is the mean
of the f_i with the weights of the server rule, uniform or by samples. A sample of clients is drawn
once for a run; f is then the mean over the sample.

Curvature is measured with Hessian-vector products H_i v of f_i. During a run it is ‖H_i v‖ along
each client's gradient. Before a run it is the power method, v <- H_i v / ‖H_i v‖ from a random
direction for every client. Both are lower bounds of L at this model, and the largest over the
clients counts. The power method comes close to L.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from raysim.config.schema import Config
from raysim.data.partition.clients import Clients, VirtualClients
from raysim.errors import ConfigError
from raysim.models.flat import BoundModel, Model
from raysim.numerics import norm, weighted_sum
from raysim.randomness import generator
from raysim.rules.batch import Batch
from raysim.training.trainers.trainer import Trainer

GRADIENT_FORWARD_PASSES = 3
"""Cost of the gradient of an example, in forward passes."""

CURVATURE_FORWARD_PASSES = 9
"""Cost of a Hessian-vector product of an example, in forward passes."""

MAX_OPERATIONS_PER_EVALUATION = 1e13
"""Floating-point operations of one evaluation on a core: some minutes. On a GPU: 100 times more."""

MAX_OPERATIONS_PER_RUN = 1e14
"""Floating-point operations of all evaluations on a core: half an hour. GPU: 100 times more."""

MAX_GRADIENT_BYTES = 4e9
"""Bytes of the gradients of all clients in one evaluation."""

MAX_POWER_ITERATIONS = 20
"""Iterations of the power method."""

RELATIVE_TOLERANCE = 1e-3
"""Relative change of L at which the power method ends."""


def chosen_clients(sizes: np.ndarray, sample: int | None, seed: int) -> np.ndarray:
    """Return the numbers of the clients whose gradients are computed, in ascending order.

    Args:
        sizes: number of examples of each client, [N].
        sample: number of clients to draw; None: all clients with data.
        seed: seed of the run.
    """
    with_data = np.flatnonzero(sizes > 0)
    if sample is None or sample >= len(with_data):
        return with_data
    return np.sort(generator(seed, "theory").choice(with_data, sample, replace=False))


def flops(model: Model) -> float:
    """Return the floating-point operations of the forward pass of one example.

    Args:
        model: the net.
    """
    from torch.utils.flop_counter import FlopCounterMode

    bound = BoundModel(model)
    x = torch.zeros_like(model.trial(1)[0])
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        bound.forward(x, "eval", model.initial()[1])
    return max(float(counter.get_total_flops()), 2.0 * model.size)


def why_no_curvature(model: Model) -> str | None:
    """Return why a net cannot be differentiated twice; None if it can.

    Args:
        model: the net.
    """
    bound, buffers = BoundModel.at_start(model)
    x, y = model.trial(2)
    x = torch.ones_like(x)
    try:
        _hessian_product(bound, buffers, x, y, torch.ones_like(bound.w))
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


class FullGradients:
    """Full gradients and curvature of K clients, on the trainer's device.

    Args:
        trainer: the trainer, with the model and the clients' data.
        clients: numbers of the clients, [K].
        weights: "samples" weights clients by their numbers of examples, other values uniformly.
    """

    def __init__(self, trainer: Trainer, clients: np.ndarray, weights: str):
        self.trainer = trainer
        self.clients = clients
        self.bound = BoundModel(trainer.model)
        shares = trainer.clients.sizes[clients] if weights == "samples" else np.ones(len(clients))
        self.weights = (shares / shares.sum()).tolist()

    def _move_to(self, x: Tensor, buffers: Tensor) -> None:
        """Let the next passes use the parameters x [P] and the statistics [Q]."""
        self.bound.w.copy_(x)
        self.buffers = buffers.to(self.bound.w.device)

    def measure(self, x: Tensor, buffers: Tensor, curvature: bool) -> dict[str, float]:
        """Return loss, gradients' norms and curvature at a model.

        Args:
            x: [P], the parameters.
            buffers: [Q], the statistics.
            curvature: whether to measure the curvature, too.

        Returns:
            `f`, the mean loss; `grad_norm2`, ‖∇f‖²; `rho2_max` and `rho2_mean`, the largest and the
            weighted mean ‖∇f_i - ∇f‖² of a client; and `curvature`, the largest ‖H_i v‖ of a client
            along its unit gradient v.
        """
        self._move_to(x, buffers)
        values, rows = zip(*(self._gradient(client) for client in self.clients), strict=True)
        mean = weighted_sum(rows, self.weights)
        rho2 = [norm(row - mean) ** 2 for row in rows]
        measured = {
            "f": float(np.dot(self.weights, values)),
            "grad_norm2": norm(mean) ** 2,
            "rho2_max": max(rho2),
            "rho2_mean": float(np.dot(self.weights, rho2)),
        }
        if curvature:
            pairs = zip(self.clients, rows, strict=True)
            measured["curvature"] = max(
                norm(self._hessian_product(i, row)) / max(norm(row), 1e-300) for i, row in pairs
            )
        return measured

    def largest_curvature(self, x: Tensor, buffers: Tensor) -> float:
        """Return max_i ‖H_i‖ at a model, estimated by the power method.

        Args:
            x: [P], the parameters.
            buffers: [Q], the statistics.
        """
        self._move_to(x, buffers)
        seed = self.trainer.config.seed
        directions = [
            torch.from_numpy(generator(seed, "curvature", int(i)).standard_normal(len(x)))
            for i in self.clients
        ]
        v = [direction.to(self.bound.w) / norm(direction) for direction in directions]
        L = 0.0
        for _ in range(MAX_POWER_ITERATIONS):
            products = [self._hessian_product(i, u) for i, u in zip(self.clients, v, strict=True)]
            sizes = [norm(product) for product in products]
            v = [
                product / size if size else u
                for product, size, u in zip(products, sizes, v, strict=True)
            ]
            previous_L = L
            L = max(sizes)
            if abs(L - previous_L) <= RELATIVE_TOLERANCE * L:
                break
        return L

    def _gradient(self, client: int) -> tuple[float, Tensor]:
        """Return f_i and ∇f_i, [P], of a client."""
        indices = self.trainer.clients.client(client)
        value = 0.0
        total = torch.zeros_like(self.bound.w)
        for batch, count in self._batches(indices):
            outputs = self.bound.forward(batch.x, "frozen", self.buffers)
            loss = self.bound.model.mean_loss(outputs, batch.x, batch.y)
            parts = torch.autograd.grad(loss, self.bound.parameters, materialize_grads=True)
            share = count / len(indices)
            total.add_(torch.cat([part.reshape(-1) for part in parts]), alpha=share)
            value += float(loss.detach()) * share
        return value, total

    def _hessian_product(self, client: int, v: Tensor) -> Tensor:
        """Return H_i v, [P], of a client."""
        indices = self.trainer.clients.client(client)
        total = torch.zeros_like(v)
        for batch, count in self._batches(indices):
            product = _hessian_product(self.bound, self.buffers, batch.x, batch.y, v)
            total.add_(product, alpha=count / len(indices))
        return total

    def _batches(self, indices: np.ndarray) -> Iterator[tuple[Batch, float]]:
        """Yield a client's batches with the number of examples that each stands for."""
        whole = partial(self.trainer.client_batches.whole, indices)
        return self.bound.model.learning_task.in_batches(whole, len(indices))


def _hessian_product(bound: BoundModel, buffers: Tensor, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """Return the Hessian of the mean loss of a batch, times v [P]."""
    loss = bound.model.mean_loss(bound.forward(x, "frozen", buffers), x, y)
    parts = torch.autograd.grad(loss, bound.parameters, create_graph=True, materialize_grads=True)
    v_parts = list(bound.model.views(v).values())
    curved = [(part, u) for part, u in zip(parts, v_parts, strict=True) if part.requires_grad]
    if not curved:
        return torch.zeros_like(v)
    outputs, directions = zip(*curved, strict=True)
    products = torch.autograd.grad(outputs, bound.parameters, directions, materialize_grads=True)
    return torch.cat([part.reshape(-1) for part in products])


@dataclass(frozen=True)
class ComputeCost:
    """Cost of passes over the examples of clients."""

    operations: float
    """Floating-point operations."""

    room: float
    """Bytes of one vector for each client."""

    most: float
    """Operations that the device may be asked for, as a multiple of those of a core."""

    clients: int
    """Number of clients."""

    examples: int
    """Number of examples of these clients."""

    size: int
    """Number of parameters of the net."""

    @property
    def what(self) -> str:
        """Description of the work, for messages."""
        return (
            f"all {self.examples:,} examples of {self.clients} clients, for a net with "
            f"{self.size:,} parameters"
        )

    def fits(self, operations: float, vectors: int = 1) -> int:
        """Return the number of clients that a limit allows, at least 1.

        Args:
            operations: limit of floating-point operations on a core.
            vectors: vectors that are stored for each client.
        """
        share = min(
            operations * self.most / self.operations, MAX_GRADIENT_BYTES / (vectors * self.room)
        )
        return max(1, int(self.clients * share))

    def too_much(self, operations: float, vectors: int = 1) -> bool:
        """Return whether the cost exceeds a limit.

        Args:
            operations: limit of floating-point operations on a core.
            vectors: vectors that are stored for each client, limited by `MAX_GRADIENT_BYTES`.
        """
        return self.operations > operations * self.most or vectors * self.room > MAX_GRADIENT_BYTES


def compute_cost(
    config: Config, clients: Clients | VirtualClients, model: Model, sample: int | None, passes: int
) -> ComputeCost:
    """Return the cost of passes over the examples of clients.

    Args:
        config: the configuration; its resources decide between a GPU and a core.
        clients: the partition, with the number of examples of each client.
        model: the net.
        sample: number of clients to draw; None: all clients with data.
        passes: cost of one example, in forward passes.

    Raises:
        ConfigError: the clients' examples change over the rounds.
    """
    if clients.phases:
        raise ConfigError(
            "partition.phases: gradients over all of a client's data need examples that stay the "
            "same in all rounds; leave partition.phases out"
        )
    r = config.resources
    ids = chosen_clients(clients.sizes, sample, config.seed)
    examples = int(clients.sizes[ids].sum())
    most = 100.0 if r.server_on_gpu else 1.0
    room = float(len(ids)) * model.size * model.dtype.itemsize
    return ComputeCost(passes * examples * flops(model), room, most, len(ids), examples, model.size)
