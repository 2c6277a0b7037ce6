"""Share of the variance of results that each parameter explains.

The share is ε² (Kelley 1935) of a one-way analysis of variance of n results in k groups:

    ε² = (SS_between - (k - 1) SS_within / (n - k)) / SS_total

This is the adjusted R². For a parameter without effect it is 0 on average, so it can be negative.
A numeric parameter with more than five values is split into three groups: the lowest, the middle
and the highest third of its values. "All together" groups the runs by all parameters, so the runs
of a group differ only in their seed. The variance that remains within these groups is due to the
seeds. The variance that all parameters together explain, and no parameter explains alone, is due to
interactions, or to differences within a third.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import pandas as pd

from raysim.errors import ConfigError
from raysim.metrics import is_share
from raysim.reports.analysis.aggregate import result_of_run
from raysim.reports.analysis.plots import Cloud
from raysim.reports.grouping import group_keys, grouped
from raysim.reports.table_row import short
from raysim.reports.tables.results_table import as_markdown
from raysim.reports.tracked import Statistic, TrackedRun

MAX_UNGROUPED_VALUES = 5
"""Largest number of distinct values for which each value of a numeric parameter is a group."""


@dataclass(frozen=True)
class Effect:
    """Effect of a parameter on the results."""

    name: str
    """Short name of the parameter, or "all together"."""

    share: float
    """Share ε² of the variance of the results that the parameter explains."""

    points: Sequence[tuple[float | str, float]] = ()
    """(value of the parameter, result) of each run; empty for all parameters together."""

    means: Sequence[tuple[str, float]] = ()
    """(group of values, mean result), by ascending values; empty for all parameters together."""


def explained_share(results: Sequence[float], groups: Sequence[Hashable]) -> float:
    """Return the share ε² of the variance of results that their groups explain.

    Args:
        results: Result of each run.
        groups: Group of each run, in the order of `results`.

    Returns:
        The share: NaN if every group has a single result, 0 if all results are equal.
    """
    values = pd.Series(results, dtype=float)
    by_group: Any = values.groupby(pd.factorize(pd.Series(groups))[0])
    n_groups = by_group.ngroups
    if n_groups == len(values):
        return math.nan
    total = ((values - fmean(results)) ** 2).sum()
    within = ((values - by_group.transform(fmean)) ** 2).sum()
    if not total:
        return 0.0
    explained = total - within - (n_groups - 1) * within / (len(values) - n_groups)
    return float(explained / total)


def effects(runs: Sequence[TrackedRun], keys: Sequence[str], statistic: Statistic) -> list[Effect]:
    """Return the effects of parameters, largest share first.

    Args:
        runs: Runs to compare. Runs that lack a parameter are skipped.
        keys: Parameters to compare; if empty, all that differ.
        statistic: Which value of a run is its result.

    Returns:
        An effect for each parameter. The last one is that of all parameters together; it is absent
        if no two runs differ only in their seed.

    Raises:
        ConfigError: No run has a parameter, or fewer than three runs have all parameters.
    """
    records = []
    for values, members in grouped(runs, group_keys(runs, keys)):
        records += [{**values, "": result_of_run(run, statistic)} for run in members]
    table = pd.DataFrame(records)
    names = [name for name in table if name]
    table = table.dropna(subset=names)
    results = table[""].tolist()
    if not names or len(results) < 3:
        raise ConfigError(
            f"keys (--keys): only {len(results)} runs have all compared parameters "
            f"({', '.join(map(short, names)) or 'none differs'}); choose parameters that at least "
            "three runs have"
        )
    ordered = [_effect(name, table[name].tolist(), results) for name in names]
    ordered.sort(key=lambda effect: -effect.share)
    together = explained_share(results, list(table[names].itertuples(index=False, name=None)))
    return ordered if math.isnan(together) else [*ordered, Effect("all together", together)]


def _effect(name: str, texts: Sequence[str], results: Sequence[float]) -> Effect:
    """Return the effect of a parameter from its value, as text, and the result in each run."""
    numbers = _as_numbers(texts)
    groups = _thirds(numbers) if len(set(numbers)) > MAX_UNGROUPED_VALUES else list(texts)
    table = pd.DataFrame({"value": numbers or list(texts), "group": groups, "result": results})
    points = list(table[["value", "result"]].itertuples(index=False, name=None))
    if numbers:
        table = table.sort_values("value")
    means: Any = table.groupby("group", sort=False)["result"].agg(fmean)
    return Effect(short(name), explained_share(results, groups), points, list(means.items()))


def _as_numbers(texts: Sequence[str]) -> list[float]:
    """Return texts as numbers, or an empty list if any text is not a number."""
    try:
        return [float(text) for text in texts]
    except ValueError:
        return []


def _thirds(numbers: Sequence[float]) -> list[str]:
    """Return for each number the label of its third: "smallest to largest"."""
    order = sorted(set(numbers))
    cuts = [round(i * len(order) / 3) for i in range(4)]
    spans: dict[float, str] = {}
    for first, end in pairwise(cuts):
        third = order[first:end]
        spans |= dict.fromkeys(third, f"{third[0]:g} to {third[-1]:g}")
    return [spans[number] for number in numbers]


def clouds(effects: Sequence[Effect]) -> dict[str, Cloud]:
    """Return the points of effects as arguments of `plots.plot_scatter`.

    Args:
        effects: Effects, as from `effects`.

    Returns:
        The points of each effect that has points, by the title of its panel.
    """
    clouds = {}
    for effect in effects:
        if effect.points:
            points = [(*point, True) for point in effect.points]
            clouds[f"{effect.name} ({effect.share:.0%})"] = Cloud(points, False)
    return clouds


def effects_markdown(effects: Sequence[Effect], metric: str) -> str:
    """Return effects as a Markdown table.

    Args:
        effects: Effects, as from `effects`.
        metric: Metric of the results; accuracies are shown in percent.
    """
    scale, percent = (100, " %") if is_share(metric) else (1, "")
    texts = []
    for effect in effects:
        means = "; ".join(f"{group}: {scale * mean:.4g}" for group, mean in effect.means)
        texts.append((effect.name, f"{effect.share:.0%}", means))
    head = ["parameter", "share of the variance", f"mean {metric}{percent}, by its values"]
    return as_markdown(pd.DataFrame(texts, columns=head))
