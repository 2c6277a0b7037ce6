"""Local training of a block of clients: one after the other, or side by side under vmap.

A block is the unit of work. What it gives is a pure function of the broadcast, its jobs, the data and the run's
seed, so it can be computed anywhere, and again. Weighted sums inside a block run in client order; blocks add up in
fixed point (see numerics.sums), so that no grouping shows in the result.

In loop mode a client's bits do not depend on who shares its block. Under vmap they do, so there the block size is
part of the run's identity.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from raysim.config import Config, at_round
from raysim.data import Examples
from raysim.data.arrays import DRAWS
from raysim.data.partitions import Clients, VirtualClients
from raysim.models import Model
from raysim.numerics.sums import LIMIT, FixedSum
from raysim.randomness import generator
from raysim.rules import ClientRule, Report, ServerRule, State
from raysim.task import Batch, Facts, LocalData, LoopTask, Task, VmapTask

GATHER = 1024
"""Examples gathered and normalised at a time when looping: as many whole batches as fit."""


@dataclass
class Job:
    """One client's part in one round. `cursor` counts the batches this client has drawn in earlier rounds,
    `weight` is its share of the round's mean, `row` what it kept (None: nothing yet), `seen` whether it took part."""

    client: int
    cursor: int
    weight: float
    steps: int
    seen: bool = False
    row: dict[str, np.ndarray] | None = None


@dataclass
class Block:
    """Jobs that are trained together, in this order."""

    index: int
    jobs: list[Job]


@dataclass
class Done:
    """What became of one job. `error` is None or says why its upload was refused."""

    client: int
    loss: float = float("nan")
    error: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    row: dict[str, np.ndarray] | None = None


@dataclass
class Outcome:
    """The blocks one worker trained, added up: fixed-point sums, single rows in the order of `ids`, and a word on
    each job."""

    done: list[Done] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    sums: dict[str, Tensor] = field(default_factory=dict)
    bound: float = 0.0
    """No entry of any sum is larger."""
    rows: dict[str, list[Tensor]] = field(default_factory=dict)
    seconds: float = 0.0


def batches_per_pass(n: int, size: int) -> int:
    """Mini-batches in one pass over n examples: a last partial batch counts, unless it holds just one example
    while others exist (BatchNorm needs two); a client smaller than the batch size has one batch."""
    if n <= size:
        return min(n, 1)
    return n // size + (n % size > 1 or (size == 1 and n % size > 0))


def local_steps(n: int, size: int, steps: int | None, epochs: int | None) -> int:
    """Local steps of a client with n examples in one round."""
    return 0 if n == 0 else steps if steps is not None else (epochs or 0) * batches_per_pass(n, size)


def order(seed: int, client: int, n: int, size: int, cursor: int, steps: int) -> Iterator[np.ndarray]:
    """The positions (in the client's list of examples) of `steps` batches, beginning `cursor` batches into the
    client's endless stream of reshuffled passes."""
    per_pass, shuffled, at = batches_per_pass(n, size), np.arange(n), -1
    for i in range(cursor, cursor + steps):
        number, place = divmod(i, per_pass)
        if number != at and n > size:
            shuffled, at = generator(seed, "order", client, number).permutation(n), number
        yield shuffled[place * size : (place + 1) * size]


class Trainer:
    """Trains blocks on one device: the data, the net and the client rule, ready to use."""

    def __init__(
        self,
        config: Config,
        client: ClientRule,
        server: ServerRule,
        model: Model,
        x0: Tensor,
        examples: Examples,
        clients: Clients | VirtualClients,
        vmap: bool,
    ):
        self.config, self.rule, self.uploads = config, client, server.uploads
        self.sent = (*self.uploads, "buffers") if model.buffer_size else tuple(self.uploads)
        self.model, self.x0, self.examples, self.clients, self.vmap = model, x0, examples, clients, vmap
        self.decayed = model.decayed() if config.local.weight_decay else None
        self.loop = LoopTask(model, Facts())
        self.channels_last = model.convolutional and model.device.type == "cpu" and not vmap

    def train(self, t: int, shared: State, buffers: Tensor, blocks: list[Block]) -> Outcome:
        """Trains blocks of round `t` on the broadcast and adds up what they send."""
        began = time.perf_counter()
        local = self.config.local
        facts = Facts(t, at_round(local.lr, t), local.weight_decay, local.clip, self.x0, self.decayed)
        rule, total = self.rule.at(t), Outcome()
        sums: dict[str, FixedSum] = {}
        for block in blocks:
            self._add(total, sums, (self._vmap if self.vmap else self._loop)(rule, facts, shared, buffers, block))
        total.sums = {key: part.total for key, part in sums.items() if part.total is not None}
        total.bound = max((part.bound for part in sums.values()), default=0.0)
        total.seconds = time.perf_counter() - began
        return total

    # -- one after the other ---------------------------------------------------------------------------------------

    def _loop(self, rule: ClientRule, facts: Facts, shared: State, buffers: Tensor, block: Block) -> list[_Trained]:
        return [self._loop_one(rule, facts, shared, buffers, job) for job in block.jobs]

    def _loop_one(self, rule: ClientRule, facts: Facts, shared: State, buffers: Tensor, job: Job) -> _Trained:
        task, data = self.loop, LocalData(len(self.clients.client(job.client)))
        in_place = type(rule).step is ClientRule.step
        try:
            w = task.start(facts, shared["x"], buffers, job.steps)
            row = self._row(rule, task, job)
            state = {"w": w, **rule.init(shared, row, data, task)}
            for passes, batch in enumerate(self._batches(facts.t, job)):
                if in_place:
                    task.descend_in_place(w, rule.direction(shared, state, batch, task))
                else:
                    state = rule.step(shared, state, batch, task)
                if len(task.losses) != passes + 1:
                    raise RuntimeError(
                        f"client rule '{rule.name}' makes {len(task.losses) - passes} passes in mode "
                        "'train' in one step; make exactly one, the others 'frozen' or 'eval'"
                    )
            report, row = rule.finish(shared, state, row, data, task)
        except Exception:
            return _Trained(job, error=traceback.format_exc(limit=-8))
        assert task.buffers is not None
        report = {k: v.clone() if v.data_ptr() == w.data_ptr() else v for k, v in report.items()}  # w is the next one's
        loss = torch.stack(task.losses).mean() if task.losses else self.x0.new_tensor(float("nan"))
        return _Trained(job, {**report, "buffers": task.buffers}, _kept(row), loss)

    def _batches(self, t: int, job: Job) -> Iterator[Batch]:
        """The batches of one client, gathered and normalised a few at a time."""
        mine = self.clients.client(job.client)
        draws = self._draws(t, job.client)
        positions = list(order(self.config.seed, job.client, len(mine), self._size(mine), job.cursor, job.steps))
        ends = np.cumsum([0] + [len(p) for p in positions])
        for _, group in groupby(range(len(positions)), key=lambda i: int(ends[i]) // GATHER):
            chunk = list(group)
            indices = mine[np.concatenate([positions[i] for i in chunk])]
            x, y = self.examples.batch(indices, draws.augment)
            if self.channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            first = int(ends[chunk[0]])
            for start, stop in pairwise([int(ends[i]) - first for i in chunk] + [len(y)]):
                yield Batch(x[start:stop], y[start:stop], None, self._masks(draws, stop - start))

    # -- side by side ----------------------------------------------------------------------------------------------

    def _vmap(self, rule: ClientRule, facts: Facts, shared: State, buffers: Tensor, block: Block) -> list[_Trained]:
        """Clients with most steps first, so that those still training are always the first ones."""
        jobs = sorted(block.jobs, key=lambda job: -job.steps)
        sizes = [len(self.clients.client(job.client)) for job in jobs]
        data, steps = (
            torch.tensor(sizes, device=self.x0.device),
            torch.tensor([j.steps for j in jobs], device=self.x0.device),
        )

        def begin(row: State, n: Tensor, steps: Tensor) -> State:
            return {
                "w": shared["x"],
                **rule.init(shared, row, LocalData(n), VmapTask(self.model, facts, buffers, steps)),
            }

        def step(
            state: State, buffers: Tensor, steps: Tensor, x: Tensor, y: Tensor, mask: Tensor | None, drops: tuple
        ) -> tuple[State, Tensor, Tensor]:
            task = VmapTask(self.model, facts, buffers, steps)
            state = rule.step(shared, state, Batch(x, y, mask, drops), task)
            if len(task.losses) != 1 or task.buffers is None:
                raise RuntimeError(
                    f"client rule '{rule.name}' makes {len(task.losses)} passes in mode 'train' in one "
                    "step; make exactly one, the others 'frozen' or 'eval'"
                )
            return state, task.buffers, task.losses[0]

        def end(state: State, row: State, buffers: Tensor, n: Tensor, steps: Tensor) -> tuple[Report, State]:
            return rule.finish(shared, state, row, LocalData(n), VmapTask(self.model, facts, buffers, steps))

        try:
            rows = [self._row(rule, VmapTask(self.model, facts, buffers), job) for job in jobs]
            row = {k: torch.stack([r[k] for r in rows]) for k in rows[0]}
            state: State = torch.func.vmap(begin)(row, data, steps)
            moved = buffers.expand(len(jobs), -1).clone()
            losses = torch.zeros(len(jobs), dtype=self.x0.dtype, device=self.x0.device)
            for i, (live, x, y, mask, drops) in enumerate(self._stacked(facts.t, jobs)):
                part = {k: v[:live] for k, v in state.items()}
                dims = (0, 0, 0, 0, 0, None if mask is None else 0, 0)
                part, new, loss = torch.func.vmap(step, in_dims=dims)(
                    part, moved[:live], steps[:live], x, y, mask, drops
                )
                state = {k: torch.cat([part[k], v[live:]]) if live < len(jobs) else part[k] for k, v in state.items()}
                moved = torch.cat([new, moved[live:]])
                losses[:live] += (loss - losses[:live]) / (i + 1)
            reports, kept = torch.func.vmap(end)(state, row, moved, data, steps)
        except Exception:
            error = traceback.format_exc(limit=-8)
            return [_Trained(job, error=error) for job in block.jobs]
        trained = {}
        for i, job in enumerate(jobs):
            report = {k: v[i] for k, v in reports.items()}
            trained[job.client] = _Trained(
                job, {**report, "buffers": moved[i]}, _kept({k: v[i] for k, v in kept.items()}), losses[i]
            )
        return [trained[job.client] for job in block.jobs]

    def _stacked(self, t: int, jobs: list[Job]) -> Iterator[tuple[int, Tensor, Tensor, Tensor | None, tuple]]:
        """Step by step: how many clients still train, and their batches padded to one size, [K, B, ...]."""
        mine = [self.clients.client(job.client) for job in jobs]
        draws = [self._draws(t, job.client) for job in jobs]
        streams = [
            order(self.config.seed, job.client, len(m), self._size(m), job.cursor, job.steps)
            for job, m in zip(jobs, mine, strict=True)
        ]
        for i in range(jobs[0].steps):
            live = sum(job.steps > i for job in jobs)
            indices = [mine[k][next(streams[k])] for k in range(live)]
            sizes = [len(part) for part in indices]
            width = max(sizes)
            padded = np.stack([np.pad(part, (0, width - len(part)), mode="edge") for part in indices])
            x, y = self.examples.batch(padded.reshape(-1), _side_by_side(draws, sizes, width))
            mask = None
            if min(sizes) < width:
                mask = torch.from_numpy(np.arange(width) < np.array(sizes)[:, None]).to(x.device, x.dtype)
            masks = [self._masks(d, n, width) for d, n in zip(draws, sizes, strict=False)]
            drops = tuple(
                tuple(torch.stack([m[s][i] for m in masks]) for i in range(len(one))) for s, one in enumerate(masks[0])
            )
            yield live, x.view(live, width, *x.shape[1:]), y.view(live, width), mask, drops

    # -- shared ----------------------------------------------------------------------------------------------------

    def _size(self, mine: np.ndarray) -> int:
        batch = self.config.local.batch
        return max(len(mine), 1) if batch == "full" else batch

    def _draws(self, t: int, client: int) -> _Draws:
        seed = self.config.seed
        return _Draws(
            generator(seed, "augment", t, client) if self.examples.pad or self.examples.flip else None,
            generator(seed, "dropout", t, client) if self.model.dropouts else None,
        )

    def _masks(self, draws: _Draws, n: int, width: int | None = None) -> tuple[tuple[Tensor, ...], ...]:
        """Dropout masks [n, ...] for one step, scaled to keep the mean; padded with zeros up to `width`."""
        rng = draws.dropout
        if rng is None:
            return ()
        sets = []
        for _ in range(self.rule.masks):
            masks = []
            for shape, rate in self.model.dropouts:
                kept = (rng.random((n, *shape), dtype=np.float32) >= rate) / max(1 - rate, 1e-30)
                if width is not None and width > n:
                    kept = np.pad(kept, ((0, width - n), *[(0, 0)] * len(shape)))
                masks.append(torch.from_numpy(kept).to(self.model.device, self.model.dtype))
            sets.append(tuple(masks))
        return tuple(sets)

    def _row(self, rule: ClientRule, task: Task, job: Job) -> State:
        """What the client kept, or zeros, and whether it has been here before."""
        row = rule.state(task)
        if job.row is not None:
            row = {k: torch.tensor(job.row[k]).to(v.device, v.dtype).reshape(v.shape) for k, v in row.items()}
        return {**row, "seen": torch.tensor(job.seen, device=self.x0.device)}

    def _fits(self, value: Tensor, weight: float) -> bool:
        """Finite, and small enough (below 1e18 and some) that the cohort's sum stays in the range of fixed point."""
        largest = max(abs(float(bound)) for bound in torch.aminmax(value))
        return largest * weight < LIMIT / self.config.schedule.cohort  # NaN fails the comparison

    def _add(self, total: Outcome, sums: dict[str, FixedSum], trained: list[_Trained]) -> None:
        """Adds a block to what this worker sends; an upload that is not finite goes no further."""
        good: list[_Trained] = []
        for one in trained:
            done = Done(one.job.client, error=one.error)
            if one.error is None:
                done.loss, done.row = float(one.loss), one.row
                done.metrics = {
                    k.removeprefix("metric/"): float(v) for k, v in one.report.items() if k.startswith("metric/")
                }
                if bad := [k for k in self.sent if not self._fits(one.report[k], one.job.weight)]:
                    done.error = f"non-finite {' and '.join(bad)} (mean local loss {done.loss:.4g})"
            if done.error is None:
                good.append(one)
            else:
                done.row = None
            total.done.append(done)
        if not good:
            return
        weights = [one.job.weight for one in good]
        total.ids += [one.job.client for one in good]
        for key in self.sent:
            sums.setdefault(key, FixedSum()).add([one.report[key] for one in good], weights)
            if self.uploads.get(key) == "each":
                total.rows.setdefault(key, []).extend(one.report[key] for one in good)


@dataclass
class _Draws:
    augment: np.random.Generator | None
    dropout: np.random.Generator | None


@dataclass
class _Trained:
    job: Job
    report: Report = field(default_factory=dict)
    row: dict[str, np.ndarray] | None = None
    loss: Tensor = field(default_factory=lambda: torch.tensor(float("nan")))
    error: str | None = None


def _side_by_side(draws: list[_Draws], sizes: list[int], width: int) -> np.ndarray | None:
    """Each client's own augmentation numbers for one step, padded like the batches: [K * width, 3], or None."""
    generators = [d.augment for d in draws if d.augment is not None]
    own = [np.pad(g.random((n, DRAWS)), ((0, width - n), (0, 0))) for g, n in zip(generators, sizes, strict=False)]
    return np.concatenate(own) if own else None


def _kept(row: State) -> dict[str, np.ndarray] | None:
    kept = {k: v.detach().cpu().numpy().copy() for k, v in row.items() if k != "seen"}
    return kept or None


def cut(jobs: list[Job], size: int) -> list[Block]:
    """The round's blocks, from the cohort's order and the block size alone."""
    return [Block(i, jobs[start : start + size]) for i, start in enumerate(range(0, len(jobs), size))]
