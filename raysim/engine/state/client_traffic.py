"""The bytes that clients receive and send."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from raysim.engine.executor import RoundResults
from raysim.schedule import ScheduledRound
from raysim.training.messages import ClientResult


class RunTraffic:
    """Bytes down and up since the first round, as the workers measured them."""

    def __init__(self, estimate: Callable[[], int]):
        """Begin with no traffic.

        Args:
            estimate: returns the bytes of a version of the model. It is called only if they are
                needed before any client has received one.
        """
        self.down = self.up = 0
        self._estimate = estimate
        self.sizes: dict[int, int] = {}
        """The bytes of the versions that clients have received and that a client still needs."""

    def version_bytes(self, version: int) -> int:
        """Return the bytes of a version, or of the newest known one if no client received it.

        Args:
            version: number of the version.
        """
        if not self.sizes:
            return self._estimate()
        return self.sizes.get(version, self.sizes[max(self.sizes)])

    def count(
        self,
        scheduled: ScheduledRound,
        results: RoundResults,
        used: Iterable[ClientResult],
        versions: Collection[int],
    ) -> None:
        """Add what the clients of a round received and sent.

        A client that dropped out, missed the deadline or was too stale was not trained, and its
        base version is not known any more. It counts with the newest version.

        Args:
            scheduled: the arrivals of the round, and the numbers of clients that did not arrive.
            results: the results of its clients.
            used: those of them whose updates are used.
            versions: the versions of the model that a client still needs, the newest included.
        """
        for outcome in results.workers:
            self.sizes |= outcome.versions
        not_trained = scheduled.dropped_out + scheduled.missed_deadline + scheduled.discarded_stale
        self.down += sum(self.version_bytes(arrival.base) for arrival in scheduled.arrivals)
        n_others = not_trained + scheduled.selection.n_only_evaluated
        if n_others:
            self.down += self.version_bytes(max(versions)) * n_others
        self.up += sum(result.bytes for result in used)
        # The newest size also stands for versions of unknown size, see `version_bytes`.
        newest = max(self.sizes, default=None)
        self.sizes = {v: n for v, n in self.sizes.items() if v in versions or v == newest}
