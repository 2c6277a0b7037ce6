"""Messages of values over a socket, whose arrays are not copied.

A message has two sizes, an index with the sizes of all parts, and the parts: for each value its
pickle and the memory of its arrays.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections import deque
from itertools import chain, islice
from typing import Any, cast

import ray
import torch

from raysim.distributed.transport.shared_memory import ALIGNMENT_BYTES

_SIZES = struct.Struct("<QQ")
"""Header of a message: the size of its index and the size of the whole message, in bytes."""

MAX_PARTS_SENT_AT_ONCE = 512
"""Largest number of parts of messages that one call of the operating system sends."""

Parts = list[Any]
"""A serialized value: bytes, and the memory of its arrays."""


def serialized(value: Any) -> Parts:
    """Serialize a value, without copying its arrays.

    Args:
        value: anything that cloudpickle serializes.
    """
    buffers: list[pickle.PickleBuffer] = []
    # Also users' classes of a script, which plain pickle would look for in the other process.
    data = cast(Any, ray).cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return [data, *[buffer.raw() for buffer in buffers]]


def read_value(parts: Parts) -> Any:
    """Return the value that `serialized` serialized; its arrays share the memory of `parts`.

    Args:
        parts: the serialized value.
    """
    return pickle.loads(parts[0], buffers=parts[1:])


def message_of(values: list[Parts]) -> Parts:
    """Return the message with serialized values, in parts.

    Args:
        values: the values, as `serialized` returns them.
    """
    index = pickle.dumps([[len(part) for part in value] for value in values])
    size = len(index)
    body = [index]
    for part in chain.from_iterable(values):
        padding = bytes(-size % ALIGNMENT_BYTES)
        body += [padding, part]
        size += len(padding) + len(part)
    return [memoryview(part) for part in (_SIZES.pack(len(index), size), *body) if part]


def send_some(connection: socket.socket, outgoing: deque[memoryview]) -> None:
    """Send a part of what is outgoing, and remove it.

    Args:
        connection: the socket.
        outgoing: the parts of messages that are left to send, in order.

    Raises:
        BlockingIOError: nothing can be sent now; only if the socket does not block.
        OSError: the other end is closed.
    """
    sent = connection.sendmsg(list(islice(outgoing, MAX_PARTS_SENT_AT_ONCE)))
    while outgoing and sent >= len(outgoing[0]):
        sent -= len(outgoing.popleft())
    if sent:
        outgoing[0] = outgoing[0][sent:]


class IncomingMessage:
    """Message that is arriving.

    Args:
        connection: the socket.
    """

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._sizes = memoryview(bytearray(_SIZES.size))
        self._body: memoryview | None = None
        self._filled = 0

    def receive(self) -> list[Parts] | None:
        """Receive once; return the serialized values of the message if it is whole now.

        Raises:
            BlockingIOError: nothing has arrived; only if the socket does not block.
            ConnectionError: the other end is closed.
        """
        target = self._sizes if self._body is None else self._body
        received = self._socket.recv_into(target[self._filled :])
        if not received:
            raise ConnectionResetError("the other end of the socket is closed")
        self._filled += received
        if self._filled < len(target):
            return None
        self._filled = 0
        if self._body is None:
            # New memory for each message: its arrays may be used for long. torch aligns it.
            size = _SIZES.unpack(self._sizes)[1]
            self._body = memoryview(cast(Any, torch.empty(size, dtype=torch.uint8).numpy()))
            return None
        self._body = None
        return _values_in(target, _SIZES.unpack(self._sizes)[0])


def _values_in(body: memoryview, index_size: int) -> list[Parts]:
    """Return the serialized values of a message: views of its parts after the index."""
    values = []
    end = index_size
    for sizes in pickle.loads(body[:index_size]):
        parts = []
        for size in sizes:
            end += -end % ALIGNMENT_BYTES
            parts.append(body[end : end + size])
            end += size
        values.append(parts)
    return values
