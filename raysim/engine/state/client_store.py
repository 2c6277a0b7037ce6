"""Store the clients' state between rounds, in memory up to a limit and on disk beyond it.

A row is the stored state of one client. Only clients that have participated have a row. All rows of
a run have the same names, shapes and dtypes, so a row is a record of fixed size. The rows in memory
form one array `[n, ...]` for each name. When they would need more than `memory` bytes, the row that
was put longest ago moves to a slot of `<dir>/rows.bin`. It returns to memory when its client is put
again. The engine gets a client's row at the start of its round and puts it at the end, so this is
a least-recently-used cache. `get` moves nothing.

    Example: SCAFFOLD, N = 50,000 clients, a net of 6.6 million parameters.
    One row takes 6.6e6 * 4 bytes = 26.4 MB. After every client has participated, the rows take
    50,000 * 26.4 MB = 1.32 TB of disk. The RAM needed is `memory` bytes, the rows of one cohort
    (10 * 26.4 MB = 264 MB, on their way to and from the workers) and 21 bytes for each of the N
    clients. After 1,000 clients have participated, the rows take 26.4 GB.

The file grows slot by slot; no space is reserved ahead. It is read and written, not memory-mapped.
A full disk therefore raises an error (with a mapped file it kills the process), and the pages of
the file do not count as memory of this process.

A checkpoint contains the rows in memory. For each row on disk it contains client, slot and
checksum. A slot that a kept checkpoint refers to is never overwritten: the next version of that row
goes to a free slot. A slot is free when neither the present state nor a kept checkpoint needs it.
The file therefore holds at most one slot for each row on disk and one for each `put` since the
oldest kept checkpoint (in the example, with `checkpoint: {every: 50, keep: 2}` and cohorts of 10:
up to 100 rounds * 10 * 26.4 MB = 26.4 GB).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from raysim.errors import ConfigError, RaysimError
from raysim.system.files import sync_to_disk, why_unwritable
from raysim.training.messages import KeptState

StoredState = dict[str, np.ndarray]
"""A row: the arrays of one client's state, by name."""

Kinds = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
"""Types and shapes of a row's arrays, by name."""

ROWS_FOLDER = "rows"
"""Name of the folder (or link to a folder) in the run directory that holds the rows on disk."""

ROWS_FILE = "rows.bin"
"""Name of the file with the rows on disk."""


class ClientStateStore:
    """Client-side state store that spills to disk.

    The store holds three things for each of N clients: a row, which is the state that the client
    rule keeps (for example c_i of SCAFFOLD); the cursor, which counts the batches that the client
    has drawn, so that its shuffled passes resume at the right batch; and whether the client has
    participated. The arrays of a row may have any shape, including `()` and `(0,)`.

    Args:
        n_clients: the number of all clients; `cursors` is int64 and `seen` bool, one for each.
        memory: limit on the memory of the rows in bytes; one row is always allowed.
        dir: folder for the rows beyond that limit, created when first needed. With None, exceeding
            the limit is an error.
    """

    def __init__(self, n_clients: int, memory: int = 2_000_000_000, dir: Path | None = None):
        self.cursors = np.zeros(n_clients, np.int64)
        self.seen = np.zeros(n_clients, np.bool_)
        self.memory = memory
        self.dir = dir
        # The rows in memory, [capacity, ...] for each name; allocated at the first row.
        self._rows: StoredState = {}
        self._capacity = 0
        self._row_bytes = 0
        # Index into `_rows` by client; the client that was put longest ago comes first.
        self._places: OrderedDict[int, int] = OrderedDict()
        # Slot in the file and CRC-32 by client; slot -1 means that the row is not on disk.
        self._slots = np.full(n_clients, -1, np.int64)
        self._sums = np.zeros(n_clients, np.uint32)
        # By slot: whether a checkpoint needs it.
        self._held = np.zeros(0, np.bool_)
        self._free: list[int] = []
        # Number of slots in the file, used and free.
        self._end = 0
        self._unsynced = False

    def put(self, client: int, row: KeptState | None) -> None:
        """Store the state of a client whose upload was accepted, and mark the client as seen.

        Args:
            client: number of the client.
            row: its new state; with None or {} the stored row stays as it is.

        Raises:
            RaysimError: the row differs from other rows in names, shapes or dtypes, or a row cannot
                be written to disk. The store is then unchanged.
        """
        if row:
            if not self._rows:
                self._prepare(kinds_of(row))
            self._check_same_kind(client, row)
            place = self._place(client)
            for key, rows in self._rows.items():
                rows[place] = row[key]
            self._leave_disk(client)
        self.seen[client] = True

    def get(self, client: int, copy: bool = True) -> KeptState | None:
        """Return the row of a client; None if it has none.

        Args:
            client: number of the client.
            copy: False: arrays that cannot be written to, and that change at the next `put`.

        Raises:
            RaysimError: the row on disk is damaged.
        """
        if client in self._places:
            row = self._in_memory(client)
            if copy:
                return {k: v.copy() for k, v in row.items()}
            for view in row.values():
                view.flags.writeable = False
            return row
        return self._from_disk(client) if self._slots[client] >= 0 else None

    @property
    def bytes(self) -> int:
        """Memory of the rows, in bytes."""
        return len(self._places) * self._row_bytes

    @property
    def disk_bytes(self) -> int:
        """Size of the rows on disk in bytes, without older versions that checkpoints need."""
        return int(np.count_nonzero(self._slots >= 0)) * self._row_bytes

    def checksums(self) -> np.ndarray:
        """Return the CRC-32 of each client's row, int64 [N]; -1 for clients without one."""
        sums = np.where(self._slots >= 0, self._sums.astype(np.int64), -1)
        for client in self._places:
            sums[client] = checksum(self._in_memory(client))
        return sums

    def close(self, checkpoints: Iterable[np.ndarray] = ()) -> None:
        """Remove the file, unless a kept checkpoint needs it.

        Args:
            checkpoints: the slots that each kept checkpoint needs, as from `disk_slots`.
        """
        if self.dir is not None and not any(len(slots) for slots in checkpoints):
            (self.dir / ROWS_FILE).unlink(missing_ok=True)
            # The folder may be absent, a link, or not empty.
            with suppress(OSError):
                self.dir.rmdir()

    # -- checkpoints -----------------------------------------------------------------------------

    def pack(self) -> dict[str, Tensor]:
        """Sync the file to disk, and return the content of the store for a checkpoint.

        Returns:
            Named tensors, which share the memory of the store: write them before the next `put`.

                cursors [N], seen [N]
                ids [n], rows/<key> [n, ...]                    rows in memory
                disk/ids [m], disk/slots [m], disk/sums [m]     slot and CRC-32 of the rows on disk

        Raises:
            RaysimError: the file cannot be synced.
        """
        self._sync()
        n = len(self._places)
        on_disk = np.flatnonzero(self._slots >= 0)
        packed = {
            "cursors": self.cursors,
            "seen": self.seen,
            # By place: `rows/` has the rows in this order.
            "ids": np.array(sorted(self._places, key=self._places.__getitem__), np.int64),
            "disk/ids": on_disk.astype(np.int64),
            "disk/slots": self._slots[on_disk],
            "disk/sums": self._sums[on_disk].astype(np.int64),
            **{f"rows/{k}": rows[:n] for k, rows in self._rows.items()},
        }
        return {k: torch.from_numpy(v) for k, v in packed.items()}

    def hold(self, checkpoints: Iterable[np.ndarray]) -> None:
        """Reserve the slots of the kept checkpoints, and free all other slots without a live row.

        Args:
            checkpoints: the slots that each kept checkpoint needs.
        """
        live = self._slots[self._slots >= 0]
        size = self._file_bytes() // max(self._row_bytes, 1)
        held = np.unique(np.concatenate([np.zeros(0, np.int64), *checkpoints]))
        held = held[(held >= 0) & (held < size)]
        self._end = 1 + int(max(live.max(initial=-1), held.max(initial=-1)))
        self._held = np.zeros(self._end, np.bool_)
        self._held[held] = True
        free = ~self._held
        free[live] = False
        self._free = np.flatnonzero(free)[::-1].tolist()

    def unpack(self, packed: Mapping[str, Tensor], checkpoints: Iterable[np.ndarray]) -> None:
        """Restore the content that `pack` returned.

        Args:
            packed: the named tensors from `pack`.
            checkpoints: the slots that each kept checkpoint needs, this checkpoint included.
        """
        self.cursors[:] = packed["cursors"].numpy()
        self.seen[:] = packed["seen"].numpy()
        rows = _unpacked_rows(packed)
        self._places.clear()
        self._prepare({k: (v.dtype, v.shape[1:]) for k, v in rows.items()})
        self._slots[:] = -1
        on_disk = packed["disk/ids"].numpy()
        self._slots[on_disk] = packed["disk/slots"].numpy()
        self._sums[on_disk] = packed["disk/sums"].numpy()
        # Before rows are put, because these may move others into free slots.
        self.hold(checkpoints)
        for i, client in enumerate(packed["ids"].tolist()):
            self.put(client, {k: v[i, ...] for k, v in rows.items()})

    # -- in memory -------------------------------------------------------------------------------

    def _prepare(self, kinds: Kinds) -> None:
        """Allocate arrays for as many rows as the limit allows.

        The operating system provides the memory when it is first written.
        """
        # Sorted by name: a record in the file has its arrays in this order.
        kinds = dict(sorted(kinds.items()))
        self._row_bytes = sum(
            dtype.itemsize * int(np.prod(shape)) for dtype, shape in kinds.values()
        )
        fit = self.memory // self._row_bytes if self._row_bytes else len(self.seen)
        self._capacity = min(len(self.seen), max(1, fit))
        self._rows = {
            k: np.empty((self._capacity, *shape), dtype) for k, (dtype, shape) in kinds.items()
        }

    def _check_same_kind(self, client: int, row: KeptState) -> None:
        """Raise RaysimError if a row differs from other rows in names, shapes or dtypes."""
        kinds = dict(sorted(kinds_of(row).items()))
        expected = {k: (v.dtype, v.shape[1:]) for k, v in self._rows.items()}
        if kinds != expected:
            raise RaysimError(
                f"client {client} keeps {_described(kinds)}, other clients keep "
                f"{_described(expected)}; all clients must keep arrays of the same names, shapes "
                "and dtypes: let finish() of the client rule return arrays like those of state()"
            )

    def _place(self, client: int) -> int:
        """Return the index in memory for the row of a client, after moving another row to disk."""
        if client in self._places:
            self._places.move_to_end(client)
        elif len(self._places) < self._capacity:
            self._places[client] = len(self._places)
        else:
            oldest = next(iter(self._places))
            self._to_disk(oldest, self._in_memory(oldest))
            self._places[client] = self._places.pop(oldest)
        return self._places[client]

    def _in_memory(self, client: int) -> StoredState:
        """Return views of the row of a client in memory."""
        place = self._places[client]
        return {k: rows[place, ...] for k, rows in self._rows.items()}

    # -- on disk ---------------------------------------------------------------------------------

    def _to_disk(self, client: int, row: StoredState) -> None:
        """Write a row to a free slot. After a failure nothing refers to that slot."""
        if self.dir is None:
            raise RaysimError(
                "the clients' state needs more than client_state.memory "
                f"({self.memory / 1e6:.0f} MB) and there is no folder for the rest; set run_dir, "
                "or raise client_state.memory"
            )
        slot = self._free[-1] if self._free else self._end
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            with open(os.open(self.dir / ROWS_FILE, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
                file.seek(slot * self._row_bytes)
                for array in row.values():
                    file.write(array.data)
        except OSError as error:
            raise self._unwritable(
                f"the row of client {client} ({self._row_bytes / 1e6:.1f} MB)", error
            ) from None
        if self._free:
            self._free.pop()
        else:
            self._end += 1
        self._slots[client] = slot
        self._sums[client] = checksum(row)
        self._unsynced = True

    def _from_disk(self, client: int) -> StoredState:
        """Read the row of a client from disk, and check its CRC-32."""
        assert self.dir is not None
        slot = int(self._slots[client])
        n_bytes_read = 0
        row = {k: np.empty(v.shape[1:], v.dtype) for k, v in self._rows.items()}
        try:
            with open(self.dir / ROWS_FILE, "rb") as file:
                file.seek(slot * self._row_bytes)
                for array in row.values():
                    n_bytes_read += file.readinto(array.data)
            if n_bytes_read < self._row_bytes:
                raise OSError(f"it ends after {n_bytes_read} of {self._row_bytes} bytes")
            if checksum(row) != self._sums[client]:
                raise OSError("wrong checksum")
        except OSError as error:
            raise RaysimError(
                f"the row of client {client} in {self.dir / ROWS_FILE} "
                f"(at byte {slot * self._row_bytes}) is damaged: {error}; remove the newest "
                "checkpoints and continue with `raysim resume`, or start a new run"
            ) from None
        return row

    def _leave_disk(self, client: int) -> None:
        """Free the slot of a client whose newest row is in memory, unless a checkpoint needs it."""
        slot = int(self._slots[client])
        self._slots[client] = -1
        if slot >= 0 and not (slot < len(self._held) and self._held[slot]):
            self._free.append(slot)

    def _sync(self) -> None:
        """Sync the file and its folder to disk, if rows were written since the last sync."""
        if self.dir is None or not self._unsynced:
            return
        try:
            for path in (self.dir / ROWS_FILE, self.dir):
                sync_to_disk(path)
        except OSError as error:
            raise self._unwritable("the clients' state", error) from None
        self._unsynced = False

    def _file_bytes(self) -> int:
        """Return the size of the file in bytes; 0 if there is none."""
        try:
            return (self.dir / ROWS_FILE).stat().st_size if self.dir is not None else 0
        except FileNotFoundError:
            return 0

    def _unwritable(self, subject: str, error: OSError) -> RaysimError:
        """Return the error for a failed write of `subject`, with the free space on the disk."""
        assert self.dir is not None
        fix = (
            "free some space or raise client_state.memory, and continue from the last checkpoint "
            "with `raysim resume`; a new run can use a larger disk (client_state.dir)"
        )
        why = why_unwritable(self.dir.parent, error, fix)  # this one is made at the first write
        return RaysimError(f"{subject} cannot be written to {self.dir}: {why}")


def checksum(row: StoredState) -> int:
    """Return the CRC-32 of a row.

    Args:
        row: its arrays, sorted by name.
    """
    found = 0
    for array in row.values():
        found = zlib.crc32(array.data, found)
    return found


def kinds_of(row: KeptState) -> Kinds:
    """Return types and shapes of a row's arrays or tensors by name.

    Args:
        row: the state of a client.
    """
    return {k: (np.dtype(str(v.dtype).removeprefix("torch.")), (*v.shape,)) for k, v in row.items()}


def _described(kinds: Kinds) -> str:
    """Return types and shapes of a row's arrays by name, for messages."""
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (dtype, shape) in kinds.items())


def copy_rows(old: Path, new: Path, dir: str | None) -> None:
    """Copy the rows on disk of a run to a new run that has not started yet.

    Args:
        old: the folder of the run to copy from.
        new: the folder of the new run.
        dir: `client_state.dir` of the new run; None: the rows are in its folder.

    Raises:
        RaysimError: the rows cannot be copied, for example because the disk is full.
        ConfigError: `dir` cannot be used.
    """
    source = old / ROWS_FOLDER / ROWS_FILE
    target = rows_folder(new, dir)
    if not source.exists() or target is None:
        return
    try:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / ROWS_FILE)
    except OSError as error:
        raise RaysimError(
            f"the rows in {source} cannot be copied to {target}: {error.strerror or error}"
        ) from None


def rows_folder(run_dir: Path | None, dir: str | None) -> Path | None:
    """Return the folder for the rows of a run, `<run_dir>/rows`.

    With `dir`, this path becomes a link to a new folder inside `dir`. Several runs can therefore
    share `dir`, and a run that is moved or resumed still finds its rows.

    Args:
        run_dir: the folder of the run; None if it has none.
        dir: `client_state.dir` of the configuration; None: the rows are in `run_dir`.

    Returns:
        The folder; None without a `run_dir`.

    Raises:
        ConfigError: `dir` is not writable, or the run already has rows in another folder.
    """
    if run_dir is None or dir is None:
        return run_dir and run_dir / ROWS_FOLDER
    rows = run_dir / ROWS_FOLDER
    home = Path(dir).expanduser()
    if (rows / ROWS_FILE).exists():
        if rows.resolve().parent != home.resolve():
            raise ConfigError(
                f"client_state.dir: the rows of this run are in {rows.resolve()}, not in {home}; "
                f"move that folder to {home} and make {rows} a link to it, or leave "
                "client_state.dir unchanged"
            )
        return rows
    try:
        home.mkdir(parents=True, exist_ok=True)
        if rows.is_symlink():
            rows.unlink()
        elif rows.exists():
            rows.rmdir()
        rows.symlink_to(Path(tempfile.mkdtemp(prefix=f"{run_dir.name}-", dir=home)).absolute())
    except OSError as error:
        raise ConfigError(
            f"client_state.dir: {home} cannot be used: {error}; set it to a writable folder"
        ) from None
    return rows


def check_rows(packed: Mapping[str, Tensor], dir: Path) -> None:
    """Check that the file in `dir` is large enough for the rows on disk of a checkpoint.

    The content of a row is checked when it is read.

    Args:
        packed: the named tensors from `ClientStateStore.pack`.
        dir: the folder with the rows.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is too short.
    """
    slots = packed["disk/slots"]
    if len(slots):
        row_bytes = sum(
            v.dtype.itemsize * int(np.prod(v.shape[1:])) for v in _unpacked_rows(packed).values()
        )
        with (dir / ROWS_FILE).open("rb") as file:  # which refuses a folder
            size = os.fstat(file.fileno()).st_size
        needed = (int(slots.max()) + 1) * row_bytes
        if size < needed:
            raise ValueError(f"{dir / ROWS_FILE} has {size} bytes, but needs {needed}")


def _unpacked_rows(packed: Mapping[str, Tensor]) -> StoredState:
    """Return the rows in memory from the named tensors of a checkpoint, [n, ...] for each name."""
    return {k.removeprefix("rows/"): v.numpy() for k, v in packed.items() if k.startswith("rows/")}
