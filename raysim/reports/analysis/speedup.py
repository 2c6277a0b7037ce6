"""Linear speedup: rounds to a target as a function of a parameter, from runs of several lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raysim.errors import ConfigError
from raysim.reports.tracked import TrackedRun
from raysim.spelling import did_you_mean


@dataclass(frozen=True)
class Slope:
    """Slope of log y over log x, with a 95 % interval (Student's t over the seeds)."""

    mean: float
    """Mean of the slopes of the seeds."""

    low: float
    """Lower end of the interval."""

    high: float
    """Upper end of the interval."""

    n: int
    """Number of seeds."""


SpeedupLines = dict[int, dict[float, float]]
"""For each seed, the rounds to the target (y) by the value of the parameter (x)."""


def speedup(
    ends: Iterable[tuple[int, float, int, float]], target: float, say: Callable[[str], None]
) -> SpeedupLines:
    """Return the rounds to the target by seed and x.

    Args:
        ends: (seed, x, T, last value) of each run of T rounds.
        target: Value to reach.
        say: Called with one line for each seed and x that is omitted because the target is not
            between the last values of two of its lengths.

    Returns:
        The interpolated rounds to the target, for the seeds with at least two values of x.

    Raises:
        ConfigError: Two runs have the same seed, x and T, or fewer than two seeds have two values
            of x.
    """
    values: dict[tuple[int, float], dict[int, float]] = {}
    for seed, x, T, value in ends:
        lengths = values.setdefault((seed, x), {})
        if T in lengths:
            raise ConfigError(
                f"runs: two runs have {T} rounds, seed {seed} and the value {x:g}, but differ in "
                "other parameters; pass the runs of a single method"
            )
        lengths[T] = value
    lines: SpeedupLines = {}
    for (seed, x), lengths in sorted(values.items()):
        if (T := crossing(lengths, target)) is None:
            shown = ", ".join(f"{value:.4g} after {n}" for n, value in sorted(lengths.items()))
            say(
                f"left out: seed {seed}, {x:g}: {target:g} is not between the last values of its "
                f"lengths ({shown})"
            )
        else:
            lines.setdefault(seed, {})[x] = T
    lines = {seed: line for seed, line in lines.items() if len(line) > 1}
    if len(lines) < 2:
        raise ConfigError(
            "target (--target): a slope with an interval needs at least two seeds that reach the "
            "target at two values or more; choose another target, or add runs of other lengths"
        )
    return lines


def crossing(points: Mapping[int, float], target: float) -> float | None:
    """Return the number of rounds T at which runs of T rounds reach the target.

    T is interpolated linearly on log axes between the longest run above the target and the next.

    Args:
        points: Last value of a run by its length T in rounds. Values fall with T.
        target: Value to reach.

    Returns:
        The rounds, or None if no run reaches the target or the shortest run already does.
    """
    lengths = sorted(points)
    first_below = next((i for i, T in enumerate(lengths) if points[T] <= target), None)
    if not first_below:
        return None
    shorter = lengths[first_below - 1]
    longer = lengths[first_below]
    if points[longer] <= 0:  # which no log axis has
        return float(longer)
    fraction = math.log(points[shorter] / target) / math.log(points[shorter] / points[longer])
    return math.exp(math.log(shorter) + fraction * math.log(longer / shorter))


def slope(lines: SpeedupLines) -> Slope:
    """Return the slope of log y over log x.

    Args:
        lines: At least two seeds, each with at least two values of x.
    """
    from scipy import stats

    slopes = [
        float(np.polyfit(np.log(list(line)), np.log(list(line.values())), 1)[0])
        for line in lines.values()
    ]
    mean = float(np.mean(slopes))
    n = len(slopes)
    half_width = float(stats.t.ppf(0.975, n - 1) * np.std(slopes, ddof=1) / math.sqrt(n))
    return Slope(mean, mean - half_width, mean + half_width, n)


def ends(runs: Sequence[TrackedRun], over: str) -> list[tuple[int, float, int, float]]:
    """Return (seed, x, T, last value) of each run, the input of `speedup`.

    Args:
        runs: Runs with the history of the metric.
        over: Parameter x, by its full name.

    Raises:
        ConfigError: A run does not have the parameter, or its value is not a number.
    """
    missing = sum(over not in run.params for run in runs)
    if missing:
        raise ConfigError(
            f"over (--over): {missing} runs have no parameter "
            f"'{over}'{did_you_mean(over, runs[0].params)}"
        )
    ended = []
    for run in runs:
        try:
            x = float(run.params[over])
        except ValueError:
            raise ConfigError(
                f"over (--over): the values of {over} are not numbers; choose a numeric parameter"
            ) from None
        T, last = run.history[-1]  # `stop` may have ended it before its `rounds`
        ended.append((int(run.params["seed"]), x, T, last))
    return ended
