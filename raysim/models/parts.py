"""Parts of a net: its classifier, its normalisation layers, parameters by their names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

MAX_NAMES = 20
"""Largest number of names that a message lists."""

NORMALISATION = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)
"""Layers of the part "norm"."""


def classifier_of(net: nn.Module, classes: int) -> nn.Linear | None:
    """Return the last linear layer with one output per class; None if there is none.

    Args:
        net: the net.
        classes: number of classes; 0: unknown, then any last linear layer is meant.
    """
    linear = [m for m in net.modules() if isinstance(m, nn.Linear)]
    if classes:
        linear = [m for m in linear if m.out_features == classes]
    return linear[-1] if linear else None


def shared_memory(net: nn.Module) -> list[dict[str, Tensor]]:
    """Return the tensors of a net that begin at the same place in memory.

    Args:
        net: the net, before any conversion of its type or device, which parts such tensors.

    Returns:
        For each such place the tensors by their names: parameters, buffers and plain attributes of
        layers. A layer in two places of the net counts once.
    """
    groups: dict[int, dict[str, Tensor]] = {}
    for path, module in net.named_modules():
        for name, tensor in {**module._parameters, **module._buffers, **vars(module)}.items():
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
                continue
            if tensor.data_ptr():  # 0 of tensors without numbers or values
                groups.setdefault(tensor.data_ptr(), {})[f"{path}.{name}".lstrip(".")] = tensor
    return [group for group in groups.values() if len(group) > 1]


def own_name(name: str) -> str:
    """Return the name of a parameter in its layer.

    Args:
        name: the name in the net; that of a parametrised tensor ends in
            "parametrizations.NAME.original".
    """
    *layers, last = name.split(".")
    return layers[-1] if "parametrizations" in layers[-2:] else last


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern is that of a tensor, or of a module around it.

    Args:
        name: name of the tensor.
        pattern: a name with `*` and `?`.
    """
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def parameters_in_part(
    net: nn.Module,
    pattern: str,
    names: Sequence[str],
    classifier: nn.Module | None,
) -> list[bool]:
    """Return which parameters belong to a part of a net.

    A parameter that two layers share is in the parts of both.

    Args:
        net: the net.
        pattern: "classifier" (the last linear layer with one output per class), "norm" (the
            normalisation layers), or a pattern with `*` and `?` that matches the name of a
            parameter or of a module around it.
        names: names of the parameters to choose from.
        classifier: the classifier of the net, as from `classifier_of`; None: it has none.

    Returns:
        For each name, whether the parameter is in the part.

    Raises:
        ValueError: no parameter matches.
    """
    parameters = dict(net.named_parameters(remove_duplicate=False))

    def is_in_part(name: str) -> bool:
        owner = net.get_submodule(name.rpartition(".")[0])
        if pattern == "classifier":
            return owner is classifier
        if pattern == "norm":
            return isinstance(owner, NORMALISATION)
        return matches(name, pattern)

    # A tensor that two layers share has two names.
    in_part = {id(p) for name, p in parameters.items() if is_in_part(name)}
    chosen = [id(parameters[name]) in in_part for name in names]
    if not any(chosen):
        raise ValueError(
            f"no parameter of the net matches '{pattern}'; give classifier, norm, or a pattern "
            f"of {listed(names)}"
        )
    return chosen


def listed(names: Sequence[str]) -> str:
    """Return names as text, at most MAX_NAMES of them.

    Args:
        names: names, such as those of parameters.
    """
    return ", ".join(names[:MAX_NAMES]) + (", …" if len(names) > MAX_NAMES else "")
