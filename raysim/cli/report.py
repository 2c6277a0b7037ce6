"""`raysim report`: tables and plots of runs in MLflow or in a ledger."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from raysim.cli.base import check_picture, report_app
from raysim.cli.completion import complete_configuration, complete_experiment
from raysim.cli.terminal import aside, say
from raysim.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from raysim.reports.runs import RunSource
    from raysim.reports.tracked import TrackedRun

T = TypeVar("T")

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
    from raysim.reports.table_rows import table_report

    suffixes = {"markdown": "md", "csv": "csv", "latex": "tex"}
    if form not in suffixes:
        raise ConfigError(f"--format: nothing called '{form}'{did_you_mean(form, suffixes)}")
    source = _source(runs, uri, ledger, where, log)
    table = table_report(
        source,
        aside,
        metric=metric,
        statistic=statistic,
        select_by=select_by,
        target=target,
        group=group,
        best_of=best_of,
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
        _keep_text(f"table.{suffixes[form]}", text, [], table.runs, source)


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
    from raysim.reports.report_kinds import curves_report
    from raysim.reports.table_rows import cost_unit_of

    cost_unit_of(x_axis)  # reading the runs takes long, so this is checked before
    out = out or _picture(context, "curves")
    check_picture(out)
    source = _source(runs, uri, ledger, where, log)
    curves = curves_report(source, aside, metric=metric, group=group, panels=panels, x_axis=x_axis)
    say(_written(out, curves.plot))
    if log:
        _keep_report([out], curves.runs, source)


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
    from raysim.reports.report_kinds import sweep_report

    out = out or _picture(context, "sweep")
    check_picture(out)
    if y and log_x:
        raise ConfigError("--log-x: a heatmap has one column per value; leave out --log-x or --y")
    source = _source(runs, uri, ledger, where, log)
    swept = sweep_report(source, aside, x=x, y=y, metric=metric, target=target)
    say(_written(out, lambda path: swept.plot(path, log_x)))
    if log:
        _keep_report([out], swept.runs, source)


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
    from raysim.reports.report_kinds import sensitivity_report

    out = out or _picture(context, "sensitivity")
    check_picture(out)
    source = _source(runs, uri, ledger, where, log)
    effects = sensitivity_report(source, aside, keys=keys, metric=metric, statistic=statistic)
    _written(out, effects.plot)
    say(f"{effects.text()}\n{len(effects.runs)} runs; {out}")
    if log:
        _keep_report([out], effects.runs, source)


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
    from raysim.reports.report_kinds import speedup_report

    out = out or _picture(context, "speedup")
    check_picture(out)
    source = _source(runs, uri, ledger, where, False)
    report = speedup_report(source, aside, target=target, over=over, metric=metric)
    _written(out, report.plot)
    say(report.text())
    slope = report.slope
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
    from raysim.reports.claims import claim_section
    from raysim.reports.report_kinds import claims_report

    claims = claim_section.require_claims(config)
    try:
        if any(claim.figure for claim in claims):
            figures.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--figures: cannot create {figures}: {error.strerror}; name another folder"
        ) from None
    _refuse_to_keep(ledger, log)
    source = claim_section.runs_of_claims(config, runs, uri, ledger or ())
    report = claims_report(source, aside, config=config)
    text = report.text()
    drawn = _written(figures, report.plot)
    _say(text, out)
    if log:
        _keep_text("claims.md", text, drawn, report.runs_of(claims[0].left.metric), source)


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
    parts = [*(Path(name).name for name in names), report]
    for option in context.command.params:
        value = values.get(option.name)
        if option.name in PLOT_OPTIONS and value not in (None, (), option.default):
            parts.append(_in_a_name(option.name, value))
    return Path(f"{'-'.join(parts)}.png")


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


def _say(text: str, out: Path | None) -> None:
    """Print a table, or write it to a file."""
    if out is None:
        say(text)
    else:
        _written(out, lambda path: path.write_text(text + "\n"))


def _written(path: Path, write: Callable[[Path], T]) -> T:
    """Write a file; return what the function that writes it returns."""
    try:
        return write(path)
    except OSError as error:
        raise ConfigError(f"--out: {path} cannot be written: {error.strerror}") from None


def _keep_report(files: list[Path], tracked: Sequence[TrackedRun], source: RunSource) -> None:
    from raysim.reports.runs import keep

    names = ", ".join(f"report/{file.name}" for file in files)
    aside(f"stored in MLflow: {names} of run {keep(files, tracked, source.names, source.uri)}")


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
