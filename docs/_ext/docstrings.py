"""Docstrings and signatures of the Python reference, as Markdown and autodoc need them."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

_FUNCTION = re.compile(r"<function (?:[^<>]|<[^<>]*>)*>")


def readable(signature: str) -> str:
    """Return a signature with `...` for each default that is a function."""
    return _FUNCTION.sub("...", signature)


def _readable_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str, returns: str
) -> tuple[str | None, str]:
    return signature and readable(signature), returns


def _escape_bars(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Keep the bars of |x|, which reStructuredText would substitute."""
    lines[:] = [line.replace("|", r"\|") for line in lines]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.connect("autodoc-process-signature", _readable_signature)
    app.connect("autodoc-process-docstring", _escape_bars)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
