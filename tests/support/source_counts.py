"""Counts of raysim's source: `python tests/support/source_counts.py` prints them as a table.

A line of code is one with a token that is no comment, docstring or import. A decision is a branch, a
loop, an except clause, a conditional expression, a boolean operator, or a comprehension's `for` or
`if`.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import raysim

PACKAGE = Path(raysim.__file__).parent

BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)

COMMENTED = ("engine", "server", "training", "distributed")
"""Rooms in which comments are counted."""

LIKE_FILES = ("algorithms", "configs", "cli/templates", "config/sections", "testing")
"""Folders whose files are all of one kind."""

DUPLICATE_LINES = 8
"""Lines of code, without blanks and comments, that count as a duplicate when they occur twice."""


@dataclass(frozen=True)
class FileCounts:
    """The code lines, comments and decisions of a file."""

    code_lines: list[int]
    """Numbers of the lines with code."""
    comments: int
    decisions: int
    functions: list[tuple[str, int]]
    """Decisions of each function, with its name."""


@dataclass
class Counts:
    """What is counted in some files."""

    files: int = 0
    code_lines: int = 0
    comments: int = 0
    decisions: int = 0
    functions: dict[str, int] = field(default_factory=dict)
    """Decisions of each function, by "file:name"; those of functions inside it count too."""

    def add(self, path: Path) -> None:
        """Count a file."""
        file = of_file(path)
        self.files += 1
        self.code_lines += len(file.code_lines)
        self.comments += file.comments
        self.decisions += file.decisions
        for name, count in file.functions:
            self.functions[f"{path.relative_to(PACKAGE)}:{name}"] = count


@cache
def of_file(path: Path) -> FileCounts:
    """Return the counts of a file, which is read once."""
    text = path.read_text()
    tree = ast.parse(text)
    lines: set[int] = set()
    comments = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments += 1
        elif token.type not in LAYOUT:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    functions = [(node.name, decisions(node)) for node in outermost_functions(tree)]
    return FileCounts(sorted(lines), comments, decisions(tree), functions)


def decisions(tree: ast.AST) -> int:
    """Return the number of decisions below a node."""
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, BRANCHES):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
    return count


def outermost_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield functions and methods, without those inside of others."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FUNCTIONS):
            yield node
        else:
            yield from outermost_functions(node)


def sources(*rooms: str) -> list[Path]:
    """Return the files of rooms, or of the whole package; methods and configurations not."""
    roots = [PACKAGE / room for room in rooms] or [PACKAGE]
    return sorted(path for root in roots for path in root.rglob("*.py"))


def counted(*rooms: str) -> Counts:
    """Return the counts of rooms, or of the whole package."""
    counts = Counts()
    for path in sources(*rooms):
        counts.add(path)
    return counts


def modules_by_folder() -> dict[str, int]:
    """Return the number of modules in each folder of unlike files."""
    folders = Counter(str(path.parent.relative_to(PACKAGE)) for path in sources())
    return {
        name: count - 1  # without __init__.py
        for name, count in folders.most_common()
        if name not in (".", *LIKE_FILES)
    }


def duplicates() -> list[tuple[str, str]]:
    """Return pairs of places with the same lines of code."""
    seen: dict[tuple[str, ...], tuple[Path, int]] = {}
    pairs: list[tuple[str, str]] = []
    for path in sources():
        written = path.read_text().splitlines()
        numbers = of_file(path).code_lines
        last_found = -DUPLICATE_LINES
        for i in range(len(numbers) - DUPLICATE_LINES + 1):
            window = tuple(written[n - 1].strip() for n in numbers[i : i + DUPLICATE_LINES])
            other = seen.setdefault(window, (path, numbers[i]))
            if other != (path, numbers[i]) and i >= last_found + DUPLICATE_LINES:
                last_found = i
                place = f"{path.relative_to(PACKAGE)}:{numbers[i]}"
                pairs.append((f"{other[0].relative_to(PACKAGE)}:{other[1]}", place))
    return pairs


def main() -> None:
    """Print the table."""
    whole, commented = counted(), counted(*COMMENTED)
    folders = modules_by_folder()
    largest = max(folders, key=folders.__getitem__)
    over = {limit: sum(n > limit for n in whole.functions.values()) for limit in (10, 15)}
    engine = sources("engine")
    rows = [
        ("largest folder of unlike modules", f"{folders[largest]} ({largest}/)"),
        ("engine/: lines", sum(len(path.read_text().splitlines()) for path in engine)),
        ("engine/: modules", sum(path.name != "__init__.py" for path in engine)),
        ("files", whole.files),
        ("code lines", whole.code_lines),
        ("decisions in 100 code lines", f"{100 * whole.decisions / whole.code_lines:.1f}"),
        ("functions with more than 15 decisions", over[15]),
        ("functions with more than 10 decisions", over[10]),
        (
            f"comments in 100 code lines of {', '.join(COMMENTED)}",
            f"{100 * commented.comments / commented.code_lines:.1f}",
        ),
        (f"pairs of {DUPLICATE_LINES} equal lines", len(duplicates())),
    ]
    for name, value in rows:
        print(f"| {name} | {value} |")
    if "--functions" in sys.argv:
        ordered = sorted(whole.functions.items(), key=lambda item: -item[1])
        for name, count in ordered[: over[15]]:
            print(f"{count:4d} {name}")


if __name__ == "__main__":
    main()
