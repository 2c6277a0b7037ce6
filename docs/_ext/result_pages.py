"""Results: the READMEs beside the shipped configurations, as pages, with the plots that their
commands draw from ledgers, and what they say of one method."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from raysim.rules import contract

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "configs"

_PLOT = re.compile(
    r"^raysim (report (?:sweep|curves) .*--ledger configs/.*--out (\S+)\.png)$", re.M
)
"""A command that draws a plot from a ledger."""

_LINK = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")


def pages() -> dict[str, str]:
    """Return a page for each README below configs/, and one for the list of claims."""
    texts = {path.parent.name: path for path in sorted(CONFIGS.glob("*/README.md"))}
    texts["claims"] = CONFIGS / "CLAIMS.md"
    found = {name: _with_links_from_here(path) for name, path in texts.items() if path.exists()}
    return {name: _with_plots(name, text) for name, text in found.items()}


def plots() -> dict[str, str]:
    """Return the commands of plots by file, without those whose plots are committed."""
    commands: dict[str, str] = {}
    for path in sorted(CONFIGS.glob("*/README.md")):
        for command, plot in _PLOT.findall(path.read_text()):
            if not (path.parent / "pictures" / f"{plot}.png").exists():
                commands[f"{path.parent.name}-{plot}.png"] = command
    return commands


def draw(folder: Path) -> None:
    """Draw all plots into a folder, so that they show what the ledgers have.

    Args:
        folder: docs/results.
    """
    for name, command in plots().items():
        words = shlex.split(command)
        words[words.index("--out") + 1] = str(folder / name)
        raysim = [sys.executable, "-m", "raysim", *words]
        subprocess.run(raysim, cwd=REPOSITORY, check=True, capture_output=True)


def _with_plots(page: str, text: str) -> str:
    """Return the text of a page with each plot below the block of its command."""
    for name, command in plots().items():
        if name.startswith(f"{page}-"):
            end = text.index("\n```", text.index(command)) + len("\n```")
            text = f"{text[:end]}\n\n![The plot of `raysim report … --out`]({name}){text[end:]}"
    return text


def _with_links_from_here(path: Path) -> str:
    """Return a file's text for docs/results/, with links from there and figures on one line."""

    def link(found: re.Match[str]) -> str:
        target, hash_, anchor = found[1].partition("#")
        file = (path.parent / target).resolve()
        if file == REPOSITORY / "CONTRIBUTING.md":
            return f"](../contributing.md{hash_}{anchor})"
        if file.name == "CLAIMS.md":
            return f"](claims.md{hash_}{anchor})"
        if file.name == "README.md" and file.parent.parent == CONFIGS:
            return f"]({file.parent.name}.md{hash_}{anchor})"
        return f"](../../{file.relative_to(REPOSITORY)}{hash_}{anchor})"

    text = path.read_text().replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    return re.sub(_LINK, link, text)


OF_OTHER_THINGS = ("claims", "cross")
"""Pages whose tables are about claims, or about single rules, and not about methods."""


@dataclass
class Table:
    """A table of a README, with what stands around it."""

    page: str
    """The page of results that has it."""
    heading: str
    caption: str
    """The paragraph that introduces it; "" if the text above ends otherwise."""
    commands: str
    """The block of commands above it, or else below it in its chapter; "" if there is none."""
    header: list[str]
    rows: list[list[str]]
    pictures: list[str] = field(default_factory=list)
    """Links to the pictures that follow in the same chapter."""


@functools.cache  # the page of each method looks through them
def tables() -> list[Table]:
    """Return every table of the results, in the order of the pages."""
    found: list[Table] = []
    for page, text in pages().items():
        if page not in OF_OTHER_THINGS:
            found += _tables_of(page, text)
    return found


def _tables_of(page: str, text: str) -> Iterator[Table]:
    heading, paragraph, commands = "", "", ""
    chapter: list[Table] = []
    for chunk in _chunks(text):
        if chunk[0].startswith("#"):
            level, _, heading = chunk[0].partition(" ")
            if len(level) <= 2:
                yield from chapter
                chapter = []
        elif chunk[0].startswith("```"):
            commands = "\n".join(chunk[1:-1])
            for table in chapter:
                table.commands = table.commands or commands
        elif chunk[0].startswith("|"):
            header, _, *rows = [_cells(line) for line in chunk]
            caption = paragraph if paragraph.endswith(":") else ""
            chapter.append(Table(page, heading, caption, commands, header, rows))
        elif chunk[0].startswith("!["):
            for table in chapter:
                table.pictures += chunk
        paragraph = " ".join(chunk)
    yield from chapter


def _chunks(text: str) -> Iterator[list[str]]:
    """Yield the lines of each paragraph, heading, table and code block."""
    chunk: list[str] = []
    in_code = False
    for line in [*text.splitlines(), ""]:
        is_fence = line.startswith("```")
        if chunk and not in_code and (is_fence or not line.strip()):
            yield chunk
            chunk = []
        if line.strip() or in_code:
            chunk.append(line)
        if is_fence and in_code:
            yield chunk
            chunk = []
        in_code ^= is_fence


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip())[1:-1]]


BASELINE = "fedavg"
"""The method whose figures are shown beside every other one's."""


def about(method: str) -> Iterator[Table]:
    """Yield the parts of tables that have figures of a method, with FedAvg's beside them."""
    others = {_simple(name) for name in contract.ALGORITHMS} - {_simple(method), BASELINE}
    for table in tables():
        if _names(table.header, method):
            kept = [i for i, cell in enumerate(table.header) if _simple(cell) not in others]
            header, *rows = [[row[i] for i in kept] for row in [table.header, *table.rows]]
            yield replace(table, header=header, rows=rows)
        elif any(_names(row[:3], method) for row in table.rows):
            rows = [row for row in table.rows if _names(row[:3], method, BASELINE)]
            yield replace(table, rows=rows)


def _names(cells: Iterable[str], *methods: str) -> bool:
    return bool({_simple(method) for method in methods} & set(map(_simple, cells)))


def _simple(cell: str) -> str:
    """Return a method's name as it is in a configuration, however a table writes it."""
    return cell.replace("*", "").replace("-", "_").replace(" ", "").lower()
