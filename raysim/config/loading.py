"""Reading a configuration: YAML in layers, each over the one before.

The file named by `extends` (one level), the file itself, then `key=value` overrides with dots.
Where a later layer changes the name of a section, it keeps those keys of the earlier one that mean
the same under the new name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from raysim.config import limited_yaml
from raysim.config.explain import top_level_hint
from raysim.config.schema import SECTIONS_WITH_NAME, Config, may_be_a_name
from raysim.config.sections.base import name_of, named
from raysim.config.shipped_files import FOLDER, shipped_files
from raysim.errors import ConfigError, errors_begin
from raysim.spelling import did_you_mean, lacking

SCHEMA_LINE = "# yaml-language-server: "
"""Beginning of the comment that names the file's JSON Schema for editors."""


def shipped() -> dict[str, str]:
    """Return the name and the comment's first sentence of each shipped configuration."""
    return {name: _first_sentence(path.read_text()) for name, path in shipped_files().items()}


def _first_sentence(text: str) -> str:
    lines = [line for line in text.splitlines() if not line.startswith(SCHEMA_LINE)]
    comment = takewhile(re.compile("# ?[^ ]").match, lines)  # what is indented are commands
    return re.split(r"(?<=\.) (?=[A-Z])", " ".join(line.lstrip("# ") for line in comment))[0]


CLAIMS = "claims"
"""The section with a paper's claims about the runs (`raysim.reports.claims.claim_section`)."""
KEYS_OF_FILES = ("extends", "sweep", CLAIMS, "match")
"""Keys of a file that are no part of a run's configuration."""
KeysOfBoth = Callable[[str, str, str], Iterable[str]]
"""(section, old name, new name) -> the keys that mean the same under both."""


def find_config(source: str | Path, folder: Path = Path()) -> Path:
    """Return the file of a configuration: a path, or the name of a shipped configuration.

    Args:
        source: path of a YAML file, or a name such as "gradma/mnist".
        folder: folder that a relative path starts from; by default the working directory.

    Raises:
        ConfigError: there is neither such a file nor such a name.
    """
    text = str(source)
    files = shipped_files()
    given = folder / text
    shipped_file = files.get(text.removeprefix(FOLDER).removesuffix(".yaml"))
    for path in filter(None, (given, shipped_file)):
        if os.path.isfile(path):  # False, too, for what can be no path
            return path
    reason = "a folder" if os.path.isdir(given) else "neither a file nor a shipped one"
    raise ConfigError(
        f"no configuration '{source}': {reason} (`raysim list configs`){did_you_mean(text, files)}"
    )


def read_config(
    source: str | Path | Mapping[str, Any],
    overrides: Iterable[str] | Mapping[str, Any] = (),
    keys: KeysOfBoth = lambda section, before, name: (),
    defaults: Callable[[str], Mapping[str, Any]] = lambda name: {},
) -> dict[str, Any]:
    """Read a file with the files that it extends, and lay the overrides over it.

    The section `claims` is left out: it belongs to a file's runs, not to their configuration.

    Args:
        source: a path, the name of a shipped configuration, or a mapping.
        overrides: "key=value" with dots, or a mapping of the same.
        keys: returns the keys that two names of a section share; a changed name keeps only those.
        defaults: returns the values that an algorithm sets in other sections. They enter with the
            layer that names the algorithm, below that layer's own keys.

    Returns:
        The configuration as nested mappings, not validated.

    Raises:
        ConfigError: a file cannot be read, or an override is wrong.
    """
    override_values = parse_overrides(overrides)
    if CLAIMS in (key.partition(".")[0] for key in override_values):
        raise ConfigError(
            f"{CLAIMS}: what is claimed of runs stands in the file, and is not given with ="
        )
    layers = [*_layers(source), nested(override_values)]
    merged: dict[str, Any] = {}
    for i, layer in enumerate(layers):
        name = name_of(layer.get("algorithm"))
        replaced = any(map(_parts_that_end, layers[i + 1 :]))
        brought = {} if name is None or replaced else defaults(name)
        layer = merge_layers(_with_names_of(layer, brought), layer, keys)
        merged = merge_layers(merged, layer, keys)
    merged.pop(CLAIMS, None)
    return merged


def claims(source: str | Path | Mapping[str, Any]) -> Any:
    """Return the section `claims` of a file, or of one that it extends; None if it has none.

    Args:
        source: a configuration file, the name of a shipped one, or a mapping.

    Raises:
        ConfigError: a file cannot be read.
    """
    return next((layer[CLAIMS] for layer in reversed(_layers(source)) if CLAIMS in layer), None)


def configuration_files(source: str | Path) -> dict[Path, dict[str, Any]]:
    """Return the contents of a configuration file, after that of the file that it extends.

    Args:
        source: a path, or the name of a shipped configuration.

    Raises:
        ConfigError: a file cannot be read, or the extended one extends another.
    """
    path = find_config(source)
    content = _yaml(path)
    if (parent := content.pop("extends", None)) is None:
        return {path: content}
    with errors_begin(f"{path}: extends: "):
        base = find_config(parent, path.parent)
        below = _yaml(base)
    if "extends" in below:
        raise ConfigError(
            f"{path}: extends '{parent}', which extends another; only one level is allowed"
        )
    return {base: below, path: content}


def _layers(source: str | Path | Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the configuration that a file extends, and the file; or a mapping."""
    if isinstance(source, Mapping):
        return [_checked(source)]
    return list(configuration_files(source).values())


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = limited_yaml.read_yaml(path)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{path}: not valid YAML: {limited_yaml.explain_yaml_error(error)}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if content is None:
        raise ConfigError(
            f"{path}: is empty; a configuration is a mapping of sections, at least data, rounds "
            "and algorithm"
        )
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a configuration is a mapping of sections, such as 'rounds: 10'")
    for key in content:
        if not isinstance(key, str):
            raise ConfigError(
                f"{path}: {key}: is not the name of a section; a key is a word, such as 'rounds'"
            )
    for key in lacking(content, (*Config.model_fields, *KEYS_OF_FILES)):
        raise ConfigError(f"{path}: {key}: unknown key{top_level_hint(key, KEYS_OF_FILES)}")
    return content


def parse_overrides(overrides: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return "key=value" texts as a mapping from dotted keys to YAML values.

    Args:
        overrides: the texts; a mapping is returned unchanged.

    Raises:
        ConfigError: a text is not an override, or its value is not a plain value within the limits
            of `limited_yaml`.
    """
    if isinstance(overrides, Mapping):
        return _checked(overrides)
    values = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"override '{text}': expected key=value, say rounds=10 or local.lr=0.1"
            )
        try:
            values[key] = limited_yaml.load_yaml(value)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{key}: {value!r} is not a valid value: {limited_yaml.explain_yaml_error(error)}"
            ) from None
    return values


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping that is given from Python, of which no value passes the limits of a file."""
    for key, value in values.items():
        try:
            limited_yaml.check_value(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{key}: {error}") from None
    return dict(values)


def nested(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as nested sections; `algorithm=x` and `algorithm.beta1=0.5` share one.

    Args:
        overrides: values by key. Where two set the same, the longer key counts.
    """
    layer: dict[str, Any] = {}
    for key, value in sorted(overrides.items(), key=lambda entry: entry[0].count(".")):
        if key.count(".") >= limited_yaml.MAX_NESTING_DEPTH:
            raise ConfigError(
                f"override '{key}': more than {limited_yaml.MAX_NESTING_DEPTH} sections inside "
                "one another"
            )
        place, path = layer, tuple(key.split("."))
        for depth, part in enumerate(path[:-1], 1):
            inner = _section(place.get(part, {}), path[:depth])
            if not isinstance(inner, dict):
                raise ConfigError(f"override '{key}': '{part}' was already given a plain value")
            # A copy: the caller may lay the same value under other overrides too.
            place[part] = place = dict(inner)
        value, before = _section(value, path), place.get(path[-1])
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            value = merge_layers(before, value, lambda section, old, new: (), path)
        place[path[-1]] = value
    return layer


def _section(value: Any, path: Sequence[str]) -> Any:
    """Return the value at a place; a section that was shortened to its name as a mapping."""
    return named(value) if may_be_a_name(path) else value


def _with_names_of(layer: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's defaults of sections, which go with any kind that the layer names."""
    completed = dict(defaults)
    for key in set(SECTIONS_WITH_NAME) & defaults.keys() & layer.keys():
        name = name_of(layer[key])
        if name is not None:
            completed[key] = {"name": name, **named(defaults[key])}
    return completed


def merge_layers(
    below: Mapping[str, Any],
    above: Mapping[str, Any],
    keys: KeysOfBoth,
    section: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Merge a layer over another, section by section; other values replace those below.

    Args:
        below: the lower layer, or a section of it.
        above: the upper layer, or the same section of it.
        keys: returns the keys that two names of a section share.
        section: keys of the section, from the top level on; () for whole layers.
    """
    dropped = _dropped_keys(below, above, keys, section)
    merged = {key: value for key, value in below.items() if key not in dropped}
    for key, value in above.items():
        path = (*section, key)
        old, value = _section(merged.get(key), path), _section(value, path)
        if isinstance(old, dict) and isinstance(value, dict):
            value = merge_layers(old, value, keys, path)
        merged[key] = value
    return merged


def _dropped_keys(
    below: Mapping[str, Any],
    above: Mapping[str, Any],
    keys: KeysOfBoth,
    section: tuple[str, ...],
) -> set[str]:
    """Return the keys of the lower layer that have no meaning under the upper one."""
    if not section:
        return _parts_that_end(above)
    if section[-1] == "local":
        rivals = {"steps": "epochs", "epochs": "steps"}
        return {rivals[key] for key in above if key in rivals and above[key] is not None}
    before, after = below.get("name"), above.get("name", below.get("name"))
    if before != after and (may_be_a_name(section) or section[-2:] == ("local", "lr")):
        return set(below) - set(keys(section[-1], str(before), str(after)))
    return set()


def _parts_that_end(above: Mapping[str, Any]) -> set[str]:
    """Return the sections of rules below a layer that its method replaces; none if it names none.

    A layer that only sets hyper-parameters changes those of the method below.
    """
    parts = {part for part in ("algorithm", "client", "server") if name_of(above.get(part))}
    if "algorithm" in parts:
        return {"client", "server"}
    return {"algorithm"} if parts == {"client", "server"} else set()
