"""Root of the command line, to which the other modules of this package add commands."""

from __future__ import annotations

import io
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.table import Table

from raysim.cli.completion import complete_configuration, complete_override
from raysim.cli.terminal import Terminal, say
from raysim.errors import ConfigError
from raysim.spelling import did_you_mean
from raysim.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Federated-learning simulation on Ray.",
)
report_app = typer.Typer(no_args_is_help=True, help="Reports on runs: tables, plots, claims.")
job_app = typer.Typer(no_args_is_help=True, help="Jobs of a cluster: list, logs, stop.")
data_app = typer.Typer(no_args_is_help=True, help="Data sets: fetch them, look at them.")
ledger_app = typer.Typer(no_args_is_help=True, help="Ledgers: merge, check.")
tracking_app = typer.Typer(no_args_is_help=True, help="Records that are not yet in MLflow.")
for name, group in (
    ("report", report_app),
    ("job", job_app),
    ("data", data_app),
    ("ledger", ledger_app),
    ("tracking", tracking_app),
):
    app.add_typer(group, name=name)

UNLIMITED_COLUMNS = 100_000
"""Width of a table that is not printed on a terminal."""

NONE_GIVEN: list[Any] = []
"""Default of arguments and options that may be repeated."""

Configuration = Annotated[
    str,
    typer.Argument(
        help="a YAML file, or the name of a shipped one (raysim list configs)",
        autocompletion=complete_configuration,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="last line of standard output: one JSON object")
]
Overrides = Annotated[
    list[str],
    typer.Argument(
        help="key=value with dots, e.g. local.lr=0.1 algorithm=fedavg",
        autocompletion=complete_override,
    ),
]


def _print_versions(wanted: bool) -> None:
    """Print the versions and exit, if wanted."""
    if not wanted:
        return
    say(f"raysim {__version__}")
    say(f"Python {platform.python_version()}")
    for name, distribution in (("torch", "torch"), ("Ray", "ray"), ("MLflow", "mlflow")):
        say(f"{name} {metadata.version(distribution)}")
    raise typer.Exit


@app.callback()
def _command_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_versions,
            is_eager=True,
            help="Versions of raysim, Python, torch, Ray and MLflow.",
        ),
    ] = False,
) -> None:
    """Federated-learning simulation on Ray."""


def facts_table(facts: Mapping[str, object]) -> Table:
    """Return a table with a row for each fact, without a header.

    Args:
        facts: facts by their titles.
    """
    table = Table(show_header=False, box=None)
    for title, fact in facts.items():
        table.add_row(title, str(fact))
    return table


def rows_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Return a table of rows that have the same columns.

    Args:
        rows: texts by column, of each row; at least one row.
    """
    table = Table(*rows[0], box=None)
    for row in rows:
        table.add_row(*map(str, row.values()))
    return table


def print_table(table: Table, console: Terminal | None = None) -> None:
    """Print a table without cutting a word.

    On a terminal, cells of several words are wrapped, except those of the first column. Elsewhere
    each row is one line.

    Control characters, which names from a tracking server may have, are replaced.

    Args:
        table: the table; column widths and overflow are set in place.
        console: where the table is printed; None: standard output.
    """
    console = console or Terminal()
    for column in table.columns:
        words = [word for cell in column.cells for word in str(cell).split()]
        column.min_width = max(map(cell_len, words), default=0)
        column.overflow = "fold"
    table.pad_edge = False
    table.columns[0].no_wrap = True
    table.columns[0].min_width = max(map(cell_len, map(str, table.columns[0].cells)), default=0)
    if console.is_terminal:
        console.print(table, crop=False)
        return
    whole = Terminal(file=io.StringIO(), width=UNLIMITED_COLUMNS)
    with whole.capture() as text:
        whole.print(table, crop=False)
    for line in text.get().splitlines():
        say(line.rstrip(), file=console.file)


def check_choice(option: str, value: str, choices: Iterable[str]) -> None:
    """Check that a word is one of several.

    Args:
        option: name of the option or the command, for the error.
        value: the word that the user gave.
        choices: the words that there are.

    Raises:
        ConfigError: it is none of them; the message names the nearest one.
    """
    choices = list(choices)
    if value not in choices:
        raise ConfigError(f"{option}: nothing called '{value}'{did_you_mean(value, choices)}")


def check_picture(path: Path) -> None:
    """Check that the suffix of --out is that of a picture.

    Args:
        path: the file that the user named.

    Raises:
        ConfigError: the suffix is not .png, .svg or .pdf.
    """
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(
            f"--out: '{path}' is not a plot's name; it must end in .png, .svg or .pdf"
        )
