"""Rows of a ledger checked: their identities today, and what they give when computed again."""

from __future__ import annotations

import copy
import math
import random
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysim.config import explain
from raysim.config.schema import Config
from raysim.engine.plan import Plan
from raysim.errors import ConfigError, in_a_line
from raysim.ledger.kept import kept_config
from raysim.ledger.ledger_row import Row
from raysim.prepare import file_digests
from raysim.prepare.resolve import prepare
from raysim.runs.result import RunResult
from raysim.runs.run import execute
from raysim.system.cpu_kind import cpu_kind, may_be_this_kind
from raysim.tracking.recorder import Recorder, differing, flatten_parameters

ROUNDING = 1e-9
"""Relative difference up to which metrics are the same, averaged in another order."""


@dataclass(frozen=True)
class Recomputed:
    """A row that was computed again."""

    row: Row
    """The row."""

    digest: str
    """sha256 of the parameters that this machine computed."""

    difference: str = ""
    """What else differs, of which the parameters tell nothing: the state of server or clients, or
    in an older row a metric of clients' own models."""

    @property
    def same(self) -> bool:
        """True if the digests are equal, and nothing else differs."""
        return self.digest == self.row.digest and not self.difference

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
        if self.digest == self.row.digest:
            return f"{run}: the same digest, but {self.difference}"
        if not self.is_comparable:
            where = f"{run}: computed on {self.row.cpu}"
            return f"{where}, perhaps not with the kernels of {cpu_kind()}: another digest"
        used = " ".join(f"{name} {version}" for name, version in self.row.versions.items())
        return f"{run}: another digest than with {used}"


def comparable(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that can be computed again in random order, those of this kind of CPU first.

    So many checks of one row each come to check all rows.

    Args:
        rows: rows of any ledgers. Those of stopped trials are left out.
    """
    full = [row for row in rows if not row.stopped]
    random.shuffle(full)
    return sorted(full, key=lambda row: not may_be_this_kind(row.cpu))


def why_other_identity(row: Row) -> str:
    """Return why a row's configuration no longer has the row's identity, or "" if it has it.

    Args:
        row: a row of a ledger.
    """
    try:
        config = _today(row.config)
    except ConfigError as error:
        return f"{in_a_line(error)}; {_CONSEQUENCE}"
    if config.fingerprint == row.fingerprint:
        return ""
    changes = _changes(row.config, config) or "the identity has other keys"
    return f"its configuration has another identity today ({changes}); {_CONSEQUENCE}"


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
    """Train the run of a row again, in this process, without MLflow and needless evaluations.

    The digest of the parameters says nothing of what clients keep, such as models of their own. A
    row has one of that, too; of an older row the metrics of such models are compared.

    Args:
        row: a row.
        keys: overrides that do not change the result, such as `data.root`; None: none.

    Returns:
        The row, with what this machine computed.

    Raises:
        ConfigError: the row's configuration has another identity today, or cannot run here.
        RaysimError: the run failed.
    """
    raw = _bare(row.config)
    plan = prepare(raw, keys or {}, tracked=False)
    compares_metrics = plan.clients_have_models and not row.state_digest
    if compares_metrics:
        plan = prepare({**raw, "evaluate": row.config["evaluate"]}, keys or {}, tracked=False)
    if plan.config.fingerprint != row.fingerprint:
        changes = _changes(row.config, plan.config) or "its files have changed"
        raise ConfigError(
            f"{row.place}: its configuration has another identity today ({changes}); {_CONSEQUENCE}"
        )
    if plan.config.rounds != row.config["rounds"]:
        raise ConfigError(
            f"rounds: {row.place} has the digest after {row.config['rounds']} rounds; leave "
            f"rounds={plan.config.rounds} out"
        )
    result = _trained(plan)
    difference = _other_metric(row, result.history) if compares_metrics else ""
    if row.state_digest and row.state_digest != result.state_digest:
        difference = "what server or clients keep is other"
    return Recomputed(row, result.digest, difference)


def _other_metric(row: Row, records: Sequence[Mapping[str, float]]) -> str:
    """Return the first metric of the clients that has another value in a row, or ""."""
    history = {int(record["round"]): record for record in records}
    for name, series in row.history.items():
        if name != "train_loss" and not name.startswith("clients/"):
            continue
        for t, before in series.items():
            value = history.get(t, {}).get(name, math.nan)
            is_same = math.isclose(value, before, rel_tol=ROUNDING)
            if not is_same and not (math.isnan(value) and math.isnan(before)):
                return f"{name} in round {t} is {value:.10g}, and not {before:.10g}"
    return ""


def _bare(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a row without checkpoints, and without needless evaluations."""
    resources = dict(config["resources"])
    if not resources["gpus"] and not resources["server_gpus"]:
        resources = {"executor": "inline", "threads": resources["threads"]}
    # Held-out clients do not train, so they are part of the identity.
    held_out = (config["evaluate"].get("clients") or {}).get("held_out")
    evaluates = config.get("stop") or held_out
    return {
        **copy.deepcopy(dict(config)),
        "resources": resources,
        **({} if evaluates else {"evaluate": {"every": 0}}),
        "record_updates": None,
        "checkpoint": {"every": 0},
    }


def _trained(plan: Plan) -> RunResult:
    """Train a plan in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="raysim-") as folder:
        run_dir = Path(folder, "run")
        run_dir.mkdir()
        return execute(plan, run_dir, tracker=Recorder("", "", run_dir))


def _changes(before: Mapping[str, Any], config: Config) -> str:
    """Return the keys that differ between a row's configuration and another, as text."""
    changes = []
    now = flatten_parameters(kept_config(config))
    for key, (old, new) in sorted(differing(flatten_parameters(before), now).items()):
        if not key.startswith(_MEASUREMENTS):
            changes.append(f"{key}: {_in_short(old)} → {_in_short(new)}")
    return "; ".join(changes)


_MEASUREMENTS = ("evaluate.", "record_updates", "resources.")
"""Prefixes of keys that `recompute` changes, and that are no part of an identity."""

_CONSEQUENCE = "a sweep trains its run again"
"""What follows from a changed identity."""


def _in_short(value: str) -> str:
    """Return the value of a key; of a sha256 its beginning."""
    return value[:12] if re.fullmatch("[0-9a-f]{64}", value) else value
