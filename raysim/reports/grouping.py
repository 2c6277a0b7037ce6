"""Selection and grouping of tracked runs by their parameters.

By default the parameters that differ between the runs, except the seed, distinguish the groups, so
that runs of one group differ only in their seed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TypeVar

import pandas as pd

from raysim.by_key import by_key
from raysim.config.schema import FEDAVG, SECTIONS_WITH_NAME
from raysim.errors import ConfigError
from raysim.reports.name_settings import Settings, settings_of_names
from raysim.reports.published import same_value
from raysim.reports.table_row import short
from raysim.reports.tracked import KEYS_WITHOUT_EFFECT, TrackedRun, counted
from raysim.reports.value_names import readable
from raysim.spelling import did_you_mean
from raysim.tracking.recorder import flatten_parameters

T = TypeVar("T")

SIDE_COLUMN = "side"
"""Derived parameter: the side on which a method differs from FedAvg. Shown only on request."""

SIDES = ("client side", "server side", "both sides")
"""Values of `side`, in the order of reports."""

SCENARIO_KEY_PREFIXES = ("data.", "partition.", "model.", "groups.", "schedule.", "privacy.")
"""Prefixes of the parameters that define the scenario in which methods are compared."""

_DERIVED_KEY_PREFIXES = ("files", "client.", "server.", "batching.")
_DERIVED_KEY_PREFIXES += ("evaluate.clients", "evaluate.theory")
_DERIVED_KEY_PREFIXES += ("evaluate.forgetting", "evaluate.probes")
"""Prefixes of keys that mostly follow from the name of an algorithm or another section, or that
only add measurements."""

_NAMES_OF_RULES = ("client.name", "server.name")
"""Keys that follow from the algorithm, if there is one."""


def resolved(runs: Sequence[TrackedRun], keys: Iterable[str], option: str) -> list[str]:
    """Return the full names of parameters.

    `algorithm` stands for `algorithm.name`, and `algorithm.beta1` for the key of its rule. A
    parameter that only other runs of the same source have is a known one too.

    Args:
        runs: Runs whose parameters are searched.
        keys: Names as the user wrote them.
        option: Option or key that names the parameters, for errors.

    Raises:
        ConfigError: No run has a parameter.
    """
    known: set[str] = set()
    for run in runs:
        known.update(run.params, run.known)
    full_names = []
    for key in keys:
        full = full_name(key, {*known, SIDE_COLUMN})
        if full is None:
            hint = did_you_mean(key, map(short, known))
            raise ConfigError(f"{option}: no run has a parameter '{key}'{hint}")
        full_names.append(full)
    return full_names


Group = tuple[dict[str, str], list[TrackedRun]]
"""Parameters that distinguish a group of runs, and its runs."""

_ABSENT = "null"
"""Value by which `--where` finds runs that lack a parameter."""

PARTITION_SEED = "partition.seed"
"""Seed of the partition alone; null: that of the run."""


def replicate(params: Mapping[str, str]) -> str:
    """Return which repetition of an experiment a run is: its seed, after that of its partition.

    Args:
        params: Parameters of the run.
    """
    seed, partition = params.get("seed", "0"), params.get(PARTITION_SEED, "null")
    return seed if partition == "null" else f"{partition}/{seed}"


def value_of(params: Mapping[str, str], key: str) -> str | None:
    """Return the value of a parameter, which may be the derived parameter `side`.

    Args:
        params: Parameters of a run.
        key: Full name of a parameter, or `side`.

    Returns:
        The value as text; None if the run has no such parameter.
    """
    if key != SIDE_COLUMN:
        return params.get(key)
    client, server = params.get("client.name"), params.get("server.name")
    return side(client, server) if client and server else None


def side(client: str, server: str) -> str:
    """Return the side on which a method differs from FedAvg, one of `SIDES`.

    FedAvg itself counts as client side, as in the tables of Luo 2023.

    Args:
        client: Name of the client rule.
        server: Name of the server rule.
    """
    if server == FEDAVG:
        return SIDES[0]
    return SIDES[1] if client == FEDAVG else SIDES[2]


def having(
    runs: Sequence[TrackedRun], where: Mapping[str, Sequence[str]], option: str
) -> list[TrackedRun]:
    """Return the runs in which every parameter has one of the allowed values.

    Args:
        runs: Runs to select from.
        where: Allowed values by parameter. Numbers are compared as numbers, 0..4 is any of a range,
            and a run without the parameter has the value null.
        option: Option or key that names the parameters, for errors.

    Raises:
        ConfigError: No run has a parameter.
    """
    kept = list(runs)
    for key, allowed in zip(resolved(runs, where, option), where.values(), strict=True):
        kept = [run for run in kept if _is_any(value_of(run.params, key) or _ABSENT, allowed)]
    return kept


def reference_runs(runs: Sequence[TrackedRun], reference: str, option: str) -> list[TrackedRun]:
    """Return the runs with the parameter of a reference.

    Args:
        runs: Runs to select from.
        reference: Parameter as KEY=VALUE.
        option: Option that names the reference, for errors.

    Raises:
        ConfigError: `reference` is not KEY=VALUE, or no run has this parameter and value.
    """
    key, equals, value = reference.partition("=")
    if not equals:
        raise ConfigError(
            f"{option}: '{reference}' is not KEY=VALUE; write, for example, algorithm=fedavg"
        )
    chosen = having(runs, {key: [value]}, option)
    if not chosen:
        (name,) = resolved(runs, [key], option)
        known = sorted(filter(None, {value_of(run.params, name) for run in runs}))
        raise ConfigError(f"{option}: no run has {reference}{did_you_mean(value, known)}")
    return chosen


def with_values(
    things: Sequence[T], where: Sequence[str], noun: str, params: Callable[[T], Mapping[str, str]]
) -> list[T]:
    """Return the rows, runs or trials whose parameters have given values.

    Args:
        things: What has the parameters.
        where: KEY=VALUE texts; KEY=VALUE,VALUE are any of several, KEY=0..4 any of a range. Names
            are those of `resolved`, and numbers are compared as numbers. A run without the key
            has the value null.
        noun: Word for one of them in errors: "row", "run" or "trial".
        params: Function from one of them to its values by parameter.

    Raises:
        ConfigError: A text is not KEY=VALUE, or no run has the key or all the values.
    """
    table = [params(thing) for thing in things]
    names = set().union(*table)
    kept = list(range(len(things)))
    for text in where:
        key, _, allowed = text.partition("=")
        if "" in (key, allowed):
            raise ConfigError(f"--where: '{text}' is not KEY=VALUE")
        name = full_name(key, names)
        if name is None:
            hint = _keys_meant(key, sorted(names))
            raise ConfigError(f"--where: no {noun} has a key '{key}'{hint}")
        values = [row.get(name, _ABSENT) for row in table]
        # A value may itself contain a comma.
        asked = [allowed] if allowed in values else allowed.split(",")
        for value in asked:
            _require(value, values, f"{noun} has {name}={value}")
        others = [values[i] for i in kept]
        kept = [i for i in kept if _is_any(values[i], asked)]
        if not kept:
            _require(allowed, others, f"{noun} has {name}={allowed}")
    return [things[i] for i in kept]


def _require(asked: str, values: Sequence[str], subject: str) -> None:
    """Raise ConfigError unless one of the values is the asked one."""
    if not any(_is_any(value, [asked]) for value in values):
        raise ConfigError(f"--where: no {subject}{did_you_mean(asked, set(values))}")


def _is_any(value: str, asked: Sequence[str]) -> bool:
    """Return whether a value is one of the asked ones, as number or text, or in a range: 0..4."""
    for text in asked:
        first, _, last = text.partition("..")
        if all(map(str.isdecimal, (value, first, last))):
            if int(first) <= int(value) <= int(last):
                return True
        elif same_value(value, text):
            return True
    return False


def _keys_meant(key: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown name: the parameters that end with it, else the nearest one."""
    ends = [f"'{name}'" for name in known if name.endswith(f".{key}")]
    if ends:
        return f"; did you mean {' or '.join(ends)}?"
    return did_you_mean(key, {name.removesuffix(".name") for name in known})


def full_name(key: str, known: Container[str]) -> str | None:
    """Return the likeliest of the known names that a name of a parameter stands for, or None.

    `algorithm` is `algorithm.name`, also where pairs of rules have `algorithm: null`.

    Args:
        key: name as a user wrote it.
        known: full names.
    """
    candidates = [f"{key}.name", key]
    if key.rpartition(".")[2] == "lr":  # a number in most runs, also beside those with a schedule
        candidates.reverse()
    if key.startswith("algorithm."):
        rest = key.removeprefix("algorithm.")
        candidates += [f"server.{rest}", f"client.{rest}"]
    return next((name for name in candidates if name in known), None)


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
            first one only.
        say: Called with one line if runs are omitted.

    Returns:
        (label, runs) of each part, in the order of `order_of_values`.

    Raises:
        ConfigError: No run has a parameter of `keys`.
    """
    axes = [resolved(runs, key.split(","), "x and y (--x and --y)") for key in keys]
    known = set(itertools.chain.from_iterable(axes))
    needed = {axis[0] for axis in axes}
    complete = [run for run in runs if needed <= run.params.keys()]
    if not complete:
        names = " and ".join(axis[0] for axis in axes)
        raise ConfigError(f"x and y (--x and --y): none of the selected runs has {names}")
    n_omitted = len(runs) - len(complete)
    if n_omitted:
        say(f"left out: {counted(n_omitted, 'without')} {' or '.join(keys)}")
    differing = varied(complete)
    distinguishing = [key for key in differing if key not in known]
    parts = divided(complete, distinguishing)
    settings = settings_of_names(*_differing(complete), distinguishing, [*differing, *known])
    return [(label(named), members) for named, members in _readable(parts, settings)]


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
