"""Ray actors: ClientActors pinned to CPUs or a share of a GPU, one ServerActor, one EvalActor.

The run's plan (data, partition, net) goes into the object store once and is shared by the actors of a node without
a copy. A round costs one call for each ClientActor: it trains its share of the blocks and sends one fixed-point sum.
Vectors never pass through the driver; it hands references from one actor to the next. Actors do not restart by
themselves (`max_restarts=0`): the driver gives the share of a lost one to those that are left. Every wait has a
timeout.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from torch import Tensor

from raysim.block import Block, Broadcast, Outcome
from raysim.config import Sync
from raysim.data.arrays import shared_tensor
from raysim.errors import ConfigError, RaysimError
from raysim.executor import Evaluator, Next, Ready, Trained, make_server, make_trainer, settle
from raysim.mailbox import Letter, Mailbox
from raysim.plan import Plan
from raysim.references import PREFIX
from raysim.rules import State, sums, with_mode
from raysim.server import Round

LARGEST_BOX = 64 * 2**20
"""Bytes of a mailbox at most; what does not fit goes through the object store."""

Tree = dict[str, Any]


def _packed(value: Any) -> Any:
    """Tensors as numpy arrays, which the object store shares without a copy."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, dict):
        return {k: _packed(v) for k, v in value.items()}
    return value


def _unpacked(value: Any, device: str) -> Any:
    if isinstance(value, np.ndarray):
        return shared_tensor(value).to(device)
    if isinstance(value, dict):
        return {k: _unpacked(v, device) for k, v in value.items()}
    return value


class _Actor:
    """What all actors have: a device, and the mailboxes of this machine.

    The device is the first GPU that Ray lets it see, or the CPU. An actor without a share of a GPU still sees every
    one, so what it was promised decides, not what it sees.
    """

    def __init__(self, plan: Plan, gpus: float):
        settle(plan.config.resources.threads)
        self.device = "cuda:0" if gpus else "cpu"
        self.boxes: dict[str, Mailbox] = {}

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def share(self, paths: dict[str, str]) -> None:
        """Opens the mailboxes."""
        self.boxes = {name: Mailbox(path) for name, path in paths.items()}

    def _post(self, writer: str, groups: dict[str, dict[str, Tensor]]) -> Tree | Letter:
        """Named groups of tensors, into the writer's mailbox if there is one and they fit, else as they are."""
        arrays = _packed(groups)
        if writer in self.boxes:
            flat = {f"{group}/{k}": v for group, named in arrays.items() for k, v in named.items()}
            return self.boxes[writer].write(writer, flat) or arrays
        return arrays

    def _fetch(self, post: Tree | Letter) -> Tree:
        if isinstance(post, Letter):
            groups: Tree = {}
            for name, array in self.boxes[post.writer].read(post).items():
                group, _, key = name.partition("/")
                groups.setdefault(group, {})[key] = array
            post = groups
        return _unpacked(post, self.device)


class _Client(_Actor):
    """Trains its share of each round's blocks."""

    def __init__(self, plan: Plan, name: str):
        super().__init__(plan, plan.config.resources.gpus)
        self.name, self.trainer = name, make_trainer(plan, self.device)

    @ray.method(num_returns=2)
    def train(
        self, blocks: list[Block], again: bool, bases: list[int], *downs: Tree | Letter
    ) -> tuple[Tree | Letter, Outcome]:
        """`again`: this actor's mailbox still holds what it sent first in this round."""
        versions = {base: _read_broadcast(self._fetch(down)) for base, down in zip(bases, downs, strict=True)}
        outcome = self.trainer.train(versions, blocks)
        rows = {f"{key}/{i}": row for key, each in outcome.rows.items() for i, row in enumerate(each)}
        upload = self._post("" if again else self.name, {"sums": outcome.sums, "rows": rows})
        return upload, Outcome(outcome.done, outcome.ids, bound=outcome.bound, seconds=outcome.seconds)


class _Server(_Actor):
    """Runs the server update and the memory bookkeeping."""

    def __init__(self, plan: Plan):
        super().__init__(plan, plan.config.resources.server_gpus)
        self.server = make_server(plan, self.device)

    def broadcast(self, following: Round) -> Tree | Letter:
        self.last = self.server.broadcast(following)
        return self._post("server", _as_groups(self.last))

    @ray.method(num_returns=3)
    def advance(
        self,
        round: Round,
        following: Round,
        keep: bool,
        trained: list[tuple[list[int], float]],
        bases: list[int],
        *vectors: Tree | Letter,
    ) -> tuple:
        """Metrics, the next version, a snapshot. `trained` are the clients in each upload, and its bound; `vectors` the
        uploads, and then the versions of `bases`."""
        outcomes, count = [], len(trained)
        for (clients, bound), upload in zip(trained, map(self._fetch, vectors[:count]), strict=True):
            outcomes.append(Outcome([], clients, upload.get("sums", {}), bound))
            for name, row in upload.get("rows", {}).items():
                outcomes[-1].rows.setdefault(name.rpartition("/")[0], []).append(row)
        versions = dict(zip(bases, (_read_broadcast(self._fetch(v)) for v in vectors[count:]), strict=True))
        done = self.server.advance(round, outcomes, versions, following, keep)
        self.last = done.down
        return done.metrics, self._post("server", _as_groups(self.last)), _packed(done.snapshot)

    def publish(self) -> Tree:
        """The last broadcast again, for those who read it later than the next one is written."""
        return _packed(_as_groups(self.last))

    def snapshot(self) -> Tree:
        return _packed(self.server.snapshot())

    def restore(self, snapshot: Tree) -> None:
        self.server.restore({k: v.clone() for k, v in _unpacked(snapshot, "cpu").items()})


class _Eval(_Actor):
    """Evaluates the global model while the next round trains."""

    def __init__(self, plan: Plan):
        super().__init__(plan, plan.config.resources.server_gpus)
        self.evaluator = Evaluator(plan, self.device)

    def evaluate(self, down: Tree) -> dict[str, float]:
        return self.evaluator.evaluate(_read_broadcast(self._fetch(down)))


def _as_groups(down: Broadcast) -> dict[str, dict[str, Tensor]]:
    return {"shared": down.shared, "buffers": {"": down.buffers}}


def _read_broadcast(groups: Tree) -> Broadcast:
    return Broadcast(groups["shared"], groups["buffers"][""])


class _Awaited:
    """A result on its way from an actor."""

    def __init__(self, reference: Any, what: str, timeout: float, read: Callable[[Any], Any] = lambda value: value):
        self.reference, self.what, self.timeout, self.read = reference, what, timeout, read

    def ready(self) -> bool:
        return bool(ray.wait([self.reference], timeout=0)[0])

    def get(self) -> Any:
        return self.read(_get(self.reference, self.what, self.timeout))


def _get(reference: Any, what: str, timeout: float) -> Any:
    """`ray.get` that says what it waits for, and passes on raysim's own errors as they were raised."""
    try:
        return ray.get(reference, timeout=timeout)
    except GetTimeoutError:
        raise RaysimError(
            f"waited {timeout:g} s for {what}; it may be overloaded, or its node lost (resources.timeout is the limit)"
        ) from None
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, RaysimError):
            raise cause from None
        raise RaysimError(f"{what} failed: {error}") from None


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


class RayExecutor:
    """The executor over Ray actors."""

    def __init__(self, log: Callable[[str], None]):
        self.log, self.actors, self.ours = log, 0, False
        self.clients: list[Any] = []
        self.server: Any = None
        self.eval: Any = None

    def open(self, plan: Plan) -> None:
        r = plan.config.resources
        self.timeout, self.wants_bases = r.timeout, plan.server.wants_bases
        self._connect(plan)
        for name, module in list(sys.modules.items()):
            if name.startswith(PREFIX):
                cloudpickle.register_pickle_by_value(module)
        reference = ray.put(plan)
        on_server = {"num_cpus": 0, "num_gpus": r.server_gpus, "max_restarts": 0}
        server, client, evaluator = (cast(Any, ray.remote(kind)) for kind in (_Server, _Client, _Eval))
        self.server = server.options(**on_server).remote(reference)
        client = client.options(num_cpus=r.cpus, num_gpus=r.gpus, max_restarts=0)
        self.clients = [client.remote(reference, f"client {i}") for i in range(r.actors)]
        self.eval = evaluator.options(**on_server).remote(reference) if plan.config.evaluate.every else None
        everybody = [self.server, *self.clients, *([self.eval] if self.eval else [])]
        waiting = [actor.node.remote() for actor in everybody]
        nodes = _get(waiting, f"the start of {len(waiting)} actors", r.timeout)
        in_step = isinstance(plan.config.schedule, Sync)  # else several versions and rounds are out at one time
        if in_step and len(set(nodes)) == 1 and nodes[0] == ray.get_runtime_context().get_node_id():
            self._share(plan)
        self.actors = len(self.clients)

    def _share(self, plan: Plan) -> None:
        """Gives the actors of this machine their mailboxes; without room for them the object store does it all."""
        P, Q = plan.problem.size, plan.initial[1].numel()
        up = (len(sums(plan.server.uploads)) * P + 2 * Q) * 8
        rows = len(with_mode(plan.server.uploads, "each")) * plan.config.schedule.size * (P + Q) * 8
        sizes = {f"client {i}": up + rows for i in range(len(self.clients))}
        sizes["server"] = (len(plan.server.provides) * P + Q) * 8
        paths: dict[str, str] = {}
        try:
            for name, size in sizes.items():
                paths[name] = str(Mailbox.new(min(size, LARGEST_BOX) + 4096))
            calls = [actor.share.remote(paths) for actor in (self.server, *self.clients)]
            _get(calls, "the actors to open their mailboxes", self.timeout)
        except OSError as error:
            self.log(f"no shared memory for mailboxes ({error}); the object store is used instead")
        finally:
            for path in paths.values():
                os.unlink(path)

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

    def broadcast(self, following: Round) -> Any:
        return self.server.broadcast.remote(following)

    def training(self, t: int) -> _Training:
        return _Training(self, t)

    def advance(self, round: Round, trained: Trained, bases: Mapping[int, Any], following: Round, keep: bool) -> Next:
        clients = [(outcome.ids, outcome.bound) for outcome in trained.done]
        wanted = dict(bases) if self.wants_bases else {}
        metrics, down, snapshot = self.server.advance.remote(
            round, following, keep, clients, list(wanted), *trained.uploads, *wanted.values()
        )
        kept = _Awaited(snapshot, "the server's state", self.timeout, lambda v: _unpacked(v, "cpu")) if keep else None
        return Next(_Awaited(metrics, f"the server update of round {round.t}", self.timeout), down, kept)

    def evaluate(self, down: Any) -> _Awaited | Ready[dict[str, float]]:
        if self.eval is None:
            return Ready({})
        return _Awaited(self.eval.evaluate.remote(self.server.publish.remote()), "the evaluation", self.timeout)

    def snapshot(self) -> _Awaited:
        return _Awaited(
            self.server.snapshot.remote(), "the server's state", self.timeout, lambda v: _unpacked(v, "cpu")
        )

    def restore(self, snapshot: State) -> None:
        _get(self.server.restore.remote(_packed(snapshot)), "the server to take its state back", self.timeout)

    def fetch(self, down: Any) -> Broadcast:
        version = _get(down, "a version of the model", self.timeout)
        if isinstance(version, Letter):  # in a mailbox, where it is the last one
            version = _get(self.server.publish.remote(), "the last version of the model", self.timeout)
        return _read_broadcast(_unpacked(version, "cpu"))

    def hold(self, version: Broadcast) -> Any:
        return ray.put(_packed(_as_groups(version)))

    def close(self) -> None:
        """Ends the actors, and Ray if it was started here."""
        if not ray.is_initialized():
            return
        for actor in filter(None, (*self.clients, self.server, self.eval)):
            ray.kill(actor)
        if self.ours:
            ray.shutdown()


class _Training:
    """A round on its way: the blocks are dealt out, the largest first to the least busy actor; what a lost actor had
    is dealt out again."""

    def __init__(self, executor: RayExecutor, t: int):
        self.executor, self.t = executor, t
        self.load: dict[int, int] = {}
        self.downs: dict[int, Any] = {}
        self.waiting: dict[Any, tuple[Any, int, list[Block]]] = {}

    def add(self, downs: Mapping[int, Any], blocks: list[Block]) -> None:
        """Deals blocks out to the actors that are there when the round begins."""
        self.load = self.load or dict.fromkeys(range(len(self.executor.clients)), 0)
        self.downs |= downs
        self._deal(blocks)

    def get(self) -> Trained:
        """Waits for all of it. Raises RaysimError after `resources.timeout` seconds, or when no actor is left."""
        uploads, done, timeout = [], [], self.executor.timeout
        seconds = dict.fromkeys(self.load, 0.0)
        lost = retried = 0
        while self.waiting:
            _, late = ray.wait(list(self.waiting), num_returns=len(self.waiting), timeout=timeout)
            if late:
                actors = sorted({self.waiting[word][1] for word in late})
                raise RaysimError(
                    f"round {self.t}: waited {timeout:g} s for ClientActors {actors} (resources.timeout is the limit)"
                )
            finished, self.waiting = self.waiting, {}
            for word, (vectors, actor, share) in finished.items():
                try:
                    done.append(ray.get(word, timeout=timeout))
                    uploads.append(vectors)
                    seconds[actor] += done[-1].seconds
                except RayActorError:
                    lost, retried = lost + (actor in self.load), retried + len(share)
                    self._lose(actor, share)
                except RayError as error:
                    raise RaysimError(f"round {self.t}: ClientActor {actor} failed: {error}") from None
        if lost:
            self.executor.clients = [self.executor.clients[actor] for actor in sorted(self.load)]
        metrics = {"time/train": max(seconds.values(), default=0.0), "actors_lost": lost, "retried_blocks": retried}
        return Trained(uploads, done, {k: float(v) for k, v in metrics.items()})

    def _deal(self, blocks: list[Block], again: bool = False) -> None:
        shares: dict[int, list[Block]] = {}
        for block in sorted(blocks, key=lambda b: -sum(job.steps for job in b.jobs)):
            actor = min(self.load, key=lambda a: (self.load[a], a))
            self.load[actor] += sum(job.steps for job in block.jobs)
            shares.setdefault(actor, []).append(block)
        for actor, share in shares.items():
            needed = {job.base: self.downs[job.base] for block in share for job in block.jobs}
            vectors, word = self.executor.clients[actor].train.remote(share, again, list(needed), *needed.values())
            self.waiting[word] = (vectors, actor, share)

    def _lose(self, actor: int, share: list[Block]) -> None:
        self.load.pop(actor, None)
        if not self.load:
            raise RaysimError(f"round {self.t}: the last ClientActor is lost (out of memory?)")
        self.executor.actors = left = len(self.load)
        self.executor.log(f"round {self.t}: ClientActor {actor} is lost; {len(share)} blocks go to the {left} left")
        self._deal(share, again=True)
