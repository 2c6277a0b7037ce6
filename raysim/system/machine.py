"""CPU cores and memory of this machine, or of the container that this process is in.

A container's limits are in the files of its control group (cgroup): `cpu.max` and `memory.max` in
version 2, `cpu.cfs_quota_us` and `memory.limit_in_bytes` in version 1. A group is also limited by
the groups above it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from math import ceil
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
"""Folder of the control groups."""

MEMBERSHIP = Path("/proc/self/cgroup")
"""File with the control groups of this process."""


def cores() -> int:
    """Return the number of cores that this process may use, at least 1."""
    limits = [len(os.sched_getaffinity(0)), os.cpu_count() or 1]
    for folder in _groups("cpu"):
        quota, period = _numbers(folder / "cpu.max", 2)
        if quota is None:
            (quota,) = _numbers(folder / "cpu.cfs_quota_us", 1)
            (period,) = _numbers(folder / "cpu.cfs_period_us", 1)
        if quota and period and quota > 0:
            limits.append(ceil(quota / period))
    return max(1, min(limits))


def memory_limit() -> int | None:
    """Return the bytes of memory that the container may use; None without a limit."""
    limits = [limit for limit, _ in _memory_groups()]
    return min(limits, default=None)


def free_memory() -> int:
    """Return the bytes of memory that are free, within the limits of the container."""
    free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    return max(0, min(free + [limit - used for limit, used in _memory_groups()]))


def _memory_groups() -> Iterator[tuple[int, int]]:
    """Yield limit and use of each group with a limit, in bytes, without the reclaimable cache."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    versions = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for folder in _groups("memory"):
        for limit_file, use_file, cache_name in versions:
            (limit,) = _numbers(folder / limit_file, 1)
            (used,) = _numbers(folder / use_file, 1)
            # Version 1 has a number above any machine's memory in place of no limit.
            if limit is not None and used is not None and limit < machine:
                yield limit, used - _statistic(folder / "memory.stat", cache_name)


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's group, for a controller, and of the groups above it."""
    with suppress(OSError):
        for line in MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = CGROUPS / controller if controllers else CGROUPS
            # A container may see its own group as the root, while the path is that of the host.
            folder = root / path.strip("/")
            for place in (folder, *folder.parents):
                if place.is_dir():
                    yield place
                if place == root:
                    break


def _numbers(path: Path, count: int) -> list[int | None]:
    """Return the numbers in a file; None for each that is missing, or is "max"."""
    try:
        words = path.read_text().split()
    except OSError:
        words = []
    words = [*words, *[""] * count][:count]
    return [int(word) if word.lstrip("-").isdigit() else None for word in words]


def _statistic(path: Path, name: str) -> int:
    """Return a value of `memory.stat`; 0 if it is not there."""
    with suppress(OSError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
