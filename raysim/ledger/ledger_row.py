"""A row of a ledger: one finished run as a line of JSON.

    ledger          format of the row
    fingerprint     identity of the configuration; equal fingerprints mean equal bits
    experiment, title, method, seed, rounds
    stopped, early_stopping    of a trial that was stopped early: the reason, and the settings
    digest          sha256 of the parameters after the last round; null if the row was cut
    cpu, versions, seconds
    config          resolved configuration, without what cannot change the results
    history         metrics by round
    check           checksum of the row

The history has the evaluations and other sparse metrics whole. What is logged every round is kept
for the evaluated rounds, and of that only the loss, the costs and the user's own metrics.
Arithmetic progressions of integers are written as {"from", "step", "count"}.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from raysim.config.schema import Config
from raysim.metrics import find_metric
from raysim.system.json_files import parsed
from raysim.tracking.recorder import flatten_parameters

FORMAT = 1
"""Version of the format of a row."""

EVALUATIONS = ("accuracy", "loss", "val/accuracy", "val/loss")
"""Metrics that only evaluations log."""

KEPT_OF_EVERY_ROUND = (
    "train_loss",
    "bytes_down",
    "bytes_up",
    "virtual_time",
    "system/round_seconds",
    "clients/used",
    "staleness/mean",
    "staleness/max",
)
"""Registered metrics of every round that a row keeps."""

VERSIONS = ("raysim", "torch", "numpy", "python")
"""Versions that a row names."""

_WITHOUT_EFFECT = ("tracking", "checkpoint", "client_state", "run_dir")
"""Sections of the configuration that a row leaves out."""

_RESOURCES = ("executor", "actors", "threads", "gpus", "server_gpus")
"""Keys of `resources` that a row keeps."""

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
    digest: str | None
    """sha256 of the parameters after the last round; None if the row was cut from a longer run."""
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
    place: str = field(default="", compare=False)
    """File and line of the row."""

    @cached_property
    def params(self) -> dict[str, str]:
        """Parameters as text, as MLflow has them."""
        experiment = {"tracking.experiment": self.experiment}
        return flatten_parameters(self.config) | experiment

    @property
    def key(self) -> str:
        """Key that two rows share if they hold the same results, wherever they were computed."""
        asked = [self.config.get(key) for key in ("name", "evaluate", "rounds")]
        facts = [self.fingerprint, self.experiment, self.rounds, self.stopped, asked]
        return json.dumps(facts, sort_keys=True)

    @property
    def ended(self) -> bool:
        """True if the section `stop` ended the run. Such a row also stands for longer runs."""
        is_short = self.rounds < self.config.get("rounds", 0)
        return is_short and bool(self.config.get("stop")) and not self.stopped

    def cut_to(self, config: Config) -> Row | None:
        """Return the row of a run of this configuration, or None if this row does not cover it.

        The row covers the run if its identity is the same, and if it has at least its rounds and
        its evaluations. A trial that was stopped early covers the rounds that it completed, and a
        run that its section `stop` ended covers longer ones too.

        Args:
            config: Resolved configuration of the run.
        """
        is_short = self.rounds < config.rounds
        if self.fingerprint != config.fingerprint or (is_short and not self.ended):
            return None
        wanted = kept_config(config)
        if wanted["record_updates"] is not None or not self._measures_the_same(wanted):
            return None
        renamed = replace(self, config=wanted, experiment=config.tracking.experiment)
        # The digest holds only for a run that this row has to its end.
        whole = is_short or (self.rounds == config.rounds and not self.stopped)
        if whole and self.config["evaluate"]["every"] == config.evaluate.every:
            return renamed
        rounds = range(config.rounds + 1)
        due = {t for t in rounds if config.evaluate.due(t, config.rounds)}
        if not due or not due <= evaluated_rounds(self.history):
            return None
        return replace(
            renamed,
            rounds=config.rounds,
            history=_cut_history(self.history, rounds, due),
            digest=self.digest if whole else None,
            stopped="",
            early_stopping=None,
        )

    def _measures_the_same(self, wanted: Mapping[str, Any]) -> bool:
        """Return True if both measure the same, apart from how often they evaluate."""
        same = [
            {key: value for key, value in config["evaluate"].items() if key not in _HOW_OFTEN}
            for config in (self.config, wanted)
        ]
        probed = any(same[1].get(key) for key in ("forgetting", "theory", "probes"))
        return same[0] == same[1] and (not probed or self.rounds == wanted["rounds"])


_HOW_OFTEN = ("every", "batch_size")
"""Keys of `evaluate` that do not change what an evaluation measures."""


def kept_config(config: Config) -> dict[str, Any]:
    """Return the part of a resolved configuration that a row keeps.

    Args:
        config: Resolved configuration.
    """
    kept = config.model_dump(mode="json", exclude=set(_WITHOUT_EFFECT))
    if config.stop is None:  # as in rows of versions that do not have it
        kept.pop("stop")
    kept["resources"] = {key: kept["resources"][key] for key in _RESOURCES}
    kept["data"] = {k: v for k, v in kept["data"].items() if k not in ("root", "download")}
    return kept


def evaluated_rounds(history: Mapping[str, Series]) -> set[int]:
    """Return the rounds that have an evaluation.

    Args:
        history: Values by metric and round.
    """
    return {t for name in EVALUATIONS for t in history.get(name, ())}


def kept_history(records: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, Series]:
    """Return what a row keeps of the metrics of all rounds.

    Args:
        records: (round, metrics) of each round, by ascending rounds.

    Returns:
        Values by metric and round.
    """
    whole: dict[str, dict[int, float]] = {}
    for t, record in records:
        for name, value in record.items():
            whole.setdefault(name, {})[t] = value
    kept = {name: series for name, series in whole.items() if _is_kept(name)}
    rounds = {t for t, _ in records}
    evaluated = evaluated_rounds(whole)
    # Without an evaluation the metrics of every round are all that the run has.
    dense_rounds = {*evaluated, max(rounds)} if evaluated else rounds
    return _cut_history(kept, rounds, dense_rounds)


def _cut_history(
    history: Mapping[str, Series], rounds: Container[int], dense_rounds: Container[int]
) -> dict[str, Series]:
    """Return a history of some rounds; metrics of every round keep only the `dense_rounds`."""
    cut: dict[str, Series] = {}
    for name, series in _cumulated(history).items():
        kept_rounds = dense_rounds if _is_cut(name) else rounds
        kept = {t: value for t, value in series.items() if t in kept_rounds}
        if kept:
            cut[name] = kept
    return _uncumulated(cut)


def _is_kept(name: str) -> bool:
    """Return True if a row keeps a metric."""
    metric = find_metric(name)
    if metric is None or metric.users_own or name in KEPT_OF_EVERY_ROUND:
        return True
    return not metric.logged.startswith("every round") and not name.startswith("system/")


def _is_cut(name: str) -> bool:
    """Return True if a row keeps a metric only for the evaluated rounds."""
    metric = find_metric(name)
    return (
        metric is None
        or metric.users_own
        or metric.is_count
        or name in (*KEPT_OF_EVERY_ROUND, *EVALUATIONS)
        or name.startswith(("accuracy/", "privacy/"))
    )


def _cumulated(history: Mapping[str, Series]) -> dict[str, Series]:
    """Replace the seconds of each round by those since the start."""
    seconds = history.get("system/round_seconds", {})
    total = dict(zip(seconds, accumulate(seconds.values()), strict=True))
    return {**history, "system/round_seconds": total} if total else dict(history)


def _uncumulated(history: Mapping[str, Series]) -> dict[str, Series]:
    """Replace the seconds since the start by those since the last round that is kept."""
    total = history.get("system/round_seconds", {})
    before = [0.0, *total.values()]
    seconds = {
        t: round(value - former, 4)
        for (t, value), former in zip(total.items(), before, strict=False)
    }
    return {**history, "system/round_seconds": seconds} if seconds else dict(history)


# -- a row as a line of text -----------------------------------------------------------------------


class BadRow(ValueError):
    """Error for a line that is no row; its text is the reason."""


def as_line(row: Row) -> str:
    """Return a row as one line of JSON, without a line break.

    Args:
        row: The row; its `place` is left out.
    """
    stopped = {"stopped": row.stopped, "early_stopping": row.early_stopping} if row.stopped else {}
    content = {
        "ledger": FORMAT,
        "fingerprint": row.fingerprint,
        "experiment": row.experiment,
        "title": row.title,
        "method": row.method,
        "seed": row.seed,
        "rounds": row.rounds,
        **stopped,
        "digest": row.digest,
        "cpu": row.cpu,
        "versions": dict(row.versions),
        "seconds": row.seconds,
        "config": row.config,
        "history": _encoded(row.history),
    }
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
    try:
        if not re.fullmatch("[0-9a-f]{64}", content["fingerprint"]):
            raise BadRow("its fingerprint is not a sha256")
        return Row(
            content["fingerprint"],
            str(content["experiment"]),
            str(content["title"]),
            str(content["method"]),
            int(content["seed"]),
            int(content["rounds"]),
            content["digest"],
            str(content["cpu"]),
            {name: str(content["versions"][name]) for name in VERSIONS},
            float(content["seconds"]),
            {**content["config"], "evaluate": dict(content["config"]["evaluate"])},
            _decoded(content["history"]),
            content.get("stopped", ""),
            content.get("early_stopping"),
            place,
        )
    except KeyError as error:
        raise BadRow(f"it has no {error}") from None
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise BadRow(str(error)) from None


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
