"""The inline executor, which records every broadcast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from raysim.engine.executor import PendingServerStep, RoundResults
from raysim.engine.inline_executor import Inline
from raysim.engine.plan import Plan
from raysim.server.round_cohort import RoundCohort


class Watched(Inline):
    """The inline executor, which also records x_0 .. x_T and the BatchNorm statistics 0 .. T as
    broadcast.

    With `keeps_states` it records the server's whole state at each of these times, after
    `before_round`.
    """

    def __init__(self, keeps_states: bool = False):
        super().__init__()
        self.keeps_states = keeps_states

    def open(self, plan: Plan) -> None:
        super().open(plan)
        self.xs: list[np.ndarray] = []
        self.statistics: list[np.ndarray] = []
        self.states: list[dict[str, torch.Tensor]] = []

    def broadcast(self, following: RoundCohort) -> Any:
        broadcast = super().broadcast(following)
        self._remember()
        return broadcast

    def advance(
        self,
        round: RoundCohort,
        trained: RoundResults,
        bases: Mapping[int, Any],
        following: RoundCohort,
    ) -> PendingServerStep:
        after = super().advance(round, trained, bases, following)
        self._remember()
        return after

    def _remember(self) -> None:
        self.xs.append(self.server.state["x"].cpu().clone().numpy())
        self.statistics.append(self.server.buffers.cpu().clone().numpy())
        if self.keeps_states:
            state = {f"state/{key}": v.clone() for key, v in self.server.state.items()}
            self.states.append(self.server.snapshot() | state)
