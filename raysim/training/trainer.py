"""Local training of a block of clients: one after the other, side by side under vmap, or pooled as one.

A block is the unit of work. What it gives is a pure function of the broadcast, its jobs, the data and the run's
seed, so it can be computed anywhere, and again. Weighted sums inside a block run in client order; blocks add up in
fixed point (see numerics.sums), so that no grouping shows in the result.

In loop mode a client's bits do not depend on who shares its block. Under vmap they do, so there the block size is
part of the run's identity.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from raysim.config.schema import Config, at_round
from raysim.data import Examples
from raysim.data.partitions import Clients, VirtualClients
from raysim.errors import ContractError
from raysim.models.build import make_net
from raysim.models.flat import Model
from raysim.numerics.fixed_point import LIMIT, BlockSum, FixedSum
from raysim.randomness import generator
from raysim.rules.batch import Batch
from raysim.rules.contract import PLAIN_STEP, ClientRule, Report, ServerRule, State, overridden, sums, with_mode
from raysim.rules.task import LocalData, Task
from raysim.signals import reraise_stop
from raysim.training import pooled, vmap
from raysim.training.batches import Feed, Gathered
from raysim.training.cuda_graphs import Replayer
from raysim.training.fast_gradient import agrees
from raysim.training.loop import LoopTask
from raysim.training.messages import Block, Broadcast, Done, Job, Outcome
from raysim.training.task import Facts

logger = logging.getLogger("raysim")

Mode = Literal["loop", "vmap", "pooled"]


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
        measures: Mapping[str, Measure] | None = None,
    ):
        self.config, self.rule, self.mode = config, client, mode
        self.server, self.measures = server, measures or {}
        self.sums = sums(server.uploads) + ([("mean", "buffers")] if model.buffer_size else [])
        self.sent = list(dict.fromkeys(key for _, key in self.sums))
        self.each, self.change = with_mode(server.uploads, "each"), with_mode(server.uploads, "change")
        if server.weighs_late and model.buffer_size:
            self.each.append("buffers")
        self.average = float(np.mean(clients.sizes))
        self.model, self.x0, self.clients = model, x0, clients
        self.decayed = model.decayed() if config.local.weight_decay else None
        self.loop = LoopTask(model, Facts(), chained=agrees(model))
        self.upload_dtype: torch.dtype | None = getattr(torch, config.local.upload_dtype or "", None)
        self.plain = config.takes_bare_gradients and not overridden(client, PLAIN_STEP)
        channels_last = model.convolutional and model.device.type == "cpu" and mode != "vmap"
        self.replayer = Replayer() if self._records() else None
        self.feed = Feed(config, model, examples, client.masks, channels_last)

    def _records(self) -> bool:
        """Whether steps are recorded as CUDA graphs: on a GPU, where they are alike, so that not every block brings
        kinds of steps that never come again."""
        wanted = self.config.block.graphs and self.config.steps_are_alike
        return wanted and self.mode == "vmap" and self.model.device.type == "cuda"

    def train(self, downs: Mapping[int, Broadcast], blocks: list[Block]) -> Outcome:
        """Trains blocks on the versions that their clients begin with, and adds up what they send."""
        began = time.perf_counter()
        total = Outcome(versions={base: down.nbytes for base, down in downs.items()})
        parts = {f"{mode} {key}": FixedSum() for mode, key in self.sums}
        for block in blocks:
            if self.mode != "pooled" or not self._add_pooled(total, parts, downs, block):
                updates = self.clients_of(downs, block, "vmap" if self.mode == "vmap" else "loop")
                self._measure(updates)
                self._add(total, parts, updates)
        total.sums = {name: part.total for name, part in parts.items() if part.total is not None}
        total.bound = max((part.bound for part in parts.values()), default=0.0)
        total.seconds = time.perf_counter() - began
        return total

    def clients_of(self, downs: Mapping[int, Broadcast], block: Block, mode: Mode) -> list[ClientUpdate]:
        """Train a block's clients one after the other or side by side; what each of them sends and keeps, not added
        up."""
        return (self._vmap if mode == "vmap" else self._loop)(downs, block)

    def _facts(self, t: int) -> Facts:
        local = self.config.local
        private = self.config.privacy
        guarded = private is not None and not self.rule.exposes
        lr = at_round(local.lr, t)
        return Facts(t, lr, local.weight_decay, local.clip, private, guarded, self.x0, self.decayed)

    # -- one after the other ---------------------------------------------------------------------------------------

    def _loop(self, downs: Mapping[int, Broadcast], block: Block) -> list[ClientUpdate]:
        rules = {base: self.rule.at(base) for base in {job.base for job in block.jobs}}
        gathered = Gathered(self.feed, block.jobs, [self.clients.client(job.client) for job in block.jobs])
        return [
            self._loop_one(rules[job.base], downs[job.base], job, gathered.batches(k))
            for k, job in enumerate(block.jobs)
        ]

    def _loop_one(self, rule: ClientRule, down: Broadcast, job: Job, batches: Iterator[Batch]) -> ClientUpdate:
        task, shared, in_place = self.loop, down.shared, not overridden(rule, ["step"])
        try:
            here = self.arrive(rule, down, job)
            state, w = here.state, here.state["w"]
            for passes, batch in enumerate(batches):
                batch = replace(batch, made=here.made[passes % len(here.made)]) if here.made else batch
                if self.plain:
                    task.descend_plainly(batch)
                elif in_place:
                    task.descend_in_place(w, rule.direction(shared, state, batch, task))
                else:
                    state = rule.step(shared, state, batch, task)
                if len(task.losses) != passes + 1:
                    raise ContractError(
                        f"client rule '{rule.name}' makes {len(task.losses) - passes} passes in mode "
                        "'train' in one step; make exactly one, the others 'frozen' or 'eval'"
                    )
            loss = torch.stack(task.losses).mean() if task.losses else self.x0.new_tensor(float("nan"))
            return self._leave(rule, state, here, loss)
        except BaseException as error:
            reraise_stop(error)
            return _failed(job)

    def arrive(self, rule: ClientRule, down: Broadcast, job: Job) -> PreparedClient:
        """The broadcast reaches a client: what it kept, and what its steps begin with. Makes `self.loop` its task."""
        mine, facts = self.clients.client(job.client), self._facts(job.base)
        data = LocalData(len(mine), self.average, lambda augment=False: self.feed.whole(mine, job if augment else None))
        x = down.shared["x"]
        w = self.loop.start(facts, x, down.buffers, job.steps, fresh=lambda: self._fresh(job.client))
        row = self._row(rule, self.loop, job)
        state = rule.init(down.shared, row, data, self.loop)
        if "w" in state:
            raise ContractError(
                f"init of client rule '{rule.name}' returns \"w\", which is the engine's: local steps start at "
                'shared["x"]; leave it out'
            )
        state = {"w": w, **state}
        made = islice(self.made(rule, down, job, mine), job.steps) if rule.makes else ()
        return PreparedClient(job, rule, down, mine, data, row, state, list(made))

    def made(self, rule: ClientRule, down: Broadcast, job: Job, mine: np.ndarray) -> Iterator[tuple[Batch, ...]]:
        """What the rule makes of each batch of one pass; the client's task is `self.loop`."""
        return (rule.make(down.shared, batch, self.loop) for batch in self.feed.one_pass(job, mine))

    def _leave(self, rule: ClientRule, state: State, here: PreparedClient, loss: Tensor) -> ClientUpdate:
        """The client, whose task is `self.loop`, has made its steps: what it sends and what it keeps."""
        task = self.loop
        assert task.buffers is not None
        report, kept = rule.finish(here.down.shared, state, here.row, here.data, task)
        _refuse_what_was_not_promised(rule, self.sent, report, here.row, kept)
        report = {k: v.to(self.upload_dtype).to(v.dtype) if self._rounded(k, v) else v for k, v in report.items()}
        own = task.trained.flat.data_ptr()  # the vector in training is the next client's too
        report, kept = ({k: v.clone() if v.data_ptr() == own else v for k, v in d.items()} for d in (report, kept))
        row = {k: v for k, v in kept.items() if k != "seen"} | {_last(key): report[key] for key in self.change}
        update = ClientUpdate(here.job, {**report, "buffers": task.buffers}, row, loss)
        if here.job.requests:  # the task is the next client's soon
            update.client, update.params = here, state["w"].clone()
        return update

    def _measure(self, updates: list[ClientUpdate]) -> None:
        """Let probes look at the clients that they ask for. What a probe raises ends the run, whoever was trained."""
        for update in updates:
            if update.client is not None and update.error is None:
                for name, request in update.job.requests.items():
                    update.measured[name] = self.measures[name](self, update.client, update, request)

    def _fresh(self, client: int) -> tuple[Tensor, Tensor]:
        """A net of this client's own, initialised anew."""
        seed = int(generator(self.config.seed, "fresh", client).integers(2**63))
        config = self.config.model_copy(update={"seed": seed})
        net = make_net(config, self.model.shape, self.model.classes)
        return Model(net, self.model.shape, self.model.classes, self.model.dtype, self.model.device).initial()

    # -- side by side ----------------------------------------------------------------------------------------------

    def _vmap(self, downs: Mapping[int, Broadcast], block: Block) -> list[ClientUpdate]:
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

    def _vmap_alike(self, downs: Mapping[int, Broadcast], jobs: list[Job]) -> list[ClientUpdate]:
        rule, facts = self.rule.at(jobs[0].base), self._facts(jobs[0].base)
        trained: list[ClientUpdate] = []
        arrived: list[PreparedClient] = []
        for job in sorted(jobs, key=lambda job: -job.steps):
            try:
                arrived.append(self.arrive(rule, downs[job.base], job))
                arrived[-1].state["w"] = downs[job.base].shared["x"]
            except BaseException as error:
                reraise_stop(error)
                trained.append(_failed(job))
        if not arrived:
            return trained
        jobs = [here.job for here in arrived]
        try:
            state, moved, losses = vmap.train(
                self.model,
                rule,
                facts,
                [(here.job.base, here.down.shared, here.down.buffers) for here in arrived],
                [here.state for here in arrived],
                [job.steps for job in jobs],
                self.feed.stacked(jobs, [here.mine for here in arrived], [here.made for here in arrived]),
                self.replayer,
            )
        except BaseException as error:
            reraise_stop(error)
            return trained + [_failed(job) for job in jobs]
        for i, here in enumerate(arrived):
            try:
                self.loop.start(
                    self._facts(here.job.base), here.down.shared["x"], here.down.buffers, here.job.steps, moved[i]
                )
                own = {k: v[i] for k, v in state.items()}
                trained.append(self._leave(rule, own, here, losses[i]))
            except BaseException as error:
                reraise_stop(error)
                trained.append(_failed(here.job))
        return trained

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
                direction, found = pooled.gradient(
                    bound, self.feed.pool(jobs, [self.clients.client(job.client) for job in jobs])
                )
                value.add_(direction, alpha=at_round(self.config.local.lr, base))
                losses |= {job.client: loss for job, loss in zip(jobs, found, strict=True)}
        except BaseException as error:
            reraise_stop(error)
            logger.debug("block %d is trained client by client: %s", block.index, error)
            return False
        if not self._fits(whole := BlockSum([value], [1.0])):
            return False
        parts["mean delta"].add(whole)
        total.ids += [job.client for job in block.jobs]
        total.done += [Done(job.client, losses[job.client], bytes=self.x0.nbytes) for job in block.jobs]
        return True

    # -- shared ----------------------------------------------------------------------------------------------------

    def _row(self, rule: ClientRule, task: Task, job: Job) -> State:
        """What the client kept, or zeros, and whether it has been here before."""
        row = rule.state(task)
        if job.row is not None:
            row = {k: torch.tensor(job.row[k]).to(v.device, v.dtype).reshape(v.shape) for k, v in row.items()}
        return {**row, "seen": torch.tensor(job.seen, device=self.x0.device)}

    def _add(self, total: Outcome, parts: dict[str, FixedSum], trained: list[ClientUpdate]) -> None:
        """Adds a block to what this worker sends; an upload that is not finite goes no further, nor does its row."""
        good, sums = self._judged(trained)
        total.done += [self._done(one) for one in trained]
        total.ids += [one.job.client for one in good]
        for (mode, key), block in sums.items():
            parts[f"{mode} {key}"].add(block)
        for key in self.each if good else ():
            total.rows.setdefault(key, []).extend(one.report[key] for one in good)

    def _judged(self, trained: list[ClientUpdate]) -> tuple[list[ClientUpdate], dict[tuple[str, str], BlockSum]]:
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

    def _done(self, one: ClientUpdate) -> Done:
        if one.error is not None:
            return Done(one.job.client, float(one.loss), one.error)
        return Done(
            one.job.client,
            float(one.loss),
            metrics={k.removeprefix("metric/"): float(v) for k, v in one.report.items() if k.startswith("metric/")},
            row=_kept(one.row),
            bytes=sum(self._bytes(k, one.report[k]) for k in self.sent if k not in self.rule.free),
            measured=one.measured,
        )

    def _rounded(self, key: str, value: Tensor) -> bool:
        return self.upload_dtype is not None and key in self.sent and value.shape == self.x0.shape

    def _bytes(self, key: str, value: Tensor) -> int:
        """What an upload would take on its way."""
        width = (self.upload_dtype or value.dtype).itemsize if self._rounded(key, value) else value.element_size()
        return value.numel() * width

    def _sums(self, trained: list[ClientUpdate]) -> dict[tuple[str, str], BlockSum]:
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
class PreparedClient:
    """A client that is ready to train."""

    job: Job
    rule: ClientRule
    """The client rule in the round of the version that the client starts from."""
    down: Broadcast
    """The version of the model that the client received."""
    mine: np.ndarray
    """Positions of its examples in the training set [n]."""
    data: LocalData
    row: State
    """What the client kept from its earlier rounds."""
    state: State
    """What its local steps start with."""
    made: list[tuple[Batch, ...]]
    """What the rule prepared of each batch."""


@dataclass
class ClientUpdate:
    """What local training made of one client."""

    job: Job
    report: Report = field(default_factory=dict)
    """What it sends by key, such as `delta` [P], its metrics, and its BatchNorm statistics as `buffers` [Q]."""
    row: State = field(default_factory=dict)
    """What it keeps until its next round."""
    loss: Tensor = field(default_factory=lambda: torch.tensor(float("nan")))
    """The mean training loss of its local steps."""
    error: str | None = None
    broken: str | None = None
    """The error, if it is that the rule breaks its contract."""
    client: PreparedClient | None = None
    """The client as it was before its steps; kept where a probe asks for it."""
    params: Tensor | None = None
    """Its parameters after its local steps [P]; kept where a probe asks for them."""
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What probes measured, by the name of the probe."""


Measure = Callable[[Trainer, PreparedClient, ClientUpdate, Any], dict[str, Any]]
"""Measures something of a client that has trained; the last argument is the probe's request for it."""


def _failed(job: Job) -> ClientUpdate:
    """For an `except`: a rule or net is a user's code and may raise anything. The engine judges it by client and round,
    and the run stops or goes on without the client (`faults.on_client_error`)."""
    error = sys.exc_info()[1]
    broken = str(error) if isinstance(error, ContractError) else None
    return ClientUpdate(job, error=traceback.format_exc(limit=-8), broken=broken)


def _refuse_what_was_not_promised(rule: ClientRule, sent: list[str], report: Report, row: State, kept: State) -> None:
    """Raises ContractError where `finish` leaves out what the rule's class says it sends, sends what cannot be added
    up, or keeps other things than `state` says."""
    finish = f"finish of client rule '{rule.name}'"
    for key in sent:
        if key == "buffers":
            continue
        if key not in report:
            raise ContractError(f"{finish} sends no '{key}', which its `sends` promises")
        _refuse_what_cannot_be_added_up(f"{finish} sends '{key}'", report[key])
    promised = {k: tuple(v.shape) for k, v in row.items() if k != "seen"}
    given = {k: tuple(v.shape) for k, v in kept.items() if k != "seen"}
    if promised != given:
        raise ContractError(f"{finish} keeps {given}, but its `state` says {promised}")


def _refuse_what_cannot_be_added_up(what: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise ContractError(f"{what} as {type(value).__name__}; an upload is a vector, a float tensor of one dimension")
    kind, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
    if not value.is_floating_point():
        raise ContractError(f'{what} as {kind} {shape}; uploads are added up as floats: send .to(shared["x"].dtype)')
    if value.ndim != 1:
        raise ContractError(
            f"{what} as a tensor of shape {shape}; uploads are vectors: send .reshape(-1), and let the server rule "
            "give it its shape back"
        )


def _last(key: str) -> str:
    """Where a client keeps what it sent last, for server rules that take the change."""
    return f"last {key}"


def _kept(row: State) -> dict[str, np.ndarray] | None:
    return {k: v.detach().cpu().numpy().copy() for k, v in row.items()} or None
