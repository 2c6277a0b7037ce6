"""Comparison of raysim's reading of a net with PyTorch's own, before a run.

The net that a user hands over is run as PyTorch would run it: the module itself, in training and
in evaluation mode, forward and backward. What raysim trains, a net bound to flat vectors, has to
give the same outputs, gradients and statistics, also after steps. A net that cannot be simulated,
because its passes depend on something else than parameters, statistics and examples, is refused.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raysim.errors import ConfigError, in_a_line
from raysim.models.flat import BoundModel, Model
from raysim.models.statistics import COUNTER, BoundStatistics, same, switch_off_dropout
from raysim.randomness import generator
from raysim.system.global_generators import GlobalGenerators
from raysim.system.signals import reraise_stop

EXAMPLES = 4
"""Number of examples in the passes that are compared."""

STEPS = 2
"""Steps that move the parameters between the passes that are compared."""

STEP_SHARE = 0.1
"""Length of a step, as a share of the parameters' norm."""

MODES = ("training", "evaluation", "training")
"""Modes of the passes that show whether a net keeps something between passes."""

FEW = 3
"""Examples that pass a net one by one, to see whether examples meet in a batch."""

MANY = 67
"""Examples of the batch that they pass together."""

LARGE_INPUTS = 8.0
"""Factor of inputs in a second batch."""

SCALE = 8.0
"""Factor of the parameters in a pass that shows whether forward limits them."""

MANY_PASSES = 1001
"""What is added to a counter to see whether outputs depend on it."""

MAX_ATTRIBUTE_NUMBERS = 1_000_000
"""Larger arrays among the attributes of layers are not watched."""


@dataclass
class Pass:
    """What one training pass of a net gives."""

    outputs: Tensor
    """[B, ...], the outputs."""
    gradients: list[Tensor | None]
    """The gradient of each trained parameter; None where autograd reached none."""
    statistics: Tensor
    """[Q], the statistics after the pass."""
    of_layers: dict[str, Tensor] = field(default_factory=dict)
    """The outputs of each layer in its last call, by its name, in the order of the calls."""


@torch.enable_grad()
def check_reading(net: nn.Module, model: Model) -> None:
    """Compare a net that was read with PyTorch's own passes of it.

    Args:
        net: the net as the user wrote it; not changed.
        model: the net as raysim reads it.

    Raises:
        ConfigError: they differ, or the net's passes depend on something else than its parameters,
            its statistics and the examples; the message names the layer, parameter or attribute.
    """
    if torch.get_default_dtype() != torch.float32:
        raise ConfigError(
            f"model: torch's default type is {torch.get_default_dtype()} in this process, which "
            "other processes of a run do not know; remove torch.set_default_dtype, and set the key "
            "dtype (float32, float64)"
        )
    x, y = model.examples(EXAMPLES)
    with _named_failure(model):
        _refuse_draws(net, model, x)
        _refuse_hidden_state(net, model, x)
        _refuse_foreign_parameters(net, model, x, y)
        _compare(net, model, x, y)


def check_same_outputs(model: Model, expected: Tensor) -> None:
    """Compare the outputs of the initial net with those in the process that prepared the run.

    Args:
        model: the net in this process.
        expected: what `sample_outputs` returned there.

    Raises:
        ConfigError: they differ by more than rounding.
    """
    outputs = sample_outputs(model).cpu()
    # A check of rules may run the net in another type.
    if not _close(outputs.double(), expected.double(), 5e-3):
        raise ConfigError(
            f"{_named(model)} gives other outputs in a worker than in the process that started the "
            "run: forward depends on something outside of the net, such as a global variable that "
            "was changed, an environment variable or the order of a set; make it an attribute or "
            "a parameter of the net"
        )


@torch.no_grad()
def sample_outputs(model: Model) -> Tensor:
    """Return the outputs of the initial net on a few examples, in training and evaluation mode.

    Args:
        model: the net.

    Returns:
        [2, B, ...].
    """
    bound = BoundModel(model)
    w, buffers = model.initial()
    bound.w.copy_(w)
    x, _ = model.examples(EXAMPLES)
    return torch.stack([bound.forward(x, "frozen", buffers), bound.forward(x, "eval", buffers)])


@torch.no_grad()
def couples_examples(model: Model) -> bool:
    """Return whether the outputs for an example depend on the other examples of its batch.

    Args:
        model: the net.
    """
    bound = BoundModel(model)
    w, buffers = model.initial()
    # Initial zeros would hide a dependence.
    noise = generator(0, "dry run").standard_normal(model.size, dtype="float32")
    bound.w.copy_(w + 0.1 * torch.from_numpy(noise).to(w))
    tolerance = 1e-8 if model.dtype is torch.float64 else 1e-4

    def outputs(x: Tensor) -> Tensor:
        return bound.forward(x, "frozen", buffers.clone())

    # Some nets couple the examples of large batches only, or those of large inputs.
    for x in coupling_trials(model):
        together = outputs(x)
        parts = [*x[:FEW].split(1), *x[FEW:].split(len(x) // 2)]
        try:
            alone = torch.cat([outputs(part) for part in parts])
        except Exception:  # such as PyTorch's batch norm, which needs more than one value
            return True
        if not _close(alone, together, tolerance):
            return True
    return False


def coupling_trials(model: Model) -> list[Tensor]:
    """Return batches of inputs on which examples are looked at together and apart, [B, ...] each.

    Args:
        model: the net.
    """
    x, _ = model.trial(MANY)
    return [x, x * LARGE_INPUTS] if x.is_floating_point() else [x]


def _original(net: nn.Module, model: Model) -> nn.Module:
    """Return a copy of the user's net in the run's type, whose keyed dropout is off."""
    original = copy.deepcopy(net).to(dtype=model.dtype, device=model.device)
    switch_off_dropout(original)
    return original


def _refuse_draws(net: nn.Module, model: Model, x: Tensor) -> None:
    """Refuse a net that draws random numbers in a pass, apart from keyed dropout."""
    original = _original(net, model)
    for training in (True, False):
        original.train(training)
        before = GlobalGenerators()
        with torch.no_grad():
            original(x)
        library = before.drawn_from()
        if library is not None:
            before.restore()
            layer = _drawing_layer(original, x)
            mode = "" if training else " in evaluation mode"
            advice = "nn.Dropout itself, whose masks raysim keys" if training else "none there"
            raise ConfigError(
                f"{_named(model)} draws from {library}'s global generator{mode}, in {layer}, so a "
                f"run could not be repeated; use {advice}"
            )
    if any(_keeps_dropout(module, original) for module in original.modules()):
        raise ConfigError(
            f"{_named(model)} keeps dropout on in evaluation mode, so its metrics would be random; "
            "let eval() switch it off"
        )


def _keeps_dropout(module: nn.Module, net: nn.Module) -> bool:
    """Return whether a dropout of a net in evaluation mode would draw."""
    assert not net.training
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0


def _drawing_layer(net: nn.Module, x: Tensor) -> str:
    """Return the innermost layer in whose pass a global generator changes."""
    start = GlobalGenerators()
    before: list[GlobalGenerators] = []
    layers: list[str] = []
    names = _layer_names(net)

    def enter(module: nn.Module, args: Any) -> None:
        before.append(GlobalGenerators())

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if before.pop().drawn_from() is not None:
            layers.append(names[module])

    handles = []
    for module in net.modules():
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave))
    with torch.no_grad():
        net(x)
    for handle in handles:
        handle.remove()
    start.restore()
    return layers[0] if layers else "forward"


def _refuse_hidden_state(net: nn.Module, model: Model, x: Tensor) -> None:
    """Refuse a net whose passes change its parameters, or something that no vector holds."""
    original = _original(net, model)
    tensors = dict(original.named_parameters()) | dict(original.named_buffers())
    start = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    known = {f"{s.layer}.{s.name}".lstrip(".") for s in model.statistics}
    first = _passes(original, x)
    _refuse_changed_parameters(original, model, start)
    moved = [
        name
        for name, buffer in original.named_buffers()
        if name not in known and not name.endswith(COUNTER) and not same(buffer, start[name])
    ]
    attributes = _attributes(original)
    _restore(original, start)
    second = _passes(original, x)
    for place, attribute in _attributes(original).items():
        if attributes.get(place, attribute) == attribute:
            continue
        _restore(original, start)
        if not _steers(original, x, attribute, second):
            continue
        raise ConfigError(
            f"{_named(model)} changes {place} in each forward pass, so its outputs could depend on "
            "how many passes a worker has made; make it a buffer, or compute it from the inputs"
        )
    for name in moved:
        # An integer may only count, as that of BatchNorm does.
        later = start | {
            name: start[name] ^ True
            if start[name].dtype is torch.bool
            else start[name] + MANY_PASSES
        }
        _restore(original, later)
        if not all(_close(a, b, 1e-6) for a, b in zip(_passes(original, x), second, strict=True)):
            raise ConfigError(
                f"{_named(model)} changes its buffer '{name}' of type {start[name].dtype} in a "
                "forward pass, and its outputs depend on it; only buffers of floating-point "
                "numbers may change, which clients train and the server averages"
            )
    for mode, a, b in zip(MODES, first, second, strict=True):
        if not _close(a, b, 1e-10 if model.dtype is torch.float64 else 1e-5):
            raise ConfigError(
                f"{_named(model)} gives two outputs for the same examples and parameters in "
                f"{mode} mode: forward depends on something else, such as a clock, a random "
                "generator of its own, or an attribute that it changes; make it a buffer, or a "
                "function of the inputs"
            )
    # Larger parameters show a forward that limits their norm.
    larger = start | {name: start[name] * SCALE for name, _ in original.named_parameters()}
    _restore(original, larger)
    _passes(original, x)
    _refuse_changed_parameters(original, model, larger)
    _refuse_moves_in_evaluation(original, model, x)


def _refuse_changed_parameters(net: nn.Module, model: Model, before: dict[str, Tensor]) -> None:
    """Refuse a net that has changed a parameter in a pass."""
    for name, parameter in net.named_parameters():
        if not same(parameter.detach(), before[name]):
            raise ConfigError(
                f"{_named(model)} changes its parameter '{name}' in a forward pass, and only a "
                "local step may change parameters; compute with a changed copy instead"
            )


def _refuse_moves_in_evaluation(net: nn.Module, model: Model, x: Tensor) -> None:
    """Refuse a net that moves its statistics in evaluation mode."""
    net.eval()
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    with torch.no_grad():
        net(x)
    for name, buffer in net.named_buffers():
        if not name.endswith(COUNTER) and not same(buffer, before[name]):
            raise ConfigError(
                f"{_named(model)} changes its buffer '{name}' in evaluation mode, so metrics would "
                "change the model; let eval() switch that off"
            )


@torch.no_grad()
def _passes(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the outputs of an odd number of passes, so that a switch shows, in these `MODES`."""
    outputs = []
    for mode in MODES:
        net.train(mode == "training")
        outputs.append(net(x).clone())
    return outputs


@torch.no_grad()
def _restore(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Set the parameters and buffers of a net."""
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        tensor.copy_(tensors[name])


@dataclass(frozen=True)
class Attribute:
    """An attribute of a layer, or of its class."""

    owner: Any = field(compare=False)
    """The layer or the class."""
    name: str
    """Name of the attribute."""
    fingerprint: bytes
    """Bytes that change with the value."""


def _steers(net: nn.Module, x: Tensor, attribute: Attribute, outputs: list[Tensor]) -> bool:
    """Return whether an attribute that passes change can change the outputs of passes.

    A number may only count; anything else is taken to.
    """
    value = getattr(attribute.owner, attribute.name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    setattr(attribute.owner, attribute.name, value + MANY_PASSES)
    try:
        later = _passes(net, x)
    finally:
        setattr(attribute.owner, attribute.name, value)
    return not all(_close(a, b, 1e-6) for a, b in zip(later, outputs, strict=True))


def _attributes(net: nn.Module) -> dict[str, Attribute]:
    """Return the attributes of the layers that could steer a pass, by their names in messages.

    Tensors are left out: an activation that a layer stores for a hook or a penalty is no harm, and
    where a pass depends on it, two passes differ.
    """
    of_every_module = set(vars(nn.Module())) | {"forward"}
    attributes = {}
    owners: dict[str, Any] = {name: module for module, name in _layer_names(net).items()}
    for module in net.modules():
        for cls in type(module).__mro__:
            if not cls.__module__.startswith("torch.") and cls is not object:
                owners[f"class {cls.__name__}"] = cls
    for place, owner in owners.items():
        for name, value in vars(owner).items():
            if name in of_every_module or name.startswith("__") or callable(value):
                continue
            fingerprint = _fingerprint(value)
            if fingerprint is not None:
                attribute = Attribute(owner, name, fingerprint)
                attributes[f"the attribute '{name}' of {place}"] = attribute
    return attributes


def _fingerprint(value: Any) -> bytes | None:
    """Return the bytes of an attribute; None if it holds tensors, is large or has no bytes."""
    if isinstance(value, Tensor) or (
        isinstance(value, np.ndarray) and value.size > MAX_ATTRIBUTE_NUMBERS
    ):
        return None
    if isinstance(value, dict) and any(isinstance(item, Tensor) for item in value.values()):
        return None
    if isinstance(value, list | tuple | set) and any(isinstance(item, Tensor) for item in value):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pickle.dumps(value)
    except Exception:  # an open file, a lock, a lambda
        return None


def _compare(net: nn.Module, model: Model, x: Tensor, y: Tensor) -> None:
    """Compare passes of the user's net with those of the bound net, also after steps."""
    original = _original(net, model)
    trained = [parameter for parameter in original.parameters() if parameter.requires_grad]
    bound = BoundModel(model)
    w, buffers = model.initial()
    _set(trained, w)
    theirs, ours = buffers.clone(), buffers.clone()
    statistics = BoundStatistics(original, model.statistics)
    statistics.bind(theirs)
    noise = generator(0, "dry run").standard_normal(model.size, dtype="float32")
    for step in range(STEPS + 1):
        bound.w.copy_(w)
        _set(trained, w)
        original.train()
        expected = _pass(original, trained, model, x, y, lambda: original(x))
        statistics.collect()
        expected.statistics = theirs.clone()
        got = _pass(
            bound.module[0],
            bound.parameters,
            model,
            x,
            y,
            lambda: bound.forward(model.as_trained(x), "train", ours),
        )
        got.statistics = ours
        _refuse_difference(model, expected, got, f"after {step} steps" if step else "")
        gradient = torch.cat(
            [
                (torch.zeros_like(p) if g is None else g).reshape(-1)
                for p, g in zip(trained, expected.gradients, strict=True)
            ]
        )
        scale = STEP_SHARE * w.norm()
        w = w - scale * gradient / gradient.norm().clamp(min=1e-30)
        # Parameters that begin at zero, or have no gradient, move too.
        w = w + 0.1 * scale / model.size**0.5 * torch.from_numpy(noise).to(w)
    bound.w.copy_(w)
    _set(trained, w)
    original.eval()
    with torch.no_grad():
        expected = _layers(original, lambda: original(x))
        got = _layers(bound.module[0], lambda: bound.forward(x, "eval", ours))
    if not _close(got[0], expected[0]):
        _refuse(model, "in evaluation mode", expected[1], got[1])


def _pass(
    net: nn.Module,
    parameters: list[nn.Parameter],
    model: Model,
    x: Tensor,
    y: Tensor,
    run: Callable[[], Tensor],
) -> Pass:
    """Make a training pass and its gradient."""
    outputs, of_layers = _layers(net, run)
    # A loss that draws random numbers is refused later, by its own name.
    generators = GlobalGenerators()
    loss = model.mean_loss(outputs, x, y)
    generators.restore()
    if not loss.requires_grad:
        raise ConfigError(
            f"{_named(model)} has a loss that depends on none of its trained parameters; look for "
            "no_grad() or detach() in forward"
        )
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return Pass(outputs.detach(), list(gradients), torch.empty(0), of_layers)


def _layers(net: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the outputs of a pass, and those of each layer."""
    of_layers: dict[str, Tensor] = {}
    names = _layer_names(net)

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            of_layers[names[module]] = output.detach().clone()

    handles = [module.register_forward_hook(note) for module in net.modules()]
    try:
        return run(), of_layers
    finally:
        for handle in handles:
            handle.remove()


def _refuse_foreign_parameters(net: nn.Module, model: Model, x: Tensor, y: Tensor) -> None:
    """Refuse a net whose loss depends on a parameter that is not one of its own."""
    original = _original(net, model)
    own = {id(parameter) for parameter in original.parameters()}
    loss = model.mean_loss(original(x), x, y)
    for leaf in _leaves(loss):
        if id(leaf) not in own:
            raise ConfigError(
                f"{_named(model)} computes with a parameter of shape {list(leaf.shape)} that is "
                "not registered in it, such as one in a list, or one of another net that a hook "
                "refers to; assign it to an attribute, or use nn.ParameterList"
            )


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors whose gradient autograd would accumulate."""
    nodes: list[Any] = [loss.grad_fn]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [child for child, _ in node.next_functions]


def _refuse_difference(model: Model, expected: Pass, got: Pass, when: str) -> None:
    """Refuse a net of which raysim's pass differs from PyTorch's."""
    if not _close(got.outputs, expected.outputs):
        _refuse(model, when, expected.of_layers, got.of_layers)
    for name, a, b in zip(model.names, got.gradients, expected.gradients, strict=True):
        if (a is None) != (b is None) or (a is not None and b is not None and not _close(a, b)):
            raise ConfigError(
                f"{_named(model)} has another gradient of '{name.removeprefix('0.')}' here than in "
                f"PyTorch {when}".rstrip()
                + "; look for hooks on backward, and for code that asks for a type of layer"
            )
    for statistic in model.statistics:
        if not _close(statistic.of(got.statistics), statistic.of(expected.statistics)):
            raise ConfigError(
                f"{_named(model)} moves '{statistic.layer}.{statistic.name}' here to other values "
                f"than in PyTorch {when}".rstrip()
            )


def _refuse(model: Model, when: str, expected: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    """Refuse a net, naming the first layer that gives other outputs than PyTorch's."""
    first = next(
        (
            name
            for name, output in expected.items()
            if name not in got or got[name].shape != output.shape or not _close(got[name], output)
        ),
        "the net",
    )
    raise ConfigError(
        f"{_named(model)} gives other outputs here than in PyTorch {when}".rstrip()
        + f", first in {first}; look there for code that asks for a type of layer, counts its "
        "attributes, or calls forward of a layer by itself"
    )


def _set(parameters: list[nn.Parameter], w: Tensor) -> None:
    """Set parameters to the parts of a flat vector."""
    position = 0
    for parameter in parameters:
        part = w[position : position + parameter.numel()]
        parameter.data = part.view(parameter.shape).clone()
        position += parameter.numel()


def _close(a: Tensor, b: Tensor, tolerance: float | None = None) -> bool:
    """Return whether two tensors are equal up to rounding."""
    if a.shape != b.shape:
        return False
    if tolerance is None:
        tolerance = 1e-7 if b.dtype is torch.float64 else 5e-3
    scale = float(b.abs().max()) if b.numel() else 0.0
    if not np.isfinite(scale):
        return torch.equal(torch.isfinite(a), torch.isfinite(b))
    return torch.allclose(a, b, 0.0, tolerance * scale + 1e-12, equal_nan=True)


@contextmanager
def _named_failure(model: Model) -> Iterator[None]:
    """Turn an error of a pass into one that names the net."""
    try:
        yield
    except ConfigError:
        raise
    except BaseException as error:
        reraise_stop(error)
        raise ConfigError(
            f"{_named(model)} fails on {EXAMPLES} examples: {in_a_line(error)}"
        ) from None


def _named(model: Model) -> str:
    return f"model: '{model.name}'" if model.name else "model: the net"


def _layer_names(net: nn.Module) -> dict[nn.Module, str]:
    """Return name and kind of each layer of a net, for messages."""
    return {
        module: f"{name or 'the net'} ({type(module).__name__})"
        for name, module in net.named_modules()
    }
