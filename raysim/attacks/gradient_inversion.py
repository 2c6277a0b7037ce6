"""Gradient inversion: reconstruct a client's images from its update of one local step.

  known     the model x that the client received, the net, η_l, the labels y, and g = Δ/η_l [P],
            which the run recorded
  attack    x̂ ~ N(0, 1) [b, C, H, W]; Adam on cost(g, ĝ(x̂)) + tv · TV(x̂), with lr × 0.1 after
            3/8, 5/8 and 7/8 of the iterations
  l2        ‖g - ĝ‖²                                        Zhu, Liu, Han, NeurIPS 2019
  cosine    1 - ⟨g, ĝ⟩ / (‖g‖ ‖ĝ‖), over all tensors        Geiping et al., NeurIPS 2020
  TV        mean |differences along rows| + mean |differences along columns|
  ĝ         oblivious: the gradient of the mean cross-entropy at x
            adaptive: what the client's own rule would send for x̂, divided by η_l

The adaptive attacker simulates the client: modified gradients, pseudo data, clipping and weight
decay. It does not simulate random parts (dropout, noise) or data that come from images of other
batches, and it refuses stages of `local.upload`. It treats signs as constants.

The setting is that of Xu et al. 2022, appendix B: Adam for both costs, labels known.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raysim.attacks.attack_folder import write_attack
from raysim.attacks.attack_options import AttackOptions
from raysim.attacks.gradient_simulator import GradientSimulator
from raysim.attacks.reconstructions import AttackResult, PixelRange, Reconstruction, judged
from raysim.by_key import by_key
from raysim.config.explain import checked_section
from raysim.config.loading import parse_overrides
from raysim.config.sections.optimizer import PLAIN_SGD
from raysim.diagnostics import recorded_updates
from raysim.diagnostics.recorded_updates import Observation
from raysim.engine.plan import Plan
from raysim.errors import ConfigError
from raysim.models.precision import allow_tf32
from raysim.prepare.resolve import prepare
from raysim.runs.run_dir import check_has_run

STEP_SIZE_DROPS = (3 / 8, 5 / 8, 7 / 8)
"""Fractions of the iterations at which the step size falls to a tenth (Xu 2022)."""
AttackCallback = Callable[[int, int, Tensor], None]
"""Called after each iteration: the iterations done, their total, and the costs [K]."""

Candidate = tuple[float, int, Tensor]
"""Cost, number of the start, and the images that it led to [b, C, H, W]."""


def attack(
    run_dir: str | Path,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    progress: AttackCallback = lambda done, total, costs: None,
) -> tuple[AttackResult, Path]:
    """Attack the recorded updates of a run.

    The results are written to <run_dir>/attack and to the run's MLflow record.

    Args:
        run_dir: the folder of a run with recorded updates.
        overrides: "key=value" for the fields of `AttackOptions`, or a mapping.
        progress: called after each iteration with the number of iterations done, the number of all
            iterations, and the costs.

    Returns:
        The reconstructions and the folder that holds them.

    Raises:
        ConfigError: there is no run, it recorded no updates, they cannot be inverted, or an option
            is wrong.
    """
    options = checked_section(AttackOptions, parse_overrides(overrides))
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: this machine has no GPU that torch can use; take device=cpu")
    folder = Path(run_dir)
    check_has_run(folder)
    observations = recorded_updates.read_observations(folder, options.round)
    # The attack runs in this process, wherever the run itself was.
    inline = {"executor": "inline", "address": None, "gpus": 0, "server_gpus": 0}
    plan = prepare(
        folder / "config.yaml", {f"resources.{key}": value for key, value in inline.items()}
    )
    with ExitStack() as restored:
        if options.device == "cuda":
            restored.callback(allow_tf32(False))
        result = invert(plan, observations, options, progress)
    return result, write_attack(result, plan, folder)


def invert(
    plan: Plan,
    observations: Sequence[Observation],
    options: AttackOptions,
    progress: AttackCallback = lambda done, total, costs: None,
) -> AttackResult:
    """Attack the observations of one round, side by side if net and rule allow it.

    Args:
        plan: the run whose model and rule are attacked.
        observations: what the attacker has seen of each client in the round.
        options: the options of the attack; `round` is not used.
        progress: called after each iteration with the iterations done, their total, and the costs.

    Returns:
        The reconstructions in the order of the observations.

    Raises:
        ConfigError: the observations or the client's rule leave nothing to invert.
    """
    _refuse(plan, observations)
    began = time.perf_counter()
    pixels = PixelRange.of(plan.dataset, plan.dtype, options.device)

    def alike(observation: Observation) -> tuple[str, int, int]:
        """Return a key that is equal for observations that can share one batch."""
        return plan.group(observation.client).name, observation.base, len(observation.y)

    groups = list(by_key(observations, alike).values())
    total = len(groups) * options.restarts * options.iterations
    iterations = itertools.count(1)

    def report(costs: Tensor) -> None:
        progress(next(iterations), total, costs)

    reconstructions: dict[int, Reconstruction] = {}
    for group in groups:
        simulator = GradientSimulator(plan, group, options)
        simulator.dry_run()
        starts = [
            _descend(simulator, restart, options, pixels, report)
            for restart in range(options.restarts)
        ]
        for observation, candidates in zip(group, zip(*starts, strict=True), strict=True):
            # Costs that are not finite come last.
            cost, restart, images = min(candidates, key=lambda c: (not math.isfinite(c[0]), c[0]))
            reconstructions[observation.client] = judged(observation, cost, restart, images, pixels)
    return AttackResult(
        options,
        observations[0].t,
        [reconstructions[observation.client] for observation in observations],
        time.perf_counter() - began,
    )


def _descend(
    simulator: GradientSimulator,
    restart: int,
    options: AttackOptions,
    pixels: PixelRange,
    report: Callable[[Tensor], None],
) -> list[Candidate]:
    """Minimize the cost with Adam from one start; return what it found of each client."""
    x = simulator.starts(restart)
    adam = torch.optim.Adam([x], lr=options.lr)
    for i in range(options.iterations):
        drops = sum(i >= share * options.iterations for share in STEP_SIZE_DROPS)
        adam.param_groups[0]["lr"] = options.lr * 0.1**drops
        costs, x.grad = simulator.gradient(x)
        if options.signed:
            x.grad.sign_()
        adam.step()
        if options.box:
            x.copy_(torch.minimum(torch.maximum(x, pixels.low), pixels.high))
        report(costs)
    costs = simulator.costs(x)
    return [(float(cost), restart, images) for cost, images in zip(costs, x, strict=True)]


def _refuse(plan: Plan, observations: Sequence[Observation]) -> None:
    """Refuse a run whose updates do not show a gradient of images."""
    if not plan.learning_task.class_labels:
        raise ConfigError(
            f"attack: it reconstructs class labels, which task '{plan.learning_task.name}' has "
            "not; attack a run of task=classification"
        )
    if not observations:
        raise ConfigError(
            "attack: no client was recorded in this round; run it again with another "
            "'record_updates.rounds'"
        )
    if "delta" not in plan.server.uploads:
        raise ConfigError(
            f"attack: server rule '{plan.server.name}' takes {', '.join(plan.server.uploads)}, "
            "not the difference "
            "'delta' of models, of which gradients are made; attack a run of another method, say "
            "fedavg"
        )
    for observation in observations:
        group = plan.group(observation.client)
        if (optimizer := group.config.local.optimizer) != PLAIN_SGD:
            of_group = f" of group '{group.name}'" if group.name else ""
            raise ConfigError(
                f"attack: client {observation.client}{of_group} stepped with local.optimizer "
                f"'{optimizer.name}', and a gradient can be read off a step of plain SGD only; "
                "attack a run without local.optimizer"
            )
        if observation.steps != 1:
            raise ConfigError(
                f"attack: client {observation.client} made {observation.steps} local steps, and a "
                "gradient can be read off one only; run it again with local.steps=1"
            )
        for label in observation.y.reshape(-1).tolist():
            if not 0 <= label < len(plan.dataset.classes):
                raise ConfigError(
                    f"attack: client {observation.client} has an example with label {label}, which "
                    "is none of the data's classes; run it again with other clients recorded"
                )
