"""The net as its author wrote it, with which the engine's reading of it is compared."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from raysim.models.flat import Model
from raysim.models.keyed_layers import switch_off_dropout
from raysim.system.global_generators import seed_generators


def original_copy(net: nn.Module, model: Model) -> nn.Module:
    """Return a copy of a user's net in training mode and in the run's type.

    Its keyed dropout is off, and it gets copies of its inputs, which it may change in place. What
    it draws from global generators begins at the same numbers in each pass.

    Args:
        net: the net as the user wrote it.
        model: the net as the run reads it.
    """
    forms = model.learning_task.forms
    original = copy.deepcopy(net).to(dtype=model.dtype, device=model.device)
    switch_off_dropout(original)
    # Also those parameters are frozen that the net's own `train` freezes.
    original.train()

    n = 0

    def prepare(net: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal n
        n = len(inputs[0])  # before several inputs are arguments by name
        seed_generators(model.draws, 0)
        return tuple(x.clone() for x in inputs)

    def finish(net: nn.Module, inputs: tuple[Tensor, ...], outputs: Any) -> Any:
        return outputs if forms is None else forms.pack(outputs, n)

    original.register_forward_pre_hook(prepare, prepend=True)
    original.register_forward_hook(finish)
    return original
