"""Free memory: the minimum of the machine, the container and the mount."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echelon import control_groups, memory_check
from echelon.control_groups import num_cores
from echelon.errors import ConfigError
from echelon.memory_check import Free, check_fits, check_processes, free_memory, num_out_of_memory

GB = 10**9


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of our own, with 8 GB free and no group that limits anything."""
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {8 * GB // 1024} kB\n")
    (tmp_path / "self" / "cgroup").write_text("")
    for module in (memory_check, control_groups):
        monkeypatch.setattr(module, "PROC", tmp_path)
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path / "groups")
    return tmp_path


def limit(group: Path, names: tuple[str, str], most: str, used: int, stat: str) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / names[0]).write_text(f"{most}\n")
    (group / names[1]).write_text(f"{used}\n")
    (group / "memory.stat").write_text(stat)


def test_without_a_limit_it_is_what_the_machine_has(machine: Path) -> None:
    assert free_memory().nbytes == 8 * GB // 1024 * 1024
    (machine / "self" / "cgroup").write_text("0::/job\n")
    limit(machine / "groups" / "job", ("memory.max", "memory.current"), "max", GB, "inactive_file 0\n")
    assert free_memory().nbytes == 8 * GB // 1024 * 1024


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_above_a_process_counts_and_cached_files_do_not(machine: Path, version: int) -> None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    root = machine / "groups" / ("" if version == 2 else "memory")
    prefix = "" if version == 2 else "inactive_file 7\ntotal_"
    (machine / "self" / "cgroup").write_text("0::/job/step\n" if version == 2 else "3:cpu:/\n4:memory:/job/step\n")
    limit(root / "job" / "step", names, str(6 * GB), GB, f"{prefix}inactive_file 0\n")
    limit(root / "job", names, str(4 * GB), 3 * GB, f"{prefix}inactive_file {GB}\n")
    limit(root, names, str(2**60), 3 * GB, f"{prefix}inactive_file 0\n")
    assert free_memory().nbytes == 2 * GB and free_memory(machine).nbytes <= 2 * GB
    check_fits(2 * GB, "a buffer", free_memory())
    with pytest.raises(
        ConfigError, match=r"a buffer needs 2\.50 GB of memory, but only 2\.00 GB are free\. Lower --size"
    ):
        check_fits(5 * GB // 2, "a buffer", free_memory(), "--size")


def set_quota(group: Path, version: int, quota_us: int) -> None:
    """A quota of processor time per 100 ms; -1 is none."""
    group.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (group / "cpu.max").write_text(f"{'max' if quota_us < 0 else quota_us} 100000\n")
    else:
        (group / "cpu.cfs_quota_us").write_text(f"{quota_us}\n")
        (group / "cpu.cfs_period_us").write_text("100000\n")


@pytest.mark.parametrize("version", [1, 2])
def test_cores_are_those_of_the_affinity_and_of_the_tightest_quota(
    machine: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert num_cores() == 8, "without groups"
    root = machine / "groups" / ("" if version == 2 else "cpu")
    (machine / "self" / "cgroup").write_text(
        "0::/job/step\n" if version == 2 else "3:cpu,cpuacct:/job/step\n4:memory:/\n"
    )
    assert num_cores() == 8, "groups that this process does not see"
    set_quota(root / "job" / "step", version, -1)
    set_quota(root, version, 1_600_000)
    assert num_cores() == 8
    set_quota(root / "job", version, 250_000)
    assert num_cores() == 3, "it takes three to use up two and a half"
    set_quota(root / "job" / "step", version, 20_000)
    assert num_cores() == 1
    (machine / "self" / "cgroup").unlink()
    assert num_cores() == 8, "no groups in this kernel"


def test_a_container_that_sees_only_its_own_group_is_limited_by_it(machine: Path) -> None:
    (machine / "self" / "cgroup").write_text("0::/a/path/of/the/host\n")
    limit(machine / "groups", ("memory.max", "memory.current"), str(3 * GB), 2 * GB, "inactive_file 0\n")
    assert free_memory().nbytes == GB


def test_processes_that_memory_does_not_hold_are_refused_with_the_arithmetic() -> None:
    free = Free(12 << 30, "of memory", "or give the machine more.")
    check_processes(500, free)
    with pytest.raises(
        ConfigError, match=r"1,000 processes need 25\.17 GB of memory, at least 25\.2 MB each .* 12\.88"
    ):
        check_processes(1000, free)


def test_processes_that_need_more_files_than_are_allowed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 1500)]
    monkeypatch.setattr("resource.getrlimit", lambda which: limits[-1])
    monkeypatch.setattr("resource.setrlimit", lambda which, both: limits.append(both))
    free = Free(1 << 40, "of memory", "or not.")
    check_processes(400, free)
    assert limits == [(1024, 1500)], "they are enough"
    check_processes(600, free)
    assert limits[1:] == [(1328, 1500)], "as many as it needs"
    with pytest.raises(ConfigError, match=r"1,000 processes need 2,128 open files .* 1,500 are allowed"):
        check_processes(1000, free)


@pytest.mark.parametrize(
    ("file", "text"), [("memory.events", "oom 9\noom_kill 3\n"), ("vmstat", "pgfault 1\noom_kill 3\n")]
)
def test_processes_that_the_kernel_ended_for_lack_of_memory_are_counted(machine: Path, file: str, text: str) -> None:
    (machine / "self" / "cgroup").write_text("0::/job\n")
    (machine / "groups" / "job").mkdir(parents=True)
    assert num_out_of_memory() == 0
    (machine / file if file == "vmstat" else machine / "groups" / "job" / file).write_text(text)
    assert num_out_of_memory() == 3
