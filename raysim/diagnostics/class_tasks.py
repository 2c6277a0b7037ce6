"""Accuracy and forgetting of class-incremental tasks (`partition.phases: classes`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.config.sections.phases import ClassTasks
from raysim.data.dataset import label_counts
from raysim.data.partition.phases import class_tasks
from raysim.engine.plan import Probe, ProbedRun


@dataclass
class ClassTaskMetrics(Probe):
    """Accuracies of the global model on the test examples of each task so far, and forgetting.

    With a_j the accuracy on the classes of task j in an evaluation after the task has begun,
    `accuracy` is the mean of the present a_j over these tasks, and `forgetting` the mean over
    earlier tasks j of the largest a_j in earlier evaluations minus the present one (Chaudhry 2018).
    """

    name: ClassVar = "tasks"
    """First part of the names of its metrics."""

    def begin(self, run: ProbedRun) -> None:
        """Read the earlier evaluations. See `Probe.begin`."""
        super().begin(run)
        partition, data = run.plan.config.partition, run.plan.dataset
        phases = partition.phases
        assert isinstance(phases, ClassTasks)
        seed = run.plan.config.seed if partition.seed is None else partition.seed
        self.phase_rounds = phases.rounds
        self.tasks = class_tasks(phases, data.n_classes, seed)
        self.counts = label_counts(data.y_test, data.n_classes)
        self.best: dict[int, float] = {}
        """Largest accuracy on each task so far."""
        for record in run.history:
            self.follow(record)

    def follow(self, record: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation. See `Probe.follow`."""
        if not any(name.startswith("accuracy/class_") for name in record):
            return {}
        phase = (max(int(record["round"]), 1) - 1) // self.phase_rounds
        newest = min(phase, len(self.tasks) - 1)
        now = {}
        for task, classes in enumerate(self.tasks[: newest + 1]):
            tested = [c for c in classes if self.counts[c]]
            if not tested:  # no test example says how good the model is on this task
                continue
            correct = sum(record[f"accuracy/class_{c}"] * self.counts[c] for c in tested)
            now[task] = float(correct / self.counts[tested].sum())
        if not now:
            return {}
        metrics = {f"accuracy_{task}": value for task, value in now.items()}
        metrics["accuracy"] = float(np.mean(list(now.values())))
        lost = [self.best[task] - now[task] for task in now if task in self.best and task < newest]
        if lost:
            metrics["forgetting"] = float(np.mean(lost))
        for task, value in now.items():
            self.best[task] = max(value, self.best.get(task, 0.0))
        return metrics
