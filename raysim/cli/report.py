"""`raysim report`: tables and plots of runs in MLflow or in a ledger."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from raysim.cli.base import NONE_GIVEN, check_choice, check_picture, report_app
from raysim.cli.completion import complete_configuration, complete_experiment
from raysim.cli.terminal import aside, say
from raysim.errors import ConfigError

if TYPE_CHECKING:
    from raysim.reports.runs import RunSource
    from raysim.reports.tracked import TrackedRun

T = TypeVar("T")

_SPENT = "rounds, bytes, virtual-time or seconds"

OF_COMMANDS = ("runs", "uri", "ledger", "where", "label", "form", "out", "log")
"""Parameters of commands that are no options of a kind of report."""

NOT_IN_NAMES = {*OF_COMMANDS} - {"where"}
"""Parameters that the name of a plot's file does not show as an option."""

Runs = Annotated[
    list[str],
    typer.Argument(
        help="experiments, or ids of runs (a sweep's id: its trials); with --ledger: "
        "experiments, default all",
        autocompletion=complete_experiment,
    ),
]
LedgerOption = Annotated[
    list[Path],
    typer.Option(help="a ledger to read instead of MLflow; several: --ledger A --ledger B"),
]
Where = Annotated[
    list[str],
    typer.Option(
        help="KEY=VALUE, KEY=VALUE,VALUE or KEY=0..4: report only such runs; may be repeated"
    ),
]
Uri = Annotated[str | None, typer.Option(help="tracking store; default sqlite:///mlflow.db")]
MetricOption = Annotated[
    str | None,
    typer.Option(
        help="metric to report; default: the one that selects the runs' best model, or else the "
        "first that they have of it at the clients, loss, clients/loss and train_loss"
    ),
]
GroupOption = Annotated[
    str | None,
    typer.Option(
        help="KEY,KEY: one row (line) for each value of these parameters, instead of all that "
        "differ; also side"
    ),
]
StatisticOption = Annotated[
    str | None,
    typer.Option(
        help="result of a run: best, last, or last10 (mean of the last 10 evaluations)",
        show_default="best",
    ),
]
PaperOption = Annotated[
    str | None, typer.Option(help="add a paper's figures: gradma, fedreg, fedhist or a FILE.csv")
]
LabelOption = Annotated[
    list[str],
    typer.Option(
        help="VALUE=NAME: show a value, parameter or header under this name; also "
        "KEY=VALUE=NAME; may be repeated"
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
    context: typer.Context,
    runs: Runs = NONE_GIVEN,
    uri: Uri = None,
    ledger: LedgerOption = NONE_GIVEN,
    where: Where = NONE_GIVEN,
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
    paper: PaperOption = None,
    compare_with: Annotated[
        str | None,
        typer.Option(help="KEY=VALUE: difference to this method over equal seeds, 95 % interval"),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="KEY,KEY: a column for each value of these parameters; a cell is the first "
            "statistic, with the paper's figure in brackets, ✓ within two of its deviations, ✗ "
            "not, and the other statistics where they lie more than a deviation away"
        ),
    ] = None,
    label: LabelOption = NONE_GIVEN,
    form: Annotated[str, typer.Option("--format", help="markdown, csv or latex")] = "markdown",
    out: Annotated[Path | None, typer.Option(help="file to write instead of printing")] = None,
    log: Log = False,
) -> None:
    """Print a table of results, mean ± std over seeds, by the parameters that differ."""
    from raysim.reports.table_report import table_report

    suffixes = {"markdown": "md", "csv": "csv", "latex": "tex"}
    check_choice("--format", form, suffixes)
    source, options = _source_and_options(context)
    table = table_report(source, aside, **options, label=label)
    text = getattr(table, form)()
    _say(text, out)
    if log:
        _keep_text(f"table.{suffixes[form]}", text, table.runs, source)


@report_app.command("curves")
def report_curves(
    context: typer.Context,
    runs: Runs = NONE_GIVEN,
    uri: Uri = None,
    ledger: LedgerOption = NONE_GIVEN,
    where: Where = NONE_GIVEN,
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
    _print_plot(context, "curves")


@report_app.command("sweep")
def report_sweep(
    context: typer.Context,
    x: Annotated[str, typer.Option(help="parameter of the x-axis, e.g. server.memory")],
    y: Annotated[
        str | None,
        typer.Option(
            help="second parameter, for a heatmap, e.g. server.beta2; x and y may be KEY,KEY then: "
            "a column or row for each combination of values. Only a heatmap has --paper and --label"
        ),
    ] = None,
    runs: Runs = NONE_GIVEN,
    uri: Uri = None,
    ledger: LedgerOption = NONE_GIVEN,
    where: Where = NONE_GIVEN,
    metric: MetricOption = None,
    statistic: StatisticOption = None,
    log_x: Annotated[bool, typer.Option("--log-x", help="logarithmic x-axis")] = False,
    target: Annotated[
        float | None,
        typer.Option(help="plot the first round that reached this value, instead of a result"),
    ] = None,
    paper: PaperOption = None,
    label: LabelOption = NONE_GIVEN,
    out: Picture = None,
    log: Log = False,
) -> None:
    """Plot results, mean over seeds, over one parameter (lines) or two (heatmaps).

    Other differing parameters make further lines or panels.
    """
    _print_plot(context, "sweep")


@report_app.command("sensitivity")
def report_sensitivity(
    context: typer.Context,
    keys: Annotated[str, typer.Option(help="KEY,KEY: the parameters to compare")],
    runs: Runs = NONE_GIVEN,
    uri: Uri = None,
    ledger: LedgerOption = NONE_GIVEN,
    where: Where = NONE_GIVEN,
    metric: MetricOption = None,
    statistic: StatisticOption = "best",
    out: Picture = None,
    log: Log = False,
) -> None:
    """Show how much of the spread of runs each parameter explains, as a table and a plot.

    Meant for random search, where the parameters are independent.
    """
    _print_plot(context, "sensitivity")


@report_app.command("speedup")
def report_speedup(
    context: typer.Context,
    target: Annotated[float, typer.Option(help="value of the metric to reach")],
    runs: Runs = NONE_GIVEN,
    uri: Uri = None,
    ledger: LedgerOption = NONE_GIVEN,
    where: Where = NONE_GIVEN,
    metric: Annotated[
        str, typer.Option(help="metric whose last value in a run counts")
    ] = "theory/grad_norm2_mean",
    over: Annotated[str, typer.Option(help="parameter of the x-axis")] = "schedule.cohort",
    out: Picture = None,
) -> None:
    """Plot the rounds to a target over a parameter on log axes, with the slope."""
    _print_plot(context, "speedup")


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
        list[str],
        typer.Argument(
            help="experiments, or ids of runs; default: the configuration's experiment",
            autocompletion=complete_experiment,
        ),
    ] = NONE_GIVEN,
    uri: Annotated[
        str | None, typer.Option(help="tracking store; default: the configuration's")
    ] = None,
    ledger: LedgerOption = NONE_GIVEN,
    out: Annotated[
        Path | None, typer.Option(help="file to write the table to, instead of printing it")
    ] = None,
    log: Log = False,
) -> None:
    """Check a paper's claims against runs: results of both sides, and verdicts."""
    from raysim.reports.claims import claim_section
    from raysim.reports.report_kinds import claims_report

    _refuse_to_keep(ledger, log)
    source = claim_section.runs_of_claims(config, runs, uri, ledger)
    report = claims_report(source, aside, config=config)
    _say(report.text, out)
    if log:
        _keep_text("claims.md", report.text, report.runs, source)


def _print_plot(context: typer.Context, kind: str) -> None:
    """Draw a report, print it in words, and store its file if that is wanted."""
    from raysim.reports.report_kinds import PLOTTED_KINDS

    values = context.params
    out = values["out"] or _picture(context, kind)
    check_picture(out)
    source, options = _source_and_options(context)
    if values.get("label"):
        options["label"] = values["label"]
    report = PLOTTED_KINDS[kind](source, aside, **options)
    drawn = _written(out, report.plot)
    say(f"{report.text}; {out}" if report.text else drawn)
    if values.get("log"):
        _keep_report(out, report.runs, source)


def _source_and_options(context: typer.Context) -> tuple[RunSource, dict[str, Any]]:
    """Return the source of a report's runs, and the options of its kind."""
    from raysim.reports.runs import RunSource

    values = context.params
    _refuse_to_keep(values["ledger"], values.get("log", False))
    source = RunSource(values["runs"], values["uri"], values["ledger"], values["where"])
    return source, {key: values[key] for key in values if key not in OF_COMMANDS}


def _picture(context: typer.Context, report: str) -> Path:
    """Return the default file of a plot, which names what it shows.

    Args:
        context: the command with its options; those that are not at their default are named.
        report: name of the report.
    """
    values = context.params
    names = values["runs"] or [file.stem for file in values["ledger"]]
    parts = [*(Path(name).name for name in names), report]
    for option in context.command.params:
        value = values.get(option.name)
        if option.name not in NOT_IN_NAMES and value not in (None, option.default):
            parts.append(_in_a_name(option.name, value))
    return Path(f"{'-'.join(parts)}.png")


def _in_a_name(option: str, value: str | float | bool | Sequence[str]) -> str:
    """Return an option's value, or its values, as part of the name of a file."""
    if isinstance(value, bool):
        return option
    if isinstance(value, int | float):
        return f"{option}{value:g}"
    return re.sub(r"[^\w.]+", "_", value if isinstance(value, str) else "_".join(value))


def _refuse_to_keep(ledger: Sequence[Path], log: bool) -> None:
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


def _keep_report(file: Path, tracked: Sequence[TrackedRun], source: RunSource) -> None:
    """Store the file of a report in MLflow."""
    from raysim.reports.runs import keep

    run_id = keep(file, tracked, source.names, source.uri)
    aside(f"stored in MLflow: report/{file.name} of run {run_id}")


def _keep_text(name: str, text: str, tracked: Sequence[TrackedRun], source: RunSource) -> None:
    """Store a report in words in MLflow."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_text(text + "\n")
        _keep_report(file, tracked, source)
