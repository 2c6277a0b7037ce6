"""Grouping of tracked runs by their parameters.

By default the parameters that differ between the runs, except the seed, distinguish the groups, so
that runs of one group differ only in their seed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import pandas as pd

from raysim.by_key import by_key
from raysim.config.schema import SECTIONS_WITH_NAME
from raysim.errors import ConfigError, counted
from raysim.reports.name_settings import Settings, settings_of_names
from raysim.reports.selecting import SIDE_COLUMN, SIDES, resolved, value_of
from raysim.reports.table_row import short
from raysim.reports.tracked import KEYS_WITHOUT_EFFECT, TrackedRun
from raysim.reports.value_names import readable
from raysim.tracking.recorder import flatten_parameters

SCENARIO_KEY_PREFIXES = ("data.", "partition.", "model.", "groups.", "schedule.", "privacy.")
"""Prefixes of the parameters that define the scenario in which methods are compared."""

_DERIVED_KEY_PREFIXES = ("files", "client.", "server.", "batching.")
_DERIVED_KEY_PREFIXES += ("evaluate.clients", "evaluate.theory")
_DERIVED_KEY_PREFIXES += ("evaluate.forgetting", "evaluate.probes")
"""Prefixes of keys that mostly follow from the name of an algorithm or another section, or that
only add measurements."""

_NAMES_OF_RULES = ("client.name", "server.name")
"""Keys that follow from the algorithm, if there is one."""

Group = tuple[dict[str, str], list[TrackedRun]]
"""Parameters that distinguish a group of runs, and its runs."""


def grouped(
    runs: Sequence[TrackedRun],
    keys: Sequence[str],
    say: Callable[[str], None] = lambda line: None,
    settings: bool = False,
) -> list[Group]:
    """Return groups of runs that differ only in their seed.

    Args:
        runs: Runs to group.
        keys: Full names of the parameters that distinguish groups, as from `group_keys`.
        say: Called with one line if groups hold runs that differ in more than their seed.
        settings: Whether names have their settings beside them, as far as `keys` have them not.

    Returns:
        The groups, in the order of `order_of_values`, with readable names of files.
    """
    groups = divided(runs, keys)
    mixed: set[str] = set()
    for _, members in groups:
        mixed |= set(varied(members))
    if mixed:
        say(f"a row holds runs that differ in {', '.join(map(short, sorted(mixed)))}")
    shown = settings_of_names(*_differing(runs), keys, keys) if settings else {}
    return _readable(groups, shown)


def group_keys(runs: Sequence[TrackedRun], group: Sequence[str] | None) -> list[str]:
    """Return the full names of the parameters that distinguish groups.

    Args:
        runs: Runs to group.
        group: Parameters as the user wrote them. Default: all that differ.

    Raises:
        ConfigError: No run has a parameter of `group`.
    """
    if group:
        return resolved(runs, group, "group (--group)")
    return varied(runs)


def order_of_values(runs: Iterable[TrackedRun]) -> Callable[[str, str | None], tuple]:
    """Return the sort key of parameters' values: the one order of rows, columns, curves and cells.

    Numbers come first, by size. Words come in the order in which the runs have them, which is that
    of a sweep's configuration or of a ledger's rows; words of no run are last, by the alphabet.

    Args:
        runs: Runs in the order of their source.

    Returns:
        A function from a parameter's full name and its value, None if a run has none, to the key.
    """
    places: dict[tuple[str, str], int] = {}
    for run in runs:
        for item in run.params.items():
            places.setdefault(item, len(places))

    def place(key: str, value: str | None) -> tuple:
        if value is None:
            return (1, -1, "")
        if key == SIDE_COLUMN:
            return (1, SIDES.index(value), value)
        try:
            return (0, float(value), value)
        except ValueError:
            return (1, places.get((key, value), math.inf), value)

    return place


def divided(runs: Sequence[TrackedRun], keys: Sequence[str]) -> list[Group]:
    """Return the runs by their values of parameters, in the order of `order_of_values`.

    Args:
        runs: Runs to group.
        keys: Full names of parameters.
    """
    place = order_of_values(runs)
    groups = by_key(runs, lambda run: tuple(value_of(run.params, key) for key in keys))
    ordered = []
    for values in sorted(groups, key=lambda values: tuple(map(place, keys, values))):
        named = zip(keys, values, strict=True)
        present = {key: value for key, value in named if value is not None}
        ordered.append((present, groups[values]))
    return ordered


def _readable(groups: Sequence[Group], settings: Settings) -> list[Group]:
    """Return groups with readable names of the files among their parameters, and with settings."""
    named, members = zip(*groups, strict=True)
    shown = readable(named)
    for params, texts in zip(named, shown, strict=True):
        for key, value in params.items():
            texts[key] += settings.get((key, value), "")
    return list(zip(shown, members, strict=True))


def apart(
    runs: Sequence[TrackedRun], keys: Sequence[str], say: Callable[[str], None] = lambda line: None
) -> list[tuple[str, list[TrackedRun]]]:
    """Return runs split by all parameters that differ except some.

    Args:
        runs: Runs to split. Runs that lack a parameter of `keys` are omitted.
        keys: Parameters that may differ within a part; KEY,KEY: several, of which runs need the
            first one only. Runs in which a section is null have no name of it, but are kept: there
            is no attack, say.
        say: Called with one line if runs are omitted.

    Returns:
        (label, runs) of each part, in the order of `order_of_values`.

    Raises:
        ConfigError: No run has a parameter of `keys`.
    """
    axes = [resolved(runs, key.split(","), "x and y (--x and --y)") for key in keys]
    known = set(itertools.chain.from_iterable(axes))
    needed = {key: axis[0] for key, axis in zip(keys, axes, strict=True)}
    complete = [run for run in runs if all(_has(run.params, name) for name in needed.values())]
    if not complete:
        names = " and ".join(needed.values())
        raise ConfigError(f"x and y (--x and --y): none of the selected runs has {names}")
    n_omitted = len(runs) - len(complete)
    if n_omitted:
        lacked = []
        for key, name in needed.items():
            if not all(_has(run.params, name) for run in runs):
                lacked.append(key)
        say(f"left out: {counted(n_omitted, 'run')} without {' or '.join(lacked)}")
    differing = varied(complete)
    distinguishing = [key for key in differing if key not in known]
    parts = divided(complete, distinguishing)
    settings = settings_of_names(*_differing(complete), distinguishing, [*differing, *known])
    return [(label(named), members) for named, members in _readable(parts, settings)]


def _has(params: Mapping[str, str], key: str) -> bool:
    """Return whether a run has a parameter, or is one without that which the parameter names."""
    if key in params:
        return True
    # A method of two rules has a name, which is theirs.
    return key != "algorithm.name" and params.get(key.removesuffix(".name")) == "null"


def split_scenario(params: Mapping[str, str]) -> tuple[tuple, tuple]:
    """Return the sorted parameters of the scenario, and those of the method.

    Args:
        params: Values by parameter.

    Returns:
        Two tuples of (parameter, value). `side` is in neither, because it follows from the method.
    """
    scenario: list[tuple[str, str]] = []
    method: list[tuple[str, str]] = []
    for key, value in sorted(params.items()):
        if key.startswith(SCENARIO_KEY_PREFIXES):
            scenario.append((key, value))
        elif key != SIDE_COLUMN:
            method.append((key, value))
    return tuple(scenario), tuple(method)


def varied(runs: Sequence[TrackedRun]) -> list[str]:
    """Return the parameters that differ between runs, except the seed.

    Parameters without effect on results are left out too.

    Parameters that follow from others (the rules and its defaults of other sections from the
    algorithm, the cohort from the schedule, the keys of an optimizer that only some runs use) or
    that only add measurements (`evaluate.clients`) are included only if they distinguish runs that
    the others do not.

    A parameter that is null in one run and absent in another does not differ.

    Args:
        runs: The runs.

    Returns:
        The names of algorithm, rules and other sections first.
    """
    params, keys = _differing(runs)
    dependent = {key for key in keys if _may_follow(key, params, keys)}
    columns: list[str] = []
    for key in sorted(keys, key=lambda key: _order(key, key in dependent)):
        distinguishes = _n_distinct(params, [*columns, key]) > _n_distinct(params, columns)
        if key not in dependent or distinguishes:
            columns.append(key)
    return columns


def _differing(runs: Sequence[TrackedRun]) -> tuple[pd.DataFrame, list[str]]:
    """Return the parameters of runs, "null" for none, and which of them may distinguish runs."""
    params = pd.DataFrame([run.params for run in runs], dtype=object).fillna("null")
    differing = params.columns[params.ne(params.iloc[0]).any()]
    return params, [key for key in differing if not _is_ignored(key)]


def _is_ignored(key: str) -> bool:
    """Return whether tables never distinguish runs by a parameter."""
    return key in ("seed", *SECTIONS_WITH_NAME) or key.startswith(KEYS_WITHOUT_EFFECT)


def _order(key: str, is_dependent: bool) -> int:
    """Return the place of a parameter: names of sections, rules, other parameters, dependent ones.

    The size of a batch of clients is last, because it is resolved from many other parameters.
    """
    if key.removesuffix(".name") in SECTIONS_WITH_NAME:
        return 1 if key in _NAMES_OF_RULES else 0
    if key == "batching.size":
        return 4
    return 3 if is_dependent else 2


def _may_follow(key: str, runs: pd.DataFrame, keys: Sequence[str]) -> bool:
    """Return True if the value of a parameter may follow from that of another one."""
    if key in _NAMES_OF_RULES:
        # Without an algorithm the pair of rules is the method, and both have to be shown.
        return "algorithm.name" in runs and "null" not in runs["algorithm.name"].tolist()
    if key.startswith(_DERIVED_KEY_PREFIXES):
        return True
    if key.startswith(("model.", "schedule.")) and f"{key.partition('.')[0]}.name" in keys:
        return True
    # Keys that only some optimizers have, say, follow from the name of the optimizer.
    if "null" in runs[key].tolist() and f"{key.rpartition('.')[0]}.name" in keys:
        return True
    return _is_default_of_algorithm(key, runs)


def _is_default_of_algorithm(key: str, runs: pd.DataFrame) -> bool:
    """Return whether a parameter has one value, except where an algorithm's own default is another.

    Only shipped algorithms are asked, because no report imports a user's code.
    """
    if "algorithm.name" not in runs:
        return False
    names = set(runs["algorithm.name"])
    if _n_distinct(runs, ["algorithm.name", key]) > len(names):
        return False
    # The import takes seconds, which most reports save by the lines above.
    from raysim.rules.methods.registry import algorithm_defaults

    # All keys below a setting come with it: those of `partition.val` with its fraction.
    setting = ".".join(key.split(".")[:2])
    brought: dict[str, dict[str, str]] = {}
    for name in names:
        own = {} if ":" in name else flatten_parameters(algorithm_defaults(name))
        brought[name] = {k: v for k, v in own.items() if f"{k}.".startswith(f"{setting}.")}
    others = set()
    for params in runs.to_dict("records"):
        own = brought[params["algorithm.name"]]
        if not own or any(params.get(k) != v for k, v in own.items()):
            others.add(params[key])
    return len(others) <= 1


def _n_distinct(runs: pd.DataFrame, keys: list[str]) -> int:
    """Return the number of distinct combinations of values of some parameters."""
    return len(set(map(tuple, runs[keys].to_numpy())))


def label(named: Mapping[str, str]) -> str:
    """Return parameters as a label: "fedavg, local.lr 0.1".

    Args:
        named: Values by parameter, in the order of the label.
    """
    parts = []
    for key, value in named.items():
        is_clear = short(key) in (*SECTIONS_WITH_NAME, SIDE_COLUMN)
        parts.append(value if is_clear else f"{short(key)} {value}")
    return ", ".join(parts)
