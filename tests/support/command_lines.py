"""Run odd command lines, each in a process of its own: `python command_lines.py CASES SEED FOLDER`.

Prints one JSON object: how the cases ended, and the wrong ones with their arguments. Wrong is a
traceback, an exit code that is not documented, more than `MAX_SECONDS` of computing or `MAX_BYTES`
of memory, a message of more than `MAX_MESSAGE` characters, and a file that a refused command leaves
behind.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib.pyplot
import mlflow  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

import raysim
from raysim import algorithms, cli, sweeps  # noqa: F401
from raysim.config.explain import annotation_types
from raysim.config.loading import shipped
from raysim.config.schema import Config
from raysim.rules.contract import ALGORITHMS
from raysim.rules.methods.registry import discover, hyperparameter_names
from support.configurations import NAMES, TO_CHANGE

MAX_SECONDS, MAX_WALL_SECONDS, MAX_BYTES, MAX_MESSAGE = 20, 150, 2 * 2**30, 20_000
"""Of one command. The second is against commands that wait for ever, on a machine that is busy with
others."""
CODES = {0, 1, 2}

VALID = TO_CHANGE | {"checkpoint": {"every": 0}}

NASTY = [
    "", " ", "null", "~", "true", ".nan", ".inf", "-.inf", "1e400", "1e-400", "-1", "0", "1", "2",
    "7", "0.5", "1.5", "9" * 400, "9" * 4400, "-" + "9" * 5000, "0x1f", "1_000", "1:30",
    "2024-01-01", "2024-13-45", "1e308", "1e-320", "[", "[]", "{}", "[1,2", "{a: 1}", "{name: x}",
    "{name: [x]}", "[[0, 0.1], [2, 0]]", "[[0, 0.1], [2, -1]]", "[" * 600 + "]" * 600,
    "{a: " * 600 + "}" * 600, "!!int 1.5", "!!float abc", "!!python/object:os.system x", "&a [*a]",
    "*x", "&a x", "!!set {a}", "!!binary x", "? [1]", "ünïcode ☃ 名", "\x07", "a\nb", "a\tb",
    "\udcff", "a" * 300, "a" * 5000, "a/" * 2500, "../../..", "/", ".", "..", "/dev/null",
    "/dev/zero", "/proc/self/mem", "nosuch.py:X", "json:loads", "os:system", ":", "x:", ":x",
    "a:b:c", "=", "==", "-", "--", "%s%s%n", "{0}", "'", '"', "0..5", "5..0", "0..99999999999",
    "-1..3", "range(0,1,1e-9)", "range(1e400)", "range()", "range(0,1,0)", "range(0,10)",
    "uniform(0,1)", "loguniform(0,1)", "randint(1.5,2)", "choice()", "choice(a,b", "1,2,3", ",",
    "1,,2", "fedavg,gradma", "[fedavg, gradma]", "full", "auto", "1GB", "-1GB", "9" * 400 + "GB",
    "1e5000GB", "ray", "~nobody/x", "loop", "lanes", "pooled", "sync", "kasync", "buffered", "cuda",
    "float64", "sqlite:///x.db", "ftp://x", "a b", "1000000", "4294967296", "9223372036854775807",
    "9223372036854775808", "1e18", str(10**30), "file", "trace",
]  # fmt: skip
NUMBERS = [
    "0", "1", "1", "2", "2", "3", "3", "4", "5", "8", "12", "20", "100", "1000", "65536", "1000000",
    "-1", "0.1", "0.5", "0.9", "1.0", "1.5", "3.0", "1e-9", "1e-320", "1e9", "1e30", "1e308",
    "1e400", ".nan", "nan", "inf", "true", "false", "null", "4294967296", "9223372036854775807",
    "9223372036854775808", str(10**30), "9" * 400, "[[0, 0.1], [2, 0.2]]", "[1]", "[0]", "0..2",
    "0.1,0.2", "uniform(0,1)", "loguniform(1e-300,1e300)", "randint(0,9223372036854775808)",
    "uniform(-1e308,1e308)", "range(0,1,0.25)", "range(-1e308,1e308,1e300)", "choice(1,2)",
    "direct", "drop", "finish",
]  # fmt: skip
WORDS = [
    *NAMES, "quadratic", "quadratics", "digits", "users", "folder", "mnist", "nosuch", "lognormal",
    "uniform_arrival", "json:loads", "./mine.yaml:X", "mine.py:X",
]  # fmt: skip
JUNK_KEYS = [
    "", ".", "a..b", "local.", ".lr", "local..lr", "a." * 50 + "a", "a" * 5000, "ünïcode", "sweep",
    "sweep.samples", "sweep.early_stopping.metric", "sweep.early_stopping", "sweep.grids", "claims",
    "claims.0", "match.noise_multiplier", "match", "extends", "L", "name.name", "rounds.x",
    "seed.a.b", "\udcff", "3", "null", "[a]", "-x", "--", "local.lr.0",
]  # fmt: skip
TEXTS = [
    b"", b"\xff\xfe\x00", b"\x00" * 100, b"a: [", b"a: b: c", b"- 1\n- 2", b"3", b"null",
    b"rounds: 1\nrounds: 2", b"? [a]\n: 1", b"1: 2", b"\xef\xbb\xbfrounds: 1",
    b"%YAML 9.9\n---\na: 1", b"a: 1\n---\nb: 2", b"\t", b"a:\n\t- 1", b"[" * 3000, b"{a: " * 3000,
    b"- " * 3000, b"rounds: " + b"9" * 5000, b"a" * 600_000, b"#" * 600_000, b"extends: mine.yaml",
    b"extends: .", b"extends: [1]", b"extends: /dev/zero", b"extends: " + b"a" * 5000, b"sweep: 3",
    b"sweep: {seed: 0..99999999999}", b"sweep: {seed: range(0,1,1e-9)}", b"sweep: []",
    b"sweep: {3: 4}", b"claims: 3", b"claims: [{says: 1}]", b"match: 3", b"match: {sigma: [1]}",
    b"x: &x [*x]", b"a: !!int 1.5",
    b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(
        f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ).encode(),
    b'{"rounds": 1, "data": "digits", "algorithm": "fedavg"}',
    b"".join(b"k%d: %d\n" % (i, i) for i in range(20_000)),
]  # fmt: skip
LISTS = [
    "algorithms", "clients", "servers", "pairs", "models", "datasets", "partitions", "schedules",
    "client_speeds", "metrics", "configs",
]  # fmt: skip
REPORTS = ["table", "curves", "sweep", "sensitivity", "speedup", "claims"]
OPTIONS = {
    "run": ["--json", "--dry-run", "--print-config"],
    "sweep": ["--parallel", "--dir", "--json"],
    "resume": ["--fork", "--json"],
    "bench": ["--seconds", "--blocks", "--json"],
    "check-convergence": ["--sample", "--json"],
    "attack": ["--json"],
    "privacy-match": ["--json"],
    "submit": ["--working-dir", "--requirements", "--wait"],
    "show": ["--root", "--path", "--out", "--json"],
    "report": [
        "--metric", "--target", "--group", "--best-of", "--relative-to", "--x-axis", "--ranks",
        "--paper", "--format", "--out", "--to-mlflow", "--panels", "--x", "--y", "--log-x",
        "--keys", "--statistic", "--over",
    ],
}  # fmt: skip
WHOLE = {
    "--parallel", "--seconds", "--sample", "--nodes", "--cpus", "--gpus", "--rounds", "--target",
}  # fmt: skip
FLAGS = {
    "--json", "--dry-run", "--print-config", "--fork", "--blocks", "--wait", "--ranks",
    "--to-mlflow", "--log-x",
}  # fmt: skip


def keys_of(model: Any, above: str = "") -> list[str]:
    """Yield the dotted keys of a section and its subsections."""
    found = []
    for name, field in model.model_fields.items():
        found.append(above + name)
        for inner in annotation_types(field.annotation):
            if isinstance(inner, type) and hasattr(inner, "model_fields"):
                found += keys_of(inner, f"{above}{name}.")
    return list(dict.fromkeys(found))


def all_keys() -> list[str]:
    discover()
    rules = {
        key
        for a in ALGORITHMS.values()
        for rule in (a.client, a.server)
        for key in hyperparameter_names(rule)
    }
    parts = [f"algorithm.{key}" for key in sorted(rules)]
    return [*keys_of(Config), *parts, "model.hidden", "model.projection", "algorithm.preset"]


class Cases:
    """Draws command lines; `folder` is where each is started, with the files that it names."""

    def __init__(self, seed: int, shared: Path):
        self.rng, self.shared, self.keys = random.Random(seed), shared, all_keys()

    def value(self) -> str:
        return self.rng.choice(NASTY)

    def fitting(self, key: str) -> str:
        """Draw a value of a type that the key may have, so that a command gets further."""
        if key.rpartition(".")[2] in ("path", "root", "dir", "run_dir", "uri"):
            return self.rng.choice(
                [
                    *map(str, self.files()),
                    "/dev/zero",
                    "/dev/null",
                    "a" * 300,
                    "a/" * 2500,
                    "~nobody/x",
                ]
            )
        if key.rpartition(".")[2] == "name":
            return self.rng.choice([*WORDS, *ALGORITHMS])
        return self.rng.choice(NUMBERS)

    def override(self) -> str:
        draw = self.rng.random()
        key = self.rng.choice(JUNK_KEYS) if draw < 0.05 else self.rng.choice(self.keys)
        if draw > 0.5:
            return f"{key}={self.fitting(key)}"
        text = f"{key}={self.value()}" if self.rng.random() < 0.95 else key
        return text if text[:1] != "-" or self.rng.random() < 0.3 else f"x{text}"

    def overrides(self, most: int = 3) -> list[str]:
        return [self.override() for _ in range(self.rng.choice([0, 1, 1, 1, 2, most]))]

    def options(self, command: str) -> list[str]:
        found = []
        for option in self.rng.sample(
            OPTIONS[command], min(len(OPTIONS[command]), self.rng.choice([0, 0, 1, 1, 2, 3]))
        ):
            fits = option in WHOLE and self.rng.random() < 0.8
            value = self.rng.choice(NUMBERS) if fits else self.option_value()
            found += [option] if option in FLAGS else [option, value]
        if self.rng.random() < 0.03:
            found.append("--" + self.rng.choice(["nosuch", "", "=", "json=1", "help"]))
        return found

    def option_value(self) -> str:
        paths = ["out.png", "out.csv", "nosuch/out.png", *map(str, self.files())]
        words = [
            "accuracy", "loss", "0.5", "3", "seed", "local.lr", "rounds", "gradma", "paper", "csv",
            "best", "bytes",
        ]  # fmt: skip
        return self.rng.choice([self.value(), self.rng.choice(paths), self.rng.choice(words)])

    def files(self) -> list[Path]:
        names = ["valid.yaml", "binary", "folder", "pipe", "nosuch", "run", "run/config.yaml"]
        return [self.shared / name for name in names]

    def tree(self) -> dict[str, Any]:
        """Draw a configuration with some values replaced."""
        tree: dict[str, Any] = json.loads(json.dumps(VALID))
        odd: list[Any] = [
            None, True, -1, 0, 1e400, float("nan"), 10**400, "x", "a" * 5000, [], {}, [[0, 1]],
            {"name": 3}, {3: 4},
        ]  # fmt: skip
        for _ in range(self.rng.randint(0, 3)):
            section: Any = tree
            *above, last = self.rng.choice(self.keys).split(".")
            for part in above:
                section[part] = section.get(part) if isinstance(section.get(part), dict) else {}
                section = section[part]
            section[last] = self.rng.choice([*odd, self.value()])
        if self.rng.random() < 0.2:
            tree["sweep"] = self.rng.choice(
                [{"seed": "0..2"}, {"local.lr": self.value()}, self.value(), [{}], None]
            )
        return tree

    def config(self, folder: Path) -> str:
        """Draw the name of a configuration: a valid file, one of strange content, or no file."""
        draw, path = self.rng.random(), folder / "mine.yaml"
        if draw < 0.3:
            return str(self.shared / "valid.yaml")
        if draw < 0.4:
            return self.rng.choice(sorted(shipped()))
        if draw < 0.55:
            path.write_bytes(self.rng.choice(TEXTS))
        elif draw < 0.85:
            text = yaml.safe_dump(self.tree(), allow_unicode=True, sort_keys=False).encode(
                "utf-8", "surrogateescape"
            )
            for _ in range(self.rng.choice([0, 0, 0, 1, 2])):
                at = self.rng.randrange(len(text))
                text = (
                    text[:at]
                    + self.rng.choice([b"", b"\x00", b"[", b":", b"\xff", b"&a ", b"*a", b"\n"])
                    + text[at + 1 :]
                )
            path.write_bytes(text)
        else:
            return self.rng.choice([self.value(), *map(str, self.files())])
        return self.rng.choice([str(path), "mine.yaml"])

    def draw(self, folder: Path) -> list[str]:
        """Write the files of a command line, and return its arguments."""
        kinds = [
            "run", "sweep", "resume", "report", "list", "data", "theory", "attack", "match",
            "bench", "submit", "track", "job", "other",
        ]  # fmt: skip
        weights = [30, 20, 6, 14, 2, 5, 4, 3, 3, 2, 3, 2, 1, 2]
        kind = self.rng.choices(kinds, weights)[0]
        line = getattr(self, f"_{kind}")(folder)
        return [text.replace("\0", "") for text in line]  # which no command line can have

    def _run(self, folder: Path) -> list[str]:
        line = ["run", self.config(folder), *self.overrides(), *self.options("run")]
        if not {"--dry-run", "--print-config"} & set(line):
            draw = self.rng.random()
            last = ["resources.executor=inline", "rounds=1", "local.epochs=null", "local.steps=1"]
            line += ["--dry-run"] if draw < 0.4 else ["--print-config"] if draw < 0.8 else last
        return line

    def _sweep(self, folder: Path) -> list[str]:
        key = self.rng.choice(self.keys)
        uniform = ["local.lr=uniform(0,1)", "sweep.samples=2"]
        few = self.rng.choice([[], ["seed=0..2"], uniform, [f"{key}={self.fitting(key)}"]])
        given = [self.config(folder), *self.overrides(), *few, *self.options("sweep")]
        return ["sweep", *given, "--dry-run"]

    def _resume(self, folder: Path) -> list[str]:
        run = self.rng.choice(
            [self.damaged(folder)] * 5 + [*map(str, self.files()), self.value(), "0" * 32]
        )
        last = ["rounds=2", "resources.executor=inline"]
        return ["resume", run, *self.overrides(2), *self.options("resume"), *last]

    def damaged(self, folder: Path) -> str:
        """Copy the run, most often with a byte changed, or a file cut off or removed."""
        run = folder / "run"
        shutil.copytree(self.shared / "run", run)
        files = sorted(path for path in run.rglob("*") if path.is_file() and path.suffix != ".png")
        for path in self.rng.sample(files, self.rng.choice([0, 1, 1, 2])):
            data = path.read_bytes()
            at = self.rng.randrange(len(data) + 1)
            path.write_bytes(
                self.rng.choice([data[:at], data[:at] + b"\xff" + data[at + 1 :], b"", b"[" * 3000])
            )
            if self.rng.random() < 0.1:
                path.unlink()
        return str(run)

    def _report(self, folder: Path) -> list[str]:
        what = self.rng.choice(REPORTS)
        runs = [self.rng.choice(["mine", "mine", "mine", "nosuch", self.value()])]
        uri = self.rng.choice(
            [f"sqlite:///{self.shared}/mlflow.db"] * 5 + [self.value(), "sqlite:///nosuch.db"]
        )
        if what == "claims":
            runs = [self.config(folder), *runs]
        need = {
            "sweep": ["--x", "local.lr"],
            "sensitivity": ["--keys", "local.lr"],
            "speedup": ["--target", "1"],
        }
        return ["report", what, *runs, "--uri", uri, *need.get(what, []), *self.options("report")]

    def _list(self, folder: Path) -> list[str]:
        return ["list", self.rng.choice([*LISTS, self.value()]), *self.rng.choice([[], ["--json"]])]

    def _data(self, folder: Path) -> list[str]:
        name = self.rng.choice(
            ["digits", "folder", "users", "mnist", "quadratics", "nosuch", self.value()]
        )
        if self.rng.random() < 0.1:
            return ["data", "fetch", name, "--root", str(folder / "data")]
        return ["data", "show", name, *self.options("show")]

    def _theory(self, folder: Path) -> list[str]:
        given = [self.config(folder), *self.overrides(2), *self.options("check-convergence")]
        return ["check-convergence", *given]

    def _attack(self, folder: Path) -> list[str]:
        keys = [
            "cost", "attacker", "iterations", "restarts", "lr", "seed", "clients", "round",
            "nosuch",
        ]  # fmt: skip
        given = [f"{self.rng.choice(keys)}={self.value()}" for _ in range(self.rng.randint(0, 2))]
        run = self.rng.choice([*map(str, self.files()), self.value()])
        return ["attack", run, *given, "iterations=2", "restarts=1"]

    def _match(self, folder: Path) -> list[str]:
        return ["privacy-match", self.config(folder), *self.overrides(2)]

    def _bench(self, folder: Path) -> list[str]:
        given = [self.config(folder), *self.overrides(1), *self.options("bench")]
        last = ["resources.executor=inline", "local.steps=1", "rounds=3"]
        return ["bench", *given, *last, "--seconds", "0.1"]

    def _submit(self, folder: Path) -> list[str]:
        command = self.rng.choice(["run", "sweep", "resume", "bench", self.value()])
        where = ["--address", self.rng.choice(["http://127.0.0.1:9", "x", self.value()])]
        options = self.options("submit")
        line = [command, self.config(folder), *self.overrides(1)]
        return ["submit", *where, *options, "--", *line]

    def _track(self, folder: Path) -> list[str]:
        runs = [self.damaged(folder), *map(str, self.files()), self.value()]
        return ["tracking", "sync", self.rng.choice(runs)]

    def _job(self, folder: Path) -> list[str]:
        where = ["--address", self.rng.choice(["http://127.0.0.1:9", self.value()])]
        commands = [["list"], ["logs", self.value()], ["stop", self.value()]]
        return ["job", *self.rng.choice(commands), *where]

    def _other(self, folder: Path) -> list[str]:
        lines = [["--help"], ["run"], ["run", "--help"], ["report"], ["--version"], ["-h"]]
        return self.rng.choice([[], [self.value()], *lines])


def lay_out(shared: Path) -> None:
    """Write the files that command lines name: a valid configuration, a run of it, and invalid
    ones."""
    (shared / "folder").mkdir(parents=True)
    (shared / "binary").write_bytes(bytes(range(256)) * 10)
    os.mkfifo(shared / "pipe")
    (shared / "valid.yaml").write_text(yaml.safe_dump(VALID))
    tracking = {"uri": f"sqlite:///{shared}/mlflow.db", "experiment": "mine"}
    more = {
        "record_updates": {"rounds": [0], "clients": 1},
        "checkpoint": {"every": 1},
        "tracking": tracking,
    }
    raysim.run(VALID | more, run_dir=str(shared / "run"))


def child(line: list[str], folder: Path) -> None:
    os.setsid()
    os.chdir(folder)
    output = os.open(folder.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for here, there in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(here, there)
    sys.argv = ["raysim", *line]
    code: Any = 0
    try:
        cli.main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    try:
        sys.stdout.flush()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def watched(pid: int) -> tuple[int, str, float]:
    """Wait for a process, and return its exit code, the limit that it passed, and its CPU seconds."""
    ticks, began, over, seconds = os.sysconf("SC_CLK_TCK"), time.monotonic(), "", 0.0
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            seconds = usage.ru_utime + usage.ru_stime
            if usage.ru_maxrss * 1024 > MAX_BYTES:
                over = over or "memory"
            return os.waitstatus_to_exitcode(status), over, seconds
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds = (int(stat[11]) + int(stat[12])) / ticks
        memory = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        over = over or ("memory" if memory > MAX_BYTES else "time" if seconds > MAX_SECONDS else "")
        over = over or ("wall time" if time.monotonic() - began > MAX_WALL_SECONDS else "")
        if over:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.01)


def judged(line: list[str], folder: Path) -> tuple[int, str, str, float]:
    """Run one command line, and return its exit code, the problem ("" if none), its output and its
    CPU seconds."""
    before = sorted(path for path in folder.rglob("*"))
    pid = os.fork()
    if pid == 0:
        try:
            child(line, folder)
        finally:
            os._exit(99)
    code, over, seconds = watched(pid)
    output = (folder.parent / "output").read_text(errors="replace")
    if over:
        return code, f"too much {over}", output, seconds
    if "Traceback (most recent call last)" in output and "failed in round" not in output:
        last = [text for text in output.splitlines() if text.strip()][-1]
        return code, f"traceback: {last[:200]}", output, seconds
    if code not in CODES:
        return code, f"exit code {code}", output, seconds
    if code == 2 and len(output) > MAX_MESSAGE:
        return code, f"a message of {len(output):,} characters", output, seconds
    if (
        code == 2
        and line[:2] != ["data", "fetch"]
        and (left := sorted(path for path in folder.rglob("*") if path not in before))
    ):
        return code, f"leaves {left[0].relative_to(folder)}", output, seconds
    return code, "", output, seconds


def explore(cases: int, seed: int, root: Path) -> dict[str, Any]:
    """Run so many command lines, and return how they ended and what was wrong."""
    os.environ |= {"RAY_ADDRESS": "", "COLUMNS": "200", "NO_COLOR": "1"}
    torch.set_num_threads(1)
    matplotlib.pyplot.switch_backend("agg")
    root.mkdir(parents=True, exist_ok=True)
    lay_out(root / "shared")
    gc.freeze()
    drawn, wrong, longest = Cases(seed, root / "shared"), [], 0.0
    ends: Counter[int] = Counter()
    commands: Counter[str] = Counter()
    for number in range(cases):
        folder = root / "case" / "here"
        folder.mkdir(parents=True)
        line = drawn.draw(folder)
        code, problem, output, seconds = judged(line, folder)
        longest = max(longest, seconds)
        ends[code] += 1
        commands[line[0][:20] if line else ""] += 1
        if problem:
            wrong.append(
                {"case": number, "problem": problem, "line": line, "output": output[-1500:]}
            )
            print(json.dumps(wrong[-1]), file=sys.stderr, flush=True)
        os.rename(root / "case", root / f"case-{number}")
        if not problem:
            os.system(f"rm -rf '{root}/case-{number}'")
    counts = {"cases": cases, "ends": ends, "commands": commands}
    return {**counts, "longest_seconds": round(longest, 1), "wrong": wrong}


if __name__ == "__main__":
    print(json.dumps(explore(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]).absolute())))
