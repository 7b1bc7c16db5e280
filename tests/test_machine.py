"""What is read of a machine, from made-up /proc and /sys trees."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from wscope_jax import machine

GIB = 1 << 30


class Whole(NamedTuple):
    total: int = 64 * GIB
    available: int = 50 * GIB


@pytest.fixture(autouse=True)
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", Whole)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def memory(tmp_path: Path, groups: str, **files: str) -> machine.Memory:
    proc = write(tmp_path / "proc", {"self/cgroup": groups})
    named = {name.replace("__", "/").replace("_dot_", "."): text for name, text in files.items()}
    return machine.memory(proc, write(tmp_path / "cgroup", named))


def test_no_cgroup(tmp_path: Path) -> None:
    assert machine.memory(tmp_path, tmp_path) == (64 * GIB, 50 * GIB, None, 50 * GIB)


def test_version_2(tmp_path: Path) -> None:
    files = {
        "a__memory_dot_max": f"{8 * GIB}\n",
        "a__memory_dot_current": f"{3 * GIB}\n",
        "a__memory_dot_stat": f"anon 5\ninactive_file {GIB}\nactive_file 7\n",
        "a__b__memory_dot_max": "max\n",
    }
    got = memory(tmp_path, "0::/a/b\n", **files)
    assert (got.limit, got.room) == (8 * GIB, 6 * GIB)


def test_version_1(tmp_path: Path) -> None:
    files = {
        "memory__box__memory_dot_limit_in_bytes": f"{4 * GIB}\n",
        "memory__box__memory_dot_usage_in_bytes": f"{5 * GIB}\n",
        "memory__memory_dot_limit_in_bytes": "9223372036854771712\n",
    }
    got = memory(tmp_path, "3:cpu:/box\n4:memory:/box\n", **files)
    assert (got.limit, got.room) == (4 * GIB, 0)


def test_the_nearest_limit_counts(tmp_path: Path) -> None:
    """A group with a larger limit may be nearer to it."""
    files = {
        "a__memory_dot_max": f"{20 * GIB}",
        "a__memory_dot_current": f"{19 * GIB}",
        "a__b__memory_dot_max": f"{10 * GIB}",
        "a__b__memory_dot_current": f"{2 * GIB}",
    }
    got = memory(tmp_path, "0::/a/b\n", **files)
    assert (got.limit, got.room) == (10 * GIB, GIB)


@pytest.mark.parametrize("limit", ["max", "9223372036854771712", str(65 * GIB), "", "many"])
def test_what_limits_nothing(tmp_path: Path, limit: str) -> None:
    got = memory(tmp_path, "0::/\n", memory_dot_max=limit)
    assert (got.limit, got.room) == (None, 50 * GIB)


@pytest.mark.parametrize("groups", ["", "nonsense", "0::/../../other\n", "0::/not/mounted\n"])
def test_groups_that_are_not_there(tmp_path: Path, groups: str) -> None:
    assert memory(tmp_path, groups, x="").room == 50 * GIB


def test_margin() -> None:
    assert machine.margin_of(160 * GIB) == 10 * GIB
    assert machine.margin_of(4 * GIB) == 512 << 20
    assert machine.margin_of(100) == 100


def test_the_budget_is_the_room_but_for_a_margin() -> None:
    assert machine.Memory(64 * GIB, 50 * GIB, None, 32 * GIB).budget == 30 * GIB
    assert machine.Memory(GIB, GIB, GIB, 100).budget == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("always [madvise] never", "madvise"), ("[never]\n", "never"), ("", None)],
)
def test_huge_pages(tmp_path: Path, text: str, expected: str | None) -> None:
    assert machine.huge_pages(write(tmp_path, {"enabled": text}) / "enabled") == expected
    assert machine.huge_pages(tmp_path / "missing") is None


def test_memlock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    root = write(tmp_path, {"self/status": "Name: x\nCapEff:\t0000000000004000\n"})
    assert machine.memlock(root) is None  # may lock what it likes
    write(tmp_path, {"self/status": "Name: x\nCapEff:\t0000000000000000\n"})
    assert machine.memlock(root) == 8 << 20
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert machine.memlock(root) is None


def test_numa(tmp_path: Path) -> None:
    files = {"node0/cpulist": "0-7\n", "node1/cpulist": "8-15\n", "nodes/x": "", "online": "0-1"}
    assert machine.numa_nodes(write(tmp_path, files)) == {0: "0-7", 1: "8-15"}
    assert machine.numa_nodes(tmp_path / "missing") == {}


def test_cpu(tmp_path: Path) -> None:
    text = "model name\t: Some CPU @ 3: GHz\nflags\t\t: fpu avx2 fma avx512f avx5\n\n"
    root = write(tmp_path, {"cpuinfo": text})
    assert machine.cpu_model(root) == "Some CPU @ 3: GHz"
    assert machine.cpu_features(root) == ("avx2", "fma", "avx512f")
    assert (machine.cpu_model(tmp_path / "no"), machine.cpu_features(tmp_path / "no")) == (None, ())


@pytest.mark.parametrize(
    ("platforms", "count", "expected"),
    [("", 1, True), ("", 0, False), ("cpu", 1, False), ("cuda,cpu", 2, True), ("cuda", 0, False)],
)
def test_expects_gpu(
    platforms: str, count: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("H", GIB, GIB)] * count)
    assert machine.expects_gpu() is expected


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_nvml", lambda: None)
    assert machine.gpus() == []
    assert machine.gpu_driver() is None


STUB = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } Held;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** device) {
  *device = (void*)(0x7f0000000000ull + i);  /* needs all 64 bits on its way back */
  return 0;
}
int nvmlDeviceGetName(void* device, char* name, unsigned size) {
  strncpy(name, "Stub GPU", size);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void* device, Held* held) {
  unsigned long long i = (unsigned long long)device - 0x7f0000000000ull;
  if (i > 1) return 15;  /* lost */
  *held = (Held){(141ull << 30) + i, (140ull << 30) + i, 1ull << 30};
  return 0;
}
typedef struct { unsigned pid; unsigned long long used; unsigned a, b; } Process;
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, Process* found) {
  if ((unsigned long long)device & 1) return 3;  /* not supported */
  found[0] = (Process){4712, 1, -1, -1};
  found[1] = (Process){4711, 2, -1, -1};
  *count = 2;
  return 0;
}
int nvmlSystemGetDriverVersion(char* version, unsigned size) {
  strncpy(version, "550.54.15", size);
  return 0;
}
"""


def test_driver(tmp_path: Path) -> None:
    """A stand-in for the driver's library; the second argument of each call is a pointer or a size."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "stub.c").write_text(STUB)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-w", "-o", library, tmp_path / "stub.c"], check=True
    )
    program = "from wscope_jax import machine; print(machine.gpus(), machine.gpu_driver())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    expected = [
        machine.Gpu("Stub GPU", (141 << 30) + i, (140 << 30) + i, others)
        for i, others in enumerate([(4711, 4712), ()])
    ]
    assert done.stdout == f"{expected} 550.54.15\n"
