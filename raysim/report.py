"""Tables and curves of runs, straight from the tracking store: what was reached, mean ± std over seeds.

Runs that agree on every parameter that differs in the selection, but for the seed, make one row; so the columns for
what was varied appear by themselves. Only what is in MLflow is read: runs of other people are as good as one's own.
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from raysim.config import NAMED, Tracking
from raysim.errors import ConfigError, RaysimError, did_you_mean
from raysim.spool import masked
from raysim.tracking import absolute, connected

Spent = Literal["rounds", "bytes", "virtual time", "seconds"]

LAST = 10
"""How many of the last evaluated values the mean at the end is taken over."""

_NOT_THE_RESULT = ("name", "run_dir", "tracking.", "checkpoint.", "data.root", "data.download", "evaluate.batch")
_NOT_THE_RESULT += tuple(f"resources.{key}" for key in ("executor", "actors", "cpus", "server_threads", "address"))
_NOT_THE_RESULT += ("resources.timeout", "sweep.", "store.")
_FOLLOWS = ("client.", "server.", "block.", "model.")  # sections whose keys mostly follow from a name
_NONE = "–"


@dataclass(frozen=True)
class Run:
    """A run: its resolved parameters as text, (round, value) of one metric by ascending rounds, what had been spent by
    each round (nothing given: the rounds themselves), and, if it is not finished, in a word or two why."""

    run_id: str
    params: Mapping[str, str]
    history: Sequence[tuple[int, float]]
    spent: Mapping[int, float] = field(default_factory=dict)
    unfinished: str = ""

    def cost(self, round: int) -> float:
        return self.spent.get(round, float(round))


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
        to_target: what was spent (rounds, unless the runs say otherwise) when the target was first reached, over the
            runs that did (`to_target.n` of `seeds`); None if none did, or no target was given.
        rounds: (fewest, most) rounds that the runs have done.
        run_ids: of the runs.
        unfinished: how many of them are not finished, in words.

    Runs without a value count as `seeds` only; where none has one, there are no figures.
    """

    parameters: dict[str, str]
    seeds: int
    best: Figure | None
    last: Figure | None
    to_target: Figure | None
    rounds: tuple[int, int]
    run_ids: tuple[str, ...]
    unfinished: str = ""


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
        runs: of any experiment.
        metric: what their histories are of. The smaller the better if its name ends in "loss", else the larger.
        target: the value whose first round is wanted.
        group: the parameters that make a row, instead of all that differ.
        best_of: keeps, for each combination of these parameters, only the row of the best mean `best`.
        say: told, in a line, if rows of `group` hold runs that differ in more than their seed.

    Raises:
        ConfigError: `group` or `best_of` names a parameter that no run has.
    """
    lower, together = metric.endswith("loss"), grouped(runs, group, say)
    found = [(_row(named, members, lower, target), members[0].params) for named, members in together]
    if not best_of:
        return [row for row, _ in found]
    wanted = _resolved(runs, best_of, "--best-of")
    if strange := [key for key in wanted if group and key not in _resolved(runs, group, "--group")]:
        raise ConfigError(f"--best-of: '{strange[0]}' is not among the parameters of --group")
    chosen: dict[tuple, Row] = {}
    for row, params in found:
        place = tuple(params.get(key) for key in wanted)
        rival = chosen.get(place)
        if rival is None or order(row, lower) < order(rival, lower):
            chosen[place] = row
    return list(chosen.values())


def order(row: Row, lower: bool) -> float:
    """Rows sort by this, the best first and those without a figure last."""
    if row.best is None or math.isnan(row.best.mean):
        return math.inf
    return row.best.mean if lower else -row.best.mean


def grouped(
    runs: Sequence[Run], group: Sequence[str] | None = None, say: Callable[[str], None] = lambda line: None
) -> list[tuple[dict[str, str], list[Run]]]:
    """Runs that differ only in their seed, with what tells them from the others; in the order of these values."""
    keys = _resolved(runs, group, "--group") if group else _varied([run.params for run in runs])
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(run.params.get(key) for key in keys), []).append(run)
    if mixed := sorted({key for members in groups.values() for key in _varied([run.params for run in members])}):
        say(f"a row holds runs that differ in {', '.join(map(short, mixed))}")
    named = [
        ({key: value for key, value in zip(keys, values, strict=True) if value is not None}, members)
        for values, members in groups.items()
    ]
    return sorted(named, key=lambda each: [_by_size(each[0].get(key)) for key in keys])


@dataclass(frozen=True)
class Curve:
    """The course of runs that differ only in their seed, over the rounds that all of them have: what had been spent by
    then (the mean), and the metric."""

    label: str
    spent: list[float]
    figures: list[Figure]


def curves(
    runs: Sequence[Run], group: Sequence[str] | None = None, say: Callable[[str], None] = lambda line: None
) -> list[Curve]:
    """One curve for each row that `rows` would give."""
    found = []
    for named, members in grouped(runs, group, say):
        members = [run for run in members if run.history]
        if not members:
            continue
        histories = [dict(run.history) for run in members]
        common = sorted(set.intersection(*map(set, histories)))
        figures = [Figure.of([history[t] for history in histories]) for t in common]
        spent = [statistics.fmean(run.cost(t) for run in members) for t in common]
        label = ", ".join(v if short(k) in NAMED else f"{k} {v}" for k, v in named.items()) or "all"
        found.append(Curve(label, spent, [figure for figure in figures if figure]))
    return found


def grid(
    runs: Sequence[Run], x: str, y: str, metric: str = "accuracy", say: Callable[[str], None] = lambda line: None
) -> tuple[list[str], list[str], dict[tuple[str, str], float]]:
    """The values of two parameters, by size, and the mean best of the runs with each pair of them.

    Raises:
        ConfigError: a parameter is not there, or no run has both.
    """
    found = rows(runs, metric, group=[x, y], say=say)
    pairs = [(tuple(row.parameters.values()), row.best.mean) for row in found if row.best]
    cells = {(values[0], values[1]): best for values, best in pairs if len(values) == 2}
    if not cells:
        raise ConfigError(f"report: no run has both {x} and {y}")
    columns, lines = (sorted({pair[i] for pair in cells}, key=_by_size) for i in (0, 1))
    return columns, lines, cells


def fraction_of(runs: Sequence[Run], reference: str, share: float, metric: str = "accuracy") -> float:
    """`share` of the best that the runs with the parameter KEY=VALUE reached (the mean over their seeds, of the best
    such row): Xu et al. 2022 give rounds to shares of what SGD reached.

    Raises:
        ConfigError: no run has this parameter and value.
    """
    key, equals, value = reference.partition("=")
    if not equals:
        raise ConfigError(f"--of: '{reference}' is not KEY=VALUE; write, for example, algorithm=fedavg")
    (full,) = _resolved(runs, [key], "--of")
    chosen = [run for run in runs if run.params.get(full) == value]
    if not chosen:
        known = sorted({run.params[full] for run in runs if full in run.params})
        raise ConfigError(f"--of: no run has {key}={value}{did_you_mean(value, known)}; there are {', '.join(known)}")
    best = [row.best.mean for row in rows(chosen, metric) if row.best]
    return share * (min if metric.endswith("loss") else max)(best)


def _row(parameters: dict[str, str], members: list[Run], lower: bool, target: float | None) -> Row:
    def reached(value: float) -> bool:
        return target is not None and (value <= target if lower else value >= target)

    runs = [run for run in members if run.history]
    values = [[value for _, value in run.history] for run in runs]
    arrivals = [next((run.cost(t) for t, value in run.history if reached(value)), None) for run in runs]
    best = Figure.of([(min if lower else max)(each) for each in values])
    trained = [[value for t, value in run.history if t > 0] or [run.history[-1][1]] for run in runs]
    last = Figure.of([statistics.fmean(each[-LAST:]) for each in trained])
    ends = [run.history[-1][0] for run in runs] or [0]
    reasons = Counter(run.unfinished for run in members if run.unfinished)
    return Row(
        parameters,
        len(members),
        best,
        last,
        Figure.of([spent for spent in arrivals if spent is not None]),
        (min(ends), max(ends)),
        tuple(run.run_id for run in members),
        ", ".join(f"{count} {reason}" for reason, count in reasons.items()),
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


def _by_size(text: str | None) -> tuple:
    """Numbers by size, then text."""
    try:
        return (0, float(text or ""), "")
    except ValueError:
        return (1, 0.0, text or "")


# -- as text -----------------------------------------------------------------------------------------------------------


def markdown(
    table: Sequence[Row], metric: str = "accuracy", target: float | None = None, spent: Spent = "rounds"
) -> str:
    """Rows as a Markdown table; accuracies in percent."""
    head, *lines = _cells(table, metric, target, spent)
    lines = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def latex(table: Sequence[Row], metric: str = "accuracy", target: float | None = None, spent: Spent = "rounds") -> str:
    """Rows as a LaTeX tabular (with booktabs); the best mean of the column "best" in bold."""
    special = {**{c: f"\\{c}" for c in "&%$#_{}"}, "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {"\\": r"\textbackslash{}", "±": r"$\pm$", _NONE: "--"}
    head, *lines = [
        ["".join(special.get(c, c) for c in cell) for cell in line] for line in _cells(table, metric, target, spent)
    ]
    worth = [order(row, metric.endswith("loss")) for row in table]
    winner = worth.index(min(worth)) if worth else -1
    column = len(_columns(table)) + 1
    if winner >= 0:
        lines[winner][column] = rf"\textbf{{{lines[winner][column]}}}"
    body = [" & ".join(line) + r" \\" for line in lines]
    columns = "l" * (column - 1) + "r" * (len(head) - column + 1)
    top = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", " & ".join(head) + r" \\", r"\midrule"]
    return "\n".join([*top, *body, r"\bottomrule", r"\end{tabular}"])


def _cells(table: Sequence[Row], metric: str, target: float | None, spent: Spent) -> list[list[str]]:
    """The head and the lines of a table for people."""
    percent = metric.endswith("accuracy")

    def figure(f: Figure | None) -> str:
        if f is None:
            return _NONE
        scale, form = (100, ".2f") if percent else (1, ".4g")
        return f"{f.mean * scale:{form}}" + (f" ± {f.std * scale:{form}}" if f.std is not None else "")

    def arrival(row: Row) -> str:
        if row.to_target is None:
            return _NONE
        missed = f" ({row.to_target.n}/{row.seeds})" if row.to_target.n < row.seeds else ""
        return f"{row.to_target.mean:.4g}{missed}"

    unit = " %" if percent else ""
    keys = _columns(table)
    head = [*map(short, keys), "seeds", f"best {metric}{unit}", f"mean of last {LAST}{unit}"]
    head += [f"{spent} to {target:.4g}"] if target is not None else []
    tells = ["not finished"] if any(row.unfinished for row in table) else []
    lines = [[*head, "rounds done", *tells]]
    for row in table:
        cells = [row.parameters.get(key, _NONE) for key in keys]
        cells += [str(row.seeds), figure(row.best), figure(row.last)]
        cells += [arrival(row)] if target is not None else []
        cells.append("–".join(map(str, dict.fromkeys(row.rounds))))
        lines.append([*cells, *([row.unfinished] if tells else [])])
    return lines


def as_csv(table: Sequence[Row], spent: Spent = "rounds") -> str:
    """Rows as CSV, every number in full."""
    keys = _columns(table)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    to_target = f"{spent.replace(' ', '_')}_to_target"
    figures = ["best", "best_std", "last", "last_std", to_target, "reached", "rounds_min", "rounds_max"]
    tells = ["not_finished"] if any(row.unfinished for row in table) else []
    writer.writerow([*map(short, keys), "seeds", *figures, *tells])
    for row in table:
        arrival = row.to_target
        writer.writerow(
            [
                *(row.parameters.get(key) for key in keys),
                row.seeds,
                *(number for f in (row.best, row.last) for number in ((f.mean, f.std) if f else (None, None))),
                *(arrival.mean if arrival else None, arrival.n if arrival else 0, *row.rounds),
                *([row.unfinished] if tells else []),
            ]
        )
    return text.getvalue().rstrip("\n")


def _columns(table: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in table for key in row.parameters))


def short(key: str) -> str:
    return key.removesuffix(".name") if key.removesuffix(".name") in NAMED else key


# -- from the tracking store -------------------------------------------------------------------------------------------


def finished_runs(
    wanted: Sequence[str],
    uri: str | None = None,
    metric: str = "accuracy",
    say: Callable[[str], None] = lambda line: None,
    spent: Spent = "rounds",
) -> list[Run]:
    """The finished runs in MLflow, with the history of a metric.

    Args:
        wanted: names of experiments, and ids of runs (that of a sweep stands for its trials).
        uri: of the tracking store; the default is a configuration's.
        metric: of which at least one value must be there.
        say: told, in a line each, of runs that are left out.
        spent: what the runs' cost is in.

    Raises:
        ConfigError: an experiment, run or metric is not there.
        RaysimError: the store cannot be read.
    """
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
        return [
            Run(
                run.info.run_id,
                run.data.params,
                _history(client, run.info.run_id, metric),
                _spent(client, run.info.run_id, spent),
            )
            for run in kept
        ]
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


def _spent(client: Any, run_id: str, kind: Spent) -> dict[int, float]:
    """What had been spent by each round: bytes sent either way, virtual time, or seconds from the first round on."""
    if kind == "rounds":
        return {}
    if kind == "seconds":
        took = _history(client, run_id, "seconds")
        rounds, seconds = [0, *(t for t, _ in took)], [0.0, *(value for _, value in took)]
        return dict(zip(rounds, accumulate(seconds), strict=True))
    if kind == "virtual time":
        return dict(_history(client, run_id, "virtual_time"))
    down, up = (dict(_history(client, run_id, key)) for key in ("bytes_down", "bytes_up"))
    return {0: 0.0} | {t: down[t] + up[t] for t in down if t in up}


def _history(client: Any, run_id: str, metric: str) -> list[tuple[int, float]]:
    """(round, value), by rounds; where a round was logged twice, the later one counts."""
    points = sorted(client.get_metric_history(run_id, metric), key=lambda point: (point.step, point.timestamp))
    return list({point.step: point.value for point in points if not math.isnan(point.value)}.items())
