"""Build the configured net: a shipped net by its name, or a user's net by path.py:Class."""

from __future__ import annotations

import copy
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field, PydanticUserError, TypeAdapter, ValidationError
from torch import nn

from raysim.config import entry_points
from raysim.config.explain import annotation_types, explain_validation_error, misplaced_switch
from raysim.config.limited_yaml import are_same, plain
from raysim.config.references import load_file, load_object
from raysim.config.schema import Config
from raysim.config.sections.base import AS_NAMES, Named
from raysim.data.several_inputs import Inputs, set_inputs, shapes_of
from raysim.errors import ConfigError, in_a_line, users_line, with_cause
from raysim.models.checks.refused_nets import refuse_odd_nets, refuse_other_types
from raysim.models.initial.start import freeze, load_weights
from raysim.models.nets.zoo import NETS
from raysim.randomness import generator
from raysim.spelling import did_you_mean, lacking
from raysim.system.global_generators import GENERATORS, generators_kept, seed_generators
from raysim.system.signals import reraise_stop


def catalogue() -> Iterator[tuple[str, Any, str]]:
    """Yield name, factory and distribution of every net that has a name."""
    for name, factory in NETS.items():
        yield name, factory, "raysim"
    yield from entry_points.offered(entry_points.MODELS, "model.name", NETS)


def find_factory(name: str) -> Callable:
    """Return the class or function that builds the net `name`.

    Args:
        name: a name that `raysim list models` shows, or path.py:NAME.

    Raises:
        ConfigError: the net is unknown or cannot be loaded.
    """
    factory: Any
    if name.endswith(".py"):
        raise ConfigError(_which_net(name))
    if ":" in name:
        factory = load_object(name, "model.name")
    else:
        factory = entry_points.load_offered(
            entry_points.MODELS, "model.name", name, name in NETS
        ) or NETS.get(name)
    if factory is None:
        installed = (point.name for point in entry_points.entry_points(entry_points.MODELS))
        hint = did_you_mean(name, [*NETS, *installed])
        raise ConfigError(
            f"model.name: unknown model '{name}'{hint}; write your own net as path.py:Class"
        )
    if isinstance(factory, nn.Module):
        net = factory
        _refuse_without_init(net)
        refuse_odd_nets(net)
        return lambda: copied(net)
    if not callable(factory) or not _has_signature(factory):
        raise ConfigError(
            f"model.name: '{name}' is neither a torch.nn.Module nor a function that returns one"
        )
    return factory


def copied(net: nn.Module) -> nn.Module:
    """Return a copy of a net.

    Args:
        net: the net.

    Raises:
        ConfigError: an attribute of the net cannot be copied.
    """
    try:
        return copy.deepcopy(net)
    except Exception as error:  # of any attribute's own
        raise ConfigError(
            f"model: {type(net).__name__} cannot be copied, which each worker does: "
            f"{in_a_line(error)}; leave out what holds it, or define __deepcopy__ there"
        ) from None


def _has_signature(function: Callable) -> bool:
    try:
        inspect.signature(function)
    except (TypeError, ValueError):  # of a function in C
        return False
    return True


def _refuse_without_init(net: nn.Module) -> None:
    """Refuse a net whose `__init__` is not that of a module."""
    if "_modules" not in vars(net) and not isinstance(net, torch.jit.ScriptModule):
        raise ConfigError(
            f"model: {type(net).__name__}.__init__ does not call super().__init__() first"
        )


def _which_net(file: str) -> str:
    """Return the message for a file without the name of a net, with the nets in it."""
    module = load_file(file, "model.name")
    nets = [
        f"{file}:{name}"
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, nn.Module)
        and value.__module__ == module.__name__
    ]
    return (
        f"model.name: '{file}' is a file; name the net in it: "
        f"{' or '.join(nets) or f'{file}:NAME (it defines no torch.nn.Module)'}"
    )


PATTERNS = Annotated[list[str], AS_NAMES]

COMMON_KEYS: dict[str, tuple[Any, str]] = {
    "projection": (
        Annotated[int, Field(ge=1)],
        "Width of a projection head below the linear classifier (Li Q. 2021).",
    ),
    "init_from": (
        str,
        "Weights from which training starts: the folder or MLflow id of a run, a state_dict, "
        "torchvision:NET.WEIGHTS, hf:NAME@REVISION, or a folder of Hugging Face.",
    ),
    "init_skip": (
        PATTERNS,
        "Names, with * and ?, of tensors that `init_from` does not set, such as a classifier of "
        "another size.",
    ),
    "freeze": (
        PATTERNS,
        "Parts that are not trained: classifier, norm, or names with * and ?; a part after ! is "
        "trained again. They are not sent, and stored once for all clients of a worker.",
    ),
}
"""Type and meaning of the keys that every net has."""


def initial_weights(model: Named) -> str | None:
    """Return the value of `init_from`; None if it is not set, or belongs to the net itself.

    Args:
        model: the section `model` of the configuration.

    Raises:
        ConfigError: the net is unknown or cannot be loaded.
    """
    source = model.parameters.get("init_from")
    is_common = isinstance(source, str) and "init_from" not in net_parameters(model.name)
    return source if is_common else None


def net_parameters(name: str) -> dict[str, inspect.Parameter]:
    """Return the configurable parameters of the net `name`.

    The parameters `shape` and `classes` are left out, because the data set determines them.

    Args:
        name: a name that `raysim list models` shows, or path.py:NAME.

    Returns:
        Parameters by name, with their defaults.

    Raises:
        ConfigError: the net is unknown or cannot be loaded.
    """
    return _parameters(find_factory(name))


def net_parameter_docs(name: str) -> dict[str, str]:
    """Return what the docstring of the net `name` says of its parameters.

    Args:
        name: a name that `raysim list models` shows, or path.py:NAME.

    Returns:
        One line for each parameter that the docstring's section "Args:" has, by its name. A class
        has it in its own docstring or in that of `__init__`.

    Raises:
        ConfigError: the net is unknown or cannot be loaded.
    """
    factory = find_factory(name)
    docs: dict[str, str] = {}
    for documented in (getattr(factory, "__init__", None), factory):
        text = inspect.cleandoc(getattr(documented, "__doc__", None) or "")
        section = text.partition("Args:\n")[2]
        arguments = textwrap.dedent(re.split(r"\n(?=\S)", section)[0])
        for argument in re.split(r"\n(?=\S)", arguments):
            if match := re.match(r"(\w+)(?: \(.*?\))?:(.*)", argument, re.DOTALL):
                docs[match[1]] = " ".join(match[2].split())
    return docs


OF_DATA = ("shape", "classes")
"""Parameters of a net that the data set determines. A user's net may be given others."""


def _parameters(
    factory: Callable, without: Iterable[str] = OF_DATA
) -> dict[str, inspect.Parameter]:
    """Return the named parameters of `factory`, without those that the data determine.

    Annotations that cannot be evaluated are left out, as those of `if TYPE_CHECKING` imports.
    """
    try:
        signature = inspect.signature(factory, eval_str=True)
    except Exception:  # of any expression of the user's
        signature = inspect.signature(factory)
    parameters = {}
    for name, parameter in signature.parameters.items():
        if isinstance(parameter.annotation, str):
            parameter = parameter.replace(annotation=parameter.empty)
        is_one = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if is_one and name not in (*without, "self"):
            parameters[name] = parameter
    return parameters


def net_arguments(model: Named) -> dict[str, Any]:
    """Validate the parameters of the configured net and fill in the defaults.

    Args:
        model: the section `model` of the configuration.

    Returns:
        The keyword arguments of the net. A default that is not a plain value is left out, and one
        that its annotation would not read back.

    Raises:
        ConfigError: the net is unknown or cannot be loaded, or a key is unknown or has the wrong
            type; the message names the key.
    """
    factory = find_factory(model.name)
    known = _parameters(factory)
    parameters = inspect.signature(factory).parameters.values()
    accepts_any_key = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    arguments: dict[str, Any] = {}
    for key, parameter in known.items():
        if _is_written(key, parameter):
            arguments[key] = parameter.default
    if model.name not in NETS:
        known = _parameters(factory, [key for key in OF_DATA if key not in model.parameters])
    for key, value in model.parameters.items():
        if key in known:
            arguments[key] = _checked(key, value, known[key].annotation, known[key].default)
        elif key in COMMON_KEYS:
            arguments[key] = _checked(key, value, COMMON_KEYS[key][0])
        elif accepts_any_key:
            arguments[key] = value
        else:
            raise ConfigError(
                f"model.{key}: unknown key of '{model.name}'"
                f"{did_you_mean(key, [*known, *COMMON_KEYS])}"
            )
    _refuse_missing_arguments(model.name, known, arguments)
    return arguments


def _refuse_missing_arguments(
    name: str, known: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]
) -> None:
    """Raise ConfigError if a parameter of a net has neither a value nor a default."""
    missing = [key for key in known if known[key].default is inspect.Parameter.empty]
    missing = lacking(missing, arguments)
    if missing:
        short = name.rpartition(":")[2].partition("-")[0]
        example = "".join(f", {key!r}: ..." for key in missing)
        values = f"{', '.join(missing)} {'has' if len(missing) == 1 else 'have'}"
        raise ConfigError(
            f"model.{missing[0]}: {values} no default in '{name}'; give the value beside the name, "
            f"{{'name': {short}{example}}}, or give an instance of the net in Python"
        )


def _is_written(key: str, parameter: inspect.Parameter) -> bool:
    """Return whether config.yaml has a default, since it is read back from there as it is."""
    default, annotation = parameter.default, parameter.annotation
    if not isinstance(default, bool | int | float | str | tuple | list):
        return False
    if annotation is type(default) and not isinstance(default, tuple | list):
        return True
    try:
        return are_same(default, _checked(key, plain(default), annotation, default))
    except (ConfigError, ValueError):
        return False


def _checked(key: str, value: Any, annotation: Any, default: Any = None) -> Any:
    """Return the value of a net's parameter after validation by its annotation.

    Without one a list is a tuple if the default is: config.yaml has the default as a list.
    """
    if annotation is inspect.Parameter.empty:
        return tuple(value) if isinstance(value, list) and isinstance(default, tuple) else value
    if switch := misplaced_switch(value, annotation_types(annotation)):
        raise ConfigError(f"model.{key}: {switch} is neither a number nor a word")
    try:
        return TypeAdapter(annotation).validate_python(value)
    except (PydanticUserError, NameError):  # a type that pydantic does not know, such as nn.Module
        return value
    except ValidationError as error:
        raise ConfigError(explain_validation_error(error, value, dict, f"model.{key}")) from None


def make_net(
    config: Config, shape: tuple[int, ...], classes: int, inputs: Inputs = ()
) -> nn.Module:
    """Build the configured net with keyed initial values.

    The initial values depend on the seed only, so all algorithms start from the same x_0. They may
    come from the global generators of torch, NumPy and Python.

    Args:
        config: the configuration; its section `model` names the net and its parameters.
        shape: shape of one example, (C, H, W) of an image.
        classes: number of outputs: of classes, labels, columns or tokens; 0: unknown, then the
            net has its own default.
        inputs: the inputs of a net with several ones, which its factory gets as `shape`.

    Returns:
        The net, on the CPU.

    Raises:
        ConfigError: the net is unknown, a parameter is wrong, or the net cannot be built.
    """
    name = config.model.name
    if inputs and name in NETS:
        names = ", ".join(entry.name for entry in inputs)
        raise ConfigError(
            f"model.name: '{name}' has one input, and the data have {names}; give a net of your "
            "own, whose forward takes them"
        )
    factory = find_factory(name)
    arguments = net_arguments(config.model)
    own_keys = _parameters(factory)
    common = {k: arguments.pop(k) for k in COMMON_KEYS if k in arguments and k not in own_keys}
    taken = _parameters(factory, without=())
    of_data: dict[str, Any] = {"shape": shapes_of(inputs) if inputs else shape}
    if classes:
        of_data["classes"] = classes
    arguments = {**{key: of_data[key] for key in of_data if key in taken}, **arguments}
    if "classes" in taken and not classes:
        _refuse_missing_arguments(name, {"classes": taken["classes"]}, arguments)
    number = int(generator(config.seed, "init").integers(2**63))
    with generators_kept():
        seed_generators(GENERATORS, number % 2**32)
        torch.manual_seed(number)
        net = _built(name, lambda: factory(**arguments))
        if "projection" in common:
            _add_projection(net, common["projection"], classes)
    refuse_odd_nets(net)
    refuse_other_types(net, config.dtype)
    _set_start(net, common, getattr(torch, config.dtype))
    if "freeze" in common:
        freeze(net, common["freeze"], classes)
    if inputs:
        set_inputs(net, inputs)
    return net


def _built(name: str, build: Callable[[], Any]) -> nn.Module:
    """Return the net that a factory builds; whatever it raises is an error of `model.name`."""
    try:
        net = build()
    except ConfigError:
        raise
    except BaseException as error:
        reraise_stop(error)
        raise ConfigError(
            f"model.name: '{name}' cannot be built: {with_cause(error)}{users_line(error)}"
        ) from None
    if not isinstance(net, nn.Module):
        raise ConfigError(f"model.name: '{name}' is not a torch.nn.Module")
    _refuse_without_init(net)
    return net


def _set_start(net: nn.Module, common: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Load the weights from which training starts, if the keys `common` of the net name some."""
    if "init_from" in common:
        net.to(dtype)  # before, so that no weight is rounded
        load_weights(net, common["init_from"], common.get("init_skip", ()))
    elif "init_skip" in common:
        raise ConfigError(
            "model.init_skip: there is no model.init_from that could set tensors; give one, or "
            "leave init_skip out"
        )


def _add_projection(net: nn.Module, width: int, classes: int) -> None:
    """Replace the linear classifier F -> C by the projection head and classifier of Li Q. 2021.

    The new layers are F -> F, ReLU, F -> width and a classifier width -> C.
    """
    classifiers = [
        (parent, name, child)
        for parent in net.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and child.out_features == classes
    ]
    if not classifiers:
        raise ConfigError(
            f"model.projection: the net has no linear classifier of {classes} classes; "
            "remove the key"
        )
    parent, name, classifier = classifiers[-1]
    size = classifier.in_features
    head = (nn.Linear(size, size), nn.ReLU(), nn.Linear(size, width), nn.Linear(width, classes))
    setattr(parent, name, nn.Sequential(*head))
