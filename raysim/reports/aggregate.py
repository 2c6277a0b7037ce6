"""Rows of tables: mean and standard deviation over the seeds of tracked runs, and their ranks.

Reports read only the tracking store and therefore work for runs of other machines and users.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from raysim.errors import ConfigError
from raysim.metrics import lower_is_better
from raysim.reports import published
from raysim.reports.grouping import (
    PARTITION_SEED,
    grouped,
    resolved,
    split_scenario,
    value_of,
    varied,
)
from raysim.reports.tables import MeanStd, Rank, TableRow, sort_key
from raysim.reports.tracked import TrackedRun

Goal = Callable[[Sequence[TrackedRun]], float | None]
"""Function from runs that differ only in their seed to their target (None: no target)."""


def rows(
    runs: Sequence[TrackedRun],
    metric: str = "accuracy",
    *,
    target: float | Goal | None = None,
    group: Sequence[str] | None = None,
    best_of: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[TableRow]:
    """Return the rows of a table.

    Args:
        runs: Runs of any experiments.
        metric: Metric of their histories. `lower_is_better` gives its direction.
        target: Value whose first round is reported, or a function from the runs of a row to it.
        group: Parameters that distinguish rows; `side` is allowed too. Default: all that differ.
        best_of: Parameters; only the row with the best mean of each combination of their values is
            kept.
        say: Called with one line if rows hold runs that differ in more than their seed.

    Returns:
        The rows, sorted by the values of their parameters.

    Raises:
        ConfigError: No run has a parameter of `group` or `best_of`, or `best_of` names one that
            `group` lacks.
    """
    lower = lower_is_better(metric)
    rows_with_params = []
    for named, members in grouped(runs, group, say):
        goal = target(members) if callable(target) else target
        rows_with_params.append((_row(named, members, lower, goal), members[0].params))
    if not best_of:
        return [row for row, _ in rows_with_params]
    keys = resolved(runs, best_of, "best_of (--best-of)")
    if group:
        group_keys = resolved(runs, group, "group (--group)")
        if outside := [key for key in keys if key not in group_keys]:
            raise ConfigError(
                f"best_of (--best-of): '{outside[0]}' is not a parameter of group (--group); "
                "add it there"
            )
    best_rows: dict[tuple, TableRow] = {}
    for row, params in rows_with_params:
        combination = tuple(value_of(params, key) for key in keys)
        best_row = best_rows.get(combination)
        if best_row is None or sort_key(row, lower) < sort_key(best_row, lower):
            best_rows[combination] = row
    return list(best_rows.values())


def _row(
    parameters: dict[str, str], members: list[TrackedRun], lower: bool, target: float | None
) -> TableRow:
    """Return the row of runs that differ only in their seed."""
    runs = [run for run in members if run.history]
    arrivals = [(run, run.arrival(target, lower)) for run in runs if target is not None]
    best = MeanStd.of([run.best(lower) for run in runs])
    last = MeanStd.of([run.settled for run in runs])
    ends = [run.history[-1][0] for run in runs] or [0]
    reasons = Counter(run.unfinished for run in members if run.unfinished)
    first_params = members[0].params
    return TableRow(
        parameters,
        len(members),
        best,
        last,
        MeanStd.of([run.cost(t) for run, t in arrivals if t is not None]),
        (min(ends), max(ends)),
        tuple(run.run_id for run in members),
        {
            key: value
            for key, value in first_params.items()
            if all(run.params.get(key) == value for run in members)
        },
        target,
        ", ".join(f"{count} {reason}" for reason, count in reasons.items()),
        pooled=any(key != PARTITION_SEED for key in varied([run.params for run in members])),
    )


def ranked(
    table: Sequence[TableRow],
    metric: str = "accuracy",
    say: Callable[[str], None] = lambda line: None,
) -> list[TableRow]:
    """Return rows with their ranks by mean best value.

    The parameters of the data, partition, model, schedule and privacy define the scenario of a row;
    its other parameters define the method.

    Args:
        table: Rows, as from `rows`.
        metric: Metric of the rows. `lower_is_better` gives its direction.
        say: Called with one line if the methods do not share all scenarios.
    """
    lower = lower_is_better(metric)
    sort_keys: dict[tuple, list[float]] = {}
    for row in table:
        if row.best:
            sort_keys.setdefault(split_scenario(row.parameters)[0], []).append(sort_key(row, lower))
    places: dict[tuple, list[float]] = {}
    ranks: list[float | None] = []
    for row in table:
        scenario, method = split_scenario(row.parameters)
        if row.best is None:
            ranks.append(None)
            continue
        scenario_keys = sort_keys[scenario]
        row_key = sort_key(row, lower)
        better = sum(key < row_key for key in scenario_keys)
        place = better + (scenario_keys.count(row_key) + 1) / 2
        ranks.append(place)
        places.setdefault(method, []).append(place)
    if len({len(method_places) for method_places in places.values()}) > 1:
        say(
            "mean ranks cover different scenarios because not every method is in all of them; use "
            "--group and --best-of"
        )
    ranked_rows = []
    for row, place in zip(table, ranks, strict=True):
        method_places = places.get(split_scenario(row.parameters)[1], [])
        rank = (
            Rank(place, statistics.fmean(method_places), len(method_places))
            if place is not None
            else None
        )
        ranked_rows.append(replace(row, rank=rank))
    return ranked_rows


def add_published(
    table: Sequence[TableRow],
    printed: Sequence[published.PublishedResult],
    share: float | None = None,
    of: str | None = None,
) -> list[TableRow]:
    """Return rows with the published results of such runs.

    Args:
        table: Rows, as from `rows`.
        printed: Published results, as from `published.read_published`.
        share: Target as a share of the best value of the runs `of`; used only with `of`.
        of: Reference runs as KEY=VALUE. Without them the target of each row is used.
    """
    return [
        replace(
            row,
            printed=published.published_values(
                printed, row.shared, share if of else row.target, of
            ),
        )
        for row in table
    ]
