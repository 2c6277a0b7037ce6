"""Theorem 1 and Corollary 1 of Luo et al. 2023 (GradMA), in numbers.

The setting: every f_i is L-smooth and ‖∇f_i - ∇f‖² ≤ ρ². In each of T rounds S of N clients make I
steps y <- y - η_l g̃ with ‖g - g̃‖ ≤ ε_l, where g is their full gradient. The server has
m = β1 m̃ + mean(x - y_I) and makes x <- x - η_g m̃ with ‖m - m̃‖² ≤ ε_g² / (1 - β2).

With κ = (N - S) / (S (N - 1)) and A = 40 I² η_l² L², if

    (i)    η_l ≤ 1 / (√160 L I)
    (ii)   η_g η_l ≤ (1 - β1)² S (N - 1) / (I L (β1 S (N - 1) + 4 N (S - 1)))
    (iii)  320 I² η_l² L² + 64 I η_g η_l L (1 + A) κ / (1 - β1)² ≤ 1

then (1/T) Σ_t E‖∇f(x_t)‖² ≤ 8 (1 - β1) (f(x_0) - f*) / (I η_g η_l T) + C1 ε_l² + C2 ε_g² + C3 ρ².

Averaging is the case β1 = ε_l = ε_g = 0, momentum the case ε_l = ε_g = 0. The functions are pure
functions of these numbers. The probe `ConvergenceMonitor` follows a run by its records.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from raysim.config.schema import Config
from raysim.config.sections.base import is_due
from raysim.config.sections.optimizer import PLAIN_SGD
from raysim.config.sections.schedule import Sync
from raysim.diagnostics import full_gradients
from raysim.diagnostics.full_gradients import FullGradients
from raysim.engine.plan import EvaluatedModel, Probe, ProbedRun
from raysim.errors import ConfigError
from raysim.rules.contract import PLAIN_STEP, ServerRule, overridden
from raysim.rules.reports import Cohort

if TYPE_CHECKING:
    from raysim.engine.plan import Plan
    from raysim.training.trainers.trainer import Trainer

logger = logging.getLogger("raysim")


@dataclass(frozen=True)
class TheoremInputs:
    """Quantities of a run that enter the theorem."""

    lr: float
    """Client step size η_l."""

    server_lr: float
    """Server step size η_g."""

    beta1: float
    """Server momentum β1."""

    beta2: float
    """Decay β2 of the server's memory."""

    steps: int
    """Local steps I of a client in a round."""

    cohort: int
    """Clients S of a round."""

    clients: int
    """Clients N with data."""

    rounds: int
    """Rounds T."""

    @property
    def kappa(self) -> float:
        """Variance (N - S) / (S (N - 1)) of a mean over S of N clients without replacement."""
        N = self.clients
        S = self.cohort
        return (N - S) / (S * (N - 1)) if N > 1 else 0.0


@dataclass(frozen=True)
class Condition:
    """Condition of Theorem 1: `value` must not exceed `limit`."""

    name: str
    """Number of the condition in the paper."""

    text: str
    """Quantity that is limited."""

    value: float
    """Value of the quantity."""

    limit: float
    """Largest value that the condition allows."""

    @property
    def share(self) -> float:
        """Ratio of the value to the limit."""
        return self.value / self.limit

    @property
    def holds(self) -> bool:
        """Whether the condition is satisfied."""
        return self.value <= self.limit


def conditions(s: TheoremInputs, L: float) -> list[Condition]:
    """Return the three conditions of Theorem 1, in its order.

    Args:
        s: the inputs of the theorem.
        L: smoothness of the clients' objectives, above 0.
    """
    return [
        Condition("(i)", "lr", s.lr, 1 / (math.sqrt(160) * L * s.steps)),
        Condition("(ii)", "lr · server lr", s.lr * s.server_lr, _largest_product(s, L)),
        Condition("(iii)", "drift + sampling", _drift(s, L) + _sampling(s, L), 1.0),
    ]


def _largest_product(s: TheoremInputs, L: float) -> float:
    """Return the right side of (ii); infinite for one client in a round and no momentum."""
    N = s.clients
    S = s.cohort
    spread = 4 * N * (S - 1) / (S * (N - 1)) if N > 1 else 0.0
    if s.beta1 + spread == 0:
        return math.inf
    return (1 - s.beta1) ** 2 / (s.steps * L * (s.beta1 + spread))


def _drift(s: TheoremInputs, L: float) -> float:
    """Return the first term of (iii), due to local steps."""
    return 320 * (s.steps * s.lr * L) ** 2


def _sampling(s: TheoremInputs, L: float) -> float:
    """Return the second term of (iii), due to the sampling of clients."""
    A = 40 * (s.steps * s.lr * L) ** 2
    return 64 * s.steps * s.server_lr * s.lr * L * (1 + A) * s.kappa / (1 - s.beta1) ** 2


def largest_lr(s: TheoremInputs, L: float) -> float:
    """Return the largest η_l that satisfies all conditions with the η_g of `s`.

    Args:
        s: the inputs of the theorem.
        L: smoothness of the clients' objectives, above 0.
    """
    # With u = I η_l L, condition (iii) is 320 u² + c u (1 + 40 u²) ≤ 1.
    c = 64 * s.server_lr * s.kappa / (1 - s.beta1) ** 2
    roots = np.roots([40 * c, 320, c, -1])
    third = max(root.real for root in roots if abs(root.imag) < 1e-9) / (s.steps * L)
    return min(conditions(s, L)[0].limit, _largest_product(s, L) / s.server_lr, third)


def largest_server_lr(s: TheoremInputs, L: float) -> float:
    """Return the largest η_g that satisfies all conditions with the η_l of `s`.

    It is 0 if that η_l is too large for any η_g.

    Args:
        s: the inputs of the theorem.
        L: smoothness of the clients' objectives, above 0.
    """
    remaining = 1 - _drift(s, L)
    sampling_per_lr = _sampling(s, L) / s.server_lr
    if remaining < 0 or not conditions(s, L)[0].holds:
        return 0.0
    third = remaining / sampling_per_lr if sampling_per_lr else math.inf
    return min(_largest_product(s, L) / s.lr, third)


def corollary(s: TheoremInputs, L: float) -> tuple[float, float]:
    """Return η_l = 1 / (√T L I) and η_g = √(S / I) of Corollary 1.

    Args:
        s: the inputs of the theorem.
        L: smoothness of the clients' objectives, above 0.
    """
    return 1 / (math.sqrt(s.rounds) * L * s.steps), math.sqrt(s.cohort / s.steps)


def bound(s: TheoremInputs, L: float, gap: float, eps_l: float, eps_g: float, rho2: float) -> float:
    """Return the right side of Theorem 1, which bounds the mean ‖∇f‖² if the conditions hold.

    Args:
        s: the inputs of the theorem.
        L: smoothness of the clients' objectives.
        gap: f(x_0) - f*, with f* the minimum of f.
        eps_l: error ε_l of the clients' directions.
        eps_g: error ε_g of the server's direction.
        rho2: heterogeneity ρ², the largest ‖∇f_i - ∇f‖².
    """
    c1 = 8 + _drift(s, L) + _sampling(s, L)
    c2 = 20 * s.server_lr * L / ((1 - s.beta1) ** 2 * (1 - s.beta2) * s.steps * s.lr)
    c2 += 8 / ((1 - s.beta2) * (s.steps * s.lr) ** 2)
    first = 8 * (1 - s.beta1) * gap / (s.steps * s.server_lr * s.lr * s.rounds)
    return first + c1 * eps_l**2 + c2 * eps_g**2 + (c1 - 8) * rho2


def why_not(plan: Plan) -> str | None:
    """Return why Theorem 1 does not apply to a run; None if it applies.

    Args:
        plan: the plan of the run.
    """
    c = plan.config
    server = plan.server
    if _heavy_ball(server) is None:
        return f"server rule '{server.name}' does more than momentum and averaging"
    if c.groups:
        return "groups of clients train differently (groups)"
    if not isinstance(c.schedule, Sync):
        return f"rounds are not synchronous (schedule.name={c.schedule.name})"
    if not isinstance(c.local.lr, float) or server.at(0) is not server:
        return "step sizes or beta change with the rounds (a schedule)"
    if len(set(_steps(plan))) > 1:
        return (
            "clients make different numbers of local steps; use local.steps instead of local.epochs"
        )
    return _why_other_steps(c)


def _why_other_steps(c: Config) -> str | None:
    """Return why local steps are not plain steps along gradients; None if they are."""
    local = c.local
    if local.max_grad_norm or local.weight_decay or c.privacy:
        return "local.max_grad_norm, local.weight_decay or privacy changes the gradients of steps"
    if local.optimizer != PLAIN_SGD or local.accumulate > 1 or local.precision != "float32":
        return "local.optimizer, local.accumulate or local.precision changes the local steps"
    return None


def departures(plan: Plan) -> list[str]:
    """Return the assumptions of the theorem that a run violates, although its inputs are defined.

    The bound need not hold then. For example, gradient noise does not vanish with T, and the f of
    the theorem is the unweighted mean of the f_i.

    Args:
        plan: the plan of the run.
    """
    schedule = plan.config.schedule
    server = f"server rule '{plan.server.name}'"
    violations = {
        f"{server} weighs clients differently (weights: uniform does not)": _weighs(plan),
        "rounds have different numbers of clients (schedule.deadline, schedule.client_dropout, "
        "schedule.availability, or clients without data)": _cohorts_vary(plan),
        "clients are not sampled uniformly (schedule.sampling)": (
            isinstance(schedule, Sync) and schedule.sampling.name != "uniform"
        ),
        f"{server} selects the clients": overridden(plan.server, ["select"]),
        "local steps do not follow full gradients (they do with local.batch_size=full, no "
        "augmentation, and a net without dropout or other random numbers)": _noisy(plan),
    }
    return [text for text, is_violated in violations.items() if is_violated]


def _cohorts_vary(plan: Plan) -> bool:
    """Return whether rounds may have different numbers of clients."""
    schedule = plan.config.schedule
    n_clients = len(plan.clients)
    if schedule.size < n_clients and plan.problem.n_nonempty < n_clients:
        return True  # clients without data are sampled
    if not isinstance(schedule, Sync):
        return False
    return bool(schedule.deadline or schedule.client_dropout or schedule.availability)


def _heavy_ball(server: ServerRule) -> tuple[float, float] | None:
    """Return (beta1, beta2) of a server rule whose update is the theorem's; None for any other.

    Such a rule has a property `heavy_ball`. Its update is x <- x - lr m̃ with
    m̃ = beta1 m̃ + mean(delta), up to an error that the rule reports as the metric `eps_g`. A rule
    that inherits the property but overrides `update` does not count.
    """
    mro = type(server).__mro__
    declares = next((cls for cls in mro if "heavy_ball" in vars(cls)), None)
    updates = next(cls for cls in mro if "update" in vars(cls))
    if declares is None or not issubclass(declares, updates):
        return None
    return getattr(server.at(0), "heavy_ball", None)


def _weighs(plan: Plan) -> bool:
    """Return whether the server weighs clients, in contrast to the theorem."""
    sizes = _sizes(plan)
    K = len(sizes)
    one_of_each_size = Cohort(
        0, list(range(K)), K, samples=sizes, steps=_steps(plan) * K, staleness=[0] * K
    )
    return not np.allclose(plan.server.weigh(one_of_each_size), 1 / K, rtol=1e-9)


def _noisy(plan: Plan) -> bool:
    """Return whether mini-batches, augmentation or draws change the gradients of local steps."""
    batch = plan.config.local.batch_size
    data = plan.dataset
    model = plan.idle_model
    is_random = bool(model.dropouts or model.draws)
    uses_minibatches = batch != "full" and int(plan.clients.sizes.max()) > batch
    return uses_minibatches or data.pad > 0 or data.flip or is_random


def theorem_inputs(plan: Plan) -> TheoremInputs:
    """Return the inputs of the theorem for a run to which it applies (`why_not` returns None).

    Args:
        plan: the plan of the run.
    """
    betas = _heavy_ball(plan.server)
    assert betas is not None
    beta1, beta2 = betas
    c = plan.config
    steps = _steps(plan)[0]
    N = plan.problem.n_nonempty
    cohort = min(c.schedule.size, N)
    return TheoremInputs(
        c.local.step_sizes.of_step(0), plan.server.lr, beta1, beta2, steps, cohort, N, c.rounds
    )


def _steps(plan: Plan) -> list[int]:
    """Return the distinct numbers of local steps of clients with data, in ascending order."""
    return sorted({plan.local_steps(plan.config.local, n) for n in _sizes(plan)})


def _sizes(plan: Plan) -> list[int]:
    """Return the distinct numbers of examples of clients with data, in ascending order."""
    return np.unique(plan.clients.sizes[plan.clients.sizes > 0]).tolist()


@dataclass
class ConvergenceMonitor(Probe):
    """Probe that compares a run with Theorem 1.

    `evaluate` measures the clients' full gradients at intervals and at the end. The rules report
    ε_l and ε_g as client/eps_l, client/eps_l_max and server/eps_g. Sums and maxima over rounds are
    computed from the records in order, so that a resumed run gives the same results.
    """

    name: ClassVar = "theory"
    """Name of the section under `evaluate`."""

    every: int = 10
    """Rounds from one evaluation to the next."""

    sample: int | None = None
    """Number of clients whose gradients are computed; None: all."""

    L: float | None = None
    """Smoothness; None: it is estimated."""

    f_star: float = 0.0
    """Minimum of the training loss, or a lower bound of it."""

    def check(self, plan: Plan) -> None:
        """Check that the theorem's terms can be measured. See `Probe.check`."""
        config = plan.config
        model = plan.idle_model
        passes = full_gradients.GRADIENT_FORWARD_PASSES
        if self.L is None:
            passes += full_gradients.CURVATURE_FORWARD_PASSES
        cost = full_gradients.compute_cost(config, plan.clients, model, self.sample, passes)
        times = sum(is_due(self.every, t, config.rounds) for t in range(config.rounds + 1))
        max_at_once = full_gradients.MAX_OPERATIONS_PER_EVALUATION
        max_in_run = full_gradients.MAX_OPERATIONS_PER_RUN
        operations = cost.operations
        if cost.too_much(max_at_once):
            raise ConfigError(
                f"evaluate.theory: one evaluation uses {cost.what}: {operations:.1e} "
                f"floating-point operations and {cost.room / 1e9:.1f} GB; "
                f"set evaluate.theory.sample={cost.fits(max_at_once)} (clients) or less"
            )
        if times * operations > max_in_run * cost.most:
            every = math.ceil(
                config.rounds * operations / (max_in_run * cost.most - 2 * operations)
            )
            raise ConfigError(
                f"evaluate.theory: {times} evaluations use {cost.what}: "
                f"{times * operations:.1e} floating-point operations; "
                f"set evaluate.theory.every={every} or more, or evaluate.theory.sample (clients)"
            )
        if self.L is None and (why := full_gradients.why_no_curvature(model)):
            raise ConfigError(
                f"evaluate.theory.L: cannot be estimated for model '{config.model.name}' ({why}); "
                "set it"
            )

    def begin(self, run: ProbedRun) -> None:
        """Start with a new run. See `Probe.begin`."""
        super().begin(run)
        plan = run.plan
        self.setting = None if why_not(plan) else theorem_inputs(plan)
        exact = None if _heavy_ball(plan.server) is None else 0.0
        self.default_eps = {
            "client": None if overridden(plan.client, PLAIN_STEP) else 0.0,
            "server": exact,
        }
        """ε_l and ε_g of rules that do not report them: 0 if steps are exact; None: unknown."""
        for violated in departures(plan) if self.setting else ():
            logger.warning(
                "evaluate.theory: the run violates an assumption of Theorem 1, so the bound need "
                "not hold: %s",
                violated,
            )
        self.norms: list[float] = []
        """‖∇f‖² at the evaluations so far."""
        self.gap: float | None = None
        """f(x_0) - f*; None before the first evaluation."""
        self.largest: dict[str, float | None] = {
            "eps_l_max": 0.0,
            "eps_g": 0.0,
            "rho2_max": 0.0,
            "L": 0.0,
        }
        """Largest values so far; None where a value is unknown."""
        for record in run.history:
            self.follow(record)

    def evaluates(self, rounds_done: int) -> bool:
        """Return whether a round is measured. See `Probe.evaluates`."""
        return is_due(self.every, rounds_done, self.run.plan.config.rounds)

    def evaluate(self, trainer: Trainer, model: EvaluatedModel) -> dict[str, float]:
        """Return f, ‖∇f‖², ρ² and the curvature at the model's parameters. See `Probe.evaluate`."""
        # The evaluator keeps its copy of the probe for all evaluations.
        if not hasattr(self, "gradients"):
            clients = full_gradients.chosen_clients(
                trainer.clients.sizes, self.sample, trainer.config.seed
            )
            self.gradients = FullGradients(trainer, clients, trainer.server.weights)
        return self.gradients.measure(model.global_params, model.buffers, self.L is None)

    def follow(self, record: Mapping[str, float]) -> dict[str, float]:
        """Return the conditions and the bound of the theorem; {} if the model was not evaluated.

        See `Probe.follow`.
        """
        eps = self._eps(record)
        self._note({key: value for key, value in eps.items() if key in self.largest})
        if "theory/grad_norm2" not in record:
            return {}
        curvature = record.get("theory/curvature", 0.0)
        self._note({"rho2_max": record["theory/rho2_max"], "L": self.L or curvature})
        if record["round"] == 0:
            self.gap = record["theory/f"] - self.f_star
        metrics = {**eps, "L": self.largest["L"]}
        if self.norms:
            metrics["grad_norm2_mean"] = sum(self.norms) / len(self.norms)
        self.norms.append(record["theory/grad_norm2"])
        metrics |= self._theorem(int(record["round"]))
        return {k: float(v) for k, v in metrics.items() if v is not None}

    def _eps(self, record: Mapping[str, float]) -> dict[str, float | None]:
        """Return ε_l and ε_g of a round: those that the rules report, else the defaults.

        It is {} for a round in which nobody trained.
        """
        if record["round"] == 0 or not record.get("clients/used"):
            return {}
        client = self.default_eps["client"]
        server = self.default_eps["server"]
        eps_l = {k: record.get(f"client/{k}", client) for k in ("eps_l", "eps_l_max")}
        return {**eps_l, "eps_g": record.get("server/eps_g", server)}

    def _note(self, values: Mapping[str, float | None]) -> None:
        """Update the largest values."""
        for key, value in values.items():
            before = self.largest[key]
            self.largest[key] = None if before is None or value is None else max(before, value)

    def _theorem(self, rounds: int) -> dict[str, float]:
        """Return the conditions as ratios to their limits, and the bound after `rounds` rounds."""
        L = self.largest["L"]
        if self.setting is None or not L:
            return {}
        metrics = {f"condition_{i}": c.share for i, c in enumerate(conditions(self.setting, L), 1)}
        terms = [self.gap, *map(self.largest.get, ("eps_l_max", "eps_g", "rho2_max"))]
        known = [term for term in terms if term is not None]
        if rounds and len(known) == len(terms):
            metrics["bound"] = bound(replace(self.setting, rounds=rounds), L, *known)
        return metrics
