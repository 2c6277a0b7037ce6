"""Search space: the values of each key, and the points that several keys span.

The notation is the same on the command line and in a file:

  several values   local.lr=0.1,0.01              local.lr: [0.1, 0.01]
  a range          seed=0..4                      both ends included
  a draw           local.lr=loguniform(1e-3,1)

Values and ranges of all keys form a grid. Draws are random search: each such key is drawn `samples`
times, and every draw is combined with the whole grid (`seed=0..2` gives each draw three runs). The
i-th draw of a key depends on the sweep's seed, the key and i only, so with more samples the first
ones stay.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from raysim.config import limited_yaml, loading
from raysim.config.schema import SECTIONS_WITH_NAME
from raysim.config.sections.base import name_of, named, with_settings
from raysim.errors import ConfigError
from raysim.randomness import generator
from raysim.spelling import did_you_mean

DRAWN_DIGITS = 4
"""Significant digits of a drawn number; more where fewer than 100 such numbers are in its range."""

_IN_COMMON = re.compile(r"(sweep|extends|run_dir|tracking)\b")
"""Beginning of the keys that do not vary; a list is one value of theirs."""

_DRAW_FORMS = {
    "uniform": "uniform(low, high), numbers with low < high",
    "loguniform": "loguniform(low, high), numbers with 0 < low < high",
    "randint": "randint(low, high), whole numbers with low < high",
    "choice": "choice(a, b, …)",
}
"""Draws by their kind, as one writes them."""


@dataclass(frozen=True)
class Draw:
    """A random value: uniform, loguniform, randint or choice.

    uniform(low, high) and loguniform(low, high) are numbers, randint(low, high) is an integer below
    high, choice(a, b, …) is any of its arguments.
    """

    kind: str
    arguments: tuple[Any, ...]

    def value(self, seed: int, key: str, number: int) -> Any:
        """Return the number-th value that is drawn for a key.

        Args:
            seed: seed of the sweep.
            key: the key that varies; keys have independent streams.
            number: number of the draw, from 0.
        """
        u = generator(seed, f"sweep/{key}", number).random()
        if self.kind == "choice":
            return self.arguments[int(u * len(self.arguments))]
        low, high = self.arguments
        if self.kind == "randint":
            return low + int(u * (high - low))
        value = low + u * (high - low) if self.kind == "uniform" else low * (high / low) ** u
        width = (high - low) / max(abs(low), abs(high))
        digits = max(DRAWN_DIGITS, 2 + math.ceil(-math.log10(width)))
        return min(max(float(f"{value:.{digits}g}"), low), high)

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(as_text, self.arguments))})"


Axis = list[Any] | Draw
"""Values of a key: a list, or a distribution."""

MAX_TRIALS = 10_000
"""Trials of one sweep: each is checked before the first one starts."""


def as_text(value: Any) -> str:
    """Return a value as one would write it on the command line.

    Args:
        value: text is returned as it is, anything else as JSON.
    """
    return value if isinstance(value, str) else json.dumps(value)


def shown(value: Any) -> str:
    """Return a value as people read it: a section as fedprox(mu=0.1), anything else as `as_text`.

    Args:
        value: value of a key.
    """
    if (name := name_of(value)) is None:
        return as_text(value)
    settings = {key: item for key, item in named(value).items() if key != "name"}
    return with_settings(name, settings)


def title_of(values: Mapping[str, Any]) -> str:
    """Return values by key as people read them.

    Args:
        values: values of the keys that vary.
    """
    return " ".join(f"{key}={shown(value)}" for key, value in values.items())


# -- a key's values --------------------------------------------------------------------------------


def split_overrides(
    overrides: Iterable[str] | Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Axis]]:
    """Return the overrides with one value, and the values of the keys that vary.

    In a mapping a list holds several values, as it does in the section `sweep` of a file.

    Args:
        overrides: "key=value" texts, or a mapping.

    Raises:
        ConfigError: a value or a range is invalid.
    """
    if isinstance(overrides, Mapping):
        return _split_mapping(overrides)
    fixed: dict[str, Any] = {}
    axes: dict[str, Axis] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        pieces = _split_at_commas(value) if equals else []
        if len(pieces) > 1 and "" in pieces:
            raise ConfigError(f"override '{text}': a value is empty")
        values = [_parse_value(key, piece) for piece in pieces]
        for earlier in (fixed, axes):  # of a key that is given twice the last values count
            earlier.pop(key, None)
        varies = any(isinstance(value, Draw) or _is_range(value) for value in values)
        if varies or len(values) > 1:
            axes[key] = parse_axis(key, values)
        else:
            fixed |= loading.parse_overrides([text])
    return fixed, axes


def as_mapping(overrides: Iterable[str]) -> dict[str, Any]:
    """Return "key=value" texts as a mapping in which a list holds several values.

    Args:
        overrides: the texts.

    Raises:
        ConfigError: a value or a range is invalid.
    """
    fixed, axes = split_overrides(overrides)
    mapping: dict[str, Any] = {**fixed, **axes}
    for key, value in fixed.items():
        if isinstance(value, list) and not _IN_COMMON.match(key):
            mapping[key] = [value]  # one value, which is a list
    return mapping


def _split_mapping(overrides: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Axis]]:
    """Return what `split_overrides` does, for a mapping."""
    fixed: dict[str, Any] = {}
    axes: dict[str, Axis] = {}
    for key, value in overrides.items():
        if _IN_COMMON.match(key):
            fixed[key] = value
        elif isinstance(value, list | tuple | range):
            axes[key] = parse_axis(key, list(value))
        elif _is_range(value) or _parse_draw(key, value) is not None:
            axes[key] = parse_axis(key, value)
        else:
            fixed[key] = value
    return fixed, axes


def parse_axis(key: str, values_text: Any) -> Axis:
    """Return all values of a key, or the distribution from which they are drawn.

    Args:
        key: a dotted key of the configuration.
        values_text: a value, a list of values, a range such as 0..4, or a call such as "uniform(0,
            1)".

    Raises:
        ConfigError: the key cannot vary, a range or a draw is invalid, or there is no value.
    """
    if _IN_COMMON.match(key):
        raise ConfigError(f"sweep: {key} cannot vary; the trials of a sweep have it in common")
    items = values_text if isinstance(values_text, list) else [values_text]
    values: list[Any] = []
    for item in items:
        called = _parse_draw(key, item)
        if called is None and _is_range(item):
            values += _ends(key, item)
        elif called is None:
            values.append(item)
        elif len(items) == 1:
            return _checked_draw(key, called)
        else:
            raise ConfigError(
                f"{key}: {called} stands beside other values; give it alone, or choice(…) of them"
            )
    if not values:
        raise ConfigError(f"sweep: {key}: the list of values is empty")
    return values


def _parse_value(key: str, piece: str) -> Any:
    """Return one value of the command line."""
    return _parse_draw(key, piece) or loading.parse_overrides([f"{key}={piece}"])[key]


def _parse_draw(key: str, item: Any) -> Draw | None:
    """Return the draw that a text such as `uniform(0, 1)` means, unchecked; else None."""
    if isinstance(item, Draw):
        return item
    if not isinstance(item, str):
        return None
    match = re.fullmatch(r"\s*([a-z_]+)\s*\((.*?)(\))?\s*", item, re.DOTALL)
    if match is None:
        return None
    kind, inside, closed = match.groups()
    if kind not in _DRAW_FORMS:
        if re.fullmatch(r"[-+.\d\s,eE]+", inside):
            raise ConfigError(f"{key}: there is no {kind}(…){did_you_mean(kind, _DRAW_FORMS)}")
        return None
    if not closed:
        raise ConfigError(
            f'{key}: {item} is not closed; between braces put it into quotes, "{kind}(a, b)"'
        )
    if not inside.strip():
        return Draw(kind, ())
    pieces = [piece.strip() for piece in _split_at_commas(inside)]
    return Draw(kind, tuple(loading.parse_overrides([f"{key}={piece}"])[key] for piece in pieces))


def _checked_draw(key: str, draw: Draw) -> Draw:
    """Return a draw; raise ConfigError if its arguments are not those of its kind."""
    if draw.kind == "choice":
        if not draw.arguments:
            raise ConfigError(f"{key}: choice() is of nothing; write choice(a, b)")
        return draw
    types = {type(number) for number in draw.arguments}
    fits = len(draw.arguments) == 2 and types <= {int, float}
    if fits:
        low, high = draw.arguments
        fits = low < high
        if draw.kind == "loguniform":
            fits = 0 < low < high
        elif draw.kind == "randint":
            fits = low < high and types == {int}
    if not fits:
        raise ConfigError(f"{key}: {draw} is not possible; write {_DRAW_FORMS[draw.kind]}")
    return draw


def _is_range(value: Any) -> bool:
    """Return whether a value is a text such as 0..4; refuse what only looks like one."""
    if not isinstance(value, str) or not re.fullmatch(r"-?\w+\.\.-?\w*", value):
        return False
    if re.fullmatch(r"\d+\.\.\d+", value) is None:
        raise ConfigError(
            f"{value} is not a range; give two whole numbers, 0..4, the smaller first"
        )
    return True


def _ends(key: str, value: str) -> list[int]:
    if len(value) > 2 * limited_yaml.MAX_DIGITS:
        raise ConfigError(
            f"{key}: the range {value} has ends of more than {limited_yaml.MAX_DIGITS} digits"
        )
    first, last = map(int, value.split(".."))
    if last < first:
        raise ConfigError(f"{key}: the range {value} is empty; write {last}..{first}")
    if (count := last - first + 1) > MAX_TRIALS:  # before its values are listed
        raise ConfigError(
            f"{key}: the range {value} has {count:,} values; a sweep has {MAX_TRIALS:,} "
            "trials at most"
        )
    return list(range(first, last + 1))


def _split_at_commas(text: str) -> list[str]:
    """Cut at the commas that stand in no brackets, braces, parentheses or quotes."""
    pieces, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth and not quote:
            pieces.append("")
        else:
            pieces[-1] += letter
    return pieces


# -- several keys ----------------------------------------------------------------------------------


def grids(section: Any) -> list[dict[str, Axis]]:
    """Return the grids of a sweep, each key with its values.

    Args:
        section: a mapping of keys to values, or a list of such mappings.

    Raises:
        ConfigError: it is neither, or `parse_axis` refuses a key.
    """
    sections = section if isinstance(section, list) else [section]
    if not sections or not all(map(_is_grid, sections)):
        raise ConfigError("sweep: expected a mapping of keys to values, or a list of such mappings")
    return [{key: parse_axis(key, values) for key, values in grid.items()} for grid in sections]


def _is_grid(section: Any) -> bool:
    return isinstance(section, Mapping) and all(isinstance(key, str) for key in section)


def laid_over(
    grid: Mapping[str, Axis], fixed: Mapping[str, Any], axes: Mapping[str, Axis]
) -> dict[str, Axis]:
    """Return a grid of the file with the changes of the command line.

    Args:
        grid: values by key, as in the file.
        fixed: keys with one value on the command line; they leave the grid.
        axes: keys with several values on the command line; they replace those of the grid.
    """
    overridden = {_plain_key(key) for key in (*_keys_within(fixed), *axes)}
    return {
        **{key: values for key, values in grid.items() if _plain_key(key) not in overridden},
        **axes,
    }


def _keys_within(values: Mapping[str, Any], above: str = "") -> list[str]:
    """Return the dotted keys of nested values, and those of the values that are mappings."""
    keys = []
    for key, value in values.items():
        keys.append(f"{above}{key}")
        if isinstance(value, Mapping):
            keys += _keys_within(value, f"{above}{key}.")
    return keys


def check_size(grids: Iterable[Mapping[str, Axis]], samples: int) -> None:
    """Check the number of trials.

    Args:
        grids: for each grid the values of its keys.
        samples: number of draws of a grid with keys that are drawn.

    Raises:
        ConfigError: there are more than `MAX_TRIALS` trials.
    """
    total = 0
    counts: dict[str, int] = {}
    for grid in grids:
        lists = {key: len(axis) for key, axis in grid.items() if not isinstance(axis, Draw)}
        if len(lists) < len(grid):
            lists["sweep.samples"] = samples
        total += prod(lists.values())
        counts |= lists
    if total > MAX_TRIALS:
        most = max(counts, key=counts.__getitem__)
        raise ConfigError(
            f"sweep: {total:,} trials, of which {most} alone makes {counts[most]:,}; a sweep has "
            f"{MAX_TRIALS:,} at most, so take fewer values, or several sweeps"
        )


def points(grid: Mapping[str, Axis], samples: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield one mapping of keys to values for each point of a grid.

    Args:
        grid: the values of each key, or its distribution.
        samples: number of draws, each combined with the whole grid; only used if a key is drawn.
        seed: seed of the draws.
    """
    draws = {key: axis for key, axis in grid.items() if isinstance(axis, Draw)}
    for number in range(samples if draws else 1):
        drawn = {key: [draw.value(seed, _plain_key(key), number)] for key, draw in draws.items()}
        values = {**grid, **drawn}
        for point in itertools.product(*values.values()):
            yield dict(zip(values, point, strict=True))


def varied_values(points: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the keys that vary with their values: those with several, and those of some points.

    Args:
        points: values by key, of each point.
    """
    axes: dict[str, list[Any]] = {}
    for point in points:
        for key, value in point.items():
            values = axes.setdefault(key, [])
            if value not in values:
                values.append(value)
    varied = {}
    for key, values in axes.items():
        if len(values) > 1 or not all(key in point for point in points):
            varied[key] = values
    return varied


def _plain_key(key: str) -> str:
    """Return a key without `.name` where both mean the same, as for `algorithm.name`."""
    section = key.removesuffix(".name")
    return section if section in SECTIONS_WITH_NAME else key
