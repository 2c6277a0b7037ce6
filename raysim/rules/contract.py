"""The contract of a federated method: a client rule and a server rule.

A `ClientRule` is the computation of ONE client, a `ServerRule` that of the server, an `Algorithm` a
named pair. Rules are frozen dataclasses. Their fields are hyper-parameters, set from the
configuration under the same names. Random numbers come from keyed streams (`task.rng`,
`ClientRule.noise`, `reports.rng`), so that a run is repeatable; rules use no clock, file or Ray.
The engine decides where and how they run: one client after the other, or many at once under
`torch.func.vmap`. Therefore a client's step does not branch on a tensor, call `.item()` or change
its arguments in place.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from numpy.random import Generator
from torch import Tensor

from raysim import metrics
from raysim.config.sections.base import PositiveScheduled
from raysim.errors import ContractError
from raysim.rules.batch import Batch
from raysim.rules.client_sampling import SelectionPool
from raysim.rules.errors.user_code import check_direction, class_defined_at, defined_at
from raysim.rules.losses import Net, task_loss
from raysim.rules.reports import Cohort, Reports
from raysim.rules.rule import Logged, Problem, Rule
from raysim.rules.task import LocalData, Task
from raysim.rules.uploads import Upload, Uploads

logger = logging.getLogger("raysim")

State = dict[str, Tensor]
"""Tensors by name, with fixed keys and shapes."""
Report = dict[str, Tensor]
"""A client's report: uploads by key, and metrics as "metric/NAME"."""
NoiseSpec = tuple[int | Sequence[int | Literal["B"]], Literal["normal", "uniform"]]
"""Shape and distribution of random numbers in local steps; see `ClientRule.noise`."""


@dataclass(frozen=True)
class ClientRule(Rule):
    """Local training of one client.

    The default is local SGD that sends delta = x - w. Override `loss` for another local loss,
    `direction` (or `step`) for other local steps, `finish` for other uploads, `begin` for another
    start, and `evaluated` if clients are evaluated with another model than that. `loss`,
    `direction` and `step` may run under vmap; the other methods run for one client at a time.
    """

    name: ClassVar[str] = ""
    """Name in a configuration; by default that of the class without `Client`, in lower case."""
    needs: ClassVar[tuple[str, ...]] = ("x",)
    """Keys of the server's broadcast that the rule reads."""
    sends: ClassVar[tuple[str, ...] | Mapping[str, Upload]] = ("delta",)
    """Keys of its uploads, which are float vectors of one length for all clients.

    A mapping declares the shape, type and mode of each, as in
    `{"delta": Upload("P"), "hits": Upload("C", mode="sum")}`.
    """
    not_counted_as_traffic: ClassVar[tuple[str, ...]] = ()
    """Uploads that the server could compute from the others."""
    supports_dp: ClassVar[bool] = True
    """Whether steps see the client's examples only through the gradient in mode "train"."""

    def __init_subclass__(cls) -> None:
        _register(cls, CLIENT_RULES, "Client")

    @property
    def dropout_masks(self) -> int:
        """Number of independent sets of dropout masks for a step; see `Batch.masked`."""
        return 1

    @property
    def unprotected_uploads(self) -> tuple[str, ...]:
        """Uploads that `privacy` does not protect, since they use the examples in another way.

        Under `privacy`, `task.full_grad`, `full_loss`, `fisher`, `sample_grads` and `input_grad`
        are only available to a rule that names an upload here.
        """
        return ()

    @property
    def needs_plain_sgd(self) -> str:
        """Why steps must be plain SGD with one step size in a round; "" if they need not.

        With a reason here, another `local.optimizer` and a `local.lr` over steps are refused.
        """
        return ""

    @property
    def prepares(self) -> bool:
        """Whether the engine calls `prepare`; by default, if the rule defines it."""
        return type(self).prepare is not ClientRule.prepare

    def prepare(self, shared: State, batch: Batch, task: Task) -> tuple[Batch, ...]:
        """Prepare data for the local steps from one batch, at the received parameters.

        For methods whose steps need data that is computed once per round: pseudo examples (FedReg),
        labels of the global model, replayed examples. The engine calls it after `init` and before
        the first step, on the batches of one shuffled and augmented pass over the client's data, at
        most once per local step. Step i finds the result of batch i in `batch.prepared`, and starts
        again at the first one if the pass has fewer batches than the round has steps. This pass is
        not the pass of the steps, so `batch.prepared` and `batch.x` come from different examples.
        Under vmap the prepared batches are padded like all others.

        Args:
            shared: the server's broadcast.
            batch: a batch of that pass, without dropout masks.
            task: the client's task; passes in mode "train" are not allowed.

        Returns:
            Batches with labels or probabilities as y, equally many for every batch; () for none.
        """
        return ()

    def noise(self, task: Task) -> Mapping[str, NoiseSpec]:
        """Return the random numbers that each local step needs, by name; {} for none.

        The engine draws them anew for each step, keyed by seed, name, round and client, and passes
        them as `batch.noise[name]`. They are the same bits in a loop and under vmap. It is called
        once, before the run, so it must not depend on the client or the round.

        Args:
            task: a task without a client; `task.x0.shape` is the shape (P,).

        Returns:
            For each name a shape and a distribution, "normal" (standard) or "uniform" (from 0 to
            1). The shape may begin with "B", the number of examples in the batch.
        """
        return {}

    def state(self, task: Task) -> State:
        """Return the client's initial state between rounds; {} for none.

        Args:
            task: the client's task; `task.zeros()` is a zero vector [P].
        """
        return {}

    def personal(self, task: Task) -> Tensor | None:
        """Return the parameters that each client keeps to itself; None for none.

        The engine keeps them in the client's state. For the rule shared["x"] is then the global
        model with the client's own parameters in it. Uploads [P] are zero at these parameters,
        which do not count as traffic, and the server's values of them do not change. It is called
        once, before the run. `local.personal` adds to it.

        Args:
            task: a task without a client; `task.part("classifier")` is a mask.

        Returns:
            A mask, bool [P], True for personal parameters.
        """
        return None

    def begin(
        self, shared: State, client_state: State, data: LocalData, task: Task
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, State]:
        """Return the model that the local steps start from; by default the received one.

        It is called before `init`.

        Args:
            shared: the server's broadcast.
            client_state: what the client kept; see `init`.
            data: the client's examples.
            task: the client's task.

        Returns:
            The parameters "w" [P], and the BatchNorm statistics [Q], None for those received; a
            client is not evaluated with its own w and None on a net with statistics. A
            third part is optional: tensors by name that the local steps carry, like those of
            `init`. They hold what `begin` has computed for `step` and `finish`.
        """
        return shared["x"], None

    def init(self, shared: State, client_state: State, data: LocalData, task: Task) -> State:
        """Return what the local steps of this round carry, beside "w".

        "w" comes from `begin` and is not returned. The state of the steps ends with `finish`.

        Args:
            shared: the server's broadcast.
            client_state: what the client kept, with the keys of `state`; and "seen", a bool scalar,
                whether the client has participated before.
            data: the client's examples.
            task: the client's task.

        Returns:
            Tensors by name; {} for none.
        """
        return {}

    def loss(self, shared: State, state: State, net: Net, batch: Batch, task: Task) -> Tensor:
        """Return the loss of each example that the local steps minimise.

        It is for methods that change the local loss only. The default is the loss of the learning
        task. A rule with a `direction` or `step` of its own passes its losses to `task.grad`.

        Args:
            shared: the server's broadcast.
            state: the local parameters "w" [P], and what `init` returned.
            net: the forward pass at "w": its logits, features and levels.
            batch: the mini-batch.
            task: the client's task.

        Returns:
            One value for each example, [B].
        """
        return task_loss(net, batch)

    def direction(self, shared: State, state: State, batch: Batch, task: Task) -> Tensor:
        """Compute the descent direction of one local step.

        The engine then makes the step, w <- w - lr * direction for plain SGD. The default is the
        gradient of `loss`. Without a loss of its own this is local SGD, for which the engine has a
        faster path.

        Args:
            shared: the server's broadcast.
            state: the local parameters "w" [P], and what `init` returned.
            batch: the mini-batch.
            task: the client's task. Exactly one pass has mode "train".

        Returns:
            The direction, [P].
        """
        if type(self).loss is ClientRule.loss:
            return task.grad(state["w"], batch)
        own_loss = partial(self.loss, shared, state, task=task)
        return task.grad(state["w"], batch, own_loss)

    def step(self, shared: State, state: State, batch: Batch, task: Task) -> State:
        """Make one local step, the general form of `direction`.

        Args:
            shared: the server's broadcast.
            state: the local parameters "w" [P], and what `init` returned.
            batch: the mini-batch.
            task: the client's task. Exactly one pass has mode "train".

        Returns:
            The whole next state, "w" included.
        """
        direction = self.direction(shared, state, batch, task)
        check_direction(self, state["w"], direction)
        return {**state, "w": task.descend(state["w"], direction)}

    def finish(
        self, shared: State, state: State, client_state: State, data: LocalData, task: Task
    ) -> tuple[Report, State]:
        """Return what the client sends and what it keeps, after its last local step.

        Args:
            shared: the server's broadcast.
            state: the state after the last step.
            client_state: what the client had kept; see `init`.
            data: the client's examples.
            task: the client's task.

        Returns:
            The report and the next client state. The report has every key of `sends`. A scalar
            "metric/NAME" in it becomes the metric client/NAME, as with `task.log`. The client state
            has every key of `state`.
        """
        return {"delta": shared["x"] - state["w"]}, {}

    def evaluated(
        self, shared: State, client_state: State, data: LocalData, task: Task
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the model that this client would use, for `evaluate.clients`.

        The default is the one that `begin` returns. Fine-tuning starts from it too. A client may be
        asked before it has trained, or without ever training; then `client_state` is that of
        `state`, and `client_state["seen"]` is False.

        Args:
            shared: the server's broadcast.
            client_state: what the client kept; see `init`.
            data: the client's training examples.
            task: the client's task.

        Returns:
            A pair of the parameters [P] and the BatchNorm statistics [Q]. On a net without
            statistics the parameters do alone, and on others where they are those received or
            `local.buffers` is not `averaged`. The statistics of a model that the client keeps move
            by `task.grad_and_buffers`; `task.buffers` are those received.
        """
        return self.begin(shared, client_state, data, task)[0]

    def collude(self, uploads: State, others: State, cohort: Cohort) -> State:
        """Return the uploads that a group of colluding clients sends instead of its own.

        For attacks that depend on several clients. A rule that overrides it belongs to a group of
        attackers (`groups`). The clients train by themselves; when the updates of a round have
        arrived, the engine calls it once with those of the group. The server then receives what it
        returns. It must be a pure function of its arguments; `cohort.rng` has keyed numbers.

        Args:
            uploads: the group's uploads by key, [M, ...] each, in the order of `cohort.ids`.
            others: those of the round's other clients, [K - M, ...].
            cohort: the M clients of the group that are in the round.

        Returns:
            The changed uploads by key, [M, ...] each.
        """
        return uploads


@dataclass(frozen=True)
class ServerRule(Rule):
    """The server's part of a method: it broadcasts a model and updates it from the uploads."""

    lr: PositiveScheduled = 1.0
    """Server learning rate; a number, or a schedule [[round, value], ...]."""
    weights: Literal["uniform", "samples"] = "uniform"
    """Whether clients have equal weights in means, or weights proportional to their samples."""

    name: ClassVar[str] = ""
    """Name in a configuration; by default that of the class without `Server`, in lower case."""
    provides: ClassVar[tuple[str, ...]] = ("x",)
    """Keys of the broadcast. `update` may not change these in place, since clients may use them."""
    needs_base_params: ClassVar[bool] = False
    """Whether `update` reads `reports.bases`."""
    weights_after_training: ClassVar[bool] = False
    """Whether the weights depend on the uploads; `update` then calls `reports.set_weights`."""
    selects_with_replacement: ClassVar[bool] = False
    """Whether `select` may return a client k times; it then counts k times in uniform means."""

    def __init_subclass__(cls) -> None:
        _register(cls, SERVER_RULES, "Server")

    if TYPE_CHECKING:
        # For type checkers of any type: a class may give a mapping or a property.
        uploads = cast(Any, None)
    else:

        @property
        def uploads(self) -> Uploads:
            """Mode, or several modes, of each upload that the server receives.

            A class gives a mapping such as `uploads = {"delta": "per_client"}`, or a property.

            - "mean": the weighted mean.
            - "sum": the sum.
            - "per_client": each client's upload by itself, and the mean unless they are integers.
            - "difference": the weighted sum of the differences to each client's last upload, which
              the client keeps.
            """
            return {"delta": "mean"}

    def weigh(self, cohort: Cohort) -> list[float]:
        """Return the weights of a round's means, [K].

        Without a client of the cohort, the weights of the others may only change by a common
        factor.

        Args:
            cohort: what is known before training: samples, steps, staleness.
        """
        draws = cohort.draws or [1] * len(cohort.ids)
        counts = draws
        if self.weights == "samples":
            counts = [k * n for k, n in zip(draws, cohort.samples, strict=True)]
        total = sum(counts)
        return [count / total for count in counts]

    def init(self, x0: Tensor, problem: Problem) -> State:
        """Return the server's state before round 0.

        Args:
            x0: the initial parameters, [P].
            problem: the sizes of the run.

        Returns:
            Tensors by name, with fixed keys and shapes; "x" are the parameters.
        """
        return {"x": x0}

    def candidates(self, state: State, pool: SelectionPool, rng: Generator) -> Iterable[int] | None:
        """Return the clients whose loss is measured before `select` is called.

        Each of them evaluates the current model on all of its training examples. `select` gets the
        losses as `pool.current_loss`. By default no loss is measured.

        Args:
            state: the server's state after the last update; not to be changed.
            pool: the available clients with data, and what the server knows of them.
            rng: a generator that is keyed by seed and round; `select` gets another one.

        Returns:
            Different numbers from `pool.ids`; None or an empty list for no client.
        """
        return None

    def select(self, state: State, pool: SelectionPool, rng: Generator) -> Iterable[int]:
        """Return the clients of the next synchronous round.

        A rule that overrides it replaces `schedule.sampling`. It is called once per round, after
        the update of the previous one, so rounds are no longer drawn while clients train.

        Args:
            state: the server's state after the last update; not to be changed.
            pool: the available clients with data, and what the server knows of them.
            rng: a generator that is keyed by seed and round.

        Returns:
            Numbers from `pool.ids`, at most `pool.size` different ones. They may be fewer; without
            any the round is empty.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no select")

    def broadcast(self, state: State) -> State:
        """Return what every client of the round receives; by default the keys of `provides`.

        Args:
            state: the server's state.

        Raises:
            ContractError: the state lacks a key of `provides`.
        """
        if missing := [key for key in self.provides if key not in state]:
            has_init = type(self).init is not ServerRule.init
            place = defined_at(self, "init") if has_init else class_defined_at(type(self))
            raise ContractError(
                f"server rule '{self.name}' provides {', '.join(map(repr, missing))}, which its "
                f"`init` does not return ({', '.join(state)}); return it there, or define "
                f"`broadcast` ({place})"
            )
        return {key: state[key] for key in self.provides}

    def sent_to(self, shared: State, client: int) -> State:
        """Return what one client receives of the broadcast; by default all of it.

        For servers with a model for each cluster or client: the broadcast has all models, and every
        client receives its own one as "x". Then it composes with every client rule. It runs on the
        workers, so it is a pure function of its arguments.

        Args:
            shared: what `broadcast` returned; not to be changed.
            client: number of the client, from 0.

        Returns:
            Tensors by name: "x" [P], and others with the same shapes for all clients. Only they
            count as traffic.
        """
        return shared

    def before_round(self, state: State, cohort: Cohort) -> State:
        """Return the state after the clients of a round are known.

        In a synchronous round it is called before they train, in an asynchronous one after the
        update of the previous round.

        Args:
            state: the server's state.
            cohort: the clients of the round.
        """
        return state

    def update(self, state: State, reports: Reports) -> State:
        """Return the state after a round.

        Args:
            state: the server's state. Large buffers may be changed in place, "x" may not.
            reports: the uploads of the round.

        Returns:
            The next state, with the keys of `init`.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no update")


def normalised(weights: Iterable[float]) -> list[float]:
    """Return weights divided by their sum.

    Args:
        weights: not negative, at least one of them positive.
    """
    weights = list(weights)
    total = sum(weights)
    return [w / total for w in weights]


def overridden(rule: ClientRule | ServerRule, names: Iterable[str]) -> list[str]:
    """Return which of these members a rule overrides.

    Args:
        rule: a client or server rule.
        names: methods and properties of its contract.

    Returns:
        Those of `names` that the rule's class defines itself, or inherits from another rule.
    """
    family = ClientRule if isinstance(rule, ClientRule) else ServerRule
    return [name for name in names if getattr(type(rule), name) is not getattr(family, name)]


PLAIN_STEP = ("step", "direction", "loss")
"""Methods of local steps. A rule that overrides none makes steps of plain SGD."""


@dataclass(frozen=True)
class Algorithm:
    """A named pair of rules.

    It is found by its name if it ships with raysim or is an entry point.
    """

    name: str
    """Name in a configuration."""
    client: type[ClientRule]
    """The client rule."""
    server: type[ServerRule]
    """The server rule."""
    paper: str = ""
    """First author and year; "" if there is none."""
    state: str = ""
    """Floats that server and client keep, in multiples of P, the number of parameters. Default:
    "server 0, client 0" if no rule keeps any, else "not declared"."""
    traffic: str = ""
    """Floats that a client receives and sends in a round. Default: "down P, up P" if the rules send
    what FedAvg's do, else "not declared"."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of other sections of the configuration."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Values of the rules' fields that make this pair this algorithm."""
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Values of the rules' fields by the name of the preset."""

    def __post_init__(self) -> None:
        definition = sys._getframe(2)  # 0 is this function, 1 the dataclass's __init__
        if definition.f_globals.get("__name__", "").startswith(f"{SHIPPED_PACKAGE}."):
            ALGORITHMS[self.name] = self
        for fact, text in _plain_facts(self.client, self.server).items():
            if not getattr(self, fact):
                object.__setattr__(self, fact, text)


def _plain_facts(client: Any, server: Any) -> dict[str, str]:
    """Return what an algorithm keeps and sends that declares neither, as far as it is FedAvg's."""
    facts = ClientRule.state, ServerRule.init, ("delta",), ("x",)
    names = (client, "state"), (server, "init"), (client, "sends"), (server, "provides")
    state, init, sends, provides = (
        getattr(rule, name, None) == fact for (rule, name), fact in zip(names, facts, strict=True)
    )
    return {
        "state": "server 0, client 0" if state and init else "not declared",
        "traffic": "down P, up P" if sends and provides else "not declared",
    }


CLIENT_RULES: dict[str, type[ClientRule]] = {}
"""The shipped client rules by name."""
SERVER_RULES: dict[str, type[ServerRule]] = {}
"""The shipped server rules by name."""
ALGORITHMS: dict[str, Algorithm] = {}
"""The shipped algorithms by name."""

SHIPPED_PACKAGE = "raysim.algorithms"
"""Package of the shipped methods (the folder algorithms/), and entry-point group of others."""


def _register(cls: type[Rule], registry: dict, suffix: str) -> None:
    """Name a rule after its class, and register it if it is shipped.

    The name is that of the class, without the suffix, in lower case: FedProxClient is `fedprox`.
    """
    if "name" not in cls.__dict__:
        cls.name = (cls.__name__.removesuffix(suffix) or cls.__name__).lower()
    shipped = cls.__module__.startswith(f"{SHIPPED_PACKAGE}.")
    if shipped and not cls.__name__.startswith("_"):
        registry[cls.name] = cls
    side = suffix.lower()
    logs = cls.__dict__.get("logs", ())
    if not isinstance(logs, tuple) or not all(isinstance(metric, Logged) for metric in logs):
        raise TypeError(
            f'{cls.__name__}.logs is not a tuple of Logged; write logs = (Logged("name", "what it '
            'measures"),), with the comma'
        )
    for name, meaning, unit in logs:
        is_size = side == "server" and name.endswith("_bytes")
        place = f"system/server_{name}" if is_size else f"{side}/{name}"
        metrics.declare(place, unit, meaning, cls.name, users_own=not shipped)
