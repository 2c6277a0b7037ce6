"""The local steps of several clients side by side, as one under vmap: for small nets, and on GPUs.

Clients with most steps come first, so that those still training are always the first ones. What they were sent has a
client axis too, unless all were sent the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from raysim.errors import ContractError
from raysim.models.flat import Model
from raysim.rules.contract import ClientRule, State
from raysim.training.cuda_graphs import Replayer
from raysim.training.task import Batch, Facts, VmapTask

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
