"""Reports as pandas data frames: `raysim.report`, the Python form of the command `raysim report`.

    frame = raysim.report("table", "gradma-mnist", target=0.9)
    frame = raysim.report("curves", ["gradma-mnist", "gradma-femnist"], x_axis="bytes")

Numbers are not rounded. Accuracies and other shares are fractions of 1, not percentages.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from raysim.errors import ConfigError, did_you_mean
from raysim.reports.analysis import sensitivity, speedup
from raysim.reports.analysis.curves import Curve, along, curves, grid
from raysim.reports.claims import claim_section, verdicts
from raysim.reports.grouping import apart, label
from raysim.reports.runs import RunSource
from raysim.reports.table_rows import cost_unit_of, known_statistic, results_table

logger = logging.getLogger("raysim")

KeyNames = str | Sequence[str]
"""Parameter names: a list, or one comma-separated string."""

Ledger = str | Path | Sequence[str | Path] | None
"""One ledger, or several."""

Labels = str | Sequence[str] | Mapping[str, str]
"""Names to show: {value: name}; or "value=name" texts."""

Where = str | Sequence[str] | Mapping[str, Any]
"""Runs to report: {key: value}, or {key: [value, value]}; or "key=value,value" texts."""


def report(kind: str, runs: KeyNames | None = None, **options: Any) -> pd.DataFrame:
    """Return a report of tracked runs as a data frame.

    Each kind and option corresponds to `raysim report KIND --OPTION` on the command line. Omitted
    runs (unfinished runs, seeds without a value) are logged as warnings.

    Args:
        kind: "table", "curves", "sweep", "sensitivity", "speedup" or "claims". The function of this
            module with that name (`table_frame`, `curves_frame`, …) lists its options and columns.
        runs: Names of experiments, or ids of runs. The id of a sweep stands for its trials.
            Required except for "claims", which defaults to the experiment of its configuration,
            and with a ledger, of which all rows are used.
        **options: Options of the kind. All kinds accept `uri`, the address of the tracking store
            (default sqlite:///mlflow.db), and `ledger`, one or several ledgers to read in its
            place. All but "claims" accept `where`, the values of the runs to report: a mapping such
            as {"local.lr": [0.01, 0.1], "partition.alpha": 0.1}, or the texts of the
            command line, ["local.lr=0.01,0.1", "partition.alpha=0.1"].

    Returns:
        A frame with one row for each table row, curve point, parameter group or claim.

    Raises:
        ConfigError: The kind, an option, a run, the metric or a parameter does not exist.
        RaysimError: The tracking store cannot be read.
    """
    if kind not in REPORT_KINDS:
        raise ConfigError(
            f"kind: unknown kind of report '{kind}'{did_you_mean(kind, REPORT_KINDS)}"
        )
    function = REPORT_KINDS[kind]
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name != "runs"]
    if unknown := [name for name in options if name not in known]:
        hint = did_you_mean(unknown[0], known)
        raise ConfigError(f"{unknown[0]}: unknown option of report '{kind}'{hint}")
    needed = [name for name in known if parameters[name].default is inspect.Parameter.empty]
    if missing := [name for name in needed if name not in options]:
        raise ConfigError(
            f"{missing[0]}: report '{kind}' requires this option; pass {missing[0]}=…"
        )
    if runs is None and not options.get("ledger") and kind != "claims":
        raise ConfigError(
            f"runs: report '{kind}' requires runs; pass names of experiments, or ids of runs, or "
            "a ledger"
        )
    return function(_split_keys(runs) or (), **options)


def table_frame(
    runs: Sequence[str],
    *,
    uri: str | None = None,
    ledger: Ledger = None,
    where: Where = (),
    metric: KeyNames | None = None,
    statistic: KeyNames | None = None,
    select_by: str | None = None,
    target: float | str | None = None,
    group: KeyNames | None = None,
    best_of: KeyNames | None = None,
    relative_to: str | None = None,
    x_axis: str = "rounds",
    ranks: bool = False,
    paper: str | None = None,
    compare_with: str | None = None,
    label: Labels = (),
) -> pd.DataFrame:
    """Return a table of results, one row for all runs that differ only in their seed.

    Args:
        runs: Names of experiments, or ids of runs.
        uri: Address of the tracking store. Default: that of a configuration.
        ledger: Ledgers to read in place of MLflow.
        where: Values by parameter; only runs with them are reported. See `report`.
        metric: Metrics to report. Default: that of `evaluate.best`. Rows are compared by the first
            one: for `target`, `best_of`, `ranks`, `paper` and `compare_with`.
        statistic: Values of a metric in a run: best (its best value), last (that of the last
            round), last10 (the mean of the last ten evaluations). Rows are compared by the first
            one. Default: best and last.
        select_by: Metric that chooses a round in each run, such as val/accuracy: the one with its
            best value, among the rounds with a value of every metric. `best` then means the value
            at this round, and `best_of` chooses rows by this metric.
        target: Value of the first metric whose first round is reported. "paper" uses the target
            that `paper` gives for each row.
        group: Parameters that distinguish rows; `side` is allowed too. Default: all that differ.
        best_of: Parameters; only the best row of each combination of their values is kept.
        relative_to: KEY=VALUE. `target` is then a share of the best value of the runs with this
            parameter value.
        x_axis: Unit of the cost of reaching the target: rounds, bytes, virtual-time or seconds.
        ranks: Rank the methods in each scenario, and by their mean rank.
        paper: Published results to show beside the runs: gradma, fedreg, fedhist or a FILE.csv.
        compare_with: KEY=VALUE, the method with which each row is compared in the same scenario,
            seed by seed.
        label: Names of parameters and of their values.

    Returns:
        A frame with these columns: the parameters that differ; seeds (number of runs); best,
        best_std, last, last_std, last10, last10_std, as far as `statistic` names them (selected,
        selected_std in place of best with `select_by`; with several metrics best_accuracy,
        best_loss, …); chosen_round, chosen_round_std (by `select_by`); target, rounds_to_target (or
        bytes_, virtual_time_, seconds_to_target) with its _std over the runs that reached the
        target, reached (their number);
        rounds_min, rounds_max; not_finished; rank, mean_rank; paper_best, paper_std,
        difference_in_paper_stds, difference_in_own_stds, paper_rounds_to_target; versus (mean
        difference to `compare_with` over the seeds of both), versus_low, versus_high (its 95 %
        interval), versus_p (of the paired t-test), versus_seeds. Figures that were not requested
        are NaN.

    Raises:
        ConfigError: An option is invalid, or a run, the metric or a parameter does not exist.
    """
    table = results_table(
        _source(runs, uri, ledger, where),
        _log_line,
        metric=_split_keys(metric),
        statistic=_split_keys(statistic),
        select_by=select_by,
        target=target,
        group=_split_keys(group),
        best_of=_split_keys(best_of),
        relative_to=relative_to,
        x_axis=x_axis,
        ranks=ranks,
        paper=paper,
        compare_with=compare_with,
        label=[label] if isinstance(label, str) else label,
    )
    return _numeric(table.frame())


def curves_frame(
    runs: Sequence[str],
    *,
    uri: str | None = None,
    ledger: Ledger = None,
    where: Where = (),
    metric: str | None = None,
    group: KeyNames | None = None,
    panels: KeyNames | None = None,
    x_axis: str = "rounds",
) -> pd.DataFrame:
    """Return the curves of a metric, one row for each point of each curve.

    Args:
        runs: Names of experiments, or ids of runs.
        uri: Address of the tracking store. Default: that of a configuration.
        ledger: Ledgers to read in place of MLflow.
        where: Values by parameter; only runs with them are reported. See `report`.
        metric: Metric on the y-axis. Default: that of `evaluate.best`.
        group: Parameters that distinguish curves; `side` is allowed too. Default: all that differ.
        panels: Parameters whose values distinguish panels.
        x_axis: Unit of the x-axis: rounds, bytes, virtual-time or seconds.

    Returns:
        A frame with these columns: panel, curve (their labels); rounds (or bytes, virtual_time,
        seconds); mean, std (NaN for one run) and n of the metric over the seeds.

    Raises:
        ConfigError: An option is invalid, or a run, the metric or a parameter does not exist.
    """
    unit = cost_unit_of(x_axis)
    tracked_runs = _source(runs, uri, ledger, where).finished(metric, _log_line, unit)
    averaged = curves(tracked_runs, _split_keys(group), _log_line, _split_keys(panels) or ())
    return _points(averaged, unit.replace(" ", "_"))


def sweep_frame(
    runs: Sequence[str],
    *,
    x: str,
    y: str | None = None,
    uri: str | None = None,
    ledger: Ledger = None,
    where: Where = (),
    metric: str | None = None,
    target: float | None = None,
) -> pd.DataFrame:
    """Return the best value of a metric over one or two parameters.

    Args:
        runs: Names of experiments, or ids of runs.
        x: First parameter. Without `y` its values must be numbers.
        y: Second parameter.
        uri: Address of the tracking store. Default: that of a configuration.
        ledger: Ledgers to read in place of MLflow.
        where: Values by parameter; only runs with them are reported. See `report`.
        metric: Metric whose best value is reported. Default: that of `evaluate.best`.
        target: Report the first round with this value of the metric instead. Not allowed with `y`.

    Returns:
        For one parameter, a frame with the columns curve (label of the other parameters that
        differ), the parameter, mean, std and n. For two parameters: panel (label of the other
        parameters that differ), both parameters, mean.

    Raises:
        ConfigError: An option is invalid, or a run, the metric or a parameter does not exist.
    """
    if y is not None and target is not None:
        raise ConfigError(
            "target (--target): a heatmap shows best values; leave out target or y (--y)"
        )
    tracked_runs = _source(runs, uri, ledger, where).finished(metric, _log_line)
    metric = tracked_runs[0].metric
    if y is None:
        return _points(along(tracked_runs, x, metric, _log_line, target), x).drop(columns="panel")
    records = []
    for panel, members in apart(tracked_runs, [x, y]):
        _, _, cells = grid(members, x, y, metric, _log_line)
        records += [
            {"panel": panel, x: pair[0], y: pair[1], "mean": mean} for pair, mean in cells.items()
        ]
    return _with_numbers(pd.DataFrame(records, columns=["panel", x, y, "mean"]), [x, y])


def sensitivity_frame(
    runs: Sequence[str],
    *,
    keys: KeyNames | None = None,
    uri: str | None = None,
    ledger: Ledger = None,
    where: Where = (),
    metric: str | None = None,
    statistic: str = "best",
) -> pd.DataFrame:
    """Return the share of the variance of the results that each parameter explains.

    Args:
        runs: Names of experiments, or ids of runs.
        keys: Parameters to compare. Default: all that differ.
        uri: Address of the tracking store. Default: that of a configuration.
        ledger: Ledgers to read in place of MLflow.
        where: Values by parameter; only runs with them are reported. See `report`.
        metric: Metric of the results. Default: that of `evaluate.best`.
        statistic: Result of a run: best, last, or last10 (the mean of its last ten evaluations).

    Returns:
        A frame with one row for each parameter and group of its values, and one for all parameters
        together. Columns: parameter, share (of the variance, ε²), group (of values; NaN for all
        parameters together), mean (of the group's results).

    Raises:
        ConfigError: An option is invalid, or a run, the metric or a parameter does not exist.
    """
    result = known_statistic(statistic)
    tracked_runs = _source(runs, uri, ledger, where).finished(metric, _log_line)
    effects = sensitivity.effects(
        tracked_runs,
        _split_keys(keys) or (),
        sensitivity.result_of_run(result, tracked_runs[0].metric),
    )
    records = [
        (effect.name, effect.share, group, mean)
        for effect in effects
        for group, mean in effect.means or [(None, float("nan"))]
    ]
    return pd.DataFrame(records, columns=["parameter", "share", "group", "mean"])


def speedup_frame(
    runs: Sequence[str],
    *,
    target: float,
    over: str = "schedule.cohort",
    uri: str | None = None,
    ledger: Ledger = None,
    where: Where = (),
    metric: str = "theory/grad_norm2_mean",
) -> pd.DataFrame:
    """Return the rounds to a target as a function of a parameter, from runs of several lengths.

    Args:
        runs: Names of experiments, or ids of runs.
        target: Value of the metric to reach.
        over: Parameter whose values are numbers.
        uri: Address of the tracking store. Default: that of a configuration.
        ledger: Ledgers to read in place of MLflow.
        where: Values by parameter; only runs with them are reported. See `report`.
        metric: Metric whose last value is the result of a run.

    Returns:
        A frame with one row for each seed and value of the parameter. Columns: seed, the parameter,
        rounds (interpolated). The frame's `attrs` hold the slope on log axes: slope, slope_low,
        slope_high (a 95 % interval) and seeds (their number).

    Raises:
        ConfigError: Fewer than two seeds reach the target at two values of the parameter, or a run,
            the metric or the parameter does not exist.
    """
    tracked_runs = _source(runs, uri, ledger, where).finished(metric, _log_line)
    lines = speedup.speedup(speedup.ends(tracked_runs, over), target, _log_line)
    slope = speedup.slope(lines)
    records = [(seed, x, rounds) for seed, line in lines.items() for x, rounds in line.items()]
    frame = pd.DataFrame(records, columns=["seed", over, "rounds"])
    frame.attrs = {
        "slope": slope.mean,
        "slope_low": slope.low,
        "slope_high": slope.high,
        "seeds": slope.n,
    }
    return frame


def claims_frame(
    runs: Sequence[str] | None = None, *, config: str, uri: str | None = None, ledger: Ledger = None
) -> pd.DataFrame:
    """Return the claims of a configuration, compared with the results of its runs.

    Args:
        runs: Names of experiments, or ids of runs. Default: the configuration's experiment.
        config: YAML file, or name of a shipped configuration, with a section `claims`.
        uri: Address of the tracking store. Default: the configuration's.
        ledger: Ledgers to read in place of MLflow.

    Returns:
        A frame with one row for each claim and combination of the values of its `each`. Columns:
        claim, each (label of these values), left, right (results of the two sides, as text),
        difference (left minus right over seeds, with its 95 % interval, as text), seeds_for,
        seeds_against, verdict.

    Raises:
        ConfigError: The configuration has no valid section `claims`, or a run or metric does not
            exist.
    """
    source = claim_section.runs_of_claims(config, runs, uri, _paths(ledger))
    lines = verdicts.check_claims(
        claim_section.require_claims(config),
        cache(lambda metric: source.finished(metric, _log_line)),
    )
    records = [
        (
            line.claim.says,
            label(line.named),
            line.left,
            line.right,
            line.difference,
            *line.seeds,
            line.verdict,
        )
        for line in lines
    ]
    columns = ["claim", "each", "left", "right", "difference", "seeds_for", "seeds_against"]
    return pd.DataFrame(records, columns=[*columns, "verdict"])


REPORT_KINDS: dict[str, Callable[..., pd.DataFrame]] = {
    "table": table_frame,
    "curves": curves_frame,
    "sweep": sweep_frame,
    "sensitivity": sensitivity_frame,
    "speedup": speedup_frame,
    "claims": claims_frame,
}
"""Function of each kind of report."""


def _log_line(line: str) -> None:
    """Log a line as a warning."""
    logger.warning("%s", line)


def _split_keys(keys: KeyNames | None) -> list[str] | None:
    """Return parameter names as a list, or None if there are none."""
    return keys.split(",") if isinstance(keys, str) else list(keys) if keys else None


def _source(runs: Sequence[str], uri: str | None, ledger: Ledger, where: Where) -> RunSource:
    """Return the source of a report's runs."""
    if isinstance(where, Mapping):
        try:
            texts = claim_section.value_texts(where)
        except ValueError as error:
            raise ConfigError(f"where: {error}") from None
        where = [f"{key}={','.join(values)}" for key, values in texts.items()]
    return RunSource(runs, uri, _paths(ledger), [where] if isinstance(where, str) else where)


def _paths(ledger: Ledger) -> Sequence[str | Path]:
    """Return ledgers as a list."""
    return [ledger] if isinstance(ledger, str | Path) else list(ledger or ())


def _points(curves: Sequence[Curve], x: str) -> pd.DataFrame:
    """Return the points of curves as a frame whose column `x` holds their abscissas."""
    records = [
        (curve.panel, curve.label, cost, figure.mean, figure.std, figure.n)
        for curve in curves
        for cost, figure in zip(curve.costs, curve.figures, strict=True)
    ]
    return pd.DataFrame(records, columns=["panel", "curve", x, "mean", "std", "n"]).astype(
        {"std": float}
    )


def _numeric(frame: pd.DataFrame) -> pd.DataFrame:
    """Convert figures to numbers, and parameters too if all their values are numbers."""
    columns = list(frame)
    parameters = columns[: columns.index("seeds")]
    counts = {"seeds", "reached", "rounds_min", "rounds_max", "not_finished"}
    figures = {name: float for name in columns if name not in {*parameters, *counts}}
    return _with_numbers(frame.astype(figures), parameters)


def _with_numbers(frame: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Convert those text columns to numbers whose values are all numbers."""
    for name in names:
        try:
            frame[name] = pd.to_numeric(frame[name])
        except (ValueError, TypeError):
            continue
    return frame
