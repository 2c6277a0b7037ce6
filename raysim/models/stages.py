"""Nets made of stages, one after the other, and layers that do more than their class."""

from __future__ import annotations

from typing import Any, TypeGuard

from torch import Tensor, nn

from raysim.models.keyed_layers import KeyedBatchNorm, KeyedDropout, NoteFeatures
from raysim.rules.tasks.several_outputs import OutputForms

CLASSIFIER = -1
"""In the place of the first stage that runs: the classifier alone, on features [B, F]."""


class StagedModel(nn.Sequential):
    """Container of a net, in which the net itself can be replaced and run stage by stage."""

    classifier = ""
    """Path of the net's classifier; "" if it has none."""
    changing: frozenset[int] = frozenset()
    """Positions of the stages that change their input in place. Each then gets a copy."""
    forms: OutputForms | None = None
    """The forms of several outputs, if the loss takes them."""

    @property
    def stages(self) -> list[nn.Module]:
        """The children of a net that is an `nn.Sequential`; [] for other nets."""
        net = self[0]
        return list(net) if is_chain(net) else []

    def forward(self, x: Tensor, first: int = 0, levels: list[Tensor] | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch calls x `input`
        """Run the net on a batch.

        Args:
            x: inputs of the net, [B, ...], or of stage `first`.
            first: first stage that runs, or `CLASSIFIER`.
            levels: list to which the output of every stage is appended; None stores none.

        Returns:
            The outputs, [B, classes] or in the shape of the learning task. With `first` or
            `levels` the net runs stage by stage.
        """
        if levels is None and first == 0:
            return self._as_tensor(self[0](x), len(x))
        if first == CLASSIFIER:
            return self.get_submodule(self.classifier)(x)
        n = len(x)
        for position, stage in enumerate(self.stages[first:], first):
            x = stage(x.clone() if position in self.changing else x)
            if levels is not None:
                levels.append(x)
        return self._as_tensor(x, n)

    def _as_tensor(self, outputs: Any, n: int) -> Tensor:
        """Return what forward returned for n examples as one tensor, if the loss takes that."""
        if self.forms is not None:
            outputs = self.forms.pack(outputs, n)
        # squeeze() in the user's forward takes the dimension of a batch of one away too.
        is_number = isinstance(outputs, Tensor) and outputs.ndim == 0
        return outputs.reshape(1) if is_number else outputs


def is_chain(net: nn.Module) -> TypeGuard[nn.Sequential]:
    """Return whether a net is its children, one after the other, and nothing else.

    Args:
        net: any module; one with hooks, or of a subclass with a forward of its own, may do more.
    """
    if not isinstance(net, nn.Sequential):
        return False
    methods_are_plain = (
        type(net).forward is nn.Sequential.forward and type(net).__call__ is nn.Module.__call__
    )
    return methods_are_plain and not is_modified(net)


def is_modified(module: nn.Module) -> bool:
    """Return whether one layer may compute something else than its class, by hooks or otherwise.

    Args:
        module: any layer. The engine's own forwards and hooks do not count.
    """
    hooks = [
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ]
    hooked = any(
        not isinstance(hook, NoteFeatures) for registered in hooks for hook in registered.values()
    )
    forward = vars(module).get("forward")
    return hooked or not isinstance(forward, KeyedBatchNorm | KeyedDropout | None)
