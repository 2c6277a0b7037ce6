"""Check on the GPU of a run that a net and its loss have deterministic kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from raysim.errors import ConfigError
from raysim.models.checks.against_pytorch import EXAMPLES
from raysim.models.checks.original_net import original_copy
from raysim.models.comparison import layer_names
from raysim.models.default_device import tensors_on
from raysim.models.flat import BoundModel, Model
from raysim.system.deterministic_kernels import operation_without_kernel, use_deterministic_kernels
from raysim.system.global_generators import generators_kept

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments and keyword arguments of a call."""


@torch.enable_grad()
def check_deterministic_layers(net: nn.Module, model: Model) -> None:
    """Run a net and the task's loss forward and backward with deterministic kernels only.

    Args:
        net: the net as the user wrote it; not changed.
        model: the net as raysim reads it, on the device of the run.

    Raises:
        ConfigError: a layer or the loss has no deterministic kernel on that device; the message
            names it.
    """
    if model.device.type == "cuda":
        _refuse_dropout_between_layers(net, model)
    original = original_copy(net, model)
    # The arguments of the first call of each layer that has no layers of its own.
    inputs: dict[nn.Module, Arguments] = {}
    for layer in original.modules():
        if not list(layer.children()):
            layer.register_forward_pre_hook(
                lambda layer, *arguments: inputs.setdefault(layer, arguments) and None,
                with_kwargs=True,
            )
    restore = use_deterministic_kernels()
    try:
        with generators_kept(), tensors_on(model.device):
            x, y = model.examples(EXAMPLES)
            if operation := _refused(lambda: _differentiate(original(x))):
                layer = next((layer for layer in inputs if _is_refused(layer, inputs[layer])), None)
                name = "a function in forward"
                if layer is not None:
                    name = f"layer {layer_names(original)[layer]}"
                raise _error(f"{model.label}: {name}", operation, "another layer")
            bound, buffers = BoundModel.at_start(model)
            outputs = bound.forward(x, "eval", buffers).detach().requires_grad_()
            if operation := _refused(lambda: _differentiate(model.mean_loss(outputs, x, y))):
                name = f"task.name: the loss of '{model.learning_task.name}'"
                raise _error(name, operation, "another loss")
    finally:
        restore()


def _refused(code: Callable[[], object]) -> str:
    """Run code; return the operation in it that has no deterministic kernel, "" if all have one."""
    try:
        code()
    except RuntimeError as error:  # any other error is one that training will show
        return operation_without_kernel(error)
    return ""


def _error(what: str, operation: str, instead: str) -> ConfigError:
    """Return the error of a layer or a loss with an operation that has no deterministic kernel."""
    return ConfigError(
        f"{what} has no deterministic kernel on this GPU ({operation}), so the bits of a repeated "
        f"run would differ; use {instead}, or set resources.deterministic=false to accept that"
    )


def _refuse_dropout_between_layers(net: nn.Module, model: Model) -> None:
    """Refuse recurrent layers with dropout, whose masks cuDNN draws from a state without a seed."""
    for layer, name in layer_names(net).items():
        if isinstance(layer, nn.RNNBase) and layer.dropout > 0:
            raise ConfigError(
                f"{model.label}: the dropout between the layers of {name} cannot be repeated on a "
                "GPU; set its dropout to 0, with an nn.Dropout between layers of your own, or set "
                "resources.deterministic=false to accept that"
            )


def _differentiate(outputs: Any) -> None:
    """Run backward from all outputs of a layer, whatever structure they have."""
    for output in tree_leaves(outputs):
        if isinstance(output, Tensor) and output.requires_grad:
            output.sum().backward(retain_graph=True)


def _is_refused(layer: nn.Module, arguments: Arguments) -> bool:
    """Return whether a layer alone, forward or backward, has no deterministic kernel."""
    own, named = tree_map_only(Tensor, _as_leaf, arguments)
    return bool(_refused(lambda: _differentiate(layer(*own, **named))))


def _as_leaf(tensor: Tensor) -> Tensor:
    """Return a tensor as one by which a layer alone is differentiated, if that is possible."""
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
