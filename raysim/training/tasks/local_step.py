"""The local step, w <- w - lr u, and the constants of a client's local training.

u is a rule's descent direction after clipping, weight decay and the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from raysim.config.sections.privacy import ExamplePrivacy
from raysim.rules.contract import State
from raysim.rules.public import PublicData
from raysim.training.tasks.optimizers import Optimizer


@dataclass(frozen=True)
class LocalSettings:
    """The constants of a client's local training."""

    t: int | Tensor = 0
    """The round in which the client started."""
    lr: float | Tensor = 0.0
    """η_l of that round, or of the step; in the steps of a lane a tensor, if it varies."""
    weight_decay: float = 0.0
    """The factor of the parameters that is added to a descent direction."""
    clip: float | None = None
    """The largest norm of a descent direction; None: unlimited."""
    privacy: ExamplePrivacy | None = None
    """The section `privacy` of the configuration, if it protects examples."""
    guarded: bool = False
    """The rule may use the examples through private gradients only."""
    x0: Tensor | None = None
    """[P], the run's initial parameters."""
    decayed: Tensor | None = None
    """[P], 1 where weight decay applies; None without weight decay."""
    seed: int = 0
    """The run's seed."""
    optimizer: Optimizer | None = None
    """The optimizer of the steps; None: plain SGD."""
    group: str = ""
    """Name of the client's group."""
    public: PublicData | None = None
    """The public examples; None if no rule needs them."""


def downhill(
    w: Tensor,
    direction: Tensor,
    settings: LocalSettings,
    optimizer_state: State,
    idle: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Return the direction u of a step, and the optimizer's next state.

    Args:
        w: [P], the parameters before the step.
        direction: [P], the rule's descent direction, such as the gradient.
        settings: the constants of the client's training.
        optimizer_state: the optimizer's state; not changed.
        idle: bool [P], the parameters without a gradient, which keep their values and their
            optimizer's state, as in torch.optim; None for none.
    """
    if settings.clip is not None:
        norm = (direction * direction).sum().sqrt()
        factor = torch.clamp(settings.clip / norm.clamp(min=1e-30), max=1.0)
        # A norm that is not finite gives NaN: a factor of 0 would hide the error.
        direction = direction * torch.where(torch.isfinite(norm), factor, torch.nan)
    if settings.decayed is not None:
        direction = direction + settings.weight_decay * settings.decayed * w
    if settings.optimizer is not None:
        direction, moved = settings.optimizer.direction(direction, w, optimizer_state)
        if idle is not None:
            # Adam's count of steps becomes one for each parameter: see `optimizers.COUNTS`.
            moved = {k: torch.where(idle, optimizer_state[k], v) for k, v in moved.items()}
        optimizer_state = moved
    if idle is not None:
        # Weight decay, or momentum from earlier steps, would still move them.
        direction = torch.where(idle, torch.zeros_like(direction), direction)
    return direction, optimizer_state


def stepped(w: Tensor, u: Tensor, lr: float | Tensor) -> Tensor:
    """Return w - lr u.

    Args:
        w: [P], the parameters before the step.
        u: [P], the direction of the step.
        lr: the step size; a tensor on lanes, if it varies.
    """
    # `alpha` takes numbers only.
    return w - lr * u if isinstance(lr, Tensor) else torch.add(w, u, alpha=-lr)


def step_in_place(w: Tensor, u: Tensor, lr: float | Tensor) -> None:
    """Make the step of `stepped` in w itself, with the same bits.

    Args:
        w: [P], the parameters; changed.
        u: [P], the direction of the step.
        lr: the step size.
    """
    if isinstance(lr, Tensor):
        w.sub_(lr * u)
    else:
        w.add_(u, alpha=-lr)


def steps_in_place(parts: list[Tensor], along: list[Tensor], lr: float | Tensor) -> None:
    """Make the step of `stepped` in each of several tensors, with the same bits.

    Args:
        parts: parts of the parameters; changed.
        along: the direction of the step in each part.
        lr: the step size.
    """
    if isinstance(lr, Tensor):
        torch._foreach_sub_(parts, torch._foreach_mul(along, lr))  # pyright: ignore[reportPrivateImportUsage]  # torch exports them, untyped
    else:
        torch._foreach_add_(parts, along, alpha=-lr)  # pyright: ignore[reportPrivateImportUsage]  # torch exports it, untyped
