"""First values of the roofline model, measured: with the real kernel and the real workers."""

from typing import Final

import jax.numpy as jnp

from wscope_jax import _ffi, devices
from wscope_jax.layout import EntryLayout
from wscope_jax.roofline import LEAST_COST_S, Roofline

MEASURED_BYTES: Final = 64 << 20  # of the larger size: milliseconds of memory's own speed


def measure(layout: EntryLayout, *, num_q_heads: int, window: int, dtype: str) -> Roofline:
    """Costs of one layer's entries on this machine, now.

    A and C_CPU are the slope and the rest of two runs of different size, over huge pages that no cache holds. B is
    that of a copy, over the link where there is a GPU; what the device's own part of attention adds to it shows in the
    first steps, which `Roofline.observe` follows.

    Args:
        layout: what an entry stores.
        num_q_heads: H.
        window: D, entries in a block.
        dtype: storage of entries.
    """
    entry_bytes = layout.entry_bytes(jnp.dtype(dtype).itemsize)
    few = max(1, MEASURED_BYTES // (8 * entry_bytes * window))
    many = max(2, MEASURED_BYTES // (entry_bytes * window))

    def kernel_s(num_blocks: int) -> float:
        return 1e-9 * _ffi.time_attention(
            num_q_heads,
            layout.num_kv_heads,
            layout.key_dim,
            layout.value_dim,
            layout.value_in_key,
            window,
            dtype,
            num_blocks,
        )

    short, long = kernel_s(few), kernel_s(many)
    slope = max((long - short) / ((many - few) * window), LEAST_COST_S)
    number = devices.cuda_number()
    copy_ns = (
        _ffi.time_copy(MEASURED_BYTES) if number is None else _ffi.time_load(number, MEASURED_BYTES)
    )
    copied = 1e-9 * copy_ns * entry_bytes / MEASURED_BYTES
    return Roofline(
        cpu_s_per_entry=slope,
        link_s_per_entry=max(copied, LEAST_COST_S),
        cpu_fixed_s=max(0.0, short - slope * few * window),
    )
