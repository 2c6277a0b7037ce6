"""Links between files of the repository lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
GENERATED = ("docs/generated/", "docs/methods/", "docs/results/")
"""Folders whose pages are written when the documentation is built."""
LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)|(?<![\w/])(docs/[\w/-]+\.md)")
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
FILES = [
    *REPOSITORY.glob("*.md"),
    *(REPOSITORY / "cluster").glob("*.md"),
    *(REPOSITORY / "configs").rglob("*.md"),
    *(
        path
        for path in (REPOSITORY / "docs").rglob("*.md")
        if not str(path.relative_to(REPOSITORY)).startswith((*GENERATED, "docs/_build/"))
    ),
]


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=str(p.relative_to(REPOSITORY))) for p in FILES]
)
def test_links_lead_to_files(path: Path) -> None:
    text = CODE.sub("", path.read_text())
    for target, page in LINK.findall(text):
        file = (REPOSITORY / page if page else path.parent / target).resolve()
        is_generated = str(file.relative_to(REPOSITORY)).startswith(GENERATED)
        assert file.exists() or is_generated, f"{path.name}: {target or page}"
