"""First values of the roofline model, measured: with the real kernel and the real workers."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import jax.numpy as jnp

from wscope_jax import _ffi, devices, machine
from wscope_jax.layout import EntryLayout
from wscope_jax.roofline import LEAST_COST_S, Roofline

log = logging.getLogger(__name__)

READ_BYTES: Final = 256 << 20  # of the larger run: about what the CPU reads of a layer in a step
LEAST_BYTES: Final = 16 << 20  # or it says nothing
PART: Final = 8  # of the memory that is left: at most one of so many is read, and as much is copied
FIXED_PART: Final = 4  # of a short job at the pace of a long one: a fixed cost is no more
COPIED_BYTES: Final = 64 << 20
COPY_BYTES: Final = 32 << 20  # of one copy that keeps the link busy meanwhile
COPYING_S: Final = 0.05  # between two looks at whether that is still needed


def measure(layout: EntryLayout, *, num_q_heads: int, window: int, dtype: str) -> Roofline:
    """Costs of one layer's entries on this machine, now.

    A and C_CPU are the slope and the rest of two runs of different size, over huge pages that no cache holds. Where
    there is a GPU, its link is busy meanwhile: in a step both read the same memory. B is that of a copy, over the link
    if there is one; what the device's own part of attention adds to it shows in the first steps, which
    `Roofline.observe` follows.

    Args:
        layout: what an entry stores.
        num_q_heads: H.
        window: D, entries in a block.
        dtype: storage of entries.
    """
    entry_bytes = layout.entry_bytes(jnp.dtype(dtype).itemsize)
    num_bytes = min(READ_BYTES, max(LEAST_BYTES, machine.memory().budget // PART))
    few = max(1, num_bytes // (8 * entry_bytes * window))
    many = max(2, num_bytes // (entry_bytes * window))

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

    number = devices.cuda_number()
    with _busy_link(number, num_bytes):
        per_entry, fixed = line(few * window, kernel_s(few), many * window, kernel_s(many))
    copied = min(COPIED_BYTES, num_bytes // 2)
    copy_ns = _ffi.time_copy(copied) if number is None else _ffi.time_load(number, copied)
    return Roofline(
        cpu_s_per_entry=per_entry,
        link_s_per_entry=max(1e-9 * copy_ns * entry_bytes / copied, LEAST_COST_S),
        cpu_fixed_s=fixed,
    )


def line(few: int, few_s: float, many: int, many_s: float) -> tuple[float, float]:
    """Seconds of an entry and fixed ones of a job, of two jobs' entries and seconds.

    The fixed ones are no more than a part of what the shorter job takes by the longer one's pace: a neighbour's moment
    would seem to be a fixed cost, and a short text would be placed for the link alone.
    """
    slope = (many_s - few_s) / (many - few)
    most = many_s * few / many / FIXED_PART
    fixed = min(max(0.0, few_s - slope * few), most)
    return max((many_s - fixed) / many, LEAST_COST_S), fixed


@contextmanager
def _busy_link(device: int | None, num_bytes: int) -> Iterator[None]:
    """Keeps the link to a CUDA device busy with so many bytes over and over; without one nothing is."""
    pool = None if device is None else _pinned(device, num_bytes)
    if pool is None:
        yield
        return
    isa, ended = _ffi.isas()[-1], threading.Event()

    def copy() -> None:
        try:
            while not ended.is_set():
                _ffi.measure_streams(None, pool, COPY_BYTES, COPYING_S, isa, device)
        except RuntimeError as error:  # a cost without it is better than none
            log.warning("calibration: the link is idle, the CPU will seem too fast: %s", error)

    thread = threading.Thread(target=copy, name="wscope-calibration")
    try:
        thread.start()
        yield
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()
        pool.close()


def _pinned(device: int, num_bytes: int) -> _ffi.Pool | None:
    """Memory to copy from; None where none can be pinned: then nothing will stream, as the cache's pools will say."""
    count = max(1, num_bytes // COPY_BYTES)
    pool = _ffi.Pool(1, count, COPY_BYTES, device)
    try:
        pool.commit(count)
    except MemoryError as error:
        log.info("calibration: the link is idle: %s", error)
        pool.close()
        return None
    return pool
