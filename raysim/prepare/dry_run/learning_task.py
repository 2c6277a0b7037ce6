"""Dry run of a user's loss and metrics: the evaluation of a few examples before a run starts."""

from __future__ import annotations

import numpy as np

from raysim.data import Examples
from raysim.engine.plan import SAMPLE_EXAMPLES, Plan
from raysim.errors import ConfigError
from raysim.models.flat import BoundModel
from raysim.prepare.configured_task import METRICS_KEY
from raysim.rules.errors.keyed_numbers import RANDOM_NUMBERS_PAGE, keyed_numbers_only
from raysim.rules.tasks.function_metric import FunctionMetric
from raysim.rules.tasks.learning_task import TaskMetric
from raysim.rules.tasks.shipped_tasks import TASKS
from raysim.system.global_generators import generators_kept
from raysim.system.signals import reraise_stop
from raysim.training.evaluation import measure

MISTAKES = (NameError, AttributeError, TypeError, NotImplementedError)
"""Errors of metrics that do not depend on the examples."""


def dry_run_task(plan: Plan) -> None:
    """Check that a user's loss and metrics use no global random generator, and keep nothing.

    Mistakes in the code of a metric count too. Other errors are left to the first evaluation: a
    metric may need more than a few examples.

    Args:
        plan: the plan of the run.

    Raises:
        ConfigError: a loss or a metric draws from one, or has another value the second time, or a
            metric has a mistake; the message names it and its key.
    """
    checked: dict[str, tuple[TaskMetric, ...]] = {
        f"evaluate.metrics: '{metric.name}'": (metric,)
        for metric in plan.metrics
        if isinstance(metric, FunctionMetric) or not type(metric).__module__.startswith("raysim.")
    }
    if type(plan.learning_task) not in TASKS.values():
        checked = {f"task.name: loss of '{plan.learning_task.name}'": (), **checked}
    if not checked:
        return
    net, buffers = BoundModel.at_start(plan.idle_model)
    data = plan.dataset
    x, y = data.x_test[:SAMPLE_EXAMPLES], data.y_test[:SAMPLE_EXAMPLES]
    examples = Examples(x, y, data.scale, data.shift, dtype=net.model.dtype)
    for place, metrics in checked.items():

        def unkeyed(drawn: str, place: str = place) -> ConfigError:
            return ConfigError(
                f"{place} {drawn}, such as those of np.random.default_rng(0) {RANDOM_NUMBERS_PAGE}"
            )

        def evaluate(metrics: tuple[TaskMetric, ...] = metrics) -> dict[str, float]:
            try:
                return measure(net, buffers, examples, len(y), metrics)
            except BaseException as error:
                reraise_stop(error)
                if isinstance(error.__cause__, MISTAKES):
                    raise ConfigError(f"{METRICS_KEY}: {error}") from None
                return {}

        # Packages that the first call imports may draw numbers, such as scikit-learn.
        with generators_kept():
            first = evaluate()
        with keyed_numbers_only(unkeyed):
            second = evaluate()
        for name in first.keys() & second.keys():
            if not np.array_equal(first[name], second[name], equal_nan=True):
                raise ConfigError(
                    f"{place} is {first[name]:g} and then {second[name]:g} for the same examples: "
                    "it keeps something from one call to the next; compute it from its arguments"
                )
