"""Rows of a ledger computed again, and carried over to other keys or changed code."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raysim.config import explain
from raysim.config.schema import Config
from raysim.engine.plan import Plan
from raysim.errors import ConfigError, did_you_mean, in_a_line
from raysim.ledger.ledger_row import Row, kept_config
from raysim.prepare import file_digests
from raysim.prepare.resolve import prepare
from raysim.reports import grouping
from raysim.runs.run import execute
from raysim.system.cpu_kind import cpu_kind, may_be_this_kind
from raysim.tracking.recorder import Recorder, flatten_parameters


@dataclass(frozen=True)
class Recomputed:
    """Digest of a row that was computed again."""

    row: Row
    """The row."""

    digest: str
    """sha256 of the parameters that this machine computed."""

    @property
    def same(self) -> bool:
        """True if the digests are equal."""
        return self.digest == self.row.digest

    @property
    def is_comparable(self) -> bool:
        """True if the row was computed on this machine's kind of CPU."""
        return self.row.cpu == cpu_kind()

    @property
    def text(self) -> str:
        """Result in words."""
        run = f"{self.row.place} ({self.row.title})"
        if self.same:
            return f"{run}: the same digest"
        if not self.is_comparable:
            where = f"{run}: computed on {self.row.cpu}"
            return f"{where}, perhaps not with the kernels of {cpu_kind()}: another digest"
        used = " ".join(f"{name} {version}" for name, version in self.row.versions.items())
        return f"{run}: another digest than with {used}"


def comparable(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that can be computed again, with those of this kind of CPU first.

    Their order is otherwise that of their fingerprints: a choice as good as a random one, but
    always the same.

    Args:
        rows: rows of any ledgers. Rows without a digest and those of stopped trials are left out.
    """
    full = [row for row in rows if row.digest and not row.stopped]
    return sorted(full, key=lambda row: (not may_be_this_kind(row.cpu), row.fingerprint))


def having(rows: Sequence[Row], where: Sequence[str]) -> list[Row]:
    """Return the rows whose configurations have given values.

    Args:
        rows: rows of any ledgers.
        where: KEY=VALUE texts, as for `grouping.with_values`.

    Raises:
        ConfigError: a text is not KEY=VALUE, or no row has the key or all the values.
    """
    params = [flatten_parameters(row.config) for row in rows]
    return [rows[i] for i in grouping.with_values(params, where, "row")]


def why_other_identity(row: Row) -> str:
    """Return why a row's configuration no longer has the row's identity, or "" if it has it.

    Args:
        row: a row of a ledger.
    """
    hint = "raysim ledger carry takes its results over"
    try:
        config = _today(row.config)
    except ConfigError as error:
        return f"{in_a_line(error)}; {hint}"
    if config.fingerprint == row.fingerprint:
        return ""
    changes = "; ".join(_changes(row.config, config)) or "the identity has other keys"
    return f"its configuration has another identity today ({changes}); {hint}"


def _today(raw: Mapping[str, Any]) -> Config:
    """Return the configuration of a row, with the digests that its code has today.

    Code that is not on this machine keeps the recorded digests.

    Args:
        raw: the configuration.

    Raises:
        ConfigError: the configuration is not valid with today's keys.
    """
    config = explain.validate(raw)
    recorded = config.files or {}
    try:
        current = file_digests.of_code(config)
    except ConfigError:
        return config
    files = {key: current.get(key, digests) for key, digests in recorded.items()}
    return config.model_copy(update={"files": files or None})


def recompute(row: Row, keys: Mapping[str, Any] | None = None) -> Recomputed:
    """Train the run of a row again, in this process, without evaluations and MLflow.

    Args:
        row: a row with a digest.
        keys: overrides that do not change the result, such as `data.root`; None: none.

    Returns:
        The row, with the digest of the parameters that this machine computed.

    Raises:
        ConfigError: the row's configuration has another identity today, or cannot run here.
        RaysimError: the run failed.
    """
    plan = prepare(_bare(row.config), keys or {})
    if plan.config.fingerprint != row.fingerprint:
        changes = "; ".join(_changes(row.config, plan.config)) or "its files have changed"
        raise ConfigError(
            f"{row.place}: its configuration has another identity today ({changes}); "
            "raysim ledger carry takes its results over"
        )
    if plan.config.rounds != row.config["rounds"]:
        raise ConfigError(
            f"rounds: {row.place} has the digest after {row.config['rounds']} rounds; leave "
            f"rounds={plan.config.rounds} out"
        )
    return Recomputed(row, _digest(plan))


def _bare(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a row without checkpoints, and without needless evaluations."""
    resources = dict(config["resources"])
    if not resources["gpus"] and not resources["server_gpus"]:
        resources = {"executor": "inline", "threads": resources["threads"]}
    return {
        **copy.deepcopy(dict(config)),
        "resources": resources,
        **({} if config.get("stop") else {"evaluate": {"every": 0}}),
        "record_updates": None,
        "checkpoint": {"every": 0},
    }


def _digest(plan: Plan) -> str:
    """Train a plan in a temporary folder and return the digest of its parameters."""
    with tempfile.TemporaryDirectory(prefix="raysim-") as folder:
        run_dir = Path(folder, "run")
        run_dir.mkdir()
        return execute(plan, run_dir, tracker=Recorder("", "", run_dir)).digest


def _changes(before: Mapping[str, Any], config: Config) -> list[str]:
    """Return the keys that differ between a row's configuration and another, as texts."""
    old, new = (
        {k: v for k, v in flatten_parameters(source).items() if not k.startswith(_MEASUREMENTS)}
        for source in (before, kept_config(config))
    )
    return [
        f"{key}: {_in_short(old.get(key))} → {_in_short(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


_MEASUREMENTS = ("evaluate.", "record_updates", "resources.")
"""Prefixes of keys that `recompute` changes, and that are no part of an identity."""


def _in_short(value: str | None) -> str:
    """Return the value of a key; of a sha256 its beginning."""
    text = "absent" if value is None else value
    return text[:12] if re.fullmatch("[0-9a-f]{64}", text) else text


# -- rows carried over ---------------------------------------------------------------------------


def carry_rows(
    rows: Sequence[Row],
    renamed: Mapping[str, str],
    say: Callable[[str], None],
    keys: Mapping[str, Any] | None = None,
) -> list[Row]:
    """Return rows with today's keys, digests of code and identities.

    Rows whose identity has not changed are kept. The others are grouped by their method and by what
    changes in their configuration. The shortest run of each group is computed again, and the group
    is carried over only if it gives the same digest.

    Args:
        rows: rows of a ledger.
        renamed: new name by old name of configuration keys, with dots.
        say: called with one line for each group.
        keys: overrides that do not change the result, such as `data.root`; None: none.

    Returns:
        All rows in their order, those of changed identity with new fingerprint and configuration.

    Raises:
        ConfigError: A configuration is not valid with today's keys, or a group has no row that was
            computed on this CPU capability, or a row gave another digest.
    """
    _check_renames(rows, renamed)
    carried: list[Row] = []
    groups: dict[tuple[str, ...], list[tuple[Row, Row]]] = {}
    for row in rows:
        raw, renames = _renamed(row, renamed)
        try:
            config = _today(raw)
        except ConfigError as error:
            raise ConfigError(
                f"{row.place}: {in_a_line(error)}; name renamed keys, as in --rename OLD=NEW"
            ) from None
        if config.fingerprint == row.fingerprint:
            carried.append(row)
            continue
        new = replace(row, fingerprint=config.fingerprint, config=kept_config(config))
        carried.append(new)
        group = (row.method, *renames, *_changes(raw, config))
        groups.setdefault(group, []).append((row, new))
    for (method, *changes), pairs in groups.items():
        title = f"{method}: {'; '.join(changes) or 'the identity has other keys'}"
        usable = [
            new for _, new in pairs if may_be_this_kind(new.cpu) and new.digest and not new.stopped
        ]
        if not usable:
            raise ConfigError(
                f"{pairs[0][0].place}: no row of its group ({title}) was computed on {cpu_kind()}; "
                "carry the ledger over on another machine"
            )
        tried = recompute(min(usable, key=lambda row: row.rounds), keys)
        if not tried.same:
            raise ConfigError(f"{tried.text}; nothing is carried over ({title})")
        say(f"{title}: {tried.text}; rows carried over: {len(pairs)}")
    return carried


def _check_renames(rows: Sequence[Row], renamed: Mapping[str, str]) -> None:
    """Raise ConfigError for the old name of a key that no row has."""
    for old in renamed:
        *path, last = old.split(".")
        if not any(last in (_section(dict(row.config), path, False) or {}) for row in rows):
            known = {key for row in rows for key in flatten_parameters(row.config)}
            raise ConfigError(f"--rename: no row has a key '{old}'{did_you_mean(old, known)}")


def _renamed(row: Row, renamed: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration of a row with renamed keys, and the renames that it needed."""
    raw = copy.deepcopy(dict(row.config))
    done = []
    for old, new in renamed.items():
        *path, last = old.split(".")
        section = _section(raw, path, create=False)
        if section is not None and last in section:
            value = section.pop(last)
            *path, last = new.split(".")
            target = _section(raw, path, create=True)
            assert target is not None
            target[last] = value
            done.append(f"{old} → {new}")
    return raw, done


def _section(raw: dict[str, Any], path: Sequence[str], create: bool) -> dict[str, Any] | None:
    """Return the section at a path, or None if it does not exist."""
    for name in path:
        if not isinstance(raw.get(name), dict):
            if not create:
                return None
            raw[name] = {}
        raw = raw[name]
    return raw
