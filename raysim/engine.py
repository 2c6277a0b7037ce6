"""The run. `Engine.rounds` is the loop, and reads like the algorithm in a paper; the rest opens and closes things."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import raysim
from raysim import checkpoint, store
from raysim.block import Job, cut, local_steps
from raysim.data import digest
from raysim.errors import ClientError
from raysim.executor import Executor, Result, Trained
from raysim.plan import Plan
from raysim.schedule import Synchronous
from raysim.server import Round

logger = logging.getLogger("raysim")

Record = dict[str, float]
Progress = Callable[[Record], None]


@dataclass
class Pending:
    """A round whose metrics are still on their way."""

    record: Record
    results: list[Result[dict[str, float]]] = field(default_factory=list)


class Engine:
    """One run: a plan, an executor, what clients keep, and the history so far."""

    def __init__(self, plan: Plan, executor: Executor, run_dir: Path | None = None, run_id: str = ""):
        self.plan, self.executor, self.config = plan, executor, plan.config
        self.run_dir, self.run_id = run_dir, run_id
        rows = store.folder(run_dir, plan.config.store.dir)
        self.store = store.Store(len(plan.clients), plan.config.store.memory, rows)
        self.schedule = Synchronous(plan.config, plan.clients.sizes)
        self.n_samples = int(plan.clients.sizes.sum())
        self.history: list[Record] = []
        self.done = self.bytes_down = self.bytes_up = 0

    def rounds(self) -> Iterator[Record]:
        """Trains round after round; yields the record of each once its evaluation has come in.

        Nothing waits that need not: the next cohort is sent off as soon as the server is told to move on, and what
        is to be said of a round is gathered while the next one trains.
        """
        pending: deque[Pending] = deque()
        ids = self.schedule.cohort(self.done)
        down = self.executor.broadcast(self.done, ids)
        clock = Clock()
        jobs, training = self._send_off(self.done, ids, down)
        if not self.history:
            pending.append(Pending({"round": 0.0}, self._evaluation(0, down, clock)))
        for t in range(self.done, self.config.rounds):
            ids = self.schedule.cohort(t + 1) if t + 1 < self.config.rounds else []
            trained = training.get()
            seconds = clock.lap()
            round = self.judge(t, jobs, trained)
            self.done = t + 1
            after = self.executor.advance(round, trained, ids, keep=self._checkpoint_due())
            finished = jobs
            jobs, training = self._send_off(t + 1, ids, after.down)
            record = {**self._record(round, finished, trained), **seconds(trained)}
            pending.append(Pending(record, [after.metrics, *self._evaluation(t + 1, after.down, clock)]))
            yield from self._arrived(pending, keep=0 if after.snapshot else self._lag)
            if after.snapshot:
                self._save(after.snapshot.get())
        yield from self._arrived(pending, keep=0)

    def _send_off(self, t: int, ids: list[int], down: Any) -> tuple[list[Job], Result[Trained]]:
        jobs = self.jobs(t, ids)
        return jobs, self.executor.train(t, down, cut(jobs, self.plan.block_size))

    _lag = 2
    """Rounds whose metrics may still be out while the next one trains."""

    def _evaluation(self, done: int, down: Any, clock: Clock) -> list[Result[dict[str, float]]]:
        every = self.config.evaluate.every
        if not every or (done % every and done < self.config.rounds):
            return []
        with clock.aside():  # inline it takes its time here; on actors it goes on beside the next round
            return [self.executor.evaluate(down)]

    def _arrived(self, pending: deque[Pending], keep: int) -> Iterator[Record]:
        """Records whose figures are all there, in order; waits while more than `keep` are out."""
        while pending and (len(pending) > keep or (len(pending) > 1 and all(r.ready() for r in pending[0].results))):
            first = pending.popleft()
            for result in first.results:
                first.record.update(result.get())
            self.history.append(first.record)
            yield first.record

    def _checkpoint_due(self) -> bool:
        every = self.config.checkpoint.every
        return bool(every) and self.run_dir is not None and (self.done % every == 0 or self.done == self.config.rounds)

    def _save(self, server: dict[str, Tensor]) -> None:
        assert self.run_dir is not None
        facts = {
            "round": self.done,
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "history": self.history,
            "run_id": self.run_id,
            "fingerprint": self.config.fingerprint,
            "data": self.plan.dataset.digest,
            "partition": digest(self.plan.clients),
            "torch": torch.__version__,
            "raysim": raysim.__version__,
        }
        saved = checkpoint.Checkpoint(server, self.store.pack(), facts)
        checkpoint.write(self.run_dir, saved, self.config.checkpoint.keep)
        self.store.hold(checkpoint.slots(self.run_dir))

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Goes back to a checkpoint of this run, before `rounds`."""
        assert self.run_dir is not None
        self.executor.restore(saved.server)
        checkpoint.remove_after(self.run_dir, saved.facts["round"])
        self.store.unpack(saved.clients, checkpoint.slots(self.run_dir))
        self.done, self.history = saved.facts["round"], saved.facts["history"]
        self.bytes_down, self.bytes_up = saved.facts["bytes_down"], saved.facts["bytes_up"]

    def close(self) -> None:
        """Removes the rows on disk, unless a checkpoint needs them."""
        self.store.close(checkpoint.slots(self.run_dir) if self.run_dir is not None else [])

    def jobs(self, t: int, ids: list[int]) -> list[Job]:
        """The cohort's work, with the weights that the server rule asks for."""
        local, sizes = self.config.local, [int(self.plan.clients.sizes[i]) for i in ids]
        by_samples = self.plan.server.weights == "samples"
        weights = [n / sum(sizes) if by_samples else 1 / len(ids) for n in sizes]
        jobs = []
        for client, n, weight in zip(ids, sizes, weights, strict=True):
            share = n * len(self.plan.clients) / self.n_samples if by_samples else 1.0
            steps = local_steps(n, n if local.batch == "full" else local.batch, local.steps, local.epochs)
            row, seen = self.store.get(client), bool(self.store.seen[client])
            jobs.append(Job(client, int(self.store.cursors[client]), weight, steps, share, seen, row))
        return jobs

    def judge(self, t: int, jobs: list[Job], trained: Trained) -> Round:
        """Who is in and who is out: keeps the rows of accepted clients, stops at a failed one or drops it."""
        done = {d.client: d for outcome in trained.done for d in outcome.done}
        failed = {job.client: done[job.client].error for job in jobs if done[job.client].error}
        for client, error in failed.items():
            if self.config.faults.on_client_error == "stop":
                raise ClientError(
                    f"client {client} failed in round {t}: {_last_line(error)}\n{error}\n"
                    "(faults.on_client_error=drop goes on without such clients)"
                )
            logger.warning("round %d: client %d is dropped: %s", t, client, _last_line(error))
        for job in jobs:
            self.store.cursors[job.client] += job.steps
            if job.client not in failed:
                self.store.put(job.client, done[job.client].row)
        sizes = [int(self.plan.clients.sizes[job.client]) for job in jobs]
        ids, weights, steps = ([getattr(job, k) for job in jobs] for k in ("client", "weight", "steps"))
        return Round(t, ids, weights, sizes, steps, set(failed))

    def _record(self, round: Round, jobs: list[Job], trained: Trained) -> Record:
        """What is to be said of a round, but for the server's and the evaluation's part."""
        good = [d for outcome in trained.done for d in outcome.done if d.client not in round.dropped]
        self.bytes_down += self.plan.bytes_down * len(jobs)
        self.bytes_up += sum(d.bytes for d in good)
        record = {
            "round": float(round.t + 1),
            "clients": float(len(good)),
            "clients_dropped": float(len(round.dropped)),
            "bytes_down": float(self.bytes_down),
            "bytes_up": float(self.bytes_up),
            "client/state_bytes": float(self.store.bytes),
            "client/state_bytes_disk": float(self.store.disk_bytes),
            **trained.metrics,
        }
        if good:
            losses = np.array([one.loss for one in sorted(good, key=lambda one: one.client)])
            record["train_loss"] = float(losses.mean())
            for q in (10, 50, 90):
                record[f"client_loss/q{q}"] = float(np.quantile(losses, q / 100))
            for key in good[0].metrics:
                record[f"client/{key}"] = float(np.mean([one.metrics[key] for one in good]))
        return record


class Clock:
    """Measures rounds: from the end of one cohort's training to the end of the next one's."""

    def __init__(self) -> None:
        self.mark, self.apart = time.perf_counter(), 0.0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Time spent in here is evaluation's, not the engine's."""
        began = time.perf_counter()
        yield
        self.apart += time.perf_counter() - began

    def lap(self) -> Callable[[Trained], Record]:
        """Ends a round; gives what it took, and what of that was neither training nor evaluation."""
        now = time.perf_counter()
        seconds, apart = now - self.mark, self.apart
        self.mark, self.apart = now, 0.0

        def figures(trained: Trained) -> Record:
            clients = sum(d.error is None for outcome in trained.done for d in outcome.done)
            engine = seconds - apart - trained.metrics.get("time/train", 0.0)
            return {"seconds": seconds, "clients_per_second": clients / seconds, "time/engine": engine}

        return figures


def _last_line(error: str | None) -> str:
    return (error or "").strip().splitlines()[-1]
