"""The local steps of several clients side by side, as one under vmap: for small nets, and on GPUs.

Clients with most steps come first, so that those still training are always the first ones. What they were sent has a
client axis too, unless all were sent the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from raysim.errors import ContractError, in_a_line
from raysim.models.flat import Model
from raysim.randomness import generator
from raysim.rules.batch import Batch
from raysim.rules.contract import ClientRule, State
from raysim.rules.losses import Loss, Net, cross_entropy
from raysim.rules.task import PassMode
from raysim.signals import reraise_stop
from raysim.training.cuda_graphs import Replayer
from raysim.training.loop import LoopTask
from raysim.training.task import Facts, ForwardPass, ModelTask, forward_pass


class VmapTask(ModelTask):
    """One client of many, inside `torch.func.vmap`: everything is a pure function."""

    def _grad(self, w: Tensor, batch: Batch, loss: Loss, mode: PassMode, buffers: Tensor | None) -> Tensor:
        statistics = self.buffers if mode == "train" else buffers

        def mean_loss(w: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            moved: list[Tensor] = []
            net = self._net(w, batch, mode, statistics, True, moved)
            value = batch.mean(loss(net, batch))
            plain = value if loss is cross_entropy or mode != "train" else batch.mean(cross_entropy(net, batch))
            return value, (moved[0] if moved else value.new_zeros(0), plain.detach())

        grad, (moved, value) = torch.func.grad(mean_loss, has_aux=True)(w)
        if mode == "train":
            self.buffers = moved
            self.losses.append(value)
        return grad

    def input_grad(self, w: Tensor, batch: Batch, loss: Loss = cross_entropy, buffers: Tensor | None = None) -> Tensor:
        self._guard("input_grad")

        def total(x: Tensor) -> Tensor:
            return loss(self.net(w, replace(batch, x=x), "eval", buffers), batch).sum()

        return torch.func.grad(total)(batch.x)

    def net(
        self, w: Tensor, batch: Batch, mode: PassMode = "frozen", buffers: Tensor | None = None, dropout: bool = True
    ) -> Net:
        return self._net(w, batch, mode, buffers, dropout, [])

    def _net(
        self, w: Tensor, batch: Batch, mode: PassMode, buffers: Tensor | None, dropout: bool, moved: list[Tensor]
    ) -> ForwardPass:
        """In mode "train" the new statistics are left in `moved`."""

        def call(x: Tensor, first: int, levels: list[Tensor] | None) -> tuple[Tensor, Tensor | None]:
            drop = batch.drop if dropout else ()
            return forward_pass(self.model, w, x, first, levels, mode, buffers, batch.mask, drop, moved)

        return ForwardPass(self.model, batch.x, call)


Sent = tuple[int | Tensor, State, Tensor]
"""What a client was sent: the version's number, the server rule's tensors, the BatchNorm statistics."""


def train(
    model: Model,
    rule: ClientRule,
    facts: Facts,
    received: list[tuple[int, State, Tensor]],
    states: list[State],
    counts: list[int],
    stacked: Iterator[tuple[int, dict[str, Any]]],
    replayer: Replayer | None = None,
) -> tuple[State, Tensor, Tensor]:
    """Local training of K clients, who make `counts` steps each: the most first.

    Args:
        received: what each one was sent.
        states: what each one's steps begin with.
        stacked: for each step how many clients still train, and what they are given; see `Feed.stacked`.
        replayer: runs the steps, if there is one.

    Returns:
        Their states in the end, [K, ...] each, their statistics [K, Q], and their mean losses [K].
    """

    def step(
        sent: Sent, state: State, moved: Tensor, steps: Tensor, given: dict[str, Any]
    ) -> tuple[State, Tensor, Tensor]:
        t, shared, buffers = sent
        task = VmapTask(model, replace(facts, t=t), buffers, steps)
        task.buffers = moved
        made = tuple(Batch(x, y, given.get("made_mask")) for x, y in given["made"])
        batch = Batch(given["x"], given["y"], given.get("mask"), given["drops"], 0, made, given.get("noise"))
        state = rule.step(shared, state, batch, task)
        if len(task.losses) != 1 or task.buffers is None:
            raise ContractError(
                f"client rule '{rule.name}' makes {len(task.losses)} passes in mode 'train' in one "
                "step; make exactly one, the others 'frozen' or 'eval'"
            )
        return state, task.buffers, task.losses[0]

    device = model.device
    state = {k: torch.stack([one[k] for one in states]) for k in states[0]}
    steps = torch.tensor(counts, device=device)
    moved = torch.stack([buffers for _, _, buffers in received])
    losses = torch.zeros(len(states), dtype=model.dtype, device=device)
    together = len({base for base, _, _ in received}) == 1
    sent = received[0] if together else _each(received, device)
    steps_of_all = torch.func.vmap(step, in_dims=(None if together else 0, 0, 0, 0, 0))
    if replayer is not None and together:  # as a number it would be a constant of what is recorded
        sent = torch.tensor(sent[0], device=device), *sent[1:]
    key = repr(rule), together, *_constants(facts)
    for i, (live, given) in enumerate(stacked):
        now = sent if together else _of_the_first(sent, live)
        part = now, {k: v[:live] for k, v in state.items()}, moved[:live], steps[:live], given
        mine, new, loss = replayer.run(key, steps_of_all, *part) if replayer else steps_of_all(*part)
        state = mine if live == len(states) else {k: torch.cat([mine[k], v[live:]]) for k, v in state.items()}
        moved = torch.cat([new, moved[live:]])
        losses[:live] += (loss - losses[:live]) / (i + 1)
    if replayer is not None:  # what a recorded step gave is the next one's too
        state = {k: v.clone() for k, v in state.items()}
    return state, moved, losses


def _constants(facts: Facts) -> tuple:
    """What of a round's facts a step is made with, beside x0 and what decays, which no round changes."""
    privacy = facts.privacy and facts.privacy.model_dump_json()
    return facts.lr, facts.weight_decay, facts.clip, privacy, facts.guarded


def _each(received: list[tuple[int, State, Tensor]], device: torch.device) -> Sent:
    bases, shared, buffers = zip(*received, strict=True)
    return (
        torch.tensor(bases, device=device),
        {k: torch.stack([one[k] for one in shared]) for k in shared[0]},
        torch.stack(buffers),
    )


def _of_the_first(sent: Sent, count: int) -> Sent:
    t, shared, buffers = sent
    assert isinstance(t, Tensor)
    return t[:count], {k: v[:count] for k, v in shared.items()}, buffers[:count]


def why_not_vmap(model: Model) -> str | None:
    """None if clients can train side by side under vmap, else the reason. Compares with one-by-one training."""
    x = torch.from_numpy(generator(0, "dry run").standard_normal((2, 3, *model.shape), dtype="float32"))
    x, y = x.to(model.device, model.dtype), torch.zeros(2, 3, dtype=torch.long, device=model.device)
    w, buffers = model.initial()
    mask, drops = x.new_ones(2, 3), tuple(x.new_ones(2, 3, *shape) for shape, _ in model.dropouts)

    def side_by_side(x: Tensor, y: Tensor, mask: Tensor, *drop: Tensor) -> Tensor:
        return VmapTask(model, Facts(), buffers).grad(w, Batch(x, y, mask, (drop,)))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns where it would fall back to a slow loop of its own
            many = torch.func.vmap(side_by_side)(x, y, mask, *drops)
        one = LoopTask(model, Facts())
        one.buffers = buffers
        alone = torch.stack([one.grad(w, Batch(x[i], y[i], None, (tuple(d[i] for d in drops),))) for i in (0, 1)])
    except BaseException as error:
        reraise_stop(error)
        return in_a_line(error)
    if not (torch.isfinite(many).all() and torch.isfinite(alone).all()):
        return "its gradients on random images are not finite, so the two ways cannot be compared"
    if not torch.allclose(many, alone, rtol=1e-2, atol=1e-3 * float(alone.abs().max())):
        return "it computes other gradients under vmap than alone"
    return None
