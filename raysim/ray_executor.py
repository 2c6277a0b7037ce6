"""The executor over Ray: hires actors, deals blocks out to them, and makes good what is lost.

A round costs one call for each ClientActor: it trains its share of the blocks and sends one fixed-point sum. The driver
only hands references from one actor to the next. Actors do not restart by themselves (`max_restarts=0`), and nothing
that is lost shows in the result:

    a ClientActor      its blocks go to the others, one by one; a new actor takes its place as soon as there is room
    the EvalActor      a new one evaluates again
    the ServerActor    `Lost` is raised: the engine goes back to a checkpoint, with a new server
    a vector           likewise

Every wait has a timeout and says what it waits for.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim.actors import ClientActor, EvalActor, ServerActor, as_groups, packed, read_broadcast, unpacked
from raysim.block import Block, Broadcast, Done, Outcome
from raysim.config import Sync
from raysim.errors import ClientError, ConfigError, Lost, RaysimError
from raysim.executor import Next, Ready, Trained
from raysim.mailbox import Letter, Mailbox
from raysim.plan import Plan
from raysim.references import PREFIX
from raysim.rules import State, sums, with_mode
from raysim.server import Round

LARGEST_BOX = 64 * 2**20
"""Bytes of a mailbox at most; what does not fit goes through the object store."""

LOOK = 1.0
"""Seconds after which a wait looks around: for calls that failed, and for nodes that are gone."""

STARTS = 10
"""Times that a new server is started in the place of a lost one, over half a minute."""

ATTEMPTS = 3
"""Actors that may die over a block before its clients are to blame."""


def connect(address: str | None, cpus: float, log: Callable[[str], None]) -> bool:
    """Joins the cluster at hand (an address, or RAY_ADDRESS inside a submitted job), else starts Ray here with at
    least so many CPUs. Where Ray is there already, it stays as it is.

    Returns:
        Whether it was started or joined here, so that it is to be shut down here.
    """
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    try:
        if address:
            ray.init(address=address, **quiet)
        else:
            cores, wanted = os.cpu_count() or 1, int(np.ceil(cpus))
            if wanted > cores:
                log(f"resources: {cpus:g} CPUs are asked for, they share {cores} cores")
            ray.init(address="local", num_cpus=max(cores, wanted), include_dashboard=False, **quiet)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if not address:
            raise RaysimError(f"cannot start Ray on this machine: {reason}") from None
        raise RaysimError(
            f"cannot join Ray at {address}: {reason} (is it running? A cluster that asks for tokens wants "
            "RAY_AUTH_MODE=token and its ~/.ray/auth_token here)"
        ) from None
    return True


class Gone(Lost):
    """An actor that was waited for is gone."""


@dataclass
class Worker:
    """A ClientActor at work, and the node that it lives on."""

    actor: Any
    node: str


class RayExecutor:
    """The executor over Ray actors."""

    def __init__(self, log: Callable[[str], None]):
        self.log, self.wanted, self.ours = log, 0, False
        self.mended: Counter[str] = Counter(actors_lost=0, retried_blocks=0, server_restarts=0)
        self.workers: dict[int, Worker] = {}
        self.joining: dict[int, tuple[Any, Any]] = {}
        """Actors on their way, by their number: each with the word that it is there."""
        self.server: Any = None
        self.eval: Any = None
        self.boxes: dict[str, Mailbox] = {}

    @property
    def actors(self) -> int:
        """ClientActors at work."""
        return len(self.workers)

    def open(self, plan: Plan) -> None:
        r = plan.config.resources
        self.resources, self.timeout, self.wants_bases = r, r.timeout, plan.server.wants_bases
        self.on_client_error = plan.config.faults.on_client_error
        self._connect(plan)
        for name, module in list(sys.modules.items()):
            if name.startswith(PREFIX):
                cloudpickle.register_pickle_by_value(module)
        self.plan, self.home = ray.put(plan), ray.get_runtime_context().get_node_id()
        self.wanted, self.evaluates = r.actors, bool(plan.config.evaluate.every)
        self.server = self._start(ServerActor)
        self._hire()
        waiting = [self.server.node.remote(), *(word for _, word in self.joining.values())]
        nodes = _get(waiting, f"the start of {len(waiting)} actors", r.timeout)
        in_step = isinstance(plan.config.schedule, Sync)  # else several versions and rounds are out at one time
        if in_step and set(nodes) == {self.home}:
            self._make_boxes(plan)
            self._share(self.server)
        self._welcome()
        self.eval = self._start(EvalActor) if self.evaluates else None  # nobody has to wait for it

    def _connect(self, plan: Plan) -> None:
        r = plan.config.resources
        self.ours = connect(r.address, r.actors * r.cpus, self.log)
        have = ray.cluster_resources()
        for kind, wanted in (("CPU", r.actors * r.cpus), ("GPU", r.actors * r.gpus + 2 * r.server_gpus)):
            if wanted > have.get(kind, 0) + 1e-9:
                raise ConfigError(
                    f"resources: {r.actors} actors want {wanted:g} {kind}s, the cluster has "
                    f"{have.get(kind, 0):g}; lower resources.actors or the share of each"
                )

    # -- actors ----------------------------------------------------------------------------------------------------

    def _start(self, kind: Any, *arguments: Any, **more: Any) -> Any:
        """A new actor; where mailboxes are in use it must be on this node."""
        how = {"num_cpus": 0, "num_gpus": self.resources.server_gpus, "max_restarts": 0, **more}
        if self.boxes:
            how["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self.home, soft=False)
        return cast(Any, ray.remote(kind)).options(**how).remote(self.plan, *arguments)

    def _hire(self) -> None:
        """Starts actors until as many are there, or on their way, as are wanted."""
        r = self.resources
        for number in set(range(self.wanted)) - set(self.workers) - set(self.joining):
            actor = self._start(ClientActor, f"client {number}", num_cpus=r.cpus, num_gpus=r.gpus)
            self.joining[number] = actor, actor.node.remote()

    def _welcome(self, timeout: float = 0.0) -> None:
        """Who is ready is at work from now on; waits for the first one until then."""
        if not self.joining:
            return
        words = {word: number for number, (_, word) in self.joining.items()}
        for word in ray.wait(list(words), num_returns=1 if timeout else len(words), timeout=timeout)[0]:
            number = words[word]
            actor, _ = self.joining.pop(number)
            try:
                node = ray.get(word, timeout=self.timeout)
                self._share(actor)
            except (RayError, Gone) as error:
                self.mended["actors_lost"] += 1
                self.log(f"ClientActor {number} is lost at its start: {_first_line(error)}")
                continue
            self.workers[number] = Worker(actor, node)

    def staff(self) -> dict[int, Worker]:
        """Who is at work. In the place of who was lost new actors are sent for, and join as they are ready."""
        if len(self.workers) < self.wanted:
            self._hire()
            self._welcome()
        end = time.monotonic() + self.timeout
        while not self.workers:
            self._hire()
            self._welcome(timeout=LOOK)
            if time.monotonic() > end:
                raise RaysimError(
                    f"waited {self.timeout:g} s for a new ClientActor in the place of the last one, which is lost (out "
                    "of memory, or no room for another one?)"
                )
        return self.workers

    def lose(self, number: int, why: str) -> None:
        """A ClientActor is gone, or cannot be reached."""
        worker = self.workers.pop(number, None)
        if worker is not None:
            ray.kill(worker.actor)
            self.mended["actors_lost"] += 1
            self.log(f"ClientActor {number} is lost ({why}); {len(self.workers)} are left, a new one is sent for")

    def gone(self, workers: Iterable[int]) -> list[int]:
        """Those whose node is gone."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return [number for number in workers if number in self.workers and self.workers[number].node not in alive]

    # -- mailboxes -------------------------------------------------------------------------------------------------

    def _make_boxes(self, plan: Plan) -> None:
        """Mailboxes for the server and every ClientActor; without room for them the object store does it all."""
        P, Q = plan.problem.size, plan.initial[1].numel()
        up = (len(sums(plan.server.uploads)) * P + 2 * Q) * 8
        rows = len(with_mode(plan.server.uploads, "each")) * plan.config.schedule.size * (P + Q) * 8
        sizes = {f"client {i}": up + rows for i in range(self.wanted)}
        sizes["server"] = (len(plan.server.provides) * P + Q) * 8
        try:
            self.boxes = {name: Mailbox.new(min(size, LARGEST_BOX) + 4096) for name, size in sizes.items()}
        except OSError as error:
            self.log(f"no shared memory for mailboxes ({error}); the object store is used instead")

    def _share(self, actor: Any) -> None:
        if self.boxes:
            paths = {name: box.path for name, box in self.boxes.items()}
            _get(actor.share.remote(paths), "an actor to open the mailboxes", self.timeout)

    # -- the engine's methods --------------------------------------------------------------------------------------

    def broadcast(self, following: Round) -> Any:
        return self.server.broadcast.remote(following)

    def training(self, t: int) -> _Training:
        return _Training(self, t)

    def advance(self, round: Round, trained: Trained, bases: Mapping[int, Any], following: Round) -> Next:
        clients = [(outcome.ids, outcome.bound) for outcome in trained.done]
        wanted = dict(bases) if self.wants_bases else {}
        metrics, down = self.server.advance.remote(
            round, following, clients, list(wanted), *trained.uploads, *wanted.values()
        )
        return Next(_Awaited(metrics, f"the server update of round {round.t}", self.timeout), down)

    def evaluate(self, down: Any) -> _Evaluating | Ready[dict[str, float]]:
        return _Evaluating(self, self.server.publish.remote()) if self.evaluates else Ready({})

    def snapshot(self) -> _Awaited:
        return _Awaited(self.server.snapshot.remote(), "the server's state", self.timeout, lambda v: unpacked(v, "cpu"))

    def restore(self, snapshot: State) -> None:
        _get(self.server.restore.remote(packed(snapshot)), "the server to take its state back", self.timeout)

    def fetch(self, down: Any) -> Broadcast:
        version = _get(down, "a version of the model", self.timeout)
        if isinstance(version, Letter):  # in a mailbox, where it is the last one
            version = _get(self.server.publish.remote(), "the last version of the model", self.timeout)
        return read_broadcast(unpacked(version, "cpu"))

    def hold(self, version: Broadcast) -> Any:
        return ray.put(packed(as_groups(version)))

    def recover(self) -> None:
        """A new server, as it is at first, in the place of the one there was. Ray may put it on a node that is gone but
        not yet known to be; then there is another one a little later."""
        for left in reversed(range(STARTS)):
            self.mended["server_restarts"] += 1
            ray.kill(self.server)
            self.server = self._start(ServerActor)
            try:
                _get(self.server.node.remote(), "the start of a new server", self.timeout)
                self._share(self.server)
                return
            except Gone as gone:
                if not left:
                    raise
                self.log(f"{gone}; trying again")
                time.sleep(3 * LOOK)

    def another_evaluator(self, old: Any, why: str) -> None:
        """In the place of one that is lost, if nobody has seen to it yet."""
        if old is self.eval:
            self.mended["actors_lost"] += 1
            self.log(f"the EvalActor is lost ({why}); a new one takes its place")
            ray.kill(old)
            self.eval = self._start(EvalActor)

    def close(self) -> None:
        """Ends the actors, and Ray if it was started here."""
        if not ray.is_initialized():
            return
        clients = [*(worker.actor for worker in self.workers.values()), *(actor for actor, _ in self.joining.values())]
        for actor in filter(None, (*clients, self.server, self.eval)):
            ray.kill(actor)
        self.boxes = {}
        if self.ours:
            ray.shutdown()


@dataclass
class _Share:
    """Blocks that one call gave to one actor; its vectors, to be."""

    vectors: Any
    worker: int
    blocks: list[Block]


class _Training:
    """A round on its way: the blocks are dealt out, the largest first to the least busy actor.

    What a lost actor had is given to the others, block by block, and to each of them one at a time: so it is known over
    which block an actor died.
    """

    def __init__(self, executor: RayExecutor, t: int):
        self.executor, self.t = executor, t
        self.load: Counter[int] = Counter()
        self.downs: dict[int, Any] = {}
        self.waiting: dict[Any, _Share] = {}  # in the order of the calls
        self.again: deque[Block] = deque()
        self.deaths: dict[tuple[int, ...], list[str]] = {}
        """Over a block, known by its clients: what was said each time."""
        self.seconds: Counter[int] = Counter()
        self.uploads: list[Any] = []
        self.done: list[Outcome] = []

    def add(self, downs: Mapping[int, Any], blocks: list[Block]) -> None:
        """Deals blocks out to the actors that are there."""
        self.downs |= downs
        there, shares = self.executor.staff(), {}
        for block in sorted(blocks, key=lambda b: -sum(job.steps for job in b.jobs)):
            worker = min(there, key=lambda number: (self.load[number], number))
            self.load[worker] += sum(job.steps for job in block.jobs)
            shares.setdefault(worker, []).append(block)
        for worker, share in shares.items():
            self._send(worker, share)

    def get(self) -> Trained:
        """Waits for all of it.

        Raises:
            ClientError: actors died over a block, again and again.
            Lost: something that an actor needed is gone.
            RaysimError: nothing came for `resources.timeout` seconds.
        """
        timeout = self.executor.timeout
        last = time.monotonic()
        while self.waiting or self.again:
            self._send_again()
            ready, late = ray.wait(list(self.waiting), num_returns=len(self.waiting), timeout=min(LOOK, timeout))
            for word in ready:
                self._take(word)
            now = time.monotonic()
            last = now if ready else last
            if late and now - last >= timeout:
                actors = sorted({share.worker for share in self.waiting.values()})
                raise RaysimError(
                    f"round {self.t}: waited {timeout:g} s for ClientActors {actors} (resources.timeout is the limit)"
                )
            if late:
                for worker in self.executor.gone({share.worker for share in self.waiting.values()}):
                    self._lose(worker, "its node is gone")
        return Trained(self.uploads, self.done, {"train_seconds": float(max(self.seconds.values(), default=0.0))})

    def _send(self, worker: int, blocks: list[Block], again: bool = False) -> None:
        needed = {job.base: self.downs[job.base] for block in blocks for job in block.jobs}
        actor = self.executor.workers[worker].actor
        vectors, word = actor.train.remote(blocks, again, list(needed), *needed.values())
        self.waiting[word] = _Share(vectors, worker, blocks)

    def _send_again(self) -> None:
        """Gives the blocks of lost actors to those that have nothing else to do."""
        if self.again:
            busy = {share.worker for share in self.waiting.values()}
            for worker in sorted(set(self.executor.staff()) - busy)[: len(self.again)]:
                self._send(worker, [self.again.popleft()], again=True)

    def _take(self, word: Any) -> None:
        """What came of a call."""
        if (share := self.waiting.get(word)) is None:  # lost, with its actor
            return
        try:
            outcome: Any = ray.get(word, timeout=self.executor.timeout)
        except RayTaskError as error:
            what = f"round {self.t}: ClientActor {share.worker}"
            if isinstance(error.cause, RayError):
                raise Lost(f"{what} misses what it was to begin with: {_first_line(error.cause)}") from None
            raise RaysimError(f"{what} failed: {error}") from None
        except RayError as error:
            self._lose(share.worker, str(error))
            return
        del self.waiting[word]
        self.seconds[share.worker] += outcome.seconds
        self.uploads.append(share.vectors)
        self.done.append(outcome)

    def _lose(self, worker: int, why: str) -> None:
        """An actor is gone. The first of its calls is the one it was busy with."""
        words = [word for word, share in self.waiting.items() if share.worker == worker]
        shares = [self.waiting.pop(word) for word in words]
        for block in shares[0].blocks:
            clients = tuple(job.client for job in block.jobs)
            self.deaths.setdefault(clients, []).append(why)
        blocks = [block for share in shares for block in share.blocks]
        self.executor.lose(worker, f"in round {self.t}, with {len(blocks)} blocks: {_first_line(why)}")
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
        self.uploads.append({})
        self.done.append(Outcome([Done(client, error=said) for client in clients]))


class _Awaited:
    """A result on its way from an actor."""

    def __init__(self, reference: Any, what: str, timeout: float, read: Callable[[Any], Any] = lambda value: value):
        self.reference, self.what, self.timeout, self.read = reference, what, timeout, read

    def ready(self) -> bool:
        return bool(ray.wait([self.reference], timeout=0)[0])

    def get(self) -> Any:
        return self.read(_get(self.reference, self.what, self.timeout))


class _Evaluating(_Awaited):
    """An evaluation on its way, which another EvalActor can make again."""

    def __init__(self, executor: RayExecutor, version: Any):
        self.executor, self.version = executor, version
        self._send()

    def _send(self) -> None:
        self.by = self.executor.eval
        super().__init__(self.by.evaluate.remote(self.version), "the evaluation", self.executor.timeout)

    def get(self) -> dict[str, float]:
        for _ in range(ATTEMPTS):
            try:
                return super().get()
            except Gone as gone:
                self.executor.another_evaluator(self.by, _first_line(gone))
                self._send()
        raise RaysimError(f"the EvalActor is lost again and again, {ATTEMPTS} times over one evaluation")


def _get(reference: Any, what: str, timeout: float) -> Any:
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
        raise Gone(f"{what} failed: {_first_line(error)}") from None


def _first_line(said: object) -> str:
    """Of what Ray says at length; of an actor that failed at its start the last line, which says why."""
    lines = [line.strip() for line in str(said).splitlines() if line.strip()] or [type(said).__name__]
    return lines[-1] if "creation task" in lines[0] else lines[0]
