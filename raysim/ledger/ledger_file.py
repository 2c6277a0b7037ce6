"""A ledger: an append-only text file with one row for each finished run.

It can be committed beside the configurations. Sweeps count its rows as done, wherever they were
computed, and reports read them in place of MLflow. A row that a crash has cut off is named and left
out; the next row begins on a line of its own.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from filelock import lock_descriptor

from raysim.errors import ConfigError
from raysim.ledger.ledger_row import BadRow, Row, as_line, from_line
from raysim.system import files

FIRST_BYTES = b'{"ledger"'
"""How each row begins."""

Say = Callable[[str], None]
"""Called with one line for each row that is left out or in doubt."""


def read_rows(paths: Iterable[str | Path], say: Say, missing: str = "") -> list[Row]:
    """Return the rows of ledgers, those of the first file first.

    Args:
        paths: The ledgers.
        say: Called with one line for each bad row, and for each row that contradicts another.
        missing: Option to name in the error for a file that does not exist; "" if a missing file
            is an empty ledger.

    Raises:
        ConfigError: A file does not exist, is not a ledger, or cannot be read.
    """
    rows: list[Row] = []
    for path in map(Path, paths):
        for number, line in enumerate(_content(path, missing).split(b"\n"), 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                rows.append(from_line(line.decode(), place))
            except BadRow as error:
                say(f"{place}: row left out: {error}")
            except UnicodeDecodeError:
                say(f"{place}: row left out: it is not UTF-8 text")
    _name_contradictions(rows, say)
    return rows


def _content(path: Path, missing: str) -> bytes:
    """Return the bytes of a ledger, for a file that may be missing b""."""
    try:
        text = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not missing:
            return b""
        raise ConfigError(
            f"{missing or 'ledger'}: {path}: {error.strerror or error}; give the file that raysim "
            "sweep --ledger wrote"
        ) from None
    if FIRST_BYTES not in text and not FIRST_BYTES.startswith(text.strip()):
        raise ConfigError(
            f"{missing or 'ledger (--ledger)'}: {path} is not a ledger: it has no row; name a "
            "file that raysim sweep --ledger wrote, or a new one"
        )
    return text


def _name_contradictions(rows: Sequence[Row], say: Say) -> None:
    """Name rows of one identity and one kind of CPU whose digests differ."""
    first: dict[tuple, Row] = {}
    for row in rows:
        other = first.setdefault((row.fingerprint, row.rounds, row.cpu), row)
        both_have = other.state_digest and row.state_digest  # older rows have none
        differ = both_have and other.state_digest != row.state_digest
        if differ or other.digest != row.digest:
            say(
                f"{other.place} and {row.place} have different digests for the same run on "
                f"{row.cpu} ({row.title}); {_possible_cause(other, row)}. The first one counts"
            )


def _possible_cause(row: Row, other: Row) -> str:
    """Return why two rows of one run may have different digests."""
    differing = []
    for name, version in row.versions.items():
        if version != other.versions[name]:
            differing.append(f"{name} {version} and {other.versions[name]}")
    return f"their versions differ: {', '.join(differing)}" if differing else "check both"


def unique(rows: Iterable[Row], key: Callable[[Row], Hashable] = lambda row: row.key) -> list[Row]:
    """Return the rows without those that an earlier row repeats.

    Args:
        rows: Rows of any ledgers, in the order of the files.
        key: What equal rows share. Default: their results.
    """
    first: dict[Hashable, Row] = {}
    for row in rows:
        first.setdefault(key(row), row)
    return list(first.values())


def append_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Append rows to a ledger, which is created if it does not exist.

    The file is locked meanwhile, so several processes may append to it.

    Args:
        path: The ledger.
        rows: Rows to append.

    Raises:
        ConfigError: The file cannot be written.
    """
    text = "".join(as_line(row) + "\n" for row in rows).encode()
    if not text:
        return
    with _locked(Path(path)) as handle:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            text = b"\n" + text
        try:
            left = memoryview(text)
            while left:
                left = left[os.write(handle, left) :]
            os.fsync(handle)
        except OSError as error:
            os.ftruncate(handle, size)
            raise _unwritable(path, error) from None


def check_writable(path: str | Path) -> None:
    """Check that rows can be appended to a ledger.

    Args:
        path: The file, which need not exist yet; its folder must exist.

    Raises:
        ConfigError: The file or its folder cannot be written.
    """
    path = Path(path)
    target = path if path.exists() else path.absolute().parent
    if not target.exists():
        raise ConfigError(f"ledger (--ledger): there is no folder {target} for {path.name}")
    if path.is_dir() or not os.access(target, os.W_OK):
        reason = "is a folder" if path.is_dir() else "cannot be written"
        raise ConfigError(f"ledger (--ledger): {path} {reason}; name a file in a folder of yours")


def merge(
    paths: Sequence[str | Path], out: str | Path, say: Say, missing: str
) -> tuple[list[Row], int]:
    """Write the rows of several ledgers to one, without copies.

    `out` may be one of the ledgers. It is then locked before it is read, so that no row is lost
    that a sweep appends meanwhile.

    Args:
        paths: The ledgers; the first row of a run counts.
        out: The ledger to write.
        say: Called with one line for each row that is left out or in doubt.
        missing: Option to name in the error for a file that does not exist.

    Returns:
        (the rows written, number of copies).

    Raises:
        ConfigError: A file does not exist, is not a ledger, or cannot be read or written.
    """
    with _locked(Path(out)) if Path(out).exists() else nullcontext():
        rows = read_rows(paths, say, missing)
        # Rows of one run from other kinds of CPU, or with other digests, are no copies.
        kept = unique(rows, key=lambda row: (row.key, row.cpu, row.digest, row.state_digest))
        try:
            files.write_file(Path(out).resolve(), "".join(as_line(row) + "\n" for row in kept))
        except OSError as error:
            raise _unwritable(out, error) from None
    return kept, len(rows) - len(kept)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Yield the descriptor of a locked ledger that is open for reading and appending."""
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _unwritable(path, error) from None
        try:
            lock_descriptor(handle)
            # Another process may have replaced the file while this one waited for the lock.
            if not path.exists() or not os.path.samestat(os.fstat(handle), path.stat()):
                continue
            yield handle
            return
        finally:
            os.close(handle)


def _unwritable(path: str | Path, error: OSError) -> ConfigError:
    """Return the error for a ledger that cannot be written."""
    return ConfigError(
        f"ledger (--ledger): {path} cannot be written: {error.strerror}; make room, or name "
        "another file"
    )
