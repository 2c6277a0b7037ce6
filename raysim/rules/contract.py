"""The contract of a federated method: a client rule and a server rule.

A `ClientRule` is the computation of ONE client, a `ServerRule` that of the server, an `Algorithm` a
named pair. Rules are frozen dataclasses. Their fields are hyper-parameters, set from the
configuration under the same names. Random numbers come from keyed streams (`task.rng`,
`ClientRule.noise`, `reports.rng`), so that a run is repeatable; rules use no clock, file or Ray.
The engine decides where and how they run. On a GPU a client's step is captured as a CUDA graph and
replayed. Therefore it changes none of its arguments in place, and keeps nothing in Python from one
call to the next. If it branches on a tensor or calls `.item()`, it runs uncaptured, which takes
longer.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor

from raysim.errors import ConfigError
from raysim.rules.batch import Batch
from raysim.rules.errors.returned_values import check_direction
from raysim.rules.losses import Net, task_loss
from raysim.rules.reports import Cohort
from raysim.rules.rule import SHIPPED_PACKAGE, Report, Rule, State, register
from raysim.rules.server_rule import SERVER_RULES as SERVER_RULES
from raysim.rules.server_rule import ServerRule
from raysim.rules.task import LocalData, Task
from raysim.rules.uploads import Upload

logger = logging.getLogger("raysim")

NoiseSpec = tuple[int | Sequence[int | Literal["B"]], Literal["normal", "uniform"]]
"""Shape and distribution of random numbers in local steps; see `ClientRule.noise`."""


@dataclass(frozen=True)
class ClientRule(Rule):
    """Local training of one client.

    The default is local SGD that sends delta = x - w. Override `loss` for another local loss,
    `direction` (or `step`) for other local steps, `finish` for other uploads, `begin` for another
    start, and `evaluated` if clients are evaluated with another model than that. On a GPU `loss`,
    `direction` and `step` are captured; the other methods are not.
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
    attacks: ClassVar[bool] = False
    """Whether the clients of the rule are attackers; see `ServerRule.attackers_key`."""

    def __init_subclass__(cls) -> None:
        register(cls, CLIENT_RULES, "Client")

    @property
    def dropout_masks(self) -> int:
        """Number of independent sets of dropout masks for a step; see `Batch.masked`."""
        return 1

    @property
    def unprotected_uploads(self) -> tuple[str, ...]:
        """Uploads that `privacy` does not protect, since they use the examples in another way.

        Under `privacy`, `task.full_grad`, `full_loss`, `fisher`, `sample_grads` and `input_grad`,
        and the examples of `data`, are only available to a rule that names an upload here.
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
        them as `batch.noise[name]`. They are the same bits in every mode. It is called
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

        Keys, shapes and types hold for the whole run.

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

    def predict(self, shared: State, client_state: State, net: Net, task: Task) -> Tensor:
        """Return what a client answers for examples, for `evaluate.clients`.

        The default is the outputs of the net with the parameters of `evaluated`. It is not called
        in training.

        Args:
            shared: the server's broadcast.
            client_state: what the client kept; see `init` and `evaluated`.
            net: the forward pass on the examples in mode "eval": its logits, features and levels.
            task: the client's task.

        Returns:
            The outputs [B, ...], of the shape of the net's; the metrics and the loss are theirs.
        """
        return net.logits

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

    def no_effect(self, attackers: int, others: int) -> str:
        """Return why a group of attackers has no effect in a round of these sizes; "" if it has.

        A run whose rounds have these numbers on average logs the reason before it starts.

        Args:
            attackers: clients of the group in a round, M.
            others: the round's other clients, K - M.
        """
        return ""


def normalised(weights: Iterable[float]) -> list[float]:
    """Return weights divided by their sum.

    Args:
        weights: not negative, at least one of them positive.
    """
    weights = list(weights)
    total = sum(weights)
    return [w / total for w in weights]


def half_of(rule: Rule) -> str:
    """Return the half of a method that a rule is, "client" or "server".

    Args:
        rule: a client or server rule.
    """
    return "client" if isinstance(rule, ClientRule) else "server"


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
    module: str = field(default="", init=False)
    """Module that defines it."""

    def __post_init__(self) -> None:
        for half, rule in (("client", self.client), ("server", self.server)):
            if isinstance(rule, ClientRule | ServerRule):
                values = {f.name: getattr(rule, f.name) for f in fields(rule) if f.init}
                raise ConfigError(
                    f"Algorithm '{self.name}': its {half} rule is an instance; give the class "
                    f"{type(rule).__name__}, and its values in the mapping settings: {values}"
                )
        definition = sys._getframe(2)  # 0 is this function, 1 the dataclass's __init__
        object.__setattr__(self, "module", definition.f_globals.get("__name__", ""))
        if self.module.startswith(f"{SHIPPED_PACKAGE}."):
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
ALGORITHMS: dict[str, Algorithm] = {}
"""The shipped algorithms by name."""
