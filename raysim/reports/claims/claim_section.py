"""The section `claims` of a configuration: a paper's claims about its runs.

    claims:
      - says: GradMA-S reaches 95 % in fewer rounds than FedAvg
        left: {where: {algorithm: gradma_s}, metric: accuracy, statistic: {rounds_to: 0.95}}
        is: below                    # or above, or near
        right: {where: {algorithm: fedavg}}    # the rest as on the left; or a plain number
        margin: 0                    # by at least this much; near: by at most
        each: [partition.alpha]      # a line for each of their values

`raysim.reports.claims.verdicts` says which statistics there are, and how sides are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from raysim.config import loading
from raysim.config.explain import checked_section, explain_validation_error
from raysim.config.sections.base import Section
from raysim.config.sections.storage import Tracking
from raysim.errors import ConfigError
from raysim.reports import selecting
from raysim.reports.analysis.targets import why_unreachable
from raysim.reports.runs import RunSource
from raysim.spelling import did_you_mean
from raysim.tracking.recorder import flatten_parameters

Statistic = Literal["best", "last", "first", "mean", "last10"]


class RoundsTo(Section):
    """A side of a claim: the rounds that it takes to a value of the metric."""

    rounds_to: float


def _statistic(statistic: Any) -> Any:
    names = get_args(Statistic)
    if statistic in names:
        return statistic
    if isinstance(statistic, Mapping) and set(statistic) == {"rounds_to"}:
        value = statistic["rounds_to"]
        if type(value) in (int, float):
            return RoundsTo(rounds_to=value)
    hint = did_you_mean(statistic, names) if isinstance(statistic, str) else ""
    raise ValueError(f"expected {', '.join(names)} or {{rounds_to: 0.95}}, not {statistic}{hint}")


def value_texts(wanted: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the accepted values of each parameter, as the texts that MLflow stores.

    Args:
        wanted: A value, or a list of values, by parameter.

    Raises:
        ValueError: A parameter has no value, or a mapping.
    """
    texts = {}
    for key, value in wanted.items():
        values = value if isinstance(value, list) else [value]
        if not values or any(isinstance(item, Mapping | list) for item in values):
            raise ValueError(f"{key} must have a value, or a list of values of which any matches")
        texts[key] = [flatten_parameters({"": item})[""] for item in values]
    return texts


Where = Annotated[dict[str, Any], AfterValidator(value_texts)]
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
    return {"value": side} if type(side) in (int, float) else side


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

    @property
    def sides(self) -> dict[str, ClaimSide]:
        """Sides that compare runs, by name: left, and right unless it is a number."""
        return {"left": self.left} | ({"right": self.right} if self.right.value is None else {})

    @model_validator(mode="after")
    def _can_be_decided(self) -> Claim:
        if self.relation == "near" and not self.margin:
            raise ValueError("near needs a margin, the largest difference of the sides")
        return self


def read_claims(source: str | Path | Mapping[str, Any]) -> list[Claim]:
    """Return the claims of a configuration; [] if it has none.

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
    return [_claim(entry, f"claims.{i}") for i, entry in enumerate(section)]


def check_sides(claims: Sequence[Claim], parameters: Sequence[Mapping[str, str]]) -> list[str]:
    """Check that a sweep has the runs that its claims are about.

    Args:
        claims: The claims.
        parameters: The parameters of each run of the sweep.

    Returns:
        A sentence for each value that no run has.

    Raises:
        ConfigError: No run has a parameter; the message names the claim.
    """
    runs: Any = [SimpleNamespace(params=values, known=()) for values in parameters]
    missing = []
    for i, claim in enumerate(claims):
        right = {} if claim.right.where == claim.left.where else {"right": claim.right}
        for name, side in ({"left": claim.left} | right).items():
            place = f"claims.{i}.{name}.where"
            for key, wanted in side.where.items():
                (full,) = selecting.resolved(runs, [key], place)
                known = {selecting.value_of(run.params, full) or "" for run in runs}
                for value in wanted:
                    if not selecting.having(runs, {key: [value]}, place):
                        hint = did_you_mean(value, known)
                        missing.append(f"{place}: no run of this sweep has {key}={value}{hint}")
    return list(dict.fromkeys(missing))


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
    left, right = claim.left, claim.right
    unset = ClaimSide.model_fields.keys() - right.model_fields_set
    right = right.model_copy(update={key: getattr(left, key) for key in unset})
    claim = claim.model_copy(update={"right": right})
    for key, value, metric in _metric_values(claim):
        if why := why_unreachable(value, metric):
            raise ConfigError(f"{place}.{key}: {why}")
    return claim


def _metric_values(claim: Claim) -> Iterator[tuple[str, float, str]]:
    """Yield key, number and metric of all numbers of a claim that are values of a metric."""
    for name, side in claim.sides.items():
        if isinstance(side.statistic, RoundsTo):
            yield f"{name}.statistic.rounds_to", side.statistic.rounds_to, side.metric
    if not isinstance(claim.left.statistic, RoundsTo):
        if claim.right.value is not None:
            yield "right", claim.right.value, claim.left.metric
        yield "margin", claim.margin, claim.left.metric
