"""Claims of a paper about runs, and their verdicts.

    claims:
      - says: GradMA-S reaches 95 % in fewer rounds than FedAvg
        left: {where: {algorithm: gradma_s}, metric: accuracy, statistic: {rounds_to: 0.95}}
        is: below                                       # or above, or near
        right: {where: {algorithm: fedavg}}             # what it leaves out is as on the left; or a
            plain number
        margin: 0                                       # by at least this much; near: by at most
        each: [partition.alpha]                         # a line for each of their values
        figure: {kind: curves, group: [algorithm]}      # or kind: sweep, with x and perhaps y

A statistic is best (unless given), last, first, mean or last10, of what was evaluated, or the
rounds to a value. Sides are compared seed by seed. A target that was not reached in T rounds is
reached in T + 1 or later, so such a seed may speak for a claim, against it, or not at all. Of runs
of a side that differ in more than their seed the mean counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from raysim.config import loading
from raysim.config.explain import checked_section, explain_validation_error
from raysim.config.sections.base import Section
from raysim.config.sections.storage import Tracking
from raysim.errors import ConfigError, did_you_mean
from raysim.metrics import is_share, lower_is_better
from raysim.reports import grouping
from raysim.reports.comparisons import paired_difference
from raysim.reports.runs import RunSource
from raysim.reports.tables import (
    MISSING_TEXT,
    MeanStd,
    as_markdown,
    difference_text,
    number,
    rounded,
)
from raysim.reports.targets import why_unreachable
from raysim.reports.tracked import MetricMissing, TrackedRun
from raysim.tracking.recorder import flatten_parameters

CONFIRMED, REFUTED, OPEN = "confirmed", "not confirmed", "not testable at this scale"

Statistic = Literal["best", "last", "first", "mean", "last10"]
RunsOf = Callable[[str], Sequence[TrackedRun]]
"""The runs that have a metric."""
Span = tuple[float, float]
"""Bounds of a number; equal if the number is known."""


class RoundsTo(Section):
    """A side of a claim: the rounds that it takes to a value of the metric."""

    rounds_to: float


def _statistic(statistic: Any) -> Any:
    names = get_args(Statistic)
    if isinstance(statistic, str) and statistic in names:
        return statistic
    if (
        isinstance(statistic, Mapping)
        and set(statistic) == {"rounds_to"}
        and type(statistic["rounds_to"]) in (int, float)
    ):
        return RoundsTo(**statistic)
    hint = did_you_mean(statistic, names) if isinstance(statistic, str) else ""
    raise ValueError(f"expected {', '.join(names)} or {{rounds_to: 0.95}}, not {statistic}{hint}")


def _value_texts(wanted: dict[str, Any]) -> dict[str, list[str]]:
    """Return the accepted values of each parameter, as the texts that MLflow stores."""
    texts = {}
    for key, value in wanted.items():
        values = value if isinstance(value, list) else [value]
        if not values or any(isinstance(item, Mapping | list) for item in values):
            raise ValueError(f"{key} must have a value, or a list of values of which any matches")
        texts[key] = [flatten_parameters({"": item})[""] for item in values]
    return texts


Where = Annotated[dict[str, Any], AfterValidator(_value_texts)]
KeyList = Annotated[
    list[str], BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)
]


class ClaimSide(Section):
    """One side of a claim: a statistic of a metric of the selected runs."""

    where: Where = Field(default_factory=dict)
    """Parameters of the runs: for each key a value, or a list of values of which any matches.
    Default: all runs."""
    metric: str = "accuracy"
    """Metric to compare."""
    statistic: Annotated[Any, AfterValidator(_statistic)] = "best"
    """Statistic over a run's rounds: `best`, `last`, `first`, `mean`, `last10` (mean of the last
    ten evaluations), or `{rounds_to: VALUE}`."""

    @property
    def lower(self) -> bool:
        """Whether small values are good."""
        return lower_is_better(self.metric)


class RightSide(ClaimSide):
    """Right side of a claim: runs, or a number. Keys that are not set equal those of the left."""

    value: float | None = None
    """Number to compare with, instead of runs. `right: 0.5` is short for `right: {value: 0.5}`."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> RightSide:
        if self.value is not None and len(self.model_fields_set) > 1:
            raise ValueError("'value' excludes where, metric and statistic; leave one of them out")
        return self


def _right_side(side: Any) -> Any:
    return {"value": side} if isinstance(side, int | float) and not isinstance(side, bool) else side


class Figure(Section):
    """Plot of a claim's runs, as `raysim report curves` or `raysim report sweep` draws it."""

    kind: Literal["curves", "sweep"]
    """`curves`: a metric over the rounds. `sweep`: the best value over one or two parameters."""
    where: Where = Field(default_factory=dict)
    """Parameters of the runs to plot. Default: all runs."""
    metric: str = ""
    """Metric to plot. Default: that of the claim's left side."""
    group: KeyList | None = None
    """Parameters by which `curves` draws one line each. Default: all that differ."""
    panels: KeyList = Field(default_factory=list)
    """Parameters by which `curves` draws one panel each."""
    x_axis: Literal["rounds", "bytes", "virtual-time", "seconds"] = "rounds"
    """Unit of the x-axis of `curves`."""
    x: str = ""
    """Parameter on the x-axis of `sweep`."""
    y: str | None = None
    """Second parameter of `sweep`, which makes the plot a heatmap."""
    log_x: bool = False
    """Whether the x-axis of `sweep` is logarithmic. Not for heatmaps."""
    file: str = ""
    """File name of the plot: .png, .svg or .pdf. Default: `claim-NUMBER.png`."""

    @model_validator(mode="after")
    def _agrees(self) -> Figure:
        others = {"curves": ("x", "y", "log_x"), "sweep": ("group", "panels", "x_axis")}[self.kind]
        if strange := [key for key in others if key in self.model_fields_set]:
            raise ValueError(f"kind {self.kind} has no {strange[0]}; leave it out")
        if self.kind == "sweep" and not self.x:
            raise ValueError("kind sweep needs x, the parameter of the x-axis")
        if self.y is not None and self.log_x:
            raise ValueError("a heatmap has a column for each value; leave out log_x or y")
        if self.file and Path(self.file).suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(
                f"file '{self.file}' is not a plot's name; it must end in .png, .svg or .pdf"
            )
        return self


class Claim(Section):
    """A claim about runs: a relation between a left and a right side."""

    says: str
    """The claim in words, for the report."""
    left: ClaimSide
    """Left side of the comparison."""
    relation: Literal["below", "above", "near"] = Field(alias="is")
    """How the left side compares with the right: `below`, `above`, or `near` (within `margin`)."""
    right: Annotated[RightSide, BeforeValidator(_right_side)]
    """Right side of the comparison: runs, or a number."""
    margin: float = Field(default=0, ge=0)
    """Smallest difference for `below` and `above`, largest difference for `near`."""
    each: KeyList = Field(default_factory=list)
    """Parameters for whose values the claim is checked separately."""
    figure: Figure | None = None
    """Plot to draw with the claim."""

    @model_validator(mode="after")
    def _can_be_decided(self) -> Claim:
        if self.relation == "near" and not self.margin:
            raise ValueError("near needs a margin, the largest difference of the sides")
        statistic = self.left.statistic
        if isinstance(statistic, RoundsTo) and (
            why := why_unreachable(statistic.rounds_to, self.left.metric)
        ):
            raise ValueError(f"left: rounds_to: {why}")
        return self


def read_claims(source: str | Path | Mapping[str, Any]) -> list[Claim]:
    """Return the claims of a configuration; [] if it has none.

    A figure without a file name gets one.

    Args:
        source: a configuration file, the name of a shipped one, or a mapping.

    Raises:
        ConfigError: the file cannot be read, or the section is wrong; the message names the key.
    """
    section = loading.claims(source)
    if section is None:
        return []
    if not isinstance(section, list):
        raise ConfigError("claims: expected a list of claims, each with says, left, is and right")
    claims = [_claim(entry, f"claims.{i}") for i, entry in enumerate(section)]
    drawn: dict[str, Figure] = {}
    for i, claim in enumerate(claims):
        if claim.figure and drawn.setdefault(claim.figure.file, claim.figure) != claim.figure:
            raise ConfigError(
                f"claims.{i}.figure.file: {claim.figure.file} is another picture above; give "
                "another name"
            )
    return claims


def require_claims(source: str | Path | Mapping[str, Any]) -> list[Claim]:
    """Return the claims of a configuration, as `read_claims` does.

    Args:
        source: a configuration file, the name of a shipped one, or a mapping.

    Raises:
        ConfigError: the configuration has no claims, or the section is wrong.
    """
    if not (claims := read_claims(source)):
        raise ConfigError(
            f"claims: {source} has no such section, a list of claims with says, left, is and right"
        )
    return claims


def runs_of_claims(
    source: str | Path | Mapping[str, Any],
    runs: Sequence[str] | None,
    uri: str | None,
    ledgers: Sequence[str | Path] = (),
) -> RunSource:
    """Return the source of the runs that claims are about.

    Args:
        source: Configuration with the claims.
        runs: Names of experiments, or ids of runs. Default: the configuration's experiment.
        uri: Address of the tracking store. Default: the configuration's.
        ledgers: Ledgers to read in place of MLflow.

    Raises:
        ConfigError: The configuration cannot be read, or `uri` and `ledgers` are both given.
    """
    tracking = checked_section(Tracking, loading.read_config(source).get("tracking") or {})
    store = uri if ledgers else uri or tracking.uri
    return RunSource(list(runs or [tracking.experiment]), store, ledgers)


def _claim(entry: Any, place: str) -> Claim:
    needed = ("says", "left", "is", "right")
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{place}: expected a mapping with {', '.join(needed)}")
    if lacking := [key for key in needed if key not in entry]:
        raise ConfigError(f"{place}.{lacking[0]}: missing; a claim has {', '.join(needed)}")
    try:
        claim = Claim.model_validate(entry)
    except ValidationError as error:
        raise ConfigError(explain_validation_error(error, entry, Claim, f"{place}.")) from None
    left, right, figure = claim.left, claim.right, claim.figure
    shared = {
        key: getattr(left, key)
        for key in ClaimSide.model_fields
        if key not in right.model_fields_set
    }
    changed: dict[str, Any] = {"right": right.model_copy(update=shared)}
    if figure is not None:
        named = {
            "metric": figure.metric or left.metric,
            "file": figure.file or place.replace("s.", "-") + ".png",
        }
        changed["figure"] = figure.model_copy(update=named)
    return claim.model_copy(update=changed)


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
    return [
        line for i, claim in enumerate(claims) for line in _lines(claim, runs_of, f"claims.{i}")
    ]


def _lines(claim: Claim, runs_of: RunsOf, place: str) -> list[ClaimResult]:
    runs_of_sides: list[Sequence[TrackedRun]] = []
    pool: list[TrackedRun] = []
    for name, side in _sides(claim).items():
        try:
            runs = runs_of(side.metric)
        except MetricMissing as error:
            raise ConfigError(f"{place}.{name}.metric: {error}") from None
        pool += runs
        runs_of_sides.append(grouping.having(runs, side.where, f"{place}.{name}.where"))
    left, right = runs_of_sides[0], [run for runs in runs_of_sides[1:] for run in runs]
    keys = grouping.resolved(pool, claim.each, f"{place}.each")
    # a right side that says itself which value it has, or has no such parameter, is the same in
    # every line
    its = {
        key: values
        for key, values in claim.right.where.items()
        if values != claim.left.where.get(key)
    }
    fixed = grouping.resolved(pool, its, f"{place}.right.where")
    free = [
        key
        for key in keys
        if key not in fixed and any(grouping.value_of(run.params, key) for run in right)
    ]
    compared = [*left, *right] if free == keys else left
    groups = grouping.grouped(compared, keys) if keys and compared else []
    if not groups:
        return [_line(claim, {}, runs_of_sides)]
    return [
        _line(
            claim,
            named,
            [
                _runs_with(runs, named, side_keys)
                for runs, side_keys in zip(runs_of_sides, (keys, free), strict=False)
            ],
        )
        for named, _ in groups
    ]


def _sides(claim: Claim) -> dict[str, ClaimSide]:
    """Return the sides that compare runs."""
    return {"left": claim.left} | ({"right": claim.right} if claim.right.value is None else {})


def _runs_with(
    runs: Sequence[TrackedRun], named: Mapping[str, str], keys: Sequence[str]
) -> list[TrackedRun]:
    return [
        run
        for run in runs
        if all(grouping.value_of(run.params, key) == named.get(key) for key in keys)
    ]


def _line(
    claim: Claim, named: Mapping[str, str], runs_of_sides: Sequence[Sequence[TrackedRun]]
) -> ClaimResult:
    sides = list(_sides(claim).values())
    measured = [_measured(runs, side) for runs, side in zip(runs_of_sides, sides, strict=True)]
    texts = [_text(spans, side) for spans, side in zip(measured, sides, strict=True)]
    if (value := claim.right.value) is not None:
        measured.append(dict.fromkeys(measured[0], (value, value)))
        texts.append(_text({"": (value, value)}, claim.right))
    seeds = sorted(measured[0].keys() & measured[1].keys())
    apart = [_minus(measured[0][seed], measured[1][seed]) for seed in seeds]
    votes = [_holds(claim, span) for span in apart]
    count = (votes.count(True), votes.count(False))
    missing = _missing_runs(runs_of_sides, sides)
    verdict = f"{OPEN} ({missing})" if missing else _verdict(claim, apart, votes)
    left, right = texts
    difference = _difference_text(claim, apart)
    return ClaimResult(claim, named, left, right, difference, count, verdict)


def _name_of_side(line: ClaimResult, where: Mapping[str, Sequence[str]]) -> str:
    """Return the values by which a side differs from the other one, such as "fedavg"; or ""."""
    sides = (line.claim.left.where, line.claim.right.where)
    named = {}
    for key, values in where.items():
        of_line = line.named.get(key, line.named.get(f"{key}.name"))
        if any(side.get(key) != values for side in sides):
            named[key] = of_line if of_line in values else " or ".join(map(str, values))
    return grouping.label(named)


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


def _missing_runs(runs_of_sides: Sequence[Sequence[TrackedRun]], sides: Sequence[ClaimSide]) -> str:
    """Return which runs of these sides are missing: a whole side, or a seed of one."""
    seeds = {_seed(run) for runs in runs_of_sides for run in runs}
    for runs, side in zip(runs_of_sides, sides, strict=True):
        name = (
            grouping.label({key: " or ".join(values) for key, values in side.where.items()})
            or "any kind"
        )
        if not runs:
            return f"no run of {name}"
        for named, members in grouping.grouped(runs):
            if lacking := sorted(seeds - {_seed(run) for run in members}):
                which = ", ".join(filter(None, [name, grouping.label(named)]))
                return f"no run of {which} with seed {', '.join(lacking)}"
    return ""


def _measured(runs: Iterable[TrackedRun], side: ClaimSide) -> dict[str, Span]:
    """Return a side's value for each seed, the mean over its runs."""
    spans: dict[str, list[Span]] = {}
    for run in runs:
        spans.setdefault(_seed(run), []).append(_reached(run, side))
    return {seed: _mean(values) for seed, values in spans.items()}


def _mean(spans: Sequence[Span]) -> Span:
    return statistics.fmean(low for low, _ in spans), statistics.fmean(high for _, high in spans)


def _reached(run: TrackedRun, side: ClaimSide) -> Span:
    values = [value for _, value in run.history]
    if isinstance(side.statistic, RoundsTo):
        arrival = run.arrival(side.statistic.rounds_to, side.lower)
        return (run.history[-1][0] + 1, math.inf) if arrival is None else (arrival, arrival)
    value = {
        "best": lambda: run.best(side.lower),
        "last": lambda: values[-1],
        "first": lambda: values[0],
        "mean": lambda: statistics.fmean(run.trained),
        "last10": lambda: run.settled,
    }[side.statistic]()
    return value, value


def _minus(left: Span, right: Span) -> Span:
    return left[0] - right[1], left[1] - right[0]


def _holds(claim: Claim, apart: Span) -> bool | None:
    """Return whether a difference, left minus right, is as claimed; None if it is undecided.

    Equal values are neither below nor above each other.
    """
    low, high = apart if claim.relation != "above" else (-apart[1], -apart[0])
    if claim.relation == "near":
        if -claim.margin <= low and high <= claim.margin:
            return True
        return False if low > claim.margin or high < -claim.margin else None
    if high <= -claim.margin and high < 0:
        return True
    return False if low > -claim.margin or low >= 0 else None


def _seed(run: TrackedRun) -> str:
    return run.params.get("seed", "0")


def _is_percent(side: ClaimSide) -> bool:
    """Return whether the values of a side are shown in percent."""
    return is_share(side.metric) and not isinstance(side.statistic, RoundsTo)


def _text(spans: Mapping[str, Span], side: ClaimSide) -> str:
    """Return mean ± std over seeds, with the unit."""
    known = MeanStd.of([low for low, high in spans.values() if low == high])
    rounds, percent = isinstance(side.statistic, RoundsTo), _is_percent(side)
    if known is None:
        return (
            f"> {rounded(_mean(list(spans.values()))[0] - 1, None)} rounds"
            if spans
            else number(None, None, percent)
        )
    some = f" ({known.n}/{len(spans)})" if known.n < len(spans) else ""
    if rounds:
        return f"{rounded(known.mean, known.std)} rounds{some}"
    return number(known.mean, known.std, percent) + (" %" if percent else "") + some


def claims_markdown(lines: Sequence[ClaimResult]) -> str:
    """Return results as a Markdown table.

    Args:
        lines: Results, as from `check_claims`.
    """
    header = ["claim", "left", "right", "left − right [95 % interval]", "seeds for : against"]
    cells = [[*header, "verdict"]]
    for line in lines:
        says = line.claim.says + (f" ({grouping.label(line.named)})" if line.named else "")
        votes = "{} : {}".format(*line.seeds)
        left, right = (
            f"{_name_of_side(line, side.where)} {text}".strip()
            for side, text in ((line.claim.left, line.left), (line.claim.right, line.right))
        )
        cells.append([says, left, right, line.difference, votes, line.verdict])
    if any(line.claim.figure for line in lines):
        files = [line.claim.figure.file if line.claim.figure else "" for line in lines]
        cells = [[*row, last] for row, last in zip(cells, ["figure", *files], strict=True)]
    return as_markdown(cells)
