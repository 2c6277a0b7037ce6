"""Tensors that are constants in a loss, though a rule may take them for variables of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from raysim.errors import ContractError
from raysim.rules.errors.user_code import function_defined_at


class Constants:
    """Finds out whether a loss depends on constants, so that a gradient would be left out.

    Gradients are those by the parameters of the net, and by copies of `others`. They are other
    tensors than those that the rule has. Inside of the context the constants require a gradient.

    Args:
        loss: the loss, for messages.
        points: parameters [P], by names for messages.
        others: further tensors by name; see `Task.joint_grad`.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        points: Mapping[str, Tensor],
        others: Mapping[str, Tensor],
    ):
        self.loss = loss
        messages = {
            name: f"the loss depends on {name}, which is a constant in it: only what the net "
            "computes has a gradient; add the gradient of this term to the gradient that the task "
            'returns, such as mu * (w - shared["x"]), or detach() what is to be a constant'
            for name in points
        }
        for name in others:
            messages[name] = (
                f"the loss depends on the tensor that is passed as others['{name}'], which is a "
                f"constant in it: read it from the loss's third argument, others['{name}'], or "
                "detach() what is to be a constant"
            )
        tensors = [*points.values(), *others.values()]
        # The point is often `state["w"]` itself.
        self.tensors = {id(t): (t, why) for t, why in zip(tensors, messages.values(), strict=True)}
        self.changed: list[Tensor] = []

    def __enter__(self) -> Constants:
        self.changed = [tensor for tensor, _ in self.tensors.values() if not tensor.requires_grad]
        for tensor in self.changed:
            tensor.requires_grad_()
        return self

    def __exit__(self, *error: object) -> None:
        for tensor in self.changed:
            tensor.requires_grad_(False)

    def gradients(self, value: Tensor, points: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Return the gradients of a loss; None by a tensor on which it does not depend.

        Args:
            value: the mean loss.
            points: the tensors by which the gradient is taken.

        Raises:
            ContractError: the loss depends on a constant.
        """
        tensors = [tensor for tensor, _ in self.tensors.values()]
        gradients = torch.autograd.grad(value, [*points, *tensors], allow_unused=True)
        left_out = gradients[len(points) :]
        for (_, why), gradient in zip(self.tensors.values(), left_out, strict=True):
            if gradient is not None:
                raise ContractError(f"{why} ({function_defined_at(self.loss)})")
        return gradients[: len(points)]
