"""Tables of runs, straight from the tracking store: what was reached, mean ± std over seeds.

Runs that agree on every parameter that differs in the selection, but for the seed, make one row; so the columns for
what was varied appear by themselves. Only what is in MLflow is read: runs of other people are as good as one's own.
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysim.config import NAMED, Tracking
from raysim.errors import ConfigError, RaysimError, did_you_mean
from raysim.spool import masked
from raysim.tracking import absolute, connected

LAST = 10
"""How many of the last evaluated values the mean at the end is taken over."""

_NOT_THE_RESULT = ("name", "run_dir", "tracking.", "checkpoint.", "data.root", "data.download", "evaluate.batch")
_NOT_THE_RESULT += tuple(f"resources.{key}" for key in ("executor", "actors", "cpus", "server_threads", "address"))
_NOT_THE_RESULT += ("resources.timeout", "sweep.", "store.")
_FOLLOWS = ("client.", "server.", "block.", "model.")  # sections whose keys mostly follow from a name
_NONE = "–"


@dataclass(frozen=True)
class Run:
    """A finished run: its resolved parameters as text, and (round, value) of one metric by ascending rounds."""

    run_id: str
    params: Mapping[str, str]
    history: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Figure:
    """Mean and sample standard deviation (n - 1) over `n` runs; `std` is None for one."""

    mean: float
    std: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure | None:
        """None of no values."""
        if not values:
            return None
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Row:
    """Runs that differ only in their seed.

    Attributes:
        parameters: what tells this row from the others, as text; a parameter that its runs do not have is absent.
        seeds: how many runs.
        best: the best value over all evaluated rounds; `last` the mean of the last 10 evaluated values after round 0.
        to_target: the first round at which the target was reached, over the runs that did (`to_target.n` of `seeds`);
            None if none did, or no target was given.
        rounds: (fewest, most) rounds that the runs have done.
        run_ids: of the runs.
    """

    parameters: dict[str, str]
    seeds: int
    best: Figure
    last: Figure
    to_target: Figure | None
    rounds: tuple[int, int]
    run_ids: tuple[str, ...]


def rows(
    runs: Sequence[Run],
    metric: str = "accuracy",
    *,
    target: float | None = None,
    group: Sequence[str] | None = None,
    best_of: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Runs as rows of a table.

    Args:
        runs: finished ones, each with at least one value of the metric.
        metric: what their histories are of. The smaller the better if its name ends in "loss", else the larger.
        target: the value whose first round is wanted.
        group: the parameters that make a row, instead of all that differ.
        best_of: keeps, for each combination of these parameters, only the row of the best mean `best`.
        say: told, in a line, if rows of `group` hold runs that differ in more than their seed.

    Raises:
        ConfigError: `group` or `best_of` names a parameter that no run has.
    """
    lower = metric.endswith("loss")
    keys = _resolved(runs, group, "--group") if group else _varied([run.params for run in runs])
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(run.params.get(key) for key in keys), []).append(run)
    if mixed := sorted({key for members in groups.values() for key in _varied([run.params for run in members])}):
        say(f"a row holds runs that differ in {', '.join(map(_short, mixed))}")
    found = []
    for values, members in groups.items():
        named = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
        found.append((_row(named, members, lower, target), members[0].params))
    found.sort(key=lambda row: [_order(row[0].parameters.get(key)) for key in keys])
    if not best_of:
        return [row for row, _ in found]
    wanted = _resolved(runs, best_of, "--best-of")
    if strange := [key for key in wanted if group and key not in keys]:
        raise ConfigError(f"--best-of: '{strange[0]}' is not among the parameters of --group")
    chosen: dict[tuple, Row] = {}
    for row, params in found:
        place = tuple(params.get(key) for key in wanted)
        rival = chosen.get(place)
        if rival is None or (row.best.mean < rival.best.mean if lower else row.best.mean > rival.best.mean):
            chosen[place] = row
    return list(chosen.values())


def _row(parameters: dict[str, str], runs: list[Run], lower: bool, target: float | None) -> Row:
    def reached(value: float) -> bool:
        return target is not None and (value <= target if lower else value >= target)

    values = [[value for _, value in run.history] for run in runs]
    arrivals = [next((t for t, value in run.history if reached(value)), None) for run in runs]
    best = Figure.of([(min if lower else max)(each) for each in values])
    trained = [[value for t, value in run.history if t > 0] or [run.history[-1][1]] for run in runs]
    last = Figure.of([statistics.fmean(each[-LAST:]) for each in trained])
    assert best and last
    ends = [run.history[-1][0] for run in runs]
    return Row(
        parameters,
        len(runs),
        best,
        last,
        Figure.of([float(t) for t in arrivals if t is not None]),
        (min(ends), max(ends)),
        tuple(run.run_id for run in runs),
    )


def _varied(params: Sequence[Mapping[str, str]]) -> list[str]:
    """The parameters that differ, but for the seed and what cannot change a result. Those that follow from others (the
    rules from the algorithm, the block size from the model) are named only where they tell runs apart by themselves."""
    everything = dict.fromkeys(key for each in params for key in each)
    differ = [
        key
        for key in everything
        if key not in ("seed", *NAMED)
        and not key.startswith(_NOT_THE_RESULT)
        and len({each.get(key) for each in params}) > 1
    ]
    differ.sort(key=lambda key: key == "block.size")
    names = [key for key in differ if key.removesuffix(".name") in NAMED]
    names.sort(key=lambda key: key.startswith(("client.", "server.")))
    chosen: list[str] = []
    for key in [*names, *(k for k in differ if k not in names and not k.startswith(_FOLLOWS)), *differ]:
        if key in chosen:
            continue
        parts = [tuple(each.get(k) for k in chosen) for each in params]
        tells = len(set(zip(parts, (each.get(key) for each in params), strict=True))) > len(set(parts))
        halves = key in ("client.name", "server.name") and any("algorithm.name" not in each for each in params)
        if tells or halves or not key.startswith(_FOLLOWS):
            chosen.append(key)
    return chosen


def _resolved(runs: Sequence[Run], keys: Iterable[str], option: str) -> list[str]:
    """Parameters as a user names them: `algorithm` is `algorithm.name`."""
    known = {key for run in runs for key in run.params}
    found = []
    for key in keys:
        full = next((k for k in (key, f"{key}.name") if k in known), None)
        if full is None:
            raise ConfigError(f"{option}: no run has a parameter '{key}'{did_you_mean(key, known)}")
        found.append(full)
    return found


def _order(text: str | None) -> tuple:
    """Numbers by size, then text."""
    try:
        return (0, float(text or ""), "")
    except ValueError:
        return (1, 0.0, text or "")


# -- as text -----------------------------------------------------------------------------------------------------------


def markdown(table: Sequence[Row], metric: str = "accuracy", target: float | None = None) -> str:
    """Rows as a Markdown table; accuracies in percent."""
    percent = metric.endswith("accuracy")

    def figure(f: Figure) -> str:
        scale, form = (100, ".2f") if percent else (1, ".4g")
        return f"{f.mean * scale:{form}}" + (f" ± {f.std * scale:{form}}" if f.std is not None else "")

    def arrival(row: Row) -> str:
        if row.to_target is None:
            return _NONE
        missed = f" ({row.to_target.n}/{row.seeds})" if row.to_target.n < row.seeds else ""
        return f"{row.to_target.mean:.4g}{missed}"

    unit = " %" if percent else ""
    keys = _columns(table)
    head = [*map(_short, keys), "seeds", f"best {metric}{unit}", f"mean of last {LAST}{unit}"]
    head += [f"rounds to {target:g}"] if target is not None else []
    lines = [[*head, "rounds done"], ["---"] * (len(head) + 1)]
    for row in table:
        cells = [row.parameters.get(key, _NONE) for key in keys]
        cells += [str(row.seeds), figure(row.best), figure(row.last)]
        cells += [arrival(row)] if target is not None else []
        lines.append([*cells, "–".join(map(str, dict.fromkeys(row.rounds)))])
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def as_csv(table: Sequence[Row]) -> str:
    """Rows as CSV, every number in full."""
    keys = _columns(table)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    figures = ["best", "best_std", "last", "last_std", "rounds_to_target", "reached", "rounds_min", "rounds_max"]
    writer.writerow([*map(_short, keys), "seeds", *figures])
    for row in table:
        arrival = row.to_target
        writer.writerow(
            [
                *(row.parameters.get(key) for key in keys),
                *(row.seeds, row.best.mean, row.best.std, row.last.mean, row.last.std),
                *(arrival.mean if arrival else None, arrival.n if arrival else 0, *row.rounds),
            ]
        )
    return text.getvalue().rstrip("\n")


def _columns(table: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in table for key in row.parameters))


def _short(key: str) -> str:
    return key.removesuffix(".name") if key.removesuffix(".name") in NAMED else key


# -- from the tracking store -------------------------------------------------------------------------------------------


def table(
    wanted: Sequence[str],
    uri: str | None = None,
    metric: str = "accuracy",
    *,
    target: float | None = None,
    group: Sequence[str] | None = None,
    best_of: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """The rows of runs in MLflow.

    Args:
        wanted: names of experiments, and ids of runs (that of a sweep stands for its trials).
        uri: of the tracking store; the default is a configuration's.
        metric, target, group, best_of: as in `rows`.
        say: told, in a line each, of runs that are left out.

    Raises:
        ConfigError: an experiment, run, metric or parameter is not there.
        RaysimError: the store cannot be read.
    """
    return rows(finished_runs(wanted, uri, metric, say), metric, target=target, group=group, best_of=best_of, say=say)


def finished_runs(
    wanted: Sequence[str], uri: str | None, metric: str, say: Callable[[str], None] = lambda line: None
) -> list[Run]:
    """The finished runs of experiments, or those of these ids, with the history of a metric. See `table`."""
    address = absolute(uri or Tracking().uri)
    file = Path(address.removeprefix("sqlite:///").partition("?")[0])
    if address.startswith("sqlite:///") and not file.is_file():
        raise ConfigError(f"--uri: there is no {file}; give the address of a tracking store, sqlite:///… or http://…")
    client = connected(address)
    try:
        found = {run.info.run_id: run for each in wanted for run in _selected(client, each)}
        with_metrics = [run for run in found.values() if run.data.tags.get("raysim.sweep") != "true"]
        done = [run for run in with_metrics if run.info.status == "FINISHED"]
        if left := len(with_metrics) - len(done):
            say(f"{left} run{'s'[: left != 1]} left out: unfinished or failed")
        having = [run for run in done if metric in run.data.metrics]
        if not having:
            known = {key for run in done for key in run.data.metrics}
            reason = f"has a metric '{metric}'{did_you_mean(metric, known)}" if done else "is finished"
            raise ConfigError(f"{', '.join(wanted)}: no run {reason}")
        if left := len(done) - len(having):
            say(f"{left} run{'s'[: left != 1]} left out: without '{metric}'")
        kept = _newest(having)
        if left := len(having) - len(kept):
            say(f"{left} run{'s'[: left != 1]} left out: a newer one has the same parameters and seed")
        return [Run(run.info.run_id, run.data.params, _history(client, run.info.run_id, metric)) for run in kept]
    except RaysimError:
        raise
    except Exception as error:
        why = " ".join(masked(str(error)).split())[:200]
        raise RaysimError(f"--uri: {masked(address)} cannot be read: {why}") from None


def _selected(client: Any, name: str) -> list[Any]:
    """The runs of an experiment, or of an id: the run itself, or the trials of the sweep that it is."""
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return _search(client, [experiment.experiment_id], "")
    everything = _pages(lambda token: client.search_experiments(page_token=token))
    for each in everything if len(name) == 32 else []:
        for run in _search(client, [each.experiment_id], f"attributes.run_id = '{name}'"):
            asked = (f"tags.`mlflow.parentRunId` = '{name}'", f"tags.`raysim.sweep.{name}` = 'true'")
            children = [child for condition in asked for child in _search(client, [each.experiment_id], condition)]
            return children if run.data.tags.get("raysim.sweep") == "true" else [run]
    names = [each.name for each in everything]
    raise ConfigError(f"report: no experiment, and no run, is called '{name}'{did_you_mean(name, names)}")


def _search(client: Any, experiments: list[str], condition: str) -> list[Any]:
    return _pages(lambda token: client.search_runs(experiments, condition, page_token=token))


def _pages(ask: Callable[[str | None], Any]) -> list[Any]:
    """All pages of what MLflow gives in pages."""
    page = ask(None)
    found = list(page)
    while page.token:
        page = ask(page.token)
        found += page
    return found


def _newest(runs: list[Any]) -> list[Any]:
    """One run for all that agree on their parameters and seed: the one that was started last."""
    newest: dict[str, Any] = {}
    for run in sorted(runs, key=lambda run: run.info.start_time):
        kept = {k: v for k, v in run.data.params.items() if not k.startswith(_NOT_THE_RESULT)}
        newest[json.dumps(kept, sort_keys=True)] = run
    return list(newest.values())


def _history(client: Any, run_id: str, metric: str) -> list[tuple[int, float]]:
    """(round, value), by rounds; where a round was logged twice, the later one counts."""
    points = sorted(client.get_metric_history(run_id, metric), key=lambda point: (point.step, point.timestamp))
    return list({point.step: point.value for point in points if not math.isnan(point.value)}.items())
