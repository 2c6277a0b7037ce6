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
batches. It treats signs as constants.

The setting is that of Xu et al. 2022, appendix B: Adam for both costs, labels known.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from raysim.attacks.plots import plot_reconstructions
from raysim.config.explain import checked_section
from raysim.config.loading import parse_overrides
from raysim.config.sections.base import Section
from raysim.config.sections.optimizer import PLAIN_SGD
from raysim.data import Dataset
from raysim.data.dataset import MAX_PIXEL_VALUES
from raysim.diagnostics import recorded_updates
from raysim.diagnostics.recorded_updates import Observation
from raysim.engine.plan import Plan
from raysim.engine.resolve import prepare
from raysim.errors import ConfigError, RaysimError, in_a_line
from raysim.models.flat import Model
from raysim.randomness import generator
from raysim.rules import Batch, ClientRule, LocalData, Loss, task_loss
from raysim.rules.contract import overridden
from raysim.signals import reraise_stop
from raysim.tracking.mlflow import add_to
from raysim.training.messages import Broadcast
from raysim.training.task import LocalSettings
from raysim.training.vmap import VmapTask, why_not_vmap

logger = logging.getLogger("raysim")

STEP_SIZE_DROPS = (3 / 8, 5 / 8, 7 / 8)
"""Fractions of the iterations at which the step size falls to a tenth (Xu 2022)."""
MAX_GRADIENT_NUMBERS = 2**26
"""Numbers that the gradients of observations attacked side by side may take, with what their own
gradients need."""
VECTORS_PER_GRADIENT = 8
"""Vectors [P] that one simulated gradient keeps for its own gradient, roughly."""
DEFAULT_TV_WEIGHTS = {"l2": 1e-8, "cosine": 1e-6}
"""Weights of TV in Xu 2022: EMNIST and CT with l2, CIFAR-10 with cosine."""

AttackCallback = Callable[[int, int, Tensor], None]


class AttackOptions(Section):
    """Options of the attack. Except for the iterations, the defaults are those of Xu 2022."""

    cost: Literal["l2", "cosine"] = "cosine"
    """Distance of gradients that the attack minimizes. Xu 2022: l2 on EMNIST and CT, cosine on
    CIFAR-10."""
    tv: Annotated[float, Field(ge=0)] | None = None
    """Weight of the total variation (TV). Default: 1e-8 with l2, 1e-6 with cosine (Xu 2022). Zhu
    2019 has none."""
    attacker: Literal["oblivious", "adaptive"] = "oblivious"
    """`oblivious` assumes a plain gradient step, `adaptive` simulates the client's rule."""
    iterations: int = Field(default=2000, ge=1)
    """Steps of the attack. Xu 2022: 32 000; Geiping 2020: 4800. 2000 show the ranking on nets of
    LeNet's size."""
    lr: float = Field(default=1.0, gt=0)
    """Initial step size of Adam. Xu 2022: 1; Geiping 2020: 0.1."""
    signed: bool = False
    """Whether Adam sees only the sign of the image gradient (an option of Geiping 2020)."""
    box: bool = False
    """Whether images are clipped to the range of valid pixels after each step (Geiping 2020)."""
    restarts: int = Field(default=1, ge=1)
    """Number of starts from different random images. The result with the lowest cost is kept (an
    option of Geiping 2020)."""
    seed: int = Field(default=0, ge=0)
    """Seed of the random images from which the attack starts."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the attack, independent of the run's."""
    round: Annotated[int, Field(ge=0)] | None = None
    """Recorded round to attack. Default: the first."""

    @property
    def weight(self) -> float:
        """Weight of the TV term."""
        return DEFAULT_TV_WEIGHTS[self.cost] if self.tv is None else self.tv


@dataclass(frozen=True)
class Reconstruction:
    """Reconstruction from one client's update.

    Attributes:
        labels: of its b images.
        cost: the distance of the gradients at the images found, without TV. May not be finite.
        psnr: of each image, in dB; inf for one found exactly, NaN where the cost is not finite.
        restart: which start was the best.
        original, found: [b, C, H, W] in [0, 1]. With several images of a label, `found` is in the
            order that matches.
    """

    client: int
    labels: tuple[int, ...]
    cost: float
    psnr: tuple[float, ...]
    restart: int
    original: Tensor
    found: Tensor


@dataclass(frozen=True)
class AttackResult:
    """An attack on the clients observed in one round."""

    options: AttackOptions
    round: int
    clients: list[Reconstruction]
    seconds: float

    @property
    def psnr(self) -> float:
        """The mean over images, without those found exactly; NaN if there are no others."""
        finite = [p for client in self.clients for p in client.psnr if math.isfinite(p)]
        return statistics.fmean(finite) if finite else math.nan

    @property
    def median(self) -> float:
        """The median over images, those found exactly among them; NaN if there is none."""
        values = [p for client in self.clients for p in client.psnr if not math.isnan(p)]
        return statistics.median(values) if values else math.nan

    @property
    def exact(self) -> int:
        """How many images were found exactly."""
        return sum(p == math.inf for client in self.clients for p in client.psnr)

    @property
    def failed(self) -> list[int]:
        """Clients whose cost is not finite."""
        return [client.client for client in self.clients if not math.isfinite(client.cost)]

    def as_object(self) -> dict[str, Any]:
        """Return the figures as one JSON object; non-finite figures are null."""

        def plain(value: float) -> float | None:
            return value if math.isfinite(value) else None

        return {
            "round": self.round,
            "psnr": plain(self.psnr),
            "psnr_median": plain(self.median),
            "exact": self.exact,
            "failed": self.failed,
            "clients": [
                {
                    "client": c.client,
                    "labels": c.labels,
                    "cost": plain(c.cost),
                    "psnr": [plain(p) for p in c.psnr],
                }
                for c in self.clients
            ],
            "seconds": round(self.seconds, 3),
        }


def attack(
    run_dir: str | Path,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    progress: AttackCallback = lambda done, total, costs: None,
) -> tuple[AttackResult, Path]:
    """Attack the recorded updates of a run.

    The results are written to <run_dir>/attack and to the run's MLflow record.

    Args:
        run_dir: the run's folder.
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
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{folder} holds no run (no config.yaml); give the folder that `raysim run` printed"
        )
    observations = recorded_updates.read_observations(folder, options.round)
    inline = {
        "executor": "inline",
        "address": None,
        "gpus": 0,
        "server_gpus": 0,
    }  # wherever the run itself was
    plan = prepare(
        folder / "config.yaml", {f"resources.{key}": value for key, value in inline.items()}
    )
    result = invert(plan, observations, options, progress)
    return result, _keep_result(result, plan, folder)


def invert(
    plan: Plan,
    observations: Sequence[Observation],
    options: AttackOptions,
    progress: AttackCallback = lambda done, total, costs: None,
    side_by_side: bool = True,
) -> AttackResult:
    """Attack the observations of one round, side by side if net and rule allow it.

    Args:
        plan: the run whose model and rule are attacked.
        observations: what the attacker has seen of each client in the round.
        options: iterations, restarts, step size and prior of the attack.
        progress: called after each iteration with the iterations done, their total, and the costs.
        side_by_side: whether clients may be attacked at once under vmap; False: one after the
            other.

    Raises:
        ConfigError: the observations or the client's rule leave nothing to invert.
    """
    _refuse(plan, observations)
    began = time.perf_counter()
    device = options.device
    pixels = PixelRange.of(plan.dataset, plan.dtype, device)
    groups = [list(group) for _, group in groupby(sorted(observations, key=_alike), _alike)]
    total, done = len(groups) * options.restarts * options.iterations, 0
    reconstructions: dict[int, Reconstruction] = {}
    for group in groups:
        simulation = GradientSimulator(plan, group, options, device)
        simulation.dry_run(side_by_side)
        best: list[tuple[float, int, Tensor]] = []
        for restart in range(options.restarts):
            x = simulation.starts(restart)
            adam = torch.optim.Adam([x], lr=options.lr)
            for i in range(options.iterations):
                fallen = sum(i >= share * options.iterations for share in STEP_SIZE_DROPS)
                adam.param_groups[0]["lr"] = options.lr * 0.1**fallen
                costs, x.grad = simulation.gradient(x)
                if options.signed:
                    x.grad.sign_()
                adam.step()
                if options.box:
                    x.copy_(torch.minimum(torch.maximum(x, pixels.low), pixels.high))
                done += 1
                progress(done, total, costs)
            candidates = [
                (float(c), restart, image) for c, image in zip(simulation.costs(x), x, strict=True)
            ]
            best = (
                [min(pair, key=_rank) for pair in zip(best, candidates, strict=True)]
                if best
                else candidates
            )
        for observation, (cost, restart, image) in zip(group, best, strict=True):
            reconstructions[observation.client] = _judged(observation, cost, restart, image, pixels)
    return AttackResult(
        options,
        observations[0].t,
        [reconstructions[observation.client] for observation in observations],
        time.perf_counter() - began,
    )


def _alike(observation: Observation) -> tuple[int, int]:
    """Return a key that is equal for observations that can share one batch."""
    return observation.base, len(observation.y)


def _rank(candidate: tuple[float, int, Tensor]) -> tuple[bool, float]:
    """Lowest cost first, those that are not finite last."""
    return not math.isfinite(candidate[0]), candidate[0]


def _refuse(plan: Plan, observations: Sequence[Observation]) -> None:
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
    if (optimizer := plan.config.local.optimizer) != PLAIN_SGD:
        raise ConfigError(
            f"attack: the clients stepped with local.optimizer '{optimizer.name}', and a gradient "
            "can be read off a step of plain SGD only; attack a run without local.optimizer"
        )
    several = [observation for observation in observations if observation.steps != 1]
    if several:
        raise ConfigError(
            f"attack: client {several[0].client} made {several[0].steps} local steps, and a "
            "gradient can be read off "
            "one only; run it again with local.steps=1"
        )


# -- what the attacker simulates -------------------------------------------------------------------


class _AttackTask(VmapTask):
    """A client's task as the attacker simulates it: input gradients are constants.

    The shipped rules take their signs, whose derivative is zero. Differentiating through them would
    cost as much as all the rest.
    """

    def input_grad(
        self, w: Tensor, batch: Batch, loss: Loss = task_loss, buffers: Tensor | None = None
    ) -> Tensor:
        return super().input_grad(w, replace(batch, x=batch.x.detach()), loss, buffers).detach()


class _Ragged:
    """Placeholder for the data of clients with different sizes.

    A rule that reads it makes the attack run client by client.
    """

    def __getattr__(self, name: str) -> Any:
        raise RaysimError(f"clients of different sizes have no '{name}' in common")


def simulated(
    rule: ClientRule | None,
    model: Model,
    facts: LocalSettings,
    broadcast: Broadcast,
    x: Tensor,
    y: Tensor,
    data: Any = None,
) -> Tensor:
    """Return the simulated gradient ĝ [P], differentiable in x.

    It is the `delta` that a client with this rule sends after one step on the images x [b, C, H,
    W], divided by its learning rate. Without a rule it is the gradient of the mean cross-entropy.

    Args:
        rule: the client's rule; None: only the gradient.
        model: the net.
        facts: learning rate and number of steps of the client.
        broadcast: what the client received, with the global parameters [P].
        x: images [b, C, H, W].
        y: labels [b].
        data: what the rule's methods get as the data of the client.
    """
    global_params = broadcast.global_params
    if rule is None:
        return VmapTask(model, LocalSettings(), broadcast.buffers).grad(
            global_params, Batch(x, y), mode="frozen"
        )
    task = _AttackTask(model, facts, broadcast.buffers, (1, 0))
    client_state = {"seen": torch.zeros((), dtype=torch.bool, device=global_params.device)}
    state = {"w": global_params, **rule.init(broadcast.shared, client_state, data, task)}
    batch = Batch(x, y)
    if rule.prepares:
        batch = replace(batch, prepared=rule.prepare(broadcast.shared, batch, task))
    state = rule.step(broadcast.shared, state, batch, task)
    report, _ = rule.finish(broadcast.shared, state, client_state, data, task)
    return report["delta"] / facts.lr


class GradientSimulator:
    """Gradients of observed clients, and the gradients that candidate images would give.

    All clients started from the same model and have the same number of images b.
    """

    def __init__(
        self, plan: Plan, seen: Sequence[Observation], options: AttackOptions, device: str = "cpu"
    ):
        config, base = plan.config, seen[0].base
        self.options, self.name = options, config.model.name
        self.model = plan.model(device)
        self.rule = plan.client.at(base) if options.attacker == "adaptive" else None
        if self.rule is not None and self.rule.state(VmapTask(self.model, LocalSettings())):
            raise ConfigError(
                f"attacker: client rule '{self.rule.name}' keeps what it has from earlier rounds, "
                "which the attacker "
                "does not see; use attacker=oblivious"
            )
        if self.rule is not None and (
            methods := overridden(self.rule, ["noise", "begin", "personal"])
        ):
            raise ConfigError(
                f"attacker: client rule '{self.rule.name}' has a {methods[0]} of its own, whose "
                "result the attacker does not see; use attacker=oblivious"
            )
        broadcast = seen[0].broadcast
        self.broadcast = Broadcast(
            {k: v.to(device) for k, v in broadcast.shared.items()}, broadcast.buffers.to(device)
        )
        local = config.local
        decayed = self.model.decayed() if local.weight_decay else None
        lr, x0 = local.step_sizes.of_step(base), plan.initial[0].to(device)
        self.settings = LocalSettings(
            base,
            lr,
            local.weight_decay,
            local.max_grad_norm,
            config.example_privacy,
            False,
            x0,
            decayed,
        )
        self.clients = [one.client for one in seen]
        self.sizes = [len(plan.clients.client(client)) for client in self.clients]
        self.average = float(plan.clients.sizes.mean())
        self.g = torch.stack([one.uploads["delta"] for one in seen]).to(device, plan.dtype) / lr
        self.y = torch.stack([one.y for one in seen]).to(device)
        self.shape = tuple(seen[0].x.shape)
        each = self.model.size * (
            self.shape[0] if self.rule is not None and config.example_privacy is not None else 1
        )
        self.chunk, self.vmap = max(1, MAX_GRADIENT_NUMBERS // (VECTORS_PER_GRADIENT * each)), False

    def starts(self, restart: int) -> Tensor:
        """Random images to start from, standard normal, keyed by the client: [K, b, C, H, W].

        Args:
            restart: number of the restart.
        """
        keyed = [generator(self.options.seed, "attack", client, restart) for client in self.clients]
        images = [torch.from_numpy(rng.standard_normal(self.shape)) for rng in keyed]
        return torch.stack(images).to(self.g.device, self.g.dtype)

    def dry_run(self, side_by_side: bool = True) -> None:
        """Find out whether the observations can be attacked side by side.

        Args:
            side_by_side: whether clients may be attacked at once.

        Raises:
            ConfigError: they cannot be attacked at all.
        """
        x = self.starts(0)[:2]
        reason = why_not_vmap(self.model) if side_by_side else "asked for"
        self.vmap = reason is None
        if self.vmap:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter(
                        "error"
                    )  # torch warns where it would fall back to a slow loop of its own
                    self.gradient(x)
            except BaseException as error:
                reraise_stop(error)
                self.vmap, reason = False, in_a_line(error)
        if not self.vmap:
            logger.info("attack: one client after the other (%s)", reason)
        subject = f"model '{self.name}'" if self.rule is None else f"client rule '{self.rule.name}'"
        instead = "take another net" if self.rule is None else "use attacker=oblivious"
        first = x[0].requires_grad_()
        try:
            sent = self._one(0)(first, self.y[0])
            torch.autograd.grad(sent.sum(), first)
        except BaseException as error:
            reraise_stop(error)
            raise ConfigError(
                f"attacker: {subject} cannot be simulated as a differentiable function of the "
                f"images ({in_a_line(error)}); {instead}"
            ) from None
        if self.rule is not None and not torch.isfinite(sent).all():
            raise ConfigError(
                f"attacker: what {subject} sends of one batch is not finite, or depends on all of "
                f"the client's data, which the attacker does not have; {instead}"
            )

    def gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the costs [K] without total variation, and the gradient in x of those with it.

        Args:
            x: candidates for the images of K clients, [K, b, C, H, W].

        Returns:
            [K] and [K, b, C, H, W], both detached.
        """
        costs, gradients, weight = [], [], self.options.weight
        for start, part in self._parts(x):
            part = part.detach().requires_grad_()
            distances = self._distances(part, start)
            objective = distances.sum()
            if weight:
                objective = objective + weight * sum(total_variation(images) for images in part)
            gradients.append(torch.autograd.grad(objective, part)[0])
            costs.append(distances.detach())
        return torch.cat(costs), torch.cat(gradients)

    def costs(self, x: Tensor) -> Tensor:
        """The costs [K] of images [K, b, C, H, W], without TV.

        Args:
            x: images [K, b, C, H, W].
        """
        return torch.cat([self._distances(part, start).detach() for start, part in self._parts(x)])

    def _parts(self, x: Tensor) -> list[tuple[int, Tensor]]:
        size = self.chunk if self.vmap else 1
        return [(start, x[start : start + size]) for start in range(0, len(x), size)]

    def _distances(self, x: Tensor, start: int) -> Tensor:
        g, y = self.g[start : start + len(x)], self.y[start : start + len(x)]
        distance = COST_FUNCTIONS[self.options.cost]
        if not self.vmap:
            return torch.stack(
                [distance(g[i], self._one(start + i)(x[i], y[i])) for i in range(len(x))]
            )
        simulate = self._one(None)
        return torch.func.vmap(lambda g, x, y: distance(g, simulate(x, y)))(g, x, y)

    def _one(self, i: int | None) -> Callable[[Tensor, Tensor], Tensor]:
        """(x, y) -> ĝ of observation i, or (None) of any that goes side by side with the others."""
        alone = len(set(self.sizes)) == 1 or i is not None
        n = self.sizes[i or 0]

        def simulate(x: Tensor, y: Tensor) -> Tensor:
            # The attacker knows nothing of the client's other images.
            known_images = x if n == len(y) else x * torch.nan
            data = (
                LocalData(n, self.average, lambda augment=False: iter([Batch(known_images, y)]))
                if alone
                else _Ragged()
            )
            return simulated(self.rule, self.model, self.settings, self.broadcast, x, y, data)

        return simulate


def squared_distance(g: Tensor, simulated: Tensor) -> Tensor:
    """Σ (g - ĝ)² over all tensors (Zhu 2019).

    Args:
        g: the observed gradients, by tensor.
        simulated: the simulated gradients, by tensor.
    """
    difference = g - simulated
    return (difference * difference).sum()


def cosine_distance(g: Tensor, simulated: Tensor) -> Tensor:
    """1 - ⟨g, ĝ⟩ / (‖g‖ ‖ĝ‖), all tensors jointly (Geiping 2020); 1 where one of them is zero.

    Args:
        g: the observed gradients, by tensor.
        simulated: the simulated gradients, by tensor.
    """
    squares = [(v * v).sum().clamp(min=1e-30) for v in (g, simulated)]
    return 1 - (g * simulated).sum() / (squares[0].sqrt() * squares[1].sqrt())


COST_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "l2": squared_distance,
    "cosine": cosine_distance,
}


def total_variation(x: Tensor) -> Tensor:
    """Return the anisotropic total variation of x [b, C, H, W].

    It is mean |differences along rows| + mean |differences along columns|.

    Args:
        x: images [b, C, H, W].
    """
    return (x[..., 1:] - x[..., :-1]).abs().mean() + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()


# -- how well it did -------------------------------------------------------------------------------


@dataclass(frozen=True)
class PixelRange:
    """Inputs that belong to a pixel of 0 and to the brightest pixel, [C, 1, 1] each."""

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, dataset: Dataset, dtype: torch.dtype, device: str = "cpu") -> PixelRange:
        """Return the range of a data set's pixels after normalisation.

        Args:
            dataset: the data set; its pixels are normalised as its `scale` and `shift` say.
            dtype: type of the bounds.
            device: a device of torch.

        Returns:
            Lowest and highest value, [C, 1, 1] each.

        Raises:
            ConfigError: the examples are not images.
        """
        if dataset.scale is None:
            raise ConfigError(f"data.name: {dataset.name} has no images to reconstruct")
        top = MAX_PIXEL_VALUES.get(dataset.name, 255)
        scale, shift = (
            torch.tensor(a, dtype=dtype, device=device)[:, None, None]
            for a in (dataset.scale, dataset.shift)
        )
        return cls(shift, top * scale + shift)

    def image(self, x: Tensor) -> Tensor:
        """Return net inputs [..., C, H, W] as images in [0, 1], float64 on the CPU.

        Args:
            x: inputs [..., C, H, W].
        """
        low, high = self.low.double(), self.high.double()
        return ((x.double() - low) / (high - low)).cpu()


def psnr(original: Tensor, found: Tensor) -> list[float]:
    """Return 10 log10(1 / MSE) of b images [b, C, H, W] in [0, 1]; inf for equal images.

    Args:
        original: [b, C, H, W], the original images.
        found: [b, C, H, W], the reconstructed images.
    """
    errors = ((original - found) ** 2).flatten(1).mean(1).tolist()
    return [math.inf if e == 0 else -10 * math.log10(e) for e in errors]


def _judged(
    observation: Observation, cost: float, restart: int, x: Tensor, pixels: PixelRange
) -> Reconstruction:
    original, reconstructed = pixels.image(observation.x.to(x.device)), pixels.image(x).clamp(0, 1)
    labels = tuple(int(label) for label in observation.y)
    if math.isfinite(cost) and torch.isfinite(reconstructed).all():
        reconstructed = reconstructed[matching(original, reconstructed, labels)]
        quality = tuple(psnr(original, reconstructed))
    else:
        cost, quality = cost if not math.isfinite(cost) else math.nan, (math.nan,) * len(labels)
    return Reconstruction(
        observation.client, labels, cost, quality, restart, original, reconstructed
    )


def matching(original: Tensor, reconstructed: Tensor, labels: Sequence[int]) -> list[int]:
    """Return the index of the found image that belongs to each original image.

    Images are matched within a label so that the sum of squared errors is smallest. Within a batch,
    images of one label leave the same gradient in any order.

    Args:
        original: images [b, C, H, W].
        reconstructed: images [b, C, H, W] in any order within a label.
        labels: [b], labels of the original images.
    """
    order = list(range(len(labels)))
    for label in set(labels):
        members = [k for k, other_label in enumerate(labels) if other_label == label]
        a, b = original[members].flatten(1), reconstructed[members].flatten(1)
        errors = ((a[:, None] - b[None]) ** 2).mean(2)
        for k, chosen in zip(members, linear_sum_assignment(errors.numpy())[1], strict=True):
            order[k] = members[chosen]
    return order


# -- what is kept of it ----------------------------------------------------------------------------


def _keep_result(result: AttackResult, plan: Plan, run_dir: Path) -> Path:
    """Write the plot, the table and the options, and add them to the run in MLflow."""
    o = result.options
    folder, number = _new_folder(run_dir / "attack" / f"{o.cost}-{o.attacker}")
    options_used = {**o.model_dump(), "tv": o.weight, "round": result.round}
    (folder / "options.json").write_text(json.dumps(options_used, indent=1) + "\n")
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["client", "image", "label", "class", "cost", "psnr", "restart"])
        for client in result.clients:
            for k, (label, quality) in enumerate(zip(client.labels, client.psnr, strict=True)):
                name = plan.dataset.classes[label]
                writer.writerow(
                    [client.client, k, label, name, client.cost, quality, client.restart]
                )
    pairs = [
        (
            f"client {client.client}: {plan.dataset.classes[label]}",
            before.numpy(),
            after.numpy(),
            quality,
        )
        for client in result.clients
        for label, before, after, quality in zip(
            client.labels, client.original, client.found, client.psnr, strict=True
        )
    ]
    mean = (
        "no image with a finite PSNR"
        if math.isnan(result.psnr)
        else f"mean PSNR {result.psnr:.2f} dB, median {result.median:.2f}"
    )
    run = f"{plan.label} on {plan.config.data.name}, round {result.round}"
    title = f"{run}: {o.cost}, {o.attacker}; {mean}"
    plot_reconstructions(pairs, title, folder / "attack.png")
    metrics = {} if math.isnan(result.psnr) else {f"attack/psnr_{o.cost}_{o.attacker}": result.psnr}
    try:
        add_to(run_dir, metrics, number, folder, f"attack/{folder.name}")
    except RaysimError as error:
        logger.warning("the run in MLflow does not show this attack: %s", error)
    return folder


def _new_folder(stem: Path) -> tuple[Path, int]:
    """A new folder, numbered if there is one already, and its number."""
    for number in range(1, 10_000):
        path = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        try:
            path.mkdir(parents=True)
            return path, number
        except FileExistsError:
            continue
    raise ConfigError(f"attack: {stem} and its numbered followers are all taken; remove some")
