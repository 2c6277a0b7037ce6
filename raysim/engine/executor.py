"""Where a run's work is done. `Inline` does it in this process; `actors.RayExecutor` on Ray actors. Same bits."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.nn import functional as F

from raysim.data import Examples
from raysim.engine import probes
from raysim.engine.plan import Plan
from raysim.engine.server import Round, Server
from raysim.errors import RaysimError, in_a_line
from raysim.models.flat import Bound
from raysim.numerics import use_threads
from raysim.rules.contract import State
from raysim.signals import reraise_stop
from raysim.training.messages import Block, Broadcast, Outcome
from raysim.training.trainer import Trainer

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


@dataclass
class Trained:
    """A round's outcomes: `uploads` stays where it was made (in the object store, say); `done` speaks of each job."""

    uploads: list[Any]
    done: list[Outcome]
    metrics: dict[str, float]


@dataclass
class Next:
    """The server has moved on, or will have: its metrics and the handle of the next broadcast."""

    metrics: Result[dict[str, float]]
    down: Any


class Training(Protocol):
    """The work of one round. `add` sends blocks off, with the versions that their clients begin with; `get` waits for
    all of it."""

    def add(self, downs: Mapping[int, Any], blocks: list[Block]) -> None: ...
    def get(self) -> Trained: ...


class Executor(Protocol):
    """What the engine asks for. A version of the model is a handle: it need not be in this process.

    Whatever waits may raise `Lost`: what the server knew is gone. Then `recover`, and begin again from a checkpoint.
    """

    mended: Counter[str]
    """How often something was put right that had gone wrong, by its kind."""

    def open(self, plan: Plan) -> None: ...
    def broadcast(self, following: Round) -> Any: ...
    def training(self, t: int) -> Training: ...
    def advance(self, round: Round, trained: Trained, bases: Mapping[int, Any], following: Round) -> Next: ...
    def evaluate(self, down: Any, parts: Sequence[str]) -> Result[dict[str, float]]: ...
    def snapshot(self) -> Result[State]: ...
    def restore(self, snapshot: State) -> None: ...
    def fetch(self, down: Any) -> Broadcast: ...
    def hold(self, version: Broadcast) -> Any: ...
    def recover(self) -> None: ...
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
    model = plan.model(device, unfold=plan.config.block.convolutions == "unfold")
    x0 = plan.initial[0].to(device)
    measures = probes.measures(plan)
    return Trainer(plan.config, plan.client, plan.server, model, x0, examples, plan.clients, plan.mode, measures)


def make_server(plan: Plan, device: str) -> Server:
    """The central server on a device."""
    use_threads(plan.config.resources.server_threads)
    x0, buffers = plan.initial
    return Server(plan.server, x0.to(device), buffers.to(device), plan.problem)


class Evaluator:
    """What there is to measure of a model. "test": accuracy (on each class too, if asked for) and mean cross-entropy on
    the whole test set, in eval mode; with val/ before them, both on the examples that were held out for validation, if
    any. The name of a probe: what it evaluates."""

    def __init__(self, plan: Plan, device: str):
        data, held_out = plan.dataset, plan.clients.validation
        self.examples = Examples.of(data, "test", device, plan.dtype)
        self.validation = Examples(
            data.x[held_out], data.y[held_out], data.scale, data.shift, device=device, dtype=plan.dtype
        )
        self.name = plan.config.model.name
        self.net, self.size = Bound(plan.model(device)), plan.config.evaluate.batch
        self.classes = plan.dataset.n_classes if plan.config.evaluate.per_class else 0
        self.probes = probes.evaluations(plan)
        self.trainer = make_trainer(plan, device) if self.probes else None

    def evaluate(self, down: Broadcast, parts: Sequence[str]) -> dict[str, float]:
        """Return the metrics of a model. Raises RaysimError where its net fails: it may be a user's."""
        try:
            found = self._test(down) if "test" in parts else {}
            for name, evaluate in self.probes.items():
                if name in parts and self.trainer is not None:
                    found |= evaluate(self.trainer, down)
        except RaysimError:
            raise
        except BaseException as error:
            reraise_stop(error)
            raise RaysimError(f"the evaluation of model '{self.name}' failed: {in_a_line(error)}") from error
        return found

    def _test(self, down: Broadcast) -> dict[str, float]:
        self.net.flat.copy_(down.shared["x"])
        buffers = down.buffers.to(self.net.flat.device)
        found = self._measure(self.examples, buffers, self.classes)
        if len(self.validation):
            found |= {f"val/{k}": v for k, v in self._measure(self.validation, buffers, 0).items()}
        return found

    @torch.no_grad()
    def _measure(self, examples: Examples, buffers: torch.Tensor, classes: int) -> dict[str, float]:
        right = torch.zeros((), dtype=torch.long, device=buffers.device)
        of_class = torch.zeros(2, classes, dtype=torch.long, device=buffers.device)  # right ones, all
        loss = torch.zeros((), dtype=torch.float64, device=buffers.device)
        n = len(examples)
        for start in range(0, n, self.size):
            x, y = examples.batch(torch.arange(start, min(start + self.size, n)))
            if self.net.model.convolutional:
                x = x.contiguous(memory_format=torch.channels_last)
            logits = self.net.forward(x, "eval", buffers)
            hits = logits.argmax(1) == y
            right += hits.sum()
            loss += F.cross_entropy(logits.double(), y, reduction="sum")
            if classes:
                of_class += torch.stack([torch.bincount(part, minlength=classes) for part in (y[hits], y)])
        per_class = {f"accuracy/class_{c}": r / k for c, (r, k) in enumerate(of_class.T.tolist()) if k}
        return {"accuracy": right.item() / n, "loss": loss.item() / n, **per_class}


class Inline:
    """Everything in this process, one block after the other; needs no Ray."""

    def __init__(self) -> None:
        self.mended: Counter[str] = Counter()

    def open(self, plan: Plan) -> None:
        device = "cuda:0" if plan.config.resources.gpus else "cpu"
        self.threads = torch.get_num_threads()
        settle(plan.config.resources.threads)
        self.trainer, self.server = make_trainer(plan, device), make_server(plan, device)
        self.evaluator = Evaluator(plan, device)

    def broadcast(self, following: Round) -> Broadcast:
        return self.server.broadcast(following)

    def training(self, t: int) -> _Here:
        return _Here(self.trainer)

    def advance(self, round: Round, trained: Trained, bases: Mapping[int, Broadcast], following: Round) -> Next:
        done = self.server.advance(round, trained.uploads, bases, following)
        return Next(Ready(done.metrics), done.down)

    def evaluate(self, down: Broadcast, parts: Sequence[str]) -> Ready[dict[str, float]]:
        return Ready(self.evaluator.evaluate(down, parts))

    def snapshot(self) -> Ready[State]:
        return Ready(self.server.snapshot())

    def restore(self, snapshot: State) -> None:
        self.server.restore(snapshot)

    def fetch(self, down: Broadcast) -> Broadcast:
        return down

    def hold(self, version: Broadcast) -> Broadcast:
        device = self.trainer.x0.device
        shared = {k: v.to(device, copy=True) for k, v in version.shared.items()}
        return Broadcast(shared, version.buffers.to(device, copy=True))

    def recover(self) -> None:
        """Nothing is lost that this process has not lost itself."""

    def close(self) -> None:
        torch.set_num_threads(self.threads)


class _Here:
    """A round's work in this process; done when it is asked for."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.work = trainer, []

    def add(self, downs: Mapping[int, Broadcast], blocks: list[Block]) -> None:
        self.work.append((downs, blocks))

    def get(self) -> Trained:
        outcomes = [self.trainer.train(downs, blocks) for downs, blocks in self.work]
        return Trained(outcomes, outcomes, {"train_seconds": sum(outcome.seconds for outcome in outcomes)})
