"""The server's training problem, for server rules that compute with the model."""

from __future__ import annotations

from numpy.random import Generator
from torch import Tensor

from raysim.config.schema import Config
from raysim.models.flat import Model
from raysim.rules.public import PublicData
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.tasks.optimizers import make_optimizer

SERVER = -1
"""Number of the server where a client has its own."""


class ServerTask(LoopTask):
    """The model of a run, and its public data if the rule needs them, on the device of the server.

    Args:
        config: the configuration of the run, for the settings of local steps.
        model: the net.
        x0: [P], the initial parameters of the run.
        public: the public examples; None if the rule needs none.
    """

    def __init__(self, config: Config, model: Model, x0: Tensor, public: PublicData | None):
        super().__init__(model, LocalSettings(x0=x0, public=public))
        self.config = config
        self.decayed = model.decayed() if config.local.weight_decay else None

    def at_round(self, t: int, x: Tensor, buffers: Tensor) -> ServerTask:
        """Return this task, set to a round.

        Args:
            t: number of the round, from 0.
            x: [P], the server's parameters.
            buffers: [Q], the server's BatchNorm statistics.
        """
        local = self.config.local
        settings = LocalSettings(
            t=t,
            # The server makes no local steps; with 0 of them this is the first step size of the
            # round.
            lr=local.step_sizes.mean(t, 0),
            weight_decay=local.weight_decay,
            clip=local.max_grad_norm,
            x0=self.x0,
            decayed=self.decayed,
            seed=self.config.seed,
            optimizer=make_optimizer(local.optimizer),
            public=self.settings.public,
        )
        self.start(settings, x, buffers, 0, client=SERVER)
        return self

    def log(self, **numbers: float | Tensor) -> None:
        """Refuse: the server has a log of its own. See `Task.log`."""
        raise ValueError("task.log: on the server use reports.log")

    def rng(self, stream: str) -> Generator:
        """Refuse: the server has generators of its own. See `Task.rng`."""
        raise ValueError(f"task.rng('{stream}'): on the server use reports.rng('{stream}')")
