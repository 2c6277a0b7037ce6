"""`raysim report`: tables and pictures of what is in MLflow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysim.cli.base import report_app
from raysim.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    pass

_SPENT = "rounds, bytes, virtual-time or seconds"


@report_app.command("table")
def report_table(
    runs: Annotated[list[str], typer.Argument(help="experiments, or ids of runs; that of a sweep is for its trials")],
    uri: Annotated[str | None, typer.Option(help="of the tracking store; default sqlite:///mlflow.db")] = None,
    metric: Annotated[str, typer.Option(help="what to tell of")] = "accuracy",
    target: Annotated[float | None, typer.Option(help="tell the first round that reached this value")] = None,
    group: Annotated[str | None, typer.Option(help="KEY,KEY: rows by these parameters, not by all that differ")] = None,
    best_of: Annotated[str | None, typer.Option(help="KEY,KEY: for each of these values only the best row")] = None,
    of: Annotated[str | None, typer.Option(help="KEY=VALUE: --target is a share of what these runs reached")] = None,
    spent: Annotated[str, typer.Option(help=f"the way to the target in {_SPENT}")] = "rounds",
    form: Annotated[str, typer.Option("--format", help="markdown, csv or latex")] = "markdown",
    out: Annotated[Path | None, typer.Option(help="a file to write, instead of printing")] = None,
) -> None:
    """What runs reached, mean ± std over seeds; rows by the parameters that differ."""
    from raysim import report

    _one_of("--format", form, ("markdown", "csv", "latex"))
    unit = _unit(spent)
    if of and target is None:
        raise ConfigError("--of: says whose best --target is a share of; give --target too")
    found = report.finished_runs(runs, uri, metric, _aside, unit)
    aim = report.fraction_of(found, of, target, metric) if of and target is not None else target
    rows = report.rows(found, metric, target=aim, group=_keys(group), best_of=_keys(best_of), say=_aside)
    if form == "csv":
        text = report.as_csv(rows, unit)
    else:
        text = (report.latex if form == "latex" else report.markdown)(rows, metric, aim, unit)
    if out is None:
        print(text)
    else:
        _write(out, lambda: out.write_text(text + "\n"))


@report_app.command("curves")
def report_curves(
    runs: Annotated[list[str], typer.Argument(help="experiments, or ids of runs; that of a sweep is for its trials")],
    uri: Annotated[str | None, typer.Option(help="of the tracking store; default sqlite:///mlflow.db")] = None,
    metric: Annotated[str, typer.Option(help="what to tell of")] = "accuracy",
    group: Annotated[
        str | None, typer.Option(help="KEY,KEY: lines by these parameters, not by all that differ")
    ] = None,
    spent: Annotated[str, typer.Option(help=f"over {_SPENT}")] = "rounds",
    out: Annotated[Path, typer.Option(help="the picture to write")] = Path("curves.png"),
) -> None:
    """How runs went, mean and a band of one std over seeds, over what they spent, as a picture."""
    from raysim import pictures, report

    unit = _unit(spent)
    found = report.curves(report.finished_runs(runs, uri, metric, _aside, unit), _keys(group), _aside)
    _write(out, lambda: pictures.curves(found, metric, unit, out))
    print(f"{len(found)} curves in {out}")


@report_app.command("heatmap")
def report_heatmap(
    runs: Annotated[list[str], typer.Argument(help="experiments, or ids of runs; that of a sweep is for its trials")],
    x: Annotated[str, typer.Option(help="the parameter of the columns, e.g. server.beta1")],
    y: Annotated[str, typer.Option(help="the parameter of the rows, e.g. server.beta2")],
    uri: Annotated[str | None, typer.Option(help="of the tracking store; default sqlite:///mlflow.db")] = None,
    metric: Annotated[str, typer.Option(help="what to tell of")] = "accuracy",
    out: Annotated[Path, typer.Option(help="the picture to write")] = Path("heatmap.png"),
) -> None:
    """The best of runs over two of their parameters, mean over seeds, as a picture."""
    from raysim import pictures, report

    columns, lines, cells = report.grid(report.finished_runs(runs, uri, metric, _aside), x, y, metric, _aside)
    _write(out, lambda: pictures.heatmap(columns, lines, cells, x, y, metric, out))
    print(f"{len(cells)} values in {out}")


def _aside(line: str) -> None:
    print(line, file=sys.stderr)


def _keys(text: str | None) -> list[str] | None:
    return text.split(",") if text else None


def _one_of(option: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise ConfigError(f"{option}: nothing called '{given}'{did_you_mean(given, known)}; use {', '.join(known)}")


def _unit(spent: str) -> Any:
    _one_of("--spent", spent, ("rounds", "bytes", "virtual-time", "seconds"))
    return spent.replace("-", " ")


def _write(path: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise ConfigError(f"--out: {path} cannot be written: {error.strerror}") from None
