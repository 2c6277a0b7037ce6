"""Steps around the update of the server rule, which a run may have or not.

`engine.process_setup` chooses those of a run, and their order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raysim.rules.contract import State
from raysim.rules.reports import Reports
from raysim.training.messages import Broadcast
from raysim.training.tasks.server_task import ServerTask


class UpdateStep:
    """A step around the update of the server rule. By default it does nothing."""

    hides_clients = False
    """Whether the rule gets no facts about the clients. Then the sums of a round arrive in float64,
    dropped clients do not change their divisor, and a round without clients is updated too."""

    def before(self, reports: Reports, model: Broadcast) -> dict[str, float]:
        """Change what the rule will receive, in place.

        Args:
            reports: the uploads of a round, without BatchNorm statistics.
            model: the server's state and BatchNorm statistics before the update.

        Returns:
            Metrics of the round, by name.
        """
        return {}

    def after(self, before: State, updated: State) -> State:
        """Return the state after the update, perhaps changed.

        Args:
            before: the server's state before the update.
            updated: the state that the rule returned.
        """
        return updated

    def shared(self, device: torch.device) -> State:
        """Return what clients receive in addition to the rule's broadcast.

        Args:
            device: the device of the broadcast.
        """
        return {}

    def snapshot(self) -> State:
        """Return what a checkpoint keeps."""
        return {}

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Restore what `snapshot` returned.

        Args:
            snapshot: the snapshot of the server, which contains what `snapshot` returned.
        """


class PersonalParameters(UpdateStep):
    """The server does not change the parameters that clients keep to themselves.

    Args:
        mask: [P], true at these parameters.
    """

    def __init__(self, mask: Tensor):
        self._mask = mask

    def after(self, before: State, updated: State) -> State:
        """Return the state with personal parameters as they were; see `UpdateStep.after`."""
        # Uploads are 0 at personal parameters, so what the rule makes of them means nothing.
        return {**updated, "x": torch.where(self._mask, before["x"], updated["x"])}


class TrainingProblem(UpdateStep):
    """Gives the rule its training problem, `reports.task`, which is made when the rule reads it.

    Args:
        task: the training problem.
        changes_frozen: whether the rule changes frozen parameters of the net.
    """

    def __init__(self, task: ServerTask, changes_frozen: bool):
        self._task = task
        self._changes_frozen = changes_frozen

    def before(self, reports: Reports, model: Broadcast) -> dict[str, float]:
        """Let the rule make its task at the present model; see `UpdateStep.before`."""
        frozen = model.shared["frozen"] if self._changes_frozen else None

        def make_task() -> ServerTask:
            if frozen is not None:
                self._task.model.set_frozen(frozen)
            return self._task.at_round(reports.round, model.shared["x"], model.buffers)

        reports.make_task = make_task
        return {}
