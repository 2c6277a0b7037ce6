"""The plan of a run, which describes it completely, and the probes that measure along the way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import ConfigDict
from torch import Tensor, nn

from raysim.config.objects.python_objects import PythonObject
from raysim.config.references import Code
from raysim.config.schema import Config
from raysim.config.sections.local import Local
from raysim.data import Dataset, Examples
from raysim.data.partition.clients import Clients, VirtualClients
from raysim.engine.driver_environment import EnvironmentOfDriver
from raysim.models.checks.against_pytorch import check_same_outputs
from raysim.models.flat import Model
from raysim.rules import contract
from raysim.rules.batch import Batch
from raysim.rules.contract import ClientRule, ServerRule
from raysim.rules.methods.registry import source_of
from raysim.rules.rule import Problem
from raysim.rules.tasks.learning_task import LearningTask, TaskMetric
from raysim.rules.upload_stages import UploadStage
from raysim.rules.uploads import with_mode
from raysim.server.collusion import Collusion, colludes
from raysim.server.first_broadcast import shapes_of_first_broadcast
from raysim.server.round_cohort import RoundCohort
from raysim.system.torchvision_operators import OperatorsOfDriver
from raysim.training.batches.batch_order import local_steps
from raysim.training.client_evaluator import uses_own_models
from raysim.training.client_start import PreparedClient
from raysim.training.groups import ClientGroup
from raysim.training.messages import Broadcast
from raysim.training.personal import PersonalParts, personal_parts
from raysim.training.trainers.trainer import Trainer, TrainingMode
from raysim.training.uploads.client_update import ClientUpdate

SAMPLE_EXAMPLES = 6
"""Number of real examples on which the net is checked."""


@dataclass(frozen=True)
class Plan:
    """A run that is ready to start. It can be pickled: workers build their parts from it."""

    config: Config
    """The resolved configuration, with every default and every automatic choice written out."""

    client: ClientRule
    """The client rule, with its hyper-parameters."""

    server: ServerRule
    """The server rule, with its hyper-parameters."""

    dataset: Dataset
    """The data set, with its training and test examples."""

    clients: Clients | VirtualClients
    """The partition of the training examples over the clients."""

    net: nn.Module
    """The net with its initial parameters, on the CPU."""

    problem: Problem
    """The facts about data, clients and net that the rules may use."""

    mode: TrainingMode
    """The mode in which a worker trains the clients of a block."""

    block_size: int
    """The largest number of clients in a block."""

    learning_task: LearningTask
    """Learning task of the net."""

    metrics: tuple[TaskMetric, ...]
    """The metrics of the evaluations."""

    code: tuple[Code | PythonObject, ...] = ()
    """The users' files and objects that define rules and net."""

    sources: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    """The text of each file of users' code, by section and path; the run directory keeps a copy."""

    stages: tuple[UploadStage, ...] = ()
    """The stages of `local.upload`, with their parameters."""

    groups: tuple[ClientGroup, ...] = ()
    """The groups of clients with a rule or local settings of their own."""

    members: np.ndarray | None = None
    """[N], the group of each client from 1, 0 for none; None without groups."""

    probes: tuple[Probe, ...] = ()
    """The probes that the configuration names. They are copied before use."""

    outputs: Tensor | None = None
    """Outputs of the initial net on a few examples, which are the same in every process."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle; unpickling the other fields needs the first ones."""
        before_fields = {"environment": EnvironmentOfDriver(), "operators": OperatorsOfDriver()}
        state = {**before_fields, "code": self.code, **self.__dict__}
        # Workers need no idle model for what is derived of it.
        state["_derived"] = self._derived
        state.pop("idle_model", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the fields; `environment` and `operators` have done their work."""
        del state["environment"], state["operators"]
        self.__dict__.update(state)

    @property
    def label(self) -> str:
        """The run's short name."""
        config = self.config
        rule_pair = f"{self.client.name}-{self.server.name}"
        if config.name or config.algorithm is None:
            return config.name or rule_pair
        algorithm = contract.ALGORITHMS.get(config.algorithm.name)
        if algorithm and (
            algorithm.client is not type(self.client) or algorithm.server is not type(self.server)
        ):
            # One of the two rules was replaced, so the algorithm's name would mislead.
            return rule_pair
        return config.algorithm.name.split(":")[-1]

    @property
    def file_label(self) -> str:
        """The run's short name, usable as part of a path."""
        return self.label.replace("/", "_")

    @property
    def evaluates(self) -> bool:
        """True if the run evaluates the global model at least once."""
        return bool(self.config.evaluate.every) or any(map(evaluates_models, self.probes))

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of parameters and examples."""
        return getattr(torch, self.config.dtype)

    def model(self, device: str | torch.device = "cpu") -> Model:
        """Return a copy of the net on a device, with its parameters as one flat vector.

        Args:
            device: the device of the copy.

        Raises:
            ConfigError: the net gives other outputs in this process than where the run was planned.
        """
        model = Model(
            # One for each caller: inline, trainer and evaluator are in one process.
            copy.deepcopy(self.net),
            self.dataset.shape,
            self.problem.classes,
            self.dtype,
            device,
            learning_task=self.learning_task,
            sample=sample_batch(self.dataset, self.dtype),
            name=self.config.model.name,
        )
        if self.outputs is not None:
            check_same_outputs(model, self.outputs)
        return model

    @cached_property
    def idle_model(self) -> Model:
        """The net on the CPU for names, masks and first values, kept as long as the plan.

        Nothing trains on it.
        """
        return self.model()

    def state_dict(self, snapshot: Mapping[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        """Return a copy of the net's tensors by name, as `load_state_dict` takes them.

        Args:
            snapshot: the server's state, as `Server.snapshot` returned it.
            x: the parameters, [P].
        """
        model = self.idle_model
        if self.server.changes_frozen:
            model.set_frozen(snapshot["state/frozen"])
        return model.state_dict(x, snapshot["buffers"])

    @property
    def collusion(self) -> Collusion | None:
        """The clients that change their uploads together; None if there are none."""
        rules = tuple(group.rule for group in self.all_groups)
        return Collusion(rules, self.members, self.server) if any(map(colludes, rules)) else None

    @property
    def sent_per_client(self) -> list[str]:
        """Keys of the uploads that the server receives client by client."""
        if self.collusion is not None:
            return list(self.server.uploads)
        return with_mode(self.server.uploads, "per_client")

    def local_steps(self, local: Local, n: int) -> int:
        """Return the local steps of a client in one round.

        Args:
            local: the local settings of the client.
            n: number of its examples.
        """
        size = local.size_of_batches(n)
        needs_two = self.needs_two_examples
        return local_steps(n, size, local.steps, local.epochs, needs_two, local.drop_last)

    @property
    def all_groups(self) -> tuple[ClientGroup, ...]:
        """The clients that are in no group, and `groups`; `members` are positions in it."""
        return (ClientGroup("", self.client, self.config, self.stages), *self.groups)

    @property
    def clients_have_models(self) -> bool:
        """True if clients use models of their own, of which the global model may tell nothing."""
        rules = [group.rule for group in self.all_groups if not group.rule.attacks]
        return any(uses_own_models(self.config, rule, self.server) for rule in rules)

    @property
    def methods(self) -> str:
        """The sha256 of the files of raysim that define the run's rules."""
        return source_of([self.server, *(group.rule for group in self.all_groups)])

    def group(self, client: int) -> ClientGroup:
        """Return the group of a client, with its rule and its local settings.

        Args:
            client: number of the client.
        """
        return self.all_groups[0 if self.members is None else self.members[client]]

    @property
    def initial(self) -> tuple[Tensor, Tensor]:
        """The initial global model x_0 [P] and BatchNorm statistics [Q], on the CPU."""
        return self._derived[0]

    @property
    def personal(self) -> PersonalParts:
        """The parts of the model that each client keeps to itself."""
        return self._derived[1]

    @property
    def needs_two_examples(self) -> bool:
        """True if a batch in local training needs two examples; see `batches_per_pass`."""
        return self._derived[2]

    @cached_property
    def _derived(self) -> tuple[tuple[Tensor, Tensor], PersonalParts, bool]:
        """`initial`, `personal` and `needs_two_examples`, from one copy of the net."""
        model = copy.copy(self.idle_model)
        if self.config.local.buffers == "frozen":
            model.freeze_statistics()
        personal = personal_parts(self.config, self.client, model)
        return model.initial(), personal, model.needs_two_examples

    @cached_property
    def first_broadcast(self) -> Broadcast:
        """The broadcast of round 0 on the device "meta": its shapes and types without memory."""
        return shapes_of_first_broadcast(self.server, *self.initial, self.problem).to("meta")

    @property
    def bytes_down(self) -> int:
        """Bytes that one client downloads in the first round.

        The download holds the tensors of the first broadcast and the BatchNorm statistics. The
        traffic metrics of a run do not use this figure: they are measured in each round.
        """
        return self.personal.received_bytes(self.first_broadcast)


@dataclass(frozen=True)
class ProbedRun:
    """Facts about a run for the probes that are attached to it."""

    plan: Plan
    """The plan of the run."""

    folder: Path | None
    """The run directory; None if the run has none."""

    rounds_done: int
    """Number of rounds that were complete when this process started; above 0 in a resumed run."""

    history: list[dict[str, float]]
    """Records of these rounds, after the record of the model before training."""

    broadcast: Callable[[int], Broadcast]
    """Returns a version of the model by its number. For use in `metrics`, with a version from which
    clients of the round started."""


@dataclass
class EvaluatedModel(Broadcast):
    """The global model after a round, for `Probe.evaluate`."""

    rounds_done: int
    """Number of completed rounds; 0 is the untrained model."""

    model: Model
    """The net of the run, with the names and shapes of its tensors."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of parameters and statistics by name, as `load_state_dict` takes them."""
        return self.model.state_dict(self.global_params, self.buffers)


@dataclass
class Probe:
    """A measurement about training that no method needs.

    A probe does not change a run: with and without it the run computes the same parameters. The
    dataclass fields of a probe are its parameters; the configuration sets them under the same
    names. Override the methods that the measurement needs:

    - On the driver: `check` once before the run, `begin` before its first round, `request` before
      each round, `metrics` after the clients of the round have trained, and `follow` when the
      record of a round is complete.
    - On the worker that trains a client: `measure`, after the last local step.
    - On the evaluator of the global model: `evaluate`.

    Each process has its own copy of the probe, so a value that `measure` stores in `self` is not
    available in `metrics`. A method that returns metrics or requests may return None for none. An
    exception ends the run with a ProbeError. The run can be resumed.
    """

    __pydantic_config__: ClassVar = ConfigDict(
        extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True
    )

    name: ClassVar[str] = ""
    """First part of the names of the probe's metrics; with "" the name of the class."""

    def check(self, plan: Plan) -> None:
        """Check that the probe can measure this run.

        Args:
            plan: the run, with its configuration, rules, data and net.

        Raises:
            ConfigError: the probe cannot; the message names the key and the fix.
        """

    def begin(self, run: ProbedRun) -> None:
        """Prepare for the next rounds.

        Called at the start of a run, and again after a resume or a failure of the server.

        Args:
            run: the run; also available as `self.run` afterwards.
        """
        self.run = run

    def request(self, round: RoundCohort) -> dict[int, Any] | None:
        """Select the clients of a round to measure on their workers.

        Called once per round, in order. The previous round may still be training.

        Args:
            round: the round `t`, its clients `ids` and, per client, the model version from which it
                starts (`bases`), the number of examples (`samples`) and of local steps (`steps`).

        Returns:
            A request for each client to measure, by client id; any value that can be pickled.
        """
        return {}

    def measure(
        self, trainer: Trainer, client: PreparedClient, update: ClientUpdate, request: Any
    ) -> dict[str, Any]:
        """Measure a client on its worker, after the last local step.

        Args:
            trainer: the worker's trainer, with the net and the data of all clients.
            client: the client before its local steps: the model that it received (`broadcast`), the
                positions of its examples (`mine`), its rule.
            update: the client after its local steps: parameters (`local_params` [P]), mean loss
                (`loss`) and upload (`report`). Do not change these in place.
            request: what `request` returned for this client.

        Returns:
            Values by name, for `metrics`; any values that can be pickled.

        Raises:
            NotImplementedError: the probe requests measurements, but does not define `measure`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} requests measurements, but does not define measure"
        )

    def metrics(
        self, round: RoundCohort, results: Mapping[int, dict[str, Any]]
    ) -> dict[str, float] | None:
        """Return the metrics of a round whose clients have trained.

        Args:
            round: as in `request`; `dropped` are the clients that failed.
            results: the values that `measure` returned, by client id in ascending order. Failed
                clients are missing.

        Returns:
            Metrics by name. They are recorded as <name of the probe>/<name of the metric>.
        """
        return {}

    def evaluates(self, rounds_done: int) -> bool:
        """Return whether to evaluate the global model after `rounds_done` rounds (0: untrained).

        Args:
            rounds_done: number of completed rounds; 0 is the untrained model.
        """
        return False

    def evaluate(self, trainer: Trainer, model: EvaluatedModel) -> dict[str, float] | None:
        """Evaluate the global model, while the next round trains.

        Args:
            trainer: a trainer on the evaluator's device, with the net and the data of all clients.
            model: the model after `rounds_done` rounds, by the names of its tensors
                (`state_dict()`) and as vectors. Do not change these in place.

        Returns:
            Metrics by name, as of `metrics`.
        """
        return {}

    def follow(self, record: Mapping[str, float]) -> dict[str, float] | None:
        """Return metrics that are computed from the complete record of a round.

        Called for each record, in order.

        Args:
            record: all metrics of the round, with those of its evaluation.

        Returns:
            Metrics by name, as of `metrics`.
        """
        return {}


def measures_clients(probe: Probe) -> bool:
    """Return whether a probe measures clients on their workers.

    Args:
        probe: a probe; it does if it overrides `Probe.request`.
    """
    return type(probe).request is not Probe.request


def evaluates_models(probe: Probe) -> bool:
    """Return whether a probe ever evaluates the global model.

    Args:
        probe: a probe; it does if it overrides `Probe.evaluates`.
    """
    return type(probe).evaluates is not Probe.evaluates


def sample_batch(dataset: Dataset, dtype: torch.dtype) -> Batch | None:
    """Return a few real examples for the check of the net; None if the data set is empty.

    Args:
        dataset: the data set.
        dtype: type of the parameters.
    """
    n = min(SAMPLE_EXAMPLES, len(dataset.y))
    if not n:
        return None
    examples = Examples(dataset.x[:n], dataset.y[:n], dataset.scale, dataset.shift, dtype=dtype)
    return Batch(*examples.batch(np.arange(n)))
