"""Start `python ...` by a fork of a process that has imported everything: see `zygote.py`."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from support.processes import until


class Zygote:
    """The process that others are forked from. It ends with this one."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("zygote.py")),
                f"{self.folder.name}/mlflow.db",
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.number = 0
        atexit.register(self.end)

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def file(self) -> Path:
        """Return a new file for the output of a process."""
        self.number += 1
        return Path(self.folder.name, f"{self.number}.txt")

    def end(self) -> None:
        self.process.communicate(timeout=30)
        self.folder.cleanup()


zygote = cache(Zygote)


class Forked:
    """`python ARGUMENTS` in a process group of its own."""

    def __init__(self, *arguments: object, cwd: Path, **environment: str):
        self.file = zygote().file()
        self.file.touch()
        self.pid: int = zygote().ask(
            arguments=[str(argument) for argument in arguments],
            cwd=str(cwd),
            environment={**os.environ, "RAY_ADDRESS": "", "OMP_NUM_THREADS": "1", **environment},
            output=str(self.file),
        )["pid"]
        self.code: int | None = None

    @property
    def output(self) -> str:
        """Its output on standard output and standard error."""
        return self.file.read_text()

    def alive(self) -> bool:
        """Return whether the process runs and is no zombie."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def signal(self, number: int) -> None:
        """Send a signal to the whole process group."""
        os.killpg(self.pid, number)

    def wait(self, seconds: float = 120) -> int:
        """Wait for the end, and return the exit code."""
        until(lambda: not self.alive(), seconds, "still at work")
        if self.code is None:
            self.code = zygote().ask(wait=self.pid)["code"]
        return self.code

    def ended(self, seconds: float = 200) -> tuple[int, str]:
        """Return the exit code and the output; kill the process if it does not end in time."""
        try:
            return self.wait(seconds), self.output
        finally:
            if self.alive():
                self.signal(signal.SIGKILL)
                self.wait()


def call(
    *arguments: object, cwd: Path, seconds: float = 200, **environment: str
) -> tuple[int, str]:
    """Run `raysim ...` to its end, and return the exit code and the output."""
    return Forked("-m", "raysim", *arguments, cwd=cwd, **environment).ended(seconds)
