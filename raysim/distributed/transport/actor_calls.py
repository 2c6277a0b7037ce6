"""Calls of the actors of a run: through Ray, or over a socket if driver and actor share a machine.

A call through Ray costs about a millisecond between the end of a computation and the start of the
next one, and a round has four such steps one after the other: worker, driver, server, driver,
worker. Over a Unix socket a step costs a fifth of that. Ray still starts, places and watches the
actors; one long call of Ray, `serve`, answers the socket, and its error tells why an actor died.

Results stay serialized in the driver until somebody reads them, so it passes on what one actor
sends to another without reading it.

CPU time of a round of all processes with two actors, and its wall time: calls through Ray over
calls over sockets, median of 5 pairs of turns (smallest, largest):

    one step on one example, P = 199,210       1.92 (1.41, 2.00)    1.64 (1.60, 1.87), saves 3 ms
    FedAvg, MLP 784-200-200-10, 5 steps of 64  1.14 (1.09, 1.19)    1.02 (0.98, 1.25)
    GradMA, 784-200-100-10, the same           1.02 (1.01, 1.03)    1.01 (0.99, 1.02)
    FedAvg, LeNet-5, the same                  1.00 (0.97, 1.01)    1.00 (0.98, 1.01)

So it is worth having for short rounds only.

    python benchmarks/earns_its_place.py sockets
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import time
import traceback
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from raysim.distributed.transport.socket_messages import (
    IncomingMessage,
    Parts,
    message_of,
    read_value,
    send_some,
    serialized,
)
from raysim.errors import RaysimError

DEATH_NOTICE_S = 5.0
"""Time that Ray has to tell why an actor died whose socket is closed, in seconds."""


class _Call:
    """A call over a socket, and its answer when it has arrived.

    Args:
        link: the socket.
        method: name of the method.
        arguments: its arguments.
    """

    def __init__(self, link: _Link, method: str, arguments: Sequence[Any]):
        self.link = link
        self.method = method
        self.results: list[Parts] = []
        """The serialized results."""
        self.error: RayError | None = None
        """The error that the method raised, or why the actor died."""
        self.done = False
        """Whether the answer has arrived."""
        self.dependents: list[_Link] = []
        """Sockets with calls that need these results."""
        self.needed: list[Reply] = []
        """The arguments that are results of other calls, until it is sent."""
        places = []
        known = list(arguments)
        for i, argument in enumerate(arguments):
            if isinstance(argument, Reply):
                self.needed.append(argument)
                places.append(i)
                known[i] = None
        # Serialized now, while the needed results are computed.
        self._head = serialized((method, known, places))

    @property
    def can_be_sent(self) -> bool:
        """Whether all results that it needs have arrived."""
        return all(reply.call.done for reply in self.needed)

    def message(self) -> Parts:
        """Return the message to the actor, in parts, and forget what is only needed for it.

        Otherwise each call would keep the calls before it, back to the first round.

        Raises:
            RayError: a call whose result it needs has failed.
        """
        needed, self.needed = self.needed, []
        head, self._head = self._head, []
        return message_of([head, *[reply.data() for reply in needed]])

    def end(self, results: list[Parts], error: RayError | None) -> None:
        """Take in the answer; calls that need it can be sent."""
        self.results, self.error, self.done = results, error, True
        dependents, self.dependents = self.dependents, []
        for link in dependents:
            link.flush()


@dataclass(frozen=True, eq=False)
class Reply:
    """Future result of a call over a socket, as an `ObjectRef` is of one through Ray."""

    call: _Call
    """The call."""
    number: int
    """Position among the results of the call."""

    def data(self) -> Parts:
        """Return the serialized result.

        Raises:
            RayError: the method raised an error, or the actor died.
        """
        if self.call.error is not None:
            raise self.call.error
        return self.call.results[self.number]


Reference = ObjectRef[Any] | Reply
"""Reference to the future result of an actor."""


class Actor:
    """An actor of the run, as the driver calls it.

    Args:
        handle: Ray's handle.
        kind: its class.
    """

    def __init__(self, handle: ActorHandle, kind: type):
        self.handle = handle
        self._kind = kind
        self._link: _Link | None = None

    def call(self, method: str, *arguments: Any) -> list[Reference]:
        """Call a method and return references to its results, without waiting.

        An actor runs its calls in order. It gets the values of arguments that are references: over
        a socket as soon as somebody waits for them, or for the result of this call.

        Args:
            method: name of the method.
            *arguments: its arguments.
        """
        if self._link is None:
            returned = getattr(self.handle, method).remote(*arguments)
            return returned if isinstance(returned, list) else [returned]
        call = self._link.send(method, arguments)
        n_results = getattr(getattr(self._kind, method), "__ray_num_returns__", 1)
        return [Reply(call, i) for i in range(n_results)]

    def connect(self, timeout: float) -> None:
        """Send the calls from now on over a socket.

        Args:
            timeout: time that the actor has to connect, in seconds.

        Raises:
            RayError: the actor died, or does not connect in time.
        """
        # An abstract name, so that a crash leaves no file behind.
        address = f"\0raysim-{uuid.uuid4().hex}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            serving = self.handle.serve.remote(address)
            self._link = _Link(_accepted(listener, serving, timeout), serving)

    def close(self) -> None:
        """Close the socket, if there is one; the actor then answers calls through Ray again."""
        if self._link is not None:
            self._link.close()
            self._link = None


def _accepted(listener: socket.socket, serving: ObjectRef[Any], timeout: float) -> socket.socket:
    """Return the connection of the actor that runs `serving`."""
    deadline = time.monotonic() + timeout
    listener.settimeout(0.2)
    while True:
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            if _is_of_this_user(connection):
                return connection
            connection.close()
        if ray.wait([serving], timeout=0)[0]:
            ray.get(serving)
            raise ActorDiedError()
        if time.monotonic() > deadline:
            raise GetTimeoutError(f"an actor has not connected for {timeout:g} s")


def _is_of_this_user(connection: socket.socket) -> bool:
    """Return whether a process of this user is at the other end: what it sends is unpickled."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("<3i", credentials)
    return user == os.getuid()


class _Link:
    """The driver's end of a socket. Nothing here waits, but `wait`.

    Args:
        connection: the socket.
        serving: reference to the call of `serve`, which ends when the actor dies.
    """

    def __init__(self, connection: socket.socket, serving: ObjectRef[Any]):
        connection.setblocking(False)
        self.socket = connection
        self._serving = serving
        self._unsent: deque[_Call] = deque()
        """Calls that wait for results that they need, in order."""
        self._outgoing: deque[memoryview] = deque()
        """What waits until the actor reads."""
        self._sent: deque[_Call] = deque()
        """Calls without an answer, in order."""
        self._incoming = IncomingMessage(connection)
        self._is_open = True

    @property
    def awaited(self) -> list[_Link]:
        """The sockets over which results come that unsent calls need."""
        needed = [reply.call for call in self._unsent for reply in call.needed]
        return [call.link for call in needed if not call.done]

    @property
    def has_more_to_send(self) -> bool:
        """Whether a part of a message waits until the actor reads."""
        return bool(self._outgoing)

    def send(self, method: str, arguments: Sequence[Any]) -> _Call:
        """Send a call as soon as what it needs has arrived; the actor gets its calls in order."""
        call = _Call(self, method, arguments)
        for reply in call.needed:
            if not reply.call.done:
                reply.call.dependents.append(self)
        self._unsent.append(call)
        if self._is_open:
            self.flush()
        else:
            self._fail()
        return call

    def flush(self) -> None:
        """Send what can be sent now."""
        try:
            while self._unsent and self._unsent[0].can_be_sent:
                self._pass_on(self._unsent.popleft())
            while self._outgoing and self._is_open:
                send_some(self.socket, self._outgoing)
        except BlockingIOError:
            pass
        except OSError:
            self._fail()
        except BaseException:  # a signal: how much has been sent is not known
            self.close()
            raise

    def _pass_on(self, call: _Call) -> None:
        """Add a call to what is outgoing; it fails if a call has failed whose result it needs."""
        try:
            message = call.message()
        except RayError as error:
            # As Ray reports a lost argument, not as the death of this actor.
            if not isinstance(error, RayTaskError):
                error = RayTaskError(call.method, str(error), error)
            call.end([], error)
            return
        self._sent.append(call)
        self._outgoing.extend(message)

    def receive(self) -> None:
        """Take in what has arrived."""
        try:
            while self._is_open:
                if (answer := self._incoming.receive()) is not None:
                    failed, *results = answer
                    error = read_value(failed)
                    self._sent.popleft().end(results, error)
        except BlockingIOError:
            pass
        except OSError:
            self._fail()
        except BaseException:  # a signal: what has been read may be lost
            self.close()
            raise

    def close(self, error: RayError | None = None) -> None:
        """Close the socket; calls without an answer fail with `error`."""
        self._shut()
        calls = [*self._sent, *self._unsent]
        self._sent.clear()
        self._unsent.clear()
        for call in calls:
            call.end([], error or ActorDiedError())

    def _fail(self) -> None:
        """Close the socket, and let calls fail with the reason for which the actor died."""
        self._shut()
        error = None
        try:
            ray.get(self._serving, timeout=DEATH_NOTICE_S)
        except GetTimeoutError:
            pass
        except RayError as why:
            error = why
        self.close(error)

    def _shut(self) -> None:
        """Close the socket; an actor that is alive then stops to serve it."""
        self._is_open = False
        self.socket.close()
        self._outgoing.clear()


def wait(
    references: Sequence[Reference], num_returns: int = 1, timeout: float | None = None
) -> tuple[list[Any], list[Any]]:
    """Wait for results, like `ray.wait`: return the references that are ready, and the others.

    Args:
        references: the results to wait for, all of calls through Ray or all over sockets.
        num_returns: how many of them must be ready; more may be returned.
        timeout: longest time to wait, in seconds; None: no limit.
    """
    replies = [reference for reference in references if isinstance(reference, Reply)]
    if not replies:
        return ray.wait(list(references), num_returns=num_returns, timeout=timeout)
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        late = [reply for reply in replies if not reply.call.done]
        if len(replies) - len(late) >= num_returns:
            break
        if not _await_links([reply.call.link for reply in late], deadline):
            break
    return [reply for reply in replies if reply.call.done], late


def _await_links(links: list[_Link], deadline: float) -> bool:
    """Wait until something arrives or can be sent; return whether it did before the deadline.

    Calls that have not been sent wait for results over other sockets.
    """
    poll = select.poll()
    by_number = {}
    remaining = list(links)
    while remaining:
        link = remaining.pop()
        if link.socket.fileno() in by_number:
            continue
        remaining += link.awaited
        by_number[link.socket.fileno()] = link
        poll.register(link.socket, select.POLLIN)
        if link.has_more_to_send:
            poll.modify(link.socket, select.POLLIN | select.POLLOUT)
    remaining_ms = None
    if deadline < math.inf:
        remaining_ms = max(deadline - time.monotonic(), 0.0) * 1000
    ready = poll.poll(remaining_ms)
    for number, events in ready:
        if events & select.POLLOUT:
            by_number[number].flush()
        if events & ~select.POLLOUT:
            by_number[number].receive()
    return bool(ready)


def get(reference: Reference, timeout: float | None = None) -> Any:
    """Return a result, like `ray.get`.

    Args:
        reference: the result.
        timeout: longest time to wait for it, in seconds; None: no limit.

    Raises:
        RayError: the method raised an error, the actor died, or the limit has passed.
    """
    if not isinstance(reference, Reply):
        return ray.get(reference, timeout=timeout)
    if not wait([reference], timeout=timeout)[0]:
        raise GetTimeoutError(f"no answer of `{reference.call.method}` for {timeout:g} s")
    return read_value(reference.data())


def serve(actor: Any, address: str) -> None:
    """Answer the driver's calls over a socket until the driver closes it, in an actor.

    Args:
        actor: the actor.
        address: the driver's end, see `Actor.connect`.
    """
    with socket.socket(socket.AF_UNIX) as connection, suppress(ConnectionError):
        connection.connect(address)
        if not _is_of_this_user(connection):
            raise PermissionError("another user listens at the driver's socket")
        incoming = IncomingMessage(connection)
        while True:
            if (call := incoming.receive()) is not None:
                outgoing = deque(message_of(_answer(actor, *call)))
                while outgoing:
                    send_some(connection, outgoing)


def _answer(actor: Any, head: Parts, *needed: Parts) -> list[Parts]:
    """Run a call; return its serialized error, or None, and its serialized results."""
    method, arguments, places = read_value(head)
    for place, parts in zip(places, needed, strict=True):
        arguments[place] = read_value(parts)
    try:
        bound = getattr(actor, method)
        result = bound(*arguments)
        results = result if hasattr(bound, "__ray_num_returns__") else (result,)
        return [serialized(value) for value in (None, *results)]
    except Exception as error:
        text = traceback.format_exc()
        parts = serialized(RayTaskError(method, text, error))
        try:
            read_value(parts)
        except Exception:  # an exception whose arguments are not those of its `__init__`
            parts = serialized(RayTaskError(method, text, RaysimError(text)))
        return [parts]
