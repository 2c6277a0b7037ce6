"""`evaluate`, `stop` and `record_updates`: what is measured, ends a run early, and is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from raysim.config.identity import Identity
from raysim.config.sections.base import (
    Named,
    Positive,
    PositiveScheduled,
    Section,
    ShortForm,
    as_list,
    is_due,
    named,
)

ROUND_METRICS = (
    "train_loss",
    "clients/used",
    "clients/never_seen",
    "clients/failed",
    "clients/dropped_out",
    "clients/missed_deadline",
    "clients/discarded_stale",
    "bytes_up",
    "bytes_down",
    "system/clients_per_second",
    "system/round_seconds",
)
"""Metrics of rounds, not of evaluations; others with a / in their name depend on the method."""

OF_CLIENTS = ("clients", "held_out", "fine_tuned", "held_out_fine_tuned", "participation_gap")
"""First parts of the names of metrics that evaluations of clients log."""


class Forgetting(Section):
    """Measurement of what clients forget of the previous round's clients' data (Xu 2022, B.3)."""

    every: int = Field(default=1, ge=1)
    """Rounds between measurements."""
    fisher: bool = False
    """Whether to correlate the empirical Fisher information of pseudo data with that of past
    clients' data."""
    window: int = Field(default=10, ge=1)
    """Past rounds whose clients' data count for `fisher`."""


class Theory(Section):
    """Full gradients of the clients, and the terms of Theorem 1 of Luo 2023."""

    every: int = Field(default=10, ge=1)
    """Rounds between measurements; the last round is always measured."""
    sample: int | None = Field(default=None, ge=1)
    """Number of clients whose gradients are computed, drawn once; null: all."""
    L: Positive | None = None
    """Smoothness constant; null: estimated."""
    f_star: float = 0.0
    """A lower bound of the training loss."""


class FineTune(Section):
    """Fine-tuning on a client's own training examples, by plain SGD.

    It starts from the model that the client would use: the global one, unless parts of it or the
    method's `evaluated` are the client's own.
    """

    steps: int = Field(default=5, ge=1)
    """Local steps."""
    lr: PositiveScheduled | None = None
    """Step size, or a schedule [[first round, value], ...]; null: `local.lr`."""
    batch_size: Annotated[int, Field(ge=1)] | Literal["full"] | None = None
    """Examples in a mini-batch, or `full`; null: `local.batch_size`."""


class EvaluateClients(Section):
    """Evaluation of each client's model on the client's own test examples (`partition.test`)."""

    every: int = Field(default=10, ge=1)
    """Rounds between evaluations; the last round is always evaluated."""
    sample: int | None = Field(default=None, ge=1)
    """Largest number of clients that are evaluated, of those that train and of those held out; the
    same ones each time; null: all."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Share of the clients that never train. They show how the model serves new clients."""
    exclude: Annotated[tuple[str, ...], ShortForm(as_list), Identity.UNLESS_DEFAULT] = ()
    """Names of `groups` whose clients are not evaluated, such as that of attackers."""
    fine_tune: FineTune | None = None
    """Evaluate also after fine-tuning; null: not."""

    def due(self, rounds_done: int, rounds: int) -> bool:
        """Return whether clients are evaluated after `rounds_done` of `rounds` rounds.

        Args:
            rounds_done: number of completed rounds.
            rounds: number of rounds of the run.
        """
        return is_due(self.every, rounds_done, rounds)


class BestBy(Section):
    """The metric that determines which of two models is better."""

    metric: str
    """Name of a metric that evaluations log, for example accuracy or val/loss."""
    mode: Literal["max", "min"]
    """`max` if larger values are better, `min` if smaller ones are."""

    @property
    def select(self) -> Callable[..., Any]:
        """Builtin function that returns the best of several values: `max` or `min`."""
        return max if self.mode == "max" else min


DEFAULT_BEST = BestBy(metric="accuracy", mode="max")
"""The metric of runs of classification, and of configurations that were not resolved."""


class Evaluate(Section):
    """Evaluation of the global model, and probes."""

    every: int = Field(default=1, ge=0)
    """Rounds between evaluations on the test set. With 1 or more, the last round is always
    evaluated. 0: never."""
    batch_size: int = Field(default=1000, ge=1)
    """Examples in a batch of the evaluation."""
    metrics: Annotated[tuple[str, ...], ShortForm(as_list)] | None = None
    """Metrics on test and held-out examples: names that the task knows, path.py:Class, or
    path.py:function of outputs and targets; null: the task's own. The first one selects the best
    model, unless it is a function that does not say whether larger values are better."""
    best: BestBy | None = None
    """Metric that selects the best model; null: the first of `metrics`, with `every: 0` the mean of
    it over the evaluated clients."""
    per_class: bool = False
    """Whether to log the accuracy on each class (`task: classification`)."""
    clients: EvaluateClients | None = None
    """Evaluate clients on their own test examples; null: not."""
    forgetting: Forgetting | None = None
    """Measure forgetting; costs a pass over the cohort's data for each client."""
    theory: Theory | None = None
    """Measure the theorem's terms; costs a pass over all clients' data."""
    probes: Annotated[tuple[Annotated[Named, ShortForm(named)], ...], ShortForm(as_list)] = ()
    """Your own probes: path.py:Class, or a mapping with that `name` and its parameters."""

    @property
    def best_by(self) -> BestBy:
        """Metric that selects the best model, also if the configuration is not resolved."""
        return self.best or DEFAULT_BEST

    def named_probes(self) -> dict[str, Named]:
        """Return the user's probes by their keys."""
        return {f"evaluate.probes.{i}": probe for i, probe in enumerate(self.probes)}

    def due(self, rounds_done: int, rounds: int) -> bool:
        """Return whether the test set is evaluated after `rounds_done` of `rounds` rounds.

        Args:
            rounds_done: number of completed rounds.
            rounds: number of rounds of the run.
        """
        return is_due(self.every, rounds_done, rounds)


def section_that_measures(
    evaluate: Evaluate, metric: str
) -> EvaluateClients | Theory | Forgetting | None:
    """Return the section with the rounds and settings of a metric; None for any other metric.

    Args:
        evaluate: the section `evaluate`.
        metric: name of the metric.
    """
    if metric in ROUND_METRICS:
        return None
    sections = dict.fromkeys(OF_CLIENTS, evaluate.clients)
    measured = {**sections, "theory": evaluate.theory, "forgetting": evaluate.forgetting}
    return measured.get(metric.partition("/")[0])


class OwnMetric(Section):
    """Unit and direction of one of your own metrics. Reports read them here, not in your files."""

    unit: str = ""
    """Unit of its values, such as share; empty for none."""
    larger_is_better: bool | None = None
    """True if larger values are better, false if smaller ones are; null: no direction."""


class Stop(Section):
    """Early stopping: the metric whose values end the run before `rounds`.

    Only evaluations that are recorded count, so the run ends after the same round on any number of
    workers and after a resume. It ends as finished. The model before training counts too.
    """

    metric: str | None = None
    """Name of a metric that is logged, for example accuracy, val/loss or clients/accuracy; null:
    that of `evaluate.best`."""
    mode: Literal["max", "min"] | None = None
    """Direction of the metric; null: that of `evaluate.best`, or of the metric's kind: losses,
    errors and perplexity are minimized."""
    patience: int | None = Field(default=None, ge=1)
    """Number of evaluations in a row without improvement after which the run ends; null: any."""
    min_delta: float = Field(default=0.0, ge=0)
    """A value is an improvement if it is better than the best one so far by more than this."""
    target: float | None = None
    """Value at which the run ends as soon as it is reached; null: none."""

    @model_validator(mode="after")
    def _can_stop(self) -> Stop:
        """Refuse a section that could never end a run."""
        if self.patience is None and self.target is None:
            raise ValueError("never ends a run; set patience, target, or both")
        return self


class RecordUpdates(Section):
    """Recorded updates: what an honest but curious server sees, for `raysim attack`."""

    rounds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0,)
    """Rounds that are recorded, each as the number of rounds before it: 0 is the first."""
    clients: int = Field(default=8, ge=1)
    """Number of clients of each cohort that are recorded, with the model they started from and
    their images."""
