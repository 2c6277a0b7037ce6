"""The kind of CPU that ledgers and tags record."""

import subprocess
import sys

import pytest
import torch

from raysim.system.cpu_kind import cpu_kind, may_be_this_kind


def test_the_kind_names_the_kernels_of_numpy():
    ask = "from raysim.system.cpu_kind import cpu_kind; print(cpu_kind())"
    kinds = set()
    for core in ("Haswell", "Nehalem"):
        said = subprocess.run(
            [sys.executable, "-c", ask],
            env={"OPENBLAS_CORETYPE": core, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        kinds.add(said.stdout.strip())
    if not any("OpenBLAS" in kind for kind in kinds):
        pytest.skip("NumPy has another library")
    assert len(kinds) == 2


def test_older_rows_have_the_capability_only():
    assert may_be_this_kind(cpu_kind())
    assert may_be_this_kind(torch.backends.cpu.get_cpu_capability())
    assert not may_be_this_kind("AVX1024")
    assert not may_be_this_kind(f"{torch.backends.cpu.get_cpu_capability()}, OpenBLAS Other")
