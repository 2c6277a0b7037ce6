"""Checks of `raysim doctor`, each with advice for its failure."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from raysim.config.sections.execution import cluster_address
from raysim.system import machine

Finding = tuple[bool | None, str]
"""Outcome of a check and its text. True: passed; False: failed; None: raysim can run, other
packages may fail."""


def examine() -> Iterator[tuple[str, bool | None, str]]:
    """Yield the name of each check and its `Finding`."""
    for name, check in (
        ("python", _check_python),
        ("packages", _check_packages),
        ("torchvision", _check_torchvision),
        ("cores", _check_cores),
        ("gpus", _check_gpus),
        ("modes", _modes),
        ("memory", _check_memory),
        ("data", _check_data),
        ("solvers", _check_solvers),
        ("ray", _check_ray),
        ("runs", _check_runs),
    ):
        yield (name, *_safely(check))


def _safely(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


def _check_python() -> tuple[bool, str]:
    good = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return good, sys.version.split()[0] + ("" if good else " (raysim supports 3.11 and 3.12)")


def _check_packages() -> tuple[bool, str]:
    names = ("torch", "ray", "mlflow", "numpy", "cvxpy", "ecos", "pydantic", "safetensors")
    return True, ", ".join(f"{n} {importlib.metadata.version(n)}" for n in names)


def _check_torchvision() -> Finding:
    import torch

    from raysim.data import import_torchvision

    torchvision = import_torchvision()
    if torchvision.extension._has_ops():
        return True, f"{torchvision.__version__} fits torch {torch.__version__}"
    return None, (
        f"{torchvision.__version__} does not fit torch {torch.__version__}: its compiled operators "
        "do not load. raysim does without them, but packages that import torchvision, such as peft "
        "and transformers, fail; install torch and torchvision from one index"
    )


def _check_cores() -> tuple[bool, str]:
    from raysim.system.cpu_kind import cpu_kind

    count, on_machine = machine.cores(), os.cpu_count() or 1
    limited = f" (of {on_machine}; limited for this process)" if count < on_machine else ""
    return True, f"{count}{limited}, {cpu_kind()}"


def _check_gpus() -> tuple[bool, str]:
    import torch

    from raysim.system.deterministic_kernels import set_cuda_variables

    set_cuda_variables(deterministic=True)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return True, ", ".join(names) or "none (resources.gpus must be 0)"


def _modes() -> tuple[bool, str]:
    import torch

    if not torch.cuda.is_available():
        return True, "modes of training are not compared: no GPU"
    from raysim.planning.execution_modes import compare_modes

    comparison = compare_modes()
    return comparison.agrees, str(comparison)


def _check_memory() -> tuple[bool, str]:
    free = machine.free_memory() / 2**30
    limit = machine.memory_limit()
    within = f" (container's limit {limit / 2**30:.1f} GiB)" if limit else ""
    shared = shutil.disk_usage("/dev/shm").free / 2**30 if os.path.isdir("/dev/shm") else 0.0
    good = free > 2 and shared > 0.5
    advice = (
        ""
        if good
        else "; an actor takes about 0.4 GiB, and the object store lives in shared memory"
    )
    return good, f"{free:.1f} GiB free{within}, shared memory {shared:.1f} GiB{advice}"


def _check_data() -> tuple[bool, str]:
    from raysim import data

    present = [name for name in data.dataset_names() if data.is_present(name)]
    return True, f"{data.data_root()}: {', '.join(present)}"


def _check_solvers() -> tuple[bool, str]:
    import cvxpy

    have = [s for s in ("CLARABEL", "ECOS") if s in cvxpy.installed_solvers()]
    return len(have) == 2, "exact, " + ", ".join(s.lower() for s in have)


def _check_ray() -> tuple[bool, str]:
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    import ray

    from raysim.distributed.cluster import connection, loopback

    started = connection.connect(None, 1, lambda line: None)
    try:
        have = ray.cluster_resources()
        size = (
            f"{have.get('CPU', 0):g} CPUs, {have.get('GPU', 0):g} GPUs, {len(ray.nodes())} node(s)"
        )
        joined = cluster_address(None)
        starts_here = started and not joined
        faults = []
        if starts_here and loopback.reached_from_outside():
            faults.append("other machines can reach it")
        if starts_here and not loopback.asks_for_token():
            faults.append(
                "any user of this machine can use it without a token (unset RAY_AUTH_MODE)"
            )
        if loopback.token_is_open():
            faults.append(f"others can read its token: chmod 600 {loopback.token_file()}")
        if faults:
            return False, f"{size}, but {'; '.join(faults)}"
        reach = "a cluster" if joined else "is running"
        if starts_here:
            reach = "starts here, on 127.0.0.1, with a token"
        return True, f"{reach}: {size}"
    finally:
        if started:
            connection.leave_cluster()


def _check_runs() -> tuple[bool, str]:
    """End runs of this folder whose processes died; MLflow still lists them as RUNNING."""
    from raysim.tracking import abandoned

    ended = abandoned.finish_abandoned(abandoned.folders_below(Path("runs")))
    if not ended:
        return True, "none in ./runs was left behind by a process that died"
    resumed = "; ".join(f"raysim resume {folder}" for folder in ended)
    return (
        True,
        f"{len(ended)} whose processes had died are marked as ended; to take up those that are "
        f"not finished: {resumed}",
    )
