"""FedAvg rounds per second of raysim, a hand-written loop, Flower, pfl-research and FedLab.

    python benchmarks/peers.py [--workloads w1 w2 w3 w4] [--repeats 5] [--peers NAME ...]
        [--out FILE.md]

Five workloads on random data (`peers/workloads.py`), without evaluation. Each measurement is a
separate process that trains for `--seconds` after its first round, at least one more round. The
frameworks take turns, `--repeats` times. The script prints Markdown: medians and ratios, the time
to the first round and memory, and how raysim grows with the number of clients. It asserts nothing.

Other frameworks are installed with pip in virtual environments under `--envs`, if missing.
Frameworks that cannot be installed, or fail, are left out, with a line that names the reason.
Workers have one thread each. The hand-written loops and raysim set glibc's allocator alike; other
frameworks run with their defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from peers.measure import tree
from peers.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = "torch>=2.9,<2.14\n"
"""Constraints for pip, which make it prefer a build for CPUs if there is one."""


@dataclass(frozen=True)
class Contestant:
    """A framework in the comparison: its script, number of processes and packages."""

    title: str
    script: str
    processes: int
    env: str = ""
    packages: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ("w1", "w2", "w3", "w4")
    """Workloads that it can run."""
    checkout: Path = ROOT
    """For raysim: the tree whose code and script run."""


FLOWER, PFL, FEDLAB = ("flwr[simulation]", "torch"), ("pfl[pytorch]", "torch"), ("fedlab", "torch")
EVERY = ("w1", "w2", "w3", "w4", "w5")
LOOP = ("--mode", "loop")
CONTESTANTS = {
    "hand": Contestant("hand-written, one process", "run_hand.py", 1, workloads=EVERY),
    "hand2": Contestant("hand-written, two processes", "run_hand.py", 2, workloads=EVERY),
    "inline": Contestant("raysim inline", "run_raysim.py", 0, workloads=EVERY),
    "inline-loop": Contestant(
        "raysim inline, `loop`", "run_raysim.py", 0, options=LOOP, workloads=("w3",)
    ),
    "ray1": Contestant("raysim, one Ray actor", "run_raysim.py", 1),
    "ray2": Contestant("raysim, two Ray actors", "run_raysim.py", 2, workloads=EVERY),
    "ray2-loop": Contestant(
        "raysim, two Ray actors, `loop`", "run_raysim.py", 2, options=LOOP, workloads=("w3",)
    ),
    "flower": Contestant("Flower, two Ray actors", "run_flower.py", 2, "flower", FLOWER),
    "pfl": Contestant("pfl-research, one process", "run_pfl.py", 1, "pfl", PFL),
    "pfl2": Contestant("pfl-research, two processes", "run_pfl.py", 2, "pfl", PFL),
    "fedlab": Contestant("FedLab, one process", "run_fedlab.py", 1, "fedlab", FEDLAB),
}
"""Contestants by name. raysim chooses its mode itself, unless the title names one."""


def beside(checkout: Path) -> dict[str, Contestant]:
    """Return the raysim contestants of another checkout, under their names with an `@` appended.

    They run in the checkout's own environment, `.venv`, in which it is installed.
    """
    return {
        f"{name}@": replace(one, title=f"{one.title} @ {checkout.name}", checkout=checkout)
        for name, one in CONTESTANTS.items()
        if one.script == "run_raysim.py"
    }


GROWTH = [(10_000, 10), (10_000, 100), (10_000, 1_000), (100_000, 100), (1_000_000, 100)]
"""N and S of raysim's growth, on w4."""


class Failed(Exception):
    """A framework cannot take part; the message gives the reason in one line."""


# -- environments ----------------------------------------------------------------------------------


def interpreter(one: Contestant, envs: Path) -> str:
    """Return the Python that runs a framework; install its environment if it is missing."""
    if not one.env:
        own = one.checkout / ".venv" / "bin" / "python"
        return sys.executable if one.checkout == ROOT else str(own)
    folder = envs / one.env
    python, done = folder / "bin" / "python", folder / "installed"
    if done.exists():
        return str(python)
    print(f"installing {', '.join(one.packages)} in {folder}", file=sys.stderr)
    envs.mkdir(parents=True, exist_ok=True)
    constraints = envs / "constraints.txt"
    constraints.write_text(CONSTRAINTS)
    pip = [python, "-m", "pip", "install", "-q", "-c", constraints, *one.packages]
    for command in ([sys.executable, "-m", "venv", "--clear", folder], pip):
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            raise Failed(f"cannot be installed: {_last_line(made.stderr)}")
    done.touch()
    return str(python)


# -- measurements ----------------------------------------------------------------------------------

Found = dict[str, float]


@dataclass
class Bench:
    """Runs the frameworks and keeps their measurements."""

    envs: Path
    seconds: float
    limit: float

    def __post_init__(self) -> None:
        self.found: dict[tuple, list[Found]] = defaultdict(list)
        self.failed: dict[tuple, str] = {}

    def run(self, name: str, workload: str, *more: str) -> None:
        """Measure a framework once. Frameworks that have failed at a workload are skipped."""
        place = (name, workload, *more)
        if place in self.failed or (name,) in self.failed:
            return
        one = CONTESTANTS[name]
        try:
            python = interpreter(one, self.envs)
        except Failed as why:
            self.failed[name,] = str(why)
            return
        options = [
            "--seconds",
            str(self.seconds),
            "--processes",
            str(one.processes),
            *one.options,
            *more,
        ]
        try:
            scripts = next(one.checkout.rglob("benchmarks/peers"))
            command = [python, str(scripts / one.script), workload, *options]
            path = [str(scripts), *([] if one.env else [str(one.checkout)])]
            found = self._measure(command, path, one.checkout)
        except Failed as why:
            self.failed[place] = str(why)
            print(f"{' '.join(place)}: {why}", file=sys.stderr)
            return
        self.found[place].append(found)
        print(
            f"{' '.join(place)}: {found['rate']:.3g} rounds/s ({found['rounds']} rounds)",
            file=sys.stderr,
        )

    def _measure(self, command: list[str], path: list[str], folder: Path) -> Found:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        limit = self.seconds + self.limit
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            said = _last_line(_end(process))
            raise Failed(
                f"no round after the first within {limit:.0f} s; its last words: {said}"
            ) from None
        lines = [line for line in out.splitlines() if line.startswith('{"rate"')]
        if not lines:
            raise Failed(f"exit code {process.returncode}: {_last_line(err)}")
        return json.loads(lines[-1])

    def median(self, place: tuple, key: str = "rate") -> float | None:
        values = [found[key] for found in self.found.get(place, [])]
        return statistics.median(values) if values else None


def _end(process: subprocess.Popen) -> str:
    """End a process and its descendants, first by SIGINT; return what it wrote to stderr."""
    others = tree(process.pid)[1:]
    process.send_signal(signal.SIGINT)
    try:
        err = process.communicate(timeout=20)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        err = ""
    for pid in others:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return err or process.communicate()[1]


def _last_line(text: str) -> str:
    lines = [
        line.strip() for line in text.splitlines() if line.strip() and not line.startswith(" ")
    ]
    return (lines or ["it said nothing"])[-1][:200]


# -- tables ----------------------------------------------------------------------------------------


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; all columns except the first two are numbers."""
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---", "---", *["---:"] * (len(lines[0]) - 2)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rates(bench: Bench, workloads: list[str], names: list[str]) -> str:
    """Return a table of medians with their range, overhead and ratios to the other frameworks.

    The overhead of raysim is the time of a round except training: Ray's messages, server, driver.
    """
    rivals = [name for name in names if name.startswith("hand") or CONTESTANTS[name].env]
    rows = []
    for workload in workloads:
        for name in names:
            rate = bench.median((name, workload))
            if rate is None:
                continue
            every = [found["rate"] for found in bench.found[name, workload]]
            others = [bench.median((rival, workload)) for rival in rivals]
            ratios = [f"{rate / other:.2f}" if other else "" for other in others]
            apart = (
                bench.median((name, workload), "overhead")
                if "raysim" in CONTESTANTS[name].title
                else None
            )
            overhead = "" if apart is None else f"{1e3 * apart:.1f}"
            spread = f"{min(every):.3g}–{max(every):.3g}"
            rows.append(
                [workload, CONTESTANTS[name].title, f"{rate:.3g}", spread, overhead, *ratios]
            )
    return table(
        [
            "workload",
            "",
            "rounds/s",
            "range",
            "overhead, ms a round",
            *(f"÷ {rival}" for rival in rivals),
        ],
        rows,
    )


def starts(bench: Bench, workloads: list[str], names: list[str]) -> str:
    """Return a table of the time to the end of the first round, and the memory at the end."""
    rows = [
        [
            workload,
            CONTESTANTS[name].title,
            *(f"{bench.median((name, workload), key):.{digits}f}" for key, digits in keys),
        ]
        for keys in [(("first", 1), ("pss", 0), ("rss", 0))]
        for workload in workloads
        for name in names
        if (name, workload) in bench.found
    ]
    return table(["workload", "", "first round, s", "PSS, MB", "RSS, MB"], rows)


def growth(bench: Bench) -> str:
    """Return a table of raysim inline with more clients, in total and per round."""
    rows = []
    for clients, cohort in GROWTH:
        place = ("inline", "w4", *sizes(clients, cohort))
        if (rate := bench.median(place)) is not None:
            first, pss = bench.median(place, "first"), bench.median(place, "pss")
            rows.append(
                [
                    f"{clients:,}",
                    f"{cohort:,}",
                    f"{rate:.3g}",
                    f"{rate * cohort:.0f}",
                    f"{first:.1f}",
                    f"{pss:.0f}",
                ]
            )
    return table(["N", "S", "rounds/s", "clients/s", "first round, s", "PSS, MB"], rows)


def sizes(clients: int, cohort: int) -> tuple[str, ...]:
    """Return the options of a run with other numbers of clients than the workload's."""
    return "--clients", str(clients), "--cohort", str(cohort)


def report(bench: Bench, workloads: list[str], names: list[str], about: str) -> str:
    """Return the whole page as Markdown."""
    versions = sorted({str(found["version"]) for every in bench.found.values() for found in every})
    parts = [
        about + " " + ", ".join(versions) + ".",
        "\n".join(f"- {name}: {WORKLOADS[name]}" for name in workloads),
        "A ratio is a line's rounds/s divided by those of the column.",
        rates(bench, workloads, names),
        "From the start of the process to the end of the first round; memory of all processes:",
        starts(bench, [name for name in ("w1", "w4") if name in workloads], names),
    ]
    if any(len(place) > 2 for place in bench.found):
        parts += ["raysim inline on w4 with other numbers of clients:", growth(bench)]
    if bench.failed:
        parts.append(
            "\n".join(
                f"- left out: {' '.join(place)}: {why}" for place, why in bench.failed.items()
            )
        )
    return "\n\n".join(parts) + "\n"


def machine() -> str:
    """Return the name of the processor, the number of cores and the load."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    busy = os.getloadavg()[2]
    name = (names or [platform.machine()])[0]
    return f"{name}, {os.cpu_count()} cores, load {busy:.1f} over the last 15 minutes"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    who = {"choices": CONTESTANTS, "default": list(CONTESTANTS), "help": ", ".join(CONTESTANTS)}
    parser.add_argument("--peers", nargs="+", metavar="NAME", **who)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=20, help="for each measurement, after its first round"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=300,
        help="seconds that the first two rounds may take beside that",
    )
    parser.add_argument("--envs", type=Path, default=Path("~/.cache/raysim/benchmarks"))
    parser.add_argument(
        "--no-growth", action="store_true", help="leave the table of raysim's growth out"
    )
    parser.add_argument("--out", type=Path, help="write the page there too")
    parser.add_argument(
        "--beside",
        type=Path,
        metavar="CHECKOUT",
        help="measure the raysim of another checkout too, which is installed in its .venv",
    )
    given = parser.parse_args()
    if given.beside:
        others = beside(given.beside.absolute())
        CONTESTANTS.update(others)
        given.peers += [name for name in others if name.removesuffix("@") in given.peers]

    bench = Bench(given.envs.expanduser().absolute(), given.seconds, given.limit)
    how = (
        f"Medians of {given.repeats} runs of {given.seconds:g} s, taking turns, {date.today()}; "
        f"{machine()} before."
    )
    for _ in range(given.repeats):
        for workload in given.workloads:
            for name in given.peers:
                if workload in CONTESTANTS[name].workloads:
                    bench.run(name, workload)
        for clients, cohort in [] if given.no_growth else GROWTH:
            bench.run("inline", "w4", *sizes(clients, cohort))
        if given.out:  # the measurements so far
            given.out.write_text(report(bench, given.workloads, given.peers, how))
    page = report(bench, given.workloads, given.peers, how)
    print(page)


if __name__ == "__main__":
    main()
