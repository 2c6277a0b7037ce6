"""Local training of a block of clients: one after the other, side by side under vmap, or pooled as one.

A block is the unit of work. What it gives is a pure function of the broadcast, its jobs, the data and the run's
seed, so it can be computed anywhere, and again. Weighted sums inside a block run in client order; blocks add up in
fixed point (see numerics.sums), so that no grouping shows in the result.

In loop mode a client's bits do not depend on who shares its block. Under vmap they do, so there the block size is
part of the run's identity.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice, pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from raysim import forgetting, pooled
from raysim.chain import agrees
from raysim.config import Config, at_round
from raysim.data import Examples
from raysim.data.arrays import DRAWS
from raysim.data.partitions import Clients, VirtualClients
from raysim.models import Model, make_net
from raysim.numerics.sums import LIMIT, BlockSum, FixedSum
from raysim.pooled import Pool
from raysim.randomness import generator
from raysim.rules import PLAIN_STEP, ClientRule, Report, ServerRule, State, overridden, sums, with_mode
from raysim.task import Batch, Facts, LocalData, LoopTask, Task, VmapTask
from raysim.work import Block, Done, Job, Outcome

logger = logging.getLogger("raysim")

Mode = Literal["loop", "vmap", "pooled"]

GATHER = 1024
"""Examples gathered and normalised at a time when looping: as many whole batches as fit."""


@dataclass
class Broadcast:
    """A version of the model as it travels down: the server rule's tensors and the BatchNorm statistics [Q]."""

    shared: State
    buffers: Tensor


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
        mode: Mode,
    ):
        self.config, self.rule, self.mode = config, client, mode
        self.sums = sums(server.uploads) + ([("mean", "buffers")] if model.buffer_size else [])
        self.sent = list(dict.fromkeys(key for _, key in self.sums))
        self.each, self.change = with_mode(server.uploads, "each"), with_mode(server.uploads, "change")
        if server.weighs_late and model.buffer_size:
            self.each.append("buffers")
        self.average = float(np.mean(clients.sizes))
        self.model, self.x0, self.examples, self.clients = model, x0, examples, clients
        self.decayed = model.decayed() if config.local.weight_decay else None
        self.loop = LoopTask(model, Facts(), chained=agrees(model))
        self.upload_dtype: torch.dtype | None = getattr(torch, config.local.upload_dtype or "", None)
        self.plain = config.takes_bare_gradients and not overridden(client, PLAIN_STEP)
        self.channels_last = model.convolutional and model.device.type == "cpu" and mode != "vmap"

    def train(self, downs: Mapping[int, Broadcast], blocks: list[Block]) -> Outcome:
        """Trains blocks on the versions that their clients begin with, and adds up what they send."""
        began = time.perf_counter()
        total = Outcome()
        parts = {f"{mode} {key}": FixedSum() for mode, key in self.sums}
        for block in blocks:
            if self.mode != "pooled" or not self._add_pooled(total, parts, downs, block):
                self._add(total, parts, (self._vmap if self.mode == "vmap" else self._loop)(downs, block))
        total.sums = {name: part.total for name, part in parts.items() if part.total is not None}
        total.bound = max((part.bound for part in parts.values()), default=0.0)
        total.seconds = time.perf_counter() - began
        return total

    def _facts(self, t: int) -> Facts:
        local = self.config.local
        private = self.config.privacy
        guarded = private is not None and not self.rule.exposes
        lr = at_round(local.lr, t)
        return Facts(t, lr, local.weight_decay, local.clip, private, guarded, self.x0, self.decayed)

    # -- one after the other ---------------------------------------------------------------------------------------

    def _loop(self, downs: Mapping[int, Broadcast], block: Block) -> list[_Trained]:
        return [self._loop_one(self.rule.at(job.base), downs[job.base], job) for job in block.jobs]

    def _loop_one(self, rule: ClientRule, down: Broadcast, job: Job) -> _Trained:
        task, shared, in_place = self.loop, down.shared, not overridden(rule, ["step"])
        try:
            here = self.arrive(rule, down, job)
            state, w = here.state, here.state["w"]
            for passes, batch in enumerate(self.batches(job, here.mine)):
                batch = replace(batch, made=here.made[passes % len(here.made)]) if here.made else batch
                if self.plain:
                    task.descend_plainly(batch)
                elif in_place:
                    task.descend_in_place(w, rule.direction(shared, state, batch, task))
                else:
                    state = rule.step(shared, state, batch, task)
                if len(task.losses) != passes + 1:
                    raise RuntimeError(
                        f"client rule '{rule.name}' makes {len(task.losses) - passes} passes in mode "
                        "'train' in one step; make exactly one, the others 'frozen' or 'eval'"
                    )
            loss = torch.stack(task.losses).mean() if task.losses else self.x0.new_tensor(float("nan"))
            return self._leave(rule, state, here, loss)
        except Exception:
            return _failed(job)

    def arrive(self, rule: ClientRule, down: Broadcast, job: Job) -> Arrived:
        """The broadcast reaches a client: what it kept, and what its steps begin with. Makes `self.loop` its task."""
        mine, facts = self.clients.client(job.client), self._facts(job.base)
        data = LocalData(len(mine), self.average, lambda augment=False: self.whole(mine, job if augment else None))
        x = down.shared["x"]
        w = self.loop.start(facts, x, down.buffers, job.steps, fresh=lambda: self._fresh(job.client))
        row = self._row(rule, self.loop, job)
        state = {"w": w, **rule.init(down.shared, row, data, self.loop)}
        made = islice(self.made(rule, down, job, mine), job.steps) if rule.makes else ()
        return Arrived(job, down, mine, data, row, state, list(made))

    def made(self, rule: ClientRule, down: Broadcast, job: Job, mine: np.ndarray) -> Iterator[tuple[Batch, ...]]:
        """What the rule makes of each batch of one pass; the client's task is `self.loop`."""
        return (rule.make(down.shared, batch, self.loop) for batch in self._one_pass(job, mine))

    def _leave(self, rule: ClientRule, state: State, here: Arrived, loss: Tensor) -> _Trained:
        """The client, whose task is `self.loop`, has made its steps: what it sends and what it keeps."""
        task = self.loop
        assert task.buffers is not None
        report, kept = rule.finish(here.down.shared, state, here.row, here.data, task)
        _refuse_what_was_not_promised(rule, self.sent, report, here.row, kept)
        report = {k: v.to(self.upload_dtype).to(v.dtype) if self._rounded(k, v) else v for k, v in report.items()}
        own = task.trained.flat.data_ptr()  # the vector in training is the next client's too
        report, kept = ({k: v.clone() if v.data_ptr() == own else v for k, v in d.items()} for d in (report, kept))
        row = {k: v for k, v in kept.items() if k != "seen"} | {_last(key): report[key] for key in self.change}
        trained = _Trained(here.job, {**report, "buffers": task.buffers}, row, loss)
        if here.job.observed:
            trained.observed = self._observed(here, trained.report)
        if here.job.past is not None:
            trained.forgotten = forgetting.measure(self, rule, here, state["w"].clone(), task.buffers)
        return trained

    def _observed(self, here: Arrived, report: Report) -> dict[str, np.ndarray]:
        """What goes up, and the examples of the round's batches as the client saw them."""
        batches = list(self.batches(here.job, here.mine))
        seen = {"x": torch.cat([b.x for b in batches]), "y": torch.cat([b.y for b in batches])}
        return {
            k: v.detach().cpu().contiguous().numpy() for k, v in {**{k: report[k] for k in self.sent}, **seen}.items()
        }

    def whole(self, mine: np.ndarray, augmented: Job | None = None) -> Iterator[Batch]:
        """All examples of a client once, in batches of the configured size; a single one left over joins the last.
        Augmented for a job, or as they are stored."""
        size = self._size(mine)
        starts = list(range(0, len(mine), size))
        if len(starts) > 1 and len(mine) - starts[-1] == 1:
            starts.pop()
        draws = augmented and generator(self.config.seed, "augment whole", augmented.base, augmented.client)
        for start, stop in pairwise([*starts, len(mine)]):
            yield Batch(*self.images(mine[start:stop], draws))

    def _one_pass(self, job: Job, mine: np.ndarray) -> Iterator[Batch]:
        """One shuffled and augmented pass over a client's examples, for what is made of them; without dropout."""
        size, seed = self._size(mine), self.config.seed
        rng = generator(seed, "made", job.base, job.client)
        shuffled = rng.permutation(len(mine)) if len(mine) > size else np.arange(len(mine))
        draws = generator(seed, "augment made", job.base, job.client)
        for i in range(batches_per_pass(len(mine), size)):
            yield Batch(*self.images(mine[shuffled[i * size : (i + 1) * size]], draws))

    def images(self, indices: np.ndarray, draws: np.random.Generator | np.ndarray | None) -> tuple[Tensor, Tensor]:
        """Examples in the net's memory format, augmented by `draws`: x [n, C, H, W], y [n]."""
        x, y = self.examples.batch(indices, draws)
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last else x, y

    def _fresh(self, client: int) -> tuple[Tensor, Tensor]:
        """A net of this client's own, initialised anew."""
        seed = int(generator(self.config.seed, "fresh", client).integers(2**63))
        config = self.config.model_copy(update={"seed": seed})
        net = make_net(config, self.model.shape, self.model.classes)
        return Model(net, self.model.shape, self.model.classes, self.model.dtype, self.model.device).initial()

    def batches(self, job: Job, mine: np.ndarray) -> Iterator[Batch]:
        """The batches of one client, gathered and normalised a few at a time."""
        draws = self._draws(job)
        positions = list(order(self.config.seed, job.client, len(mine), self._size(mine), job.cursor, job.steps))
        ends = np.cumsum([0] + [len(p) for p in positions])
        for _, group in groupby(range(len(positions)), key=lambda i: int(ends[i]) // GATHER):
            chunk = list(group)
            indices = mine[np.concatenate([positions[i] for i in chunk])]
            x, y = self.images(indices, draws.augment)
            first = int(ends[chunk[0]])
            for start, stop in pairwise([int(ends[i]) - first for i in chunk] + [len(y)]):
                drops = self._masks(draws, stop - start)
                yield Batch(x[start:stop], y[start:stop], None, drops, noise=self._noise(draws))

    # -- side by side ----------------------------------------------------------------------------------------------

    def _vmap(self, downs: Mapping[int, Broadcast], block: Block) -> list[_Trained]:
        """Side by side goes who has the same constants: schedules over rounds may set apart who began at different
        times."""

        def constants(job: Job) -> tuple:
            return at_round(self.config.local.lr, job.base), self.rule.at(job.base)

        alike: list[list[Job]] = []
        for job in block.jobs:
            group = next((jobs for jobs in alike if constants(jobs[0]) == constants(job)), None)
            if group is None:
                alike.append(group := [])
            group.append(job)
        trained = {one.job.client: one for jobs in alike for one in self._vmap_alike(downs, jobs)}
        return [trained[job.client] for job in block.jobs]

    def _vmap_alike(self, downs: Mapping[int, Broadcast], jobs: list[Job]) -> list[_Trained]:
        """Clients with most steps first, so that those still training are always the first ones. What they were sent
        has a client axis too, unless all were sent the same."""
        rule, facts = self.rule.at(jobs[0].base), self._facts(jobs[0].base)

        def step(
            sent: _Sent, state: State, moved: Tensor, steps: Tensor, given: dict[str, Any]
        ) -> tuple[State, Tensor, Tensor]:
            t, shared, buffers = sent
            task = VmapTask(self.model, replace(facts, t=t), buffers, steps)
            task.buffers = moved
            made = tuple(Batch(x, y, given.get("made_mask")) for x, y in given["made"])
            batch = Batch(given["x"], given["y"], given.get("mask"), given["drops"], 0, made, given.get("noise"))
            state = rule.step(shared, state, batch, task)
            if len(task.losses) != 1 or task.buffers is None:
                raise RuntimeError(
                    f"client rule '{rule.name}' makes {len(task.losses)} passes in mode 'train' in one "
                    "step; make exactly one, the others 'frozen' or 'eval'"
                )
            return state, task.buffers, task.losses[0]

        trained: list[_Trained] = []
        arrived: list[Arrived] = []
        for job in sorted(jobs, key=lambda job: -job.steps):
            try:
                arrived.append(self.arrive(rule, downs[job.base], job))
                arrived[-1].state["w"] = downs[job.base].shared["x"]
            except Exception:
                trained.append(_failed(job))
        if not arrived:
            return trained
        try:
            state = {k: torch.stack([here.state[k] for here in arrived]) for k in arrived[0].state}
            steps = torch.tensor([here.job.steps for here in arrived], device=self.x0.device)
            moved = torch.stack([here.down.buffers for here in arrived])
            losses = torch.zeros(len(arrived), dtype=self.x0.dtype, device=self.x0.device)
            sent, together = self._sent(arrived)
            for i, (live, given) in enumerate(self._stacked(arrived)):
                part = {k: v[:live] for k, v in state.items()}
                now = sent if together else _of_the_first(sent, live)
                dims = (None if together else 0, 0, 0, 0, 0)
                part, new, loss = torch.func.vmap(step, in_dims=dims)(now, part, moved[:live], steps[:live], given)
                state = part if live == len(arrived) else {k: torch.cat([part[k], v[live:]]) for k, v in state.items()}
                moved = torch.cat([new, moved[live:]])
                losses[:live] += (loss - losses[:live]) / (i + 1)
        except Exception:
            return trained + [_failed(here.job) for here in arrived]
        for i, here in enumerate(arrived):
            try:
                self.loop.start(
                    self._facts(here.job.base), here.down.shared["x"], here.down.buffers, here.job.steps, moved[i]
                )
                own = {k: v[i] for k, v in state.items()}
                trained.append(self._leave(rule, own, here, losses[i]))
            except Exception:
                trained.append(_failed(here.job))
        return trained

    def _sent(self, arrived: list[Arrived]) -> tuple[_Sent, bool]:
        """What clients were sent, and whether it is one thing for all of them (else it has a client axis)."""
        bases, downs = [here.job.base for here in arrived], [here.down for here in arrived]
        if len(set(bases)) == 1:
            return (bases[0], downs[0].shared, downs[0].buffers), True
        shared = {k: torch.stack([down.shared[k] for down in downs]) for k in downs[0].shared}
        t = torch.tensor(bases, device=self.x0.device)
        return (t, shared, torch.stack([down.buffers for down in downs])), False

    def _stacked(self, arrived: list[Arrived]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Step by step: how many clients still train, and what they are given, padded to one size, [K, B, ...]."""
        jobs, mine = [here.job for here in arrived], [here.mine for here in arrived]
        draws = [self._draws(job) for job in jobs]
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
            masks = [self._masks(d, n, width) for d, n in zip(draws, sizes, strict=False)]
            drops = tuple(
                tuple(torch.stack([m[s][i] for m in masks]) for i in range(len(one))) for s, one in enumerate(masks[0])
            )
            given: dict[str, Any] = {"x": x.view(live, width, *x.shape[1:]), "y": y.view(live, width), "drops": drops}
            if (mask := self._real(sizes)) is not None:
                given["mask"] = mask
            if self.noisy:
                noise = [self._noise(d) for d in draws[:live]]
                given["noise"] = torch.stack([z for z in noise if z is not None])
            made = [here.made[i % len(here.made)] for here in arrived[:live] if here.made]
            given["made"] = tuple(
                (_padded([b.x for b in same]), _padded([b.y for b in same])) for same in zip(*made, strict=True)
            )
            if made and (mask := self._real([len(batches[0].y) for batches in made])) is not None:
                given["made_mask"] = mask
            yield live, given

    def _real(self, sizes: list[int]) -> Tensor | None:
        """[K, B], 1 where an example is none that only fills up; None where none is."""
        if min(sizes) == max(sizes):
            return None
        real = np.arange(max(sizes)) < np.array(sizes)[:, None]
        return torch.from_numpy(real).to(self.x0.device, self.x0.dtype)

    # -- as one ----------------------------------------------------------------------------------------------------

    def _add_pooled(
        self, total: Outcome, parts: dict[str, FixedSum], downs: Mapping[int, Broadcast], block: Block
    ) -> bool:
        """Adds a block whose clients are trained as one; or does nothing, where something is wrong with one of them:
        trained one after the other, they will show whose fault it is."""
        bound, value, losses = self.loop.trained, torch.zeros_like(self.x0, dtype=torch.float64), {}
        try:
            for base in sorted({job.base for job in block.jobs}):
                jobs = [job for job in block.jobs if job.base == base]
                bound.flat.copy_(downs[base].shared["x"])
                direction, found = pooled.gradient(bound, self._pool(jobs))
                value.add_(direction, alpha=at_round(self.config.local.lr, base))
                losses |= {job.client: loss for job, loss in zip(jobs, found, strict=True)}
        except Exception as error:
            logger.debug("block %d is trained client by client: %s", block.index, error)
            return False
        if not self._fits(whole := BlockSum([value], [1.0])):
            return False
        parts["mean delta"].add(whole)
        total.ids += [job.client for job in block.jobs]
        total.done += [Done(job.client, losses[job.client], bytes=self.x0.nbytes) for job in block.jobs]
        return True

    def _pool(self, jobs: list[Job]) -> Pool:
        """The one batch of each of these clients."""
        indices, draws = [], [self._draws(job) for job in jobs]
        for job in jobs:
            mine = self.clients.client(job.client)
            first = order(self.config.seed, job.client, len(mine), self._size(mine), job.cursor, job.steps)
            indices.append(mine[next(first, slice(0))])  # who has no data makes no step
        sizes = [len(own) for own in indices]
        x, y = self.images(np.concatenate(indices), _side_by_side(draws, sizes, None))
        masks = [self._masks(d, n) for d, n in zip(draws, sizes, strict=True)]
        drop = tuple(torch.cat(parts) for parts in zip(*(sets[0] for sets in masks if sets), strict=True))
        return Pool(x, y, sizes, [job.weight for job in jobs], drop)

    # -- shared ----------------------------------------------------------------------------------------------------

    def _size(self, mine: np.ndarray) -> int:
        batch = self.config.local.batch
        return max(len(mine), 1) if batch == "full" else batch

    def _draws(self, job: Job) -> _Draws:
        seed, augments = self.config.seed, self.examples.pad or self.examples.flip
        return _Draws(
            generator(seed, "augment", job.base, job.client) if augments else None,
            generator(seed, "dropout", job.base, job.client) if self.model.dropouts else None,
            generator(seed, "noise", job.base, job.client) if self.noisy else None,
        )

    @property
    def noisy(self) -> bool:
        return self.config.privacy is not None and self.config.privacy.sigma > 0

    def _noise(self, draws: _Draws) -> Tensor | None:
        """[P], standard normal, for one private step."""
        if draws.noise is None:
            return None
        noise = draws.noise.standard_normal(self.model.size, dtype=np.float32)
        return torch.from_numpy(noise).to(self.model.device, self.model.dtype)

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

    def _add(self, total: Outcome, parts: dict[str, FixedSum], trained: list[_Trained]) -> None:
        """Adds a block to what this worker sends; an upload that is not finite goes no further, nor does its row."""
        good, sums = self._judged(trained)
        total.done += [self._done(one) for one in trained]
        total.ids += [one.job.client for one in good]
        for (mode, key), block in sums.items():
            parts[f"{mode} {key}"].add(block)
        for key in self.each if good else ():
            total.rows.setdefault(key, []).extend(one.report[key] for one in good)

    def _judged(self, trained: list[_Trained]) -> tuple[list[_Trained], dict[tuple[str, str], BlockSum]]:
        """Who is in, and what they send, added up. Only where the sums are not sound does anybody's upload have to be
        looked at by itself. Whoever is out is told why in its `error`."""
        good = [one for one in trained if one.error is None]
        sums = self._sums(good)
        sound = all(map(self._fits, sums.values()))
        for one in good:
            bad = [] if sound else [key for (_, key), own in self._sums([one]).items() if not self._fits(own)]
            bad += [f"kept {key}" for key, value in one.row.items() if not torch.isfinite(value.sum())]
            if bad:
                what = " and ".join(dict.fromkeys(bad))
                one.error = f"non-finite {what} (mean local loss {float(one.loss):.4g})"
        if all(one.error is None for one in good):
            return good, sums
        good = [one for one in good if one.error is None]
        return good, self._sums(good)

    def _done(self, one: _Trained) -> Done:
        if one.error is not None:
            return Done(one.job.client, float(one.loss), one.error)
        return Done(
            one.job.client,
            float(one.loss),
            metrics={k.removeprefix("metric/"): float(v) for k, v in one.report.items() if k.startswith("metric/")},
            row=_kept(one.row),
            bytes=sum(self._bytes(k, one.report[k]) for k in self.sent if k not in self.rule.free),
            observed=one.observed,
            forgotten=one.forgotten,
        )

    def _rounded(self, key: str, value: Tensor) -> bool:
        return self.upload_dtype is not None and key in self.sent and value.shape == self.x0.shape

    def _bytes(self, key: str, value: Tensor) -> int:
        """What an upload would take on its way."""
        width = (self.upload_dtype or value.dtype).itemsize if self._rounded(key, value) else value.element_size()
        return value.numel() * width

    def _sums(self, trained: list[_Trained]) -> dict[tuple[str, str], BlockSum]:
        """What is sent, added up, by mode and key; nothing of nobody."""
        sums = {}
        for mode, key in self.sums if trained else ():
            rows = [one.report[key] for one in trained]
            if mode == "change":  # in float64, where the difference of two float32 numbers is exact
                rows = [
                    row.double() - self._sent_last(one.job, key, row) for one, row in zip(trained, rows, strict=True)
                ]
            sums[mode, key] = BlockSum(rows, [self._weight(mode, one.job) for one in trained])
        return sums

    def _fits(self, block: BlockSum) -> bool:
        """Finite, and small enough (below 1e18 and some) that the round's sum stays in the range of fixed point."""
        return block.size < LIMIT / self.config.schedule.size  # NaN fails the comparison

    @staticmethod
    def _weight(mode: str, job: Job) -> float:
        return {"mean": job.weight, "sum": 1.0, "change": job.share}[mode]

    @staticmethod
    def _sent_last(job: Job, key: str, like: Tensor) -> Tensor | float:
        last = None if job.row is None else job.row.get(_last(key))
        return 0.0 if last is None else torch.tensor(last).to(like.device).double().reshape(like.shape)


@dataclass
class _Draws:
    augment: np.random.Generator | None
    dropout: np.random.Generator | None
    noise: np.random.Generator | None


@dataclass
class Arrived:
    """A client about to train: its job, what it was sent, the positions of its examples, what it kept, what its steps
    begin with, and what was made of its batches."""

    job: Job
    down: Broadcast
    mine: np.ndarray
    data: LocalData
    row: State
    state: State
    made: list[tuple[Batch, ...]]


@dataclass
class _Trained:
    job: Job
    report: Report = field(default_factory=dict)
    row: State = field(default_factory=dict)
    loss: Tensor = field(default_factory=lambda: torch.tensor(float("nan")))
    error: str | None = None
    observed: dict[str, np.ndarray] = field(default_factory=dict)
    forgotten: dict[str, list[float]] = field(default_factory=dict)


def _failed(job: Job) -> _Trained:
    """For an `except`: a rule or net is a user's code and may raise anything. The engine judges it by client and round,
    and the run stops or goes on without the client (`faults.on_client_error`)."""
    return _Trained(job, error=traceback.format_exc(limit=-8))


_Sent = tuple[int | Tensor, State, Tensor]
"""What a client was sent: the version's number, the server rule's tensors, the BatchNorm statistics."""


def _of_the_first(sent: _Sent, count: int) -> _Sent:
    t, shared, buffers = sent
    assert isinstance(t, Tensor)
    return t[:count], {k: v[:count] for k, v in shared.items()}, buffers[:count]


def _padded(parts: Sequence[Tensor]) -> Tensor:
    """[K, B, ...] of K tensors [b_k, ...], filled up with each one's last entry."""
    width = max(len(part) for part in parts)
    return torch.stack([torch.cat([p, p[-1:].expand(width - len(p), *p.shape[1:])]) for p in parts])


def _side_by_side(draws: list[_Draws], sizes: list[int], width: int | None) -> np.ndarray | None:
    """Each client's own augmentation numbers for one step, [B, 3] (padded like the batches to `width`), or None."""
    generators = [d.augment for d in draws if d.augment is not None]
    own = [g.random((n, DRAWS)) for g, n in zip(generators, sizes, strict=False)]
    if width is not None:
        own = [np.pad(numbers, ((0, width - len(numbers)), (0, 0))) for numbers in own]
    return np.concatenate(own) if own else None


def _refuse_what_was_not_promised(rule: ClientRule, sent: list[str], report: Report, row: State, kept: State) -> None:
    """Raises where `finish` leaves out what the rule's class says it sends, or keeps other things than `state` says."""
    if missing := [key for key in sent if key not in report and key != "buffers"]:
        raise TypeError(f"finish of client rule '{rule.name}' sends no '{missing[0]}', which its `sends` promises")
    promised = {k: tuple(v.shape) for k, v in row.items() if k != "seen"}
    given = {k: tuple(v.shape) for k, v in kept.items() if k != "seen"}
    if promised != given:
        raise TypeError(f"finish of client rule '{rule.name}' keeps {given}, but its `state` says {promised}")


def _last(key: str) -> str:
    """Where a client keeps what it sent last, for server rules that take the change."""
    return f"last {key}"


def _kept(row: State) -> dict[str, np.ndarray] | None:
    return {k: v.detach().cpu().numpy().copy() for k, v in row.items()} or None


def cut(jobs: list[Job], size: int) -> list[Block]:
    """The blocks of a round's jobs, from their clients and the block size alone; in the order of the clients' numbers,
    so that the order of arrival does not show."""
    jobs = sorted(jobs, key=lambda job: job.client)
    return [Block(i, jobs[start : start + size]) for i, start in enumerate(range(0, len(jobs), size))]
