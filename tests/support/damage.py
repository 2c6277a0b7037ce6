"""Damage to the files of a run, as a crash, a full disk or a wrong copy does it."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

Damage = Callable[[Path], None]

NOISE = bytes((i * 197 + 89) % 256 for i in range(3000))
"""Bytes that are no text, no JSON and no format of arrays."""


def in_the_middle(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def not_utf8(path: Path) -> None:
    text = path.read_bytes()
    path.write_bytes(text[: len(text) // 3] + b"\xff\xfe" + text[len(text) // 3 :])


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def with_content(content: bytes) -> Damage:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def with_line(number: int, content: bytes) -> Damage:
    """Put another line in the place of one."""

    def write(path: Path) -> None:
        lines = path.read_bytes().splitlines(keepends=True)
        lines[number] = content + b"\n"
        path.write_bytes(b"".join(lines))

    return write


ANY_FILE: dict[str, Damage] = {
    "empty": with_content(b""),
    "cut": in_the_middle,
    "a list": with_content(b"[1, 2]\n"),
    "a number": with_content(b"-3\n"),
    "nothing": with_content(b"null\n"),
    "deep": with_content(b"[" * 100_000),
    "noise": with_content(NOISE),
    "not UTF-8": not_utf8,
    "a folder": a_folder,
}


def without_key(key: str, at: int = 0) -> Damage:
    """Leave a key out of the JSON object of a line."""

    def write(path: Path) -> None:
        lines = path.read_text().splitlines()
        content = json.loads(lines[at])
        del content[key]
        with_line(at, json.dumps(content).encode())(path)

    return write


def with_value(key: str, value: object, at: int = 0) -> Damage:
    def write(path: Path) -> None:
        lines = path.read_text().splitlines()
        with_line(at, json.dumps(json.loads(lines[at]) | {key: value}).encode())(path)

    return write


def with_its_sum(damage: Damage) -> Damage:
    """Damage a file of a checkpoint, and write its right checksum."""

    def write(path: Path) -> None:
        damage(path)
        sums = path.with_name("sums.json")
        content = json.loads(sums.read_text())
        content[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        sums.write_text(json.dumps(content))

    return write


def damages(path: Path) -> Iterator[tuple[str, Damage]]:
    """Yield all damage that fits a file, with its name."""
    yield from ANY_FILE.items()
    if path.suffix not in (".json", ".jsonl", ".sent") and path.name != "lock":
        return
    lines = path.read_text().splitlines()
    shown: set[str] = set()
    for at, line in enumerate(lines):
        content = json.loads(line)
        kind = str(content.get("kind", ""))
        if kind in shown:  # one line of each kind of record
            continue
        shown.add(kind)
        changes = {f"without {kind} {key}": without_key(key, at) for key in content}
        changes |= {f"{kind} {key} is a list": with_value(key, [[]], at) for key in content}
        changes[f"{kind} a line is no JSON"] = with_line(at, b"{")
        changes[f"{kind} a line is a list"] = with_line(at, b"[3]")
        for name, change in changes.items():
            yield name, with_its_sum(change) if path.name == "run.json" else change


def damaged_copy(run: Path, file: Path, damage: Damage, copy: Path) -> Path:
    """Copy the folder of a run, and damage one of its files there."""
    shutil.copytree(run, copy)
    damage(copy / file)
    return copy


def claiming(path: Path, count: int, **arrays: np.ndarray) -> Path:
    """Write an .npz file whose first array claims so many numbers in its header."""
    name, *_ = arrays
    with zipfile.ZipFile(path, "w") as archive:
        for key, array in arrays.items():
            content = io.BytesIO()
            shape = (count, *array.shape[1:]) if key == name else array.shape
            header = {"descr": array.dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(content, header)
            archive.writestr(f"{key}.npy", content.getvalue() + array.tobytes())
    return path
