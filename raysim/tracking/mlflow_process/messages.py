"""Messages between a run and the process that calls MLflow: JSON behind its length."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

LENGTH_BYTES = 8
"""Bytes of a message's length, in front of it."""


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message.

    Args:
        connection: a connected socket.
        message: content for JSON.

    Raises:
        OSError: the other process has ended.
    """
    text = json.dumps(message).encode()
    connection.sendall(len(text).to_bytes(LENGTH_BYTES, "big") + text)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Wait for a message and return it.

    Args:
        connection: a connected socket.

    Raises:
        OSError: the other process has closed the connection, or has ended.
    """
    length = int.from_bytes(_read(connection, LENGTH_BYTES), "big")
    return json.loads(_read(connection, length))


def _read(connection: socket.socket, count: int) -> bytes:
    """Return exactly `count` bytes."""
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise ConnectionResetError("the connection was closed")
        parts += part
    return bytes(parts)
