"""Where a run's work is done. `Inline` does it in this process; `actors.RayExecutor` on Ray actors. Same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.nn import functional as F

from raysim.block import Block, Outcome, Trainer
from raysim.data import Examples
from raysim.models import Bound
from raysim.numerics import use_threads
from raysim.plan import Plan
from raysim.rules import State
from raysim.server import Broadcast, Round, Server

T = TypeVar("T", covariant=True)


class Result(Protocol[T]):
    """Something that is ready, or will be."""

    def ready(self) -> bool: ...
    def get(self) -> T: ...


@dataclass
class Ready(Generic[T]):
    """A result that needs no waiting."""

    value: T

    def ready(self) -> bool:
        return True

    def get(self) -> T:
        return self.value


class Later(Generic[T]):
    """A result that is computed when it is asked for."""

    def __init__(self, compute: Callable[[], T]):
        self._compute = compute

    def ready(self) -> bool:
        return True

    def get(self) -> T:
        return self._compute()


@dataclass
class Trained:
    """A round's outcomes: `uploads` stays where it was made (in the object store, say); `done` speaks of each job."""

    uploads: list[Any]
    done: list[Outcome]
    metrics: dict[str, float]


@dataclass
class Next:
    """The server has moved on, or will have: its metrics, the handle of the next broadcast, a snapshot if asked for."""

    metrics: Result[dict[str, float]]
    down: Any
    snapshot: Result[State] | None


class Executor(Protocol):
    """What the engine asks for. A broadcast is a handle: it need not be in this process."""

    actors: int

    def open(self, plan: Plan) -> None: ...
    def broadcast(self, t: int, ids: list[int]) -> Any: ...
    def train(self, t: int, down: Any, blocks: list[Block]) -> Result[Trained]: ...
    def advance(self, round: Round, trained: Trained, ids: list[int], keep: bool) -> Next: ...
    def evaluate(self, down: Any) -> Result[dict[str, float]]: ...
    def snapshot(self) -> Result[State]: ...
    def restore(self, snapshot: State) -> None: ...
    def close(self) -> None: ...


def settle(threads: int) -> None:
    """Makes a process fit for training: pins torch's threads, and keeps glibc from giving every freed megabyte
    back to the kernel (which costs 10 to 25 % of a round)."""
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # cosines near 0 decide the QPs
    try:
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, -1)
    except OSError:  # not glibc: nothing to settle
        return


def make_trainer(plan: Plan, device: str) -> Trainer:
    """What trains blocks of clients on a device."""
    examples = Examples.of(plan.dataset, "train", device, plan.dtype)
    x0 = plan.initial[0].to(device)
    return Trainer(plan.config, plan.client, plan.server, plan.model(device), x0, examples, plan.clients, plan.vmap)


def make_server(plan: Plan, device: str) -> Server:
    """The central server on a device."""
    use_threads(plan.config.resources.server_threads)
    x0, buffers = plan.initial
    return Server(plan.server, x0.to(device), buffers.to(device), plan.problem)


class Evaluator:
    """Accuracy and mean cross-entropy on the whole test set, in eval mode."""

    def __init__(self, plan: Plan, device: str):
        self.examples = Examples.of(plan.dataset, "test", device, plan.dtype)
        self.net, self.size = Bound(plan.model(device)), plan.config.evaluate.batch

    @torch.no_grad()
    def evaluate(self, down: Broadcast) -> dict[str, float]:
        self.net.flat.copy_(down.shared["x"])
        buffers = down.buffers.to(self.net.flat.device)
        right = torch.zeros((), dtype=torch.long, device=buffers.device)
        loss = torch.zeros((), dtype=torch.float64, device=buffers.device)
        n = len(self.examples)
        for start in range(0, n, self.size):
            x, y = self.examples.batch(torch.arange(start, min(start + self.size, n)))
            if self.net.model.convolutional:
                x = x.contiguous(memory_format=torch.channels_last)
            logits = self.net.forward(x, "eval", buffers)
            right += (logits.argmax(1) == y).sum()
            loss += F.cross_entropy(logits.double(), y, reduction="sum")
        return {"accuracy": right.item() / n, "loss": loss.item() / n}


class Inline:
    """Everything in this process, one block after the other; needs no Ray."""

    actors = 1

    def open(self, plan: Plan) -> None:
        device = "cuda:0" if plan.config.resources.gpus else "cpu"
        self.threads = torch.get_num_threads()
        settle(plan.config.resources.threads)
        self.trainer, self.server = make_trainer(plan, device), make_server(plan, device)
        self.evaluator = Evaluator(plan, device)

    def broadcast(self, t: int, ids: list[int]) -> Broadcast:
        return self.server.broadcast(t, ids)

    def train(self, t: int, down: Broadcast, blocks: list[Block]) -> Later[Trained]:
        return Later(lambda: self._train(t, down, blocks))

    def _train(self, t: int, down: Broadcast, blocks: list[Block]) -> Trained:
        outcome = self.trainer.train(t, down.shared, down.buffers, blocks)
        return Trained([outcome], [outcome], {"time/train": outcome.seconds})

    def advance(self, round: Round, trained: Trained, ids: list[int], keep: bool) -> Next:
        done = self.server.advance(round, trained.uploads, ids, keep)
        return Next(Ready(done.metrics), done.down, Ready(done.snapshot) if keep else None)

    def evaluate(self, down: Broadcast) -> Ready[dict[str, float]]:
        return Ready(self.evaluator.evaluate(down))

    def snapshot(self) -> Ready[State]:
        return Ready(self.server.snapshot())

    def restore(self, snapshot: State) -> None:
        self.server.restore(snapshot)

    def close(self) -> None:
        torch.set_num_threads(self.threads)
