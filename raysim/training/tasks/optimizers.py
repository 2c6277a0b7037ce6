"""Optimizers of local steps: they turn a descent direction into another one.

A step is w <- w - lr u, and an optimizer computes u from the direction, the parameters and its
moments. It is a pure function on tensors, so it can be captured as a CUDA graph. Steps are those of
the optimizer of the same name in torch.optim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raysim.config.sections import optimizer as sections
from raysim.data.examples import own_copy
from raysim.rules.contract import State


class Optimizer(ABC):
    """An optimizer with state; plain SGD is None in its place."""

    @abstractmethod
    def start(self, w: Tensor) -> State:
        """Return the state before the first step.

        Args:
            w: [P], the parameters.
        """

    @abstractmethod
    def direction(self, direction: Tensor, w: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the direction of the step, and the next state.

        Args:
            direction: [P], the descent direction.
            w: [P], the parameters before the step.
            state: the state before the step; not changed.

        Returns:
            The direction u [P] of the step w - lr u, and the state after it.
        """


@dataclass(frozen=True)
class SGD(Optimizer):
    """SGD with momentum: b <- momentum b + (1 - dampening) g, and b = g at the first step.

    Weight decay makes g the direction plus weight_decay w. Without momentum u is g.
    """

    momentum: float
    """Factor of the buffer b."""
    dampening: float
    """Share of a direction that does not enter the buffer."""
    nesterov: bool
    """Whether u is g + momentum b instead of b."""
    weight_decay: float
    """Factor of the parameters in g."""

    def start(self, w: Tensor) -> State:
        """Return an empty buffer, and whether there was a step if dampening needs it.

        See `Optimizer.start`.
        """
        if not self.momentum:
            return {}
        # Without dampening, the first step from an empty buffer gives b = g by itself.
        started = {"started": w.new_zeros(())} if self.dampening else {}
        return {"momentum_buffer": torch.zeros_like(w), **started}

    def direction(self, direction: Tensor, w: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the direction of the step, and the next state. See `Optimizer.direction`."""
        if self.weight_decay:
            direction = direction + self.weight_decay * w
        if not self.momentum:
            return direction, state
        new = direction
        if self.dampening:
            new = direction * (1 - self.dampening * state["started"])
            state = {**state, "started": torch.ones_like(state["started"])}
        buffer = self.momentum * state["momentum_buffer"] + new
        state = {**state, "momentum_buffer": buffer}
        return direction + self.momentum * buffer if self.nesterov else buffer, state


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam and AdamW: the mean of directions over the root of the mean of their squares."""

    betas: tuple[float, float]
    """Decay of the two means."""
    eps: float
    """Number that is added to the root."""
    weight_decay: float
    """Factor of the parameters."""
    decoupled: bool
    """Whether weight decay enters u itself (AdamW) instead of the direction (Adam)."""
    amsgrad: bool
    """True if u uses the largest mean of squares so far (Reddi 2018)."""

    def start(self, w: Tensor) -> State:
        """Return means of zero, and the number of steps. See `Optimizer.start`."""
        return {
            **({"max_exp_avg_sq": torch.zeros_like(w)} if self.amsgrad else {}),
            "exp_avg": torch.zeros_like(w),
            "exp_avg_sq": torch.zeros_like(w),
            # torch.optim computes the corrections from Python's floats, which are float64.
            "step": w.new_zeros((), dtype=torch.float64),
        }

    def direction(self, direction: Tensor, w: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the direction of the step, and the next state. See `Optimizer.direction`."""
        if self.weight_decay and not self.decoupled:
            direction = direction + self.weight_decay * w
        beta1, beta2 = self.betas
        step = state["step"] + 1
        mean = beta1 * state["exp_avg"] + (1 - beta1) * direction
        squares = beta2 * state["exp_avg_sq"] + (1 - beta2) * direction * direction
        moved = {"exp_avg": mean, "exp_avg_sq": squares, "step": step}
        if self.amsgrad:
            squares = torch.maximum(state["max_exp_avg_sq"], squares)
            moved["max_exp_avg_sq"] = squares
        correction1 = (1 - beta1**step).to(w.dtype)
        correction2 = (1 - beta2**step).sqrt().to(w.dtype)
        u = mean / correction1 / (squares.sqrt() / correction2 + self.eps)
        if self.weight_decay and self.decoupled:
            u = u + self.weight_decay * w
        return u, moved


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop: the direction over the root of the mean of its squares."""

    section: sections.RMSpropSection
    """The configuration's keys."""

    def start(self, w: Tensor) -> State:
        """Return means and a buffer of zero. See `Optimizer.start`."""
        keys = ["square_avg"]
        keys += ["grad_avg"] if self.section.centered else []
        keys += ["momentum_buffer"] if self.section.momentum else []
        return {key: torch.zeros_like(w) for key in keys}

    def direction(self, direction: Tensor, w: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the direction of the step, and the next state. See `Optimizer.direction`."""
        keys = self.section
        if keys.weight_decay:
            direction = direction + keys.weight_decay * w
        square = keys.alpha * state["square_avg"] + (1 - keys.alpha) * direction * direction
        moved = {"square_avg": square}
        if keys.centered:
            mean = keys.alpha * state["grad_avg"] + (1 - keys.alpha) * direction
            moved["grad_avg"] = mean
            square = square - mean * mean
        u = direction / (square.sqrt() + keys.eps)
        if keys.momentum:
            u = moved["momentum_buffer"] = keys.momentum * state["momentum_buffer"] + u
        return u, moved


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad: the direction over the root of the sum of its squares."""

    section: sections.AdagradSection
    """The configuration's keys."""

    def start(self, w: Tensor) -> State:
        """Return the first sum. See `Optimizer.start`."""
        return {"sum": torch.full_like(w, self.section.initial_accumulator_value)}

    def direction(self, direction: Tensor, w: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the direction of the step, and the next state. See `Optimizer.direction`."""
        if self.section.weight_decay:
            direction = direction + self.section.weight_decay * w
        total = state["sum"] + direction * direction
        return direction / (total.sqrt() + self.section.eps), {"sum": total}


def make_optimizer(section: sections.AnyOptimizer) -> Optimizer | None:
    """Return the optimizer of a configuration; None for plain SGD.

    Args:
        section: the section `local.optimizer`.
    """
    if isinstance(section, sections.SGDSection):
        if not section.momentum and not section.weight_decay:
            return None
        return SGD(section.momentum, section.dampening, section.nesterov, section.weight_decay)
    if isinstance(section, sections.RMSpropSection):
        return RMSprop(section)
    if isinstance(section, sections.AdagradSection):
        return Adagrad(section)
    decoupled = isinstance(section, sections.AdamWSection)
    return Adam(section.betas, section.eps, section.weight_decay, decoupled, section.amsgrad)


KEPT = "optimizer "
"""Beginning of the keys under which a client keeps its optimizer's state."""

COUNTS = ("step", "started")
"""State that is one number, or [P] after a step that left some parameters alone."""

COUNT_KEYS = tuple(KEPT + key for key in COUNTS)
"""Keys of counts in a client's state, which are read on the host."""


def kept_state(
    optimizer: Optimizer,
    client_state: Mapping[str, np.ndarray | Tensor],
    w: Tensor,
    segments: Sequence[int],
) -> State | None:
    """Return the state of an optimizer that a client kept; None if it kept none.

    Args:
        optimizer: the optimizer.
        client_state: what the client kept, by key.
        w: [P], a vector of the type and on the device of the parameters.
        segments: sizes of the net's tensors of parameters.
    """
    state = {}
    for key, value in optimizer.start(w).items():
        if KEPT + key not in client_state:
            return None
        array = client_state[KEPT + key]
        if key in COUNTS:
            assert isinstance(array, np.ndarray)
            is_one = (array == array[0]).all()
            array = array[0] if is_one else np.repeat(array, segments)
        state[key] = own_copy(array, value)
    return state


def kept(state: State, segments: Sequence[int]) -> State:
    """Return an optimizer's state under the keys of the client state.

    All clients have to keep the same shapes, so that there is a count for each tensor.

    Args:
        state: the state of the optimizer.
        segments: sizes of the net's tensors of parameters.
    """
    # An empty tensor at the end starts behind the last parameter.
    last = sum(segments) - 1
    starts = [min(sum(segments[:index]), last) for index in range(len(segments))]
    by_tensor = {
        key: value[starts] if value.dim() else value.repeat(len(segments))
        for key, value in state.items()
        if key in COUNTS
    }
    return {KEPT + key: value for key, value in {**state, **by_tensor}.items()}
