"""`raysim list | tracking | export | data | doctor`: commands that list, fetch and check."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from raysim.cli.base import (
    NONE_GIVEN,
    app,
    check_choice,
    check_picture,
    data_app,
    facts_table,
    print_table,
    rows_table,
    tracking_app,
)
from raysim.cli.completion import PLACES, complete_listed
from raysim.cli.pages import lists
from raysim.cli.pages.key_page import key_page, print_keys
from raysim.cli.pages.lists import LISTABLE, CatalogueRow
from raysim.cli.pages.method_page import method_page, print_method
from raysim.cli.terminal import Terminal, say
from raysim.errors import ConfigError

WITH_PAGES = [listing for listing in LISTABLE if listing in ("algorithms", *PLACES)]
"""Lists of things with keys, each of which has a page."""


@app.command(name="list")
def list_(
    listing: Annotated[
        str | None,
        typer.Argument(
            help=f"{', '.join(LISTABLE)}; without it, print these words",
            autocompletion=lambda incomplete: [w for w in LISTABLE if w.startswith(incomplete)],
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(
            help=f"one of {', '.join(WITH_PAGES)}, which is printed with its keys",
            autocompletion=complete_listed,
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            help="of algorithms, clients, servers: only those of a family (raysim list families), "
            "such as robust or general"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """List all that a configuration can name: methods, models, data sets, stages, metrics."""
    if name is not None:
        _print_page(listing, name, as_json)
        return
    rows = _catalogue(listing) if listing else [{"raysim list": word} for word in LISTABLE]
    if family is not None:
        rows = _of_family(rows, family)
    if as_json:
        say(json.dumps(rows))
        return
    if listing == "pairs":
        return _print_pairs(rows)
    print_table(rows_table(rows))


def _of_family(rows: list[CatalogueRow], family: str) -> list[CatalogueRow]:
    """Return the rows of one family of methods."""
    families = {row.get("family", "") for row in rows} - {""}
    if not families:
        raise ConfigError(
            "--family: is for lists of algorithms, clients and servers; `raysim list families` "
            "prints the families"
        )
    check_choice("--family", family, families)
    return [row for row in rows if row["family"] == family]


def _print_page(listing: str | None, name: str, as_json: bool) -> None:
    """Print the page of one of the things of a list."""
    if listing not in WITH_PAGES:
        raise ConfigError(
            f"list: {listing} have no pages of their own; `raysim list {listing}` prints them "
            f"all (with pages: {', '.join(WITH_PAGES)})"
        )
    if listing == "algorithms":
        page = method_page(name)
        return say(json.dumps(page)) if as_json else print_method(page, name)
    return say(json.dumps(key_page(listing, name))) if as_json else print_keys(listing, name)


def _catalogue(listing: str) -> list[CatalogueRow]:
    """Return the rows of a list."""
    if listing == "datasets":  # as libraries of data sets call it
        listing = "data"
    if listing not in LISTABLE and listing in (row["name"] for row in lists.rows("algorithms")):
        raise ConfigError(
            f"list: '{listing}' is an algorithm; its page: raysim list algorithms {listing}"
        )
    check_choice("list", listing, LISTABLE)
    return lists.rows(listing)


def _print_pairs(rows: list[CatalogueRow]) -> None:
    """Print the matrix of server rules (rows) and client rules (columns)."""
    widths = {client: len(client) for client in rows[0]}
    widths["server"] = max(len(row["server"]) for row in rows)
    say("  ".join(key.ljust(width) for key, width in widths.items()))
    for row in rows:
        server, *names = row.values()
        marks = [name if name in ("", "x") else "*" for name in names]
        say("  ".join(map(str.ljust, [server, *marks], widths.values())).rstrip())
    say(
        "\n*: a named algorithm (raysim list algorithms)   x: runs as client=... server=...   "
        "empty: refused"
    )


@tracking_app.command()
def sync(
    run_dir: Annotated[Path, typer.Argument(help="the run's folder")],
    also: Annotated[
        list[str],
        typer.Option(help="send them to this tracker too: tensorboard or wandb"),
    ] = NONE_GIVEN,
    new_run: Annotated[
        bool,
        typer.Option("--new-run", help="send all records to a new run; the former was deleted"),
    ] = False,
) -> None:
    """Send the records that a run could not send while its tracking server was down."""
    from raysim.tracking import followers
    from raysim.tracking.late_sending import replay_spool

    for name in also:
        check_choice("--also", name, followers.FOLLOWERS)
    say(f"{replay_spool(run_dir, new_run)} records sent")
    for name, count in followers.catch_up(run_dir, also).items():
        say(f"{count} records sent to {name}")


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="the run's folder, or its id in MLflow")],
    format: Annotated[
        str, typer.Option(help="torch (a state_dict), onnx, or mlflow (a model of the run)")
    ] = "torch",
    which: Annotated[
        str, typer.Option(help="final parameters, or those of the best checkpoint")
    ] = "final",
    out: Annotated[Path | None, typer.Option(help="the file; default: in the run's folder")] = None,
    keep_adapters: Annotated[
        bool, typer.Option(help="with torch: keep adapters of peft, which are merged otherwise")
    ] = False,
    client: Annotated[
        int | None,
        typer.Option(help="number of a client, for the net that it is evaluated with"),
    ] = None,
) -> None:
    """Export the net of a run, to use it elsewhere."""
    from typing import cast, get_args

    from raysim.runs.artifacts import export as exports

    check_choice("--format", format, get_args(exports.Format))
    check_choice("--which", which, get_args(exports.Which))
    if out is not None and format == "mlflow":
        raise ConfigError("--out: a model in MLflow has no file; leave it out")
    if keep_adapters and format != "torch":
        raise ConfigError(f"--keep-adapters: {format} has no adapters; leave it out")
    say(
        exports.export(
            run,
            cast(Any, format),
            cast(Any, which),
            out,
            keep_adapters=keep_adapters,
            client=client,
        )
    )


@data_app.command()
def fetch(
    name: str, root: Annotated[str | None, typer.Option(help="folder; default $RAYSIM_DATA")] = None
) -> None:
    """Download a data set."""
    from raysim import data

    data.download_dataset(name, root)
    say(f"{name} is there")


@data_app.command()
def show(
    name: str,
    root: Annotated[str | None, typer.Option(help="folder; default $RAYSIM_DATA")] = None,
    path: Annotated[
        str | None, typer.Option(help="path of the data, for folder, users, arrays and your own")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="file for the grid of samples; default NAME.png")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Print the sizes and classes of a data set, and plot a grid of its images."""
    from raysim import data
    from raysim.config.explain import checked_section
    from raysim.config.sections.data import DataOnly

    if out is not None:
        check_picture(out)
    location = {key: value for key, value in (("root", root), ("path", path)) if value is not None}
    dataset = data.load_dataset(
        checked_section(DataOnly, {"data": {"name": name, **location}}).data
    )
    facts = data.dataset_summary(dataset)
    if dataset.are_images and dataset.are_labelled:
        picture = out or Path(f"{name.rpartition(':')[2]}.png")
        data.plot_samples(dataset, picture)
        facts["samples"] = str(picture)
    if as_json:
        say(json.dumps(facts))
        return
    counts = facts.pop("counts")
    facts["users"] = facts.pop("groups") or "none"
    table = facts_table(facts)
    for name, (train, test) in counts.items():
        table.add_row(f"class {name}", f"{train} train, {test} test")
    print_table(table)


@app.command()
def doctor() -> None:
    """Check that this machine can run raysim."""
    from raysim.planning import doctor as diagnosis

    console = Terminal()
    failures = 0
    for name, good, report in diagnosis.examine():
        failures += good is False
        mark = {True: "ok ", None: "but", False: "NOT"}[good]
        console.tell(f"{mark}  {name:<12} {report}")
    if failures:
        sys.exit(1)
