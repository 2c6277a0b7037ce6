"""Kind of the CPU, on which the last bits of results depend."""

from __future__ import annotations

from functools import cache

import numpy as np  # noqa: F401  # loads the library that `cpu_kind` looks for
import torch
from threadpoolctl import threadpool_info


@cache
def cpu_kind() -> str:
    """Return the kernels that torch and NumPy use here, such as "AVX512, OpenBLAS SkylakeX".

    The first part is torch's CPU capability. The second is missing if NumPy's library is not
    OpenBLAS. OpenBLAS chooses its kernels by the CPU or by the variable OPENBLAS_CORETYPE. Methods
    that solve quadratic programs, such as GradMA, compute with both.
    """
    blas = [found for found in threadpool_info() if found["internal_api"] == "openblas"]
    blas.sort(key=lambda found: "numpy" not in found["filepath"])
    kernels = [f"OpenBLAS {found['architecture']}" for found in blas[:1]]
    return ", ".join([torch.backends.cpu.get_cpu_capability(), *kernels])


def may_be_this_kind(recorded: str) -> bool:
    """Return whether a recorded kind may be the one of this machine.

    Args:
        recorded: what `cpu_kind` returned elsewhere, or torch's capability alone, as earlier
            versions recorded it.
    """
    return recorded in (cpu_kind(), torch.backends.cpu.get_cpu_capability())
