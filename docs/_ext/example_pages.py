"""The families of shipped methods: a page for each folder of algorithms/, and the table of all.

The docstring of each file begins with "NAME (AUTHORS, VENUE YEAR)." and ends with its command,
"Run: raysim run ...".
"""

from __future__ import annotations

import ast
import io
import re
import token
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "algorithms"
"""Has a folder for each family, with a file for each method."""

MAX_LINES_OF_CODE = 75
"""Largest number of lines of code of a method in a family."""

_DOCSTRING = re.compile(
    r"(?P<name>[^(]+) \((?P<paper>.+ (?:19|20)\d\d)\)\.\n\n"
    r"(?P<text>.+)\n\nRun: (?P<command>.+)",
    re.DOTALL,
)

_NO_CODE = {
    token.COMMENT,
    token.NL,
    token.NEWLINE,
    token.INDENT,
    token.DEDENT,
    token.ENCODING,
    token.ENDMARKER,
}


@dataclass(frozen=True)
class Example:
    """A method in one file."""

    path: Path
    """The file, FAMILY/METHOD.py."""
    name: str
    """Name of the method."""
    paper: str
    """Authors, venue and year."""
    text: str
    """The rest of the docstring, without the command."""
    command: str
    """A command that runs the method, in one line."""

    @property
    def family(self) -> str:
        """Name of the folder."""
        return self.path.parent.name

    @property
    def label(self) -> str:
        """Target of links to the method."""
        return f"example-{self.path.stem}"


def examples(folder: Path = FOLDER) -> list[Example]:
    """Return the methods of the families, by family and name of the file.

    Files whose docstring has no command are no methods.
    """
    paths = sorted(folder.glob("*/*.py"))
    return [read_example(path) for path in paths if "\nRun: " in path.read_text()]


def read_example(path: Path) -> Example:
    """Return the method of a file.

    Raises:
        ValueError: its docstring does not have the form of the gallery.
    """
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    found = _DOCSTRING.fullmatch(docstring.strip())
    if found is None:
        raise ValueError(
            f"{path}: begin the docstring with 'NAME (AUTHORS, VENUE YEAR).', say in a paragraph "
            "what the method does, and end with a paragraph 'Run: raysim run ...'"
        )
    return Example(
        path, found["name"], found["paper"], found["text"], " ".join(found["command"].split())
    )


def lines_of_code(source: str) -> int:
    """Return the number of lines that are neither blank, nor only comments, nor docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {
        line
        for found in tokens
        if found.type not in _NO_CODE
        for line in range(found.start[0], found.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def title(family: str) -> str:
    """Return the title of a family from the name of its folder."""
    return family.replace("_", " ").capitalize()


def pages() -> dict[str, str]:
    """Return a page for each family, by the name of its folder."""
    families = sorted({example.family for example in examples()})
    return {family: "\n".join(_page(family)) for family in families}


def _page(family: str) -> Iterator[str]:
    yield f"# {title(family)}\n"
    for example in examples():
        if example.family != family:
            continue
        yield f"({example.label})=\n## {example.name}\n\n{example.paper}.\n"
        source = f"../../algorithms/{family}/{example.path.name}"
        yield f"```{{literalinclude}} {source}\n:caption: {example.path.name}\n```\n"
        yield f"```bash\n{example.command}\n```\n"


def table() -> dict[str, str]:
    """Return the page `examples`, the table of all methods."""
    rows = ["| family | method | paper | lines |", "| --- | --- | --- | --- |"]
    for example in examples():
        lines = lines_of_code(example.path.read_text())
        method = f"[{example.name}](#{example.label})"
        rows.append(f"| {title(example.family)} | {method} | {example.paper} | {lines} |")
    return {"examples": "\n".join([*rows, ""])}
