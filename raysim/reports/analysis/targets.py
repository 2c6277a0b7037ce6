"""Targets relative to the best value of reference runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from raysim.by_key import by_key
from raysim.errors import ConfigError
from raysim.metrics import is_share
from raysim.reports.analysis.aggregate import Goal, choice_key, rows
from raysim.reports.grouping import SCENARIO_KEY_PREFIXES, varied
from raysim.reports.selecting import with_values
from raysim.reports.tracked import TrackedRun


def why_unreachable(value: float, metric: str) -> str | None:
    """Return why no run can reach a target, with the fix; None if one can.

    Args:
        value: The target.
        metric: Metric of the histories.
    """
    if value <= 1 or not is_share(metric):
        return None
    fix = f"write {value / 100:g} for {value:g} %" if value <= 100 else "give a share"
    return f"{metric} is a share, at most 1, and never {value:g}; {fix}"


def refuse_unreachable(value: float, metric: str) -> None:
    """Refuse a target that no run can reach, such as a percentage.

    Args:
        value: The target.
        metric: Metric of the histories.

    Raises:
        ConfigError: The target is out of reach.
    """
    if why := why_unreachable(value, metric):
        raise ConfigError(f"target (--target): {why}")


def share_of(
    runs: Sequence[TrackedRun],
    reference: str,
    share: float,
    say: Callable[[str], None] = lambda line: None,
    select_by: str = "",
) -> Goal:
    """Return targets relative to the best value of reference runs in the same scenario.

    Xu et al. (2022) report rounds to shares of the accuracy of SGD.

    Args:
        runs: All runs of the table.
        reference: Parameter of the reference runs as KEY=VALUE.
        share: Target as a share of their best value: the mean over seeds of their best row.
        say: Called with one line for each scenario without reference runs.
        select_by: Metric that has chosen the rounds of the runs, and chooses the row; "" for none.

    Returns:
        A function from the runs of a row to their target; None without reference runs.

    Raises:
        ConfigError: `reference` is not KEY=VALUE, or no run has this parameter and value.
    """
    params = attrgetter("params")
    chosen = with_values(runs, [reference], "run", params, "relative_to (--relative-to)")
    keys = [key for key in varied(runs) if key.startswith(SCENARIO_KEY_PREFIXES)]

    def scenario_of(run: TrackedRun) -> tuple:
        return tuple(map(run.params.get, keys))

    goals: dict[tuple, float] = {}
    for scenario, members in by_key(chosen, scenario_of).items():
        table = rows(members, select_by=select_by)
        best = min((row for row in table if row.result), key=choice_key)
        assert best.result is not None
        goals[scenario] = share * best.result.mean
    for scenario in by_key(runs, scenario_of):
        if scenario not in goals:
            say(f"no target where no run has {reference}: {', '.join(filter(None, scenario))}")
    return lambda members: goals.get(scenario_of(members[0]))
