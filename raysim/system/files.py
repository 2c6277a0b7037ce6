"""Atomic writes to the files of a run's folder, never through a symbolic link."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raysim.errors import ConfigError

PRIVATE_FOLDER_MODE = 0o700
"""Mode of a new run's folder: only its owner can read client states and recorded updates."""


def make_private(folder: Path) -> None:
    """Create a folder that only its owner can read; an existing folder is not changed.

    Args:
        folder: its parents are created too, with the usual permissions.
    """
    folder.mkdir(PRIVATE_FOLDER_MODE, parents=True, exist_ok=True)


def make_numbered(stem: Path, mode: int = 0o777) -> tuple[Path, int]:
    """Create a new folder; if there is one already, its name gets a number from 2 on.

    Args:
        stem: path of the folder without a number.
        mode: its permissions.

    Returns:
        The folder, and its number.

    Raises:
        OSError: it cannot be created.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    path, number = stem, 1
    while True:
        try:
            path.mkdir(mode)
            return path, number
        except FileExistsError:
            number += 1
            path = stem.with_name(f"{stem.name}-{number}")


def of_rounds(folder: Path, suffix: str = "") -> dict[int, Path]:
    """Return the paths `round-<number><suffix>` in a folder, by ascending numbers.

    Args:
        folder: the folder, which need not exist.
        suffix: end of the names, such as ".json".
    """
    paths = {}
    for path in folder.glob(f"round-*{suffix}"):
        number = path.name.removeprefix("round-").removesuffix(suffix)
        if number.isdecimal():
            paths[int(number)] = path
    # By number, since names of more digits stand before others.
    return dict(sorted(paths.items()))


def free_space(folder: Path) -> str:
    """Return the free space on the disk of a folder, such as "512 MB free there".

    Args:
        folder: the folder, which need not exist.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    return f"{shutil.disk_usage(existing).free / 1e6:.0f} MB free there"


def why_unwritable(folder: Path, error: Exception, fix: str) -> str:
    """Return why a file of a folder cannot be written, and the fix.

    Args:
        folder: a folder above the file, which was there.
        error: the error of the write.
        fix: what to do about a full disk.
    """
    if not folder.exists():
        return f"the folder {folder} no longer exists; run it again"
    why = error.strerror if isinstance(error, OSError) and error.strerror else error
    return f"{why} ({free_space(folder)}); {fix}"


def is_path(text: str) -> bool:
    """Return whether a text is the path of an existing file or folder.

    Args:
        text: any text; one that cannot be a path, for example because it is too long, is none.
    """
    return is_file(text) or os.path.isdir(os.path.expanduser(text))


def is_file(text: str) -> bool:
    """Return whether a text is the path of an existing file.

    Args:
        text: any text; one that cannot be a path is none.
    """
    return os.path.isfile(os.path.expanduser(text))


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` with the same suffix; it replaces `path` on success.

    After an error the temporary file is removed and `path` is unchanged. A symbolic link at `path`
    is replaced, not followed.

    Args:
        path: the file to write; its folder must exist.
    """
    partial = path.with_name(f".partial-{path.name}")
    partial.unlink(missing_ok=True)
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_file(path: Path, text: str) -> None:
    """Write a text file atomically.

    Args:
        path: file to write or replace. A reader sees the old text or the new one, never a part.
        text: its new content.
    """
    with whole(path) as partial:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with open(handle, "w") as file:
            file.write(text)


def open_own(path: Path, flags: int) -> int:
    """Open a file of a run's folder.

    Args:
        path: the file.
        flags: flags of `os.open`; with O_CREAT a missing file is created.

    Returns:
        The file descriptor.

    Raises:
        ConfigError: `path` is a symbolic link or a folder.
        OSError: the file cannot be opened.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refusal(path) from None
        if error.errno == errno.EISDIR:
            raise is_a_folder(path) from None
        raise


def sync_to_disk(path: Path) -> None:
    """Write a file or a folder to disk, so that it is there after a loss of power.

    Args:
        path: the file, or the folder, whose list of names is written.

    Raises:
        OSError: it cannot be written.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file of a run's folder, if it exists.

    Args:
        path: the file.

    Raises:
        ConfigError: `path` is a folder.
    """
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        raise is_a_folder(path) from None


def is_a_folder(path: Path) -> ConfigError:
    """Return the error for a folder that stands where a run has a file.

    Args:
        path: the folder.
    """
    return ConfigError(f"{path} is a folder, and a run has a file there; remove it")


def refuse_links(folder: Path, allowed: Iterable[str] = ()) -> None:
    """Reject symbolic links in a run's folder.

    Args:
        folder: the run's folder; its subfolders are searched too.
        allowed: names at the top of the folder that may be links, and that may contain some.

    Raises:
        ConfigError: there is a symbolic link.
    """
    for place, folders, names in os.walk(folder):
        if Path(place) == folder:
            folders[:] = [name for name in folders if name not in allowed]
            # A link whose folder is gone counts as a file.
            names = [name for name in names if name not in allowed]
        for name in (*folders, *names):
            path = Path(place, name)
            if path.is_symlink():
                raise _refusal(path)


def _refusal(path: Path) -> ConfigError:
    """Return the error for a symbolic link."""
    return ConfigError(
        f"{path}: is a symbolic link, and a run does not write through one; remove it"
    )
