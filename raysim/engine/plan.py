"""From a configuration to a run that can start: everything resolved once, every mistake found before Ray starts."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raysim.config import explain, loading, tracking_uri
from raysim.config.references import Code, reading_once
from raysim.config.schema import Config, Data, InFlight, Named, Sync, Trace
from raysim.data import Dataset, load, split
from raysim.data.partitions import Clients, VirtualClients
from raysim.engine import file_digests, probes, rehearsal, schedule
from raysim.engine.probes import Probe
from raysim.engine.server import shapes_of_first_broadcast
from raysim.errors import ConfigError, in_a_line
from raysim.models import flat
from raysim.models.flat import Model, unfoldable
from raysim.rules import contract, registry
from raysim.rules.contract import ClientRule, Problem, ServerRule
from raysim.signals import reraise_stop
from raysim.training.pooled import why_not_pooled
from raysim.training.task import why_not_vmap
from raysim.training.trainer import Mode

logger = logging.getLogger("raysim")

VMAP_BELOW = 10_000
"""Parameters up to which vmap beats the loop on a CPU (for nets without convolutions)."""
OVERSUBSCRIBED = 4
"""How many actors may share a core on this machine before the request counts as impossible."""


@dataclass(frozen=True)
class Plan:
    """A run, ready to start. Picklable: workers build their parts from it."""

    config: Config
    client: ClientRule
    server: ServerRule
    dataset: Dataset
    clients: Clients | VirtualClients
    net: nn.Module
    problem: Problem
    mode: Mode
    """Of blocks."""
    block_size: int
    code: tuple[Code, ...] = ()
    """The users' files that rules and net are defined in."""
    sources: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    """By section, the text of each file of code that is not raysim's, to be kept with the run."""

    probes: tuple[Probe, ...] = ()
    """Measurements that the configuration asks for. They are copied before use."""

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled, the code first: the classes that follow are unpickled by its help."""
        return {"code": self.code, **self.__dict__}

    @property
    def label(self) -> str:
        """The run's short name."""
        c, pair = self.config, f"{self.client.name}-{self.server.name}"
        if c.name or c.algorithm is None:
            return c.name or pair
        known = contract.ALGORITHMS.get(c.algorithm.name)
        if known and (known.client is not type(self.client) or known.server is not type(self.server)):
            return pair  # a half was exchanged: it is no longer that algorithm
        return c.algorithm.name.split(":")[-1]

    @property
    def file_label(self) -> str:
        """The run's short name as a part of a path."""
        return self.label.replace("/", "_")

    @property
    def evaluates(self) -> bool:
        """Whether the global model is ever evaluated."""
        return bool(self.config.evaluate.every) or any(map(probes.evaluates_models, self.probes))

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.config.dtype)

    def model(self, device: str | torch.device = "cpu", unfold: bool = False) -> Model:
        """The net on a device, seen as a flat vector."""
        return Model(copy.deepcopy(self.net), self.dataset.shape, self.dataset.n_classes, self.dtype, device, unfold)

    @cached_property
    def initial(self) -> tuple[Tensor, Tensor]:
        """x_0 [P] and the BatchNorm statistics [Q] that the net came with, on the CPU."""
        return self.model().initial()

    @cached_property
    def bytes_down(self) -> int:
        """Bytes that one client receives at the start: the tensors that the server rule broadcasts and the BatchNorm
        statistics. What a run counts is measured in each round."""
        return shapes_of_first_broadcast(self.server, *self.initial, self.problem).nbytes


def prepare(source: str | Path | Mapping[str, Any], overrides: Iterable[str] | Mapping[str, Any] = ()) -> Plan:
    """Reads, checks and resolves a configuration. Raises ConfigError with one clear message for every mistake."""
    return resolve(read(source, overrides))


def read(source: str | Path | Mapping[str, Any], overrides: Iterable[str] | Mapping[str, Any] = ()) -> dict[str, Any]:
    """The configuration of one run, not yet checked. Raises ConfigError if it is of many."""
    raw = loading.read(source, overrides, keys, registry.defaults)
    if alien := [key for key in loading.parse_overrides(overrides) if key.partition(".")[0] == "sweep"]:
        raise ConfigError(f"{alien[0]}: is for a sweep, and this is one run; leave it out, or use raysim sweep")
    if raw.pop("sweep", None) is not None:
        file = "this configuration" if isinstance(source, Mapping) else source
        raise ConfigError(f"sweep: {file} describes many runs, not one; start them with: raysim sweep {file}")
    if "match" in raw:
        raise ConfigError(f"match: {source} compares two methods; start it with: raysim match {source}")
    return raw


@reading_once()
def resolve(raw: Mapping[str, Any], load: Callable[[Data], Dataset] = load) -> Plan:
    """The plan of a configuration that was read; `load` gives the data set. Raises ConfigError as `prepare` does."""
    config = explain.validate(raw)
    file_digests.check(config.files, file_digests.of_code(config))
    client, server = registry.resolve(config)
    _check_resources(config)
    _check_store(config)
    tracking_uri.absolute(config.tracking.uri)
    known = getattr(config.partition, "clients", None)
    if known is not None:
        _check_cohort(config.schedule, known)
    dataset = load(config.data)
    clients = split(config.partition, dataset, config.seed)
    _check_cohort(config.schedule, len(clients))
    if isinstance(config.schedule, InFlight):
        _check_cohort(config.schedule, int((clients.sizes > 0).sum()), "there is data for")
    config = _absolute(config)
    schedule.make(config, clients.sizes)  # reads a trace, and finds what is wrong with it
    if config.data.name == "quadratics" and config.model.name in flat.NETS and config.model.name != "quadratic":
        raise ConfigError(f"model.name: '{config.model.name}' sees only labels 0 in quadratics; use model=quadratic")
    net = flat.make_net(config, dataset.shape, dataset.n_classes)
    model = Model(copy.deepcopy(net), dataset.shape, dataset.n_classes, getattr(torch, config.dtype))
    problem = Problem(
        n_clients=len(clients),
        cohort=config.schedule.size,
        size=model.size,
        segments=model.segments,
        n_nonempty=int((clients.sizes > 0).sum()),
        model=config.model.name,
        levels=model.levels,
        has_features=model.has_features,
        classes=dataset.n_classes,
        lr=max([lr for _, lr in config.local.lr] if isinstance(config.local.lr, list) else [config.local.lr]),
    )
    for half, rule in (("client", client), ("server", server)):
        section = "algorithm" if getattr(config, half) is None else half
        try:
            rule.check(problem)
        except ValueError as error:
            raise ConfigError(f"{section}.{error}") from None
        except BaseException as error:
            reraise_stop(error)
            raise ConfigError(f"{section}: check of {half} rule '{rule.name}' failed: {in_a_line(error)}") from None
    _check_privacy(config, client, net)
    asked = probes.attached(config)
    mode, size = _block(config, client, server, model, any(map(probes.looks_at_clients, asked)))
    given = config.client
    config = config.model_copy(
        update={
            "client": _section(config.client, client, config.algorithm),
            "server": _section(config.server, server, config.algorithm),
            "algorithm": None if config.algorithm is None else Named(name=config.algorithm.name),
            "model": Named.model_validate({"name": config.model.name, **flat.arguments(config.model)}),
            "block": config.block.model_copy(update={"size": size, "mode": mode}),
        }
    )
    files = {**file_digests.of_code(config), **file_digests.of_data(config, dataset)}
    file_digests.check(config.files, files)
    recorded = config.files is not None
    config = config.model_copy(update={"files": files or None})
    plan = Plan(
        config,
        client,
        server,
        dataset,
        clients,
        net,
        problem,
        mode,
        size,
        file_digests.code(config),
        file_digests.sources(config),
        asked,
    )
    probes.check(plan)
    if not recorded:  # else the same code has been rehearsed before
        rehearsal.check(plan, "client.name" if given else "algorithm.name")
    return plan


def keys(section: str, before: str, name: str) -> set[str]:
    """The keys that mean the same under both names of a section: see `layers.read`. A net's are its own."""
    if section in ("algorithm", "client", "server"):
        return registry.shared_keys(section, before, name)
    if section == "model":
        return set()
    known = [explain.section_keys(section, n) or set() for n in (before, name)]
    return known[0] & known[1]


def _section(section: Named | None, rule: ClientRule | ServerRule, algorithm: Named | None) -> Named:
    """A rule with every hyper-parameter written out, under the name that finds it again."""
    name = section.name if section else registry.reference(type(rule), algorithm.name if algorithm else "")
    return Named.model_validate({"name": name, **{f.name: asdict(rule)[f.name] for f in fields(rule)}})


def _check_cohort(schedule: Sync | InFlight, clients: int, what: str = "partition.clients gives") -> None:
    wanted = (
        {"cohort": schedule.cohort}
        if isinstance(schedule, Sync)
        else {"arrivals": schedule.arrivals, "concurrency": schedule.places(clients)}
    )
    for key, number in wanted.items():
        if number > clients:
            raise ConfigError(
                f"schedule.{key}: {number} clients are asked for at one time, but {what} only {clients}; "
                "lower the one or raise the other"
            )


def _absolute(config: Config) -> Config:
    """With the absolute path of its trace, if it has one."""
    speeds = config.schedule.speeds
    if not isinstance(speeds, Trace):
        return config
    speeds = speeds.model_copy(update={"path": str(Path(speeds.path).expanduser().absolute())})
    return config.model_copy(update={"schedule": config.schedule.model_copy(update={"speeds": speeds})})


def _check_privacy(config: Config, client: ClientRule, net: nn.Module) -> None:
    if config.privacy is None:
        if config.algorithm and "privacy" in registry.defaults(config.algorithm.name):
            logger.warning("privacy: null leaves nothing private in algorithm '%s'", config.algorithm.name)
        return
    if not config.privacy.sigma:
        logger.warning("privacy.sigma: 0 is no noise, so nothing is private (epsilon is infinite)")
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules()):
        raise ConfigError(
            f"privacy: model '{config.model.name}' has BatchNorm, through which every example enters the others' "
            "gradients; take a net with GroupNorm, or without normalisation"
        )
    if not client.private:
        raise ConfigError(
            f"privacy: client rule '{client.name}' takes other gradients of the data beside the one that is made "
            "private; take fedavg, fedprox, fedcurv or another rule of one gradient a step"
        )
    if client.exposes:
        logger.warning(
            "privacy: client rule '%s' sends %s, which is not protected", client.name, " and ".join(client.exposes)
        )


def _check_store(config: Config) -> None:
    if config.store.dir is None:
        return
    folder = Path(config.store.dir).expanduser()
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"store.dir: {there} is no folder that can be written to; give one that is")


def _check_resources(config: Config) -> None:
    """What this machine plainly cannot give. A cluster's own resources are checked after connecting to it."""
    r = config.resources
    remote = r.executor == "ray" and (r.address or os.environ.get("RAY_ADDRESS"))
    if remote:
        return
    gpus, cores = torch.cuda.device_count(), os.cpu_count() or 1
    wanted = r.gpus * (r.actors if r.executor == "ray" else 1)
    if wanted > gpus:
        raise ConfigError(
            f"resources.gpus: {wanted:g} GPUs are asked for in all, this machine "
            f"has {gpus}; set resources.gpus=0 or give resources.address of a cluster"
        )
    if r.executor == "ray" and (r.cpus > cores or r.actors * r.cpus > OVERSUBSCRIBED * cores):
        raise ConfigError(
            f"resources.actors: {r.actors} actors of {r.cpus:g} CPUs, this machine has {cores} cores; lower "
            "resources.actors or resources.cpus, or give resources.address of a cluster"
        )


def _block(config: Config, client: ClientRule, server: ServerRule, model: Model, probed: bool) -> tuple[Mode, int]:
    """Mode and size of blocks, from the configuration alone; `probed`: single clients are measured."""
    cohort, block = config.schedule.size, config.block
    wide = min(64, ceil(cohort / 4))
    small = model.size <= VMAP_BELOW and not model.convolutional and wide >= 8
    looped = min(16, ceil(cohort / 16))  # large cohorts in many blocks, so that many actors end at one time
    sizes = {"pooled": min(128, ceil(cohort / 16)), "vmap": wide, "loop": looped}
    reasons: dict[Mode, Callable[[], str | None]] = {
        "pooled": lambda: why_not_pooled(config, client, server, model, probed),
        "vmap": lambda: (why := why_not_vmap(model)) and f"model '{config.model.name}' cannot run so ({why})",
        "loop": lambda: None,
    }
    worth = {"pooled": True, "vmap": small or config.resources.gpus > 0, "loop": True}
    mode: Mode = next(m for m in reasons if worth[m] and reasons[m]() is None) if block.mode == "auto" else block.mode
    if block.convolutions == "unfold" and (mode != "vmap" or not any(map(unfoldable, model.module.modules()))):
        lacking = f"model '{config.model.name}' has none that can be unfolded"
        what = lacking if mode == "vmap" else f"block.mode is {mode}"
        raise ConfigError(f"block.convolutions: 'unfold' is for convolutions under vmap, but {what}; leave it out")
    if block.mode != "auto" and (reason := reasons[mode]()) is not None:
        raise ConfigError(f"block.mode: '{mode}' cannot be had here: {reason}; use block.mode=loop")
    return mode, sizes[mode] if block.size == "auto" else block.size
