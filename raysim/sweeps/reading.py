"""Reading of a sweep from a file and overrides, and its validation before torch is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from raysim.config import explain, loading
from raysim.config.schema import Config
from raysim.config.sections.base import Section
from raysim.config.tracking_uri import with_environment
from raysim.errors import ConfigError
from raysim.prepare.early_validation import ShippedMethods
from raysim.spelling import did_you_mean
from raysim.sweeps import search_space
from raysim.sweeps.early_stopping import EarlyStopping
from raysim.sweeps.search_space import Axis, Draw, title_of

Source = str | Path | Mapping[str, Any]
"""Configuration file, name of a shipped one, or mapping."""

ReadConfig = Callable[[Source, Iterable[str] | Mapping[str, Any]], dict[str, Any]]
"""Reads a configuration with overrides (`loading.read_config` with facts about the methods)."""


class SweepSettings(Section):
    """Settings of a sweep and of its trials."""

    samples: int | None = Field(default=None, ge=1)
    """Number of random draws of the keys that are drawn."""

    sample_seed: int = Field(default=0, ge=0)
    """Seed of the draws; it is independent of the trials' `seed`."""

    retries: int = Field(default=0, ge=0)
    """Number of times a failed trial is restarted from its last checkpoint."""

    early_stopping: EarlyStopping | None = None
    """Early stopping of trials; unset, all trials run to their end."""


@dataclass(frozen=True)
class SweepSpec:
    """Sweep as written, before its trials are resolved."""

    points: list[dict[str, Any]]
    """Values of the keys that vary, for each point."""

    drawn: dict[str, Draw]
    """Distributions of the keys that are drawn."""

    fixed: dict[str, Any]
    """Overrides with a single value, common to all points."""

    settings: SweepSettings
    """Settings of the sweep."""

    source: Source
    """Source of the sweep."""

    read: ReadConfig
    """Reads the configuration of a point."""

    def raw(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration at a point, not yet checked.

        By default a trial runs in one process on one core.

        Args:
            point: values of the keys that vary.

        Raises:
            ConfigError: the configuration cannot be read, or sets `run_dir`.
        """
        # A trial without a section, such as an attacker, has no use for the section's keys.
        left_out = tuple(f"{key}." for key, value in point.items() if value is None)
        values = {**self.fixed, **point}
        raw = self.read(
            self.source, {k: v for k, v in values.items() if not k.startswith(left_out)}
        )
        raw.pop("sweep", None)
        raw = with_environment(raw)
        if raw.get("run_dir") is not None:
            raise ConfigError(
                "run_dir: every trial of a sweep has a separate folder; leave run_dir out (--dir "
                "sets the folder of all trials)"
            )
        resources = raw.get("resources", {})
        if isinstance(resources, Mapping) and resources.get("executor", "inline") == "inline":
            raw["resources"] = {
                "executor": "inline",
                "threads": 1,
                "server_threads": 1,
                **resources,
            }
        return raw


class _SweepFile(Section):
    """File with only a section `sweep`, so that errors name the full key."""

    sweep: SweepSettings
    """Settings of the sweep."""


def validate_sweep_early(source: Source, overrides: Iterable[str] | Mapping[str, Any] = ()) -> None:
    """Refuse a sweep if it has a mistake that is visible without importing torch and the methods.

    Of points with the same values only the first is validated: the others repeat its mistakes.

    Args:
        source: as for `preparation.prepare_sweep`.
        overrides: as for `preparation.prepare_sweep`.

    Raises:
        ConfigError: the sweep or a trial is invalid; the message is that of `prepare_sweep`.
    """
    methods = ShippedMethods()
    spec = read_sweep(source, overrides, methods.read)
    spec.raw({})
    validated: set[str] = set()
    for point in spec.points:
        values = {f"{key}={value!r}" for key, value in point.items()}
        if values and values <= validated:
            continue
        validated |= values
        try:
            methods.validate(spec.raw(point))
        except ConfigError as error:
            raise trial_error(point, str(error)) from None


def trial_error(point: Mapping[str, Any], message: str) -> ConfigError:
    """Return the error of a trial, which names the values of its point.

    Args:
        point: values of the keys that vary.
        message: what is wrong with the trial.
    """
    title = title_of(point)
    return ConfigError(f"trial {title}: {message}" if title else message)


def read_sweep(
    source: Source, overrides: Iterable[str] | Mapping[str, Any], read: ReadConfig
) -> SweepSpec:
    """Read a sweep without resolving its trials.

    Args:
        source: as for `preparation.prepare_sweep`.
        overrides: as for `preparation.prepare_sweep`.
        read: reads a configuration.

    Returns:
        The points of all grids, not yet checked.

    Raises:
        ConfigError: the sweep is invalid.
    """
    fixed, axes = search_space.split_overrides(overrides)
    keys_of_settings = [key for key in fixed if key.partition(".")[0] == "sweep"]
    settings_overrides = {key: fixed.pop(key) for key in keys_of_settings}
    raw = read(source, ())
    section = raw.get("sweep")
    grids, settings = _parse_sweep_section(section, settings_overrides)
    grids = [search_space.laid_over(grid, fixed, axes) for grid in grids]
    drawn = _drawn_keys(grids)
    _check_samples(settings.samples, drawn)
    if section is None and not axes:
        raise ConfigError(
            "sweep: nothing varies; pass lists of values, as in seed=0..4 local.lr=0.1,0.01, or "
            "add a section sweep"
        )
    n_samples = settings.samples or 1
    search_space.check_size(grids, n_samples)
    points: list[dict[str, Any]] = []
    for grid in grids:
        for point in search_space.points(grid, n_samples, settings.sample_seed):
            points.append(_with_overrides(point, fixed, read))
    return SweepSpec(points, drawn, fixed, settings, source, read)


def _with_overrides(
    point: Mapping[str, Any], fixed: Mapping[str, Any], read: ReadConfig
) -> dict[str, Any]:
    """Return a point in whose values overrides replace the keys that these values set."""
    changed = dict(point)
    for axis, value in point.items():
        inside = {key: fixed[key] for key in fixed if key.startswith(f"{axis}.")}
        if inside and isinstance(value, Mapping):
            changed[axis] = read(loading.nested({axis: value}), inside)
            for part in axis.split("."):
                changed[axis] = changed[axis][part]
    return changed


def _drawn_keys(grids: Iterable[Mapping[str, Axis]]) -> dict[str, Draw]:
    """Return the distributions of the keys that are drawn."""
    drawn: dict[str, Draw] = {}
    for grid in grids:
        drawn |= {key: axis for key, axis in grid.items() if isinstance(axis, Draw)}
    return drawn


def _check_samples(samples: int | None, drawn: Mapping[str, Draw]) -> None:
    """Raise ConfigError unless the number of draws is set if, and only if, keys are drawn."""
    if drawn and samples is None:
        key, draw = next(iter(drawn.items()))
        raise ConfigError(
            f"sweep.samples: {key} is drawn from {draw}; set the number of draws, as in "
            "sweep.samples=20"
        )
    if samples is not None and not drawn:
        raise ConfigError(
            "sweep.samples: nothing is drawn; leave it out, or draw a key, as in "
            "local.lr=loguniform(1e-3,1)"
        )


def _parse_sweep_section(
    section: Any, overrides: dict[str, Any]
) -> tuple[list[dict[str, Axis]], SweepSettings]:
    """Return the grids and the settings of the section `sweep`, with overrides of the settings.

    Keys beside `grids` belong to all grids.
    """
    whole = {} if section is None else {"grids": section}
    if isinstance(section, Mapping):
        whole = dict(section)
    if strange := [key for key in whole if isinstance(key, str) and _is_strange(key)]:
        known = [*SweepSettings.model_fields, "grids", *Config.model_fields]
        raise ConfigError(f"sweep.{strange[0]}: unknown key{did_you_mean(strange[0], known)}")
    known = {key: whole.pop(key) for key in SweepSettings.model_fields if key in whole}
    raw = loading.read_config({"sweep": known}, overrides)
    settings = explain.checked_section(_SweepFile, raw).sweep
    grids = search_space.grids(whole.pop("grids", {}))
    (common,) = search_space.grids(whole)
    return [search_space.laid_over(grid, {}, common) for grid in grids], settings


def _is_strange(key: str) -> bool:
    """Return True if a key of the section `sweep` is unknown."""
    return "." not in key and key not in (
        *SweepSettings.model_fields,
        *Config.model_fields,
        "grids",
        "extends",
    )
