"""`raysim ledger`: merge ledgers and check them."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysim.cli.base import NONE_GIVEN, ledger_app
from raysim.cli.terminal import aside, say
from raysim.errors import ConfigError, counted

if TYPE_CHECKING:
    from raysim.ledger.ledger_row import Row

_MISSING = "FILE"

File = Annotated[Path, typer.Argument(help="a ledger written by raysim sweep --ledger")]
Out = Annotated[Path, typer.Option("--out", "-o", help="the ledger to write")]
Keys = Annotated[
    list[str],
    typer.Argument(help="key=value that does not change results, e.g. data.root=/data"),
]


@ledger_app.command("merge")
def merge(
    files: Annotated[list[Path], typer.Argument(help="ledgers; the first row of a run counts")],
    out: Out,
) -> None:
    """Merge several ledgers into one; equal rows are written once."""
    from raysim.ledger import ledger_file

    if out.exists() and out.resolve() not in [file.resolve() for file in files]:
        raise ConfigError(f"--out: {out} exists; name it among the ledgers, or another file")
    kept, copies = ledger_file.merge(files, out, aside, missing=_MISSING)
    counts = Counter(row.key for row in kept)
    say(
        f"{len(kept)} rows of {len(counts)} runs in {out}; left out: {copies} with the same digest "
        "again"
    )
    if again := len(kept) - len(counts):
        kinds = sorted({row.cpu for row in kept if counts[row.key] > 1})
        say(
            f"kept: {again} of runs that another row has with another digest; the kinds of CPU of "
            f"such runs: {'; '.join(kinds)}"
        )


@ledger_app.command("check")
def check(
    file: File,
    keys: Keys = NONE_GIVEN,
    recompute: Annotated[
        int,
        typer.Option(
            min=0,
            help="rows to train again, to compare their digests: drawn at random, those of this "
            "kind of CPU first",
        ),
    ] = 0,
    where: Annotated[
        list[str],
        typer.Option(help="KEY=VALUE: train again only such rows, e.g. algorithm=fedavg"),
    ] = NONE_GIVEN,
) -> None:
    """List damaged, contradicting and outdated rows; exit with 1 if there are any."""
    from raysim.config.loading import parse_overrides
    from raysim.ledger import ledger_file
    from raysim.reports.selecting import with_values
    from raysim.runs import recomputed

    problems: list[str] = []

    def name(line: str) -> None:
        problems.append(line)
        aside(line)

    unused = [*keys, *(f"--where {text}" for text in where)]
    if unused and not recompute:
        raise ConfigError(f"{unused[0]}: only for rows that are trained again; add --recompute 1")
    rows = ledger_file.read_rows([file], name, missing=_MISSING)
    if problems:
        aside(f"`raysim ledger merge {file} -o NEW` leaves such rows out")
    for row in rows:
        if reason := recomputed.why_other_identity(row):
            name(f"{row.place}: {reason}")
    n_problems = counted(len(problems), "problem")
    say(f"{len(rows)} rows, {len(ledger_file.unique(rows))} runs, {n_problems}")
    overrides = parse_overrides(keys)
    chosen = with_values(recomputed.comparable(rows), where, "row", attrgetter("params"))
    for row in chosen[:recompute]:
        problems += _differences_of_row(row, overrides)
    if problems:
        raise typer.Exit(1)


def _differences_of_row(row: Row, overrides: dict[str, Any]) -> list[str]:
    """Train a row again; return what contradicts it, [] if nothing does."""
    from raysim.config.objects.python_objects import ObjectMissing
    from raysim.runs import recomputed
    from raysim.system.cpu_kind import cpu_kind, may_be_this_kind

    if not may_be_this_kind(row.cpu):
        say(
            f"{row.place} ({row.title}): not trained again: it was computed on {row.cpu}, "
            f"whose last bits differ from those of this machine, {cpu_kind()}"
        )
        return []
    aside(f"{row.place} ({row.title}): training again; it took {row.seconds:.0f} s")
    try:
        result = recomputed.recompute(row, overrides)
    except ObjectMissing as missing:
        say(f"{row.place} ({row.title}): not trained again: {missing.reason}")
        return []
    say(result.text)
    return [result.text] if result.is_comparable and not result.same else []
