"""The contract of a federated method: a client rule × a server rule, and the registry that finds them.

A `ClientRule` is the maths of ONE client, a `ServerRule` that of the server, an `Algorithm` a named pair of them.
Rules are frozen dataclasses: their fields are hyper-parameters, set from the configuration under the same names.
They draw no random numbers and read no clock, file or Ray; the engine decides where and how they run: one client
after the other, or many at once under `torch.func.vmap`. So inside a client's step nothing branches on a tensor,
calls `.item()` or changes in place what it was given.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from importlib.metadata import EntryPoint, EntryPoints
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from raysim.config.explain import explain, flatten
from raysim.config.references import load_object, place_of
from raysim.config.schema import Config, Named, PositiveScheduled, at_round
from raysim.errors import ConfigError, RaysimError, did_you_mean, in_a_line
from raysim.signals import reraise_stop
from raysim.version import __version__

if TYPE_CHECKING:
    from raysim.training.task import Batch, LocalData, Task

logger = logging.getLogger("raysim")

State = dict[str, Tensor]
Report = dict[str, Tensor]
Mode = Literal["mean", "sum", "each", "change"]
Uploads = dict[str, Mode | tuple[Mode, ...]]
Rule = TypeVar("Rule", bound="ClientRule | ServerRule")


@dataclass(frozen=True)
class Problem:
    """What a rule may know of the run before it starts: sizes only."""

    n_clients: int
    cohort: int
    size: int
    """P, the number of trainable parameters."""
    segments: tuple[int, ...] = ()
    """Lengths of the named tensors, in the order of the flat vector; they add up to P."""
    n_nonempty: int = 0
    """Clients that have any data."""
    model: str = ""
    levels: int = 0
    """Stages of the net before its classifier; 0 if it is not made of stages."""
    has_features: bool = True
    """Whether the net ends in a linear classifier on something learnt, the representation of an image."""
    lr: float = 0.0
    """The largest η_l of the run."""
    classes: int = 0


@dataclass(frozen=True)
class _Rule:
    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)

    def check(self, problem: Problem) -> None:
        """Raises ValueError("key: why") where the hyper-parameters cannot work on this problem."""

    def at(self: Rule, t: int) -> Rule:  # type: ignore[misc]  # Self cannot name the two families
        """This rule with every piecewise-constant schedule replaced by its value in round `t`."""
        due = {
            f.name: v
            for f in dataclasses.fields(self)
            if isinstance(v := getattr(self, f.name), list) and v and isinstance(v[0], tuple)
        }
        return dataclasses.replace(self, **{k: at_round(v, t) for k, v in due.items()}) if due else self


@dataclass(frozen=True)
class ClientRule(_Rule):
    """Local training, written for one client: SGD, unless you override `direction` (or `step`), and `finish` if more
    than d_i = x - y_i goes up. `init` and `finish` are called for each client by itself, steps perhaps under vmap."""

    name: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ("x",)
    """What it reads from the server's broadcast."""
    sends: ClassVar[tuple[str, ...]] = ("delta",)
    """What its report holds: vectors of floats, of the same length for every client."""
    free: ClassVar[tuple[str, ...]] = ()
    """What of that the server could make of the rest, so that it does not count as traffic."""
    private: ClassVar[bool] = True
    """Whether a step sees the client's examples through the one gradient in mode "train" only, as `privacy` wants."""

    def __init_subclass__(cls) -> None:
        _register(cls, ClientRule, CLIENTS, "Client")

    @property
    def masks(self) -> int:
        """How many independent sets of dropout masks a step wants; `batch.masked(k)` takes the k-th."""
        return 1

    @property
    def exposes(self) -> tuple[str, ...]:
        """What it sends that is made of the client's examples in another way, which `privacy` does not protect. Under
        `privacy`, a rule that names nothing here may not use `task.full_grad`, `fisher`, `sample_grads`, `input_grad`.
        """
        return ()

    @property
    def makes(self) -> bool:
        """Whether `make` is to be called: by default, if the rule has one."""
        return type(self).make is not ClientRule.make

    def make(self, shared: State, batch: Batch, task: Task) -> tuple[Batch, ...]:
        """On arrival, for each batch of one shuffled pass over the client's data that a step will meet: batches of as
        many examples to go along with the steps. Step i of the round finds what was made of batch i (from the first one
        again, where there are fewer batches than steps) as `batch.made`."""
        return ()

    def state(self, task: Task) -> State:
        """What the client keeps between rounds, as zeros of the right shapes: the keys of its row. {} for most."""
        return {}

    def init(self, shared: State, row: State, data: LocalData, task: Task) -> State:
        """On arrival of the broadcast: what the local steps of THIS round carry beside "w" (which starts at
        shared["x"] and may not be returned); gone after `finish`.

        `row` holds what `state` declared and the scalar `row["seen"]`: has this client taken part before?
        """
        return {}

    def direction(self, shared: State, state: State, batch: Batch, task: Task) -> Tensor:
        """The descent direction [P] at state["w"]; the engine then does w <- w - lr * direction. By default the
        gradient, that is local SGD; a rule that leaves this as it is gets the engine's fastest step."""
        return task.grad(state["w"], batch)

    def step(self, shared: State, state: State, batch: Batch, task: Task) -> State:
        """One local step; the general form of `direction`. Gives the whole next state, "w" included."""
        return {**state, "w": task.descend(state["w"], self.direction(shared, state, batch, task))}

    def finish(self, shared: State, state: State, row: State, data: LocalData, task: Task) -> tuple[Report, State]:
        """What is sent up (every key of `sends`) and what is kept (every key of `state`). A report key "metric/NAME"
        (a scalar) becomes the metric client/NAME, averaged over the round's clients (of NAME_max the largest)."""
        return {"delta": shared["x"] - state["w"]}, {}


@dataclass
class Cohort:
    """The clients of one round, in the order of their arrival (in step: of sampling), and a place for the server's
    diagnostics. `staleness` counts from 0: the rounds between the version that a client began with and this one."""

    round: int
    ids: list[int]
    n_clients: int
    metrics: dict[str, float] = field(default_factory=dict)
    samples: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    def report(self, **metrics: float) -> None:
        """Logs figures of this round under the rule's own names."""
        self.metrics.update({k: float(v) for k, v in metrics.items()})


class _NotAskedFor(Sequence):
    """Stands where a rule has not asked for bases."""

    def __getitem__(self, i: Any) -> Any:
        raise RaysimError("a server rule reads reports.bases, for which its class must say wants_bases = True")

    def __len__(self) -> int:
        return self[0]


NOT_ASKED_FOR = _NotAskedFor()


@dataclass
class Reports(Cohort):
    """What arrived: K reports. `weights` [K] are what the rule's `weigh` says, `versions` those that the clients began
    with, `bases` their parameters, [P] each (for a rule that `wants_bases`; not to be changed)."""

    weights: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    bases: Sequence[Tensor] = NOT_ASKED_FOR
    totals: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    rows: dict[str, list[Tensor]] = field(default_factory=dict)
    """The same as `each`, not stacked: for a rule that copies the rows anyway."""

    weighed: list[float] | None = None
    """What `weigh` was told."""

    def weigh(self, weights: Iterable[float]) -> None:
        """Says the weights p_i [K] that a rule which `weighs_late` has found. BatchNorm's statistics are averaged with
        them; where they add up to less than one, the server's present ones take the rest."""
        self.weighed = [float(p) for p in weights]

    def mean(self, key: str) -> Tensor:
        """The weighted mean of an upload over the round's clients, [P]; the same bits for any grouping."""
        return self._total("mean", key)

    def sum(self, key: str) -> Tensor:
        """The plain sum of an upload over the round's clients, [P]; for keys that `uploads` calls "sum"."""
        return self._total("sum", key)

    def change(self, key: str) -> Tensor:
        """Σ_i ω_i (u_i - what i sent last), float64 [P], where ω_i is the client's weight among ALL clients (1/N, or
        its share of all samples); for keys that `uploads` calls "change". Added up over the rounds it is the mean of
        the latest known upload of every client, with zero for those never seen."""
        return self._total("change", key)

    def _total(self, mode: str, key: str) -> Tensor:
        if (mode, key) not in self.totals:
            raise RaysimError(
                f"a server rule asks for the {mode} of '{key}', which its `uploads` does not call \"{mode}\""
            )
        return self.totals[mode, key]

    def each(self, key: str) -> Tensor:
        """Every client's upload in the order of `ids`, [K, P]; only for keys that `uploads` calls "each"."""
        return torch.stack(self.rows[key])


@dataclass(frozen=True)
class ServerRule(_Rule):
    """The server's update. `lr` is η_g, `weights` how clients are weighed (1/K or by their samples)."""

    lr: PositiveScheduled = 1.0
    weights: Literal["uniform", "samples"] = "uniform"

    name: ClassVar[str] = ""
    provides: ClassVar[tuple[str, ...]] = ("x",)
    """What it broadcasts. It may not be changed in place: clients may still be at work with it."""
    wants_bases: ClassVar[bool] = False
    """Whether `update` needs the parameters that each client began with."""
    weighs_late: ClassVar[bool] = False
    """Whether its weights depend on what arrives; `update` then tells them by `reports.weigh`."""

    def __init_subclass__(cls) -> None:
        _register(cls, ServerRule, SERVERS, "Server")

    @property
    def uploads(self) -> Uploads:
        """What it takes of which upload, in one mode or several:

        "mean": one weighted mean. "sum": one plain sum. "each": the mean, and beside it one row for each client.
        "change": the weighted sum of what is new since each client's last upload, which the client keeps.
        """
        return {"delta": "mean"}

    def weigh(self, cohort: Cohort) -> list[float]:
        """The weights of a round's means, from what is known before anybody has trained: samples, steps, staleness.

        Leaving a client out may only scale the others' weights, all by the same factor.
        """
        K, total = len(cohort.ids), sum(cohort.samples)
        return [n / total for n in cohort.samples] if self.weights == "samples" else [1 / K] * K

    def init(self, x0: Tensor, problem: Problem) -> State:
        """The state before round 0, a flat dict of tensors with fixed keys and shapes."""
        return {"x": x0}

    def broadcast(self, state: State) -> State:
        """What travels down to every client of the round."""
        return {"x": state["x"]}

    def admit(self, state: State, cohort: Cohort) -> State:
        """Before the round whose clients are `cohort`; in step: before they train."""
        return state

    def update(self, state: State, reports: Reports) -> State:
        """After it has: the next state. Large buffers may be changed in place; "x" may not."""
        raise NotImplementedError(f"{type(self).__name__} defines no update")


def normalised(weights: Iterable[float]) -> list[float]:
    """The weights, made to add up to one."""
    weights = list(weights)
    total = sum(weights)
    return [w / total for w in weights]


def overridden(rule: ClientRule, names: Iterable[str]) -> list[str]:
    """Which of these a rule has of its own, instead of what `ClientRule` does."""
    return [name for name in names if getattr(type(rule), name) is not getattr(ClientRule, name)]


PLAIN_STEP = ("step", "direction")
"""A rule without these of its own makes steps of plain SGD."""


def sums(uploads: Uploads) -> list[tuple[Mode, str]]:
    """The sums that a server rule's `uploads` amount to, as (mode, key) with mode mean, sum or change."""
    found: dict[tuple[Mode, str], None] = {}
    for key, modes in uploads.items():
        for mode in (modes,) if isinstance(modes, str) else modes:
            found["mean" if mode == "each" else mode, key] = None
    return list(found)


def with_mode(uploads: Uploads, mode: Mode) -> list[str]:
    """The keys that are taken in this mode."""
    return [key for key, modes in uploads.items() if mode == modes or (isinstance(modes, tuple) and mode in modes)]


@dataclass(frozen=True)
class Algorithm:
    """A named pair. It is found by its name if it ships with raysim or is an entry point.

    `defaults` go to other sections (what the user writes wins), `presets` to the rules' fields.
    """

    name: str
    client: type[ClientRule]
    server: type[ServerRule]
    paper: str
    state: str = "server 0, client 0"
    traffic: str = "down d, up d"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Values of the rules' fields that make this pair this algorithm."""
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        definition = sys._getframe(2)  # 0 is this function, 1 the dataclass's __init__
        if definition.f_globals.get("__name__", "").startswith(f"{SHIPPED}."):
            ALGORITHMS[self.name] = self


PLAIN = "fedavg"
"""The name of the client rule that is local SGD, and of the server rule that averages."""
CLIENTS: dict[str, type[ClientRule]] = {}
SERVERS: dict[str, type[ServerRule]] = {}
ALGORITHMS: dict[str, Algorithm] = {}


SHIPPED = "raysim.algorithms"
"""The package of the shipped methods, which is the folder algorithms/ of the repository; and the entry-point group of
other distributions' methods."""


def _register(cls: type, family: type, registry: dict, suffix: str) -> None:
    """Enter a shipped rule into its registry. The name of a rule is that of its class, without the suffix, in lower
    case: FedProxClient is `fedprox`."""
    if "name" not in cls.__dict__:
        cls.name = cls.__name__.removesuffix(suffix).lower()  # type: ignore[attr-defined]
    if cls.__module__.startswith(f"{SHIPPED}.") and not cls.__name__.startswith("_"):
        registry[cls.name] = cls  # type: ignore[attr-defined]


def discover() -> None:
    """Import the shipped methods, which enter their rules and algorithms into the registries."""
    for module in pkgutil.iter_modules(importlib.import_module(SHIPPED).__path__):
        importlib.import_module(f"{SHIPPED}.{module.name}")


def entry_points(name: str | None = None) -> list[EntryPoint]:
    """Return what other distributions offer in the entry-point group `raysim.algorithms`, nothing of it imported.

    The name of an entry point is the name of the method in a configuration. Its value is an Algorithm, a ClientRule or
    a ServerRule.
    """
    found = [point for point in _entry_points(tuple(sys.path)) if name in (None, point.name)]
    return sorted(found, key=lambda point: (point.name, _distribution(point)))


@lru_cache(maxsize=4)
def _entry_points(path: tuple[str, ...]) -> EntryPoints:
    return metadata.entry_points(group=SHIPPED)


def entry_point(name: str) -> str | None:
    """Return the reference that an entry point of this name stands for, None if there is none."""
    return next((f"{point.module}:{point.attr}" for point in entry_points(name)), None)


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


def _installed(section: str, name: str) -> Any:
    """Return what another distribution offers under a name, None if none does.

    Only the method that is asked for is imported, so a broken or clashing one stops no run but its own.

    Raises:
        ConfigError: several distributions, one of which may be raysim, have a method of this name; or it cannot be
            imported.
    """
    points = entry_points(name)
    owners = [_distribution(point) for point in points]
    if points and any(name in registry for registry in (CLIENTS, SERVERS, ALGORITHMS)):
        owners.insert(0, f"raysim {__version__}")
    if len(owners) > 1:
        raise ConfigError(
            f"{section}.name: '{name}' is a method of {' and of '.join(owners)}; uninstall all but one of them"
            f", or give one as {points[0].value}"
        )
    if not points:
        return None
    if not points[0].attr:
        raise ConfigError(
            f"{section}.name: entry point '{name}' of {owners[0]} names the module {points[0].value}; it must name an "
            "Algorithm or a rule in it, as module:NAME"
        )
    return load_object(f"{points[0].module}:{points[0].attr}", f"{section}.name")


def reference(rule: type, given: str) -> str:
    """Return the name by which a configuration finds the class of a rule again.

    Args:
        rule: the class.
        given: the name of the algorithm that brought it.

    Raises:
        ConfigError: it is defined inside a function, where nothing finds it.
    """
    registry: Mapping[str, type] = CLIENTS if issubclass(rule, ClientRule) else SERVERS
    name: str = rule.name  # type: ignore[attr-defined]
    if registry.get(name) is rule:
        return name
    if "<locals>" in rule.__qualname__:
        raise ConfigError(
            f"algorithm.name: {rule.__qualname__} of '{given}' is defined inside a function, where a resumed run could "
            "not find it; define it at the top of its module"
        )
    where, place = given.rpartition(":")[0], place_of(rule.__module__)
    if place is None:
        return f"{rule.__module__}:{rule.__qualname__}"
    home = os.path.dirname(where)
    beside = os.path.relpath(place, os.path.abspath(os.path.expanduser(home)))
    return f"{where if os.path.basename(where) == beside else os.path.join(home, beside)}:{rule.__qualname__}"


KINDS = {"client": "client rule", "server": "server rule", "algorithm": "algorithm"}


def find(section: str, name: str) -> Any:
    """Return the class (or Algorithm) that a section's name means.

    Raises:
        ConfigError: nothing has that name, or it is no such class.
    """
    discover()
    registry: Mapping[str, Any] = {"client": CLIENTS, "server": SERVERS, "algorithm": ALGORITHMS}[section]
    if ":" in name:
        return _as_part(section, name, load_object(name, f"{section}.name"))
    if name.endswith(".py"):
        raise ConfigError(f"{section}.name: which class of {name}? Give it as {name}:NAME")
    if (found := _installed(section, name)) is not None:
        return _as_part(section, name, found)
    if name in registry:
        return registry[name]
    known = [*registry, *(point.name for point in entry_points())]
    raise ConfigError(
        f"{section}.name: unknown {KINDS[section]} '{name}'{did_you_mean(name, known)}; "
        "your own is given as path.py:Class"
    )


def _as_part(section: str, name: str, found: Any) -> Any:
    """Return a user's object as this section needs it: a single rule is an algorithm with FedAvg's other half.

    Raises:
        ConfigError: it is something else.
    """
    if section == "algorithm" and isinstance(found, type):
        if issubclass(found, ClientRule):
            return Algorithm(name, found, SERVERS[PLAIN], name)
        if issubclass(found, ServerRule):
            return Algorithm(name, CLIENTS[PLAIN], found, name)
    for rule in (found.client, found.server) if isinstance(found, Algorithm) else (found,):
        if isinstance(rule, type) and issubclass(rule, _Rule) and "__dataclass_params__" not in rule.__dict__:
            raise ConfigError(f"{section}.name: put @dataclass(frozen=True) above class {rule.__name__}")
    family = {"client": ClientRule, "server": ServerRule}.get(section)
    if not (isinstance(found, Algorithm) if family is None else isinstance(found, type) and issubclass(found, family)):
        wanted = "an Algorithm, a ClientRule or a ServerRule" if family is None else f"a {family.__name__}"
        raise ConfigError(f"{section}.name: '{name}' is not {wanted}")
    return found


def catalogue(section: Literal["client", "server", "algorithm"]) -> Iterator[tuple[str, Any, str]]:
    """Yield the name, the class (or Algorithm) and the distribution of every method that a section can name.

    What other distributions offer but cannot be used (it fails on import, or its name is taken) is logged and left out.
    """
    discover()
    registry: Mapping[str, Any] = {"client": CLIENTS, "server": SERVERS, "algorithm": ALGORITHMS}[section]
    kind = {"client": ClientRule, "server": ServerRule}.get(section, Algorithm)
    for name, found in registry.items():
        yield name, found, "raysim"
    for name, points in groupby(entry_points(), key=lambda point: point.name):
        try:
            found = _installed(section, name)
        except ConfigError as error:
            logger.warning("%s", error)
            continue
        if isinstance(found, kind) or (isinstance(found, type) and issubclass(found, kind)):
            yield name, found, _distribution(next(points))


def fields(rule: type) -> list[str]:
    """Names of a rule's hyper-parameters."""
    return [f.name for f in dataclasses.fields(rule)]


def shared_keys(section: str, before: str, name: str) -> set[str]:
    """The keys that both algorithms (client rules, server rules) of these names have from the same class, so that they
    mean the same: every server's `weights`, but not GradMA's beta2 and FedAdam's."""
    try:
        old, new = (_owners(find(section, n)) for n in (before, name))
    except ConfigError:
        return set()
    return {"preset"} | {key for key, owners in new.items() if owners <= old.get(key, set())}


def _owners(found: Any) -> dict[str, set[type]]:
    """For each hyper-parameter the classes that brought it in, or gave it another meaning."""
    owners: dict[str, set[type]] = {}
    for rule in [found.client, found.server] if isinstance(found, Algorithm) else [found]:
        for key in fields(rule):
            owners.setdefault(key, set()).add(next(c for c in rule.__mro__ if key in inspect.get_annotations(c)))
    return owners


def defaults(name: str) -> Mapping[str, Any]:
    """What the algorithm of this name sets in other sections ({} if there is none of that name)."""
    try:
        return find("algorithm", name).defaults
    except ConfigError:  # said by `resolve`, with all the rest
        return {}


def _build(section: str, cls: type, given: Mapping[str, Any]) -> Any:
    for key in given:
        if key not in fields(cls):
            raise ConfigError(f"{section}.{key}: unknown key of {cls.__name__}{did_you_mean(key, fields(cls))}")
    kinds = get_type_hints(cls)
    for key, value in given.items():
        if isinstance(value, bool) and bool not in flatten(kinds[key]):  # pydantic would take true for 1
            raise ConfigError(f"{section}.{key}: {str(value).lower()} is neither a number nor a word")
    try:
        return TypeAdapter(cls).validate_python(dict(given))
    except ValidationError as error:
        raise ConfigError(explain(error, given, cls, f"{section}.")) from None
    except BaseException as error:
        reraise_stop(error)
        raise ConfigError(f"{section}.name: {cls.__name__} cannot be built: {in_a_line(error)}") from None


def resolve(config: Config) -> tuple[ClientRule, ServerRule]:
    """The two rules of a configuration. Explicit `client` and `server` sections replace the algorithm's halves."""
    discover()
    parts: dict[str, Any] = {}
    if config.algorithm is not None:
        algorithm: Algorithm = find("algorithm", config.algorithm.name)
        halves = {"client": algorithm.client, "server": algorithm.server}
        halves = {k: v for k, v in halves.items() if getattr(config, k) is None}
        given = config.algorithm.parameters
        preset = given.pop("preset", None)
        if preset is not None and preset not in algorithm.presets:
            known = did_you_mean(preset, algorithm.presets) or f" ({algorithm.name} has no presets)"
            raise ConfigError(f"algorithm.preset: unknown preset '{preset}'{known}")
        known = {f for cls in halves.values() for f in fields(cls)}
        for key in given:
            if key not in known:
                raise ConfigError(f"algorithm.{key}: unknown key of '{algorithm.name}'{did_you_mean(key, known)}")
        values = {**algorithm.settings, **(algorithm.presets[preset] if preset else {}), **given}
        for half, cls in halves.items():
            parts[half] = _build("algorithm", cls, {k: v for k, v in values.items() if k in fields(cls)})
    for half in ("client", "server"):
        section: Named | None = getattr(config, half)
        if section is not None:
            parts[half] = _build(half, find(half, section.name), section.parameters)
        elif half not in parts:
            raise ConfigError(
                f"{half}: missing; give an algorithm (algorithm=fedavg), or both a client and a server rule"
            )
    client, server = parts["client"], parts["server"]
    refuse_pair(client, server)
    return client, server


SIDES = ("client side", "server side", "both sides")


def side(client: str, server: str) -> str:
    """Where a pair of rules, given by their names, differs from local SGD and averaging, which are FedAvg's: one of
    SIDES. FedAvg itself counts as client side, as in Luo 2023's tables."""
    if server == PLAIN:
        return SIDES[0]
    return SIDES[1] if client == PLAIN else SIDES[2]


def refuse_pair(client: ClientRule, server: ServerRule) -> None:
    """Raises ConfigError where one rule needs what the other does not give; names both."""
    for key, modes in server.uploads.items():
        for mode in (modes,) if isinstance(modes, str) else modes:
            if mode not in get_args(Mode):
                hint = did_you_mean(mode, get_args(Mode))
                raise ConfigError(f"server rule '{server.name}': uploads '{key}' in an unknown mode '{mode}'{hint}")
    pair = f"client rule '{client.name}' with server rule '{server.name}'"
    if missing := [k for k in client.needs if k not in server.provides]:
        raise ConfigError(
            f"{pair}: the client needs {_quoted(missing)}, which the server does not broadcast; "
            f"pair it with a server rule that does"
        )
    if missing := [k for k in server.uploads if k not in client.sends]:
        raise ConfigError(
            f"{pair}: the server takes {_quoted(missing)}, which the client does not send; "
            f"pair it with a client rule that does"
        )


def _quoted(words: Iterable[str]) -> str:
    return ", ".join(f"'{w}'" for w in words)
