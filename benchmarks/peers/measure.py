"""How a framework is measured, from inside: it reports each round to the meter, and prints the
results.

Needs nothing but the standard library and Linux's /proc.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path

WARM_UP = 2
"""Rounds after the first that do not count, where others follow."""


class Meter:
    """Times rounds for so many seconds, at least one after the first."""

    def __init__(self, seconds: float):
        self.seconds, self.first, self.last = seconds, 0.0, 0.0
        self.ends = 0.0
        self.took: list[float] = []

    def round(self, took: float | None = None) -> bool:
        """A round is done, which took the time since the one before unless said otherwise. Is there
        time for more?"""
        now = time.perf_counter()
        if not self.first:
            self.first, self.ends = _age(), now + self.seconds
        else:
            self.took.append(now - self.last if took is None else took)
        self.last = now
        return now < self.ends or not self.took

    def report(self, version: str, **more: float) -> None:
        """Prints one line of JSON, with what else was found. To be called while all processes are
        still there."""
        counted = self.took[min(WARM_UP, len(self.took) - 1) :]
        found = {
            "rate": 1 / statistics.median(counted),
            "rounds": len(counted),
            "first": self.first,
            **memory(os.getpid()),
            "version": version,
            **more,
        }
        print(json.dumps(found), flush=True)


def _age() -> float:
    """Seconds since this process was started."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf(
        "SC_CLK_TCK"
    )
    return float(Path("/proc/uptime").read_text().split()[0]) - started


def tree(root: int) -> list[int]:
    """A process and all that come from it."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it is gone
            continue
    found = [root]
    for pid in found:  # grows on the way
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def memory(root: int) -> dict[str, float]:
    """MB of a tree of processes: `pss` counts shared pages once, `rss` in each process."""
    total = {"Pss:": 0, "Rss:": 0}
    for pid in tree(root):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:
            continue
        for name, kilobytes, *_ in map(str.split, lines):
            if name in total:
                total[name] += int(kilobytes)
    return {"pss": total["Pss:"] / 1e3, "rss": total["Rss:"] / 1e3}
