"""The store of client states of an inline run on a GPU, where they stay if all of them fit.

Otherwise a client's state goes from the GPU to the host, and back in the client's next round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from raysim.engine.state.client_store import (
    ClientStateStore,
    StoredState,
    checksum,
    kinds_of,
)
from raysim.training.messages import KeptState


class GpuStateStore(ClientStateStore):
    """Client-side state store whose newest rows may be tensors on a GPU.

    They are a write-back cache of the rows that the store has in the host's memory and on disk: a
    checkpoint writes them there. Rows from a checkpoint return to the GPU with their clients' next
    round. `GroupTrainer.states_stay` decides whether there is room. Arguments: see
    `ClientStateStore`.
    """

    def __init__(self, *args: Any, **keys: Any):
        super().__init__(*args, **keys)
        self._on_gpu: dict[int, KeptState] = {}
        # Clients whose newest row is only on the GPU.
        self._unwritten: set[int] = set()

    def put(self, client: int, row: KeptState | None) -> None:
        """Store the state of a client. See `ClientStateStore.put`.

        Args:
            client: number of the client.
            row: its new state. Tensors stay where they are; nobody may change them afterwards.
        """
        if not row or not any(isinstance(value, Tensor) for value in row.values()):
            super().put(client, row)
            if row:
                self._on_gpu.pop(client, None)
                self._unwritten.discard(client)
            return
        if not self._rows:
            self._prepare(kinds_of(row))
        self._check_same_kind(client, row)
        self._on_gpu[client] = row
        self._unwritten.add(client)
        self.seen[client] = True

    def get(self, client: int, copy: bool = True) -> KeptState | None:
        """Return the row of a client. See `ClientStateStore.get`.

        Rows of the host are copied: those of the next round's clients are asked for before a
        checkpoint changes them.
        """
        return self._on_gpu.get(client) or super().get(client)

    def unpack(self, packed: Mapping[str, Tensor], checkpoints: Iterable[np.ndarray]) -> None:
        """Restore the content that `pack` returned. See `ClientStateStore.unpack`."""
        self._on_gpu.clear()
        self._unwritten.clear()
        super().unpack(packed, checkpoints)

    @property
    def bytes(self) -> int:
        """Memory of the rows, on the host or on the GPU, in bytes."""
        return len(self._places.keys() | self._on_gpu.keys()) * self._row_bytes

    def pack(self) -> dict[str, Tensor]:
        """Write the new rows back, and return the content. See `ClientStateStore.pack`."""
        for client in sorted(self._unwritten):
            super().put(client, self._on_host(client))
            self._unwritten.remove(client)
        return super().pack()

    def checksums(self) -> np.ndarray:
        """Return the CRC-32 of each client's row. See `ClientStateStore.checksums`."""
        sums = super().checksums()
        for client in self._unwritten:
            sums[client] = checksum(dict(sorted(self._on_host(client).items())))
        return sums

    def _on_host(self, client: int) -> StoredState:
        """Return a copy of a row that is on the GPU."""
        row = self._on_gpu[client].items()
        arrays = {k: v.cpu().numpy() if isinstance(v, Tensor) else v for k, v in row}
        return {k: np.asarray(array, order="C") for k, array in arrays.items()}
