"""A row of a ledger: one finished run as a line of JSON.

It has the fields of `Row`, the version of its format (`ledger`) and a checksum (`check`). Metrics
of the same rounds stand together in `history`, and arithmetic progressions of integers are written
as {"from", "step", "count"}.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from raysim.config.sections.evaluation import Evaluate
from raysim.system.json_files import parsed
from raysim.tracking.recorder import flatten_parameters

FORMAT = 1
"""Version of the format of a row."""

VERSIONS = ("raysim", "torch", "numpy", "python")
"""Versions that a row names."""

Series = Mapping[int, float]
"""Values of a metric by round."""


@dataclass(frozen=True)
class Row:
    """One finished run."""

    fingerprint: str
    """sha256 of the configuration's identity."""
    experiment: str
    """MLflow experiment of the run."""
    title: str
    """Values of the keys that vary in its sweep, as text."""
    method: str
    """Label of the algorithm."""
    seed: int
    """Seed of the run."""
    rounds: int
    """Number of completed rounds."""
    digest: str
    """sha256 of the parameters after the last round."""
    cpu: str
    """Kind of CPU: `cpu_kind()`, or torch's capability alone in older rows."""
    versions: Mapping[str, str]
    """Versions of raysim, torch, numpy and python."""
    seconds: float
    """Wall-clock seconds of the run."""
    config: Mapping[str, Any]
    """Resolved configuration, as `kept_config` returns it."""
    history: Mapping[str, Series]
    """Values by metric and round."""
    stopped: str = ""
    """Reason why the trial was stopped early, or ""."""
    early_stopping: Mapping[str, Any] | None = None
    """Settings by which the trial was stopped early."""
    state_digest: str = ""
    """sha256 of what server and clients keep, see `RunResult`; "" in older rows."""
    place: str = field(default="", compare=False)
    """File and line of the row."""

    @cached_property
    def params(self) -> dict[str, str]:
        """Parameters as text, as MLflow has them."""
        experiment = {"tracking.experiment": self.experiment}
        return flatten_parameters(self.config) | experiment

    @cached_property
    def evaluate(self) -> Mapping[str, Any]:
        """Section `evaluate`, with keys that were added since; as it is if it has removed keys."""
        evaluate = self.config["evaluate"]
        with suppress(ValidationError):
            evaluate = Evaluate.model_validate(evaluate).model_dump(mode="json")
        return evaluate

    @property
    def key(self) -> str:
        """Key that two rows share if they hold the same results, wherever they were computed."""
        facts = [self.fingerprint, self.experiment, self.rounds, self.stopped]
        asked = [self.config.get("name"), self.evaluate, self.config.get("rounds")]
        return json.dumps([*facts, *asked], sort_keys=True)


class BadRow(ValueError):
    """Error for a line that is no row; its text is the reason."""


def as_line(row: Row) -> str:
    """Return a row as one line of JSON, without a line break.

    Args:
        row: The row; its `place` is left out.
    """
    content = {"ledger": FORMAT} | {f.name: getattr(row, f.name) for f in fields(row)}
    content |= {"versions": dict(row.versions), "history": _encoded(row.history)}
    del content["place"]
    if not row.stopped:
        del content["stopped"], content["early_stopping"]
    if not row.state_digest:
        del content["state_digest"]
    return _json({**content, "check": _checksum(content)})


def from_line(line: str, place: str = "") -> Row:
    """Return the row that a line holds.

    Args:
        line: One line of a ledger.
        place: File and line, for messages.

    Raises:
        BadRow: The line is no row of this format, or it is damaged.
    """
    try:
        content = parsed(line, Any)
    except ValueError as error:
        raise BadRow(str(error)) from None
    if not isinstance(content, dict) or "ledger" not in content:
        raise BadRow("it is not a row of a ledger")
    if content["ledger"] != FORMAT:
        raise BadRow(f"its format is {content['ledger']}, not {FORMAT}; use its raysim version")
    if content.pop("check", None) != _checksum(content):
        raise BadRow("its checksum is wrong; it was damaged or changed by hand")
    # `as_line` has written what has this checksum, perhaps that of another version of raysim.
    del content["ledger"]
    try:
        row = Row(**{**content, "history": _decoded(content["history"]), "place": place})
    except (AttributeError, KeyError, TypeError) as error:
        raise BadRow(f"it has other fields than a row of this version: {error}") from None
    if not isinstance(row.digest, str):
        raise BadRow("it has no digest")
    return row


def _json(content: Any) -> str:
    """Return compact JSON without NaN and infinities."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def _checksum(content: Mapping[str, Any]) -> str:
    """Return the checksum of a row's content."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _encoded(history: Mapping[str, Series]) -> list[dict[str, Any]]:
    """Return a history as groups of metrics that have the same rounds."""
    groups: dict[tuple[int, ...], dict[str, Any]] = {}
    for name, series in history.items():
        groups.setdefault(tuple(series), {})[name] = _numbers([*series.values()])
    return [{"rounds": _numbers(rounds), **metrics} for rounds, metrics in groups.items()]


def _decoded(groups: Any) -> dict[str, Series]:
    """Return a history from its groups."""
    history = {}
    for group in groups:
        rounds = [int(t) for t in _values(group["rounds"])]
        for name, numbers in group.items():
            if name != "rounds":
                values = zip(rounds, _values(numbers), strict=True)
                history[name] = dict(values)
    return history


def _numbers(values: Sequence[float]) -> Any:
    """Return numbers for JSON: integers short, progressions as such, NaN as null."""
    numbers = [_number(value) for value in values]
    if len(numbers) > 2 and all(type(number) is int for number in numbers):
        first, step = numbers[0], numbers[1] - numbers[0]
        if numbers == [first + step * i for i in range(len(numbers))]:
            return {"from": first, "step": step, "count": len(numbers)}
    return numbers


def _number(value: float) -> Any:
    """Return a number for JSON."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return int(value) if value == int(value) and abs(value) < 2**53 else value


def _values(numbers: Any) -> list[float]:
    """Return the numbers that `_numbers` wrote."""
    if isinstance(numbers, dict):
        first, step = numbers["from"], numbers["step"]
        return [float(first + step * i) for i in range(numbers["count"])]
    return [math.nan if number is None else float(number) for number in numbers]
