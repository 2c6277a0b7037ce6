"""Verdicts on the claims of a configuration (`claim_section`) by its runs.

A statistic is best (unless given), last, first, mean or last10, of what was evaluated, or the
rounds to a value. Sides are compared seed by seed. A target that was not reached in T rounds is
reached in T + 1 or later, so such a seed may speak for a claim, against it, or not at all. Of runs
of a side that differ in more than their seed the mean counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from raysim.by_key import by_key
from raysim.errors import ConfigError
from raysim.metrics import is_share
from raysim.reports import grouping, selecting
from raysim.reports.analysis.aggregate import direction, result_of_run
from raysim.reports.analysis.comparisons import mean_of, paired_difference
from raysim.reports.claims.claim_section import Claim, ClaimSide, RoundsTo
from raysim.reports.published import same_value
from raysim.reports.table_row import MeanStd
from raysim.reports.tables.cell_texts import MISSING_TEXT, difference_text, number, rounded
from raysim.reports.tables.results_table import as_markdown
from raysim.reports.tracked import MetricMissing, TrackedRun

MARGIN_ROUNDING = 1e-9
"""Share of a margin by which a difference may miss it: differences are rounded."""

CONFIRMED, REFUTED, OPEN = "confirmed", "not confirmed", "undecided"

RunsOf = Callable[[str], Sequence[TrackedRun]]
"""The runs that have a metric."""
Span = tuple[float, float]
"""Bounds of a number; equal if the number is known."""


@dataclass(frozen=True)
class ClaimResult:
    """Result of a claim, possibly for one value of its `each`."""

    claim: Claim
    """The claim."""
    named: Mapping[str, str]
    """Values of the keys in the claim's `each`."""
    left: str
    """Result of the left side, in words."""
    right: str
    """Result of the right side, in words."""
    difference: str
    """Left minus right over the seeds of both, with the 95 % interval of its mean, in words."""
    seeds: tuple[int, int]
    """Number of seeds for and against the claim."""
    verdict: str
    """The verdict with its reason."""


def check_claims(claims: Sequence[Claim], runs_of: RunsOf) -> list[ClaimResult]:
    """Compare claims with runs.

    Args:
        claims: Claims of a paper.
        runs_of: Function from a metric to the runs that have it. It raises `MetricMissing` if
            none has.

    Returns:
        One or more results for each claim, in the order of the claims.

    Raises:
        ConfigError: a claim names a parameter or metric that no run has.
    """
    lines = []
    for i, claim in enumerate(claims):
        lines += _lines(claim, runs_of, f"claims.{i}")
    return lines


def _lines(claim: Claim, runs_of: RunsOf, place: str) -> list[ClaimResult]:
    """Return the results of a claim: one for each combination of values of its `each`."""
    runs_of_sides: list[Sequence[TrackedRun]] = []
    pool: list[TrackedRun] = []
    for name, side in claim.sides.items():
        try:
            runs = runs_of(side.metric)
        except MetricMissing as error:
            raise ConfigError(f"{place}.{name}.metric: {error}") from None
        pool += runs
        runs_of_sides.append(selecting.having(runs, side.where, f"{place}.{name}.where"))
    left = runs_of_sides[0]
    right = runs_of_sides[-1]  # a number is compared with the runs of the left side alone
    keys = selecting.resolved(pool, claim.each, f"{place}.each")
    right_keys = _keys_of_right_side(claim, pool, right, keys, place)
    compared = [*left, *right] if right_keys == keys else left
    if not keys or not compared:
        return [_line(claim, {}, runs_of_sides)]
    lines = []
    for named in _values_of_lines(claim, pool, compared, keys):
        runs_of_line = [_runs_with(left, named, keys), _runs_with(right, named, right_keys)]
        lines.append(_line(claim, named, runs_of_line[: len(claim.sides)]))
    return lines


def _keys_of_right_side(
    claim: Claim,
    pool: Sequence[TrackedRun],
    right: Sequence[TrackedRun],
    keys: Sequence[str],
    place: str,
) -> list[str]:
    """Return the keys of `each` whose value the right side takes from the line.

    A right side that sets a value of its own, or has no such parameter, is the same in every line.
    """
    own = [key for key, values in claim.right.where.items() if claim.left.where.get(key) != values]
    own_keys = selecting.resolved(pool, own, f"{place}.right.where")
    right_keys = []
    for key in keys:
        has_key = any(selecting.value_of(run.params, key) for run in right)
        if has_key and key not in own_keys:
            right_keys.append(key)
    return right_keys


def _values_of_lines(
    claim: Claim, pool: Sequence[TrackedRun], compared: Sequence[TrackedRun], keys: Sequence[str]
) -> list[dict[str, str]]:
    """Return the values of the keys in each line: those of the runs, and those the left side lists.

    A listed value without a run has a line too, so that the report shows what is missing. This
    needs groups of the same keys.
    """
    known = [named for named, _ in grouping.divided(compared, keys)]
    if any(len(named) < len(keys) for named in known):
        return known
    full_names = selecting.resolved(pool, claim.left.where, "where")
    listed: dict[str, Sequence[str]] = {}
    for key, values in zip(full_names, claim.left.where.values(), strict=True):
        if key in keys and len(values) > 1:
            listed[key] = values
    lines = list(known)
    for named in known:
        for values in itertools.product(*listed.values()):
            expected = {**named, **dict(zip(listed, values, strict=True))}
            if not any(_same(expected, other) for other in lines):
                lines.append(expected)
    place = grouping.order_of_values(compared)
    return sorted(lines, key=lambda named: [place(key, named[key]) for key in keys])


def _same(named: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return all(same_value(value, other[key]) for key, value in named.items())


def _runs_with(
    runs: Sequence[TrackedRun], named: Mapping[str, str], keys: Sequence[str]
) -> list[TrackedRun]:
    """Return the runs with the values of a line."""
    kept = list(runs)
    for key in keys:
        kept = [run for run in kept if selecting.value_of(run.params, key) == named.get(key)]
    return kept


def _line(
    claim: Claim, named: Mapping[str, str], runs_of_sides: Sequence[Sequence[TrackedRun]]
) -> ClaimResult:
    measured: list[dict[str, Span]] = []
    texts: list[str] = []
    wheres: list[Mapping[str, Sequence[str]]] = []
    for side, runs in zip(claim.sides.values(), runs_of_sides, strict=True):
        measured.append(_measured(runs, side))
        texts.append(_text(measured[-1], side))
        wheres.append(_narrowed(side.where, named))
    if claim.right.value is not None:
        span = (claim.right.value, claim.right.value)
        measured.append(dict.fromkeys(measured[0], span))
        texts.append(_text({"": span}, claim.right))
    seeds = sorted(measured[0].keys() & measured[1].keys())
    apart = [_minus(measured[0][seed], measured[1][seed]) for seed in seeds]
    votes = [_holds(claim, span) for span in apart]
    count = (votes.count(True), votes.count(False))
    missing = _missing_runs(runs_of_sides, wheres)
    verdict = f"{OPEN} ({missing})" if missing else _verdict(claim, apart, votes)
    left, right = texts
    difference = _difference_text(claim, apart)
    return ClaimResult(claim, named, left, right, difference, count, verdict)


def _name_of_side(line: ClaimResult, where: Mapping[str, Sequence[str]]) -> str:
    """Return the values by which a side differs from the other one, such as "fedavg"; or ""."""
    left, right = line.claim.left.where, line.claim.right.where
    named = _narrowed(where, line.named)
    return _label({key: named[key] for key in named if left.get(key) != right.get(key)})


def _label(where: Mapping[str, Sequence[str]]) -> str:
    """Return accepted values as a label: "fedavg or fedprox, local.lr 0.1"."""
    return grouping.label({key: " or ".join(map(str, values)) for key, values in where.items()})


def _difference_text(claim: Claim, apart: Sequence[Span]) -> str:
    """Return left minus right over seeds in words; only of seeds that all have a value."""
    exact = [low for low, high in apart if low == high]
    if not exact or len(exact) < len(apart):
        return MISSING_TEXT
    difference = paired_difference(exact, [0.0] * len(exact))
    return difference_text(difference, _is_percent(claim.left))


def _verdict(claim: Claim, apart: Sequence[Span], votes: Sequence[bool | None]) -> str:
    one_seed = " (one seed)" if len(votes) == 1 else ""
    if all(votes):
        return CONFIRMED + one_seed
    if _holds(claim, _mean(apart)) is False:
        return REFUTED + one_seed
    if False in votes:
        return f"{OPEN} (seeds disagree)"
    return f"{OPEN} ({'not every seed' if True in votes else 'no run'} reached the target)"


def _narrowed(
    where: Mapping[str, Sequence[str]], named: Mapping[str, str]
) -> dict[str, Sequence[str]]:
    """Return the values of a side in one line: of a key of the line only its value there."""
    narrowed = {}
    for key, values in where.items():
        value = named.get(key, named.get(f"{key}.name"))
        narrowed[key] = [value] if value in values else values
    return narrowed


def _missing_runs(
    runs_of_sides: Sequence[Sequence[TrackedRun]], wheres: Sequence[Mapping[str, Sequence[str]]]
) -> str:
    """Return which runs of these sides are missing: a whole side, or a seed of one."""
    seeds = set(map(_seed, itertools.chain.from_iterable(runs_of_sides)))
    for runs, where in zip(runs_of_sides, wheres, strict=True):
        name = _label(where) or "any kind"
        if not runs:
            return f"no run of {name}"
        for named, members in _methods(runs):
            lacking = seeds - set(map(_seed, members))
            if lacking:
                which = ", ".join(filter(None, [name, grouping.label(named)]))
                return f"no run of {which} with seed {', '.join(sorted(lacking))}"
    return ""


def _methods(runs: Sequence[TrackedRun]) -> list[tuple[dict[str, str], list[TrackedRun]]]:
    """Return the runs in groups that differ only in their seeds, that of the partition included."""
    keys = [key for key in grouping.varied(runs) if key != selecting.PARTITION_SEED]
    return grouping.divided(runs, keys)


def _measured(runs: Iterable[TrackedRun], side: ClaimSide) -> dict[str, Span]:
    """Return a side's value for each seed, the mean over its runs."""
    of_seeds = by_key(runs, _seed)
    return {seed: _mean([_reached(run, side) for run in of]) for seed, of in of_seeds.items()}


def _mean(spans: Sequence[Span]) -> Span:
    lows, highs = zip(*spans, strict=True)
    return mean_of(lows), mean_of(highs)


def _reached(run: TrackedRun, side: ClaimSide) -> Span:
    if isinstance(side.statistic, RoundsTo):
        arrival = run.arrival(side.statistic.rounds_to, direction([run], side.metric))
        return (run.history[-1][0] + 1, math.inf) if arrival is None else (arrival, arrival)
    if side.statistic == "first":
        value = run.history[0][1]
    elif side.statistic == "mean":
        value = mean_of(run.trained)
    else:
        value = result_of_run(run, side.statistic)
    return value, value


def _minus(left: Span, right: Span) -> Span:
    return left[0] - right[1], left[1] - right[0]


def _holds(claim: Claim, apart: Span) -> bool | None:
    """Return whether a difference, left minus right, is as claimed; None if it is undecided.

    Equal values are neither below nor above each other.
    """
    low, high = apart
    margin = claim.margin
    rounding = MARGIN_ROUNDING * margin  # 0.82 - 0.80 is a little less than 0.02
    if claim.relation == "near":
        holds = -margin <= low + rounding and high <= margin + rounding
        fails = low > margin + rounding or high < -margin - rounding
    else:
        if claim.relation == "above":
            low, high = -high, -low
        holds = high <= -margin + rounding and high < 0
        fails = low > -margin + rounding or low >= 0
    if holds:
        return True
    return False if fails else None


def _seed(run: TrackedRun) -> str:
    return selecting.replicate(run.params)


def _is_percent(side: ClaimSide) -> bool:
    """Return whether the values of a side are shown in percent."""
    return is_share(side.metric) and not isinstance(side.statistic, RoundsTo)


def _text(spans: Mapping[str, Span], side: ClaimSide) -> str:
    """Return mean ± std over seeds, with the unit."""
    percent = _is_percent(side)
    known = MeanStd.of([low for low, high in spans.values() if low == high])
    if known is None and spans:
        earliest, _ = _mean(list(spans.values()))
        return f"> {rounded(earliest - 1, None)} rounds"
    if known is None:
        return MISSING_TEXT
    some = f" ({known.n}/{len(spans)})" if known.n < len(spans) else ""
    if isinstance(side.statistic, RoundsTo):
        return f"{rounded(known.mean, known.std)} rounds{some}"
    unit = " %" if percent else ""
    return f"{number(known.mean, known.std, percent)}{unit}{some}"


def claims_markdown(lines: Sequence[ClaimResult]) -> str:
    """Return results as a Markdown table.

    Args:
        lines: Results, as from `check_claims`.
    """
    texts: list[dict[str, str]] = []
    for line in lines:
        claim = line.claim
        text = {"claim": claim.says + (f" ({grouping.label(line.named)})" if line.named else "")}
        text["left"] = f"{_name_of_side(line, claim.left.where)} {line.left}".strip()
        text["should be"] = claim.relation
        text["right"] = f"{_name_of_side(line, claim.right.where)} {line.right}".strip()
        text["left − right [95 % interval]"] = line.difference
        text["seeds for : against"] = "{} : {}".format(*line.seeds)
        text["verdict"] = line.verdict
        texts.append(text)
    return as_markdown(pd.DataFrame(texts))
