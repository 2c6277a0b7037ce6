"""Find by measurement which executor, how many actors and which blocks are fastest here.

Every candidate trains the same rounds of the given configuration, without evaluation, checkpoints
and tracking: some to warm up, then as many as fit into the time. Where it runs does not change the
result; how clients are put into blocks does in the last bits (and is part of a run's fingerprint),
so blocks are varied only when asked for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

from raysim.config import explain, loading
from raysim.data import loading_once
from raysim.engine.loop import Engine
from raysim.engine.plan import Plan
from raysim.errors import ConfigError, RaysimError, in_a_line
from raysim.prepare.resolve import keys, resolve_plan
from raysim.rules.methods import registry
from raysim.runs.run import choose
from raysim.system import machine

WARM_UP_ROUNDS = 2
"""Rounds that are not counted."""

Settings = dict[str, Any]
"""Values of the configuration by dotted key."""


@dataclass
class Candidate:
    """Settings with their speed in clients per second (median of rounds), or why they failed.

    Attributes:
        settings: values of the configuration by dotted key.
        clients_per_second: median over the rounds; 0 if they failed.
        rounds: number of rounds that were measured.
        problem: first line of the error; "" if they did not fail.
    """

    settings: Settings
    clients_per_second: float = 0.0
    rounds: int = 0
    problem: str = ""

    @property
    def text(self) -> str:
        """The settings as key=value on the command line."""
        return " ".join(f"{key}={value}" for key, value in self.settings.items())


@dataclass
class BenchResult:
    """Candidates in the order in which they were tried."""

    candidates: list[Candidate] = field(default_factory=list)

    @property
    def best(self) -> Candidate | None:
        """The fastest candidate; None if none could run."""
        return max(
            (c for c in self.candidates if c.rounds),
            key=lambda c: c.clients_per_second,
            default=None,
        )


def bench(
    source: str | Path | Mapping[str, Any],
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    seconds: float = 5.0,
    blocks: bool = False,
    tell: Callable[[Candidate], None] = lambda candidate: None,
) -> BenchResult:
    """Measure the candidate settings for a configuration.

    Args:
        source: as for `raysim.run`.
        overrides: as for `raysim.run`; settings that are given here are not varied.
        seconds: duration of each measurement after the warm-up rounds; at least one round.
        blocks: whether to vary execution modes and block sizes too.
        tell: called with each candidate after its measurement.

    Returns:
        The candidates with their speeds.

    Raises:
        ConfigError: a mistake in the configuration, or none of the candidates can run it.
    """
    quiet = {
        "evaluate": {"every": 0},
        "checkpoint": {"every": 0},
        "record_updates": None,
        "stop": None,
    }
    raw = loading.read_config(source, overrides, keys, registry.algorithm_defaults)
    raw.pop("sweep", None)
    explain.validate(raw)  # also the keys that are replaced
    raw |= quiet
    raw["tracking"] = {**(raw.get("tracking") or {}), "models": []}
    load = loading_once()
    plan = resolve_plan(raw, load)
    result = BenchResult()
    fixed_keys: set[str] = set()
    for section in ("resources", "batching"):
        fixed_keys |= {f"{section}.{key}" for key in raw.get(section) or {}}
    for settings in candidates(plan, fixed_keys, blocks):
        candidate = Candidate(settings)
        result.candidates.append(candidate)
        try:
            candidate_plan = resolve_plan(_with_settings(raw, settings), load)
            _measure_candidate(candidate_plan, candidate, seconds)
        except Exception as error:  # such as one of a GPU without room for so many actors
            message = str(error) if isinstance(error, RaysimError) else in_a_line(error)
            candidate.problem = message.splitlines()[0]
        tell(candidate)
    if result.best is None:
        raise ConfigError(f"bench: nothing of this can run: {result.candidates[0].problem}")
    return result


def candidates(plan: Plan, fixed_keys: Iterable[str], blocks: bool) -> Iterator[Settings]:
    """Yield the settings to try on this machine, without the keys in `fixed_keys`.

    Args:
        plan: the plan of the run.
        fixed_keys: keys with dots that the user has set; these are not changed.
        blocks: whether to try batching modes and sizes too, beside executors and actors.
    """
    places = _places(plan)
    if "resources.executor" in fixed_keys:
        executor = plan.config.resources.executor
        places = [place for place in places if place["resources.executor"] == executor]
    batchings: list[Settings] = [{}]
    if blocks:
        batchings = _batchings(plan, any("resources.gpus" in place for place in places))
    tried: list[Settings] = []
    for place, batching in product(places, batchings):
        settings = {k: value for k, value in {**place, **batching}.items() if k not in fixed_keys}
        if settings not in tried:
            tried.append(settings)
            yield settings


def _places(plan: Plan) -> list[Settings]:
    """Return the executors and numbers of actors to try: with GPUs if there are any."""
    cores, gpus = machine.cores(), torch.cuda.device_count()
    if not gpus and not plan.config.resources.gpus:
        return [
            {"resources.executor": "inline"},
            *(
                {"resources.executor": "ray", "resources.actors": actors, "resources.cpus": 1}
                for actors in sorted({1, 2, max(1, cores // 2), cores})
            ),
        ]
    places: list[Settings] = [{"resources.executor": "inline", "resources.gpus": 1}]
    for actors_per_gpu in (1, 2, 4, 8):
        actors = actors_per_gpu * max(gpus, 1)
        places.append(
            {
                "resources.executor": "ray",
                "resources.cpus": min(1.0, cores / actors),
                "resources.actors": actors,
                "resources.gpus": 1 / actors_per_gpu,
            }
        )
    return places


def _batchings(plan: Plan, on_gpus: bool) -> list[Settings]:
    """Return the modes and sizes of blocks to try.

    Args:
        plan: the configuration that is tried out.
        on_gpus: whether any place has GPUs.
    """
    cohort = plan.config.schedule.size
    sizes = sorted({size for size in (1, 8, 32, 128, cohort) if size <= cohort})
    lanes: list[Settings] = [{"batching.mode": "lanes", "batching.size": size} for size in sizes]
    return [{"batching.mode": "loop"}, {"batching.mode": "pooled"}, *(lanes if on_gpus else [])]


def _measure_candidate(plan: Plan, candidate: Candidate, seconds: float) -> None:
    rates: list[float] = []
    end = 0.0
    with closing(_round_rates(plan)) as rates_of_rounds:
        for count, rate in enumerate(rates_of_rounds, 1):
            if count == WARM_UP_ROUNDS:
                end = time.perf_counter() + seconds
            elif count > WARM_UP_ROUNDS:
                rates.append(rate)
                if time.perf_counter() >= end:
                    break
    if not rates:
        raise RaysimError("no client arrives")
    candidate.clients_per_second, candidate.rounds = statistics.median(rates), len(rates)


def _round_rates(plan: Plan) -> Generator[float, None, None]:
    """Yield the clients per second of each round; the run begins anew after its last round."""
    executor = choose(plan, lambda text: None)
    try:
        executor.open(plan)
        start = executor.snapshot().get()
        has_rounds = True
        while has_rounds:
            has_rounds = False
            for record in Engine(plan, executor).rounds():
                if record["round"] > 0:
                    has_rounds = True
                    yield record["system/clients_per_second"]
            executor.restore(start)
    finally:
        executor.close()


def _with_settings(raw: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    changed = {**raw}
    for dotted, value in settings.items():
        section, _, key = dotted.partition(".")
        changed[section] = {**(changed.get(section) or {}), key: value}
    return changed
