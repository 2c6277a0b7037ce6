"""Programs that tests run: rules, nets, tasks and data sets, as users write them in files of their own."""

from __future__ import annotations

from pathlib import Path


def program(name: str) -> str:
    """Return the text of a file of this folder, without `.py` in its name."""
    return Path(__file__).with_name(f"{name}.py").read_text()
