"""Simulation of a client's update on candidate images, and its distance from the recorded one.

`gradient_inversion` has the formulas and their sources.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from raysim.attacks.attack_options import AttackOptions
from raysim.data.partition.clients import mean_size
from raysim.diagnostics.recorded_updates import Observation
from raysim.engine.plan import Plan
from raysim.errors import ConfigError, RaysimError, in_a_line
from raysim.models.default_device import tensors_on
from raysim.models.flat import Model
from raysim.randomness import generator
from raysim.rules import Batch, ClientRule, LocalData, Loss, task_loss
from raysim.rules.contract import overridden
from raysim.rules.upload_stages import UploadStage
from raysim.system.signals import failing_as, reraise_stop
from raysim.training.messages import Broadcast
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.pure_task import PureTask
from raysim.training.uploads.client_level_dp import CLIP_NORM

logger = logging.getLogger("raysim")

MAX_GRADIENT_NUMBERS = 2**26
"""Limit on the numbers in the gradients of observations that are attacked side by side, with those
that differentiating them needs."""
VECTORS_PER_GRADIENT = 8
"""Vectors [P] that one simulated gradient keeps for its own gradient, roughly."""


def squared_distance(g: Tensor, simulated: Tensor) -> Tensor:
    """Return Σ (g - ĝ)² over all parameters (Zhu 2019).

    Args:
        g: [P], the observed gradient.
        simulated: [P], the simulated gradient.
    """
    difference = g - simulated
    return (difference * difference).sum()


def cosine_distance(g: Tensor, simulated: Tensor) -> Tensor:
    """Return 1 - ⟨g, ĝ⟩ / (‖g‖ ‖ĝ‖) (Geiping 2020); 1 if one of the vectors is zero.

    Args:
        g: [P], the observed gradient.
        simulated: [P], the simulated gradient.
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
        x: [b, C, H, W], the images.
    """
    return (x[..., 1:] - x[..., :-1]).abs().mean() + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()


class _AttackTask(PureTask):
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
    data: Any,
    clip_norm: float | None,
) -> Tensor:
    """Return the simulated gradient ĝ [P], differentiable in x.

    It is the `delta` that a client with this rule sends after one step on the images x [b, C, H,
    W], divided by its step size. Without a rule it is the gradient of the mean cross-entropy.

    Args:
        rule: the client rule; None: the gradient of the mean cross-entropy.
        model: the net.
        facts: the constants of the client's training, among them its step size.
        broadcast: what the client received, with the global parameters [P].
        x: images [b, C, H, W].
        y: labels [b].
        data: what the rule's methods get as the data of the client.
        clip_norm: largest norm of `delta`, under client-level privacy; None: unlimited.
    """
    global_params = broadcast.global_params
    if rule is None:
        return PureTask(model, LocalSettings(), broadcast.buffers).grad(
            global_params, Batch(x, y), mode="frozen"
        )
    task = _AttackTask(model, facts, broadcast.buffers, (1, 0))
    client_state = {"seen": torch.zeros((), dtype=torch.bool, device=global_params.device)}
    batch = Batch(x, y)
    with tensors_on(global_params.device):
        begun = rule.init(broadcast.shared, client_state, data, task)
        # The client's own parameters, which are another tensor than those of the broadcast.
        state = {"w": global_params.clone(), **begun}
        if rule.prepares:
            batch = replace(batch, prepared=rule.prepare(broadcast.shared, batch, task))
        state = rule.step(broadcast.shared, state, batch, task)
        report, _ = rule.finish(broadcast.shared, state, client_state, data, task)
    delta = report["delta"]
    if clip_norm is not None:
        norm = (delta * delta).sum().clamp(min=1e-30).sqrt()
        delta = delta * torch.clamp(clip_norm / norm, max=1.0)
    return delta / facts.lr


def _refuse_clients(
    rule: ClientRule, stages: Sequence[UploadStage], model: Model, settings: LocalSettings
) -> None:
    """Refuse clients whose update depends on more than the attacker sees or simulates."""
    if stages:
        raise ConfigError(
            f"attacker: the stage {type(stages[0]).__name__} of local.upload changes uploads, "
            "which the attacker does not simulate; use attacker=oblivious"
        )
    if rule.state(PureTask(model, settings)):
        raise ConfigError(
            f"attacker: client rule '{rule.name}' keeps what it has from earlier rounds, which the "
            "attacker does not see; use attacker=oblivious"
        )
    if methods := overridden(rule, ["noise", "begin", "personal"]):
        raise ConfigError(
            f"attacker: client rule '{rule.name}' has a {methods[0]} of its own, whose "
            "result the attacker does not see; use attacker=oblivious"
        )


class GradientSimulator:
    """Gradients of observed clients, and the gradients that candidate images would give.

    All clients are of one group, started from the same model and have the same number of images b.

    Args:
        plan: the run whose model and client rule are simulated.
        seen: the observations of the clients, at least one.
        options: the options of the attack.

    Raises:
        ConfigError: the adaptive attacker cannot simulate the client rule.
    """

    def __init__(self, plan: Plan, seen: Sequence[Observation], options: AttackOptions):
        device = options.device
        group, base = plan.group(seen[0].client), seen[0].base
        config, local = group.config, group.config.local
        self.options, self.name, self.classes = options, config.model.name, plan.dataset.classes
        self.model = plan.model(device)
        if local.buffers == "frozen":
            self.model.freeze_statistics()
        self.rule = group.rule.at(base) if options.attacker == "adaptive" else None
        broadcast = seen[0].broadcast
        self.broadcast = Broadcast(
            {k: v.to(device) for k, v in broadcast.shared.items()}, broadcast.buffers.to(device)
        )
        lr = local.step_sizes.of_step(base)
        self.settings = LocalSettings(
            t=base,
            lr=lr,
            weight_decay=local.weight_decay,
            clip=local.max_grad_norm,
            privacy=config.example_privacy,
            x0=plan.initial[0].to(device),
            decayed=self.model.decayed() if local.weight_decay else None,
            group=group.name,
        )
        if self.rule is not None:
            _refuse_clients(self.rule, group.stages, self.model, self.settings)
        self.clip_norm: float | None = None
        if (privacy := config.client_privacy) is not None:
            self.clip_norm = float(broadcast.shared.get(CLIP_NORM, privacy.clip_norm))
        self.clients = [observation.client for observation in seen]
        of_round = plan.clients.at(base)
        self.sizes = [len(of_round.client(client)) for client in self.clients]
        self.average = mean_size(of_round.sizes)
        updates = torch.stack([observation.uploads["delta"] for observation in seen])
        self.g = updates.to(device, plan.dtype) / lr
        self.y = torch.stack([observation.y for observation in seen]).to(device)
        self.shape = tuple(seen[0].x.shape)
        numbers_per_gradient = self.model.size
        if self.rule is not None and config.example_privacy is not None:
            numbers_per_gradient *= self.shape[0]
        self.chunk = max(1, MAX_GRADIENT_NUMBERS // (VECTORS_PER_GRADIENT * numbers_per_gradient))
        self.vmap = False

    def starts(self, restart: int) -> Tensor:
        """Return random images to start from.

        Args:
            restart: number of the start, from 0.

        Returns:
            [K, b, C, H, W], standard normal and keyed by client and restart.
        """
        keyed = [generator(self.options.seed, "attack", client, restart) for client in self.clients]
        images = [torch.from_numpy(rng.standard_normal(self.shape)) for rng in keyed]
        return torch.stack(images).to(self.g.device, self.g.dtype)

    def dry_run(self) -> None:
        """Find out whether the observations can be attacked side by side.

        Raises:
            ConfigError: they cannot be attacked at all.
        """
        x = self.starts(0)[:2]
        reason = self._why_not_side_by_side(x)
        self.vmap = not reason
        if reason:
            logger.info("attack: one client after the other (%s)", reason)
        # The client with the most images: what is known of it is the smallest part.
        largest = self.sizes.index(max(self.sizes))
        self._check_differentiable(largest, self.starts(0)[largest])

    def _why_not_side_by_side(self, x: Tensor) -> str:
        """Return why vmap cannot simulate the clients; "" if it can."""
        self.vmap = True
        try:
            with warnings.catch_warnings():
                # torch warns if it would fall back to a slow loop.
                warnings.simplefilter("error")
                self.gradient(x)
        except BaseException as error:
            reraise_stop(error)
            return in_a_line(error)
        return ""

    def _check_differentiable(self, i: int, images: Tensor) -> None:
        """Check that the simulated gradient of observation i is a differentiable function."""
        subject, instead = f"model '{self.name}'", "take another net"
        if self.rule is not None:
            subject, instead = f"client rule '{self.rule.name}'", "use attacker=oblivious"
        images = images.requires_grad_()
        cannot = (
            f"attacker: {subject} cannot be simulated as a differentiable function of the images"
        )
        with failing_as(lambda why: ConfigError(f"{cannot} ({why}); {instead}")):
            sent = self._one(i)(images, self.y[i])
            torch.autograd.grad(sent.sum(), images)
            # Integers cannot be NaN: labels that are not known show by a change.
            changed = self._one(i, len(self.classes) - 1)(images, self.y[i])
        if self.rule is not None and not (
            torch.isfinite(sent).all() and torch.equal(sent, changed)
        ):
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
        """Return the costs [K] of images, without total variation.

        Args:
            x: [K, b, C, H, W], candidates for the images of the clients.
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

    def _one(self, i: int | None, label_of_others: int = 0) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the function (x, y) -> ĝ of observation i; None: of all, for use under vmap."""
        alone = len(set(self.sizes)) == 1 or i is not None
        n = self.sizes[i or 0]

        def simulate(x: Tensor, y: Tensor) -> Tensor:
            known = Batch(x, y)
            if n != len(y):
                # The attacker knows nothing of the client's other images.
                known = Batch(x * torch.nan, torch.full_like(y, label_of_others))
            data = _Ragged()
            if alone:
                data = LocalData(n, self.average, lambda augment=False: iter([known]))
            return simulated(
                self.rule, self.model, self.settings, self.broadcast, x, y, data, self.clip_norm
            )

        return simulate
