"""Watch a net while clients train: what no vector holds must not come to steer its passes.

The checks before a run see a few examples. A forward may change something, or draw random numbers,
on others only: a switch that a large input sets, a mix-up of batches of more than eight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raysim.errors import ConfigError
from raysim.models.checks.against_pytorch import EXAMPLES
from raysim.models.comparison import close
from raysim.models.default_device import tensors_on
from raysim.models.flat import BoundModel
from raysim.rules.contract import ClientRule
from raysim.rules.errors.keyed_numbers import libraries_to_watch
from raysim.system.global_generators import GlobalGenerators

NORM_TOLERANCE = 1e-12
"""Largest relative difference of two norms of the same numbers, computed in float64."""


@dataclass
class Results:
    """Results of a net at its initial parameters, which training must leave as they are."""

    norms: dict[str, float]
    """The norm of each tensor that is neither trained nor a statistic, by its kind and name."""
    outputs: list[Tensor]
    """The outputs in evaluation and in training mode, [B, ...] each."""
    loss: Tensor
    """The loss of those in training mode, a scalar."""


class HiddenChanges:
    """Compares what a net computes for the same examples and parameters before and after training.

    Its loss, its frozen parameters and the buffers that rest are compared, too.
    """

    def __init__(self, bound: BoundModel, rule: ClientRule):
        """Compute the results before training.

        Args:
            bound: the net on which clients train.
            rule: their rule.
        """
        self.bound = bound
        self.libraries = libraries_to_watch(type(rule))
        self.expected = self._results()
        self.rounds = 0

    @contextmanager
    def watched(self, is_last: bool = False) -> Iterator[None]:
        """Watch the training of some clients.

        Results are compared after the training 1, 2, 4, 8, ... of a worker, which costs
        little, and after the last one.

        Args:
            is_last: whether the run's last round is trained.

        Raises:
            ConfigError: a global generator was drawn from, or results have changed.
        """
        before = GlobalGenerators(self.libraries)
        yield
        label = self.bound.model.label
        libraries = before.drawn_from()
        if libraries:
            raise ConfigError(
                f"{label}, its loss or the client rule draws from {libraries[0]}'s global "
                "generator on some examples or in some rounds, so a run could not be repeated; let "
                "forward draw in each training pass, or use keyed numbers in a rule "
                "(docs/how-to/random_numbers.md), and let no other thread draw meanwhile"
            )
        self.rounds += 1
        if self.rounds & (self.rounds - 1) and not is_last:
            return
        results, expected = self._results(), self.expected
        for name, norm in results.norms.items():
            before = expected.norms.get(name, np.nan)
            if not np.isclose(norm, before, NORM_TOLERANCE, 0.0, equal_nan=True):
                raise ConfigError(
                    f"{label} has changed its {name} while clients trained, after some passes or "
                    "on some examples, but not on the first ones, so that it is no statistic that "
                    "clients move and the server averages; let each training pass move a buffer, "
                    "and no pass a parameter, or keep it in an attribute if nothing depends on it"
                )
        for outputs, before in zip(results.outputs, expected.outputs, strict=True):
            if not close(outputs, before):
                raise ConfigError(
                    f"{label} gives other outputs after clients have trained, for the same "
                    "examples and parameters: after some passes, or on some examples, forward "
                    "changes an attribute, a variable or a buffer that did not move on the first "
                    "ones; make it a function of the inputs"
                )
        if not close(results.loss, expected.loss):
            raise ConfigError(
                f"task: loss of '{self.bound.model.learning_task.name}' gives something else after "
                "clients have trained, for the same outputs and targets: it keeps something, such "
                "as a number of its calls, so that it would depend on which clients a worker "
                "trains; compute it from its arguments"
            )

    def _results(self) -> Results:
        """Return the results of the initial net; the parameters stay."""
        bound, model, kept = self.bound, self.bound.model, self.bound.w.clone()
        w, buffers = model.initial()
        bound.w.copy_(w)
        norms = self._norms_at_rest()
        x, y = model.examples(EXAMPLES)
        with tensors_on(model.device):
            with torch.no_grad():
                bound.model = model.with_precision("float32")  # as evaluations compute
                try:
                    outputs = [bound.forward(x, "eval", buffers)]
                finally:
                    bound.model = model
            # With gradients, by which a forward may tell training apart.
            with torch.enable_grad():
                outputs.append(bound.forward(x, "frozen", buffers).detach())
            with torch.no_grad():
                loss = model.mean_loss(outputs[1], x, y)
        bound.w.copy_(kept)
        return Results(norms, outputs, loss)

    def _norms_at_rest(self) -> dict[str, float]:
        """Return the norms of the tensors that no step and no pass may change.

        Buffers of integers may count. Copies of frozen parameters would fill the memory.
        """
        net, model = self.bound.module[0], self.bound.model
        statistics = {f"{s.layer}.{s.name}".lstrip(".") for s in model.statistics}
        tensors = {}
        for name, buffer in net.named_buffers():
            if name not in statistics:
                tensors[f"buffer '{name}'"] = buffer
        for name, parameter in net.named_parameters():
            if f"0.{name}" not in model.names:
                tensors[f"parameter '{name}'"] = parameter
        return {
            name: float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))
            for name, tensor in tensors.items()
            if tensor.is_floating_point()
        }
