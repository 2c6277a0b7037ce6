"""Compare the modes that train a block on this device: loop, and lanes with and without captures.

And whether a run that is repeated gives the same bits here, for a net with convolutions. Lanes have
been tested with a stand-in on CPUs only. This comparison shows whether captured steps give the same
bits on a GPU, and what they gain there.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from raysim.engine.inline_executor import Inline
from raysim.engine.loop import Engine
from raysim.prepare.resolve import prepare
from raysim.training.trainers.lane_trainer import LaneTrainer

COMPARISON_WARM_UP_ROUNDS = 2
"""Rounds that are not timed."""

MAX_RELATIVE_DIFFERENCE = 1e-4
"""Largest difference between the parameters of two modes in float32 after all rounds, relative to
the largest parameter."""

MODES: dict[str, dict[str, Any]] = {
    "loop": {"batching.mode": "loop"},
    "lanes without captures": {"batching.mode": "lanes", "batching.capture": False},
    "lanes": {"batching.mode": "lanes"},
}
LOOP, UNCAPTURED, LANES = MODES

CONVOLUTIONS = {**MODES[LOOP], "model": "lenet"}
"""Settings of the run that is repeated: without deterministic kernels a GPU adds the gradients of
convolutions in another order each time."""


@dataclass(frozen=True)
class Comparison:
    """Speeds and results of the modes on one device."""

    clients_per_second: dict[str, float]
    """Median speed of each mode."""
    difference: float
    """Largest difference between the parameters of lanes and loop, as a part of the largest one."""
    captures_equal: bool
    """Whether lanes gave the same bits with CUDA graphs as without."""
    captured: bool
    """Whether at least one local step ran as a CUDA graph."""
    repeats: bool = True
    """Whether a run with convolutions gave the same bits twice."""

    @property
    def agrees(self) -> bool:
        """Whether all modes computed the same: to rounding, and the rest to the bit."""
        return self.difference <= MAX_RELATIVE_DIFFERENCE and self.captures_equal and self.repeats

    @property
    def advice(self) -> str:
        """Advice for the configuration, in one sentence."""
        if not self.repeats:
            return "do not compare digests of runs on this GPU; please report this"
        if not self.captures_equal:
            return "set batching.capture=false; please report this"
        if not self.agrees:
            return "set batching.mode=loop; please report this"
        if not self.captured:
            return "no step could be captured; please report this"
        gain = self.clients_per_second[LANES] / self.clients_per_second[LOOP]
        if gain < 1:
            return f"set batching.mode=loop for nets as small as this one (lanes: {gain:.2f} times)"
        return f"leave batching.mode at auto ({gain:.2f} times loop's speed on this small net)"

    def __str__(self) -> str:
        speeds = ", ".join(
            f"{mode} {speed:,.0f}" for mode, speed in self.clients_per_second.items()
        )
        bits = "the same bits" if self.captures_equal else "OTHER BITS"
        repeated = "the same bits" if self.repeats else "OTHER BITS"
        return (
            f"a repeated run gives {repeated}; clients/s: {speeds}; "
            f"lanes differ from loop by {self.difference:.1e} "
            f"(at most {MAX_RELATIVE_DIFFERENCE:.0e}); captured steps give {bits}; {self.advice}"
        )


def compare_modes(gpus: float = 1.0, rounds: int = 10) -> Comparison:
    """Train the quickstart in every mode, and compare speeds and parameters.

    Args:
        gpus: `resources.gpus` of the runs; 0 trains on the CPU, where nothing is captured.
        rounds: the number of timed rounds.

    Returns:
        Speeds, differences, whether any step was captured, and whether runs repeat.

    Raises:
        RaysimError: a run failed.
    """
    params: dict[str, torch.Tensor] = {}
    speeds: dict[str, float] = {}
    captured = False
    for mode, settings in MODES.items():
        params[mode], speeds[mode], has_captured = _train(settings, gpus, rounds)
        captured = captured or has_captured
    difference = (params[LANES] - params[LOOP]).abs().max() / params[LOOP].abs().max()
    equal = torch.equal(params[LANES], params[UNCAPTURED])
    once, again = (_train(CONVOLUTIONS, gpus, rounds=1)[0] for _ in range(2))
    return Comparison(speeds, float(difference), equal, captured, torch.equal(once, again))


def _train(settings: dict[str, Any], gpus: float, rounds: int) -> tuple[torch.Tensor, float, bool]:
    """Return the final parameters [P], clients per second, and whether steps were captured."""
    quiet = {"evaluate.every": 0, "checkpoint.every": 0, "resources.executor": "inline"}
    size = {
        "rounds": COMPARISON_WARM_UP_ROUNDS + rounds,
        "resources.gpus": gpus,
        "batching.size": 10,
    }
    plan, executor = prepare("quickstart", {**quiet, **size, **settings}), Inline()
    seconds: list[float] = []
    try:
        executor.open(plan)
        engine = Engine(plan, executor)
        began = time.perf_counter()
        for _ in engine.rounds():
            if gpus:
                torch.cuda.synchronize()
            now = time.perf_counter()
            seconds.append(now - began)
            began = now
        params = executor.server.snapshot()["state/x"].clone()
        trainer = executor.trainer.trainers[0]
        captured = isinstance(trainer, LaneTrainer) and trainer.has_captured
    finally:
        executor.close()
    speed = plan.config.schedule.size / statistics.median(seconds[COMPARISON_WARM_UP_ROUNDS:])
    return params, speed, captured
