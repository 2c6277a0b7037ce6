"""Watch a net while clients train: what no vector holds must not come to steer its passes.

The checks before a run see a few examples. A forward may change something, or draw random numbers,
on others only: a switch that a large input sets, a mix-up of batches of more than eight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


class HiddenChanges:
    """Compares a net's outputs for the same examples and parameters before and after training.

    Their loss is compared, too.
    """

    def __init__(self, bound: BoundModel, rule: ClientRule):
        """Compute outputs and loss before training.

        Args:
            bound: the net on which clients train.
            rule: their rule.
        """
        self.bound = bound
        self.libraries = libraries_to_watch(type(rule))
        self.expected = self._outputs()
        self.rounds = 0

    @contextmanager
    def watched(self, is_last: bool = False) -> Iterator[None]:
        """Watch the training of some clients.

        Outputs are compared after the training 1, 2, 4, 8, ... of a worker, which costs
        little, and after the last one.

        Args:
            is_last: whether the run's last round is trained.

        Raises:
            ConfigError: a global generator was drawn from, or outputs have changed.
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
        (outputs, loss), (expected, expected_loss) = self._outputs(), self.expected
        if not close(outputs, expected):
            raise ConfigError(
                f"{label} gives other outputs after clients have trained, for the same examples "
                "and parameters: after some passes, or on some examples, forward changes an "
                "attribute, a variable or a buffer that did not move on the first ones; make it a "
                "function of the inputs"
            )
        if not close(loss, expected_loss):
            raise ConfigError(
                f"task: loss of '{self.bound.model.learning_task.name}' gives something else after "
                "clients have trained, for the same outputs and targets: it keeps something, such "
                "as a number of its calls, so that it would depend on which clients a worker "
                "trains; compute it from its arguments"
            )

    @torch.no_grad()
    def _outputs(self) -> tuple[Tensor, Tensor]:
        """Return outputs of the initial net in training mode, [B, ...], and their loss, a scalar.

        The parameters stay.
        """
        bound, kept = self.bound, self.bound.w.clone()
        w, buffers = bound.model.initial()
        bound.w.copy_(w)
        x, y = bound.model.examples(EXAMPLES)
        with tensors_on(bound.model.device):
            outputs = bound.forward(x, "frozen", buffers)
            loss = bound.model.mean_loss(outputs, x, y)
        bound.w.copy_(kept)
        return outputs, loss
