"""Base of client rules and server rules, and the sizes of the run that both may use."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from numpy.random import Generator
from pydantic import ConfigDict
from torch import Tensor

from raysim import metrics
from raysim.config.schema import GENERAL
from raysim.config.sections.base import SCHEDULE, at_round
from raysim.randomness import generator
from raysim.rules.public import PublicNeed

State = dict[str, Tensor]
"""Tensors by name, with fixed keys and shapes."""
Report = dict[str, Tensor]
"""A client's report: uploads by key, and metrics as "metric/NAME"."""


@dataclass(frozen=True)
class Problem:
    """Sizes of the run that a rule may use before it starts."""

    n_clients: int
    """All clients, with those that never train. Their numbers are 0 to n_clients - 1."""
    cohort: int
    """Clients in one round."""
    size: int
    """P, the number of trainable parameters."""
    segments: tuple[int, ...] = ()
    """Lengths of the named tensors in the order of the flat vector; their sum is P."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the named tensors."""
    names: tuple[str, ...] = ()
    """Names of these tensors in the net."""
    classifier: tuple[str, ...] = ()
    """Those of the classifier, the last linear layer with one output per class; () without one."""
    frozen: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)
    """The net's frozen parameters by name, for a server rule with `changes_frozen`; else {}."""
    n_nonempty: int = 0
    """N, the clients that have training examples."""
    model: str = ""
    """Name of the model in the configuration."""
    levels: int = 0
    """Stages of the model before its classifier; 0 if it does not consist of stages."""
    lr: float = 0.0
    """Largest local learning rate of the run."""
    classes: int = 0
    """Classes of the data; for other tasks than classification the net's outputs."""
    features: int = 0
    """F, numbers in the representation of an example below the classifier; 0 if there is none."""
    seed: int = 0
    """Seed of the run, for keyed streams of random numbers."""
    n_held_out: int = 0
    """Clients that never train (`evaluate.clients.held_out`)."""
    n_public: int = 0
    """Public examples of the data set; 0 without any."""
    rounds: int = 0
    """T, the rounds of the run, for checks. What `init` returns must not depend on it, because
    a run may be resumed for more rounds."""

    @property
    def classifier_positions(self) -> Tensor:
        """Positions of the classifier's parameters in the flat vector, int64 [k]."""
        positions = torch.arange(self.size).split(list(self.segments))
        own = [p for name, p in zip(self.names, positions, strict=True) if name in self.classifier]
        return torch.cat(own) if own else torch.arange(0)

    def rng(self, stream: str) -> Generator:
        """Return a generator that is keyed by seed and stream, for a server rule's `init`.

        Args:
            stream: the purpose of the numbers; different streams are independent.
        """
        return generator(self.seed, f"server rule {stream}")


class Logged(NamedTuple):
    """A metric that a rule logs: a server rule by `reports.log`, a client rule by `task.log`."""

    name: str
    """Its name there; a part in braces stands for several, as in "utility_q{q}": one letter stands
    for a number, a word for anything."""
    meaning: str
    """Description for the lists of metrics."""
    unit: str = ""
    """Unit of its values, such as "updates", "bytes" or "share"; "" for none."""


@dataclass(frozen=True)
class Rule:
    """Base of client rules and server rules."""

    __pydantic_config__: ClassVar = ConfigDict(
        extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True
    )
    name: ClassVar[str] = ""
    """Name in a configuration."""
    logs: ClassVar[tuple[Logged, ...]] = ()
    """Metrics that the rule logs in every round. `raysim list metrics` shows those of shipped and
    installed methods. Others may be logged too."""
    needs_class_labels: ClassVar[bool] = False
    """Whether the rule works for `task: classification` only."""
    needs_features: ClassVar[bool] = False
    """True if the rule needs a net that ends in a linear classifier on learned features."""
    needs_public_data: ClassVar[PublicNeed] = ""
    """Public data that the rule needs: "inputs", or "labels" beside them; "" for none."""

    def check(self, problem: Problem) -> None:
        """Check the hyper-parameters before the run starts.

        Args:
            problem: the sizes of the run.

        Raises:
            ValueError: they cannot work on this problem; the message is "KEY: why".
        """

    def at(self, t: int) -> Self:
        """Return this rule with every schedule of a hyper-parameter replaced by its value.

        Args:
            t: number of the round, from 0.
        """
        due = {}
        for name in _scheduled_fields(type(self)):
            value = getattr(self, name)
            if isinstance(value, list):
                due[name] = at_round(value, t)
        return dataclasses.replace(self, **due) if due else self


@cache
def _scheduled_fields(cls: type[Rule]) -> list[str]:
    """Return the names of the fields of type `Scheduled`, or of a type that is made of it.

    Other lists, even of pairs, are what they are.
    """
    return [name for name, kind in field_types(cls).items() if _is_scheduled(kind)]


def _is_scheduled(kind: Any) -> bool:
    """Return whether a type is `Scheduled`, perhaps with bounds or None."""
    if SCHEDULE in getattr(kind, "__metadata__", ()):
        return True
    is_made_of_others = get_origin(kind) in (Annotated, Union, UnionType)
    return is_made_of_others and any(map(_is_scheduled, get_args(kind)))


def field_types(cls: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass by name, with what `Annotated` adds to them.

    Annotations of class variables are not looked at: they may name what a module imports for type
    checkers alone.

    Args:
        cls: the dataclass.

    Raises:
        NameError: the module of a class does not know a name in the annotation of a field.
    """
    names = {entry.name for entry in dataclasses.fields(cls)}
    types: dict[str, Any] = {}
    for ancestor in reversed(cls.__mro__):
        own = inspect.get_annotations(ancestor)
        of_fields = SimpleNamespace(
            __annotations__={name: own[name] for name in own.keys() & names}
        )
        variables = vars(sys.modules.get(ancestor.__module__, of_fields))
        types |= get_type_hints(of_fields, dict(vars(ancestor)), variables, include_extras=True)
    return {entry.name: types[entry.name] for entry in dataclasses.fields(cls)}


SHIPPED_PACKAGE = "raysim.algorithms"
"""Package of the shipped methods (the folder algorithms/), and entry-point group of others."""


def family(module: str) -> str:
    """Return the family of a shipped method: the folder of its file, `GENERAL` outside of folders.

    Args:
        module: the method's module, such as raysim.algorithms.robust.krum.
    """
    folder = module.removeprefix(f"{SHIPPED_PACKAGE}.").rpartition(".")[0]
    return folder if module.startswith(f"{SHIPPED_PACKAGE}.") and folder else GENERAL


def place_of_metric(side: str, name: str) -> str:
    """Return the name under which a run has a metric that a rule logs.

    Args:
        side: "client" or "server".
        name: the metric's name in the rule.
    """
    is_size = side == "server" and name.endswith("_bytes")
    return f"system/server_{name}" if is_size else f"{side}/{name}"


def register(cls: type[Rule], registry: dict, suffix: str) -> None:
    """Name a rule after its class, and register it if it is shipped.

    The name is that of the class, without the suffix, in lower case: FedProxClient is `fedprox`.

    Args:
        cls: the class of the rule.
        registry: the shipped rules of its side.
        suffix: "Client" or "Server".

    Raises:
        TypeError: `logs` of the class is no tuple of `Logged`.
    """
    if "name" not in cls.__dict__:
        cls.name = (cls.__name__.removesuffix(suffix) or cls.__name__).lower()
    shipped = cls.__module__.startswith(f"{SHIPPED_PACKAGE}.")
    if shipped and not cls.__name__.startswith("_"):
        registry[cls.name] = cls
    logs = cls.__dict__.get("logs", ())
    if not isinstance(logs, tuple) or not all(isinstance(metric, Logged) for metric in logs):
        raise TypeError(
            f'{cls.__name__}.logs is not a tuple of Logged; write logs = (Logged("name", "what it '
            'measures"),), with the comma'
        )
    for name, meaning, unit in logs:
        place = place_of_metric(suffix.lower(), name)
        metrics.declare(place, unit, meaning, cls.name, users_own=not shipped)
