"""Time to start raysim, compared with bare torch, MLflow and Ray.

    python benchmarks/start.py [--repeats 5] [--lines TEXT ...] [--beside CHECKOUT] [--out FILE]

Every line of the table is a process of its own, started in an empty home. The lines take turns,
`--repeats` times. CPU seconds are those of the process itself, and those of the processes that it
started and waited for, such as the one that calls MLflow. The processes that Ray starts are not
among them, so for these lines the wall time is what counts. The script prints Markdown with
medians, smallest and largest values. It asserts nothing.

`--beside` measures the raysim of another checkout too, in its environment `.venv`.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

CPU_COUNT = 2
"""CPUs of the Ray that is started, and its actors."""

STARTED = """
import atexit, os, resource, runpy, sys

def write():
    started = resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(os.environ.pop("CPU_FILE"), "w") as file:
        file.write(str(started.ru_utime + started.ru_stime))

atexit.register(write)
option, what, *sys.argv[1:] = sys.argv[1:]
if option == "-m":
    runpy.run_module(what, run_name="__main__", alter_sys=True)
else:
    exec(what)
"""
"""Program that does what `python OPTION WHAT ARGUMENTS` does. At its end it writes the CPU time of
the processes that it has waited for."""

RAY_WITH_TORCH = f"""
import ray
ray.init("local", num_cpus={CPU_COUNT}, include_dashboard=False, log_to_driver=False)

@ray.remote(num_cpus=1)
class Actor:
    def import_torch(self):
        import torch

ray.get([Actor.remote().import_torch.remote() for _ in range({CPU_COUNT})])
"""

WITHOUT_TRACKING = """
import raysim
raysim.run("quickstart", rounds=20, tracking=False, resources={"executor": "inline"})
"""

FIRST_ROUND_ON_RAY = f"""
import raysim
raysim.run("quickstart", rounds=1, tracking=False, resources={{"actors": {CPU_COUNT}}})
"""

SHORT_RUNS_IN_TURN = """
import raysim
for seed in range(48):
    raysim.run("quickstart", rounds=10, seed=seed, tracking=False, resources={"executor": "inline"})
"""


@dataclass(frozen=True)
class Line:
    """A line of the table: a program that is started and timed."""

    title: str
    """Its name in the table."""

    arguments: tuple[str, ...]
    """Arguments of Python."""

    exit_code: int = 0
    """Exit code that is expected."""


BARE = [
    Line("`import torch`", ("-c", "import torch")),
    Line("`import mlflow`", ("-c", "import mlflow")),
    Line("`import ray`", ("-c", "import ray")),
    Line(f"`ray.init`, {CPU_COUNT} actors that import torch", ("-c", RAY_WITH_TORCH)),
]

COMMAND = ("-m", "raysim")
INLINE = ("resources.executor=inline", "rounds=20")
RAYSIM = [
    Line("`raysim --help`", (*COMMAND, "--help")),
    Line("`raysim list algorithms`", (*COMMAND, "list", "algorithms")),
    Line("`raysim list data`", (*COMMAND, "list", "data")),
    Line("`raysim list pairs`", (*COMMAND, "list", "pairs")),
    Line("`raysim list algorithms scaffold`", (*COMMAND, "list", "algorithms", "scaffold")),
    Line("a misspelled key", (*COMMAND, "run", "quickstart", "local.stepz=5"), exit_code=2),
    Line(
        "a misspelled key of a sweep",
        (*COMMAND, "sweep", "quickstart", "local.stepz=5,6"),
        exit_code=2,
    ),
    Line(
        "`--dry-run` of a bad value",
        (*COMMAND, "run", "quickstart", "rounds=-1", "--dry-run"),
        exit_code=2,
    ),
    Line("`raysim run quickstart --dry-run`", (*COMMAND, "run", "quickstart", "--dry-run")),
    Line("`raysim run quickstart`, inline, 20 rounds", (*COMMAND, "run", "quickstart", *INLINE)),
    Line("the same as `raysim.run(tracking=False)`", ("-c", WITHOUT_TRACKING)),
    Line("48 inline runs of 10 rounds in turn, not tracked", ("-c", SHORT_RUNS_IN_TURN)),
    Line(
        "a sweep of the same runs, tracked",
        (*COMMAND, "sweep", "quickstart", "resources.executor=inline", "rounds=10", "seed=0..47"),
    ),
    Line(f"one round on {CPU_COUNT} Ray actors", ("-c", FIRST_ROUND_ON_RAY)),
]


@dataclass(frozen=True)
class Times:
    """CPU time and wall time of one process, in seconds."""

    own: float
    """CPU time of the process."""
    started: float
    """CPU time of the processes that it started and waited for."""
    wall: float
    """Wall time."""


def measure(python: str, line: Line, checkout: Path) -> Times:
    """Start a program in an empty folder and wait for its end.

    Args:
        python: the interpreter.
        line: the program.
        checkout: the tree whose raysim it imports.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "HOME": folder,
            "PYTHONPATH": str(checkout),
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "CPU_FILE": f"{folder}/cpu",
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as of an installed package
        with open(Path(folder) / "output", "wb") as output:
            began = time.perf_counter()
            process = subprocess.Popen(
                [python, "-c", STARTED, *line.arguments],
                env=environment,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            _, status, usage = os.wait4(process.pid, 0)
            wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != line.exit_code:
            printed = (Path(folder) / "output").read_text(errors="replace").strip()
            sys.exit(f"{line.title}: exit code {process.returncode}\n{printed[-2000:]}")
        started = float((Path(folder) / "cpu").read_text())
    return Times(usage.ru_utime + usage.ru_stime - started, started, wall)


def table(times: dict[str, list[Times]]) -> str:
    """Return medians and ranges as Markdown."""
    rows = [
        "| | CPU seconds | range | of its processes | range | wall seconds | range |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for title, measured in times.items():
        cells = [title]
        for values in (
            [t.own for t in measured],
            [t.started for t in measured],
            [t.wall for t in measured],
        ):
            cells.append(f"{statistics.median(values):.2f}")
            cells.append(f"{min(values):.2f} to {max(values):.2f}")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def processor() -> str:
    """Return the name of the processor."""
    for text in Path("/proc/cpuinfo").read_text().splitlines():
        if text.startswith("model name"):
            return text.partition(":")[2].strip()
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--lines", nargs="*", default=[""], help="only lines whose title has one of these texts"
    )
    parser.add_argument("--beside", type=Path, help="another checkout of raysim")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()

    turns = [(line.title, sys.executable, line, ROOT) for line in (*BARE, *RAYSIM)]
    if options.beside is not None:
        other = options.beside.resolve()
        python = str(other / ".venv" / "bin" / "python")
        turns += [(f"{line.title} @ {other.name}", python, line, other) for line in RAYSIM]
    turns = [turn for turn in turns if any(text in turn[0] for text in options.lines)]
    # The first turn fills the cache of files and compiles modules; it is not counted.
    times: dict[str, list[Times]] = defaultdict(list)
    for repeat in range(options.repeats + 1):
        for title, python, line, checkout in turns:
            measured = measure(python, line, checkout)
            if repeat > 0:
                times[title].append(measured)
                print(f"{title}: {measured.own:.2f} s of CPU", file=sys.stderr)

    about = f"{processor()}, {os.cpu_count()} CPUs, Python {platform.python_version()}."
    page = f"{about}\n\n{table(times)}"
    print(page)
    if options.out is not None:
        options.out.write_text(page)


if __name__ == "__main__":
    main()
