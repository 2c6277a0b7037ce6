"""Comparison of raysim's reading of a net with PyTorch's own, before a run.

The net that a user hands over is run as PyTorch would run it: the module itself, in training and
in evaluation mode, forward and backward. What raysim trains, a net bound to flat vectors, has to
give the same outputs, gradients and statistics, also after steps. A net that cannot be simulated,
because its passes depend on something else than parameters, statistics and examples, is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from raysim.errors import ConfigError
from raysim.models.batchnorm_statistics import BoundStatistics
from raysim.models.checks.hidden_state import refuse_draws, refuse_hidden_state
from raysim.models.checks.original_net import original_copy
from raysim.models.comparison import close, layer_names, magnitude
from raysim.models.first_outputs import failed_loss
from raysim.models.flat import BoundModel, Model
from raysim.models.nets.zoo import NETS
from raysim.randomness import generator
from raysim.rules.batch import Batch
from raysim.system.global_generators import GlobalGenerators, generators_kept
from raysim.system.signals import failing_as

EXAMPLES = 4
"""Number of examples in the passes that are compared."""

STEPS = 2
"""Steps that move the parameters between the passes that are compared."""

STEP_SHARE = 0.1
"""Length of a step, as a share of the parameters' norm."""


@dataclass
class Pass:
    """Results of one training pass of a net."""

    outputs: Tensor
    """[B, ...], the outputs."""
    gradients: list[Tensor | None]
    """The gradient of each trained parameter; None where autograd reached none."""
    of_layers: dict[str, Tensor]
    """The outputs of each layer in its last call, by its name, in the order of the calls."""


_COMPARED: ContextVar[set[str] | None] = ContextVar("nets that were compared", default=None)


@contextmanager
def comparing_once() -> Iterator[None]:
    """Compare nets of equal settings once inside of this, as the trials of a sweep have them."""
    token = _COMPARED.set(set())
    try:
        yield
    finally:
        _COMPARED.reset(token)


@torch.enable_grad()
def check_reading(net: nn.Module, model: Model, settings: str = "") -> None:
    """Compare a net that was read with PyTorch's own passes of it.

    A net of raysim is searched neither for hidden state nor for random numbers.

    Args:
        net: the net as the user wrote it; not changed.
        model: the net as raysim reads it.
        settings: the settings that determine the net, see `comparing_once`.

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
    compared = _COMPARED.get()
    if compared is not None and settings in compared:
        return
    batch = Batch(*model.examples(EXAMPLES))
    failed = f"{model.label} fails on {EXAMPLES} examples"
    with failing_as(lambda why: ConfigError(f"{failed}: {why}"), (ConfigError,)), generators_kept():
        if model.name not in NETS:  # those keep nothing, as their tests show
            refuse_draws(net, model, batch.x)
            refuse_hidden_state(net, model, batch.x)
        _refuse_foreign_parameters(net, model, batch)
        try:
            _compare(net, model, batch)
        except ConfigError:
            # BatchNorm of a few nearly equal numbers makes any rounding large.
            if not _agree_in_float64(net, model):
                raise
        _try_dropout(model, batch)
    if compared is not None:
        compared.add(settings)


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
    if not close(outputs.double(), expected.double(), 5e-3):
        raise ConfigError(
            f"{model.label} gives other outputs in a worker than in the process that started the "
            "run: forward depends on something outside of the net, such as a global variable that "
            "was changed, the machine's environment or the order of a set; make it an attribute or "
            "a parameter of the net"
        )


@torch.no_grad()
def sample_outputs(model: Model) -> Tensor:
    """Return the outputs of the initial net on a few examples, in training and evaluation mode.

    Args:
        model: the net.

    Returns:
        All numbers of both in a row; the two may have different shapes.
    """
    bound, buffers = BoundModel.at_start(model)
    x, _ = model.examples(EXAMPLES)
    return torch.cat([bound.forward(x, mode, buffers).flatten() for mode in ("frozen", "eval")])


def _compare(net: nn.Module, model: Model, batch: Batch) -> None:
    """Compare passes of the user's net with those of the bound net, also after steps."""
    original = original_copy(net, model)
    trained = [parameter for parameter in original.parameters() if parameter.requires_grad]
    bound = BoundModel(model)
    w, buffers = model.initial()
    theirs, ours = buffers.clone(), buffers.clone()
    statistics = BoundStatistics(original, model.statistics)
    statistics.bind(theirs)
    numbers = generator(0, "dry run").standard_normal(model.size, dtype="float32")
    noise = torch.from_numpy(numbers).to(w) * (0.1 / model.size**0.5)

    def train(x: Tensor) -> Tensor:
        return bound.forward(model.as_trained(x), "train", ours)

    for step in range(STEPS + 1):
        bound.w.copy_(w)
        vector_to_parameters(w.clone(), trained)
        original.train()
        expected = _pass(original, trained, model, batch, original)
        statistics.collect()
        got = _pass(bound.module[0], bound.parameters, model, batch, train)
        when = f"after {step} steps" if step else ""
        _refuse_difference(model, expected, got, when)
        _refuse_other_statistics(model, theirs, ours, when)
        parts = []
        for parameter, part in zip(trained, expected.gradients, strict=True):
            parts.append((torch.zeros_like(parameter) if part is None else part).reshape(-1))
        gradient = torch.cat(parts)
        scale = float(STEP_SHARE * w.norm())
        w.sub_(gradient, alpha=scale / max(float(gradient.norm()), 1e-30))
        w.add_(noise, alpha=scale)  # for parameters that begin at zero, or have no gradient
    bound.w.copy_(w)
    vector_to_parameters(w.clone(), trained)
    original.eval()
    with torch.no_grad():
        expected = _layers(original, batch.x, original)
        got = _layers(bound.module[0], batch.x, lambda x: bound.forward(x, "eval", ours))
    if not close(got[0], expected[0]):
        _refuse(model, "in evaluation mode", expected[1], got[1])


def _agree_in_float64(net: nn.Module, model: Model) -> bool:
    """Return whether the passes of both nets agree in float64, if that is not the run's type."""
    if model.dtype == torch.float64:
        return False
    try:
        exact = Model(
            copy.deepcopy(net),
            model.shape,
            model.classes,
            torch.float64,
            model.device,
            learning_task=model.learning_task,
            sample=model.sample,
            name=model.name,
        )
        if model.frozen_statistics:
            exact.freeze_statistics()
        _compare(net, exact, Batch(*exact.examples(EXAMPLES)))
    except Exception:  # forward may make tensors of the run's type
        return False
    return True


def _try_dropout(model: Model, batch: Batch) -> None:
    """Make a pass with masks, forward and backward, in which layers may be called again."""
    if not model.dropouts:
        return
    seed = [torch.tensor(0)] if model.draws else []
    bound, buffers = BoundModel.at_start(model)
    masks = [bound.w.new_ones(mask.shape(len(batch.x))) for mask in model.dropouts]
    outputs = bound.forward(model.as_trained(batch.x), "train", buffers, (*masks, *seed))
    loss = _mean_loss(model, outputs, batch)
    if loss.requires_grad:
        torch.autograd.grad(loss, bound.parameters, allow_unused=True)


def _pass(
    net: nn.Module,
    parameters: list[nn.Parameter],
    model: Model,
    batch: Batch,
    run: Callable[[Tensor], Tensor],
) -> Pass:
    """Make a training pass and its gradient."""
    outputs, of_layers = _layers(net, batch.x, run)
    # A loss that draws random numbers is refused later, by its own name.
    generators, version = GlobalGenerators(), outputs._version
    loss = _mean_loss(model, outputs, batch)
    generators.restore()
    if outputs.requires_grad and not loss.requires_grad:
        raise ConfigError(
            f"task: loss of '{model.learning_task.name}' returns a tensor without a gradient: it "
            "does not depend on the outputs; compute it from them, without detach(), .item() or "
            "no_grad()"
        )
    if not loss.requires_grad:
        raise ConfigError(
            f"{model.label} has a loss that depends on none of its trained parameters; look for "
            "no_grad() or detach() in forward"
        )
    try:
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    except RuntimeError:
        _refuse_gradient_of_loss(model, outputs, outputs._version != version, batch)
        raise
    for name, gradient in zip(model.names, gradients, strict=True):
        if gradient is not None and gradient.is_sparse:
            raise ConfigError(
                f"{model.label} has a sparse gradient of '{name.removeprefix('0.')}', and a step "
                "needs dense ones; set sparse=False"
            )
    return Pass(outputs.detach(), list(gradients), of_layers)


def _refuse_gradient_of_loss(model: Model, outputs: Tensor, is_changed: bool, batch: Batch) -> None:
    """Refuse a loss that has no gradient by outputs, or has changed those that a net needs."""
    if is_changed:
        why = "it changes the outputs in place, and the net's gradient needs them; copy them first"
        raise failed_loss(model.learning_task, outputs, why, str(EXAMPLES))
    at = outputs.detach().clone().requires_grad_()
    loss = _mean_loss(model, at.clone(), batch)
    with failing_as(lambda why: failed_loss(model.learning_task, outputs, why, str(EXAMPLES))):
        torch.autograd.grad(loss, at)


def _mean_loss(model: Model, outputs: Tensor, batch: Batch) -> Tensor:
    """Return the loss of a batch; if it cannot be computed, the error names the loss."""
    with failing_as(lambda why: failed_loss(model.learning_task, outputs, why, str(EXAMPLES))):
        return model.mean_loss(outputs, batch.x, batch.y)


def _layers(
    net: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the outputs of a pass on inputs x, and those of each layer."""
    of_layers: dict[str, Tensor] = {}
    names = layer_names(net)

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            of_layers[names[module]] = output.detach().clone()

    handles = [module.register_forward_hook(note) for module in net.modules()]
    try:
        return run(x), of_layers
    finally:
        for handle in handles:
            handle.remove()


def _refuse_foreign_parameters(net: nn.Module, model: Model, batch: Batch) -> None:
    """Refuse a net, or a loss, that depends on a parameter that is not one of the net's own."""
    original = original_copy(net, model)
    trained = {name for name, p in original.named_parameters() if p.requires_grad}
    # Tensors of one pass only, such as inputs whose gradient forward uses, are no parameters.
    outputs, again = original(batch.x), original(batch.x)
    losses = [_mean_loss(model, of_pass, batch) for of_pass in (outputs, again)]
    _refuse_changed_gradients(original, trained, model)
    own = set(original.parameters())
    of_net = (set(_leaves(outputs)) & set(_leaves(again))) - own
    of_loss = (set(_leaves(losses[0])) & set(_leaves(losses[1]))) - own
    for name, parameter in nn.Module.named_parameters(original):
        if parameter in of_net:
            raise ConfigError(
                f"{model.label} computes with '{name}', which its own method parameters() leaves "
                "out, and clients train every parameter with requires_grad; freeze it by "
                "model.freeze, or remove the method"
            )
    for leaf in of_net:
        raise ConfigError(
            f"{model.label} computes with a parameter of shape {list(leaf.shape)} that is "
            "not registered in it, such as one in a list, or one of another net that a hook "
            "refers to; assign it to an attribute, or use nn.ParameterList"
        )
    for leaf in of_loss:
        raise ConfigError(
            f"task: loss of '{model.learning_task.name}' computes with a parameter of shape "
            f"{list(leaf.shape)}, which is not one of the net that a client trains, but of another "
            "object; let forward return what the loss needs. For a penalty of the net's own "
            "parameters there are local.weight_decay and client rules"
        )


def _refuse_changed_gradients(original: nn.Module, trained: set[str], model: Model) -> None:
    """Refuse a net whose passes have changed which gradients its parameters have."""
    for name, parameter in original.named_parameters():
        if parameter._backward_hooks:
            raise ConfigError(
                f"{model.label} registers a hook of '{name}' in a forward pass, and those of all "
                "passes of a worker would add up; change the gradient in forward, or by a full "
                "backward hook of the layer"
            )
        if parameter.requires_grad != (name in trained):
            raise ConfigError(
                f"{model.label} sets requires_grad of '{name}' in a forward pass, so that it would "
                "depend on the pass which parameters are trained; set it before the run"
            )


def _leaves(values: Tensor) -> Iterator[Tensor]:
    """Yield the tensors whose gradient autograd would accumulate."""
    nodes: list[Any] = [values.grad_fn]
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
    if not close(got.outputs, expected.outputs):
        _refuse(model, when, expected.of_layers, got.of_layers)
    largest = magnitude(expected.gradients)
    for name, a, b in zip(model.names, got.gradients, expected.gradients, strict=True):
        if a is None or b is None:
            differ = a is not b
        else:
            differ = not close(a, b, magnitude=largest)
        if differ:
            raise ConfigError(
                f"{model.label} has another gradient of '{name.removeprefix('0.')}' here than in "
                f"PyTorch {when}".rstrip()
                + "; look for hooks on backward, and for code that asks for a type of layer"
            )


def _refuse_other_statistics(model: Model, expected: Tensor, got: Tensor, when: str) -> None:
    """Refuse a net of which a pass moves the statistics [Q] to other values than PyTorch's."""
    largest = magnitude([expected])
    for statistic in model.statistics:
        if not close(statistic.of(got), statistic.of(expected), magnitude=largest):
            raise ConfigError(
                f"{model.label} moves '{statistic.layer}.{statistic.name}' here to other values "
                f"than in PyTorch {when}".rstrip()
                + "; move it in forward, not in the backward pass"
            )


def _refuse(model: Model, when: str, expected: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    """Refuse a net, naming the first layer that gives other outputs than PyTorch's."""
    first = "the net"
    for name, output in expected.items():
        if name not in got or not close(got[name], output):
            first = name
            break
    raise ConfigError(
        f"{model.label} gives other outputs here than in PyTorch {when}".rstrip()
        + f", first in {first}; look there for code that asks for a type of layer, counts its "
        "attributes, or calls forward of a layer by itself, and in __init__ for numbers from a "
        "generator of its own, which are others when the net is built again"
    )
