from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sleepbackends.host_limits import HostMemory, host_memory, memlock_limit_bytes

GIB = 1 << 30
MACHINE_BYTES = 64 * GIB
V2_MOUNT = "30 24 0:26 {root} {point} rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNT = "36 32 0:33 {root} {point} rw - cgroup cgroup rw,memory\n"
UNRELATED = "22 27 0:21 / /proc rw - proc proc rw\n37 32 0:34 / /sys/cpu rw - cgroup none rw,cpu\n"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=MACHINE_BYTES))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def process(root: Path, groups: str, mounts: str) -> None:
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/mountinfo").write_text(UNRELATED + mounts)


def group_v2(root: Path, path: str, limit: object, current: int = 0, **stat: int) -> Path:
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    lines = "".join(f"{key} {value}\n" for key, value in {"anon": 5, **stat}.items())
    (folder / "memory.stat").write_text(lines)
    return folder


def group_v1(root: Path, path: str, limit: int, usage: int = 0, **stat: int) -> Path:
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text("".join(f"{k} {v}\n" for k, v in stat.items()))
    return folder


def test_without_any_files_the_machine_decides(tmp_path: Path) -> None:
    assert host_memory(tmp_path) == HostMemory(MACHINE_BYTES, None, "machine")


def test_v2_limit_less_what_is_used(root: Path) -> None:
    process(root, "0::/\n", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    folder = group_v2(root, "sys/fs/cgroup", 8 * GIB, 3 * GIB)
    assert host_memory(root) == HostMemory(5 * GIB, 8 * GIB, str(folder))


def test_page_cache_counts_as_available(root: Path) -> None:
    process(root, "0::/\n", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    cache = {"inactive_file": GIB, "active_file": 2 * GIB}
    group_v2(root, "sys/fs/cgroup", 8 * GIB, 7 * GIB, **cache)
    assert host_memory(root).available_bytes == 4 * GIB


@pytest.mark.parametrize(
    ("current", "cache", "expected"), [(9 * GIB, 0, 0), (GIB, 2 * GIB, 8 * GIB)]
)
def test_available_stays_between_nothing_and_the_limit(
    root: Path, current: int, cache: int, expected: int
) -> None:
    process(root, "0::/\n", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    group_v2(root, "sys/fs/cgroup", 8 * GIB, current, inactive_file=cache)
    assert host_memory(root).available_bytes == expected


def test_unlimited_group_sets_no_limit(root: Path) -> None:
    process(root, "0::/\n", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    group_v2(root, "sys/fs/cgroup", "max", GIB)
    assert host_memory(root) == HostMemory(MACHINE_BYTES, None, "machine")


def test_a_limit_above_the_machine_is_reported_but_does_not_decide(root: Path) -> None:
    process(root, "0::/\n", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    group_v2(root, "sys/fs/cgroup", 2 * MACHINE_BYTES)
    assert host_memory(root) == HostMemory(MACHINE_BYTES, 2 * MACHINE_BYTES, "machine")


def test_ancestors_count_and_the_tightest_wins(root: Path) -> None:
    process(root, "0::/pod/app\n", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    group_v2(root, "sys/fs/cgroup/pod/app", 6 * GIB, 0)
    pod = group_v2(root, "sys/fs/cgroup/pod", 8 * GIB, 7 * GIB)
    group_v2(root, "sys/fs/cgroup", 20 * GIB, 10 * GIB)
    assert host_memory(root) == HostMemory(GIB, 6 * GIB, str(pod))


def test_groups_above_the_mounted_part_are_not_looked_for(root: Path) -> None:
    process(root, "0::/pod/app/inner\n", V2_MOUNT.format(root="/pod/app", point="/cg"))
    group_v2(root, "cg/inner", 6 * GIB)
    top = group_v2(root, "cg", 4 * GIB)
    group_v2(root, "", GIB)
    assert host_memory(root) == HostMemory(4 * GIB, 4 * GIB, str(top))


@pytest.mark.parametrize(
    ("mounted", "path"), [("/pod", "/../../outside"), ("/", "/../outside"), ("/pod", "/elsewhere")]
)
def test_a_group_outside_of_the_mount_reads_the_mount_point(
    root: Path, mounted: str, path: str
) -> None:
    process(root, f"0::{path}\n", V2_MOUNT.format(root=mounted, point="/cg"))
    top = group_v2(root, "cg", 4 * GIB)
    group_v2(root, "outside", GIB)
    assert host_memory(root) == HostMemory(4 * GIB, 4 * GIB, str(top))


def test_mount_point_with_a_space(root: Path) -> None:
    process(root, "0::/\n", V2_MOUNT.format(root="/", point=r"/my\040groups"))
    folder = group_v2(root, "my groups", 4 * GIB)
    assert host_memory(root).source == str(folder)


def test_v1_limit_less_what_is_used(root: Path) -> None:
    process(root, "5:cpu:/x\n4:memory:/app\n", V1_MOUNT.format(root="/", point="/cg/memory"))
    stat = {"total_inactive_file": GIB, "total_active_file": GIB, "inactive_file": 9 * GIB}
    folder = group_v1(root, "cg/memory/app", 8 * GIB, 5 * GIB, **stat)
    assert host_memory(root) == HostMemory(5 * GIB, 8 * GIB, str(folder))


def test_v1_unlimited_is_a_huge_number(root: Path) -> None:
    process(root, "4:memory:/\n", V1_MOUNT.format(root="/", point="/cg/memory"))
    group_v1(root, "cg/memory", 9223372036854771712, GIB)
    assert host_memory(root) == HostMemory(MACHINE_BYTES, None, "machine")


def test_both_versions_side_by_side(root: Path) -> None:
    mounts = V1_MOUNT.format(root="/", point="/cg/memory")
    mounts += V2_MOUNT.format(root="/", point="/cg/unified")
    process(root, "4:memory:/\n0::/\n", mounts)
    folder = group_v1(root, "cg/memory", 3 * GIB)
    group_v2(root, "cg/unified", 5 * GIB)
    assert host_memory(root) == HostMemory(3 * GIB, 3 * GIB, str(folder))


@pytest.mark.parametrize("name", ["memory.max", "memory.current", "memory.stat"])
@pytest.mark.parametrize("content", [None, "", "nonsense\n\xff 1 2\ninactive_file x\n"])
def test_missing_and_garbled_files_never_raise(root: Path, name: str, content: str | None) -> None:
    process(root, "0::/\n", V2_MOUNT.format(root="/", point="/cg"))
    folder = group_v2(root, "cg", 4 * GIB, GIB, inactive_file=GIB)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content.encode("latin-1"))
    expected = {"memory.max": MACHINE_BYTES, "memory.current": 4 * GIB, "memory.stat": 3 * GIB}
    assert host_memory(root).available_bytes == expected[name]


@pytest.mark.parametrize("text", ["", "0\n", "::\n:::\n", "30 24\n", " - cgroup2 a b\n" * 2])
def test_garbled_process_files_never_raise(root: Path, text: str) -> None:
    process(root, text, text)
    assert host_memory(root) == HostMemory(MACHINE_BYTES, None, "machine")


def test_this_machine_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    memory = host_memory()
    assert memory.available_bytes > 0
    assert memory.limit_bytes is None or memory.limit_bytes > 0


@pytest.mark.parametrize(("soft", "expected"), [(resource.RLIM_INFINITY, None), (8 << 20, 8 << 20)])
def test_memlock_limit(monkeypatch: pytest.MonkeyPatch, soft: int, expected: int | None) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, resource.RLIM_INFINITY))
    assert memlock_limit_bytes() == expected
