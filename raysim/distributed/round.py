"""A round on its way over Ray: blocks go out to actors, sums come in, and what is lost on the way is done again."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from raysim.distributed.block_scheduler import Dealing, steps
from raysim.distributed.traffic import Traffic
from raysim.engine.executor import Trained
from raysim.errors import ClientError, Lost, RaysimError
from raysim.training.messages import Block, Done, Outcome

if TYPE_CHECKING:
    from raysim.distributed.executor import RayExecutor

LOOK = 1.0
"""Seconds after which a wait looks around: for actors that have failed, and for nodes that are gone."""

ATTEMPTS = 3
"""Actors that may die over a block before its clients are to blame."""


class Gone(Lost):
    """An actor that was waited for is gone."""


@dataclass
class Worker:
    """A ClientActor at work, the node that it lives on, and the GPUs that it has a share of."""

    actor: Any
    node: str
    gpus: list[str]


@dataclass
class Upload:
    """What goes up for some clients: references to their sum and perhaps their single rows, and a bound of the sum."""

    vectors: list[Any]
    ids: list[int]
    bound: float


@dataclass
class _Share:
    """Blocks that one call gave to one actor; its vectors, to be; and in the end what came of it."""

    vectors: list[Any]
    worker: int
    node: str
    gpus: list[str]
    blocks: list[Block]
    outcome: Outcome

    @property
    def who(self) -> str:
        return f"ClientActor {self.worker}"


@dataclass
class _Sum:
    """What the shares of a node add up to, to be."""

    vector: Any
    node: str
    name: str
    shares: list[_Share]

    @property
    def who(self) -> str:
        return f"the Adder of node {self.name}"


class RayTraining:
    """A round on its way: its blocks are dealt out, and where they were trained on other nodes than the server's, each
    node's sums are added up there when all is trained.

    What a lost actor had is given to the others, block by block, and to each of them one at a time: so it is known over
    which block an actor died. What a lost Adder was to add up is lost likewise.
    """

    def __init__(self, executor: RayExecutor, t: int):
        self.executor, self.t = executor, t
        self.dealing = Dealing(executor.paces)
        self.traffic = Traffic(executor.network)
        self.downs: dict[int, Any] = {}
        self.waiting: dict[Any, _Share | _Sum] = {}  # in the order of the calls
        self.again: deque[Block] = deque()
        self.alone: set[str] = set()
        """Nodes whose sums travel as they are, because nobody there adds them up any more."""
        self.deaths: dict[tuple[int, ...], list[str]] = {}
        """Over a block, known by its clients: what was said each time."""
        self.seconds: Counter[int] = Counter()
        self.trained: list[_Share] = []
        """What has not gone up yet."""
        self.uploads: list[Upload] = []
        self.done: list[Outcome] = []

    def add(self, downs: Mapping[int, Any], blocks: list[Block]) -> None:
        """Deals blocks out to the actors that are there."""
        self.downs |= downs
        for worker, share in self.dealing.deal(blocks, self.executor.staff()).items():
            self._send(worker, share)

    def get(self) -> Trained:
        """Waits for all of it.

        Raises:
            ClientError: actors died over a block, again and again.
            Lost: something that an actor needed is gone, or the server.
            RaysimError: Ray itself has failed.
        """
        last = looked = time.monotonic()
        while self.waiting or self.again or self.dealing.left or self._add_up():
            self._send_more()
            enough = 1 if self.again or self.dealing.left else len(self.waiting)
            ready, late = ray.wait(list(self.waiting), num_returns=enough, timeout=LOOK)
            for word in ready:
                self._take(word)
            now = time.monotonic()
            last = now if ready else last
            if late and now - looked >= LOOK:
                looked = now
                self._look_around(now - last)
        found = {
            "train_seconds": float(max(self.seconds.values(), default=0.0)),
            **self.traffic.figures(self.executor.actors),
        }
        return Trained(self.uploads, self.done, found)

    def _send(self, worker: int, blocks: list[Block], again: bool = False) -> None:
        needed = {job.base: self.downs[job.base] for block in blocks for job in block.jobs}
        one = self.executor.workers[worker]
        *vectors, word = one.actor.train.remote(blocks, again, list(needed), *needed.values())
        self.waiting[word] = _Share(
            vectors[: 1 + self.executor.sends_rows], worker, one.node, one.gpus, blocks, Outcome()
        )
        self.traffic.sent(one.node, needed)

    def _send_more(self) -> None:
        """Gives the blocks of lost actors, and those that were kept back, to actors that have nothing else to do."""
        if self.again or self.dealing.left:
            busy = {call.worker for call in self.waiting.values() if isinstance(call, _Share)}
            for worker in sorted(set(self.executor.staff()) - busy):
                blocks = [self.again.popleft()] if self.again else self.dealing.helping(self.executor.actors)
                if blocks:
                    self._send(worker, blocks, again=True)

    def _take(self, word: Any) -> None:
        """What came of a call."""
        if (call := self.waiting.get(word)) is None:  # lost, with its actor
            return
        try:
            found: Any = ray.get(word, timeout=self.executor.timeout)
        except RayError as error:
            self._failed(word, call, error)
            return
        del self.waiting[word]
        if isinstance(call, _Sum):
            sums = [share for share in call.shares if share.outcome.ids]
            rows = [vector for share in sums for vector in share.vectors[1:]]
            self._send_up([call.vector, *rows], call.shares, found + sum(share.outcome.bytes[1] for share in sums))
            return
        call.outcome = found
        self.seconds[call.worker] += found.seconds
        self.executor.paces.saw(call.worker, steps(call.blocks), found.seconds)
        self.trained.append(call)

    # -- on the way up ---------------------------------------------------------------------------------------------

    def _add_up(self) -> bool:
        """When all is trained, it goes up: a node's sums as they are, or added up. Whether that is waited for."""
        trained, self.trained = self.trained, []
        for node in sorted({share.node for share in trained}):
            shares = [share for share in trained if share.node == node]
            sums = [share for share in shares if share.outcome.ids]
            if node not in self.alone and self.executor.adds_up(node, len(sums)):
                bound = sum(share.outcome.bound for share in sums)
                vectors = [share.vectors[0] for share in sums]
                vector, word = self.executor.adder(node).add.remote(bound, *vectors)
                self.waiting[word] = _Sum(vector, node, self.executor.network.name(node), shares)
            else:
                for share in shares:
                    self._send_up(share.vectors, [share], sum(share.outcome.bytes))
        return bool(self.waiting)

    def _send_up(self, vectors: list[Any], shares: list[_Share], size: int) -> None:
        ids = [client for share in shares for client in share.outcome.ids]
        if ids:
            self.uploads.append(Upload(vectors, ids, sum(share.outcome.bound for share in shares)))
            self.traffic.up(shares[0].node, size)
        for share in shares:
            self.done.append(share.outcome)
            self.traffic.trained(share.node, share.gpus, share.outcome)

    # -- what is lost ----------------------------------------------------------------------------------------------

    def _failed(self, word: Any, call: _Share | _Sum, error: RayError) -> None:
        """A call came to nothing: its actor is gone, or something that it needed, or it made a mistake."""
        missing = error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, RayError) else None
        if isinstance(call, _Sum) and (missing or not isinstance(error, RayTaskError)):
            self._lose_sum(word, first_line(missing or error))
        elif isinstance(error, RayTaskError):
            what = f"round {self.t}: {call.who}"
            if isinstance(error.cause, RaysimError):
                raise error.cause from None
            if missing:
                raise Lost(f"{what} misses what it was to begin with: {first_line(missing)}") from None
            raise RaysimError(f"{what} failed: {error}") from None
        elif isinstance(call, _Share):
            self._lose(call.worker, str(error))

    def _look_around(self, waited: float) -> None:
        """Looks for failures that do not make calls fail: actors that hang, and nodes that are gone. `waited`: seconds
        without an answer."""
        self.executor.check_server(f"round {self.t}")
        gone = self.executor.watch.dead_nodes()
        for word, call in list(self.waiting.items()):
            if word not in self.waiting:  # lost just now
                continue
            why = "its node is gone" if call.node in gone else self.executor.failure(self._actor(call))
            if why and isinstance(call, _Sum):
                self._lose_sum(word, why)
            elif why and isinstance(call, _Share):
                self._lose(call.worker, why)
        self._look_for_work(waited)

    def _look_for_work(self, waited: float) -> None:
        """Raises Lost where nobody has failed and nobody works: then what they need does not come."""
        executor, busy = self.executor, [self._actor(call) for call in self.waiting.values()]
        if not busy or min(executor.idle_s([executor.server, *busy]), waited) < executor.timeout:
            return
        who = sorted({call.who for call in self.waiting.values()})
        for worker in {call.worker for call in self.waiting.values() if isinstance(call, _Share)}:
            executor.lose(worker, f"in round {self.t}: nothing arrives there")
        raise Lost(
            f"round {self.t}: {', '.join(who)} and the ServerActor have had nothing to do for {executor.timeout:g} s; "
            "Ray does not deliver what they need (resources.timeout)"
        )

    def _actor(self, call: _Share | _Sum) -> Any:
        """Who works on a call."""
        if isinstance(call, _Sum):
            return self.executor.adders.get(call.node)
        worker = self.executor.workers.get(call.worker)
        return worker and worker.actor

    def _lose_sum(self, word: Any, why: str) -> None:
        """A node's sum will never be: its Adder is gone, or what it was to add up."""
        found = self.waiting.pop(word)
        assert isinstance(found, _Sum)
        blocks = [block for share in found.shares for block in share.blocks]
        self.executor.lose_adder(found.node, f"in round {self.t}, with {len(blocks)} blocks: {why}")
        self.executor.mended["retried_blocks"] += len(blocks)
        self.alone.add(found.node)
        self.again.extend(blocks)

    def _lose(self, worker: int, why: str) -> None:
        """An actor is gone. The first of its calls is the one it was busy with."""
        calls = {w: one for w, one in self.waiting.items() if isinstance(one, _Share) and one.worker == worker}
        for word in calls:
            del self.waiting[word]
        shares = list(calls.values())
        for block in shares[0].blocks:
            clients = tuple(job.client for job in block.jobs)
            self.deaths.setdefault(clients, []).append(why)
        blocks = [block for share in shares for block in share.blocks]
        self.executor.lose(worker, f"in round {self.t}, with {len(blocks)} blocks: {first_line(why)}")
        self.executor.mended["retried_blocks"] += len(blocks)
        for block in blocks:
            clients = tuple(job.client for job in block.jobs)
            if len(self.deaths.get(clients, ())) < ATTEMPTS:
                self.again.append(block)
            else:
                self._give_up(clients, self.deaths[clients][0])

    def _give_up(self, clients: tuple[int, ...], why: str) -> None:
        who = ("client " if len(clients) == 1 else "clients ") + ", ".join(map(str, clients))
        said = f"the actor that trained {who} died, {ATTEMPTS} times in turn; the first time: {why.strip()}"
        if self.executor.on_client_error == "stop":
            raise ClientError(f"round {self.t}: {said}\n(faults.on_client_error=drop goes on without such clients)")
        self.done.append(Outcome([Done(client, error=said) for client in clients]))


class Awaited:
    """A result on its way from an actor."""

    def __init__(
        self,
        executor: RayExecutor,
        reference: Any,
        what: str,
        *actors: Any,
        read: Callable[[Any], Any] = lambda value: value,
    ):
        self.executor, self.reference, self.what, self.actors, self.read = executor, reference, what, actors, read

    def ready(self) -> bool:
        return bool(ray.wait([self.reference], timeout=0)[0])

    def get(self) -> Any:
        return self.read(self.executor.wait(self.reference, self.what, *self.actors))


def get(reference: Any, what: str, timeout: float) -> Any:
    """`ray.get` that says what it waits for, and passes on raysim's own errors as they were raised."""
    try:
        return ray.get(reference, timeout=timeout)
    except GetTimeoutError:
        raise RaysimError(
            f"waited {timeout:g} s for {what}; it may be overloaded, or its node lost (resources.timeout is the limit)"
        ) from None
    except RayTaskError as error:
        if isinstance(error.cause, RaysimError):
            raise error.cause from None
        kind = Lost if isinstance(error.cause, RayError) else RaysimError
        raise kind(f"{what} failed: {error}") from None
    except RayError as error:
        raise Gone(f"{what} failed: {first_line(error)}") from None


def first_line(said: object) -> str:
    """Of what Ray says at length; of an actor that failed at its start the last line, which says why."""
    lines = [line.strip() for line in str(said).splitlines() if line.strip()] or [type(said).__name__]
    return lines[-1] if "creation task" in lines[0] else lines[0]
