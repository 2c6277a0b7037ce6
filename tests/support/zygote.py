"""A Python that starts at once: each request forks a process that has imported everything, and
draws no pictures.

Each line of standard input is a request in JSON, and is answered by one: {"arguments": those of
`python`, "cwd", "environment", "output": a file} -> {"pid"}; {"wait": pid} -> {"code"}.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import sklearn.datasets  # noqa: F401
import torch

import raysim.runs.run
import raysim.sweeps.runner  # noqa: F401
from raysim import cli  # noqa: F401
from raysim.tracking import mlflow_client
from support.mlflow_tables import made_once
from support.mlflow_thread import call_mlflow_here
from support.quick_runs import leave_out_pictures, leave_out_syncs


def run(arguments: list[str]) -> None:
    """Run `python ARGUMENTS`."""
    match arguments:
        case ["-m", module, *rest]:
            sys.path[0], sys.argv = "", [module, *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.path[0], sys.argv = "", ["-c", *rest]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case [path, *rest]:
            sys.path[0], sys.argv = str(Path(path).parent), [path, *rest]
            runpy.run_path(path, run_name="__main__")


def become(request: dict[str, Any]) -> None:
    """Turn this process into a process group with the requested folder, environment and output
    file."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ |= {**mlflow_client.MLFLOW_ENVIRONMENT, **request["environment"]}
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, file in enumerate((nothing, output, output)):
        os.dup2(file, number)


def main() -> None:
    torch.set_num_threads(1)
    mlflow_client.import_mlflow("sqlite:///:memory:")
    mlflow_client.import_mlflow = made_once(Path(sys.argv[1]))
    call_mlflow_here(setattr)
    leave_out_pictures(setattr)
    leave_out_syncs()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])}
        elif pid := os.fork():
            answer = {"pid": pid}
        else:
            become(request)
            return run(request["arguments"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
