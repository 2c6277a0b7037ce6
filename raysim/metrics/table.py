"""The table of the engine's metrics, and the forms of users' own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

EVERY_ROUND = "every round"
EVALUATION = "where the model is evaluated"
METRICS_KEY = "evaluate.metrics"
MULTILABEL = "evaluate.metrics, task: multilabel"
ASYNCHRONOUS = "every round, kasync and buffered"
TIMED = "every round, unless it is always the number of rounds"
RAY = "every round, executor ray"
NODES = "every round, on more than one node"
CANDIDATES = "every round, server rules with `candidates`"
THEORY = "evaluate.theory"
FORGETTING = "evaluate.forgetting"
CLASS_TASKS = "where the model is evaluated, partition.phases: classes"


@dataclass(frozen=True)
class Metric:
    """A metric, or with a part in braces all metrics of that form.

    Attributes:
        name: name in records and MLflow, such as "accuracy" or "staleness/from_{n}". One letter in
            braces stands for a number, a word for anything.
        unit: unit of the values; "" for none.
        meaning: what the metric measures.
        logged: when it is logged, or the configuration key that switches it on.
    """

    name: str
    unit: str
    meaning: str
    logged: str
    is_count: bool = False
    """Whether a run that does not log it has counted none."""
    users_own: bool = False
    """Whether it stands for the metrics of users' own code."""
    larger_is_better: bool | None = None
    """True if larger values are better, False if smaller ones are; None if it has no direction."""
    accumulates: bool = False
    """True for a metric that grows over the rounds; tables show its last value."""
    rules: frozenset[str] = frozenset()
    """Names of the rules that declare it; empty for a metric of the engine."""

    def matches(self, name: str) -> bool:
        """Return whether a metric of this name is of this form.

        Args:
            name: name of a logged metric, such as "accuracy/client_3" for the form
                "accuracy/client_{i}".
        """
        if "{" not in self.name:
            return name == self.name
        pattern = re.sub(r"\\\{\w\\\}", r"\\d+", re.escape(self.name))
        pattern = re.sub(r"\\\{\w+\\\}", ".+", pattern)
        return re.fullmatch(pattern, name) is not None


VALIDATION = "val_"
"""Beginning of the name of a client's metric on its validation examples."""

UNDEFINED = "undefined_"
"""Beginning of the name of the count of clients for which a metric is not defined."""

CLIENT_FIGURES = {
    "_weighted": "mean, weighted by the clients' numbers of examples",
    "_std": "population standard deviation",
    "_q10": "quantile 10 %, by value",
    "_worst10": "mean of the worst 10 % of the clients",
    "": "mean",
}
"""Figures of a metric over the clients that are evaluated, by the ends of their names."""


def _client_metrics() -> Iterator[Metric]:
    """Yield the metrics of the evaluation of clients; {metric} is one of the task's."""
    for prefix, clients, key in (
        ("clients", "clients that train", ""),
        ("fine_tuned", "the same after fine-tuning", ".fine_tune"),
        ("held_out", "clients that never train", ".held_out"),
        ("held_out_fine_tuned", "the same after fine-tuning", ".held_out, .fine_tune"),
    ):
        yield Metric(
            f"{prefix}/{UNDEFINED}{{metric}}",
            "clients",
            "clients whose metric is NaN; the figures leave them out",
            f"evaluate.clients{key}",
            is_count=True,
        )
        for end, figure in CLIENT_FIGURES.items():
            name, meaning = f"{prefix}/{{metric}}{end}", f"{figure}, over {clients}"
            yield Metric(name, "as the metric", meaning, f"evaluate.clients{key}")
        yield Metric(
            f"{prefix}/{VALIDATION}{{metric}}",
            "as the metric",
            "the same five figures on the clients' validation examples",
            "evaluate.clients, partition.val",
        )
    yield Metric(
        "participation_gap/{metric}",
        "as the metric",
        "clients/{metric} minus held_out/{metric}",
        "evaluate.clients.held_out",
    )


METRICS = (
    Metric("accuracy", "share", "accuracy on the test set", EVALUATION, larger_is_better=True),
    Metric("loss", "nats", "mean cross-entropy on the test set; for other tasks their mean loss",
           EVALUATION, larger_is_better=False),
    Metric("top{k}", "share",
           "share of the test examples whose label is among the k largest logits", METRICS_KEY,
           larger_is_better=True),
    Metric("f1", "share", "macro F1 on the test set: mean over the classes or labels", MULTILABEL,
           larger_is_better=True),
    Metric("f1_micro", "share",
           "micro F1 on the test set: of all classes' or labels' counts together", MULTILABEL,
           larger_is_better=True),
    Metric("auc", "share",
           "area under the ROC curve on the test set, mean over the classes or labels", MULTILABEL,
           larger_is_better=True),
    Metric("subset_accuracy", "share", "share of the test examples of which every label is right",
           "task: multilabel", larger_is_better=True),
    Metric("mse", "", "mean squared error on the test set", "task: regression",
           larger_is_better=False),
    Metric("mae", "", "mean absolute error on the test set", "task: regression",
           larger_is_better=False),
    Metric("r2", "", "coefficient of determination on the test set, mean over the columns",
           "task: regression", larger_is_better=True),
    Metric("perplexity", "", "exp of the mean cross-entropy over the tokens of the test set",
           "task: next_token", larger_is_better=False),
    Metric("accuracy/class_{c}", "share", "accuracy on the test examples of class c",
           "evaluate.per_class, partition.phases: classes"),
    Metric("tasks/accuracy", "share", "mean accuracy over the tasks so far", CLASS_TASKS,
           larger_is_better=True),
    Metric("tasks/accuracy_{task}", "share", "accuracy on the classes of a task", CLASS_TASKS),
    Metric("tasks/forgetting", "share",
           "mean over earlier tasks of the best accuracy before minus the present one", CLASS_TASKS,
           larger_is_better=False),
    Metric("val/accuracy", "share", "accuracy on the held-out examples", "partition.val_fraction"),
    Metric("val/loss", "nats", "mean cross-entropy on the held-out examples",
           "partition.val_fraction"),
    Metric("val/{name}", "as the metric", "metric of the evaluation on the held-out examples",
           "partition.val_fraction, evaluate.metrics"),
    Metric("train_loss", "nats",
           "mean over the clients of their mean loss in the local steps: the learning task's loss, "
           "without terms that a rule adds", EVERY_ROUND, larger_is_better=False),
    Metric("client_loss/q{q}", "nats", "quantile q (in percent) of the clients' mean losses",
           EVERY_ROUND),
    Metric("round", "rounds", "rounds done (in records and history.csv; in MLflow it is the step)",
           EVERY_ROUND),
    Metric("virtual_time", "virtual units", "time on the virtual clock at the end of the round",
           TIMED),
    Metric("bytes_down", "bytes", "bytes that clients have received since the first round; in an "
           "asynchronous run those whose tasks have ended", EVERY_ROUND),
    Metric("bytes_up", "bytes", "bytes of used updates since the first round", EVERY_ROUND),
    Metric("clients/used", "clients", "clients whose updates were used", EVERY_ROUND),
    Metric("clients/never_seen", "clients", "clients with data that have not taken part yet",
           EVERY_ROUND),
    Metric("clients/failed", "clients", "clients dropped for an exception or a non-finite update",
           "faults.on_client_error: drop", is_count=True),
    Metric("clients/dropped_out", "clients", "clients that dropped out of their task",
           "schedule.client_dropout", is_count=True),
    Metric("clients/missed_deadline", "clients", "clients that were slower than the deadline",
           "schedule.deadline", is_count=True),
    Metric("clients/discarded_stale", "clients", "updates discarded for their staleness",
           "schedule.max_staleness", is_count=True),
    Metric("clients/candidates", "clients",
           "clients whose loss was measured before the round was selected", CANDIDATES),
    Metric("clients/evaluated", "clients", "clients that were evaluated", "evaluate.clients"),
    Metric("clients/without_test", "clients",
           "clients with data that have no test example, and are left out of the test's metrics",
           "evaluate.clients", is_count=True),
    Metric("clients/without_val", "clients",
           "clients with data that have no validation example, and are left out of those metrics",
           "evaluate.clients, partition.val", is_count=True),
    Metric("clients/evaluation_failed", "clients", "clients whose evaluation failed",
           "evaluate.clients, faults.on_client_error: drop", is_count=True),
    *_client_metrics(),
    Metric("staleness/mean", "rounds", "mean staleness of the updates", ASYNCHRONOUS),
    Metric("staleness/max", "rounds", "largest staleness of the updates", ASYNCHRONOUS),
    Metric("staleness/from_{n}", "updates",
           "histogram: updates of staleness n and more, below the next bin", ASYNCHRONOUS),
    Metric("privacy/epsilon", "",
           "privacy spent at privacy.delta: by the client with most passes, or of all clients",
           "privacy", larger_is_better=False, accumulates=True),
    Metric("privacy/clip_norm", "", "largest norm of a client's update", "privacy.unit: client"),
    Metric("privacy/clipped_share", "",
           "share of the clients whose updates were clipped, without noise",
           "privacy.unit: client"),
    Metric("server/uploads", "updates", "updates that the server rule received", EVERY_ROUND),
    Metric("server/short_sums", "sums",
           "sums of updates that cancel so far that fixed point is coarser than float32",
           "rounds in which there are some", is_count=True),
    Metric("server/weights_entropy", "nats", "entropy of the updates' weights", EVERY_ROUND),
    Metric("theory/f", "nats", "objective at the model's parameters", THEORY),
    Metric("theory/grad_norm2", "", "squared norm of the objective's gradient", THEORY),
    Metric("theory/grad_norm2_mean", "", "mean of it over the evaluations so far", THEORY),
    Metric("theory/rho2_mean", "",
           "mean squared distance of the clients' gradients from their mean", THEORY),
    Metric("theory/rho2_max", "", "largest squared distance of a client's gradient from the mean",
           THEORY),
    Metric("theory/curvature", "", "largest curvature of a client's objective at these parameters",
           THEORY),
    Metric("theory/L", "", "smoothness in use: evaluate.theory.L, or the largest curvature so far",
           THEORY),
    Metric("theory/eps_{kind}", "", "errors of the local and the global step in Theorem 1", THEORY),
    Metric("theory/condition_{i}", "share",
           "condition i of Theorem 1, as a share of what it allows", THEORY),
    Metric("theory/bound", "", "bound of Theorem 1 on the mean squared gradient norm so far",
           THEORY),
    Metric("forgetting/before", "nats",
           "loss of last round's clients on their data, before this round", FORGETTING),
    Metric("forgetting/after", "nats", "the same after this round's clients have trained",
           FORGETTING),
    Metric("forgetting/increase", "nats", "mean increase of that loss", FORGETTING),
    Metric("forgetting/increase_q{q}", "nats", "quantile q (in percent) of that increase",
           FORGETTING),
    Metric("forgetting/fisher_correlation", "",
           "correlation of the Fisher information of pseudo and past data",
           "evaluate.forgetting.fisher"),
    Metric("system/round_seconds", "s",
           "wall-clock time from the end of one round's training to that of the next", EVERY_ROUND),
    Metric("system/clients_per_second", "clients/s", "clients trained a second of wall-clock time",
           EVERY_ROUND),
    Metric("system/uncaptured_steps", "steps",
           "local steps on lanes that could not be captured as CUDA graphs", "where there are any"),
    Metric("system/worker_utilization", "share", "part of the round in which workers train", RAY),
    Metric("system/train_seconds", "s", "longest worker's training time; of one process its sum",
           EVERY_ROUND),
    Metric("system/overhead_seconds", "s",
           "system/round_seconds that are neither training nor evaluation", EVERY_ROUND),
    Metric("system/client_evaluation_seconds", "s",
           "time of the evaluation of clients, summed over workers", "evaluate.clients"),
    Metric("system/candidate_evaluation_seconds", "s",
           "time of the evaluation of candidates, summed over workers", CANDIDATES),
    Metric("system/client_state_bytes", "bytes", "memory of what clients keep", EVERY_ROUND),
    Metric("system/client_state_bytes_on_disk", "bytes", "disk space of what clients keep",
           EVERY_ROUND),
    Metric("system/server_state_bytes", "bytes", "memory of the server's state", EVERY_ROUND),
    Metric("system/versions_in_memory", "versions", "versions of the model that are kept",
           ASYNCHRONOUS),
    Metric("system/versions_bytes", "bytes", "memory of the kept versions", ASYNCHRONOUS),
    Metric("system/actors_failed", "processes", "actors that died or were killed, since the start",
           RAY),
    Metric("system/blocks_retried", "blocks", "blocks that were trained again, since the start",
           RAY),
    Metric("system/server_restarts", "processes", "new servers, since the start", RAY),
    Metric("system/checkpoints_failed", "checkpoints",
           "checkpoints that could not be written, since the start", "from the first one on",
           is_count=True),
    Metric("system/network/bytes_down", "bytes",
           "bytes of the model to other nodes than the server's", NODES),
    Metric("system/network/bytes_up", "bytes",
           "bytes of updates from other nodes than the server's", NODES),
    Metric("system/node/{node}/clients", "clients",
           "clients trained there (node; node/gpuN; least, most)", NODES),
    Metric("system/node/{node}/busy_seconds", "s", "training time of its workers", NODES),
    Metric("system/node/{node}/bytes_up", "bytes", "bytes of updates that left the node", NODES),
    Metric("system/gpu/{end}/{figure}", "", "least and most of these figures over many GPUs",
           "on more than 16 GPUs"),
    Metric("client/{name}", "",
           "mean (name_max: maximum) over clients of what a client rule logs by task.log",
           EVERY_ROUND, users_own=True),
    Metric("server/{name}", "", "what a server rule logs", EVERY_ROUND, users_own=True),
    Metric("system/server_{name}_bytes", "bytes",
           "size that a server rule logs under a name that ends in _bytes", EVERY_ROUND,
           users_own=True),
    Metric("{probe}/{name}", "", "what a probe measures", "evaluate.probes", users_own=True),
    Metric("best_{metric}", "as the metric",
           "best value over all rounds, of metrics with a direction (those of clients/ and val/ "
           "only as evaluate.best); of a sweep: over its trials",
           "at the end of a run"),
    Metric("{name}", "", "what a metric of yours measures", METRICS_KEY, users_own=True),
)  # fmt: skip
"""The metrics of the engine, and the forms of users' own; methods declare theirs (`declare`)."""
