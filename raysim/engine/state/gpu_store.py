"""The store of client states of an inline run on a GPU: rows stay there while they fit.

Otherwise a client's state would go from the GPU to the host, and back in the client's next round.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from raysim.engine.state.client_store import ClientStateStore, kinds_of
from raysim.training.messages import KeptState


class GpuStateStore(ClientStateStore):
    """Client-side state store whose newest rows are on the GPU.

    It is a write-back cache of the rows that the store has in the host's memory and on disk. A row
    is written there for a checkpoint, or when newer rows need its place. Rows that come from a
    checkpoint return to the GPU with their clients' next round.

    Args:
        n_clients: the number of all clients.
        memory: limit on the memory of the rows in bytes, on the host and on the GPU; there they
            take at most half of what was free before the first row came.
        dir: folder for the rows beyond the host's limit; see `ClientStateStore`.
    """

    def __init__(self, n_clients: int, memory: int = 2_000_000_000, dir: Path | None = None):
        super().__init__(n_clients, memory, dir)
        # By client; the one that was put longest ago comes first.
        self._on_gpu: OrderedDict[int, KeptState] = OrderedDict()
        # Clients whose newest row is only on the GPU.
        self._unwritten: set[int] = set()

    def put(self, client: int, row: KeptState | None) -> None:
        """Store the state of a client. See `ClientStateStore.put`.

        Args:
            client: number of the client.
            row: its new state, tensors that nobody changes afterwards.
        """
        if not row:
            super().put(client, row)
            return
        if not self._rows:
            self._prepare(kinds_of(row))
        self._check_same_kind(client, row)
        if client not in self._on_gpu and len(self._on_gpu) >= self._n_fit:
            if not self._on_gpu:
                super().put(client, _on_host(row))
                return
            oldest = next(iter(self._on_gpu))
            self._write_back(oldest)
            del self._on_gpu[oldest]
        self._on_gpu[client] = row
        self._on_gpu.move_to_end(client)
        self._unwritten.add(client)
        self.seen[client] = True

    def get(self, client: int, copy: bool = True) -> KeptState | None:
        """Return the row of a client. See `ClientStateStore.get`."""
        return self._on_gpu.get(client) or super().get(client, copy)

    @property
    def bytes(self) -> int:
        """Memory of the rows on the host and on the GPU, in bytes."""
        return super().bytes + len(self._on_gpu) * self._row_bytes

    def pack(self) -> dict[str, Tensor]:
        """Write the new rows back, and return the content. See `ClientStateStore.pack`."""
        for client in self._on_gpu:
            self._write_back(client)
        return super().pack()

    def unpack(self, packed: Mapping[str, Tensor], checkpoints: Iterable[np.ndarray]) -> None:
        """Restore the content that `pack` returned. See `ClientStateStore.unpack`."""
        self._on_gpu.clear()
        self._unwritten.clear()
        super().unpack(packed, checkpoints)

    @cached_property
    def _n_fit(self) -> int:
        """Number of rows that may be on the GPU."""
        free, _ = torch.cuda.mem_get_info()
        return min(self.memory, free // 2) // max(self._row_bytes, 1)

    def _write_back(self, client: int) -> None:
        """Copy a row to the host, if its newest version is not there yet."""
        if client in self._unwritten:
            super().put(client, _on_host(self._on_gpu[client]))
            self._unwritten.remove(client)


def _on_host(row: KeptState) -> KeptState:
    """Return a row as arrays."""
    return {k: v.cpu().numpy() if isinstance(v, Tensor) else v for k, v in row.items()}
