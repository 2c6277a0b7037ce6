"""Compute and compare digests of the files that a configuration names.

The content of these files is part of a run's identity. `Config.files` holds, for each key of the
configuration that names files, the sha256 of each file by path, or the version of an installed
distribution. It is filled when a run is prepared, and checked when its config.yaml is read again.

The digests cover:

- Code (`algorithm`, `client`, `server`, `task`, `model`, `schedule.sampling`, `local.lr`,
  `local.upload`, `evaluate.metrics` and `evaluate.probes`): the file and the modules that it
  imports from its folder or package. Metrics and probes do not change a result, so their digests
  are recorded but not checked.
- Parameters of a rule, of a net, and of your own task, step sizes, sampling rule or upload stages
  that name a file or a folder.
- `model.init_from`: the weights, wherever they come from.
- `schedule.client_speeds.path` and `partition.path`.
- `data` and `partition` of your own: the code of a function, and the files that its arguments
  name. Of `data` no folders count: they may hold far more than the examples, and the run itself.
- `data.path`: one digest of the decoded examples, which are in memory anyway. The examples that a
  function returns have one too, under `data.examples`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from raysim.config import entry_points
from raysim.config.distributions import distribution_of
from raysim.config.explain import annotation_types
from raysim.config.objects import python_objects
from raysim.config.objects.python_objects import PythonObject
from raysim.config.references import Code, module_files, read_code, refuse_edited_module
from raysim.config.schema import Config
from raysim.config.sections.base import Named
from raysim.config.sections.data import (
    Arrays,
    Data,
    FromFile,
    HuggingFace,
    OwnData,
    TorchvisionData,
)
from raysim.config.sections.schedule import Trace
from raysim.data import Dataset
from raysim.errors import ConfigError
from raysim.models import build
from raysim.models.initial.weights import weight_files
from raysim.rules.methods import registry
from raysim.rules.rule import field_types
from raysim.system import files

FileDigests = dict[str, dict[str, str]]
"""By configuration key: the sha256 of each file by path, and the version of each distribution."""

EMPTY_FILE_SHA256 = hashlib.sha256().hexdigest()
"""The sha256 of an empty file."""

RULES = ("algorithm", "client", "server")
"""Sections of the configuration that name rules."""

GROUPS = {
    **dict.fromkeys(RULES, entry_points.ALGORITHMS),
    "model": entry_points.MODELS,
    "data": entry_points.DATA,
    "probes": entry_points.PROBES,
}
"""The group of entry points whose names a section may have."""

SECTIONS_WITH_CODE = (*RULES, "task", "model")
"""Sections of the configuration whose `name` can refer to code."""

ANNOTATED = ("client", "server", "model")
"""Last parts of the keys of sections whose parameters have annotations, also shipped ones."""


def of_code(config: Config) -> FileDigests:
    """Return the digests of the code of rules, net and probes, without running users' files.

    Args:
        config: the configuration of the run.

    Returns:
        The digests by section.

    Raises:
        ConfigError: a file does not exist.
    """
    return {key: code.digests() for key, code in _code(config).items()}


def sources(config: Config) -> dict[str, dict[str, bytes]]:
    """Return the bytes of each file of `of_code`, by section and path.

    Args:
        config: the configuration of the run.

    Raises:
        ConfigError: a file does not exist.
    """
    return {key: dict(code.texts) for key, code in _code(config).items()}


def refuse_edited_modules(config: Config) -> None:
    """Refuse modules that were edited after this process had imported them.

    Args:
        config: the configuration of the run, whose code has been loaded.

    Raises:
        ConfigError: there is one; names the key and the module.
    """
    for key, code in _code(config).items():
        if code.carried is None:
            refuse_edited_module(code.where, f"{key}.name")


@dataclass(frozen=True)
class _NamedCode:
    """The code that a section names."""

    where: str
    """Path of a file, name of a module, or name of an object of Python."""
    texts: Mapping[str, bytes]
    """The text of each file by its path relative to that file or module."""
    carried: Code | PythonObject | None
    """The code or object that a plan brings to workers; None for a module, which they import."""

    def digests(self) -> dict[str, str]:
        """Return the sha256 of each file by path, and the version of the distribution."""
        if isinstance(self.carried, PythonObject):  # the name has the digest of the texts
            return {self.where: _sha256(self.where.encode())}
        home = "" if self.carried is None else os.path.dirname(self.where)
        digests = {
            os.path.normpath(os.path.join(home, file)): _sha256(text)
            for file, text in self.texts.items()
        }
        distribution = distribution_of(self.where) if self.carried is None else None
        return digests | dict(filter(None, [distribution]))


def _code(config: Config) -> dict[str, _NamedCode]:
    """Return the code that each section names."""
    code_by_section = {}
    for key, reference in references(config):
        where = reference.rpartition(":")[0]
        if reference.startswith(python_objects.PREFIX):
            kept = python_objects.find(reference, f"{key}.name")
            code_by_section[key] = _NamedCode(reference, kept.texts, kept)
        elif where.endswith(".py"):
            code = read_code(where, f"{key}.name")
            code_by_section[key] = _NamedCode(where, code.files, code)
        else:
            code_by_section[key] = _NamedCode(where, _module_files(where), None)
    return code_by_section


def of_data(config: Config, dataset: Dataset) -> FileDigests:
    """Return the digests of all other files that a resolved configuration names.

    A file that was empty when the run started counts as empty from then on, because the run itself
    may write to it.

    Args:
        config: the resolved configuration, with earlier digests in `files` if there are any.
        dataset: the data set of the run.

    Returns:
        The digests by configuration key.

    Raises:
        ConfigError: a file cannot be read.
    """
    digests: FileDigests = {}
    recorded = config.files or {}
    for key, path in [*_path_parameters(config, recorded), *own_paths(config)]:
        was_empty = recorded.get(key, {}).get(path) == EMPTY_FILE_SHA256
        digest = EMPTY_FILE_SHA256 if was_empty else _of_path(Path(path).expanduser(), key)
        digests[key] = {path: digest}
    if (source := build.initial_weights(config.model)) is not None:
        contents = [_of_path(file, "model.init_from") for file in weight_files(source)]
        whole = contents[0] if len(contents) == 1 else _sha256("\n".join(contents).encode())
        digests["model.init_from"] = {source: whole}
    # Examples come last: a change of a file that they are read from is the cause.
    return digests | _examples_digest(config, dataset)


def own_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key of raysim's own that names a file other than code and examples, with its path.

    Args:
        config: the configuration of the run.
    """
    if isinstance(config.schedule.client_speeds, Trace):
        yield "schedule.client_speeds.path", config.schedule.client_speeds.path
    if isinstance(config.partition, FromFile):
        yield "partition.path", config.partition.path
    for name, group in config.groups.items():
        if group.file is not None:
            yield f"groups.{name}.file", group.file


def _examples_digest(config: Config, dataset: Dataset) -> FileDigests:
    """Return the digest of examples that are the user's own; {} for other data sets."""
    match config.data:
        case OwnData(name=name):
            return {"data.examples": {f"what {name} returns": _of_examples(dataset)}}
        case Arrays(path=path) | HuggingFace(path=path):
            return {"data.path": {path: _of_examples(dataset)}}
        case TorchvisionData(dataset=name):
            return {"data.dataset": {name: _of_examples(dataset)}}
        case Data(path=str(path)):
            return {"data.path": {path: dataset.digest}}
    return {}


def _of_examples(dataset: Dataset) -> str:
    """Return the sha256 of a user's examples and of the number of their classes."""
    return _sha256(f"{dataset.digest} {dataset.n_classes}".encode())


def code(config: Config) -> tuple[Code | PythonObject, ...]:
    """Return the users' files and objects that a configuration names, without duplicates.

    Args:
        config: the configuration of the run.

    Raises:
        ConfigError: a file cannot be read, or an object is missing in this process.
    """
    # This process has one object for equal code.
    carried = {id(code.carried): code.carried for code in _code(config).values()}
    return tuple(filter(None, carried.values()))


def check_file_digests(
    recorded: Mapping[str, Mapping[str, str]] | None, current: FileDigests
) -> None:
    """Compare the digests of files with the recorded ones.

    A key that names another file than the recorded one is not compared.

    Args:
        recorded: the digests in the configuration of the run; None: nothing is compared.
        current: the digests of the files as they are now.

    Raises:
        ConfigError: a file or a distribution has changed; the message names it.
    """
    for key, now in current.items():
        before = (recorded or {}).get(key, {})
        names_other_file = next(iter(before), None) != next(iter(now), None)
        if names_other_file or not Config.determines_result(key):
            continue
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        # Files that exist on both sides come first: added or missing imports are a consequence.
        changed.sort(key=lambda name: name not in before or name not in now)
        if changed:
            raise _changed_file(key, changed[0], before.get(changed[0]), now.get(changed[0]))


def _changed_file(key: str, name: str, before: str | None, now: str | None) -> ConfigError:
    """Return the error for a file or a distribution that has changed."""
    versions = f"{(before or 'none')[:12]} then, {(now or 'none')[:12]} now"
    return ConfigError(
        f"{key}: {name} has changed since this run began ({versions}); put the old one back (old "
        "code is in the folder source/ of the run directory), or start a new run; with another "
        "rule `raysim resume --fork` starts from the last checkpoint"
    )


def references(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key that names code outside raysim, with the reference to that code.

    Args:
        config: the configuration of the run.
    """
    for key, named in _named_sections(config).items():
        name = named.name
        section = key.rstrip(".0123456789").rpartition(".")[2]
        if ":" in name:
            yield key, name
        elif section in GROUPS and (found := entry_points.find_reference(GROUPS[section], name)):
            yield key, found


def _named_sections(config: Config) -> dict[str, Any]:
    """Return the sections whose `name` can be code, by their keys."""
    sections: dict[str, Any] = {key: getattr(config, key) for key in SECTIONS_WITH_CODE}
    sections |= {f"groups.{name}.client": group.client for name, group in config.groups.items()}
    for i, name in enumerate(config.evaluate.metrics or ()):
        sections[f"evaluate.metrics.{i}"] = Named(name=name)
    sections |= config.evaluate.named_probes()
    sections["data"] = config.data if isinstance(config.data, OwnData) else None
    sections["partition"] = config.partition
    sections["partition.phases"] = config.partition.phases
    sections |= config.own_step_sizes()
    sections["schedule.sampling"] = getattr(config.schedule, "sampling", None)
    for key, stages in config.uploads.items():
        sections |= {f"{key}.{i}": stage for i, stage in enumerate(stages)}
    return {key: section for key, section in sections.items() if section is not None}


def _path_parameters(
    config: Config, recorded: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[str, str]]:
    """Yield the parameters of rules, net and users' code that name a file or a folder, with it.

    Only parameters that accept any text count.
    """
    own = dict(references(config))
    for key, section in _named_sections(config).items():
        is_known = key in own or key.rpartition(".")[2] in ANNOTATED
        if not isinstance(section, Named) or not is_known or not config.determines_result(key):
            continue
        for place, text in _parameter_texts(key, section):
            # What was a path when the run began stays one, so that a missing file is noticed.
            is_path = files.is_file(text) if key == "data" else files.is_path(text)
            if text and (is_path or text in recorded.get(place, {})):
                yield place, text


def _parameter_texts(key: str, section: Named) -> Iterator[tuple[str, str]]:
    """Yield the parameters of a section that may be any text, with their dotted keys."""
    part = key.rpartition(".")[2]
    kinds = _kinds(part, section.name) if part in ANNOTATED else {}
    for name, value in section.parameters.items():
        if key == "model" and name not in kinds and name in build.COMMON_KEYS:
            continue
        if (key, name) == ("task", "like"):
            continue
        if not isinstance(value, str) or _any_text(kinds.get(name, str)):
            yield from _nested_texts(f"{key}.{name}", value)


def _nested_texts(place: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the texts inside lists and mappings, with their dotted keys."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _nested_texts(f"{place}.{key}", inner)
    elif isinstance(value, Sequence):
        for number, inner in enumerate(value):
            yield from _nested_texts(f"{place}.{number}", inner)


def _kinds(key: str, name: str) -> Mapping[str, Any]:
    """Return the annotations of the parameters of a rule or a net."""
    if key == "model":
        parameters = build.net_parameters(name).items()
        return {k: str if p.annotation is p.empty else p.annotation for k, p in parameters}
    return field_types(registry.find_rule(key, name))


def _any_text(kind: Any) -> bool:
    """Return whether an annotation accepts any text or path."""
    return kind is Any or any(k in (str, Path, os.PathLike) for k in annotation_types(kind))


def _module_files(module: str) -> dict[str, bytes]:
    """Return the text of each file of a module; {} if the module cannot be imported."""
    try:
        return module_files(module)
    except (Exception, SystemExit):
        # Loading the rule fails with the same error and reports it.
        return {}


def _sha256(text: bytes) -> str:
    """Return the sha256 of a text in hexadecimal."""
    return hashlib.sha256(text).hexdigest()


def _of_path(path: Path, key: str) -> str:
    """Return the sha256 of a file, or of all files in a folder with their names."""
    try:
        if not path.is_dir():
            return _of_file(str(path), *_state(path))
        whole = hashlib.sha256()
        for file in sorted(filter(Path.is_file, path.rglob("*"))):
            whole.update(
                f"{file.relative_to(path)}\n{_of_file(str(file), *_state(file))}\n".encode()
            )
        return whole.hexdigest()
    except OSError as error:
        raise ConfigError(
            f"{key}: {error.filename or path} cannot be read: {error.strerror}"
        ) from None


def _state(path: Path) -> tuple[int, int, int]:
    """Return inode, size in bytes and modification time in ns, which identify a file's content."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=10_000)
def _of_file(path: str, inode: int, size: int, mtime_ns: int) -> str:
    """Return the sha256 of a file.

    The cache lets a process that prepares many runs read an unchanged file only once.
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
