"""Published results of a paper, read from a CSV file, to compare with the results of runs.

    # Luo 2023, Tables 1 and 2
    data,partition.alpha,schedule.cohort,algorithm,best,std,target,of,rounds
    mnist,0.01,10,fedavg,0.4619,0.0129,0.45,,493

The columns best, std, target, of and rounds hold figures. All other columns are parameters: a line
describes the runs with these values, and an empty cell matches any value. Figures are test
accuracies as fractions of 1: the best over all rounds with its standard deviation, and the rounds
to a target ("never": not reached). With `of`, the target is a share of the best accuracy of the
runs with this KEY=VALUE. Several lines may describe the same runs. Only reports read these files;
runs never do.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raysim.config.schema import SECTIONS_WITH_NAME
from raysim.config.shipped_files import shipped_files
from raysim.errors import ConfigError
from raysim.spelling import did_you_mean

FIGURE_KEYS = ("best", "std", "target", "of", "rounds")
"""Columns that hold figures; all others are parameters."""


@dataclass(frozen=True)
class PublishedResult:
    """Published figures of a set of runs; a figure that the paper does not give is None."""

    where: Mapping[str, str]
    """Parameter values of the runs."""

    best: float | None = None
    """Best test accuracy over all rounds, a fraction of 1."""

    std: float | None = None
    """Standard deviation of `best`."""

    target: float | None = None
    """Target accuracy, a fraction of 1; with `of`, a share of that of the reference runs."""

    of: str | None = None
    """Reference runs of `target` as KEY=VALUE."""

    rounds: float | None = None
    """Rounds to the target; inf if it is not reached."""

    def is_about(self, params: Mapping[str, str]) -> bool:
        """Return True if the result describes runs with these parameters.

        Args:
            params: Parameters of the runs, as text by dotted key.
        """
        return all(
            key in params and same_value(params[key], value) for key, value in self.where.items()
        )


def read_published(name: str) -> list[PublishedResult]:
    """Return the published results of a shipped paper or of a file.

    Args:
        name: Name of a shipped paper (NAME is configs/NAME/paper.csv), or a path FILE.csv.

    Returns:
        A result for each line of the file.

    Raises:
        ConfigError: The paper or file does not exist, or a line is invalid.
    """
    known = {path.removesuffix("/paper"): file for path, file in shipped_files("csv").items()}
    path = Path(name) if name.endswith(".csv") else known.get(name)
    if path is None:
        raise ConfigError(
            f"paper (--paper): no published results of '{name}'{did_you_mean(name, known)}; "
            "pass FILE.csv for your own"
        )
    try:
        # Neither comments nor empty lines.
        lines = list(filter(re.compile(r"(?!#).*\S").match, path.read_text().splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"paper (--paper): {path} cannot be read: {error}") from None
    table = csv.DictReader(lines)
    if {"best", "rounds"}.isdisjoint(table.fieldnames or ()):
        raise ConfigError(
            f"paper (--paper): {path} needs a column 'best' or a column 'rounds'; add one"
        )
    return [
        _published_result(row, f"paper (--paper): {path}: {','.join(filter(None, row.values()))}")
        for row in table
    ]


def _published_result(row: Mapping[str, str], where: str) -> PublishedResult:
    """Return the result of a line; `where` names the line in errors."""
    figures: dict[str, float] = {}
    params: dict[str, str] = {}
    for key, text in row.items():
        if not text or key == "of":
            continue
        if key in FIGURE_KEYS:
            figures[key] = _figure(key, text, where)
        else:
            params[f"{key}.name" if key in SECTIONS_WITH_NAME else key] = text
    if ("target" in figures) != ("rounds" in figures):
        raise ConfigError(f"{where}: target and rounds need each other; give both or neither")
    return PublishedResult(params, of=row.get("of") or None, **figures)


def _figure(key: str, text: str, where: str) -> float:
    """Return a figure; `where` names the line in errors."""
    if (key, text) == ("rounds", "never"):
        return math.inf
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{where}: {key} is '{text}', not a number") from None


def published_about(
    printed: Sequence[PublishedResult], params: Mapping[str, str]
) -> list[PublishedResult]:
    """Return the published results of runs with these parameters.

    Args:
        printed: Published results, as from `read_published`.
        params: Parameters of the runs, as text by dotted key.
    """
    return [result for result in printed if result.is_about(params)]


def published_values(
    printed: Sequence[PublishedResult],
    params: Mapping[str, str],
    target: float | None = None,
    of: str | None = None,
) -> PublishedResult | None:
    """Return the published best accuracy and rounds to a target of runs, as a single result.

    Args:
        printed: Published results, as from `read_published`.
        params: Parameters of the runs, as text by dotted key.
        target: Target whose published rounds are returned; None: none.
        of: Reference runs as KEY=VALUE, if the target is a share of their accuracy.

    Returns:
        The combined result, or None if the paper gives neither figure.
    """
    best = to_target = PublishedResult({})
    # Of several results the first one counts.
    for result in reversed(published_about(printed, params)):
        if result.best is not None:
            best = result
        if target is not None and (result.target, result.of) == (target, of):
            to_target = result
    if {best.best, to_target.rounds} == {None}:
        return None
    return PublishedResult(
        {}, best.best, best.std, to_target.target, to_target.of, to_target.rounds
    )


def published_target(printed: Sequence[PublishedResult], params: Mapping[str, str]) -> float | None:
    """Return the target accuracy of the published rounds of runs, or None if there is none.

    Args:
        printed: Published results, as from `read_published`.
        params: Parameters of the runs, as text by dotted key.

    Raises:
        ConfigError: The paper has several targets, or only shares of the accuracy of other runs.
    """
    targets = {
        (result.target, result.of)
        for result in published_about(printed, params)
        if result.target is not None
    }
    fixed = [goal for goal, of in targets if of is None]
    if len(fixed) != 1 and targets:
        choice = ", ".join(
            f"--target {goal:g}" + (f" --relative-to {of}" if of else "")
            for goal, of in sorted(targets, key=str)
        )
        raise ConfigError(
            f"target (--target): the paper has no single target for these runs; use {choice}"
        )
    return fixed[0] if fixed else None


def same_value(a: str, b: str) -> bool:
    """Return True if two values are equal; numbers are compared as numbers.

    Args:
        a: a value as text.
        b: a value as text.
    """
    try:
        return float(a) == float(b)
    except ValueError:
        return a == b
