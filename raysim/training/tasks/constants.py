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
        self.others = others
        names = [*points.items(), *others.items()]
        # The point is often `state["w"]` itself.
        self.tensors = {id(tensor): (tensor, name) for name, tensor in names}
        self.changed: list[Tensor] = []

    def __enter__(self) -> Constants:
        try:
            for tensor, _ in self.tensors.values():
                if not tensor.requires_grad:
                    tensor.requires_grad_()
                    self.changed.append(tensor)
        except RuntimeError:  # a tensor that cannot have a gradient
            self.__exit__()
            raise
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
        for (_, name), gradient in zip(self.tensors.values(), left_out, strict=True):
            if gradient is not None:
                raise ContractError(f"{self._why(name)} ({function_defined_at(self.loss)})")
        return gradients[: len(points)]

    def _why(self, name: str) -> str:
        """Return why a tensor is a constant, and what to write instead."""
        if name in self.others:
            return (
                f"the loss depends on the tensor that is passed as others['{name}'], which is a "
                f"constant in it: read it from the loss's third argument, others['{name}'], or "
                "detach() what is to be a constant"
            )
        return (
            f"the loss depends on {name}, which is a constant in it: only what the net computes "
            "has a gradient; add the gradient of this term to the gradient that the task returns, "
            'such as mu * (w - shared["x"]), or detach() what is to be a constant'
        )
