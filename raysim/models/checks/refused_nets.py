"""Nets that a run cannot read, copy or bind to vectors are refused before any pass."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from raysim.errors import ConfigError
from raysim.models.parts import shared_memory
from raysim.system.signals import failing_as

EXTRA_STATE = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX
"""Name in a state_dict of what `get_extra_state` of a layer returns."""


def refuse_odd_nets(net: nn.Module) -> None:
    """Refuse a net that cannot be copied, read layer by layer, or bound to vectors.

    Args:
        net: the net; weights that its hooks compute before each pass are detached.

    Raises:
        ConfigError: it cannot; the message names the layer or the tensor.
    """
    for module in net.modules():
        _detach_reparametrised(module)
    _refuse_odd_layers(net)
    _refuse_odd_state_dict(net)
    _refuse_odd_tensors(net)
    _refuse_tied_parameters(net)


def _refuse_odd_state_dict(net: nn.Module) -> None:
    """Refuse a net whose state_dict is not that of its parameters and buffers."""
    with failing_as(lambda why: ConfigError(f"model: state_dict(keep_vars=True) fails: {why}")):
        state = net.state_dict(keep_vars=True)
    own = dict(net.named_parameters(remove_duplicate=False))
    wrong = sorted(own.keys() - state.keys())
    own |= dict(net.named_buffers(remove_duplicate=False))
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"model: '{name}' of the state_dict is no tensor but {type(value).__name__}, which "
                "the server could not average; keep it in an attribute"
            )
        if own.get(name) is not value and not name.endswith(EXTRA_STATE):
            wrong.append(name)
    if wrong:
        raise ConfigError(
            f"model: the state_dict of {type(net).__name__} is not that of its parameters and "
            f"buffers, as '{wrong[0]}' shows, and results are saved by these; remove its own "
            "state_dict, or the hook that changes it"
        )


def refuse_other_types(net: nn.Module, dtype: str) -> None:
    """Refuse parameters of another type than the run's, which their owner chose.

    float32 is PyTorch's default, so that it is no choice.

    Args:
        net: the net.
        dtype: the type of the run.

    Raises:
        ConfigError: a parameter has another type; the message names it.
    """
    for name, parameter in net.named_parameters():
        kind = str(parameter.dtype).removeprefix("torch.")
        if parameter.is_floating_point() and kind not in ("float32", dtype):
            wide = "set dtype: float64" if kind == "float64" else "local.precision: bf16 for passes"
            is_default = parameter.dtype == torch.get_default_dtype()
            narrow = (
                "torch.set_default_dtype(torch.float32) before the net is made"
                if is_default
                else "float() of the net"
            )
            raise ConfigError(
                f"model: '{name}' is {kind}, and all parameters of this run are {dtype}; call "
                f"{narrow}, or {wide}"
            )


def _detach_reparametrised(module: nn.Module) -> None:
    """Detach the weights that hooks compute before each pass, which could not be copied."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm | SpectralNorm):
            name = hook.name
        elif isinstance(hook, BasePruningMethod):
            name = hook._tensor_name
        else:
            continue
        setattr(module, name, getattr(module, name).detach().clone())


def _refuse_odd_layers(net: nn.Module) -> None:
    """Refuse layers that are compiled, hold computed tensors, or have max_norm."""
    for path, module in net.named_modules():
        name = path or "the net"
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"model: {name} is compiled to TorchScript, whose layers cannot be read; give the "
                "module that it was made from"
            )
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                raise ConfigError(
                    f"model: '{key}' of {name} is the result of a computation, which cannot be "
                    "copied; compute it in forward, such as by torch.nn.utils.parametrizations, or "
                    "detach it"
                )
        if getattr(module, "max_norm", None) is not None and hasattr(module, "norm_type"):
            raise ConfigError(
                f"model: {name} ({type(module).__name__}) has max_norm, by which a "
                "forward pass changes its weights, and only a local step may; leave it out, and "
                "divide in forward: h * (max_norm / h.norm(dim=-1, keepdim=True)).clamp(max=1) of "
                "the rows h that an Embedding returns"
            )


def _refuse_odd_tensors(net: nn.Module) -> None:
    """Refuse tensors without a shape or values, sparse, of complex numbers, or with hooks."""
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        layer = name.rpartition(".")[0]
        if nn.parameter.is_lazy(tensor):
            kind = type(net.get_submodule(layer)).__name__
            raise ConfigError(
                f"model: {layer or 'the net'} ({kind}) has no shape before its first batch; give "
                "the sizes, or run the net on one batch before"
            )
        if tensor.is_meta:
            raise ConfigError(
                f"model: '{name}' has no values, since it is on the device meta; make the net on "
                "the CPU"
            )
        if tensor.layout is not torch.strided:
            raise ConfigError(
                f"model: '{name}' is sparse, and parameters and buffers of a net are copied as "
                "dense ones here; keep its indices and values, and make it in forward"
            )
        if tensor.is_complex():
            raise ConfigError(
                f"model: '{name}' is complex, and parameters and buffers of a net are converted to "
                "real numbers here; keep real and imaginary part, and join them in forward by "
                "torch.complex"
            )
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"model: '{name}' has a hook, which copies of a tensor lose; change the gradient "
                "in forward, or by a full backward hook of the layer"
            )


def _refuse_tied_parameters(net: nn.Module) -> None:
    """Refuse a parameter in whose memory another tensor lies, from which a copy parts it."""
    for group in shared_memory(net):
        is_one_parameter = len({id(tensor) for tensor in group.values()}) == 1
        if is_one_parameter or not any(isinstance(t, nn.Parameter) for t in group.values()):
            continue
        first, second, *_ = group
        raise ConfigError(
            f"model: '{first}' and '{second}' share their memory but are two tensors, which a copy "
            "of the net parts; assign the parameter itself, not its data, or a clone of it"
        )
