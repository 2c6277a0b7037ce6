"""`schedule`: which clients take part in a round, and when they arrive."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from raysim.config.identity import Identity
from raysim.config.sections.base import Named, Positive, Section, ShortForm, kind_or_own, named


class Constant(Section):
    """Every task takes one unit of virtual time."""

    name: Literal["constant"] = "constant"


class UniformArrival(Section):
    """Exponential times with mean 1: every client in flight is equally likely to arrive next.

    The K arrivals of a K-async round are then K of N clients, uniformly at random (Zhou 2022).
    """

    name: Literal["uniform_arrival"] = "uniform_arrival"


class Jittered(Section):
    """Client times with random factors."""

    jitter: float = Field(default=0.1, ge=0, le=5)
    """Spread of each task's factor exp(jitter z - jitter²/2), z standard normal; its mean is 1."""


class Lognormal(Jittered):
    """Mean times exp(sigma z), drawn once for each client."""

    name: Literal["lognormal"]
    sigma: float = Field(default=0.5, ge=0, le=5)
    """Spread of the mean times, in logarithms."""


class TwoSpeed(Jittered):
    """Two kinds of clients, fast and slow."""

    name: Literal["two_speed"]
    slow: float = Field(default=0.1, gt=0, lt=1)
    """Fraction of clients that are slow, at least one: those with the highest numbers."""
    factor: float = Field(default=2.0, gt=0)
    """Time of a slow client, in units of a fast one's."""


class ByData(Jittered):
    """Mean times proportional to a client's examples; the average client that trains takes 1."""

    name: Literal["data"]


class Trace(Jittered):
    """Measured times from a CSV file; virtual time is in seconds.

    A task takes down + up + seconds_per_sample times its examples. Each local step counts a whole
    batch of `batch_size` (at most the client's examples), each epoch the client's examples.
    """

    name: Literal["trace"]
    path: Annotated[str, Identity.NEVER]
    """CSV file with the columns client, seconds_per_sample, down, up."""
    jitter: float = Field(default=0.0, ge=0, le=5)
    """Spread of each task's random factor."""


ClientSpeeds = Annotated[
    Constant | UniformArrival | Lognormal | TwoSpeed | ByData | Trace, Field(discriminator="name")
]


class ClientDropout(Section):
    """Clients that drop out: their task never arrives.

    The drop-out shows when the task should have ended, and in a synchronous round with a `deadline`
    at the deadline.
    """

    rate: float = Field(gt=0, le=1)
    """Probability that a task drops out."""
    rejoin_after: float | None = Field(default=1.0, gt=0)
    """Virtual time after which the client is available again, with the model of that time; null:
    never."""

    @model_validator(mode="after")
    def _some_clients_arrive(self) -> ClientDropout:
        if self.rate == 1 and self.rejoin_after is not None:
            raise ValueError("a 'rate' of 1 loses every task forever; lower it")
        return self


class Availability(Section):
    """Windows in which clients start tasks. A task that was started is finished.

    Each client's period begins at a time of its own.
    """

    period: float = Field(ge=1e-6)
    """Length of a period, in virtual time."""
    open: float = Field(ge=1e-6)
    """Length of the window at the beginning of each period."""

    @model_validator(mode="after")
    def _opens_and_closes(self) -> Availability:
        if self.open >= self.period:
            raise ValueError(f"'open' must be shorter than 'period' ({self.period:g})")
        return self


class Clocked(Section):
    """Keys that all schedules have."""

    client_speeds: Annotated[ClientSpeeds, ShortForm(named)] = Constant()
    """Virtual time that clients' tasks take."""
    client_dropout: ClientDropout | None = None
    """Tasks that never arrive; null: none."""
    availability: Availability | None = None
    """Windows in which clients start tasks; null: always."""

    SIZE_KEY: ClassVar[str]
    """Name of the key that holds the number of clients in a round."""

    @property
    def size(self) -> int:
        """Number of clients in a round; the expected number under Poisson sampling."""
        return getattr(self, self.SIZE_KEY)

    @property
    def time_is_rounds(self) -> bool:
        """Whether the virtual time is always the number of rounds."""
        return False

    def largest_round(self, n_clients: int) -> int:
        """Return the largest number of clients that a round can have, of `n_clients`.

        Args:
            n_clients: number of clients that may train.
        """
        return self.size


class UniformSampling(Section):
    """Every available client is equally likely; without replacement."""

    name: Literal["uniform"] = "uniform"


class SamplingBySamples(Section):
    """Clients with more examples are more likely (Li X. 2020).

    With replacement, a client's chance in each of the `cohort` draws is its share of all samples,
    and a client that is drawn k times counts k times in means of uniform weights: if all of
    them return, such a mean is an unbiased estimate of the mean over all samples.
    """

    name: Literal["samples"]
    replace: bool = True
    """Whether a client can be drawn more than once in a round."""


class PoissonSampling(Section):
    """Each available client takes part with probability `cohort` / N, independently.

    The number of clients in a round is random; a round may be empty.
    """

    name: Literal["poisson"]


class OwnSampling(Named):
    """A user's sampling rule; see `raysim.rules.ClientSampling`."""

    name: str = Field(pattern=":")
    """path.py:Class"""


Sampling = Annotated[
    Annotated[UniformSampling, Tag("uniform")]
    | Annotated[SamplingBySamples, Tag("samples")]
    | Annotated[PoissonSampling, Tag("poisson")]
    | Annotated[OwnSampling, Tag("own")],
    Discriminator(kind_or_own),
]


class Sync(Clocked):
    """Synchronous rounds: a sampled cohort starts together."""

    name: Literal["sync"] = "sync"
    cohort: int = Field(default=10, ge=1)
    """Number of clients in a round; the expected number under Poisson sampling."""
    sampling: Annotated[Sampling, ShortForm(named), Identity.UNLESS_DEFAULT] = UniformSampling()
    """Which clients take part: `uniform`, `samples`, `poisson`, or path.py:Class."""
    deadline: Positive | None = None
    """Virtual time after which stragglers are dropped; null: all are awaited."""

    SIZE_KEY = "cohort"

    @property
    def time_is_rounds(self) -> bool:
        """Whether every round takes one unit: equal speeds, everybody available and awaited.

        Rounds of Poisson sampling and of a user's rule may be empty; these take no time.
        """
        may_be_empty = isinstance(self.sampling, PoissonSampling | OwnSampling)
        all_alike = isinstance(self.client_speeds, Constant) and self.deadline is None
        nobody_away = self.client_dropout is None and self.availability is None
        return all_alike and nobody_away and not may_be_empty

    def largest_round(self, n_clients: int) -> int:
        """Return the largest number of clients that a round can have, of `n_clients`.

        Args:
            n_clients: number of clients that may train.
        """
        return n_clients if isinstance(self.sampling, PoissonSampling) else self.cohort


class InFlight(Clocked):
    """Asynchronous rounds: each ends with its K-th arrival, while other clients continue."""

    concurrency: int | None = Field(default=None, ge=1)
    """Number of clients that train at one time. null: with `kasync` all clients with data, with
    `buffered` all of them but `buffer_size`."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Largest number of rounds that an arriving update may be behind; others are discarded, and
    their clients start again. null: no limit."""
    client_speeds: Annotated[ClientSpeeds, ShortForm(named)] = UniformArrival()
    """Virtual time that clients' tasks take."""

    def places(self, n_clients: int) -> int:
        """Return how many of `n_clients` clients with data train at one time.

        Args:
            n_clients: number of clients with data.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no places")

    @model_validator(mode="after")
    def _enough_in_flight(self) -> InFlight:
        if self.concurrency is not None and self.size > self.concurrency:
            raise ValueError(
                f"'{self.SIZE_KEY}' ({self.size}) cannot be more than 'concurrency' "
                f"({self.concurrency}), the clients that train at one time"
            )
        return self


class KAsync(InFlight):
    """K-async rounds: `concurrency` clients (null: all with data) train all the time.

    The first K that arrive wait for the end of the round and start again with the new model. The
    others continue from the model that they have.
    """

    name: Literal["kasync"]
    k: int = Field(default=10, ge=1)
    """Arrivals that end a round."""

    SIZE_KEY = "k"

    def places(self, n_clients: int) -> int:
        """Return how many of `n_clients` clients with data train at one time.

        Args:
            n_clients: number of clients with data.
        """
        return self.concurrency or n_clients


class Buffered(InFlight):
    """Buffered rounds: an idle client takes the place of one that arrived (Nguyen 2022).

    It starts at once, with the newest model. A client that arrived rests until the round ends. With
    `concurrency` null, N - K of the N clients with data are in flight, the most for which an idle
    one is always available (K, if N is smaller than 2K).
    """

    name: Literal["buffered"]
    buffer_size: int = Field(default=10, ge=1)
    """Arrivals K that end a round."""

    SIZE_KEY = "buffer_size"

    def places(self, n_clients: int) -> int:
        """Return how many of `n_clients` clients with data train at one time.

        Args:
            n_clients: number of clients with data.
        """
        return self.concurrency or max(self.buffer_size, n_clients - self.buffer_size)


Schedule = Annotated[Sync | KAsync | Buffered, Field(discriminator="name")]
