"""The whole configuration of a run: typed, frozen, resolved once.

A configuration is YAML in sections. It is read in layers, each over the one before: the file named by
`extends` (one level), the file itself, then `key=value` overrides with dots. `read` merges the layers into one
plain mapping, `validate` turns that into a `Config`, and nothing changes afterwards.

Sections with a `name` (data, partition, model, algorithm, client, server, schedule) may be shortened to it:
`model=lenet` is `model.name=lenet`. Where a later layer changes the name, it keeps those keys of the earlier
layer that the new name knows too.
"""

from __future__ import annotations

import hashlib
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from raysim.errors import ConfigError, did_you_mean

NAMED = ("data", "partition", "model", "algorithm", "client", "server", "schedule", "speeds")


def _check_schedule(value: float | list[tuple[int, float]]) -> float | list[tuple[int, float]]:
    if isinstance(value, list):
        starts = [start for start, _ in value]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError("a schedule is a list of [first round, value], rounds ascending from 0")
    return value


Positive = Annotated[float, Field(gt=0)]


def at_round(value: float | list, t: int) -> float:
    """The value of a `Scheduled` in round `t`."""
    if not isinstance(value, list):
        return value
    return [v for start, v in value if start <= t][-1]


def _positive_throughout(value: Any) -> Any:
    if min([v for _, v in value] if isinstance(value, list) else [value]) <= 0:
        raise ValueError("must be greater than 0 in every round")
    return value


def _unit_throughout(value: Any) -> Any:
    if not all(0 <= v < 1 for v in ([v for _, v in value] if isinstance(value, list) else [value])):
        raise ValueError("must be at least 0 and below 1 in every round")
    return value


if TYPE_CHECKING:  # a rule sees the number that is due in its round
    Scheduled = float
    PositiveScheduled = float
    UnitScheduled = float
else:
    Scheduled = Annotated[float | list[tuple[int, float]], AfterValidator(_check_schedule)]
    """A number, or a piecewise-constant schedule over rounds: a list of [first round, value]."""
    PositiveScheduled = Annotated[Scheduled, AfterValidator(_positive_throughout)]
    UnitScheduled = Annotated[Scheduled, AfterValidator(_unit_throughout)]
    """A factor of decay: at least 0, below 1."""


class Section(BaseModel):
    """A frozen mapping with known keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class Named(BaseModel):
    """A section whose keys beside `name` belong to what is named (a model, a rule) and are checked there."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False, protected_namespaces=())
    name: str

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Data(Section):
    """Which examples. `augment: null` does what is usual for the data set (crop and flip for CIFAR)."""

    name: str
    root: str | None = None
    path: str | None = None
    download: bool = False
    augment: bool | None = None


def slow_clients(n_clients: int, fraction: float) -> int:
    """How many clients are slow: a fraction of all, at least one."""
    return max(1, round(fraction * n_clients))


class IID(Section):
    """Shuffled and cut into equal parts (sizes differ by at most one)."""

    name: Literal["iid"] = "iid"
    clients: int = Field(default=100, ge=1)


class Dirichlet(Section):
    """Label skew by Dirichlet(alpha). `class_over_clients` (Luo 2023) cuts each class over the clients, sizes
    come out very unequal; `client_over_classes` (Hsu 2019, FedDyn) draws a class mix per client, sizes equal.

    `min_samples` are given to every client beforehand, as Luo 2023 does; with `redraw` the whole is drawn again until
    every client has so many, as many benchmarks do.
    """

    name: Literal["dirichlet"]
    clients: int = Field(default=100, ge=1)
    alpha: Positive
    kind: Literal["class_over_clients", "client_over_classes"] = "class_over_clients"
    min_samples: int = Field(default=2, ge=0)
    redraw: int = Field(default=0, ge=0)


class SlowClass(Section):
    """Dirichlet(alpha) over the clients for every class but one: of class `label` all examples go, evenly, to the last
    `slow` (a fraction) of the clients, who are those that `schedule.speeds: two_speed` makes slow (Jiang X. 2023)."""

    name: Literal["slow_class"]
    clients: int = Field(default=100, ge=2)
    alpha: Positive
    label: int = Field(default=9, ge=0)
    slow: float = Field(default=0.1, gt=0, lt=1)


class Shards(Section):
    """Sorted by label and dealt out in shards, `classes` shards to each client (McMahan 2017)."""

    name: Literal["shards"]
    clients: int = Field(default=100, ge=1)
    classes: int = Field(default=2, ge=1)


class HeavyTail(Section):
    """One or two classes for each client, sizes heavy-tailed: 1 + floor(k), k ~ lognormal(mean, sigma), at most
    `max_samples` (after Xu 2022, whose generator is not published)."""

    name: Literal["heavy_tail"]
    clients: int = Field(default=5000, ge=1)
    classes: Literal[1, 2] = 1
    mean: float = 1.25
    sigma: Positive = 1.0
    max_samples: int = Field(default=100, ge=2)


class Natural(Section):
    """The data set's own users or sources; `clients` merges them at random into that many."""

    name: Literal["natural"]
    clients: int | None = Field(default=None, ge=1)


class FromFile(Section):
    """Index lists from a file: a JSON list of lists, or an .npz of arrays `indices` and `offsets`."""

    name: Literal["file"]
    path: str


class Virtual(Section):
    """Any number of clients, each a keyed draw of `samples` examples (with replacement across clients). Nothing
    is stored, so a million clients cost nothing."""

    name: Literal["virtual"]
    clients: int = Field(ge=1)
    samples: int = Field(default=20, ge=1)


Partition = Annotated[
    IID | Dirichlet | SlowClass | Shards | HeavyTail | Natural | FromFile | Virtual, Field(discriminator="name")
]


class Local(Section):
    """Local training: `steps` mini-batches that continue where the client's last round stopped, or whole `epochs`.

    `batch` is the size, or `full` for all of the client's data. `weight_decay` is added to every parameter whose
    name lacks "bias" (as Luo 2023's code does); `clip` bounds the norm of each step's direction.
    """

    steps: int | None = Field(default=None, ge=1)
    epochs: int | None = Field(default=None, ge=1)
    batch: Annotated[int, Field(ge=1)] | Literal["full"] = 64
    lr: PositiveScheduled = 0.01
    weight_decay: float = Field(default=0.0, ge=0)
    clip: Positive | None = None

    @model_validator(mode="before")
    @classmethod
    def _steps_or_epochs(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            if values.get("steps") is not None and values.get("epochs") is not None:
                raise ValueError("give either 'steps' or 'epochs', not both")
            if values.get("steps") is None and values.get("epochs") is None:
                values = {**values, "steps": 5}
        return values


class Constant(Section):
    """Every task takes one unit of virtual time."""

    name: Literal["constant"] = "constant"


class UniformArrival(Section):
    """Whoever is in flight is as likely as anybody to arrive next: exponential times with mean 1, which have no memory.
    So the K arrivals of a K-async round are K of N clients, uniformly at random (Zhou et al. 2022)."""

    name: Literal["uniform_arrival"] = "uniform_arrival"


class Jittered(Section):
    """`jitter`: each task's time is multiplied by exp(jitter z - jitter²/2), z standard normal, whose mean is 1."""

    jitter: float = Field(default=0.1, ge=0, le=5)


class Lognormal(Jittered):
    """A client's mean time is exp(sigma z), drawn once."""

    name: Literal["lognormal"]
    sigma: float = Field(default=0.5, ge=0, le=5)


class TwoSpeed(Jittered):
    """The last `slow` (a fraction, rounded, at least one) of the clients, by their numbers, take `factor` times as long
    as the others."""

    name: Literal["two_speed"]
    slow: float = Field(default=0.1, gt=0, lt=1)
    factor: float = Field(default=2.0, gt=0)


class ByData(Jittered):
    """Times are proportional to a client's number of examples; a client of average size takes 1."""

    name: Literal["data"]


class Trace(Jittered):
    """Measured speeds, a CSV file with the columns client, seconds_per_sample, down, up: a task takes down + up +
    seconds_per_sample times the samples it trains on. Virtual time is then in seconds."""

    name: Literal["trace"]
    path: str
    jitter: float = Field(default=0.0, ge=0, le=5)


Speeds = Annotated[Constant | UniformArrival | Lognormal | TwoSpeed | ByData | Trace, Field(discriminator="name")]


class Dropouts(Section):
    """With probability `rate` a task never arrives: its client is gone when it should have, and comes back after
    `rejoin` units of virtual time (null: never), to start with the model of that time."""

    rate: float = Field(gt=0, le=1)
    rejoin: float | None = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _somebody_arrives(self) -> Dropouts:
        if self.rate == 1 and self.rejoin is not None:
            raise ValueError("with a 'rate' of 1 every task is lost, for ever; lower it")
        return self


class Availability(Section):
    """A client takes work during the first `open` of every `period` units of its own day, which begins at a time of
    its own. What it has begun it finishes."""

    period: Positive
    open: Positive

    @model_validator(mode="after")
    def _opens_and_closes(self) -> Availability:
        if self.open >= self.period:
            raise ValueError(f"'open' must be shorter than 'period' ({self.period:g})")
        return self


class Clocked(Section):
    """What time a client takes, and when it is there."""

    speeds: Annotated[Speeds, BeforeValidator(lambda v: _named(v))] = Constant()
    dropouts: Dropouts | None = None
    availability: Availability | None = None


class Sync(Clocked):
    """Rounds in step: `cohort` clients, uniformly without replacement, all awaited; those that take longer than
    `deadline` are left behind."""

    name: Literal["sync"] = "sync"
    cohort: int = Field(default=10, ge=1)
    deadline: Positive | None = None

    @property
    def size(self) -> int:
        """How many clients a round has at most."""
        return self.cohort


class KAsync(Clocked):
    """`concurrency` clients (null: all that have data) train all the time. A round takes the first `arrivals` of them;
    these wait for its end and start again with the new model, the others go on with the one they have. An arrival more
    than `max_staleness` rounds behind is discarded, and its client starts again."""

    name: Literal["kasync"]
    arrivals: int = Field(default=10, ge=1)
    concurrency: int | None = Field(default=None, ge=1)
    max_staleness: int | None = Field(default=None, ge=0)
    speeds: Annotated[Speeds, BeforeValidator(lambda v: _named(v))] = UniformArrival()

    @property
    def size(self) -> int:
        """How many clients a round has at most."""
        return self.arrivals

    @model_validator(mode="after")
    def _enough_in_flight(self) -> KAsync:
        if self.concurrency is not None and self.arrivals > self.concurrency:
            raise ValueError(
                f"'arrivals' ({self.arrivals}) cannot be more than 'concurrency' ({self.concurrency}), "
                "the clients that train at one time"
            )
        return self


class Buffered(KAsync):
    """As K-async, but the place of a client that has arrived is given at once to one that is idle, with the model as it
    stands (Nguyen et al. 2022). Who has arrived rests until the round's end, so with `concurrency` everybody this is
    K-async."""

    name: Literal["buffered"]  # type: ignore[assignment]


Schedule = Annotated[Sync | KAsync | Buffered, Field(discriminator="name")]


class Faults(Section):
    """What a client's exception or non-finite update does: stop the run, or drop that client and count it."""

    on_client_error: Literal["stop", "drop"] = "stop"


class Resources(Section):
    """Where it runs. `cpus`, `gpus` (a share of one, or more) and `threads` are for each ClientActor; `server_gpus` is
    the share of the server and of the evaluator each (0: they use CPUs), `server_threads` how many threads share the
    server's inner products (null: its cores, four at most; the bits do not depend on it); `timeout` (seconds) bounds
    every wait."""

    executor: Literal["ray", "inline"] = "ray"
    actors: int = Field(default=2, ge=1)
    cpus: float = Field(default=1, ge=0)
    gpus: float = Field(default=0, ge=0)
    server_gpus: float = Field(default=0, ge=0)
    threads: int = Field(default=1, ge=1)
    server_threads: int | None = Field(default=None, ge=1)
    address: str | None = None
    timeout: Positive = 600.0


class Block(Section):
    """How clients share a worker's pass: `loop` one after the other, `vmap` side by side, `size` at once."""

    size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    mode: Literal["auto", "loop", "vmap"] = "auto"


class Evaluate(Section):
    """How often the global model meets the test set (0: never; the last round always, if ever); `per_class`: with the
    accuracy on each class's examples."""

    every: int = Field(default=1, ge=0)
    batch: int = Field(default=1000, ge=1)
    per_class: bool = False


class Checkpoint(Section):
    """How often the complete state is written to `<run_dir>/checkpoints/` (0: never), and how many are kept."""

    every: int = Field(default=50, ge=0)
    keep: int = Field(default=2, ge=1)


def _bytes(value: Any) -> Any:
    """2GB, "512 MB" or "1.5 GiB" as a number of bytes; anything else as it is."""
    units = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*((?:[KMGT]I?)?)B?\s*", value.upper())
    if match is None:
        raise ValueError("expected a number of bytes, or one with a unit such as 512MB or 4GB")
    return int(float(match[1]) * units[match[2]])


class Store(Section):
    """What clients keep between rounds (SCAFFOLD's c_i, say): `memory` bytes of it in RAM (a number, or 512MB, 4GB,
    4GiB), the rest in `<run_dir>/rows`, or in a folder of the run's own in `dir`."""

    memory: Annotated[int, Field(ge=0), BeforeValidator(_bytes)] = 2_000_000_000
    dir: str | None = None


class Tracking(Section):
    """MLflow. `required: false` lets a run start while the server is down; the spool keeps what it could not send."""

    uri: str = "sqlite:///mlflow.db"
    experiment: str = "raysim"
    required: bool = True


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _default(name: str) -> BeforeValidator:
    """A section that may leave out its name, or be nothing but a name."""
    return BeforeValidator(lambda v: {"name": name, **_named(v)} if isinstance(v, Mapping | str) else v)


class Config(Section):
    """Everything a run needs. Only data, rounds and the algorithm (or client and server) have no default."""

    name: str | None = None
    seed: int = Field(default=0, ge=0)
    rounds: int = Field(ge=1)
    dtype: Literal["float32", "float64"] = "float32"
    data: Annotated[Data, BeforeValidator(_named)]
    partition: Annotated[Partition, _default("iid")] = IID()
    model: Annotated[Named, _default("mlp")] = Named(name="mlp")
    algorithm: Annotated[Named, BeforeValidator(_named)] | None = None
    client: Annotated[Named, BeforeValidator(_named)] | None = None
    server: Annotated[Named, BeforeValidator(_named)] | None = None
    local: Local = Local(steps=5)
    schedule: Annotated[Schedule, _default("sync")] = Sync()
    faults: Faults = Faults()
    resources: Resources = Resources()
    block: Block = Block()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    store: Store = Store()
    run_dir: str | None = None
    tracking: Tracking = Tracking()

    _NOT_THE_RESULT: ClassVar = ("name", "rounds", "evaluate", "checkpoint", "store", "run_dir", "tracking")

    def identity(self) -> dict[str, Any]:
        """The part of the configuration that determines the parameters after each round."""
        whole = self.model_dump(mode="json", exclude=set(self._NOT_THE_RESULT))
        r = self.resources
        server = r.gpus if r.executor == "inline" else r.server_gpus
        devices = {"device": "cuda" if r.gpus else "cpu", "server_device": "cuda" if server else "cpu"}
        whole["resources"] = {"threads": r.threads, **devices}
        whole["data"] = {k: v for k, v in whole["data"].items() if k not in ("root", "download")}
        return whole

    @property
    def fingerprint(self) -> str:
        """A stable hash (sha256, hex) of `identity()`: equal fingerprints, equal bits (on one kind of machine)."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()

    def dump(self) -> str:
        """YAML that reads back to this configuration."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


class _Loader(yaml.SafeLoader):
    """Safe YAML that also reads 1e-3 as a number, and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [str(k) for i, k in enumerate(keys) if k in keys[:i]]:
            raise yaml.constructor.ConstructorError(None, None, f"'{twice[0]}' is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _shipped_files() -> dict[str, Path]:
    package = Path(__file__).resolve().parent
    folders = (package / "configs", package.parent / "configs")
    return {str(p.relative_to(f)).removesuffix(".yaml"): p for f in folders for p in sorted(f.rglob("*.yaml"))}


def shipped() -> dict[str, str]:
    """Name and first line of comment of every configuration that comes with raysim."""
    return {name: path.read_text().splitlines()[0].lstrip("# ") for name, path in _shipped_files().items()}


Keys = Callable[[str, str, str], Iterable[str]]
"""(section, old name, new name) -> the keys that mean the same under both."""


def find(source: str | Path, folder: Path | None = None) -> Path:
    """The file a configuration's name means: a path, or a name among the configurations shipped with raysim."""
    text = str(source)
    files = _shipped_files()
    tried = [(folder or Path()) / text, files.get(text.removeprefix("configs/").removesuffix(".yaml"))]
    for path in tried:
        if path is not None and path.is_file():
            return path
    raise ConfigError(f"no configuration '{source}': neither a file nor a shipped one{did_you_mean(text, files)}")


def read(
    source: str | Path | Mapping[str, Any],
    overrides: Iterable[str] | Mapping[str, Any] = (),
    keys: Keys | None = None,
    defaults: Callable[[str], Mapping[str, Any]] = lambda name: {},
) -> dict[str, Any]:
    """Reads a file (or mapping) with what it extends, and lays the overrides over it.

    Args:
        source: a path, the name of a shipped configuration, or a mapping.
        overrides: "key=value" with dots, or a mapping of the same.
        keys: tells which keys mean the same under another name, so that changing a name keeps only those.
        defaults: what an algorithm of this name sets in other sections. They enter with the layer that names the
            algorithm, below that layer's own keys.
    """
    if isinstance(source, Mapping):
        layers = [dict(source)]
    else:
        path = find(source)
        layers = [_yaml(path)]
        if (parent := layers[0].pop("extends", None)) is not None:
            try:
                below = _yaml(find(parent, path.parent))
            except ConfigError as error:
                raise ConfigError(f"{path}: extends: {error}") from None
            if "extends" in below:
                raise ConfigError(f"{path}: extends '{parent}', which extends another; only one level is allowed")
            layers.insert(0, below)
    layers.append(_nested(parse_overrides(overrides)))
    merged: dict[str, Any] = {}
    for i, layer in enumerate(layers):
        algorithm = _named(layer.get("algorithm"))
        name = algorithm.get("name") if isinstance(algorithm, Mapping) else None
        replaced = any(_names_method(above) for above in layers[i + 1 :])
        brought = defaults(name) if isinstance(name, str) and not replaced else {}
        merged = merge(merged, merge(brought, layer, keys), keys)
    return merged


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(), Loader=_Loader)
    except yaml.YAMLError as error:
        text = " ".join(str(error).replace('in "<unicode string>", ', "").split())
        raise ConfigError(f"{path}: not valid YAML: {text}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if content is None:
        raise ConfigError(
            f"{path}: is empty; a configuration is a mapping of sections, at least data, rounds and algorithm"
        )
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path}: a configuration is a mapping of sections, such as 'rounds: 10'")
    return content


def parse_overrides(given: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """ "key=value" texts as a mapping from dotted keys to YAML values; a mapping comes back as it is."""
    if isinstance(given, Mapping):
        return dict(given)
    values = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"override '{text}': expected key=value, say rounds=10 or local.lr=0.1")
        try:
            values[key] = yaml.load(value, Loader=_Loader)
        except yaml.YAMLError:
            raise ConfigError(f"override '{text}': '{value}' is not a valid value") from None
    return values


def _nested(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested sections. `algorithm=x` beside `algorithm.beta1=0.5` names the same section."""
    layer: dict[str, Any] = {}
    for key, value in overrides.items():
        place, (*path, last) = layer, key.split(".")
        for part in path:
            place[part] = place = _named(place.get(part, {})) if part in NAMED else place.get(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"override '{key}': '{part}' was already given a plain value")
        value = _named(value) if last in NAMED else value
        before = place.get(last)
        if isinstance(value, Mapping):
            value = {**before, **value} if isinstance(before, Mapping) else dict(value)
        place[last] = value
    return layer


def merge(below: Mapping[str, Any], above: Mapping[str, Any], keys: Keys | None = None) -> dict[str, Any]:
    """One layer over another, section by section."""
    result = dict(below)
    if above.get("algorithm") is not None:
        result = {k: v for k, v in result.items() if k not in ("client", "server")}
    elif _names_method(above):
        result.pop("algorithm", None)
    for key, value in above.items():
        result[key] = _laid_over(key, result.get(key), value, keys)
    return result


def _laid_over(key: str, old: Any, value: Any, keys: Keys | None) -> Any:
    """A section, or one within a section, over an older one; any other value replaces the old one."""
    if key in NAMED:
        old, value = _named(old), _named(value)
    if not isinstance(old, dict) or not isinstance(value, dict):
        return value
    if key in NAMED and value.get("name", old.get("name")) != old.get("name"):
        same = keys(key, str(old.get("name")), str(value["name"])) if keys else ()
        old = {k: v for k, v in old.items() if k in same}
    if key == "local":
        rival = {"steps": "epochs", "epochs": "steps"}
        old = {k: v for k, v in old.items() if rival.get(k) not in value}
    return {**old, **{k: _laid_over(k, old.get(k), v, keys) for k, v in value.items()}}


def _names_method(layer: Mapping[str, Any]) -> bool:
    """Whether a layer says by itself which method runs."""
    given = {k for k in ("algorithm", "client", "server") if layer.get(k) is not None}
    return "algorithm" in given or given == {"client", "server"}


def section_keys(section: str, name: str) -> set[str] | None:
    """The keys of a section whose names are known here (data, partition, schedule, speeds), else None."""
    for model in _options(section):
        if not _names(model) or name in _names(model):
            return set(model.model_fields)
    return None


def _options(section: str) -> list[type[Section]]:
    """What a section may be."""
    where = Clocked if section == "speeds" else Config
    return [
        m for m in _flatten(where.model_fields[section].annotation) if isinstance(m, type) and issubclass(m, Section)
    ]


def choices(section: str) -> dict[str, type[Section]]:
    """What a section (partition, schedule, speeds) may be, by name."""
    return {name: m for m in _options(section) for name in _names(m)}


def validate(raw: Mapping[str, Any]) -> Config:
    """The typed configuration, or a ConfigError that names every wrong key, the nearest right one and the fix."""
    _refuse_switches(raw)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain(error, raw, Config)) from None


def _refuse_switches(raw: Mapping[str, Any], models: Sequence[type[BaseModel]] = (), above: str = "") -> None:
    """Pydantic would take true for 1. Sections whose keys are checked elsewhere are left to those who do."""
    for key, value in raw.items():
        fields = [m.model_fields[key] for m in models or (Config,) if key in m.model_fields]
        inner = [a for field in fields for a in _flatten(field.annotation)]
        if isinstance(value, bool) and fields and bool not in inner:
            raise ConfigError(
                f"{above}{key}: {str(value).lower()} is neither an integer nor another number, nor a word"
            )
        if isinstance(value, Mapping) and (sections := [m for m in inner if _is_section(m)]):
            _refuse_switches(value, sections, f"{above}{key}.")


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def explain(error: ValidationError, raw: Any, model: type, prefix: str = "") -> str:
    """One line for each mistake that pydantic found in `raw`, in the words of someone editing the file."""
    lines: dict[str, str] = {}
    for item in error.errors():
        parts = [str(part) for part in item["loc"]]
        branch = next((i for i, part in enumerate(parts) if part.startswith(("list[", "function-after[_check"))), None)
        parents = [part for i, part in enumerate(parts[:branch]) if not _is_branch(part, parts[i - 1] if i else "")]
        key = ".".join([*filter(None, [prefix.rstrip(".")]), *parents])
        *above, last = parents or [""]
        given, kind = item["input"], item["type"]
        if branch is not None:
            message = item["msg"].removeprefix("Value error, ") if kind == "value_error" else ""
            text = message or "expected a finite number, or a list of [first round, value] with rounds ascending from 0"
            given = _at(raw, parents) if not message else given
        elif kind in ("extra_forbidden", "unexpected_keyword_argument"):
            text = "unknown key" + did_you_mean(last, _keys_at(model, above, raw))
            given = {}
        elif kind in ("missing", "missing_argument"):
            text, given = f"missing; give it in the file or as {key}=…", {}
        elif kind == "union_tag_invalid":
            context = item.get("ctx", {})
            names = re.findall(r"'(\w+)'", context["expected_tags"])
            key, text, given = (
                f"{key}.name",
                f"unknown name '{context['tag']}'{did_you_mean(context['tag'], names)}",
                {},
            )
        elif kind == "union_tag_not_found":
            key, text, given = f"{key}.name", "missing; give it a name", {}
        elif kind in ("model_type", "model_attributes_type", "dict_type", "dataclass_type"):
            text = "expected a section, a mapping of keys"
        elif kind == "invalid_key":
            text, given = "a key must be a word", {}
        else:
            message = item["msg"].removeprefix("Value error, ")
            text = (message[:1].lower() + message[1:]).replace("valid tuple", "list").replace("valid list", "list")
        if given is None or isinstance(given, str | int | float | list | tuple):
            text += f" (given: {given!r})"
        if key not in lines or branch is not None:
            lines[key] = f"{key}: {text}"
        elif "expected a finite number" not in lines[key] and text not in lines[key]:
            lines[key] += f", or {text}"
    return "\n".join(lines.values())


def _at(raw: Any, path: list[str]) -> Any:
    """What stands at a place of the raw configuration, {} if that cannot be told."""
    for part in path:
        raw = raw.get(part, {}) if isinstance(raw, Mapping) else {}
    return raw


def _is_branch(part: str, above: str) -> bool:
    """Pydantic puts the branch of a union into the path of an error; a user does not know it."""
    named = above in ("partition", "schedule", "speeds") and any(part in _names(m) for m in _options(above))
    return named or part in ("int", "float", "constrained-int") or "[" in part or "(" in part


def _keys_at(model: Any, path: list[str], raw: Any) -> list[str]:
    for part in path:
        if not (isinstance(model, type) and issubclass(model, BaseModel)) or part not in model.model_fields:
            return []
        raw = _named(raw.get(part)) if isinstance(raw, Mapping) else None
        options = [
            m for m in _flatten(model.model_fields[part].annotation) if isinstance(m, type) and issubclass(m, BaseModel)
        ]
        named = [m for m in options if isinstance(raw, dict) and raw.get("name") in _names(m)]
        model = (named or options or [None])[0]
    return list(model.model_fields) if model is not None and hasattr(model, "model_fields") else []


def _flatten(annotation: Any) -> list[Any]:
    inner = [a for arg in typing.get_args(annotation) for a in _flatten(arg)]
    return inner or [annotation]


def _names(model: type[BaseModel]) -> tuple:
    return typing.get_args(model.model_fields["name"].annotation) if "name" in model.model_fields else ()
