"""What `wscope doctor` looks at: each probe yields findings, and what to do about those that are no good."""

import importlib
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from wscope_jax import __version__, cores, machine
from wscope_jax.cli import kept_programs, trial
from wscope_jax.sizes import amount, counted

PYTHONS: Final = ((3, 11), (3, 14))  # oldest and newest that are tested
JAX: Final = ((0, 10, 2), (0, 13))  # from, and below
READ_BYTES: Final = 192 << 20  # beyond any cache of two cores, touched in a tenth of a second
KERNEL_BLOCKS: Final = READ_BYTES >> 20  # of 256 entries of 8 heads x (128 + 128) bfloat16: 1 MiB
OK: Final = "ok"
NOTE: Final = "note"  # good to know
WARNING: Final = "warning"  # works, but slower or less than it could
FAULT: Final = "fault"  # does not work


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        name: what.
        value: what was found.
        status: "ok", "note", "warning" or "fault".
        remedy: what to do about it; empty if nothing.
    """

    name: str
    value: str
    status: str = OK
    remedy: str = ""


# --- installation ---------------------------------------------------------------------------------


def _versions() -> Iterator[Finding]:
    yield Finding("wscope_jax", __version__)
    found = sys.version_info[:2]
    is_tested = PYTHONS[0] <= found <= PYTHONS[1]
    tested = " to ".join(".".join(map(str, version)) for version in PYTHONS)
    yield Finding(
        "Python",
        f"{platform.python_version()} ({sys.executable})",
        OK if is_tested else FAULT,
        "" if is_tested else f"use Python {tested}: PYTHON=/path/to/python3 make install",
    )
    tested = f"{'.'.join(map(str, JAX[0]))} to below {'.'.join(map(str, JAX[1]))}"
    for name in ("jax", "jaxlib"):
        version = _version(name)
        if version is None:
            yield Finding(name, "not installed", FAULT, "run make install")
        elif JAX[0] <= _numbers(version) < JAX[1]:
            yield Finding(name, version)
        else:
            remedy = f"tested with {tested}: pip install 'jax>=0.10.2,<0.13'"
            yield Finding(name, version, WARNING, remedy)
    for name in ("flax", "numpy", "ml_dtypes", "safetensors", "tokenizers", "rich", "psutil"):
        version = _version(name)
        missing = "" if version else "run make install"
        yield Finding(name, version or "not installed", OK if version else FAULT, missing)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    numbers = (part for part in version.split(".")[:3])
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in numbers)


def _extension() -> Iterator[Finding]:
    try:
        module: Any = importlib.import_module("wscope_jax._ffi")
    except ImportError as error:
        text = " ".join(str(error).split())
        yield Finding("extension", text, FAULT, "build it: make install, or pip install -e .")
        return
    yield Finding("extension", str(module.__file__))
    if not hasattr(module, "isas"):
        text = "built from older sources, it has one portable kernel"
        yield Finding("attention kernels", text, WARNING, "build it again: make install")
        return
    kernels = ", ".join(module.isas())
    refusal = module.amx_refusal()
    if refusal:
        remedy = "the others are used; a newer kernel or a less strict container gives it"
        yield Finding("attention kernels", f"{kernels}; AMX refused: {refusal}", NOTE, remedy)
    else:
        yield Finding("attention kernels", kernels)


# --- machine --------------------------------------------------------------------------------------


def _processor() -> Iterator[Finding]:
    features = ", ".join(machine.cpu_features()) or "none that a kernel could use"
    yield Finding("CPU", f"{machine.cpu_model() or 'unknown'}, {platform.machine()}")
    yield Finding("CPU features", features)


def _cores() -> Iterator[Finding]:
    allowed, quota = len(os.sched_getaffinity(0)), cores.quota_cores()
    usable = cores.available()
    share = cores.split(usable, gpu=machine.expects_gpu())
    limit = "no quota" if quota is None else f"quota {quota:g}"
    text = (
        f"{usable} usable (machine {os.cpu_count()}, affinity {allowed}, {limit}): "
        f"{share.workers} to attend to the cache, {share.xla} for XLA's programs"
    )
    if usable < 2:
        yield Finding("cores", text, WARNING, "give it two cores: CPU and device work at once")
    else:
        yield Finding("cores", text)


def _memory() -> Iterator[Finding]:
    memory = machine.memory()
    text = f"{amount(memory.total)}, {amount(memory.available)} available"
    yield Finding("memory", text)
    if memory.limit is None:
        yield Finding("memory limit", "no cgroup limit")
    else:
        yield Finding(
            "memory limit",
            f"{amount(memory.limit)} by cgroup, {amount(memory.room)} left",
            NOTE,
            "beyond it the kernel kills the process; plans stay below. Raise it with "
            "docker run --memory, or MemoryMax= of systemd",
        )
    pages = machine.huge_pages()
    if pages in ("always", "madvise"):
        yield Finding("huge pages", pages)
    else:
        yield Finding(
            "huge pages",
            pages or "not supported",
            WARNING,
            "reads of the cache are slower without them: "
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    nodes = machine.numa_nodes()
    if len(nodes) > 1:
        yield Finding(
            "NUMA",
            f"{len(nodes)} nodes ({'; '.join(nodes.values())})",
            NOTE,
            "spread the cache over all of them: numactl --interleave=all wscope ...",
        )
    else:
        yield Finding("NUMA", "1 node")


def _gpu() -> Iterator[Finding]:
    gpus, limit = machine.gpus(), machine.memlock()
    if not gpus:
        yield Finding("GPU", "none: the device is XLA's CPU", NOTE)
    for gpu in gpus:
        text = f"{gpu.name}, {amount(gpu.total)}, {amount(gpu.free)} free"
        is_taken = gpu.free < gpu.total * 3 // 4
        who = ", ".join(map(str, gpu.others))
        holder = f"process {who} holds" if who else "another process holds"
        remedy = f"{holder} the rest: see nvidia-smi" if is_taken else ""
        yield Finding("GPU", text, WARNING if is_taken else OK, remedy)
    if gpus:
        yield Finding("GPU driver", machine.gpu_driver() or "unknown")
        plugins = [name for name in ("jax-cuda12-plugin", "jax-cuda13-plugin") if _version(name)]
        if plugins:
            yield Finding("jax's CUDA plugin", f"{plugins[0]} {_version(plugins[0])}")
        else:
            remedy = "pip install 'wscope-jax[cuda12]' (or cuda13)"
            yield Finding("jax's CUDA plugin", "not installed, the GPU is idle", WARNING, remedy)
    if limit is None:
        yield Finding("memlock", "unlimited")
    else:
        yield Finding(
            "memlock",
            amount(limit),
            WARNING if gpus else NOTE,
            "only a GPU needs pinned memory: ulimit -l unlimited, or LimitMEMLOCK=infinity of systemd",
        )


def _bandwidth() -> Iterator[Finding]:
    import numpy as np

    on_gpu = machine.expects_gpu()
    threads = cores.split(cores.available(), gpu=on_gpu).workers  # as an engine has
    numbers = np.ones(READ_BYTES // 8, np.int64)
    parts = np.array_split(numbers, threads)
    with ThreadPoolExecutor(threads) as pool:

        def read() -> float:
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            return time.perf_counter() - start

        seconds = min(read() for _ in range(3))
    what = f"how fast memory gives {amount(READ_BYTES)} to numpy on {counted(threads, 'thread')}, best of 3"
    yield Finding("read bandwidth", f"{_rate(READ_BYTES / seconds)}: {what}")
    try:
        module: Any = importlib.import_module("wscope_jax._ffi")
    except ImportError:  # told above
        return
    try:
        module.force_isa(os.environ.get("WSCOPE_ISA", ""))  # as a run will
    except (ValueError, RuntimeError) as error:
        yield Finding("WSCOPE_ISA", str(error), FAULT, "unset it to get the best one")
        return
    module.start_workers(threads)
    shape, num_bytes = (32, 8, 128, 128, False, 256, "bfloat16"), 8 * 256 * 256 * 2
    ns = module.time_attention(*shape, KERNEL_BLOCKS)
    isa = module.isa_of(*shape) if hasattr(module, "isa_of") else "portable"
    size, workers = KERNEL_BLOCKS * num_bytes, counted(module.num_workers(), "worker")
    what = (
        f"how fast the CPU's attention goes through {amount(size)} of cache on {workers} "
        f"({isa}, bfloat16, 4 query heads a kv head)"
    )
    yield Finding("attention reads", f"{_rate(size / ns * 1e9)}: {what}")


def _rate(bytes_per_s: float) -> str:
    """A bandwidth; a GB is 10^9 bytes, as everywhere in this program's output."""
    return f"{bytes_per_s / 1e9:.1f} GB/s"


def _environment() -> Iterator[Finding]:
    """Variables that change what JAX and XLA do, and are set."""
    for name, (wanted, remedy) in VARIABLES.items():
        value = os.environ.get(name)
        if value is None:
            continue
        is_fine = wanted is None or value.lower() in wanted
        yield Finding(name, value, OK if is_fine else WARNING, "" if is_fine else remedy)
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms.split(",")[0] in ("cuda", "gpu") and not machine.gpus():
        yield Finding("JAX_PLATFORMS", "asks for a GPU, there is none", FAULT, "unset it")
    if (refusal := kept_programs.refusal()) is not None:
        yield Finding("compiled programs", "are not kept between runs", WARNING, refusal)


def _backend() -> Iterator[Finding]:
    """Whether jax starts as the environment asks; in a process of its own, for on a GPU it would keep memory."""
    code, said = trial.start_jax()
    if code == 0:
        yield Finding("jax's device", said)
    else:
        yield Finding("jax's device", said, FAULT, "neither generate, score nor demo will run")


_OFF: Final = ("", "0", "false", "off", "no")
# Name -> values that are as they should be (None: all), and what to do about others.
VARIABLES: Final[dict[str, tuple[tuple[str, ...] | None, str]]] = {
    "JAX_PLATFORMS": (("", "cpu", "cuda", "gpu", "cuda,cpu"), "only cpu and cuda are supported"),
    "JAX_ENABLE_X64": (_OFF, "unset it: programs here are made for 32-bit numbers"),
    "JAX_DEBUG_NANS": (_OFF, "unset it: it runs every step twice when a NaN appears"),
    "JAX_DISABLE_JIT": (_OFF, "unset it: programs are compiled ahead, which it forbids"),
    "JAX_DEFAULT_MATMUL_PRECISION": (None, ""),
    "JAX_COMPILATION_CACHE_DIR": (None, ""),
    "XLA_FLAGS": (None, ""),
    "XLA_PYTHON_CLIENT_PREALLOCATE": (None, ""),
    "XLA_PYTHON_CLIENT_MEM_FRACTION": (None, ""),
    "XLA_PYTHON_CLIENT_ALLOCATOR": (("", "default", "bfc"), "unset it: other allocators are slow"),
    "NPROC": (None, ""),
    "CUDA_VISIBLE_DEVICES": (None, ""),
    "WSCOPE_DEBUG": (None, ""),
}

PROBES: Final[tuple[Callable[[], Iterator[Finding]], ...]] = (
    _versions,
    _extension,
    _processor,
    _cores,
    _memory,
    _gpu,
    _bandwidth,
    _environment,
    _backend,
)
