"""The order of an experiment's charts in MLflow's pages.

MLflow shows metrics whose names have a prefix first, so accuracy would come last. It also opens a
view that a user shares by a link; such a view is stored as a tag of the experiment. raysim stores
one that begins with accuracy and the losses. MLflow adds the other metrics after them.

Where runs are in the order of their dates, MLflow folds a sweep's trials under the sweep's own run
and draws only the counters of that run. In any other order it draws the trials.
"""

from __future__ import annotations

import json

VIEW_KEY = "raysim"
"""Name of the view in a link: `viewStateShareKey=raysim`."""

VIEW_TAG = f"mlflow.sharedViewState.{VIEW_KEY}"
"""Tag of the experiment that holds the view."""

FIRST_METRICS = ("accuracy", "loss", "train_loss")
"""Metrics that come first, in results and charts. MLflow hides a chart whose metric no run has."""

ORDER = {"orderByKey": "metrics.`accuracy`", "orderByAsc": False}
"""Order of the runs: the largest accuracy first, and a sweep's own run, which has none, last."""

MAX_RUNS_DRAWN = 10
"""Largest number of runs in one chart; MLflow's default."""


def view() -> str:
    """Return the view as MLflow stores it, in JSON."""
    section = "raysim-metrics"
    generated = {"isGenerated": True, "deleted": False}
    charts = [
        {
            "uuid": f"raysim-{metric}",
            "type": "LINE",
            "metricSectionId": section,
            "metricKey": metric,
            "displayName": metric,
            "selectedMetricKeys": [metric],
            "runsCountToCompare": MAX_RUNS_DRAWN,
            "xAxisKey": "step",
            "useGlobalXaxisKey": True,
            "useGlobalLineSmoothing": True,
            **generated,
        }
        for metric in FIRST_METRICS
    ]
    # "Model metrics" is MLflow's name of the metrics without a prefix.
    shown = {"uuid": section, "name": "Model metrics", "display": True, "isReordered": True}
    state = {
        "compareRunSections": [shown | generated],
        "compareRunCharts": charts,
        "isAccordionReordered": True,
    }
    return json.dumps(state | ORDER)
