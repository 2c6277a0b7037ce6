"""Client sampling: how the cohort of a synchronous round is drawn from the available clients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

from numpy.random import Generator

from raysim.config.references import load_object
from raysim.config.sections.schedule import OwnSampling, PoissonSampling, SamplingBySamples, Sync
from raysim.errors import ConfigError, RaysimError, round_name
from raysim.rules.client_sampling import ClientPool, ClientSampling
from raysim.rules.errors.keyed_numbers import RANDOM_NUMBERS_PAGE, RNG_ARGUMENT, keyed_numbers_only
from raysim.rules.errors.user_code import translate_errors
from raysim.rules.methods.registry import build_part

SECTION = "schedule.sampling"
"""The section of the configuration that names the sampling."""

Sampler = Callable[[ClientPool, int, Generator], Sequence[int]]
"""Returns the clients of round t, from the pool, t and a keyed generator."""


def make_sampler(schedule: Sync, n_clients: int) -> Sampler:
    """Return the configured sampling.

    Args:
        schedule: the section `schedule`.
        n_clients: number of clients that train; Poisson sampling divides the cohort by it.

    Returns:
        A function of the pool, the round and a keyed generator that returns a cohort.

    Raises:
        ConfigError: a user's sampling rule cannot be loaded or built.
    """
    sampling = schedule.sampling
    if isinstance(sampling, SamplingBySamples):
        return partial(_by_samples, schedule.cohort, sampling.replace)
    if isinstance(sampling, PoissonSampling):
        return partial(_poisson, schedule.cohort / n_clients)
    if isinstance(sampling, OwnSampling):
        return partial(_own, _load(sampling), schedule.cohort)
    return partial(_uniform, schedule.cohort)


def _uniform(size: int, pool: ClientPool, t: int, rng: Generator) -> Sequence[int]:
    """Sample without replacement, each client equally likely."""
    return pool.ids[rng.choice(len(pool.ids), min(size, len(pool.ids)), replace=False)].tolist()


def _by_samples(
    size: int, replace: bool, pool: ClientPool, t: int, rng: Generator
) -> Sequence[int]:
    """Sample with probabilities proportional to the clients' numbers of examples."""
    shares = pool.samples / pool.samples.sum()
    if not replace:
        size = min(size, int((pool.samples > 0).sum()))
    return pool.ids[rng.choice(len(pool.ids), size, replace=replace, p=shares)].tolist()


def _poisson(q: float, pool: ClientPool, t: int, rng: Generator) -> Sequence[int]:
    """Sample each client with probability q, independently, in the order of their numbers."""
    return pool.ids[rng.random(len(pool.ids)) < q].tolist()


def _own(
    rule: ClientSampling, size: int, pool: ClientPool, t: int, rng: Generator
) -> Sequence[int]:
    """Sample by a user's rule, and check its answer."""
    name = type(rule).__name__
    place = f"{round_name(t)}: {SECTION} {name}"
    with (
        translate_errors(lambda text: RaysimError(f"{place} failed: {text}")),
        keyed_numbers_only(
            lambda drawn: RaysimError(f"{place} {drawn}, {RNG_ARGUMENT} {RANDOM_NUMBERS_PAGE}")
        ),
    ):
        repeated = copy.deepcopy((pool, size, t, rng)) if t == 0 else None
        sampled = [int(client) for client in rule.sample(pool, size, t, rng)]
        again = sampled if repeated is None else list(map(int, rule.sample(*repeated)))
    if again != sampled:
        raise RaysimError(
            f"{place} returned {sampled}, and {again} for the same arguments, as with an attribute "
            "or a generator of its own, which a resumed run has not; use only the arguments "
            f"{RANDOM_NUMBERS_PAGE}"
        )
    unknown = sorted(set(sampled) - set(pool.ids.tolist()))
    if unknown:
        raise RaysimError(
            f"{place} returned client {unknown[0]}, which is not in "
            "pool.ids; return numbers from pool.ids"
        )
    if len(set(sampled)) > size:
        raise RaysimError(
            f"{place} returned {len(set(sampled))} clients; return at "
            f"most `size` ({size}), or raise schedule.cohort"
        )
    return sampled


def _load(sampling: OwnSampling) -> ClientSampling:
    """Return the user's sampling rule with its parameters."""
    cls = load_object(sampling.name, f"{SECTION}.name")
    if not (isinstance(cls, type) and issubclass(cls, ClientSampling)):
        raise ConfigError(
            f"{SECTION}.name: '{sampling.name}' is not a subclass of raysim.rules.ClientSampling"
        )
    return build_part(SECTION, cls, sampling.parameters)
