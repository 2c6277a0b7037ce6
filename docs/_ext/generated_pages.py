"""Pages that are made from the program itself, written before Sphinx reads its sources.

Each generator is a function without arguments that returns Markdown by page name.
"""

from __future__ import annotations

import re
from pathlib import Path

import command_pages
import configuration_page
import example_pages
import method_pages
import metrics_page
import modules_page
import result_pages
from sphinx.application import Sphinx

from raysim.rules import contract

GENERATORS = {
    "examples": (example_pages.pages,),
    "generated": (
        configuration_page.pages,
        command_pages.pages,
        example_pages.table,
        method_pages.table,
        metrics_page.pages,
        modules_page.pages,
    ),
    "methods": (method_pages.pages,),
    "results": (result_pages.pages,),
}
"""The generators of each folder of docs/."""

WRITTEN_BY_HAND = {"index.md", "research_tasks.md"}


def write(source_folder: Path) -> None:
    """Write all generated pages and plots, and remove those that nothing generates any more."""
    for folder, generators in GENERATORS.items():
        pages = {name: text for pages_of in generators for name, text in pages_of().items()}
        directory = source_folder / folder
        directory.mkdir(exist_ok=True)
        for path in directory.glob("*.md"):
            if path.stem not in pages and path.name not in WRITTEN_BY_HAND:
                path.unlink()
        for name, text in pages.items():
            path = directory / f"{name}.md"
            if (
                not path.exists() or path.read_text() != text
            ):  # an unchanged page is not built again
                path.write_text(text)
    result_pages.draw(source_folder / "results")


_COMMITTED = re.compile(
    r"\]\((?P<up>(?:\.\./)*)\.\./(?:configs/(?:(?P<result>\w+)/README|(?P<claims>CLAIMS))\.md"
    r"|algorithms/(?:\w+/)?(?P<method>\w+)\.py)"
)
"""A link from a page of docs/ to a file that has a page of its own in the documentation."""


def with_links_to_pages(text: str) -> str:
    """Return a page whose links to READMEs and methods lead to the pages made from them.

    In a checkout, where these pages are missing, the links lead to the files.

    Args:
        text: the page, whose links are relative to it.
    """

    def link(found: re.Match[str]) -> str:
        if method := found["method"]:
            is_method = method in contract.ALGORITHMS
            return f"]({found['up']}methods/{method}.md" if is_method else found[0]
        return f"]({found['up']}results/{found['result'] or 'claims'}.md"

    return _COMMITTED.sub(link, text)


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    """Change the links of a page that Sphinx has read."""
    source[0] = with_links_to_pages(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.connect("builder-inited", lambda app: write(Path(app.srcdir)))
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
