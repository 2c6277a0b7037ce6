"""`raysim report`: tables and plots of runs in MLflow or in a ledger."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysim.cli.base import check_picture, report_app
from raysim.cli.completion import complete_configuration, complete_experiment
from raysim.cli.terminal import say
from raysim.errors import ConfigError, did_you_mean
from raysim.metrics import best_label

if TYPE_CHECKING:
    from raysim.reports.runs import RunSource
    from raysim.reports.tracked import TrackedRun

_SPENT = "rounds, bytes, virtual-time or seconds"

PLOT_OPTIONS = (
    "where",
    "x",
    "y",
    "keys",
    "metric",
    "x_axis",
    "over",
    "group",
    "panels",
    "target",
    "statistic",
    "log_x",
)
"""Options that change what a plot shows."""

Runs = Annotated[
    list[str] | None,
    typer.Argument(
        help="experiments, or ids of runs (a sweep's id: its trials); with --ledger: "
        "experiments, default all",
        autocompletion=complete_experiment,
    ),
]
LedgerOption = Annotated[
    list[Path] | None,
    typer.Option(help="a ledger to read instead of MLflow; several: --ledger A --ledger B"),
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        help="KEY=VALUE, KEY=VALUE,VALUE or KEY=0..4: report only such runs; may be repeated"
    ),
]
Uri = Annotated[str | None, typer.Option(help="tracking store; default sqlite:///mlflow.db")]
MetricOption = Annotated[
    str | None,
    typer.Option(help="metric to report; default: the one that selects the runs' best model"),
]
GroupOption = Annotated[
    str | None,
    typer.Option(
        help="KEY,KEY: one row (line) for each value of these parameters, instead of all that "
        "differ; also side"
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option(
        help="plot to write: .png, .svg or .pdf; default EXPERIMENT-REPORT-OPTIONS.png, as in "
        "quickstart-curves.png and quickstart-curves-loss-bytes.png"
    ),
]
Log = Annotated[
    bool,
    typer.Option(
        "--to-mlflow",
        help="also store the report in MLflow: in the sweep's run, or in a run of its own",
    ),
]


@report_app.command("table")
def report_table(
    runs: Runs = None,
    uri: Uri = None,
    ledger: LedgerOption = None,
    where: Where = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="METRIC,METRIC: metrics to report; rows are compared by the first one; default: "
            "the one that selects the runs' best model"
        ),
    ] = None,
    statistic: Annotated[
        str,
        typer.Option(
            help="values of a metric in a run: best, last, last10 (mean of the last 10 "
            "evaluations); rows are compared by the first one"
        ),
    ] = "best,last",
    select_by: Annotated[
        str | None,
        typer.Option(
            help="metric whose best value chooses the round of best, such as val/accuracy, and "
            "the rows of --best-of"
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="report the first round that reached this value; paper: the paper's own target"
        ),
    ] = None,
    group: GroupOption = None,
    best_of: Annotated[
        str | None,
        typer.Option(help="KEY,KEY: only the best row for each value of these parameters"),
    ] = None,
    relative_to: Annotated[
        str | None,
        typer.Option(help="KEY=VALUE: --target is a share of the best value of these runs"),
    ] = None,
    x_axis: Annotated[str, typer.Option(help=f"unit of the cost: {_SPENT}")] = "rounds",
    ranks: Annotated[
        bool, typer.Option("--ranks", help="rank the methods in each scenario and on average")
    ] = False,
    paper: Annotated[
        str | None,
        typer.Option(help="add a paper's figures: gradma, fedreg, fedhist or a FILE.csv"),
    ] = None,
    compare_with: Annotated[
        str | None,
        typer.Option(help="KEY=VALUE: difference to this method over equal seeds, 95 % interval"),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            help="VALUE=NAME: show a value, parameter, metric or header under this name; also "
            "KEY=VALUE=NAME; may be repeated"
        ),
    ] = None,
    form: Annotated[str, typer.Option("--format", help="markdown, csv or latex")] = "markdown",
    out: Annotated[Path | None, typer.Option(help="file to write instead of printing")] = None,
    log: Log = False,
) -> None:
    """Print a table of results, mean ± std over seeds, by the parameters that differ."""
    from raysim.reports.table_rows import results_table

    _one_of("--format", form, ("markdown", "csv", "latex"))
    source = _source(runs, uri, ledger, where, log)
    table = results_table(
        source,
        _aside,
        metric=_keys(metric),
        statistic=_keys(statistic),
        select_by=select_by,
        target=target,
        group=_keys(group),
        best_of=_keys(best_of),
        relative_to=relative_to,
        x_axis=x_axis,
        ranks=ranks,
        paper=paper,
        compare_with=compare_with,
        label=label or (),
    )
    text = table.text(form)
    _say(text, out)
    if log:
        _keep_text(
            f"table.{ ({'markdown': 'md', 'latex': 'tex'}.get(form, form)) }",
            text,
            [],
            table.runs,
            source,
        )


@report_app.command("curves")
def report_curves(
    context: typer.Context,
    runs: Runs = None,
    uri: Uri = None,
    ledger: LedgerOption = None,
    where: Where = None,
    metric: MetricOption = None,
    group: GroupOption = None,
    panels: Annotated[
        str | None,
        typer.Option(help="KEY,KEY: one panel for each value of these parameters; also side"),
    ] = None,
    x_axis: Annotated[str, typer.Option(help=f"x-axis: {_SPENT}")] = "rounds",
    out: Picture = None,
    log: Log = False,
) -> None:
    """Plot learning curves: mean and one standard deviation over seeds."""
    from raysim.reports.table_rows import cost_unit_of

    unit = cost_unit_of(x_axis)
    out = out or _picture(context, "curves")
    check_picture(out)
    source = _source(runs, uri, ledger, where, log)
    tracked = source.finished(metric, _aside, unit)
    say(_draw_curves(tracked, tracked[0].metric, unit, _keys(group), _keys(panels) or (), out))
    if log:
        _keep_report([out], tracked, source)


@report_app.command("sweep")
def report_sweep(
    context: typer.Context,
    x: Annotated[str, typer.Option(help="parameter of the x-axis, e.g. server.memory")],
    y: Annotated[
        str | None, typer.Option(help="second parameter, for a heatmap, e.g. server.beta2")
    ] = None,
    runs: Runs = None,
    uri: Uri = None,
    ledger: LedgerOption = None,
    where: Where = None,
    metric: MetricOption = None,
    log_x: Annotated[bool, typer.Option("--log-x", help="logarithmic x-axis")] = False,
    target: Annotated[
        float | None,
        typer.Option(
            help="plot the first round that reached this value, instead of the best value"
        ),
    ] = None,
    out: Picture = None,
    log: Log = False,
) -> None:
    """Plot the best value, mean over seeds, over one parameter (lines) or two (heatmaps).

    Other differing parameters make further lines or panels.
    """
    out = out or _picture(context, "sweep")
    check_picture(out)
    if y and log_x:
        raise ConfigError("--log-x: a heatmap has one column per value; leave out --log-x or --y")
    if y and target is not None:
        raise ConfigError("--target: a heatmap shows the best values; leave out --target or --y")
    source = _source(runs, uri, ledger, where, log)
    tracked = source.finished(metric, _aside)
    say(_draw_sweep(tracked, tracked[0].metric, x, y, log_x, out, target))
    if log:
        _keep_report([out], tracked, source)


@report_app.command("sensitivity")
def report_sensitivity(
    context: typer.Context,
    keys: Annotated[str, typer.Option(help="KEY,KEY: the parameters to compare")],
    runs: Runs = None,
    uri: Uri = None,
    ledger: LedgerOption = None,
    where: Where = None,
    metric: MetricOption = None,
    statistic: Annotated[
        str,
        typer.Option(
            help="result of a run: best, last, or last10 (mean of the last 10 evaluations)"
        ),
    ] = "best",
    out: Picture = None,
    log: Log = False,
) -> None:
    """Show how much of the spread of runs each parameter explains, as a table and a plot.

    Meant for random search, where the parameters are independent.
    """
    from raysim.reports.analysis import plots, sensitivity
    from raysim.reports.table_rows import known_statistic

    result = known_statistic(statistic)
    out = out or _picture(context, "sensitivity")
    check_picture(out)
    source = _source(runs, uri, ledger, where, log)
    tracked = source.finished(metric, _aside)
    metric = tracked[0].metric
    effects = sensitivity.effects(
        tracked, _keys(keys) or (), sensitivity.result_of_run(result, metric)
    )
    _write(
        out, lambda: plots.plot_scatter(sensitivity.clouds(effects), f"{statistic} {metric}", out)
    )
    say(f"{sensitivity.effects_markdown(effects, metric)}\n{len(tracked)} runs; {out}")
    if log:
        _keep_report([out], tracked, source)


@report_app.command("speedup")
def report_speedup(
    context: typer.Context,
    target: Annotated[float, typer.Option(help="value of the metric to reach")],
    runs: Runs = None,
    uri: Uri = None,
    ledger: LedgerOption = None,
    where: Where = None,
    metric: Annotated[
        str, typer.Option(help="metric whose last value in a run counts")
    ] = "theory/grad_norm2_mean",
    over: Annotated[str, typer.Option(help="parameter of the x-axis")] = "schedule.cohort",
    out: Picture = None,
) -> None:
    """Plot the rounds to a target over a parameter on log axes, with the slope."""
    from raysim.reports.analysis import plots, speedup

    out = out or _picture(context, "speedup")
    check_picture(out)
    source = _source(runs, uri, ledger, where, False)
    tracked = source.finished(metric, _aside)
    lines = speedup.speedup(speedup.ends(tracked, over), target, _aside)
    slope = speedup.slope(lines)
    _write(out, lambda: plots.plot_speedup(lines, slope, f"{metric} {target:g}", over, out))
    say(f"| {over} | rounds to {target:g} (each seed) |\n| --- | --- |")
    for x in sorted({x for line in lines.values() for x in line}):
        say(f"| {x:g} | {', '.join(f'{line[x]:.4g}' for line in lines.values() if x in line)} |")
    say(
        f"slope {slope.mean:.3f}, 95 % interval [{slope.low:.3f}, {slope.high:.3f}] over "
        f"{slope.n} seeds; {out}"
    )


@report_app.command("claims")
def report_claims(
    config: Annotated[
        str,
        typer.Argument(
            help="a YAML file, or the name of a shipped one, with a section 'claims'",
            autocompletion=complete_configuration,
        ),
    ],
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="experiments, or ids of runs; default: the configuration's experiment",
            autocompletion=complete_experiment,
        ),
    ] = None,
    uri: Annotated[
        str | None, typer.Option(help="tracking store; default: the configuration's")
    ] = None,
    ledger: LedgerOption = None,
    figures: Annotated[Path, typer.Option(help="folder for the plots")] = Path(),
    out: Annotated[
        Path | None, typer.Option(help="file to write the table to, instead of printing it")
    ] = None,
    log: Log = False,
) -> None:
    """Check a paper's claims against runs: results of both sides, verdicts and plots."""
    from functools import cache

    from raysim.reports import grouping
    from raysim.reports.claims import claim_section, verdicts
    from raysim.reports.table_rows import cost_unit_of

    asked = claim_section.require_claims(config)
    try:
        if any(claim.figure for claim in asked):
            figures.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--figures: cannot create {figures}: {error.strerror}; name another folder"
        ) from None
    _refuse_to_keep(ledger, log)
    source = claim_section.runs_of_claims(config, runs, uri, ledger or ())

    @cache
    def runs_of(metric: str, cost_unit: Any = "rounds") -> list[TrackedRun]:
        return source.finished(metric, _aside, cost_unit)

    lines = verdicts.check_claims(asked, runs_of)
    text = verdicts.claims_markdown(lines)
    shown = {claim.figure.file: (i, claim.figure) for i, claim in enumerate(asked) if claim.figure}
    for i, figure in shown.values():
        unit, path = cost_unit_of(figure.x_axis), figures / figure.file
        tracked = grouping.having(
            runs_of(figure.metric, unit), figure.where, f"claims.{i}.figure.where"
        )
        if figure.kind == "curves":
            _aside(_draw_curves(tracked, figure.metric, unit, figure.group, figure.panels, path))
        else:
            _aside(_draw_sweep(tracked, figure.metric, figure.x, figure.y, figure.log_x, path))
    _say(text, out)
    if log:
        drawn = [figures / name for name in shown]
        _keep_text("claims.md", text, drawn, runs_of(asked[0].left.metric), source)


def _draw_curves(
    tracked: Sequence[TrackedRun],
    metric: str,
    unit: Any,
    group: Sequence[str] | None,
    panels: Sequence[str],
    out: Path,
) -> str:
    from raysim.reports.analysis import plots
    from raysim.reports.analysis.curves import curves

    averaged = curves(tracked, group, _aside, panels)
    _write(out, lambda: plots.plot_curves(averaged, metric, unit, out))
    return f"{len(averaged)} curves in {out}"


def _draw_sweep(
    tracked: Sequence[TrackedRun],
    metric: str,
    x: str,
    y: str | None,
    log_x: bool,
    out: Path,
    target: float | None = None,
) -> str:
    from raysim.reports.analysis import plots
    from raysim.reports.analysis.curves import along, grid
    from raysim.reports.grouping import apart

    if y is None:
        lines = along(tracked, x, metric, _aside, target)
        label = best_label(metric) if target is None else f"rounds to {metric} {target:g}"
        _write(out, lambda: plots.plot_curves(lines, label, x, out, logarithmic=log_x))
        return f"{len(lines)} line{'s'[: len(lines) != 1]} in {out}"
    grids = [(name, *grid(some, x, y, metric, _aside)) for name, some in apart(tracked, [x, y])]
    _write(out, lambda: plots.plot_heatmap(grids, x, y, metric, out))
    return f"{sum(len(cells) for *_, cells in grids)} values in {out}"


def _source(
    runs: Sequence[str] | None,
    uri: str | None,
    ledger: Sequence[Path] | None,
    where: Sequence[str] | None,
    log: bool,
) -> RunSource:
    from raysim.reports.runs import RunSource

    _refuse_to_keep(ledger, log)
    return RunSource(runs or (), uri, ledger or (), where or ())


def _picture(context: typer.Context, report: str) -> Path:
    """Return the default file of a plot, which names what it shows.

    Args:
        context: the command with its options; those that are not at their default are named.
        report: name of the report.
    """
    values = context.params
    names = values["runs"] or [file.stem for file in values["ledger"] or ()]
    options = [
        _in_a_name(option.name, values[option.name])
        for option in context.command.params
        if option.name in PLOT_OPTIONS and values[option.name] not in (None, (), option.default)
    ]
    return Path(f"{'-'.join([*(Path(name).name for name in names), report, *options])}.png")


def _in_a_name(option: str, value: str | float | bool | Sequence[str]) -> str:
    """Return an option's value, or its values, as part of the name of a file."""
    if isinstance(value, bool):
        return option
    if isinstance(value, int | float):
        return f"{option}{value:g}"
    return re.sub(r"[^\w.]+", "_", value if isinstance(value, str) else "_".join(value))


def _refuse_to_keep(ledger: Sequence[Path] | None, log: bool) -> None:
    if ledger and log:
        raise ConfigError(
            "--to-mlflow: a report from a ledger does not use MLflow; leave out one of the two"
        )


def _aside(line: str) -> None:
    say(line, file=sys.stderr)


def _keys(text: str | None) -> list[str] | None:
    return text.split(",") if text else None


def _one_of(option: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise ConfigError(f"{option}: nothing called '{word}'{did_you_mean(word, known)}")


def _say(text: str, out: Path | None) -> None:
    """Print a table, or write it to a file."""
    if out is None:
        say(text)
    else:
        _write(out, lambda: out.write_text(text + "\n"))


def _write(path: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise ConfigError(f"--out: {path} cannot be written: {error.strerror}") from None


def _keep_report(files: list[Path], tracked: Sequence[TrackedRun], source: RunSource) -> None:
    from raysim.reports.runs import keep

    names = ", ".join(f"report/{file.name}" for file in files)
    _aside(f"stored in MLflow: {names} of run {keep(files, tracked, source.names, source.uri)}")


def _keep_text(
    name: str,
    text: str,
    more: Sequence[Path],
    tracked: Sequence[TrackedRun],
    source: RunSource,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_text(text + "\n")
        _keep_report([file, *more], tracked, source)
