"""Client sampling: how the cohort of a synchronous round is drawn from the available clients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

from numpy.random import Generator

from raysim.config.references import load_object
from raysim.config.sections.schedule import OwnSampling, PoissonSampling, SamplingBySamples, Sync
from raysim.errors import ConfigError, RaysimError, round_name
from raysim.rules.client_sampling import ClientPool, ClientSampling, client_numbers
from raysim.rules.errors.keyed_numbers import RANDOM_NUMBERS_PAGE, RNG_ARGUMENT, keyed_numbers_only
from raysim.rules.errors.user_code import translate_errors
from raysim.rules.methods.parameters import build_part

SECTION = "schedule.sampling"
"""The section of the configuration that names the sampling."""

Sampler = Callable[[ClientPool, int, Generator], Sequence[int]]
"""Returns the clients of round t, from the pool, t and a keyed generator."""


def make_sampler(schedule: Sync, n_clients: int, rounds: int) -> Sampler:
    """Return the configured sampling.

    Args:
        schedule: the section `schedule`.
        n_clients: number of clients that train; Poisson sampling divides the cohort by it.
        rounds: number of rounds; a user's rule is tried in the first two of them.

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
        return partial(_own, _load(sampling), schedule.cohort, rounds)
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
    rule: ClientSampling, size: int, rounds: int, pool: ClientPool, t: int, rng: Generator
) -> Sequence[int]:
    """Sample by a user's rule, and check its answer."""
    place = f"{round_name(t)}: {SECTION} {type(rule).__name__}"
    sampled = _sampled(rule, place, size, pool, t, rng)
    if t == 0:
        _try_again(rule, place, size, rounds, pool, rng, sampled)
    if len(set(sampled)) > size:
        raise RaysimError(
            f"{place} returned {len(set(sampled))} clients; return at "
            f"most `size` ({size}), or raise schedule.cohort"
        )
    return sampled


def _sampled(
    rule: ClientSampling, place: str, size: int, pool: ClientPool, t: int, rng: Generator
) -> list[int]:
    """Return the clients that a user's rule samples, after a check.

    It gets copies, because it may change the arrays, and later rounds use them too.
    """
    with (
        translate_errors(lambda text: RaysimError(f"{place} failed: {text}")),
        keyed_numbers_only(
            lambda drawn: RaysimError(f"{place} {drawn}, {RNG_ARGUMENT} {RANDOM_NUMBERS_PAGE}")
        ),
    ):
        returned = rule.sample(*copy.deepcopy((pool, size, t, rng)))
    try:
        return client_numbers(returned, pool)
    except ValueError as error:
        raise RaysimError(f"{place} {error}") from None


def _try_again(
    rule: ClientSampling,
    place: str,
    size: int,
    rounds: int,
    pool: ClientPool,
    rng: Generator,
    sampled: list[int],
) -> None:
    """Refuse a user's rule that samples other clients when rounds are sampled again.

    Another round lies between, since a rule that keeps something may give the same twice in a row.
    """
    first = {0: sampled}
    for t in (0, 1, 0, 1):
        if t >= rounds:
            continue
        again = _sampled(rule, place, size, pool, t, rng)
        if first.setdefault(t, again) != again:
            raise RaysimError(
                f"{place} returned {first[t]}, and {again} for the same arguments, as with an "
                "attribute or a generator of its own, which a resumed run has not; use only the "
                f"arguments {RANDOM_NUMBERS_PAGE}"
            )


def _load(sampling: OwnSampling) -> ClientSampling:
    """Return the user's sampling rule with its parameters."""
    cls = load_object(sampling.name, f"{SECTION}.name")
    if not (isinstance(cls, type) and issubclass(cls, ClientSampling)):
        raise ConfigError(
            f"{SECTION}.name: '{sampling.name}' is not a subclass of raysim.rules.ClientSampling"
        )
    return build_part(SECTION, cls, sampling.parameters)
