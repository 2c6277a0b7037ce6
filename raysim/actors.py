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
from collections.abc import Callable
from typing import Any, cast

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from torch import Tensor

from raysim.block import Block, Outcome
from raysim.data.arrays import shared_tensor
from raysim.errors import ConfigError, RaysimError
from raysim.executor import Evaluator, Next, Ready, Trained, make_server, make_trainer, settle
from raysim.plan import Plan
from raysim.references import PREFIX
from raysim.rules import State
from raysim.server import Broadcast, Round


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


def _device(gpus: float) -> str:
    """The first GPU that Ray lets this actor see, or the CPU. An actor without a share still sees every GPU, so
    what it was promised decides, not what it sees."""
    return "cuda:0" if gpus else "cpu"


class _Client:
    """Trains its share of each round's blocks."""

    def __init__(self, plan: Plan):
        settle(plan.config.resources.threads)
        self.device = _device(plan.config.resources.gpus)
        self.trainer = make_trainer(plan, self.device)

    def ready(self) -> None:
        return None

    def train(self, t: int, down: dict, blocks: list[Block]) -> tuple[dict, Outcome]:
        down = _unpacked(down, self.device)
        outcome = self.trainer.train(t, down["shared"], down["buffers"], blocks)
        vectors = {"ids": outcome.ids, "sums": _packed(outcome.sums), "rows": _packed(outcome.rows)}
        return vectors, Outcome(outcome.done, outcome.ids, seconds=outcome.seconds)


class _Server:
    """Runs the server update and the memory bookkeeping."""

    def __init__(self, plan: Plan):
        settle(plan.config.resources.threads)
        self.device = _device(plan.config.resources.server_gpus)
        self.server = make_server(plan, self.device)

    def ready(self) -> None:
        return None

    def broadcast(self, t: int, ids: list[int]) -> dict:
        return _packed(vars(self.server.broadcast(t, ids)))

    def advance(self, round: Round, ids: list[int], keep: bool, *uploads: dict) -> tuple[dict, dict, dict]:
        done = self.server.advance(round, [Outcome(**_unpacked(u, self.device)) for u in uploads], ids, keep)
        return done.metrics, _packed(vars(done.down)), _packed(done.snapshot)

    def snapshot(self) -> dict:
        return _packed(self.server.snapshot())

    def restore(self, snapshot: dict) -> None:
        self.server.restore({k: v.clone() for k, v in _unpacked(snapshot, "cpu").items()})


class _Eval:
    """Evaluates the global model while the next round trains."""

    def __init__(self, plan: Plan):
        settle(plan.config.resources.threads)
        self.device = _device(plan.config.resources.server_gpus)
        self.evaluator = Evaluator(plan, self.device)

    def ready(self) -> None:
        return None

    def evaluate(self, down: dict) -> dict[str, float]:
        return self.evaluator.evaluate(Broadcast(**_unpacked(down, self.device)))


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


class RayExecutor:
    """The executor over Ray actors."""

    def __init__(self, log: Callable[[str], None]):
        self.log, self.actors, self.ours = log, 0, False
        self.clients: list[Any] = []
        self.server: Any = None
        self.eval: Any = None

    def open(self, plan: Plan) -> None:
        r = plan.config.resources
        self.timeout = r.timeout
        self._connect(plan)
        for name, module in list(sys.modules.items()):
            if name.startswith(PREFIX):
                cloudpickle.register_pickle_by_value(module)
        reference = ray.put(plan)
        on_server = {"num_cpus": 0, "num_gpus": r.server_gpus, "max_restarts": 0}
        server, client, evaluator = (cast(Any, ray.remote(kind)) for kind in (_Server, _Client, _Eval))
        self.server = server.options(**on_server).remote(reference)
        client = client.options(num_cpus=r.cpus, num_gpus=r.gpus, max_restarts=0)
        self.clients = [client.remote(reference) for _ in range(r.actors)]
        self.eval = evaluator.options(**on_server).remote(reference) if plan.config.evaluate.every else None
        waiting = [a.ready.remote() for a in (self.server, *self.clients, *([self.eval] if self.eval else []))]
        _get(waiting, f"the start of {len(waiting)} actors", r.timeout)
        self.actors = len(self.clients)

    def _connect(self, plan: Plan) -> None:
        """Joins the cluster at hand (an address, or RAY_ADDRESS inside a submitted job), else starts Ray here."""
        r = plan.config.resources
        address = r.address or os.environ.get("RAY_ADDRESS")
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
        if not ray.is_initialized():
            self.ours = True
            try:
                if address:
                    ray.init(address=address, **quiet)
                else:
                    wanted = int(np.ceil(r.actors * r.cpus))
                    ray.init(
                        address="local", num_cpus=max(os.cpu_count() or 1, wanted), include_dashboard=False, **quiet
                    )
            except Exception as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                if not address:
                    raise RaysimError(f"cannot start Ray on this machine: {reason}") from None
                raise RaysimError(
                    f"cannot join Ray at {address}: {reason} (is it running? A cluster that asks for tokens wants "
                    "RAY_AUTH_MODE=token and its ~/.ray/auth_token here)"
                ) from None
        have = ray.cluster_resources()
        for kind, wanted in (("CPU", r.actors * r.cpus), ("GPU", r.actors * r.gpus + 2 * r.server_gpus)):
            if wanted > have.get(kind, 0) + 1e-9:
                raise ConfigError(
                    f"resources: {r.actors} actors want {wanted:g} {kind}s, the cluster has "
                    f"{have.get(kind, 0):g}; lower resources.actors or the share of each"
                )

    def broadcast(self, t: int, ids: list[int]) -> Any:
        return self.server.broadcast.remote(t, ids)

    def train(self, t: int, down: Any, blocks: list[Block]) -> _Training:
        return _Training(self, t, down, blocks)

    def advance(self, round: Round, trained: Trained, ids: list[int], keep: bool) -> Next:
        call = self.server.advance.options(num_returns=3)
        metrics, down, snapshot = call.remote(round, ids, keep, *trained.uploads)
        kept = _Awaited(snapshot, "the server's state", self.timeout, lambda v: _unpacked(v, "cpu")) if keep else None
        return Next(_Awaited(metrics, f"the server update of round {round.t}", self.timeout), down, kept)

    def evaluate(self, down: Any) -> _Awaited | Ready[dict[str, float]]:
        if self.eval is None:
            return Ready({})
        return _Awaited(self.eval.evaluate.remote(down), "the evaluation", self.timeout)

    def snapshot(self) -> _Awaited:
        return _Awaited(
            self.server.snapshot.remote(), "the server's state", self.timeout, lambda v: _unpacked(v, "cpu")
        )

    def restore(self, snapshot: State) -> None:
        _get(self.server.restore.remote(_packed(snapshot)), "the server to take its state back", self.timeout)

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

    def __init__(self, executor: RayExecutor, t: int, down: Any, blocks: list[Block]):
        self.executor, self.t, self.down = executor, t, down
        self.load = dict.fromkeys(range(len(executor.clients)), 0)
        self.waiting: dict[Any, tuple[Any, int, list[Block]]] = {}
        self._deal(blocks)

    def ready(self) -> bool:
        return len(ray.wait(list(self.waiting), num_returns=len(self.waiting), timeout=0)[1]) == 0

    def get(self) -> Trained:
        """Waits for all of it. Raises RaysimError after `resources.timeout` seconds without news, or when no actor is
        left."""
        uploads, done, timeout = [], [], self.executor.timeout
        lost = retried = 0
        while self.waiting:
            ready, _ = ray.wait(list(self.waiting), timeout=timeout)
            if not ready:
                actors = sorted({actor for _, actor, _ in self.waiting.values()})
                raise RaysimError(
                    f"round {self.t}: waited {timeout:g} s for ClientActors {actors} (resources.timeout is the limit)"
                )
            for word in ready:
                vectors, actor, share = self.waiting.pop(word)
                try:
                    done.append(ray.get(word, timeout=timeout))
                    uploads.append(vectors)
                except RayActorError:
                    lost, retried = lost + (actor in self.load), retried + len(share)
                    self._lose(actor, share)
                except RayError as error:
                    raise RaysimError(f"round {self.t}: ClientActor {actor} failed: {error}") from None
        if lost:
            self.executor.clients = [self.executor.clients[actor] for actor in sorted(self.load)]
        seconds = max((outcome.seconds for outcome in done), default=0.0)
        return Trained(
            uploads, done, {"time/train": seconds, "actors_lost": float(lost), "retried_blocks": float(retried)}
        )

    def _deal(self, blocks: list[Block]) -> None:
        shares: dict[int, list[Block]] = {}
        for block in sorted(blocks, key=lambda b: -sum(job.steps for job in b.jobs)):
            actor = min(self.load, key=lambda a: (self.load[a], a))
            self.load[actor] += sum(job.steps for job in block.jobs)
            shares.setdefault(actor, []).append(block)
        for actor, share in shares.items():
            call = self.executor.clients[actor].train.options(num_returns=2)
            vectors, word = call.remote(self.t, self.down, share)
            self.waiting[word] = (vectors, actor, share)

    def _lose(self, actor: int, share: list[Block]) -> None:
        self.load.pop(actor, None)
        if not self.load:
            raise RaysimError(f"round {self.t}: the last ClientActor is lost (out of memory?)")
        self.executor.actors = left = len(self.load)
        self.executor.log(f"round {self.t}: ClientActor {actor} is lost; {len(share)} blocks go to the {left} left")
        self._deal(share)
