"""Objects that a run was given in Python: which they are, and how they are given again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raysim.by_key import by_key
from raysim.config import loading
from raysim.config.objects import python_objects
from raysim.config.objects.description import THE_RUN
from raysim.config.objects.python_objects import PREFIX, UNREADABLE, ObjectMissing, label_of
from raysim.errors import ConfigError
from raysim.runs.run_dir import PARAMETERS_FILE, SOURCES_FOLDER
from raysim.spelling import lacking

Objects = Mapping[str, Any]
"""Values of keys that were given as objects: names of objects, or lists with such names."""


def given_objects(folder: Path) -> Objects:
    """Return the keys of a run that were given as objects, with their values.

    Args:
        folder: the folder of the run; one without a configuration has none.
    """
    path = folder / "config.yaml"
    found = dict(_objects_in(loading.read_config(path))) if path.is_file() else {}
    if "algorithm" in found:  # which has the rules
        found = {key: value for key, value in found.items() if key not in ("client", "server")}
    return found


def _objects_in(section: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a section at any depth that were given as objects, with their values."""
    for name, value in section.items():
        key = f"{above}.{name}".removeprefix(".").removesuffix(".name")
        if isinstance(value, Mapping):
            yield from _objects_in(value, key)
        elif _names_in(value):
            yield key, value


def _names_in(value: Any) -> list[str]:
    """Return the names of the objects in a value."""
    if isinstance(value, str):
        return [value] if value.startswith(PREFIX) else []
    items = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping | list | tuple):
        return []
    return [name for item in items for name in _names_in(item)]


def call_with(function: str, folder: Path, objects: Objects) -> str:
    """Return the text of a call such as raysim.resume('runs/a', {'model': Net}).

    Args:
        function: name of the function, such as "resume".
        folder: the folder of the run.
        objects: the objects that the call gives again.
    """
    given = f", {_shown(objects)}" if objects else ""
    return f"raysim.{function}({str(folder)!r}{given})"


def _shown(value: Any) -> str:
    """Return a value as Python code, with objects by their names in the user's code."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_shown, value)) + "]"
    if not _names_in(value):
        return repr(value)
    label = label_of(value)
    return label if label.isidentifier() else "..."  # of a lambda


def resuming(folder: Path, objects: Objects) -> str:
    """Return the advice to resume a run with its objects."""
    return f"give them again: {call_with('resume', folder, objects)}"


def forking(folder: Path, objects: Objects) -> str:
    """Return the advice to fork a run with its objects."""
    return f"give them again, beside the new keys: {call_with('fork', folder, objects)}"


def loading_with(folder: Path, objects: Objects) -> str:
    """Return the advice to load a run with its objects, or its parameters alone."""
    arguments = [f"{key}={_shown(value)}" for key, value in objects.items() if key.isidentifier()]
    if dotted := {key: value for key, value in objects.items() if not key.isidentifier()}:
        arguments.append(f"**{_shown(dotted)}")
    name = repr(str(folder))
    advice = f"in Python, raysim.load({', '.join([name, *arguments])}).net() gives the net"
    if (folder / PARAMETERS_FILE).exists():
        advice += f", and raysim.load({name}).state_dict its parameters"
    return advice


NOT_FOR_NETS = {
    "evaluate.metrics": None,
    "evaluate.probes": [],
    "schedule.sampling": "uniform",
    "local.lr": 1.0,
}
"""For keys that may be objects and that the net of a run does not depend on, also of groups: a
value that replaces an object."""


def without_objects_for_training(folder: Path) -> dict[str, Any]:
    """Return values that replace the objects of a run that its net does not need.

    Args:
        folder: the folder of the run.
    """
    replaced: dict[str, Any] = {}
    for key in given_objects(folder):
        place = re.sub(r"^groups\.[^.]+\.", "", key)
        if place in NOT_FOR_NETS:
            replaced[key] = NOT_FOR_NETS[place]
    if "evaluate.metrics" in replaced:  # which both name
        replaced |= {"evaluate.best": None, "stop": None}
    return replaced


@contextmanager
def asking_for_objects(
    folder: Path, advice: Callable[[Path, Objects], str], replaced: Objects | None = None
) -> Iterator[None]:
    """Name all objects of a run that this process does not have, or what has changed in one.

    Args:
        folder: the folder of the run.
        advice: returns how to give the objects, for the folder and the missing ones.
        replaced: values of keys that are not needed; None: all are.

    Raises:
        ConfigError: an object is missing, or another one was given.
    """
    try:
        yield
    except ObjectMissing as error:
        if error.given is not None:
            raise _another(folder, error.reason, error.given.name) from None
        if UNREADABLE in error.name:
            raise
        missing = {}
        for key, value in given_objects(folder).items():
            is_known = all(map(python_objects.is_known, _names_in(value)))
            if not is_known and key not in (replaced or {}):
                missing[key] = value
        were = "was given as an object" if len(missing) == 1 else "were given as objects"
        raise ConfigError(
            f"{', '.join(missing)}: {were} in Python, and this process has none of the same "
            f"content; {advice(folder, missing)}"
        ) from None


def refuse_another(folder: Path, changed: Mapping[str, tuple[str, str]]) -> None:
    """Refuse an object in place of one with the same name in its code.

    Args:
        folder: the folder of the run.
        changed: keys of the configuration that differ, with the run's value and the new one.

    Raises:
        ConfigError: there is one; names its source or variable that differs.
    """
    for key, (old, new) in changed.items():
        if old.startswith(PREFIX) and new.startswith(PREFIX) and label_of(old) == label_of(new):
            section = key.removesuffix(".name")
            raise _another(folder, f"{section}: it is another object than in {folder}", new)


def _another(folder: Path, reason: str, given: str) -> ConfigError:
    """Return the error for an object that was given with another content."""
    texts = python_objects.find(given, "").texts
    return ConfigError(
        f"{reason}: {_difference(folder / SOURCES_FOLDER, texts)}; give it as it was, or start a "
        "new run"
    )


def _difference(folder: Path, texts: Mapping[str, bytes]) -> str:
    """Return in which source or value the texts of an object differ from those of a run."""
    # Sections with equal texts share one folder.
    kept = by_key(filter(Path.is_file, folder.glob("*/*")), lambda path: path.name)
    # A changed source may change values, and both what the object itself holds.
    for file in sorted(texts, key=lambda file: (file == f"{THE_RUN}.txt", file.endswith(".txt"))):
        before = [path.read_bytes() for path in kept.get(file, ())]
        if texts[file] in before:
            continue
        name, _, kind = file.rpartition(".")
        if kind == "py":
            return f"the source of '{name}' is another one"
        if name == THE_RUN:
            return "its weights, attributes or arguments are others"
        lines = lacking(texts[file].splitlines(), b"\n".join(before).splitlines())
        changed = [line.partition(b"(")[0] for line in lines]
        values = [value.decode() for value in changed if re.fullmatch(rb"[\w.-]+", value)]
        return f"'{name}' uses another value of {', '.join(values) or 'a variable'}"
    return "it uses less than in the run"
