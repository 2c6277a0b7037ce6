"""Reading of a sweep: from a file and overrides to trials that are resolved and checked.

All trials are checked before any trial starts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from raysim import data
from raysim.config import loading
from raysim.config.limited_yaml import dump_yaml, load_yaml, plain
from raysim.config.schema import Config
from raysim.config.sections.data import AnyData
from raysim.config.tracking_uri import redacted_uri
from raysim.engine.plan import Plan
from raysim.errors import ConfigError
from raysim.models.checks.against_pytorch import comparing_once
from raysim.prepare import resolve
from raysim.prepare.checks.logged_metrics import check_metric
from raysim.reports import selecting
from raysim.reports.claims.claim_section import Claim, check_sides, read_claims
from raysim.rules.methods import registry
from raysim.sweeps import reading, search_space
from raysim.sweeps.definition import Sweep, Trial
from raysim.sweeps.early_stopping import EarlyStopping
from raysim.sweeps.reading import Source, SweepSettings, SweepSpec, trial_error
from raysim.tracking.recorder import flatten_parameters

logger = logging.getLogger("raysim")

HYPERPARAMETER = re.compile(r"(algorithm|client|server|groups\.[^.]+\.client)\.(?!name$)")
"""Keys of rules, whose defaults are known when a trial is resolved."""


def read_sweep(source: Source, overrides: Iterable[str] | Mapping[str, Any] = ()) -> SweepSpec:
    """Read a sweep without resolving its trials.

    Args:
        source: as for `prepare_sweep`.
        overrides: as for `prepare_sweep`.

    Returns:
        The points of all grids, not yet checked.

    Raises:
        ConfigError: the sweep or a claim is invalid.
    """
    # Errors in claims are reported before any trial runs.
    read_claims(source)
    read = partial(loading.read_config, keys=resolve.keys, defaults=registry.algorithm_defaults)
    return reading.read_sweep(source, overrides, read)


def prepare_sweep(
    source: Source,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    folder: str | Path | None = None,
    where: Sequence[str] = (),
) -> Sweep:
    """Read a sweep and check all its trials; nothing is started or written.

    Args:
        source: configuration file, name of a shipped one, or mapping. Its section `sweep` defines
            the keys that vary.
        overrides: "key=value" strings, or a mapping. An override with several values or a draw (see
            `search_space`) varies the key in every grid and replaces the key's values in the file.
            In a mapping, a list holds several values.
        folder: folder of the runs. Default: `runs`.
        where: "key=value" or "key=value,value" texts; only trials with these values are kept.

    Returns:
        The sweep, with all trials resolved and without those that compute the same.

    Raises:
        ConfigError: the sweep is invalid, or a trial cannot run, or no trial has the values of
            `where`; the message names the values.
    """
    overrides = overrides if isinstance(overrides, Mapping) else list(overrides)
    spec = read_sweep(source, overrides)
    base = spec.raw({})
    axes = search_space.varied_values(spec.points)
    points = _points_with_values(spec, where)
    by_key = _resolved_trials(spec, points, axes, Path(folder or "runs").absolute())
    merged = len(points) - len(by_key)
    if not overrides and not where:  # which may leave out the runs of some claims
        _check_claims(read_claims(source), list(by_key.values()))
    if where:
        trials_by_key = list(by_key.items())
        by_key = dict(selecting.with_values(trials_by_key, where, "trial", lambda t: t[1].params))
        axes = search_space.varied_values([trial.values for trial in by_key.values()])
    trials = list(by_key.values())
    settings = _with_stopping_metric(spec.settings, [trial.config for trial in trials])
    name = "sweep" if isinstance(source, Mapping) else Path(source).stem
    digest = hashlib.sha256(" ".join(sorted(by_key)).encode()).hexdigest()
    sweep_folder = trials[0].folder.parents[1] / "sweeps" / digest[:12]
    return Sweep(name, trials, axes, spec.drawn, base, merged, sweep_folder, settings)


@comparing_once()
def _resolved_trials(
    spec: SweepSpec, points: Iterable[Mapping[str, Any]], axes: Collection[str], root: Path
) -> dict[str, Trial]:
    """Return the checked trials of points of a sweep by their keys, with folders below `root`."""
    trials: dict[str, Trial] = {}
    for point in points:
        plan = _resolved_point(spec, point, axes)
        config = plan.config
        key = _key(config)
        if key in trials:  # of points that compute the same, the first one becomes the trial
            continue
        values = {axis: point[axis] for axis in axes if axis in point}
        run_name = f"{plan.file_label}-{config.seed}-{key[:12]}"
        folder = root / config.tracking.folder / "trials" / run_name
        trials[key] = Trial(values, config, plan.label, folder, len(trials))
    return trials


def _resolved_point(spec: SweepSpec, point: Mapping[str, Any], axes: Collection[str]) -> Plan:
    """Return the plan of a point; errors name the values of the point."""
    raw = spec.raw(point)
    try:
        plan = resolve.resolve_plan(raw, load_once)
    except ConfigError as error:
        raise trial_error(point, f"{error}{_advice(str(error), axes)}") from None
    resolve.log_notes(raw, plan)
    return plan


def _points_with_values(spec: SweepSpec, where: Sequence[str]) -> list[dict[str, Any]]:
    """Return the points that may have the values of `where`, without resolving them.

    Resolving takes a second for a large net, so one trial of a large table should not wait for the
    others. Hyper-parameters of rules, and keys that are null or auto, have their values only in a
    resolved trial; they do not count here.
    """
    if not where:
        return spec.points
    params = []
    for point in spec.points:
        try:
            config = resolve.load_config(spec.raw(point))
        except ConfigError as error:
            raise trial_error(point, str(error)) from None
        params.append(flatten_parameters(config.model_dump(mode="json")))
    early = [text for text in where if _is_known_early(params, text.partition("=")[0])]
    try:
        points = list(zip(spec.points, params, strict=True))
        kept = selecting.with_values(points, early, "trial", itemgetter(1))
        return [point for point, _ in kept]
    except ConfigError:  # which names the values of all trials if they are resolved
        return spec.points


def _is_known_early(params: Sequence[Mapping[str, str]], key: str) -> bool:
    """Return whether a key of `where` has its value before trials are resolved."""
    name = selecting.full_name(key, set().union(*params))
    if name is None or HYPERPARAMETER.match(name):
        return False
    return all(entry.get(name) not in ("null", "auto") for entry in params)


def _with_stopping_metric(settings: SweepSettings, trials: list[Config]) -> SweepSettings:
    """Return the settings with the metric of early stopping written out, checked."""
    if settings.early_stopping is None:
        return settings
    stopping = settings.early_stopping.of(trials[0])
    _check_stopping(stopping, stopping.metric or "", trials)
    return settings.model_copy(update={"early_stopping": stopping})


def _advice(error: str, axes: Iterable[str]) -> str:
    """Return the fix for a hyper-parameter that one of several methods of a grid does not have."""
    section = error.partition(".")[0]
    differs = section in ("algorithm", "client", "server") and section in axes
    if not differs or ": unknown key of" not in error:
        return ""
    return (
        "; give each method a grid of its own: `sweep` may be a list of grids "
        "(docs/how-to/fair_comparisons.md)"
    )


def _check_stopping(asked: EarlyStopping, metric: str, trials: list[Config]) -> None:
    """Raise ConfigError if the settings could never stop a trial or the metric is unknown."""
    place = "sweep.early_stopping"
    longest = max(c.rounds for c in trials)
    longest = min(longest, asked.max_rounds or longest)
    if asked.grace_period >= longest:
        raise ConfigError(
            f"{place}.grace_period: {asked.grace_period} rounds, and no trial has more than "
            f"{longest}; lower it, or leave {place} out"
        )
    check_metric(f"{place}.metric", metric, trials)


def _check_claims(claims: list[Claim], trials: list[Trial]) -> None:
    """Raise ConfigError for metrics and parameters that no trial has; warn of such values."""
    if not claims:
        return
    configs = [trial.config for trial in trials]
    for i, claim in enumerate(claims):
        for name, side in (("left", claim.left), ("right", claim.right)):
            check_metric(f"claims.{i}.{name}.metric", side.metric, configs)
    for sentence in check_sides(claims, [trial.params for trial in trials]):
        logger.warning("%s", sentence)


def _key(c: Config) -> str:
    """Return the identity of a trial: equal keys mean equal results, files, names and stores."""
    facts = [c.fingerprint, c.rounds, c.evaluate.model_dump(), c.name, redacted_uri(c.tracking.uri)]
    # Only if they are set, so that trials without them keep their folders.
    if more := c.model_dump(include={"faults", "record_updates"}, exclude_defaults=True):
        facts.append(more)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def load_once(wanted: AnyData) -> data.Dataset:
    """Return a data set from the cache of this process, so that trials share it.

    Args:
        wanted: the section `data` of a trial.

    Raises:
        ConfigError: the data set cannot be loaded.
    """
    return _load(type(wanted), dump_yaml(plain(wanted.model_dump())), data.version_of(wanted))


@lru_cache(maxsize=2)
def _load(kind: type[AnyData], settings: str, version: str) -> data.Dataset:
    """Load a data set from its settings as YAML; `version` changes with its files."""
    return data.load_dataset(kind.model_validate(load_yaml(settings)))
