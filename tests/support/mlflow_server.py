"""An MLflow server for tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from support.processes import until


class Server:
    """An `mlflow server` on a port of its own, which can be stopped and restarted."""

    def __init__(self, folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.process = folder, None

    def start(self, store: str = "") -> None:
        """Start the server; `store` is a database to serve instead of its own."""
        with (self.folder / "server.txt").open("a") as output:
            self.process: Any = subprocess.Popen(
                [
                    *(
                        sys.executable,
                        "-m",
                        "mlflow",
                        "server",
                        "--host",
                        "127.0.0.1",
                        "--port",
                        str(self.port),
                    ),
                    *(
                        "--backend-store-uri",
                        store or f"sqlite:///{self.folder}/server.db",
                        "--workers",
                        "1",
                    ),
                    *("--artifacts-destination", str(self.folder / "artifacts")),
                ],
                cwd=self.folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={
                    **os.environ,
                    "MLFLOW_DISABLE_TELEMETRY": "true",
                    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # five processes
                },
            )

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
            self.process = None

    def up(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/health", timeout=5
            ) as answer:
                return answer.status == 200
        except OSError:
            return False

    def wait(self) -> None:
        until(self.up, 120, (self.folder / "server.txt").read_text())

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"
