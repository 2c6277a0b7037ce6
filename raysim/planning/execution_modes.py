"""Compare the modes that train a block on this device: loop, vmap and CUDA graphs.

And whether a run that is repeated gives the same bits here, for a net with convolutions.

CUDA graphs are off by default: they have been tested with a stand-in on CPUs only. This comparison
shows whether they give the same bits on a GPU, and whether they are faster there.
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

COMPARISON_WARM_UP_ROUNDS = 2
"""Rounds that are not timed."""

MAX_RELATIVE_DIFFERENCE = 1e-4
"""Largest difference between the parameters of two modes in float32 after all rounds, relative to
the largest parameter."""

MODES: dict[str, dict[str, Any]] = {
    "loop": {"batching.mode": "loop", "batching.cuda_graphs": False},
    "vmap": {"batching.mode": "vmap", "batching.cuda_graphs": False},
    "vmap with CUDA graphs": {"batching.mode": "vmap", "batching.cuda_graphs": True},
}
LOOP, VMAP, GRAPHS = MODES

CONVOLUTIONS = {**MODES[LOOP], "model": "lenet"}
"""Settings of the run that is repeated: without deterministic kernels a GPU adds the gradients of
convolutions in another order each time."""


@dataclass(frozen=True)
class Comparison:
    """Speeds and results of the modes on one device."""

    clients_per_second: dict[str, float]
    """Median speed of each mode."""
    vmap_difference: float
    """Largest difference between the parameters of vmap and loop, as a part of the largest one."""
    graphs_equal: bool
    """Whether CUDA graphs gave the same bits as vmap without them."""
    recorded: bool
    """Whether any step ran as a CUDA graph."""
    repeats: bool = True
    """Whether a run with convolutions gave the same bits twice."""

    @property
    def agrees(self) -> bool:
        """Whether all modes computed the same: to rounding, and the rest to the bit."""
        return (
            self.vmap_difference <= MAX_RELATIVE_DIFFERENCE and self.graphs_equal and self.repeats
        )

    @property
    def advice(self) -> str:
        """Advice for the configuration, in one sentence."""
        if not self.repeats:
            return "do not compare digests of runs on this GPU; please report this"
        if not self.agrees:
            return "do not use the modes that differ; please report this"
        if not self.recorded:
            return "no step could run as a CUDA graph; leave batching.cuda_graphs off"
        gain = self.clients_per_second[GRAPHS] / self.clients_per_second[VMAP]
        if gain > 1.1:
            return (
                f"set batching.cuda_graphs=true ({gain:.2f} times vmap's speed on this small net)"
            )
        return f"leave batching.cuda_graphs off ({gain:.2f} times vmap's speed on this small net)"

    def __str__(self) -> str:
        speeds = ", ".join(
            f"{mode} {speed:,.0f}" for mode, speed in self.clients_per_second.items()
        )
        bits = "the same bits" if self.graphs_equal else "OTHER BITS"
        repeated = "the same bits" if self.repeats else "OTHER BITS"
        return (
            f"a repeated run gives {repeated}; clients/s: {speeds}; "
            f"vmap differs from loop by {self.vmap_difference:.1e} "
            f"(at most {MAX_RELATIVE_DIFFERENCE:.0e}); CUDA graphs give {bits}; {self.advice}"
        )


def compare_modes(gpus: float = 1.0, rounds: int = 10) -> Comparison:
    """Train the quickstart in every mode, and compare speeds and parameters.

    Args:
        gpus: `resources.gpus` of the runs; 0 trains on the CPU, where there are no CUDA graphs.
        rounds: the number of timed rounds.

    Returns:
        Speeds, differences, whether any step ran as a CUDA graph, and whether runs repeat.

    Raises:
        RaysimError: a run failed.
    """
    params: dict[str, torch.Tensor] = {}
    speeds: dict[str, float] = {}
    recorded = False
    for mode, settings in MODES.items():
        params[mode], speeds[mode], graphs = _train(settings, gpus, rounds)
        recorded = recorded or graphs
    difference = (params[VMAP] - params[LOOP]).abs().max() / params[LOOP].abs().max()
    equal = torch.equal(params[GRAPHS], params[VMAP])
    once, again = (_train(CONVOLUTIONS, gpus, rounds=1)[0] for _ in range(2))
    return Comparison(speeds, float(difference), equal, recorded, torch.equal(once, again))


def _train(settings: dict[str, Any], gpus: float, rounds: int) -> tuple[torch.Tensor, float, bool]:
    """Return the final parameters [P], clients per second, and whether steps were recorded."""
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
        cache = getattr(executor.trainer.trainers[0], "cuda_graphs", None)
        recorded = cache is not None and bool(cache.recorded)
    finally:
        executor.close()
    speed = plan.config.schedule.size / statistics.median(seconds[COMPARISON_WARM_UP_ROUNDS:])
    return params, speed, recorded
