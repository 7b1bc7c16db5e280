"""The device that JAX computes on, what it can hold, and the workers that go with it."""

import logging

import jax
import jax.numpy as jnp

from wscope_jax import _ffi, cores
from wscope_jax.errors import MachineError

log = logging.getLogger(__name__)


def current() -> jax.Device:
    """The device that new arrays go to, and so the one that programs run on."""
    with jax.ensure_compile_time_eval():  # an array, not a tracer, while a program is traced too
        (device,) = jnp.zeros((), jnp.int32).devices()
    return device


def cuda_number() -> int | None:
    """Number of that device for the CUDA driver; None if JAX computes on the CPU.

    Raises:
        MachineError: JAX has a device that there are no custom calls for.
    """
    device = current()
    if device.platform == "cpu":
        return None
    refusal = (
        _ffi.cuda_refusal()
        if device.platform == "gpu"
        else "only CPUs and NVIDIA GPUs are supported"
    )
    if refusal:
        raise MachineError(
            f"device: JAX computes on {device.device_kind}, but {refusal}; set JAX_PLATFORMS=cpu to compute on the CPU"
        )
    return int(device.local_hardware_id or 0)


def memory_left() -> int | None:
    """Bytes that JAX can still give out on the current device, None where it does not say (a CPU)."""
    stats = current().memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))


def num_workers(threads: int | None) -> int:
    """Workers that suit this machine, or as many of `threads` as it has cores.

    Raises:
        MachineError: see `cuda_number`.
    """
    available = cores.available()
    if threads is not None and threads > available:
        log.warning(
            "threads: %d workers were asked for, this process may use %d cores; %d are started",
            threads,
            available,
            available,
        )
        threads = available
    on_gpu = cuda_number() is not None
    if on_gpu and threads is not None and threads >= available > 1:
        log.warning(
            "threads: with %d workers on %d cores the thread that feeds the link starves; %d are better",
            threads,
            available,
            available - 1,
        )
    return cores.split(available, gpu=on_gpu, threads=threads).workers
