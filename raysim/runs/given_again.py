"""Objects that a run was given in Python, and that are given again with another content."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from raysim.config.objects.description import THE_RUN
from raysim.config.objects.python_objects import ObjectMissing
from raysim.errors import ConfigError
from raysim.runs.run_dir import SOURCES_FOLDER


@contextmanager
def naming_difference(folder: Path) -> Iterator[None]:
    """Say what has changed if a run's object is missing and one of another content was given.

    Args:
        folder: the folder of the run.

    Raises:
        ConfigError: another one was given.
        ObjectMissing: none was given.
    """
    try:
        yield
    except ObjectMissing as error:
        if error.given is None:
            raise
        raise ConfigError(
            f"{error.reason}: {_difference(folder / SOURCES_FOLDER, error.given.texts)}; give it "
            "as it was, or start a new run"
        ) from None


def _difference(folder: Path, texts: Mapping[str, bytes]) -> str:
    """Return in which source or value the texts of an object differ from those of a run."""
    kept: dict[str, set[bytes]] = {}
    for path in folder.glob("*/*"):  # sections with equal texts share one folder
        if path.is_file():
            kept.setdefault(path.name, set()).add(path.read_bytes())
    # A changed source may change values, and both what the object itself holds.
    for file in sorted(texts, key=lambda file: (file == f"{THE_RUN}.txt", file.endswith(".txt"))):
        if texts[file] in kept.get(file, ()):
            continue
        name, _, kind = file.rpartition(".")
        if kind == "py":
            return f"the source of '{name}' is another one"
        if name == THE_RUN:
            return "its weights, attributes or arguments are others"
        before = {line for text in kept.get(file, ()) for line in text.splitlines()}
        lines = [line for line in texts[file].splitlines() if line not in before]
        changed = [line.partition(b"(")[0] for line in lines]
        values = [value.decode() for value in changed if re.fullmatch(rb"[\w.-]+", value)]
        return f"'{name}' uses another value of {', '.join(values) or 'a variable'}"
    return "it uses less than in the run"
