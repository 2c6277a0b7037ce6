"""Links between files of the repository lead somewhere."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from raysim.rules.methods.registry import discover

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
        assert is_generated or file.exists(), f"{path.name}: {target or page}"
        assert not is_generated or file.name == "index.md", (
            f"{path.name}: {target or page} is missing in a checkout; link to the README or the "
            "method's file, which the build of the documentation replaces by the page"
        )


def test_the_documentation_links_to_the_pages_made_from_files(monkeypatch):
    pytest.importorskip("sphinx", reason="needs raysim[docs]")
    monkeypatch.syspath_prepend(REPOSITORY / "docs" / "_ext")
    pages = importlib.import_module("generated_pages")
    discover()
    for link, expected in {
        "](../configs/gradma/README.md#a)": "](results/gradma.md#a)",
        "](../../configs/gradma/README.md)": "](../results/gradma.md)",
        "](../../configs/CLAIMS.md)": "](../results/claims.md)",
        "](../../algorithms/moon.py)": "](../methods/moon.md)",
        "](../../algorithms/robust/krum.py)": "](../methods/krum.md)",
        "](../../algorithms/distillation/generator.py)": None,
        "](../../configs/gradma/mnist.yaml)": None,
        "](../configs_of_others/gradma/README.md)": None,
    }.items():
        assert pages.with_links_to_pages(link) == (expected or link)
