"""Nets with adapters of peft: the net without them, and the names of its base net's tensors."""

from __future__ import annotations

import copy
import importlib
import sys
from typing import Any

from torch import nn


def merged(net: nn.Module) -> nn.Module:
    """Return a net whose adapters are added to the weights of its base net, by peft's own merge.

    It computes the same up to rounding, consists of the base net's layers only, and needs no peft.

    Args:
        net: any net; it is not changed.

    Returns:
        A copy without adapters; the net itself if it has none.
    """
    return _without_adapters(copy.deepcopy(net)) if _has_adapters(net) else net


def _without_adapters(module: Any) -> nn.Module:
    """Return a module with what models and layers of peft wrap in their places, merged."""
    if hasattr(module, "merge_and_unload"):
        return module.merge_and_unload()
    if hasattr(module, "merge") and _wraps(module):
        module.merge()
        return module.get_base_layer()
    if hasattr(module, "modules_to_save") and _wraps(module):
        return module.modules_to_save[module.active_adapters[0]]
    for name, child in module.named_children():
        setattr(module, name, _without_adapters(child))
    return module


def base_names(net: nn.Module) -> dict[str, str]:
    """Return the names that the tensors of a net with adapters have in its base net.

    Args:
        net: the net.

    Returns:
        Names in the base net by names in the net, without the adapters' own tensors; {} for a net
        without adapters. A layer that peft copies to train it has two tensors of one base name.
    """
    if not _has_adapters(net):
        return {}
    return {name: base for name in net.state_dict() if (base := _base_name(net, name)) is not None}


def _base_name(net: nn.Module, name: str) -> str | None:
    """Return the name of a tensor in the base net; None for a tensor of an adapter."""
    *path, tensor = name.split(".")
    kept: list[str] = []
    module: Any = net
    while path:
        part = path.pop(0)
        if _is_peft_model(module) and part == "base_model" and path[:1] == ["model"]:
            path.pop(0)
            module = module.base_model.model
        elif not _wraps(module):
            kept.append(part)
            module = getattr(module, part)
        elif part == "modules_to_save":
            module = module.modules_to_save[path.pop(0)]
        elif part in ("base_layer", "original_module"):
            module = getattr(module, part)
        else:
            return None
    return None if _wraps(module) else ".".join([*kept, tensor])


def _has_adapters(net: nn.Module) -> bool:
    return "peft" in sys.modules and any(map(_wraps, net.modules()))


def _is_peft_model(module: object) -> bool:
    return "peft" in sys.modules and isinstance(module, importlib.import_module("peft").PeftModel)


def _wraps(module: nn.Module) -> bool:
    """Return whether a module is a model of peft, or a layer with an adapter or a trained copy."""
    if "peft" not in sys.modules:
        return False
    layers: Any = importlib.import_module("peft.tuners.tuners_utils")
    others: Any = importlib.import_module("peft.utils.other")
    kinds = (layers.BaseTunerLayer, others.ModulesToSaveWrapper)
    return _is_peft_model(module) or isinstance(module, kinds)
