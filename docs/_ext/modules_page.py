"""The list of the modules of raysim, from the first lines of their docstrings."""

from __future__ import annotations

import ast
from pathlib import Path

import raysim

PACKAGE = Path(raysim.__file__).parent


def pages() -> dict[str, str]:
    """Return the page `modules`: a section for each package, with a line for each module."""
    sections = []
    folders = sorted({path.parent for path in PACKAGE.rglob("__init__.py")} - {PACKAGE})
    for folder in folders:
        if folder.is_symlink() or "templates" in folder.parts:
            continue
        name = folder.relative_to(PACKAGE)
        rows = [
            f"| `{path.name}` | {_first_line(path)} |"
            for path in sorted(folder.glob("*.py"))
            if path.name != "__init__.py"
        ]
        what = _first_line(folder / "__init__.py")
        head = [f"### `{name}/`", "", what, "", "| file | |", "|---|---|"]
        sections.append("\n".join([*head, *rows, ""]))
    return {"modules": "\n".join(sections)}


def _first_line(path: Path) -> str:
    """Return the first paragraph of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split())
