"""Growth of raysim's cost with the clients of a round, with all clients, and over rounds.

    python benchmarks/growth.py [--seconds 3] [--rounds 1000] [--out growth.png]

Inline, on workload w4 of `peers/workloads.py`: seconds per round for S = 10 to 1,000 (N = 10,000)
and for N = 1,000 to 1,000,000 (S = 100), each run in a separate process, and a process's memory
(RSS) over many rounds. The script prints Markdown and draws a figure. It asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent / "peers"
COHORTS, CLIENTS = (10, 30, 100, 300, 1_000), (1_000, 10_000, 100_000, 1_000_000)

MEMORY = """
import os, sys
from dataclasses import replace
from raysim.engine.loop import Engine
from raysim.engine.inline_executor import Inline
from run_raysim import plan
from workloads import WORKLOADS
made, executor = plan(replace(WORKLOADS["w4"], clients=10_000, cohort=10), 0), Inline()
executor.open(made)
for record in Engine(made, executor).rounds():
    t = int(record["round"])
    if t % 10 == 0:
        pages = int(open("/proc/self/statm").read().split()[1])
        print(t, pages * os.sysconf("SC_PAGE_SIZE") / 1e6, flush=True)
    if t >= int(sys.argv[1]):
        break
executor.close()
"""


def run(*command: str) -> str:
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], env=env, check=True, capture_output=True, text=True
    ).stdout


def seconds(clients: int, cohort: int, length: float) -> float:
    """Return the median seconds of a round; `length` is the duration of the run in seconds."""
    sizes = [
        "--clients",
        str(clients),
        "--cohort",
        str(cohort),
        "--processes",
        "0",
        "--seconds",
        str(length),
    ]
    return 1 / json.loads(run(str(HERE / "run_raysim.py"), "w4", *sizes).splitlines()[-1])["rate"]


def slope(x: tuple[int, ...], y: list[float]) -> float:
    """Return the slope of log y over log x."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("growth.png"))
    given = parser.parse_args()

    over_s = [seconds(10_000, s, given.seconds) for s in COHORTS]
    over_n = [seconds(n, 100, given.seconds) for n in CLIENTS]
    lines = [line.split() for line in run("-c", MEMORY, str(given.rounds)).splitlines()]
    at, memory = [int(t) for t, _ in lines], [float(mb) for _, mb in lines]
    half = len(at) // 2

    print("| S (N = 10,000) | ms a round |\n| ---: | ---: |")
    print("\n".join(f"| {s:,} | {1e3 * y:.1f} |" for s, y in zip(COHORTS, over_s, strict=True)))
    print("\n| N (S = 100) | ms a round |\n| ---: | ---: |")
    print("\n".join(f"| {n:,} | {1e3 * y:.1f} |" for n, y in zip(CLIENTS, over_n, strict=True)))
    more = 1e3 * np.polyfit(at[half:], memory[half:], 1)[0]
    print(f"\nSeconds a round ~ S^{slope(COHORTS, over_s):.2f}, ~ N^{slope(CLIENTS, over_n):.2f}.")
    print(f"Memory in the second half of {at[-1]:,} rounds: {more:.2f} kB more each round.")
    draw(over_s, over_n, at, memory, given.out)


def draw(
    over_s: list[float], over_n: list[float], at: list[int], memory: list[float], out: Path
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(10, 3), layout="constrained")
    left.loglog(COHORTS, over_s, "o-")
    left.loglog(COHORTS, [over_s[-1] * s / COHORTS[-1] for s in COHORTS], ":", color="grey")
    left.set(
        xlabel="clients a round, S", ylabel="seconds a round", title="N = 10,000; dotted: linear"
    )
    middle.loglog(CLIENTS, over_n, "o-")
    middle.set(
        xlabel="clients registered, N", title="S = 100", ylim=(min(over_n) / 3, max(over_n) * 3)
    )
    right.plot(at, memory)
    right.set(
        xlabel="rounds", ylabel="RSS, MB", ylim=(0, 1.2 * max(memory)), title="memory, S = 10"
    )
    figure.savefig(out, dpi=90)


if __name__ == "__main__":
    main()
