"""Selection of runs by values of their parameters, as users name them.

`algorithm` is short for `algorithm.name`, and `side` is derived from the rules of a method.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import TypeVar

from raysim.config.schema import FEDAVG
from raysim.errors import ConfigError
from raysim.reports.published import same_value
from raysim.reports.table_row import short
from raysim.reports.tracked import TrackedRun
from raysim.reports.value_names import readable_values
from raysim.spelling import did_you_mean

T = TypeVar("T")

SIDE_COLUMN = "side"
"""Derived parameter: the side on which a method differs from FedAvg. Shown only on request."""

SIDES = ("client side", "server side", "both sides")
"""Values of `side`, in the order of reports."""


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
    known = {SIDE_COLUMN}
    for run in runs:
        known.update(run.params, run.known)
    return [_known_name(key, known, f"{option}: no run has a parameter") for key in keys]


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
            a rule of a file may have its name in tables, and a run without the parameter has the
            value null.
        option: Option or key that names the parameters, for errors.

    Raises:
        ConfigError: No run has a parameter.
    """
    kept = list(runs)
    for key, allowed in zip(resolved(runs, where, option), where.values(), strict=True):
        values = [value_of(run.params, key) or _ABSENT for run in kept]
        chosen = _chosen(values, allowed)
        kept = [run for run, value in zip(kept, values, strict=True) if value in chosen]
    return kept


def with_values(
    things: Sequence[T],
    where: Sequence[str],
    noun: str,
    params: Callable[[T], Mapping[str, str]],
    option: str = "--where",
) -> list[T]:
    """Return the rows, runs or trials whose parameters have given values.

    Args:
        things: What has the parameters.
        where: KEY=VALUE texts; KEY=VALUE,VALUE are any of several, KEY=0..4 any of a range. Names
            are those of `resolved`, and numbers are compared as numbers. A value may be written as
            tables show it: `MyRule` for my.py:MyRule. A run without the key has the value null.
        noun: Word for one of them in errors: "row", "run" or "trial".
        params: Function from one of them to its values by parameter.
        option: Option that has the texts, for errors.

    Raises:
        ConfigError: A text is not KEY=VALUE, or no run has the key or all the values.
    """
    table = [params(thing) for thing in things]
    names = {SIDE_COLUMN}.union(*table)
    kept = list(range(len(things)))
    for text in where:
        key, _, allowed = text.partition("=")
        if "" in (key, allowed):
            raise ConfigError(
                f"{option}: '{text}' is not KEY=VALUE; write, for example, algorithm=fedavg"
            )
        name = _known_name(key, names, f"{option}: no {noun} has a key")
        values = [value_of(row, name) or _ABSENT for row in table]
        # A value may itself contain a comma.
        asked = [allowed] if _chosen(values, [allowed]) else allowed.split(",")
        for value in asked:
            if not _chosen(values, [value]):
                hint = did_you_mean(value, set(readable_values(values).values()))
                raise ConfigError(f"{option}: no {noun} has {name}={value}{hint}")
        chosen = _chosen(values, asked)
        kept = [i for i in kept if values[i] in chosen]
    if things and not kept:
        raise ConfigError(f"{option}: no {noun} has {' and '.join(where)}; leave one of them out")
    return [things[i] for i in kept]


def _chosen(values: Iterable[str], asked: Sequence[str]) -> set[str]:
    """Return the values of a parameter that are asked for, by `_is_any` or as tables show them."""
    named = readable_values(set(values)).items()
    return {value for value, name in named if name in asked or _is_any(value, asked)}


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


def _known_name(key: str, known: Collection[str], refusal: str) -> str:
    """Return the full name of a parameter; for an unknown one, name those that are meant."""
    name = full_name(key, known)
    if name is not None:
        return name
    ends = [f"'{name}'" for name in sorted(known) if name.endswith(f".{key}")]
    hint = f"; did you mean {' or '.join(ends)}?"
    if not ends:
        hint = did_you_mean(key, set(map(short, known)))
    raise ConfigError(f"{refusal} '{key}'{hint}")


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
