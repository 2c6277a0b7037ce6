"""The start of a net from given weights, and the part of it that is trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from raysim.by_key import by_key
from raysim.errors import ConfigError
from raysim.models.initial.adapters import base_names
from raysim.models.initial.weights import in_part, read_weights
from raysim.models.parts import MAX_NAMES, classifier_of, listed, matches, parameters_in_part
from raysim.spelling import lacking


def freeze(net: nn.Module, patterns: Iterable[str], classes: int) -> None:
    """Exclude parts of a net from training: they keep their values and are not in the vector [P].

    Args:
        net: the net; changed in place.
        patterns: parts as for `parameters_in_part`, in order; one that begins with "!" is trained
            again.
        classes: number of classes.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(net.named_parameters())
    names, classifier = list(parameters), classifier_of(net, classes)
    for pattern in patterns:
        part = pattern.removeprefix("!")
        try:
            chosen = parameters_in_part(net, part, names, classifier)
        except ValueError as error:
            raise ConfigError(f"model.freeze: {error}") from None
        for name, is_chosen in zip(names, chosen, strict=True):
            if is_chosen:
                parameters[name].requires_grad_(pattern != part)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            "model.freeze: nothing is left to train; add a part that is, such as '!classifier'"
        )


def load_weights(net: nn.Module, source: str, skip: Sequence[str] = ()) -> None:
    """Load the weights of a net, with its BatchNorm statistics.

    A tensor that two layers share may have any of its names. The weights may be those of one part
    of the net, whose names then begin with the part's, or those of the base net of a net with
    adapters, which keep their new values.

    Args:
        net: the net; changed in place.
        source: where the weights are, as for `weights.weight_files`.
        skip: patterns of names that keep their new values, such as a classifier of another size,
            or of tensors that only the file has.

    Raises:
        ConfigError: the weights cannot be read, or do not fit the net.
    """
    net_tensors = net.state_dict(keep_vars=True)
    loaded = read_weights(source)
    in_base = base_names(net)
    if _contain_adapters(loaded, net_tensors.keys() - in_base.keys()):
        in_base = {}
    # By the names that the tensors of the file have in the net, or keep if the net has none.
    of_file = in_part(loaded, in_base.values() if in_base else net_tensors)
    _check_skipped(skip, [*net_tensors, *in_base.values(), *of_file], net_tensors)
    if in_base:
        loaded = _without_skipped(in_part(loaded, in_base.values()), skip)
        loaded = _with_names_of(in_base, loaded)
        net_tensors = {
            name: tensor
            for name, tensor in net_tensors.items()
            if name in in_base and not _matches(in_base[name], skip)
        }
    loaded = _without_skipped(in_part(loaded, net_tensors), skip)
    wanted = _wanted_tensors(net_tensors, skip)
    problems = _misfits(net_tensors, loaded, wanted, in_base)
    if problems:
        raise ConfigError(
            f"model.init_from: {source} does not fit the net: {'; '.join(problems)}; give the same "
            "net, or leave tensors out by model.init_skip"
        )
    with torch.no_grad():
        for aliases in wanted:
            for name in aliases:
                if name in loaded:
                    net_tensors[name].copy_(loaded[name])


def _check_skipped(skip: Sequence[str], known: Sequence[str], net_names: Iterable[str]) -> None:
    """Refuse a pattern that matches none of the known names."""
    for pattern in skip:
        if not any(matches(name, pattern) for name in known):
            raise ConfigError(
                f"model.init_skip: no tensor of the net matches '{pattern}'; its tensors are "
                f"{listed(list(net_names))}"
            )


def _without_skipped(loaded: Mapping[str, Tensor], skip: Sequence[str]) -> dict[str, Tensor]:
    """Return the weights whose names match no pattern."""
    return {name: tensor for name, tensor in loaded.items() if not _matches(name, skip)}


def _wanted_tensors(net_tensors: Mapping[str, Tensor], skip: Sequence[str]) -> list[list[str]]:
    """Return the names of each tensor that the weights have to give: no skipped ones."""
    aliases_by_id = by_key(net_tensors, lambda name: id(net_tensors[name]))
    is_skipped = partial(_matches, patterns=skip)
    return [aliases for aliases in aliases_by_id.values() if not any(map(is_skipped, aliases))]


def _contain_adapters(loaded: Iterable[str], adapters: Iterable[str]) -> bool:
    """Return whether weights contain adapters, as those of a net or of a part of it."""
    adapters = set(adapters)
    return any(own == name or own.endswith(f".{name}") for name in loaded for own in adapters)


def _with_names_of(in_base: Mapping[str, str], loaded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a base net under their names in the net with adapters.

    Args:
        in_base: names in the base net by names in the net with adapters.
        loaded: the tensors by names in the base net. Those of other names keep them.
    """
    of_base = {name: loaded[base] for name, base in in_base.items() if base in loaded}
    bases = set(in_base.values())
    return of_base | {name: tensor for name, tensor in loaded.items() if name not in bases}


def _misfits(
    net_tensors: Mapping[str, Tensor],
    loaded: Mapping[str, Tensor],
    wanted: Iterable[Sequence[str]],
    shown: Mapping[str, str],
) -> list[str]:
    """Return what keeps weights from being those of a net, as texts.

    Args:
        net_tensors: the tensors of the net by name.
        loaded: the weights by name.
        wanted: the names of each tensor that the weights have to give.
        shown: names of tensors of the net in the texts, if these are others.
    """
    missing, misfits = [], []
    for aliases in wanted:
        present = [name for name in aliases if name in loaded]
        if not present and not aliases[0].endswith("num_batches_tracked"):
            missing.append(shown.get(aliases[0], aliases[0]))
        for name in present:
            size, needed = list(loaded[name].shape), list(net_tensors[name].shape)
            if size != needed:
                misfits.append(f"{shown.get(name, name)} is {size} there, {needed} in the net")
        if any(not torch.equal(loaded[present[0]], loaded[name]) for name in present[1:]):
            misfits.append(f"{' and '.join(aliases)} are one tensor in the net, and differ there")
    lacks = {"it": [*dict.fromkeys(missing)], "the net": lacking(loaded, net_tensors)}
    texts = [f"{which} lacks {listed(names)}" for which, names in lacks.items() if names]
    return [*texts, *misfits[:MAX_NAMES]]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(matches(name, pattern) for pattern in patterns)
