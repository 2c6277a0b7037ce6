"""What clients keep between rounds: sparse, keyed by client id. Only clients that took part take memory."""

from __future__ import annotations

import numpy as np

Row = dict[str, np.ndarray]


class Store:
    """Rows, batch cursors and who has been seen, for N clients.

    A row is a client rule's own state (say SCAFFOLD's c_i): named arrays. The cursor counts the batches a client has
    drawn, so that its shuffled passes go on where they stopped.
    """

    def __init__(self, n_clients: int):
        self.cursors = np.zeros(n_clients, np.int64)
        self.seen = np.zeros(n_clients, np.bool_)
        self.rows: dict[int, Row] = {}

    def put(self, client: int, row: Row | None) -> None:
        """After a client's upload was accepted."""
        self.seen[client] = True
        if row is not None:
            self.rows[client] = row

    @property
    def bytes(self) -> int:
        """Memory that the rows take."""
        return sum(array.nbytes for row in self.rows.values() for array in row.values())
