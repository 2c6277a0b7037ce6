"""Measurement of a framework in its own process: it reports each round to a `Meter`.

It needs only the standard library and Linux's /proc.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path

WARM_UP = 2
"""Rounds after the first that do not count, if others follow."""


class Meter:
    """Times rounds for a number of seconds, at least one round after the first."""

    def __init__(self, seconds: float):
        self.seconds, self.first, self.last = seconds, 0.0, 0.0
        self.ends = 0.0
        self.took: list[float] = []

    def round(self, took: float | None = None) -> bool:
        """Record a round; return whether there is time for another one.

        `took` is its duration in seconds; None: the time since the end of the last round.
        """
        now = time.perf_counter()
        if not self.first:
            self.first, self.ends = _age(), now + self.seconds
        else:
            self.took.append(now - self.last if took is None else took)
        self.last = now
        return now < self.ends or not self.took

    def report(self, version: str, **more: float) -> None:
        """Print one line of JSON with rate, memory and `more`, while all processes still run."""
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
    """Return the seconds since this process was started."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf(
        "SC_CLK_TCK"
    )
    return float(Path("/proc/uptime").read_text().split()[0]) - started


def tree(root: int) -> list[int]:
    """Return the ids of a process and of its descendants."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found = [root]
    for pid in found:  # grows in the loop
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def memory(root: int) -> dict[str, float]:
    """Return the memory of a tree of processes in MB; `pss` counts shared pages once."""
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
