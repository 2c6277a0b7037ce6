"""Dry run of users' rules: train two small clients before a run starts.

The dry run checks three properties of a client rule:

- The contract: the values that `init` and `finish` return, vectors as uploads, and one pass in mode
  "train" per step.
- Numbers: its uploads are finite for some client, or those of plain SGD are not either.
- Captured steps: local steps that are captured and replayed, as on a GPU, give the bits that they
  give uncaptured. A step that keeps something in Python from one call to the next does not, and no
  other check would notice.

Two small clients train, with up to three local steps. Both ways are computed on the CPU, in a
rehearsal of a GPU.

The rules that raysim ships are covered by its tests. They are not checked at each start, because
this would take longer than a round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from raysim.config.sections.base import with_value
from raysim.engine.plan import Plan
from raysim.errors import ConfigError, ContractError, RaysimError
from raysim.models.comparison import close, same_values
from raysim.prepare.dry_run.coupled_examples import SeparateExamples
from raysim.prepare.dry_run.finite_updates import keys_not_finite, refuse_not_finite
from raysim.prepare.dry_run.small_clients import SmallClients, changed, device_of, next_task
from raysim.prepare.dry_run.watched import check_used, watched
from raysim.rules.contract import ClientRule, ServerRule, State, half_of, overridden
from raysim.rules.errors.keyed_numbers import RANDOM_NUMBERS_PAGE
from raysim.rules.errors.user_code import class_defined_at, defined_at
from raysim.rules.methods.registry import is_tried
from raysim.rules.reports import Reports
from raysim.rules.uploads import declared
from raysim.server.collusion import tampered
from raysim.system.processes import limited
from raysim.training.client_evaluator import own_model
from raysim.training.messages import Block, Broadcast, ClientTask
from raysim.training.trainers.host_graphs import rehearsal
from raysim.training.trainers.lane_trainer import LaneTrainer
from raysim.training.trainers.trainer import Trainer
from raysim.training.uploads.client_update import ClientUpdate
from raysim.training.uploads.upload_chain import first_of_size

logger = logging.getLogger("raysim")


STEPS_ON_LANES = 3
"""Local steps of a client in the comparison: the second one is captured, the third one replayed."""


DRY_RUN_TIMEOUT_S = 60.0
"""Time limit of the dry run in seconds; a rule that takes longer stays unchecked."""


ReportedTensors = dict[str, Tensor]
"""Uploads, kept state and loss of a client, by the description that messages use."""


def dry_run_rules(plan: Plan, client_key: str, server_key: str) -> None:
    """Check users' rules in a dry run; rules that raysim ships are skipped.

    For a server rule this checks the first broadcast. For a client rule it checks the contract and,
    if the run trains on lanes, its captured steps. A client rule that exceeds
    `DRY_RUN_TIMEOUT_S` stays unchecked, with a warning; the run has its own time limits.

    Args:
        plan: the plan of the run.
        client_key: configuration key of the client rule, for messages.
        server_key: configuration key of the server rule, for messages.

    Raises:
        ConfigError: a rule is wrong. The message names the rule and its key and, for a captured
            step that differs, the tensor.
    """
    if is_tried(plan.server):
        with only_breaches("the first broadcast is not checked", server_key):
            _ = plan.first_broadcast
    _dry_run_client_rule(plan, client_key)
    for group in plan.groups:
        if plan.config.groups[group.name].client is not None:
            of_group = replace(plan, config=group.config, client=group.rule, stages=group.stages)
            _dry_run_client_rule(of_group, f"groups.{group.name}.client.name", group.name)


def _dry_run_client_rule(plan: Plan, client_key: str, group: str = "") -> None:
    """Check the client rule of a plan in a dry run, if it is to be tried."""
    if not is_tried(plan.client):
        return
    dry_run = RuleDryRun(plan, group)

    def check() -> None:
        dry_run.check_contract()
        difference = dry_run.wrong_on_lanes() if plan.mode == "lanes" else None
        if difference is not None:
            raise ContractError(f"{difference}, or set batching.mode=loop")

    try_rule(plan.client, client_key, "step", check)


def try_rule(
    rule: ClientRule | ServerRule, key: str, unit: str, check: Callable[[], object]
) -> None:
    """Check a rule; one that exceeds `DRY_RUN_TIMEOUT_S` stays unchecked, with a warning.

    Args:
        rule: the rule.
        key: configuration key of the rule, for messages.
        unit: what the check trains, a step or a round.
        check: the check.

    Raises:
        ConfigError: the check found a breach of contract.
    """
    name = f"{half_of(rule)} rule '{rule.name}'"
    with only_breaches(f"no dry run of {name}", key, (ConfigError,)):
        if not limited(check, DRY_RUN_TIMEOUT_S):
            logger.warning(
                "%s did not finish one %s within %g s, so it is not checked",
                name,
                unit,
                DRY_RUN_TIMEOUT_S,
            )


@contextmanager
def only_breaches(
    what: str, key: str = "", passing: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Raise errors of this block that are breaches of contract, and log the others.

    These may depend on the clients, so the run reports them. Or they depend on this machine: the
    server's state may be too large for it, but not for the one that will hold it.

    Args:
        what: what is not checked after such an error, for the log.
        key: configuration key of the rule; "": breaches stay as they are.
        passing: other errors that are raised.

    Raises:
        ConfigError: the block broke the contract, and there is a key.
    """
    try:
        yield
    except passing:
        raise
    except ContractError as error:
        if key:
            raise ConfigError(f"{key}: {error}") from None
        raise
    except RaysimError as error:
        logger.debug("%s: %s", what, error)


def try_captures(plan: Plan) -> str:
    """Say of any client rule whether a GPU captures its steps, and whether they then give the same.

    Args:
        plan: the plan of the run.

    Returns:
        The answer in one line.

    Raises:
        ConfigError: captured steps give something else, and the run trains on lanes.
    """
    dry_run = RuleDryRun(plan)
    try:
        difference = dry_run.wrong_on_lanes()
    except RaysimError as error:
        return f"not tried: {error}"
    if difference is not None:
        if plan.mode == "lanes":
            raise ConfigError(f"batching.mode: {difference}, or set batching.mode=loop")
        return f"not the same, and this run trains in mode {plan.mode}: {difference}"
    if dry_run.refusals:
        return f"steps run one kernel at a time on a GPU: {dry_run.refusals[0]}"
    if dry_run.has_captured:
        return "captured, with the same bits"
    return "not captured: a client fails, or batching.capture is false"


class RuleDryRun(SmallClients):
    """Dry run of the client rule of a plan.

    Args:
        plan: the plan of the run.
        group: the name of the clients' group; "" is that of clients without one.
    """

    def __init__(self, plan: Plan, group: str = ""):
        super().__init__(plan, group)
        self.has_captured = False
        """True once a local step has been captured."""
        self.refusals: list[str] = []
        """Why local steps cannot be captured, with the line of the rule; [] if they can."""

    def check_contract(self) -> None:
        """Check the contract of the client rule in one local step, in the precision of the run.

        An exception that may depend on the client does not count: the run will report it with
        client and round.

        Raises:
            ContractError: the rule breaks its contract.
        """
        if self.config.example_privacy is not None:  # gradients of examples hide some mistakes
            config = with_value(self.config, "privacy", None)
            RuleDryRun(replace(self.plan, config=config), self.group).check_contract()
        trainer, broadcast, tasks = self.stage(device_of(self.config.resources.gpus))
        if self.large:
            tasks = tasks[1:]
        if self.config.example_privacy is not None:
            trainer.task = SeparateExamples(trainer.model, trainer.settings)
        trainer.rule = watched(trainer.rule)
        trained = _unbroken(trainer.train_block({0: broadcast}, Block(0, tasks)))
        if any(update.error for update in trained):
            return
        if all(keys_not_finite(trainer, update) for update in trained):
            refuse_not_finite(self.plan, self.group)
        # Another round between, since a rule that keeps a mean of what it sees would give the same
        # twice in a row.
        later = self._train_later_round(trainer, broadcast, trained)
        again = trainer.train_block({0: broadcast}, Block(0, tasks[::-1]))
        self._check_repeated(_outputs(trainer, trained), _outputs(trainer, again))
        self._check_repeated(later, self._train_later_round(trainer, broadcast, trained))
        check_used(trainer.rule)
        self._check_delta(trainer, trained[0])
        self._check_lengths(trainer.sent, trained)
        self._check_other_methods(trainer, broadcast, tasks[0], trained)

    def _check_other_methods(
        self, trainer: Trainer, broadcast: Broadcast, task: ClientTask, trained: list[ClientUpdate]
    ) -> None:
        """Try what the rule defines beside training, with what the clients have sent and kept."""
        if any(stage.of is None for stage in self.plan.stages):
            key = self.config.upload_key("")
            first_of_size(trainer.rule, trainer.sent, trained[0].report, trainer.model.size, key)
        is_used = self.config.evaluate.clients or overridden(self.plan.server, ["candidates"])
        if overridden(trainer.rule, ["collude"]):
            with only_breaches("collude is not checked"):
                self._check_collusion(trainer, trained)
        if is_used and overridden(self.plan.client, ["begin", "evaluated"]):
            self._try_own_model(trainer, broadcast, task)
            self._try_own_model(trainer, broadcast, next_task(task, trained[0]))

    def _train_later_round(
        self, trainer: Trainer, broadcast: Broadcast, trained: list[ClientUpdate]
    ) -> list[ReportedTensors]:
        """Train the clients in a later round, from another model, with the state that they kept.

        Raises:
            ContractError: the rule breaks its contract in that round.
        """
        t = min(1, self.config.rounds - 1)
        tasks = [replace(next_task(update.task, update), base=t) for update in trained]
        later = trainer.train_block({t: changed(broadcast)}, Block(0, tasks))
        return _outputs(trainer, _unbroken(later))

    def _check_collusion(self, trainer: Trainer, trained: list[ClientUpdate]) -> None:
        """Try `collude` with the uploads of both clients, and of two more that do not collude.

        Raises:
            ContractError: it breaks its contract, or gives something else the second time.
        """
        rule, n = trainer.rule, len(trained)
        keys = [key for key in self.plan.server.uploads if key in trainer.sent]
        arrived = {}
        for key in keys:
            uploads = torch.stack([update.report[key] for update in trained])
            arrived[key] = torch.cat([uploads, uploads.flip(0)])
        first: dict[int, State] = {}
        for t in (0, 1, 0):
            if t >= self.config.rounds:
                continue
            ids = list(range(2 * n))
            reports = Reports(
                t, ids, n_clients=2 * n, samples=[3] * 2 * n, steps=[1] * 2 * n,
                staleness=[0] * 2 * n, draws=[1] * 2 * n, seed=self.config.seed,
            )  # fmt: skip
            uploads = {key: tensor * (1 + t) for key, tensor in arrived.items()}
            returned = tampered(rule, uploads, np.arange(n), reports)
            for key, tensor in first.setdefault(t, returned).items():
                if not repeated(self.plan, tensor, returned[key]):
                    raise keeps_something(
                        self.plan.client, f"`collude` returns '{key}' that differs"
                    )

    def _check_repeated(self, first: list[ReportedTensors], second: list[ReportedTensors]) -> None:
        """Refuse a rule of which the same clients give something else when they train again."""
        for before, after in zip(first, second, strict=True):
            for key, tensor in before.items():
                if key not in after or not repeated(self.plan, tensor, after[key]):
                    raise keeps_something(self.plan.client, f"a client has {key} that differs")

    def _check_lengths(self, sent: Iterable[str], trained: list[ClientUpdate]) -> None:
        """Refuse uploads that differ in length between clients."""
        for key in sent:
            lengths = {update.report[key].numel() for update in trained}
            if len(lengths) > 1:
                raise ContractError(
                    f"finish of client rule '{self.plan.client.name}' sends '{key}' with "
                    f"{' and '.join(map(str, sorted(lengths)))} numbers for two clients; the "
                    "server adds the uploads of a key, so they must have the same length"
                )

    def _try_own_model(self, trainer: Trainer, broadcast: Broadcast, task: ClientTask) -> None:
        """Make the model that a client is evaluated with."""
        try:
            own_model(trainer, broadcast, task, self.clients.at(task.base).client(task.client))
        except ContractError:
            raise
        except Exception as error:  # it may depend on the client, so the run reports it
            logger.debug("evaluated is not checked: %s", error)

    def _check_delta(self, trainer: Trainer, update: ClientUpdate) -> None:
        """Refuse an upload `delta` of another shape than [P], which is its convention.

        PyTorch would broadcast another shape without an error. A user's pair may give it another
        meaning by a declared shape.
        """
        rule = self.plan.client
        has_own_meaning = "delta" in declared(rule.sends) and is_tried(self.plan.server)
        if "delta" not in trainer.sent or has_own_meaning:
            return
        shape = list(update.report["delta"].shape)
        if shape != [trainer.model.size]:
            raise ContractError(
                f"finish of client rule '{rule.name}' sends 'delta' with the shape {shape}, but "
                f"server rule '{self.plan.server.name}' takes it as an update of the parameters, "
                f"[P] = [{trainer.model.size}] ({defined_at(rule, 'finish')})"
            )

    def wrong_on_lanes(self) -> str | None:
        """Compare local steps that are captured, as on a GPU, with the same uncaptured.

        Returns:
            The difference, for a message; None if there is none, or the rule fails in loop too.

        Raises:
            RaysimError: the server rule fails, or breaks its contract.
        """
        trainer, broadcast, tasks = self.stage()
        tasks = [replace(task, steps=STEPS_ON_LANES) for task in tasks]
        looped, error = self._train(trainer, broadcast, tasks)
        if error is not None:
            return None
        name = self.plan.client.name
        outputs = []
        without_captures = with_value(trainer.config, "batching.capture", False)
        for config in (without_captures, trainer.config):
            with rehearsal():
                lanes = LaneTrainer(replace(trainer.group, config=config), trainer.parts)
                of_clients, error = self._train(lanes, broadcast, tasks)
            if error is not None:
                return f"client rule '{name}' cannot run on lanes: {error}"
            self.refusals = lanes.refusals
            self.has_captured = lanes.has_captured
            outputs.append(of_clients)
        for in_loop, uncaptured in zip(looped, outputs[0], strict=True):
            for key, tensor in in_loop.items():
                if key not in uncaptured or not close(uncaptured[key].double(), tensor.double()):
                    return (
                        f"client rule '{name}' gives {key} on lanes of a GPU that differs from "
                        "mode loop; task.client, task.t and task.steps are tensors there, which "
                        "are no keys of a dict: take a tensor's entry by position, and let tensors "
                        "keep their type from one step to the next"
                    )
        for uncaptured, captured in zip(*outputs, strict=True):
            for key, tensor in uncaptured.items():
                if key not in captured or not same_values(tensor, captured[key]):
                    return (
                        f"client rule '{name}' on model '{self.config.model.name}' gives {key} "
                        "that differs if a GPU captures the local steps; make the step a pure "
                        "function of its arguments: keep nothing in Python from one step to the "
                        "next"
                    )
        return None

    @staticmethod
    def _train(
        trainer: Trainer, broadcast: Broadcast, tasks: list[ClientTask]
    ) -> tuple[list[ReportedTensors], str | None]:
        """Train both clients; return their outputs, or the first error in one line."""
        trained = trainer.train_block({0: broadcast}, Block(0, tasks))
        if errors := [update.error for update in trained if update.error]:
            return [], errors[0].splitlines()[0]
        return _outputs(trainer, trained), None


def repeated(plan: Plan, first: Tensor, second: Tensor) -> bool:
    """Return whether two results are the same, as far as the run's kernels give the same twice.

    Args:
        plan: the plan of the run.
        first: a result.
        second: the result of the same again.
    """
    if plan.config.resources.deterministic or first.is_cpu or not first.is_floating_point():
        return same_values(first, second)
    return close(first, second)


def _unbroken(updates: list[ClientUpdate]) -> list[ClientUpdate]:
    """Return updates of clients; raise ContractError if one has broken the contract."""
    for update in updates:
        if update.broken is not None:
            raise ContractError(update.broken)
    return updates


def _outputs(trainer: Trainer, trained: list[ClientUpdate]) -> list[ReportedTensors]:
    """Return what clients give, in the order of their numbers; nothing of those that fail."""
    outputs = []
    for update in sorted(trained, key=lambda update: update.task.client):
        if update.error:
            continue
        uploads = {f"an upload '{k}'": v for k, v in update.report.items() if k != "buffers"}
        if trainer.model.buffer_size:
            uploads["BatchNorm statistics"] = update.report["buffers"]
        kept = {f"a kept '{k}'": v for k, v in update.client_state.items()}
        outputs.append({**uploads, **kept, "a mean local loss": update.loss})
    return outputs


def keeps_something(rule: ClientRule | ServerRule, found: str) -> ContractError:
    """Return the error for a rule that gives something else for the same arguments.

    Args:
        rule: the rule.
        found: what differs when it is computed again.
    """
    return ContractError(
        f"{half_of(rule)} rule '{rule.name}' is no function of its arguments: {found} when the "
        "same is computed again, as with an attribute, a global variable, a clock or a generator "
        "of its own, which workers and resumed runs do not share; keep it in the state, and draw "
        f"keyed numbers {RANDOM_NUMBERS_PAGE} ({class_defined_at(type(rule))})"
    )
