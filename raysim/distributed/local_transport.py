"""Shared buffers and sockets of a run whose actors are all on the driver's machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from ray.exceptions import RayError

from raysim.distributed.actor_health import ActorSupervisor
from raysim.distributed.transport.actor_calls import Actor
from raysim.distributed.transport.shared_memory import (
    ALIGNMENT_BYTES,
    SharedBuffer,
    SharedBufferRef,
    move_states,
    states_of,
)
from raysim.distributed.waiting import first_line, translated
from raysim.engine.failure_policy import ActorDied
from raysim.engine.plan import Plan
from raysim.rules.uploads import sums
from raysim.training.messages import Block, ClientTask

MAX_SHARED_BUFFER_BYTES = 64 * 2**20
"""Largest size of a shared buffer. In a run with larger messages, calls go through Ray."""

CONNECT_TIMEOUT_S = 60.0
"""Longest time that an actor has to connect to the driver's socket, in seconds."""


class LocalTransport:
    """Shared buffers and sockets between the driver and the actors on its machine.

    Until `create_buffers`, and on several machines, there are none: `open` then does nothing,
    `share_states` leaves the states in the blocks, and messages go through Ray's object store.

    Args:
        supervisor: the supervisor of the actors.
        log: called with one line of text if something local cannot be used.
    """

    def __init__(self, supervisor: ActorSupervisor, log: Callable[[str], None]):
        self._supervisor = supervisor
        self._log = log
        self.buffers: dict[str, SharedBuffer] = {}
        """Shared buffers by writer; empty if the run uses the object store."""
        self._uses_sockets = False

    def create_buffers(self, plan: Plan) -> None:
        """Create a shared buffer for the server and each ClientActor.

        If the machine has too little shared memory, the run uses the object store.

        Args:
            plan: the run.
        """
        P, Q = plan.problem.size, plan.initial[1].numel()
        # What most rounds send. A message with more limbs is sent as it is.
        limbs = 2 if plan.config.dtype == "float64" else 1
        up = (limbs * len(sums(plan.server.uploads)) * P + 2 * limbs * Q) * 8
        rows = len(plan.sent_per_client) * plan.config.schedule.size * (P + Q) * 8
        sizes = {f"client {i}": up + rows for i in range(plan.config.resources.actors)}
        sizes["server"] = plan.first_broadcast.nbytes
        try:
            self.buffers = {
                # With room for the alignment of the arrays.
                name: SharedBuffer.new(min(size, MAX_SHARED_BUFFER_BYTES) + 4096)
                for name, size in sizes.items()
            }
        except OSError as error:
            self._log(f"no shared memory ({error}); the object store is used instead")
            return
        # Messages that the buffers do not hold go through the object store, past the driver.
        self._uses_sockets = max(sizes.values()) <= MAX_SHARED_BUFFER_BYTES

    def open(self, actor: Actor, first: bool = False) -> None:
        """Open all shared buffers in an actor, and call it over a socket from now on.

        Args:
            actor: the actor.
            first: whether it is the first one. If it cannot be reached over a socket, the calls of
                all actors go through Ray.

        Raises:
            ActorDied: the actor has failed.
            OSError: the driver cannot open another socket.
            RaysimError: Ray itself has failed, or the actor raised an error.
        """
        if self.buffers:
            self._open_buffers(actor, self.buffers)
        if not self._uses_sockets:
            return
        try:
            actor.connect(min(self._supervisor.timeout_s, CONNECT_TIMEOUT_S))
        except (RayError, OSError) as error:
            if first:
                self._log(f"no sockets ({first_line(error)}); calls go through Ray instead")
                self._uses_sockets = False
            elif isinstance(error, RayError):
                raise translated(error, "an actor that connects to the driver") from None
            else:
                raise

    def share_states(
        self, number: int, actor: Actor, blocks: list[Block]
    ) -> tuple[list[Block], SharedBufferRef | None]:
        """Write the states of clients into a shared buffer for a worker.

        Args:
            number: number of the ClientActor.
            actor: the ClientActor.
            blocks: the blocks that it will train.

        Returns:
            The blocks without states, and the place of the states. Without shared buffers, the
            blocks as they are, and None.
        """
        tasks = [task for block in blocks for task in block.tasks]
        if not self.buffers or not any(task.client_state for task in tasks):
            return blocks, None
        name = states_of(f"the driver for client {number}")
        self._make_state_buffers(actor, (name, states_of(f"client {number}")), tasks)
        if name not in self.buffers:
            return blocks, None
        tasks, place = move_states(tasks, name, self.buffers[name])
        remaining = iter(tasks)
        sent = [replace(block, tasks=list(islice(remaining, len(block.tasks)))) for block in blocks]
        return sent, place

    def close(self) -> None:
        """Forget the buffers: their memory is free when no process has them open."""
        self.buffers = {}
        self._uses_sockets = False

    def _make_state_buffers(
        self, actor: Actor, names: tuple[str, str], tasks: list[ClientTask]
    ) -> None:
        """Allocate shared buffers for the states that a worker gets and returns, if they need more.

        How large a state is shows when the first clients have returned theirs.
        """
        size = 0
        for task in tasks:
            for array in (task.client_state or {}).values():
                size += array.nbytes + ALIGNMENT_BYTES
        to_worker = self.buffers.get(names[0])
        if size > MAX_SHARED_BUFFER_BYTES or (to_worker is not None and to_worker.size >= size):
            return
        try:
            created = {name: SharedBuffer.new(size) for name in names}
        except OSError as error:
            self._log(f"no shared memory for what clients keep ({error}); it is sent as it is")
            return
        self.buffers |= created
        with suppress(ActorDied):  # of this worker: then its next call fails too
            self._open_buffers(actor, created)

    def _open_buffers(self, actor: Actor, buffers: Mapping[str, SharedBuffer]) -> None:
        """Open shared buffers in an actor."""
        paths = {name: buffer.path for name, buffer in buffers.items()}
        (opened,) = actor.call("open_shared_buffers", paths)
        self._supervisor.wait(opened, "an actor to open the shared memory", actor)
