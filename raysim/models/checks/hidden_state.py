"""Refusal of nets whose passes depend on something that neither parameters nor statistics hold.

Random numbers, counters, clocks, and parameters that forward changes: a worker makes passes for
many clients, so such a net would compute something else on another number of workers.
"""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raysim.errors import ConfigError
from raysim.models.batchnorm_statistics import COUNTER
from raysim.models.checks.original_net import original_copy
from raysim.models.comparison import close, layer_names, same_values
from raysim.models.flat import Model
from raysim.system.global_generators import GlobalGenerators, seed_generators

MODES = ("training", "evaluation", "training")
"""Modes of the passes that show whether a net keeps something between passes."""

SCALE = 8.0
"""Largest factor of trained parameters in a pass that shows whether forward limits them, or
copies one to another."""

MANY_PASSES = 1001
"""Number that is added to a counter, to see if outputs or statistics depend on it."""

GENERATORS_OF_NETS = (
    torch.Generator,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
)
"""Types of random generators that a net may hold."""

MAX_ATTRIBUTE_NUMBERS = 1_000_000
"""Larger arrays among the attributes of layers are not watched."""


def refuse_draws(net: nn.Module, model: Model, x: Tensor) -> None:
    """Refuse a net that draws random numbers in evaluation, or in some training passes only.

    Before each training pass raysim seeds the generators from which the net draws in all of them.

    Args:
        net: the net as the user wrote it; not changed.
        model: the net as raysim reads it.
        x: [B, ...], inputs.

    Raises:
        ConfigError: it draws; the message names the layer.
    """
    original = original_copy(net, model)
    for training in (True, False):
        original.train(training)
        # Each pass of the copy seeds them, too.
        seed_generators(model.draws, 0)
        before = GlobalGenerators()
        with torch.no_grad():
            original(x)
        libraries = before.drawn_from()
        if training:
            libraries = tuple(library for library in libraries if library not in model.draws)
        if libraries:
            layer = _drawing_layer(original, x)
            mode = "in some of its training passes only" if training else "in evaluation mode"
            raise ConfigError(
                f"{model.label} draws from {libraries[0]}'s global generator {mode}, in {layer}, "
                "so a run could not be repeated; draw in each training pass, and in no other"
            )
    for module in original.modules():  # in evaluation mode by now
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        if is_dropout and module.training and module.p > 0:
            raise ConfigError(
                f"{model.label} keeps dropout on in evaluation mode, so its metrics would be "
                "random; let eval() switch it off"
            )


def _drawing_layer(net: nn.Module, x: Tensor) -> str:
    """Return the innermost layer in whose pass a global generator changes."""
    before: list[GlobalGenerators] = []
    layers: list[str] = []
    names = layer_names(net)

    def enter(module: nn.Module, args: Any) -> None:
        before.append(GlobalGenerators())

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if before.pop().drawn_from():
            layers.append(names[module])

    handles = []
    for module in net.modules():
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave))
    with torch.no_grad():
        net(x)
    for handle in handles:
        handle.remove()
    return layers[0] if layers else "forward"


def refuse_hidden_state(net: nn.Module, model: Model, x: Tensor) -> None:
    """Refuse a net whose passes change its parameters, or something that no vector holds.

    Args:
        net: the net as the user wrote it; not changed.
        model: the net as raysim reads it.
        x: [B, ...], inputs.

    Raises:
        ConfigError: they do; the message names the parameter, buffer or attribute.
    """
    trial = _Trial(net, model, x)
    first = trial.results()
    trial.refuse_changed_parameters(trial.start)
    moved = trial.moved_buffers()
    attributes = _attributes(trial.net)
    trial.restore()
    second = trial.results()
    for place, attribute in _attributes(trial.net).items():
        if attributes.get(place, attribute) != attribute:
            trial.restore()
            _refuse_steering_attribute(trial, place, attribute, second)
    _refuse_steering_buffers(trial, moved, second)
    _refuse_other_outputs(trial, first, second)
    trial.restore()
    _refuse_memory_of_training(trial, net)
    _refuse_memory_of_inputs(trial, original_copy(net, model))
    # Larger parameters show a forward that limits their norm. Each has its own factor and frozen
    # ones have none, so that no parameter stays the copy of another, as a mean of its steps starts.
    larger = dict(trial.start)
    trained = [name for name, p in trial.net.named_parameters() if p.requires_grad]
    for position, name in enumerate(trained):
        larger[name] = larger[name] * SCALE * (1 - position / (2 * len(trained)))
    trial.restore(larger)
    # What a net samples may have no distribution at such parameters, which proves nothing.
    with suppress(Exception):
        _passes(trial.net, x)
    trial.refuse_changed_parameters(larger)
    # From the start, since statistics of the same inputs may have come to rest.
    trial.restore()
    _refuse_moves_in_evaluation(trial)


class _Trial:
    """A copy of a user's net that makes passes on the same inputs.

    Args:
        net: the net as the user wrote it; not changed.
        model: the net as raysim reads it.
        x: [B, ...], inputs.
    """

    def __init__(self, net: nn.Module, model: Model, x: Tensor):
        self.net = original_copy(net, model)
        self.model = model
        self.label = model.label
        self.x = x
        self.tolerance = 1e-10 if model.dtype is torch.float64 else 1e-5
        """The relative difference of two equal passes."""
        tensors = dict(self.net.named_parameters()) | dict(self.net.named_buffers())
        self.start = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        """The initial parameters and buffers."""

    def results(self) -> list[Tensor]:
        """Return what `_passes` returns, then buffers of floating-point numbers, then rates."""
        outputs = _passes(self.net, self.x)
        buffers = [b.clone() for b in self.net.buffers() if b.is_floating_point()]
        # Outputs do not show the rates, since dropout is off.
        dropouts = [m for m in self.net.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
        return outputs + buffers + [torch.tensor(float(layer.p)) for layer in dropouts]

    @torch.no_grad()
    def restore(self, changed: Mapping[str, Tensor] | None = None) -> None:
        """Set parameters and buffers to those at the start, or to others."""
        values = {**self.start, **(changed or {})}
        for name, tensor in [*self.net.named_parameters(), *self.net.named_buffers()]:
            tensor.copy_(values[name])

    def moved_buffers(self) -> list[str]:
        """Return the buffers that have changed since the start and are no statistics."""
        known = {f"{s.layer}.{s.name}".lstrip(".") for s in self.model.statistics}
        moved = []
        for name, buffer in self.net.named_buffers():
            is_known = name in known or name.endswith(COUNTER)
            if not is_known and not same_values(buffer, self.start[name]):
                moved.append(name)
        return moved

    def refuse_changed_parameters(self, before: Mapping[str, Tensor]) -> None:
        """Refuse a net that has changed a parameter in a pass."""
        for name, parameter in self.net.named_parameters():
            if not same_values(parameter.detach(), before[name]):
                raise ConfigError(
                    f"{self.label} changes its parameter '{name}' in a forward pass, and only a "
                    "local step may change parameters; make a mean of parameters a buffer, compute "
                    "with a changed copy instead, or run the net on a batch before, if its first "
                    "one initialises it"
                )


def _refuse_steering_attribute(
    trial: _Trial, place: str, attribute: Attribute, results: list[Tensor]
) -> None:
    """Refuse a net whose results may depend on an attribute that passes change."""
    if isinstance(getattr(attribute.owner, attribute.name), GENERATORS_OF_NETS):
        raise ConfigError(
            f"{trial.label} draws from {place}, a generator of its own, which each worker would "
            "have in another state; draw from the global one of torch, NumPy or Python, which a "
            "run seeds before each pass: leave the argument generator out"
        )
    if _steers(trial, attribute, results):
        raise ConfigError(
            f"{trial.label} changes {place} in each forward pass, so its outputs or statistics "
            "could depend on how many passes a worker has made; make it a buffer, or compute it "
            "from the inputs"
        )


def _refuse_other_outputs(trial: _Trial, first: list[Tensor], second: list[Tensor]) -> None:
    """Refuse a net whose passes give other outputs the second time."""
    for mode, a, b in zip(MODES, first, second, strict=False):  # without statistics
        if not close(a, b, trial.tolerance):
            raise ConfigError(
                f"{trial.label} gives two outputs for the same examples and parameters in "
                f"{mode} mode: forward depends on something else, such as a clock, a random "
                "generator of its own, or an attribute that it changes; make it a buffer, or a "
                "function of the inputs"
            )


@torch.no_grad()
def _refuse_memory_of_training(trial: _Trial, net: nn.Module) -> None:
    """Refuse a net that remembers in evaluation, beside its statistics, that it was trained.

    In this process and on workers other copies evaluate than train, which do not know.
    """
    original, model, x = trial.net, trial.model, trial.x
    # Not `original_copy`, which puts its copy into training mode.
    fresh = copy.deepcopy(net).to(dtype=model.dtype, device=model.device)
    fresh.eval()
    expected = fresh(x.clone())
    if (forms := model.learning_task.forms) is not None:
        expected = forms.pack(expected, len(x))
    _passes(original, x)
    as_moved = {k: b for k, b in original.named_buffers() if not b.is_floating_point()}
    trial.restore(as_moved)
    original.eval()
    outputs = original(x).clone()
    trial.restore()
    if not close(expected, outputs, trial.tolerance):
        raise ConfigError(
            f"{trial.label} gives other outputs in evaluation mode after it was in training mode, "
            "with the same parameters and statistics: an attribute, or a buffer of integers or of "
            "true and false, says that it was; ask self.training instead, or make it a buffer of "
            "floating-point numbers, which clients train and the server averages"
        )


def _refuse_memory_of_inputs(trial: _Trial, fresh: nn.Module) -> None:
    """Refuse a net that keeps something of its inputs, by other inputs and a copy without."""
    others = trial.x[:1].expand_as(trial.x).clone()
    for mode, a, b in zip(MODES, _passes(trial.net, others), _passes(fresh, others), strict=True):
        if not close(a, b, trial.tolerance):
            raise ConfigError(
                f"{trial.label} gives other outputs in {mode} mode after a pass on other examples: "
                "forward keeps something of them, such as the mean of its first batch, and a "
                "worker's passes are those of many clients; compute it in each pass, or register "
                "a buffer that moves"
            )


def _refuse_steering_buffers(trial: _Trial, moved: list[str], results: list[Tensor]) -> None:
    """Refuse a net whose results depend on a buffer that moves and is no statistic."""
    for name in moved:
        value = trial.start[name]
        # An integer may only count, as that of BatchNorm does.
        trial.restore({name: ~value if value.dtype is torch.bool else value + MANY_PASSES})
        if not all(close(a, b, 1e-6) for a, b in zip(trial.results(), results, strict=True)):
            raise ConfigError(
                f"{trial.label} changes its buffer '{name}' of type {value.dtype} in a "
                "forward pass, and its outputs or statistics depend on it; only buffers of "
                "floating-point numbers may change, which clients train and the server averages"
            )


def _refuse_moves_in_evaluation(trial: _Trial) -> None:
    """Refuse a net that moves its statistics in evaluation mode."""
    net = trial.net
    net.eval()
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    with torch.no_grad():
        net(trial.x)
    for name, buffer in net.named_buffers():
        if not name.endswith(COUNTER) and not same_values(buffer, before[name]):
            raise ConfigError(
                f"{trial.label} changes its buffer '{name}' in evaluation mode, so metrics would "
                "change the model; let eval() switch that off"
            )


def _passes(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the outputs of an odd number of passes, so that a switch shows, in these `MODES`.

    Those in training have gradients, by which a forward may tell them apart.
    """
    outputs = []
    for mode in MODES:
        net.train(mode == "training")
        with torch.set_grad_enabled(mode == "training"):
            outputs.append(net(x).detach().clone())
    return outputs


@dataclass(frozen=True)
class Attribute:
    """An attribute of a layer, or of its class."""

    owner: Any = field(compare=False)
    """The layer or the class."""
    name: str
    """Name of the attribute."""
    fingerprint: bytes
    """Bytes that change with the value."""


def _steers(trial: _Trial, attribute: Attribute, results: list[Tensor]) -> bool:
    """Return whether an attribute that passes change can change the results of passes.

    A number may only count; anything else is taken to.
    """
    value = getattr(attribute.owner, attribute.name)
    is_switch = isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool
    if is_switch or not isinstance(value, int | float | Tensor):
        return True
    setattr(attribute.owner, attribute.name, value + MANY_PASSES)
    try:
        later = trial.results()
    finally:
        setattr(attribute.owner, attribute.name, value)
    return not all(close(a, b, 1e-6) for a, b in zip(later, results, strict=True))


def _attributes(net: nn.Module) -> dict[str, Attribute]:
    """Return the attributes of the layers that could steer a pass, by their names in messages.

    Tensors of more than one number are left out: an activation that a layer stores for a hook or a
    penalty is no harm, and where a pass depends on it, two passes differ.
    """
    of_every_module = set(vars(nn.Module())) | {"forward"}
    attributes = {}
    for place, owner in _attribute_owners(net).items():
        for name, value in vars(owner).items():
            if name in of_every_module or name.startswith("__") or callable(value):
                continue
            fingerprint = _fingerprint(value)
            if fingerprint is not None:
                attribute = Attribute(owner, name, fingerprint)
                attributes[f"the attribute '{name}' of {place}"] = attribute
    return attributes


def _attribute_owners(net: nn.Module) -> dict[str, Any]:
    """Return the layers of a net and the user's classes of these, by their names in messages."""
    owners: dict[str, Any] = {name: module for module, name in layer_names(net).items()}
    for module in net.modules():
        for cls in type(module).__mro__:
            if not cls.__module__.startswith("torch.") and cls is not object:
                owners[f"class {cls.__name__}"] = cls
    return owners


def _fingerprint(value: Any) -> bytes | None:
    """Return the bytes of an attribute; None if it holds tensors, is large or has no bytes."""
    if isinstance(value, Tensor) and value.numel() == 1:  # which may count
        return repr(value.item()).encode()
    if isinstance(value, torch.Generator):  # which pickle stores by its address
        return value.get_state().numpy().tobytes()
    items: Any = value if isinstance(value, list | tuple | set) else [value]
    if isinstance(value, dict):
        items = value.values()
    if any(isinstance(item, Tensor) for item in items):
        return None
    if isinstance(value, np.ndarray) and value.size > MAX_ATTRIBUTE_NUMBERS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pickle.dumps(value)
    except Exception:  # an open file, a lock, a lambda
        return None
