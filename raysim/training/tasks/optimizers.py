"""Optimizers of local steps: they turn a descent direction into another one.

A step is w <- w - lr u, and an optimizer computes u from the direction, the parameters and its
moments. It is a pure function on tensors, so it can be captured as a CUDA graph. Steps are those of
the optimizer of the same name in torch.optim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.config.sections import optimizer as sections
from raysim.data.examples import own_copy
from raysim.rules.contract import State


@dataclass(frozen=True)
class Optimizer(ABC):
    """An optimizer with state; plain SGD is None in its place."""

    section: Any
    """The keys of `local.optimizer`."""

    def direction(self, direction: Tensor, w: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the direction of the step, and the next state.

        Weight decay adds weight_decay w to the direction, or to u in AdamW.

        Args:
            direction: [P], the descent direction.
            w: [P], the parameters before the step.
            state: the state before the step; not changed.

        Returns:
            The direction u [P] of the step w - lr u, and the state after it.
        """
        weight_decay = self.section.weight_decay
        is_decoupled = isinstance(self.section, sections.AdamWSection)
        if weight_decay and not is_decoupled:
            direction = direction + weight_decay * w
        u, moved = self.moved(direction, state)
        if weight_decay and is_decoupled:
            u = u + weight_decay * w
        return u, moved

    @abstractmethod
    def start(self, w: Tensor) -> State:
        """Return the state before the first step.

        Args:
            w: [P], the parameters.
        """

    @abstractmethod
    def moved(self, direction: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the direction of the step without decoupled weight decay, and the next state.

        Args:
            direction: [P], the descent direction, with other weight decay.
            state: the state before the step; not changed.
        """


class SGD(Optimizer):
    """SGD with momentum: b <- momentum b + (1 - dampening) g, and b = g at the first step.

    u is b, or g + momentum b with `nesterov`. Without momentum u is g.
    """

    def start(self, w: Tensor) -> State:
        """Return the empty buffer; see `Optimizer.start`.

        With dampening, a number says that a first direction has been put into it.
        """
        if not self.section.momentum:
            return {}
        # Without dampening, the first step from an empty buffer gives b = g by itself.
        started = {"started": w.new_zeros(())} if self.section.dampening else {}
        return {"momentum_buffer": torch.zeros_like(w), **started}

    def moved(self, direction: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the buffer, or Nesterov's look-ahead of it; see `Optimizer.moved`."""
        keys = self.section
        if not keys.momentum:
            return direction, state
        new = direction
        if keys.dampening:
            new = direction * (1 - keys.dampening * state["started"])
            state = {**state, "started": torch.ones_like(state["started"])}
        buffer = keys.momentum * state["momentum_buffer"] + new
        state = {**state, "momentum_buffer": buffer}
        return direction + keys.momentum * buffer if keys.nesterov else buffer, state


class Adam(Optimizer):
    """Adam, and with a section `adamw` AdamW: u is the corrected mean over the root of squares."""

    def start(self, w: Tensor) -> State:
        """Return zero moments and no steps; see `Optimizer.start`."""
        return {
            **({"max_exp_avg_sq": torch.zeros_like(w)} if self.section.amsgrad else {}),
            "exp_avg": torch.zeros_like(w),
            "exp_avg_sq": torch.zeros_like(w),
            # torch.optim computes the corrections from Python's floats, which are float64.
            "step": w.new_zeros((), dtype=torch.float64),
        }

    def moved(self, direction: Tensor, state: State) -> tuple[Tensor, State]:
        """Return Adam's quotient; see `Optimizer.moved`."""
        beta1, beta2 = self.section.betas
        step = state["step"] + 1
        mean = beta1 * state["exp_avg"] + (1 - beta1) * direction
        squares = beta2 * state["exp_avg_sq"] + (1 - beta2) * direction * direction
        moved = {"exp_avg": mean, "exp_avg_sq": squares, "step": step}
        if self.section.amsgrad:
            squares = torch.maximum(state["max_exp_avg_sq"], squares)
            moved["max_exp_avg_sq"] = squares
        correction1 = (1 - beta1**step).to(direction.dtype)
        correction2 = (1 - beta2**step).sqrt().to(direction.dtype)
        return mean / correction1 / (squares.sqrt() / correction2 + self.section.eps), moved


class RMSprop(Optimizer):
    """RMSprop: the direction over the root of the mean of its squares."""

    def start(self, w: Tensor) -> State:
        """Return means and a buffer of zero; see `Optimizer.start`."""
        keys = ["square_avg"]
        keys += ["grad_avg"] if self.section.centered else []
        keys += ["momentum_buffer"] if self.section.momentum else []
        return {key: torch.zeros_like(w) for key in keys}

    def moved(self, direction: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the quotient, or the buffer that sums quotients; see `Optimizer.moved`."""
        keys = self.section
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


class Adagrad(Optimizer):
    """Adagrad: the direction over the root of the sum of its squares."""

    def start(self, w: Tensor) -> State:
        """Return the first sum; see `Optimizer.start`."""
        return {"sum": torch.full_like(w, self.section.initial_accumulator_value)}

    def moved(self, direction: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the quotient; see `Optimizer.moved`."""
        total = state["sum"] + direction * direction
        return direction / (total.sqrt() + self.section.eps), {"sum": total}


KINDS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "adam": Adam,
    "adamw": Adam,
    "rmsprop": RMSprop,
    "adagrad": Adagrad,
}
"""The optimizer of each `local.optimizer.name`."""


def make_optimizer(section: sections.AnyOptimizer) -> Optimizer | None:
    """Return the optimizer of local steps; None for plain SGD, which needs none.

    Args:
        section: `local.optimizer`.
    """
    return None if section == sections.PLAIN_SGD else KINDS[section.name](section)


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
