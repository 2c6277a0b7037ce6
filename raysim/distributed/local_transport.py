"""Shared buffers and sockets of a run whose actors are all on the driver's machine."""

from __future__ import annotations

from collections.abc import Callable

from ray.exceptions import RayError

from raysim.distributed.actor_health import ActorSupervisor
from raysim.distributed.transport.actor_calls import Actor
from raysim.distributed.transport.shared_memory import SharedBuffer
from raysim.distributed.waiting import first_line, translated
from raysim.engine.plan import Plan
from raysim.rules.uploads import sums
from raysim.server.first_broadcast import shapes_of_first_broadcast

MAX_SHARED_BUFFER_BYTES = 64 * 2**20
"""Largest size of a shared buffer. In a run with larger messages, calls go through Ray."""

CONNECT_TIMEOUT_S = 60.0
"""Longest time that an actor has to connect to the driver's socket, in seconds."""


class LocalTransport:
    """Shared buffers and sockets between the driver and the actors on its machine.

    Until `create_buffers`, and on several machines, there are none: `open` then does nothing, and
    messages go through Ray's object store.

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
        first = shapes_of_first_broadcast(plan.server, *plan.initial, plan.problem)
        sizes["server"] = first.nbytes
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
            paths = {name: buffer.path for name, buffer in self.buffers.items()}
            (opened,) = actor.call("open_shared_buffers", paths)
            self._supervisor.wait(opened, "an actor to open the shared memory", actor)
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

    def close(self) -> None:
        """Forget the buffers: their memory is free when no process has them open."""
        self.buffers = {}
        self._uses_sockets = False
