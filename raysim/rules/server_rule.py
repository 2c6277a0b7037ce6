"""The server's half of the contract of a federated method; see `raysim.rules.contract`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from numpy.random import Generator
from torch import Tensor

from raysim.config.sections.base import PositiveScheduled
from raysim.errors import ContractError
from raysim.rules.client_sampling import SelectionPool
from raysim.rules.errors.user_code import class_defined_at, defined_at
from raysim.rules.reports import Cohort, Reports
from raysim.rules.rule import Problem, Rule, State, register
from raysim.rules.uploads import Uploads
from raysim.spelling import lacking


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
    needs_task: ClassVar[bool] = False
    """Whether `update` reads `reports.task`; a rule with `needs_public_data` need not set it."""
    changes_frozen: ClassVar[bool] = False
    """True if `update` changes parameters of the net that clients do not train. They are the state
    "frozen", [F]: the tensors of `problem.frozen`, flat and in this order. `provides` has this key
    too, so it reaches clients, evaluation and checkpoints, and counts as traffic."""
    counts_equally: ClassVar[bool] = False
    """True if all clients count equally in `update`; other `weights` are refused."""
    steps_by_lr: ClassVar[bool] = True
    """False if `update` makes no step of size `lr`; another `lr` than 1 is refused."""
    attackers_key: ClassVar[str] = ""
    """Hyper-parameter with the attackers in a round that the rule is set for: an integer is their
    number, another number their share; "" for none. It is compared with the run's `groups`."""
    weights_after_training: ClassVar[bool] = False
    """Whether the weights depend on the uploads; `update` then calls `reports.set_weights`."""
    selects_with_replacement: ClassVar[bool] = False
    """Whether `select` may return a client k times; it then counts k times in uniform means."""

    def __init_subclass__(cls) -> None:
        register(cls, SERVER_RULES, "Server")

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
        """Return the weights of a round's means, [K]; they sum to 1, or less to damp the update.

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
        if missing := lacking(self.provides, state):
            has_init = type(self).init is not ServerRule.init
            place = defined_at(self, "init") if has_init else class_defined_at(type(self))
            raise ContractError(
                f"server rule '{self.name}' provides {', '.join(map(repr, missing))}, which its "
                f"`init` does not return ({', '.join(state)}); return it there, or define "
                f"`broadcast` ({place})"
            )
        return {key: state[key] for key in self.provides}

    def for_evaluation(self, state: State) -> State:
        """Return what is evaluated in place of the broadcast; by default the broadcast.

        For methods that use another model than the one from which clients train, such as a mean of
        iterates. The test set, `evaluate.clients`, the losses of `candidates` and probes that
        evaluate the model get it, and its "x" is the model that a run returns, saves and exports.
        Clients train from the broadcast. It does not count as traffic.

        Args:
            state: the server's state; not to be changed.

        Returns:
            Tensors with the keys and shapes of `broadcast`.
        """
        return self.broadcast(state)

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
        update of the previous round. It is called again if the run resumes before the next update.

        Args:
            state: the server's state after the last update. Checkpoints have it, so its tensors are
                not to be changed in place.
            cohort: the clients of the round.

        Returns:
            The state, with the keys and shapes of `init`.
        """
        return state

    @abstractmethod
    def update(self, state: State, reports: Reports) -> State:
        """Return the state after a round.

        Args:
            state: the server's state. Large buffers may be changed in place, "x" may not.
            reports: the uploads of the round.

        Returns:
            The next state, with the keys of `init`.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no update")


SERVER_RULES: dict[str, type[ServerRule]] = {}
"""The shipped server rules by name."""
