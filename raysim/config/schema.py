"""The configuration of a run: typed, frozen, resolved once.

`loading` reads files and overrides into one plain mapping, and `explain` turns it into a `Config`.
Nothing changes it afterwards. A section with a `name` may be shortened to it: `model=lenet` is
`model.name=lenet`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from raysim.config.identity import Identity, identity_of
from raysim.config.limited_yaml import dump_yaml, plain
from raysim.config.sections.base import (
    Named,
    PlainValue,
    Section,
    ShortForm,
    default_name,
    named,
    not_empty,
)
from raysim.config.sections.data import IID, AnyData, Partition
from raysim.config.sections.evaluation import (
    Evaluate,
    OwnMetric,
    RecordUpdates,
    Stop,
    section_that_measures,
)
from raysim.config.sections.execution import Batching, Faults, Resources
from raysim.config.sections.groups import Group
from raysim.config.sections.learning_rate import OwnStepSizes
from raysim.config.sections.local import Local
from raysim.config.sections.optimizer import PLAIN_SGD
from raysim.config.sections.phases import ClassTasks
from raysim.config.sections.privacy import ClientPrivacy, ExamplePrivacy, Privacy
from raysim.config.sections.schedule import PoissonSampling, Schedule, Sync
from raysim.config.sections.storage import Checkpointing, ClientState, Tracking

SECTIONS_WITH_NAME = (
    "data",
    "partition",
    "phases",
    "task",
    "model",
    "algorithm",
    "client",
    "server",
    "schedule",
    "client_speeds",
    "sampling",
    "optimizer",
)
"""Last keys of the sections that may be shortened to their name."""

_NESTED = {
    ("partition", "phases"),
    ("schedule", "client_speeds"),
    ("schedule", "sampling"),
    ("local", "optimizer"),
}
"""Those of them that are not on the top level."""


def may_be_a_name(section: Sequence[str]) -> bool:
    """Return whether a section may be shortened to its name: `model` may, not `data.model`.

    Args:
        section: its keys, from the top level on.
    """
    path = tuple(section[2:] if section[0] == "groups" else section)
    if len(path) == 1:
        return path[0] in SECTIONS_WITH_NAME and path[0] not in {last for _, last in _NESTED}
    return path in _NESTED


FEDAVG = "fedavg"
"""The name of the client rule that is local SGD, and of the server rule that averages."""

GENERAL = "general"
"""Family of the methods whose files are in no folder of a family."""

KEYS_WITH_DIGESTS = ("data.path", "partition.path", "model.init_from")
"""Keys that are no part of a run's identity where `files` has the digest of what they name."""


class Config(Section):
    """The configuration of a run.

    Only data, rounds and algorithm (or client and server) are required.
    """

    name: Annotated[str | None, Identity.NEVER] = None
    """Label of the run in reports; null: the method."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of every random number of the run."""
    rounds: Annotated[int, Identity.NEVER] = Field(ge=1, le=10**9)
    """Number of rounds."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of parameters and data."""
    data: Annotated[AnyData, ShortForm(named)]
    """Data set."""
    partition: Annotated[Partition, default_name("iid")] = IID()
    """How examples are divided among clients."""
    task: Annotated[Named, default_name("classification"), Identity.UNLESS_DEFAULT] = Named(
        name="classification"
    )
    """Learning task: its loss, and the metrics of evaluations. classification, multilabel,
    regression, next_token, or path.py:Class."""
    model: Annotated[Named, default_name("mlp")] = Named(name="mlp")
    """Net, and its parameters: the name of a shipped or installed net, or path.py:Class."""
    algorithm: Annotated[Named, ShortForm(named)] | None = None
    """Method: a client rule with its server rule, and their hyper-parameters. Give this, or
    `client` and `server`."""
    client: Annotated[Named, ShortForm(named)] | None = None
    """Client rule, and its hyper-parameters."""
    server: Annotated[Named, ShortForm(named)] | None = None
    """Server rule, and its hyper-parameters."""
    local: Local = Local(steps=5)
    """Local training."""
    groups: Annotated[
        dict[Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")], Group], Identity.UNLESS_DEFAULT
    ] = Field(default={})
    """Clients with a client rule or local settings of their own, by the name of the group."""
    privacy: Privacy | None = None
    """Differential privacy; null: none."""
    schedule: Annotated[Schedule, default_name("sync")] = Sync()
    """Which clients take part in a round, and when."""
    faults: Annotated[Faults, Identity.NEVER] = Faults()
    """Effects of clients' failures."""
    resources: Resources = Resources()
    """Processes and devices."""
    batching: Batching = Batching()
    """How clients share a worker's pass."""
    evaluate: Annotated[Evaluate, Identity.NEVER] = Evaluate()
    """Evaluation and probes."""
    stop: Annotated[Stop | None, Identity.UNLESS_DEFAULT] = None
    """Early stopping by a metric; null: all rounds are trained."""
    record_updates: Annotated[RecordUpdates | None, Identity.NEVER] = None
    """Updates that are kept for `raysim attack`; null: none."""
    checkpoint: Annotated[Checkpointing, Identity.NEVER] = Checkpointing()
    """Checkpoints."""
    client_state: Annotated[ClientState, Identity.NEVER] = ClientState()
    """Storage of the client state."""
    run_dir: Annotated[str | None, AfterValidator(not_empty), Identity.NEVER] = None
    """Folder of the run; null: runs/EXPERIMENT/METHOD-SEED-HASH."""
    tracking: Annotated[Tracking, Identity.NEVER] = Tracking()
    """MLflow."""
    own_metrics: Annotated[dict[str, OwnMetric] | None, Identity.NEVER] = None
    """Unit and direction of the metrics of your own files, found when a run is prepared; null: the
    run has none."""
    own_defaults: Annotated[dict[str, dict[str, PlainValue]] | None, Identity.NEVER] = None
    """Defaults of the hyper-parameters of a method of your own by section, found when a run is
    prepared; null: the method is raysim's."""
    files: dict[str, dict[str, str]] | None = None
    """Digests of the files that other keys name, found when a run is prepared: the sha256 by key
    and file, the version by key and distribution."""

    def section_of_rule(self, half: str) -> str:
        """Return the section that names a rule: "algorithm", unless another replaces it.

        Args:
            half: "client" or "server", the half of the method that the rule is.
        """
        return "algorithm" if getattr(self, half) is None else half

    def upload_key(self, group: str) -> str:
        """Return the key of the stages that change the uploads of a group's clients.

        Args:
            group: name of the group; "" for clients of no group.
        """
        has_own = group and self.groups[group].local.upload is not None
        return f"groups.{group}.local.upload" if has_own else "local.upload"

    @property
    def uploads(self) -> dict[str, tuple[Named, ...]]:
        """The stages of uploads by configuration key, with those of groups that have their own."""
        chains = {"local.upload": self.local.upload}
        for name, group in self.groups.items():
            # The key of a group without stages of its own is there already.
            chains.setdefault(self.upload_key(name), group.local.upload or ())
        return chains

    @property
    def takes_bare_gradients(self) -> bool:
        """Whether a step is plain SGD along the gradient of one mini-batch.

        There is no clipping, weight decay, private gradients, accumulation, or optimizer with
        state.
        """
        local = self.local
        changed = local.max_grad_norm or local.weight_decay or self.example_privacy
        return not changed and local.optimizer == PLAIN_SGD and local.accumulate == 1

    @property
    def example_privacy(self) -> ExamplePrivacy | None:
        """The section `privacy`, if it protects examples."""
        return self.privacy if isinstance(self.privacy, ExamplePrivacy) else None

    @property
    def client_privacy(self) -> ClientPrivacy | None:
        """The section `privacy`, if it protects clients."""
        return self.privacy if isinstance(self.privacy, ClientPrivacy) else None

    @property
    def samples_by_poisson(self) -> bool:
        """Whether cohorts are Poisson samples."""
        return isinstance(getattr(self.schedule, "sampling", None), PoissonSampling)

    @property
    def has_class_tasks(self) -> bool:
        """True if `partition.phases` divides the classes into tasks."""
        return isinstance(self.partition.phases, ClassTasks)

    @property
    def held_out(self) -> float:
        """Share of the clients that never train."""
        return self.evaluate.clients.held_out if self.evaluate.clients else 0.0

    @classmethod
    def determines_result(cls, key: str) -> bool:
        """Return whether a key can change the parameters after a round.

        Args:
            key: a dotted key of a configuration.
        """
        return Identity.NEVER not in cls.model_fields[key.partition(".")[0]].metadata

    def own_step_sizes(self) -> dict[str, OwnStepSizes]:
        """Return the users' functions of step sizes, by the keys that name them."""
        keyed = {"local.lr": self.local.lr}
        keyed |= {f"groups.{name}.local.lr": group.local.lr for name, group in self.groups.items()}
        return {key: lr for key, lr in keyed.items() if isinstance(lr, OwnStepSizes)}

    def identity(self) -> dict[str, Any]:
        """Return the part of the configuration that determines the parameters after each round."""
        whole = identity_of(self)
        whole["resources"] = self._identity_of_resources()
        if self.stop:
            whole["evaluate"] = self._identity_of_evaluations(self.stop.metric or "")
        if self.held_out:
            whole["held_out_clients"] = self.held_out
        self._replace_paths_by_contents(whole)
        return whole

    def _identity_of_evaluations(self, judged: str) -> dict[str, Any]:
        """Return the rounds of evaluations, and the settings that measure the metric of `stop`."""
        evaluate = self.evaluate
        identity: dict[str, Any] = {"every": evaluate.every}
        if evaluate.clients:
            identity["clients"] = {"every": evaluate.clients.every}
        section = section_that_measures(evaluate, judged)
        for name in ("clients", "theory", "forgetting"):
            if section is not None and section is getattr(evaluate, name):
                identity[name] = identity_of(section)
        return identity

    def _identity_of_resources(self) -> dict[str, Any]:
        """Return the threads, and the kinds of devices of the clients and of the server."""
        resources = self.resources
        identity: dict[str, Any] = {
            "threads": resources.threads,
            "device": "cuda" if resources.gpus else "cpu",
            "server_device": "cuda" if resources.server_on_gpu else "cpu",
        }
        uses_gpus = resources.gpus or resources.server_on_gpu
        if uses_gpus and not resources.deterministic:
            identity["deterministic"] = False
        return identity

    def _replace_paths_by_contents(self, whole: dict[str, Any]) -> None:
        """Replace paths by digests: contents determine the result, and not where files lie."""
        digests = {k: v for k, v in (self.files or {}).items() if self.determines_result(k)}
        for key in KEYS_WITH_DIGESTS:
            section, name = key.split(".")
            if whole[section].get(name, ...) in digests.get(key, ()):
                whole[section].pop(name)
        whole.pop("files", None)
        if digests:
            whole["files"] = {key: list(contents.values()) for key, contents in digests.items()}

    @property
    def fingerprint(self) -> str:
        """sha256 of `identity()`, in hex.

        Two runs with equal fingerprints and equally many rounds have equal bits, for one kind of
        CPU or GPU and one build of torch. Threads and execution mode are part of the fingerprint.
        """
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()

    def plain(self) -> dict[str, Any]:
        """Return the configuration as plain mappings, which read back to it."""
        return plain(self.model_dump())

    def dump(self) -> str:
        """Return YAML that reads back to this configuration."""
        return dump_yaml(self.plain())
