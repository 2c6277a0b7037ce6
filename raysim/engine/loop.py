"""The training loop of a run: `Engine._train`, for every schedule.

`Engine.rounds` recovers from failures around it. The methods below the loop are its steps. What
passes from round to round is the `RunState`; the `Records` are the logged metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Generic

from numpy.random import Generator
from torch import Tensor

from raysim.engine.early_stop import StopRule
from raysim.engine.evaluation.candidates import evaluate_candidates
from raysim.engine.executor import (
    Executor,
    Future,
    ModelHandle,
    PendingServerStep,
    Record,
    RoundResults,
)
from raysim.engine.failure_policy import Decision, FailurePolicy, Work
from raysim.engine.plan import Plan, ProbedRun
from raysim.engine.probes import Probes
from raysim.engine.records import Records
from raysim.engine.round_clients import (
    ActiveRound,
    failed_in_training,
    make_cohort,
    make_tasks,
    require_used_updates,
)
from raysim.engine.state import checkpoint
from raysim.engine.state.client_store import ClientStateStore, rows_folder
from raysim.engine.state.run_state import RunState
from raysim.errors import (
    ClientError,
    ProbeError,
    RaysimError,
    ServerStateLost,
    WorkersLost,
    round_name,
)
from raysim.randomness import generator
from raysim.rules.client_sampling import SelectionPool
from raysim.rules.contract import State, overridden
from raysim.schedule import (
    RoundSchedule,
    ScheduledRound,
    ScheduleExhausted,
    Selection,
    Synchronous,
    synchronous_round,
)
from raysim.system.signals import Signals, Stopped
from raysim.training.messages import Broadcast, cut_blocks

logger = logging.getLogger("raysim")

MAX_PENDING_RECORDS = 2
"""Records that may still wait for metrics while the next round trains."""


class Engine(Generic[ModelHandle]):
    """A run: its plan, its executor, and its state after the rounds so far.

    Args:
        plan: the plan of the run.
        executor: computes the rounds; it has to be open before `rounds` is called.
        run_dir: folder of the run; None: no checkpoints, tables and client states on disk.
        run_id: id of the run in MLflow, which checkpoints keep.
        signals: lets a signal end the run while it waits for clients; None: signals are not
            handled.
    """

    def __init__(
        self,
        plan: Plan,
        executor: Executor[ModelHandle],
        run_dir: Path | None = None,
        run_id: str = "",
        signals: Signals | None = None,
    ):
        self.plan, self.executor, self.config = plan, executor, plan.config
        self.run_dir, self.run_id = run_dir, run_id
        self.signals = signals or Signals()
        self.failure_policy = FailurePolicy(plan.config.faults.on_client_error)
        self.final: dict[str, Tensor] = {}
        """The server's state after the last round."""
        self.last_round = self.config.rounds
        """The number of rounds after which the run ends."""
        self.stopped = ""
        """The reason for which `end_early` ended it; empty if nothing did."""
        self.last_evaluation: Record = {}
        """Metrics of the last parameters of a run that ends early, if its last round had none."""
        self.first_records: dict[float, Record] = {}
        """The records of rounds that a new server repeats, by round."""
        self.first_failure = ""
        """The first client that failed in this process, and why."""
        self.rows = rows_folder(run_dir, plan.config.client_state.dir)
        self._reset()

    def _reset(self) -> None:
        """Reset everything to the state before the first round."""
        self.state: RunState[ModelHandle] = RunState(self.plan, self.rows)
        self.records = Records(self.executor, self.state)
        self.stop_rule = StopRule(self.config)
        self.server_is_ahead = False
        """True while the server has updated the model and the engine has not counted the round."""

    @property
    def store(self) -> ClientStateStore:
        """The client-side states after the rounds so far."""
        return self.state.store

    @property
    def schedule(self) -> RoundSchedule:
        """The schedule of rounds, with its virtual clock."""
        return self.state.schedule

    @property
    def history(self) -> list[Record]:
        """The complete records of the rounds so far."""
        return self.state.history

    def end_early(self, reason: str) -> None:
        """End the run after the completed rounds, with a checkpoint to resume from.

        Args:
            reason: why; `RunResult.stopped` holds it.
        """
        if self.state.done < self.last_round:
            self.last_round, self.stopped = self.state.done, reason

    @property
    def ended(self) -> str:
        """The reason for which the section `stop` ended the run; empty if it did not."""
        return self.stop_rule.reason

    def rounds(self) -> Iterator[Record]:
        """Train all rounds; yield the record of each when its metrics are complete.

        If the server is lost, the run starts again from its last checkpoint. The repeated rounds
        compute the same bits, and their records are yielded once.

        Raises:
            Stopped: a signal came. A checkpoint of the rounds that are done is written first.
            ClientError: a client failed, and `faults.on_client_error` is "stop". A checkpoint is
                written first.
            ProbeError: a probe failed. A checkpoint of what is whole is written first.
            RaysimError: anything else that ends the run, such as a server that is lost again and
                again.
        """
        self.last_reported = int(self.history[-1]["round"]) if self.history else -1
        failures, failure = 0, None
        while True:
            try:
                if failure is not None:
                    self._recover_from_checkpoint(failure)
                for record in self._not_reported(self._train()):
                    failures = 0
                    yield record
                return
            except ServerStateLost as again:
                failure, failures = again, failures + 1
                if self.failure_policy.decide(again, Work.ROUNDS, failures) is Decision.RAISE:
                    raise RaysimError(
                        f"{failure}; that was failure {failures} of the server since the last "
                        "completed round"
                    ) from None
            except (Stopped, ClientError, ProbeError, WorkersLost) as end:
                # A checkpoint needs the server in the state after `done` rounds. After other errors
                # it may be ahead, see `evaluate_candidates`.
                try:
                    yield from self._not_reported(self._completed(max_pending=0))
                    self._save_what_is_done()
                except RaysimError as error:  # why the run ends matters more
                    # A failed evaluation, which ends the run, fails here a second time.
                    logger.warning(
                        "the last rounds are not saved: %s; `raysim resume` trains them again",
                        "an evaluation failed" if str(error) == str(end) else error,
                    )
                raise

    def _not_reported(self, records: Iterator[Record]) -> Iterator[Record]:
        """Yield the records of rounds that are not repeated.

        Repeated rounds are no progress: a server that fails in the same round again and again must
        reach the limit. They keep their first records, which trackers have: times and the like are
        others in the second.
        """
        for record in records:
            if record["round"] > self.last_reported:
                self.last_reported = int(record["round"])
                yield record
            elif first := self.first_records.get(record["round"]):
                record.clear()
                record.update(first)

    def _train(self) -> Iterator[Record]:
        """Train the rounds that are still to be done; yield their records.

        In a synchronous round all clients start from the newest version of the model, so they are
        dispatched when the server has published it. In an asynchronous round some start from older
        versions; these are dispatched before the server updates the model, and train meanwhile. The
        driver waits only for the clients of a round: the next round is scheduled while they train,
        and metrics follow up to MAX_PENDING_RECORDS rounds later. If the server rule selects the
        clients itself, the next round is scheduled when the model is updated.
        """
        self._start_to_measure()
        state, records = self.state, self.records
        # With `stop`, a record that is completed late would end the run some rounds too late.
        max_pending = MAX_PENDING_RECORDS if self.config.stop is None else 0
        current = self._schedule_round(state.done)
        # In a resumed asynchronous run: the same blocks as in a run that was never stopped.
        self._dispatch_ready(current)
        state.publish(state.done, self.executor.broadcast(current.cohort))
        self._dispatch_ready(current)
        records.begin_initial()
        while state.done < self.last_round and not current.exhausted:
            upcoming = None
            if state.client_history is None:
                upcoming = self._schedule_round(state.done + 1)  # while clients train
            with self.signals.allowed():  # a signal may end the run here
                results = current.training.get()
            current.timing = records.stopwatch.lap(results)
            self._accept_or_drop(current, results)
            if upcoming is None:
                step, upcoming = self._update_and_select(current, results)
            else:
                self._dispatch_ready(upcoming)  # asynchronous: clients that start from older ones
                step = self.executor.advance(
                    current.cohort, results, state.versions_of(current.tasks), upcoming.cohort
                )
            # Begun before the next round is dispatched, written after it: clients train meanwhile.
            checkpoint = self._begin_checkpoint_if_due(state.done + 1)
            state.publish(state.done + 1, step.broadcast)
            self._dispatch_ready(upcoming)  # synchronous: all clients; asynchronous: the others
            state.release_unused_versions(upcoming.cohort.bases)
            records.begin(current, results, step)
            del results  # else its uploads stay in memory until those of the next round have come
            # A checkpoint holds the history, so no record may be missing.
            yield from self._completed(max_pending=0 if checkpoint else max_pending)
            # Only now: the stop rule, or the caller that got a record, may have ended the run.
            if state.done == self.last_round < self.config.rounds:
                yield from self._completed(max_pending=0)
                self.last_evaluation = records.evaluate_last()
            if checkpoint is not None:
                self._save(checkpoint.get())
            current = upcoming
        self.final = self.executor.snapshot().get()
        yield from self._completed(max_pending=0)
        self._end(current)

    def _start_to_measure(self) -> None:
        """Attach the probes, to the rounds that are done by now, and start to measure time."""
        state = self.state
        run = ProbedRun(self.plan, self.run_dir, state.done, state.history, self._download)
        self.probes = Probes(run)
        self.records.start(self.probes, self.run_dir)
        self.stop_rule = StopRule(self.config, state.history)
        self._end_if_met()

    def _completed(self, max_pending: int) -> Iterator[Record]:
        """Yield the completed records, see `Records.completed`; one of them may end the run."""
        for record in self.records.completed(max_pending):
            self.stop_rule.see(record)
            self._end_if_met()
            yield record

    def _end_if_met(self) -> None:
        """Let the run end after the rounds that are done, if its section `stop` ends it."""
        if self.ended:
            self.last_round = min(self.last_round, self.state.done)

    def _end(self, last: ActiveRound[ModelHandle]) -> None:
        """End a run whose loop is left.

        Raises:
            RaysimError: its schedule is exhausted before the last round, or no client took part.
        """
        if self.state.done < self.last_round:
            raise RaysimError(last.scheduled.exhausted)
        if self.stopped or self.ended:
            self._save_what_is_done()
        if not self.stopped:
            on_empty_run = self.config.faults.on_empty_run
            require_used_updates(self.state.history, on_empty_run, self.first_failure)

    # -- rounds ------------------------------------------------------------------------------------

    def _schedule_round(self, t: int) -> ActiveRound[ModelHandle]:
        """Return round t, with the clients whose updates the server will receive in it."""
        # The checkpoint after t rounds is written when round t is already scheduled.
        if self._due(t) or self.state.client_history is not None:
            self.state.clocks.append((t, self.state.schedule.pack()))
        try:
            # No round follows the last one: an empty one lets the server make the final version.
            is_last = t == self.config.rounds
            scheduled = synchronous_round(t, []) if is_last else self._next_round(t)
        except ScheduleExhausted as end:
            scheduled = ScheduledRound(t, [], self.state.schedule.now, exhausted=str(end))
        cohort = make_cohort(self.plan, scheduled)
        requests = self.probes.requests(cohort) if t < self.config.rounds else {}
        return ActiveRound(scheduled, cohort, requests, self.executor.training(t))

    def _next_round(self, t: int) -> ScheduledRound:
        """Return round t, of clients that are sampled or that the server rule selects."""
        schedule, client_history = self.state.schedule, self.state.client_history
        if client_history is None:
            return schedule.next_round(t)
        assert isinstance(schedule, Synchronous)
        pool = client_history.pool(schedule.available(t), self.config.schedule.size, t)
        return schedule.next_round(t, self._select(pool, generator(self.config.seed, "cohort", t)))

    def _select(self, pool: SelectionPool, rng: Generator) -> Selection:
        """Return the clients that the server rule selects, and wait for them."""
        if not overridden(self.plan.server, ["candidates"]):
            return Selection(self.executor.select(pool, rng).get())
        with self.records.stopwatch.evaluating():
            pool, candidates, metrics = evaluate_candidates(
                self.plan, self.executor, pool, self.state.store
            )
        selected = self.executor.select(pool, rng).get()
        return Selection(selected, metrics, len(set(candidates) - set(selected)))

    def _update_and_select(
        self, current: ActiveRound[ModelHandle], results: RoundResults
    ) -> tuple[PendingServerStep[ModelHandle], ActiveRound[ModelHandle]]:
        """Update the model, and return this step and the round that the server rule selects."""
        bases = self.state.versions_of(current.tasks)
        metrics = self.executor.update(current.cohort, results, bases)
        metrics.get()  # an update that fails ends the run here
        # If a probe fails here, the server is a round ahead of the clients' states.
        self.server_is_ahead = True
        upcoming = self._schedule_round(self.state.done + 1)
        self.server_is_ahead = False
        return PendingServerStep(metrics, self.executor.broadcast(upcoming.cohort)), upcoming

    def _dispatch_ready(self, active: ActiveRound[ModelHandle]) -> None:
        """Dispatch the clients of a round that are not running yet and whose version exists."""
        dispatched = {task.client for task in active.tasks}
        facts = zip(active.cohort.ids, active.cohort.bases, strict=True)
        versions = self.state.versions
        ready = [base in versions and client not in dispatched for client, base in facts]
        tasks = make_tasks(self.plan, self.state.store, active.cohort, ready, active.requests)
        if tasks:
            blocks = cut_blocks(tasks, self.plan.block_size)
            active.training.add(self.state.versions_of(tasks), blocks)
            active.tasks += tasks

    def _accept_or_drop(self, active: ActiveRound[ModelHandle], results: RoundResults) -> None:
        """Accept the updates of a round's clients, drop failed ones, and store client states.

        Probes see the results before anything is stored. If a probe fails, the run is still in the
        state after the previous round.

        Raises:
            ClientError: a client failed, and `faults.on_client_error` is "stop".
            ProbeError: a probe failed.
        """
        round = round_name(active.cohort.t)
        on_error = self.config.faults.on_client_error
        failed = failed_in_training(active.cohort.t, results, on_error)
        for client, why in failed.items():
            self.first_failure = self.first_failure or f"client {client} in {round}: {why}"
        if not active.tasks:
            logger.warning("%s: no client arrived", round)
        active.cohort.dropped = set(failed)
        active.probed = self.probes.metrics(active.cohort, results.workers)
        done = {result.client: result for result in results.clients}
        store, client_history = self.state.store, self.state.client_history
        for task in active.tasks:
            # Of failed clients too: they have drawn these batches, and ε is counted from cursors.
            store.cursors[task.client] += task.steps
            if task.client not in active.cohort.dropped:
                store.put(task.client, done[task.client].client_state)
        if client_history is not None:
            used = (done[c] for c in active.cohort.ids if c not in active.cohort.dropped)
            client_history.record(active.scheduled, used)

    def _download(self, version: int) -> Broadcast:
        """Return a version of the model that has not been released."""
        return self.executor.download_version(self.state.versions[version])

    # -- checkpoints -------------------------------------------------------------------------------

    def _due(self, done: int) -> bool:
        """Return whether a checkpoint is written after so many rounds."""
        every = self.config.checkpoint.every
        if not every or self.run_dir is None:
            return False
        return done % every == 0 or done == self.config.rounds

    def _begin_checkpoint_if_due(self, rounds_done: int) -> Future[State] | None:
        """Ask for the server's state if a checkpoint is due, before the server continues."""
        return self.executor.snapshot() if self._due(rounds_done) else None

    def _save(self, server: State) -> None:
        """Write a checkpoint; without it the run continues, unless `checkpoint.required`."""
        assert self.run_dir is not None
        asked = self.config.checkpoint
        saved = self.state.pack(server, self.executor, self.run_id)
        best = self.config.evaluate.best_by if asked.best else None
        try:
            checkpoint.write_checkpoint(self.run_dir, saved, asked.keep, best)
        except checkpoint.Unwritable as error:
            if asked.required:
                raise checkpoint.Unwritable(
                    f"{error}; free some space and continue from the last checkpoint with `raysim "
                    "resume`, or set checkpoint.required=false to train without checkpoints"
                ) from None
            self.state.recoveries["system/checkpoints_failed"] += 1
            logger.warning("%s; the run continues without it", error)
        # Checkpoints that are removed by now no longer need their slots.
        self.state.store.hold(checkpoint.disk_slots(self.run_dir))

    def _save_what_is_done(self) -> None:
        """Write a checkpoint outside of the usual rounds; the current round is abandoned."""
        done = self.state.done
        if self.run_dir is None or not self.config.checkpoint.every or not done:
            return
        written = [path.name for path in checkpoint.available_checkpoints(self.run_dir)]
        if checkpoint.checkpoint_name(done) in written:
            return
        if self.server_is_ahead:
            raise RaysimError("the server has already updated the model of the next round")
        if self.state.history[-1]["round"] < done:
            raise RaysimError(f"the evaluation after round {done} has not begun")
        self._save(self.executor.snapshot().get())

    def _recover_from_checkpoint(self, failure: ServerStateLost) -> None:
        """Start a new server from the last checkpoint, or from the beginning if there is none."""
        logger.warning("%s", failure)
        self.executor.recover()
        saved = None
        if self.run_dir is not None:
            saved = checkpoint.read_latest(self.run_dir)
        recoveries = self.state.recoveries
        self.first_records |= {record["round"]: record for record in self.history}
        self._reset()
        if saved is not None:
            self.restore(saved)
        # What this process has put right is counted by the executor.
        self.state.recoveries = recoveries
        logger.warning("the server is restarted; resuming after round %d", self.state.done)

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Set the engine to a checkpoint of this run, before `rounds`.

        Args:
            saved: a checkpoint in the run's folder; newer ones are removed.

        Raises:
            RaysimError: the checkpoint comes from another rule or another model.
        """
        assert self.run_dir is not None
        # First: a snapshot of another rule is refused before any checkpoint is removed.
        self.executor.restore(saved.server)
        checkpoint.remove_after(self.run_dir, saved.facts["round"])
        self.state.restore(saved, self.executor, self.run_dir)

    def close(self) -> None:
        """Delete client states on disk, unless a checkpoint needs them."""
        in_use = checkpoint.disk_slots(self.run_dir) if self.run_dir is not None else []
        self.state.store.close(in_use)
