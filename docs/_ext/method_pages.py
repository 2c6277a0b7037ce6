"""A page for each shipped method: paper, update, hyper-parameters, figures, source."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import method_costs
import yaml
from fields import entry
from result_pages import CONFIGS, REPOSITORY, about

from raysim.algorithms.fedavg import AUTHORS_CODE, FedAvgClient, FedAvgServer
from raysim.cli.pages.keys import first_paragraph, keys_of, plain, values_of_keys
from raysim.cli.pages.method_page import command
from raysim.config.loading import shipped
from raysim.rules import contract
from raysim.rules.contract import Algorithm
from raysim.rules.methods import registry


def pages() -> dict[str, str]:
    """Return a page for each shipped method, by name."""
    registry.discover()
    return {name: "\n".join(_page(method)) for name, method in contract.ALGORITHMS.items()}


def table() -> dict[str, str]:
    """Return the page `methods`, the table of all methods."""
    registry.discover()
    rows = []
    for name, method in sorted(contract.ALGORITHMS.items()):
        changed = [
            rule
            for rule, plain in ((method.client, FedAvgClient), (method.server, FedAvgServer))
            if rule is not plain
        ]
        text = " ".join(map(first_paragraph, changed)) or _other_defaults(method)
        sides = [rule is method.client for rule in changed]
        side = {(): "", (True,): "client", (False,): "server", (True, False): "both"}[tuple(sides)]
        schedule = method.defaults.get("schedule", {}).get("name", "")
        rows.append([f"[{name}](../methods/{name}.md)", text, side, schedule, method.paper])
    header = ["method", "what its rules do", "side", "schedule", "paper"]
    return {"methods": _markdown(header, rows)}


def _other_defaults(method: Algorithm) -> str:
    """Return how a method differs from FedAvg that has the same rules."""
    keys = [
        f"`{section}.{key}: {value}`"
        for section, keys in method.defaults.items()
        for key, value in keys.items()
    ]
    return f"FedAvg with {', '.join(keys)}." if keys else "Local SGD, and an average of the models."


def _page(method: Algorithm) -> Iterator[str]:
    path = _source(method)
    docstring = re.match(r'"""(.*?)"""', path.read_text(), re.DOTALL)
    assert docstring is not None, path
    yield f"# {method.name}\n"
    yield f"`raysim list algorithms {method.name}` prints its keys, their defaults and bounds.\n"
    yield f"{method.paper}. State: {method.state}. Traffic for each client: {method.traffic}.\n"
    yield method_costs.sentence(method.name)
    yield LETTERS
    run_it = command(method) or f"raysim run quickstart algorithm={method.name}"
    yield f"```bash\n{run_it}\n```\n"
    about_code, rest = _about_code(docstring[1].partition("\nRun: ")[0].strip())
    yield "\n\n".join(rest) + "\n"
    yield "## Text and code\n"
    if not about_code:
        tests = "oracle" if path.parent.name == "algorithms" else "gallery"
        mentioned = MENTIONS_A_DIFFERENCE.search("\n".join(rest[1:]))
        about_code = [SAID_ABOVE if mentioned else NOTHING_RECORDED, ORACLE.format(tests)]
    yield "\n\n".join(about_code) + "\n"
    yield from _hyperparameters(method)
    yield from _settings(method)
    yield from _configurations(method)
    yield from _figures(method)
    yield f"## Source\n\n```{{literalinclude}} ../../{path.relative_to(REPOSITORY)}\n```\n"


MENTIONS_CODE = re.compile(r"\b(code|text|printed|reconstructed)\b")
MENTIONS_A_DIFFERENCE = re.compile(r"\b(code|paper|original)\b")
SAID_ABOVE = (
    "The text above says where this method differs from the paper's text or from its authors' code."
)
NOTHING_RECORDED = (
    "No difference between the paper's text and the code of its own authors is recorded for this "
    "method."
)
ORACLE = "The oracle in `tests/{}/` follows the text."
LETTERS = (
    "P is the number of the net's parameters. Figures and papers write N for `partition.clients`, "
    "S for `schedule.cohort`, T for `rounds` and ω for `partition.alpha`.\n"
)


def _about_code(docstring: str) -> tuple[list[str], list[str]]:
    """Divide a docstring's paragraphs: those about the paper's text or code, and the others."""
    paragraphs = docstring.split("\n\n")
    about = [
        paragraph
        for paragraph in paragraphs[2:]
        if not paragraph.startswith("    ") and MENTIONS_CODE.search(paragraph)
    ]
    return about, [paragraph for paragraph in paragraphs if paragraph not in about]


def _source(method: Algorithm) -> Path:
    """Return the file that defines a method."""
    parts = method.module.removeprefix("raysim.").split(".")
    return REPOSITORY.joinpath(*parts).with_suffix(".py")


def _hyperparameters(method: Algorithm) -> Iterator[str]:
    yield "## Hyper-parameters\n"
    yield "Each is a key of the section `algorithm`.\n"
    for half, rule in (("Client", method.client), ("Server", method.server)):
        yield f"**{half} rule `{rule.name}`.** {first_paragraph(rule)}\n"
        values = values_of_keys(rule)
        for key in keys_of(rule, method.settings):
            yield entry(key, f"`{values[key.name]}`")


def _settings(method: Algorithm) -> Iterator[str]:
    if method.defaults:
        yield "## Defaults in other sections\n"
        yield (
            "The method sets these keys, unless they are set where it is named, or later. So "
            "`algorithm=` on the command line comes before the keys of a file.\n"
        )
        yield f"```yaml\n{yaml.safe_dump(plain(method.defaults), sort_keys=False)}```\n"
    for name, values in method.presets.items():
        yield f"## Preset `{name}`\n"
        author = "Luo 2023" if AUTHORS_CODE[name].items() <= values.items() else method.paper
        other = "" if author == method.paper else f" for its comparison with {method.name},"
        yield (
            f"`algorithm.preset={name}` follows the code that {author} published{other} where it "
            f"differs from the text of {author}. It sets:\n"
        )
        yield f"```yaml\n{yaml.safe_dump({'algorithm': plain(values)}, sort_keys=False)}```\n"


def _configurations(method: Algorithm) -> Iterator[str]:
    named = re.compile(rf"\b{method.name}\b")
    found = {
        name: text
        for name, text in shipped().items()
        if named.search((CONFIGS / f"{name}.yaml").read_text())
    }
    if found:
        yield "## Shipped configurations\n"
        count = "1 configuration names" if len(found) == 1 else f"{len(found)} configurations name"
        yield f":::{{dropdown}} {count} it\n"
        rows = [[f"`{name}`", text.replace("|", r"\|")] for name, text in found.items()]
        yield _markdown(["configuration", "what it is"], rows)
        yield ":::\n"


def _figures(method: Algorithm) -> Iterator[str]:
    measured = list(about(method.name))
    published = list(_published(method.name))
    if measured or published:
        yield "## Figures\n"
    shown = ""
    for (page, heading, commands), group in groupby(
        measured, key=lambda table: (table.page, table.heading, table.commands)
    ):
        yield f"### {heading} ([{page}](../results/{page}.md))\n"
        if commands and commands != shown:
            yield f"```bash\n{commands}\n```\n"
        shown = commands
        for table in group:
            yield from filter(None, [table.caption])
            yield f"\n{_markdown(table.header, table.rows)}"
    yield from dict.fromkeys(f"{picture}\n" for table in measured for picture in table.pictures)
    for folder, source, header, rows in published:
        yield f"### Published figures (`configs/{folder}/paper.csv`)\n"
        yield f"{source}\n"
        yield ":::{dropdown} The figures\n"
        yield _markdown(header, rows)
        yield ":::\n"


def _published(method: str) -> Iterator[tuple[str, str, list[str], list[list[str]]]]:
    """Yield published figures of a method: folder, where they are from, header, rows."""
    for path in sorted(CONFIGS.glob("*/paper.csv")):
        written = path.read_text().splitlines()
        lines = [line for line in written if not line.startswith("#")]
        source = " ".join(line.removeprefix("#").strip() for line in written if line[:1] == "#")
        rows = [row for row in csv.DictReader(lines) if row["algorithm"] == method]
        header = [key for key in (rows[0] if rows else {}) if any(row[key] for row in rows)]
        if rows:
            yield path.parent.name, source, header, [[row[key] for key in header] for row in rows]


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n"
