"""Limits of containers, in files as Linux has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raysim.planning import doctor
from raysim.system import machine

GIB = 2**30


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /sys/fs/cgroup, on a machine of eight cores and much memory."""
    sizes = {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 20 * GIB // 4096}
    sizes["SC_PHYS_PAGES"] = 64 * GIB // 4096
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    return tmp_path / "cgroup"


def group(folder: Path, membership: str, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")
    with (machine.MEMBERSHIP).open("a") as file:
        file.write(f"{membership}\n")


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("100000 100000", 1), ("50000 100000", 1), ("250000 100000", 3), ("max 100000", 8)],
)
def test_cores_of_version_2(cgroups: Path, quota: str, cores: int) -> None:
    group(cgroups, "0::/", cpu_max=quota)
    assert machine.cores() == cores


def test_limits_of_a_group_above_count_too(cgroups: Path) -> None:
    group(cgroups / "pod", "", cpu_max="200000 100000", memory_max=f"{6 * GIB}")
    (cgroups / "pod" / "memory.current").write_text(f"{GIB}\n")
    machine.MEMBERSHIP.unlink()
    group(cgroups / "pod" / "one", "0::/pod/one", cpu_max="max 100000", memory_max="max")
    assert machine.cores() == 2
    assert machine.memory_limit() == 6 * GIB and machine.free_memory() == 5 * GIB


def test_a_group_whose_path_is_that_of_the_host(cgroups: Path) -> None:
    """As in Docker without a namespace for groups: the container's own is mounted as the root."""
    group(cgroups, "0::/system.slice/docker-1234.scope", cpu_max="100000 100000")
    assert machine.cores() == 1


def test_limits_of_version_1(cgroups: Path) -> None:
    group(cgroups / "cpu", "4:cpu,cpuacct:/")
    (cgroups / "cpu" / "cpu.cfs_quota_us").write_text("100000\n")
    (cgroups / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    memory = {"memory.limit_in_bytes": 3 * GIB, "memory.usage_in_bytes": 2 * GIB}
    group(cgroups / "memory", "5:memory:/")
    for name, value in memory.items():
        (cgroups / "memory" / name).write_text(f"{value}\n")
    (cgroups / "memory" / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {GIB}\n")
    assert machine.cores() == 1
    assert machine.memory_limit() == 3 * GIB and machine.free_memory() == 2 * GIB


def test_version_1_without_limits(cgroups: Path) -> None:
    group(cgroups / "memory", "5:memory:/")
    (cgroups / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (cgroups / "memory" / "memory.usage_in_bytes").write_text("1\n")
    group(cgroups / "cpu", "4:cpu:/")
    (cgroups / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (cgroups / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.cores() == 8
    assert machine.memory_limit() is None and machine.free_memory() == 20 * GIB


def test_no_control_groups(cgroups: Path) -> None:
    assert machine.cores() == 8 and machine.free_memory() == 20 * GIB


def test_the_affinity_of_the_process_counts(cgroups: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert machine.cores() == 2


def test_doctor_reports_the_limits_of_the_container(cgroups: Path) -> None:
    group(cgroups, "0::/", cpu_max="100000 100000", memory_max=f"{GIB}")
    (cgroups / "memory.current").write_text(f"{GIB // 2}\n")
    good, report = doctor._check_memory()
    assert not good and "0.5 GiB free" in report and "container's limit 1.0 GiB" in report
    assert doctor._check_cores()[1].startswith("1 (of 8; ")
