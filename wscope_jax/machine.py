"""What this machine has: memory and who limits it, huge pages, NUMA nodes, instructions of its CPU, GPUs.

Everything is read from /proc, /sys and the driver's library; nothing is started, and what cannot be read is absent.
"""

import ctypes
import os
import re
import resource
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from wscope_jax import cgroups
from wscope_jax.cgroups import CGROUP, PROC

NODES: Final = Path("/sys/devices/system/node")
HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
NO_LIMIT: Final = 1 << 60  # version 1 spells "no limit" as a number of about 2^63
LEAST_MARGIN: Final = 512 << 20  # bytes for programs, activations and the runtime itself ...
MARGIN_PART: Final = 16  # ... or this part of a memory, whichever is more
MOST_PROCESSES: Final = 64  # of a GPU, that are asked for
CAP_IPC_LOCK: Final = 14  # may lock any amount of memory
FEATURES: Final = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
)  # that a kernel of ours could use, in the kernel's spelling


class Memory(NamedTuple):
    """Host memory in bytes.

    Attributes:
        total: what the machine has.
        available: what it could hand out without swapping.
        limit: the least that a cgroup of this process allows it, or None.
        room: what may be used now: `available`, or less where a cgroup is nearer to its limit.
    """

    total: int
    available: int
    limit: int | None
    room: int

    @property
    def budget(self) -> int:
        """Bytes that a plan or a run takes for itself when it is given no host budget: `room` but for a margin."""
        return self.room - margin_of(self.room)


def margin_of(num_bytes: int) -> int:
    """Bytes of a memory of this size that a plan leaves to programs and activations."""
    return min(num_bytes, max(LEAST_MARGIN, num_bytes // MARGIN_PART))


def with_margin(num_bytes: int) -> int:
    """The least memory that holds so many bytes and the margin that a plan leaves of it."""
    return num_bytes + max(LEAST_MARGIN, -(-num_bytes // (MARGIN_PART - 1)))


class Budgets(NamedTuple):
    """What a plan is held against, by the names of `memory_plan.Plan`: bytes, or None for no such budget."""

    host_memory: int | None
    gpu_memory: int | None
    machine_memory: int | None


def budgets(host_memory: int | None, gpu_memory: int | None) -> Budgets:
    """What a plan is held against.

    Args:
        host_memory: the user's budget for the host regions; None = what the machine has left.
        gpu_memory: what there is on the GPU; None = there is no GPU, so that its part is the machine's memory too.
    """
    left = memory().budget
    if gpu_memory is None:
        return Budgets(host_memory, None, left)
    return Budgets(left if host_memory is None else host_memory, gpu_memory, None)


class Gpu(NamedTuple):
    """One GPU; bytes.

    Attributes:
        name: as its driver calls it.
        total: its memory.
        free: what no process holds.
        others: ids of the processes that hold some of it, without this one, as far as the driver tells.
    """

    name: str
    total: int
    free: int
    others: tuple[int, ...] = ()


def memory(proc: Path = PROC, cgroup: Path = CGROUP) -> Memory:
    """Host memory, as this process may use it.

    Args:
        proc: the mounted proc file system.
        cgroup: the mounted cgroup file system (version 1 or 2).
    """
    whole = psutil.virtual_memory()
    limit, room = None, int(whole.available)
    for group in cgroups.folders("memory", proc, cgroup):
        allowed = _number(group / "memory.max", group / "memory.limit_in_bytes")
        if allowed is None or allowed >= min(NO_LIMIT, whole.total):
            continue
        limit = allowed if limit is None else min(limit, allowed)
        used = _number(group / "memory.current", group / "memory.usage_in_bytes") or 0
        room = min(room, max(0, allowed - used + _reclaimable(group)))
    return Memory(int(whole.total), int(whole.available), limit, room)


def _reclaimable(group: Path) -> int:
    """Bytes of cached files that count as used but are dropped when they are in the way."""
    for line in _lines(group / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


def huge_pages(file: Path = HUGE_PAGES) -> str | None:
    """When programs get transparent huge pages: "always", "madvise" or "never"; None if there are none."""
    match = re.search(r"\[(\w+)\]", " ".join(_lines(file)))
    return match[1] if match else None


def memlock(proc: Path = PROC) -> int | None:
    """Bytes that this process may lock in memory, None without a limit."""
    for line in _lines(proc / "self" / "status"):
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> CAP_IPC_LOCK & 1:
            return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def numa_nodes(nodes: Path = NODES) -> dict[int, str]:
    """CPUs of each NUMA node that has memory, as the kernel lists them ("0-15")."""
    found = {}
    for folder in sorted(nodes.glob("node[0-9]*")):
        if folder.name[4:].isdigit():
            found[int(folder.name[4:])] = " ".join(_lines(folder / "cpulist"))
    return found


def cpu_model(proc: Path = PROC) -> str | None:
    """Name of the processor."""
    return _cpu_field("model name", proc)


def cpu_features(proc: Path = PROC) -> tuple[str, ...]:
    """Those of `FEATURES` that every core has."""
    flags = (_cpu_field("flags", proc) or "").split()
    return tuple(name for name in FEATURES if name in flags)


def _cpu_field(key: str, proc: Path) -> str | None:
    for line in _lines(proc / "cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


class _NvmlMemory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _NvmlProcess(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def gpus() -> list[Gpu]:
    """NVIDIA GPUs, by their driver's management library; empty without one. Makes no CUDA context."""
    library = _nvml()
    count, found = ctypes.c_uint(), []
    if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    for index in range(count.value):
        device, name, held = ctypes.c_void_p(), ctypes.create_string_buffer(96), _NvmlMemory()
        if not (
            library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
            or library.nvmlDeviceGetName(device, name, len(name))
            or library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(held))
        ):
            text = name.value.decode("ascii", "replace")
            found.append(Gpu(text, held.total, held.free, _others(library, device)))
    return found


def _others(library: ctypes.CDLL, device: ctypes.c_void_p) -> tuple[int, ...]:
    count, listed = ctypes.c_uint(MOST_PROCESSES), (_NvmlProcess * MOST_PROCESSES)()
    ask = getattr(library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
    if ask is None or ask(device, ctypes.byref(count), listed):
        return ()
    return tuple(sorted({entry.pid for entry in listed[: count.value]} - {os.getpid()}))


def gpu_driver() -> str | None:
    """Version of the NVIDIA driver, None without one."""
    library, version = _nvml(), ctypes.create_string_buffer(96)
    if library is None or library.nvmlSystemGetDriverVersion(version, len(version)):
        return None
    return version.value.decode("ascii", "replace")


def _nvml() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return None if library.nvmlInit_v2() else library
    except (OSError, AttributeError):  # no driver, or one without these calls
        return None


def expects_gpu() -> bool:
    """Whether jax would take a GPU, told without starting it: there is one, and JAX_PLATFORMS lets it."""
    asked = os.environ.get("JAX_PLATFORMS", "").split(",")[0]
    return asked in ("", "cuda", "gpu") and bool(gpus())


def _number(*files: Path) -> int | None:
    """The number in the first file that holds one; None for "max" and for files that are missing."""
    for file in files:
        text = " ".join(_lines(file)).strip()
        if text.isdigit():
            return int(text)
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []
