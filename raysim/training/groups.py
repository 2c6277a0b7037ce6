"""What the trainer of a group of clients needs: the group, and what all groups share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from raysim.config.schema import Config
from raysim.data import Examples
from raysim.data.partition.clients import Clients, VirtualClients
from raysim.models.flat import Model
from raysim.rules.contract import ClientRule, ServerRule
from raysim.rules.public import PublicData
from raysim.rules.task import LocalData
from raysim.rules.upload_stages import UploadStage
from raysim.training.personal import PersonalParts


@dataclass(frozen=True)
class ClientGroup:
    """One of the sections of `groups`, or all clients that are in none."""

    name: str
    """Its name in the configuration; "" for the clients that are in none."""
    rule: ClientRule
    """The client rule of its clients."""
    config: Config
    """The configuration of the run, with the local settings of its clients."""
    stages: tuple[UploadStage, ...] = ()
    """The stages that change its clients' uploads, with their parameters."""


@dataclass(frozen=True)
class WorkerParts:
    """What the trainers of all groups of a worker share."""

    server: ServerRule
    """The server rule, which declares the uploads."""
    model: Model
    """The net."""
    x0: Tensor
    """[P], the initial parameters of the run."""
    examples: Examples
    """The training set, on the device of the model."""
    clients: Clients | VirtualClients
    """The positions of each client's examples."""
    personal: PersonalParts | None = None
    """The personal parts of the model; None: those of configuration and rule."""
    public: PublicData | None = None
    """The public examples, if a client rule needs them."""
    tests: Callable[[int, int], LocalData] | None = None
    """Returns the test examples of a client in a round; None if clients have none."""
    vals: Callable[[int, int], LocalData] | None = None
    """Returns the validation examples of a client in a round; None if clients have none."""
    measures: Mapping[str, Callable[..., dict[str, Any]]] = field(default_factory=dict)
    """Functions of probes that measure a client, by the name of the probe; see `Measure`."""
    all_per_client: bool = False
    """Whether the server receives every upload client by client."""
