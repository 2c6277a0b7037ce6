"""The state of a run between two rounds: what its loop continues from, and a checkpoint holds.

The state of the server is not part of it: the executor holds that.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Generic

import torch

from raysim.data import partition_digest
from raysim.engine.executor import Executor, ModelHandle, Record
from raysim.engine.plan import Plan
from raysim.engine.state import checkpoint
from raysim.engine.state.checkpoint import Checkpoint
from raysim.engine.state.client_store import ClientStateStore
from raysim.engine.state.client_traffic import RunTraffic
from raysim.engine.state.gpu_store import GpuStateStore
from raysim.rules.contract import State, overridden
from raysim.schedule import clock_before, make_schedule
from raysim.server.selection import ClientHistory
from raysim.training.messages import ClientTask
from raysim.version import __version__


class RunState(Generic[ModelHandle]):
    """Client states, schedule, versions of the model and records of a run after some rounds.

    Args:
        plan: the plan of the run.
        rows: folder for client states that do not fit into memory; None for a run without a folder.
    """

    def __init__(self, plan: Plan, rows: Path | None):
        self.plan, self.config = plan, plan.config
        self.methods = plan.methods  # now: a file may change while the run trains
        self.done = 0
        """The number of rounds that are done, which is the newest version of the model."""
        resources = self.config.resources
        trains_here = resources.executor == "inline" and resources.gpus
        store = GpuStateStore if trains_here else ClientStateStore
        self.store = store(len(plan.clients), self.config.client_state.memory, rows)
        self.client_history: ClientHistory | None = None
        """Known facts of clients, for a server rule that selects them; None for any other rule."""
        if overridden(plan.server, ["select"]):
            self.client_history = ClientHistory(len(plan.clients))
        self.schedule = make_schedule(self.config, plan.clients.sizes_by_round)
        self.clocks = deque([(0, self.schedule.pack())], maxlen=2)
        """The virtual clock before the last rounds for which a checkpoint is due, by round. The
        newest of them may be scheduled already and not done. If the server rule selects clients,
        before the last rounds: these cannot be scheduled again without it."""
        self.versions: dict[int, ModelHandle] = {}
        """The versions of the model that some client, or the evaluator, still needs."""
        self.history: list[Record] = []
        """The complete records, in the order of rounds."""
        self.traffic = RunTraffic(lambda: plan.bytes_down)
        self.recoveries: Counter[str] = Counter()
        """The number of failures that earlier processes of this run recovered from, by kind."""

    def publish(self, version: int, broadcast: ModelHandle) -> None:
        """Make a version of the model available to clients, and count its rounds as done.

        Args:
            version: number of the version, which is the number of rounds that are done.
            broadcast: the version, as the executor refers to it.
        """
        self.versions[version] = broadcast
        self.done = version

    def versions_of(self, tasks: list[ClientTask]) -> dict[int, ModelHandle]:
        """Return the versions of the model that clients start from, by number.

        Args:
            tasks: the tasks of the clients.
        """
        return {task.base: self.versions[task.base] for task in tasks}

    def release_unused_versions(self, bases: Iterable[int]) -> None:
        """Release the versions of the model that no client needs any more.

        Args:
            bases: versions from which the clients of the next round start.
        """
        needed = {self.done, *self.schedule.versions_in_flight(), *bases}
        self.versions = {v: broadcast for v, broadcast in self.versions.items() if v in needed}

    def all_recoveries(self, executor: Executor[ModelHandle]) -> Record:
        """Return the number of failures that the run recovered from, by kind.

        Args:
            executor: the executor, which counts those of this process.
        """
        kinds = {**executor.recoveries, **self.recoveries}
        return {kind: float(self.recoveries[kind] + executor.recoveries[kind]) for kind in kinds}

    def pack(self, server: State, executor: Executor[ModelHandle], run_id: str) -> Checkpoint:
        """Return the checkpoint of this state.

        Args:
            server: the server's state after the same rounds.
            executor: the executor, which has the versions of the model.
            run_id: id of the run in MLflow.

        Raises:
            RaysimError: client states cannot be synced to disk.
            ServerStateLost: a version of the model is lost with the server.
        """
        facts = {
            "round": self.done,
            "bytes_down": self.traffic.down,
            "bytes_up": self.traffic.up,
            "version_bytes": self.traffic.sizes,
            "history": self.history,
            "recoveries": self.all_recoveries(executor),
            "run_id": run_id,
            "fingerprint": self.config.fingerprint,
            "data": self.plan.dataset.digest,
            "partition": partition_digest(self.plan.clients),
            "torch": torch.__version__,
            "raysim": __version__,
            "methods": self.methods,
        }
        # The newest version is left out: the server makes it again from its state.
        held = {
            v: executor.download_version(broadcast)
            for v, broadcast in self.versions.items()
            if v != self.done
        }
        clock = clock_before(self.config, self.plan.clients.sizes_by_round, self.clocks, self.done)
        clients = self.store.pack()
        if self.client_history is not None:
            clients |= self.client_history.pack()
        return Checkpoint(server, clients, clock, held, facts)

    def restore(self, saved: Checkpoint, executor: Executor[ModelHandle], run_dir: Path) -> None:
        """Set this state to that of a checkpoint.

        Args:
            saved: a checkpoint of this run.
            executor: the executor, which gets the versions of the model.
            run_dir: folder of the run.
        """
        self.store.unpack(saved.clients, checkpoint.disk_slots(run_dir))
        if self.client_history is not None:
            self.client_history.unpack(saved.clients)
        self.schedule.unpack(saved.clock)
        self.clocks = deque([(saved.facts["round"], saved.clock)], maxlen=2)
        self.versions = {
            v: executor.upload_version(version) for v, version in saved.versions.items()
        }
        self.done, self.history = saved.facts["round"], saved.facts["history"]
        self.traffic.down, self.traffic.up = saved.facts["bytes_down"], saved.facts["bytes_up"]
        self.traffic.sizes = {int(v): size for v, size in saved.facts["version_bytes"].items()}
        self.recoveries = Counter(saved.facts["recoveries"])
