"""The device that JAX computes on, and what it can hold."""

import jax
import jax.numpy as jnp

from wscope_jax import _ffi
from wscope_jax.errors import MachineError


def current() -> jax.Device:
    """The device that new arrays go to, and so the one that programs run on."""
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
