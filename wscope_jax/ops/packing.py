"""Packing of blocks by the platform: C++ on the CPU, a transpose inside the program elsewhere."""

import functools
from typing import Final

import jax
import numpy as np
from jaxtyping import Array, Float

from wscope_jax import layout as plain
from wscope_jax.layout import ByteOrder, Entries, EntryLayout

PACK: Final = "wscope_pack"


def pack(
    entries: Entries, layout: EntryLayout, block: int, order: ByteOrder
) -> Float[Array, "n G E"]:
    """`layout.pack`, which is its oracle; XLA's transposes on the CPU reach a twentieth of a copy's speed."""
    operands = tuple(x for x in entries if x is not None)
    blocks: Array = jax.lax.platform_dependent(
        *operands,
        cpu=functools.partial(_pack_on_cpu, layout=layout, block=block, order=order),
        default=functools.partial(_pack_in_program, layout=layout, block=block, order=order),
    )
    return blocks


def _pack_on_cpu(
    key: Array, value: Array | None = None, *, layout: EntryLayout, block: int, order: ByteOrder
) -> Array:
    num, heads, _ = key.shape
    shape = (num // block, heads, block * layout.stored_dim)
    call = jax.ffi.ffi_call(PACK, jax.ShapeDtypeStruct(shape, key.dtype))
    operands = (key,) if value is None else (key, value)
    return call(*operands, block=np.int32(block), tiles=np.int32(order is ByteOrder.TILES))


def _pack_in_program(
    key: Array, value: Array | None = None, *, layout: EntryLayout, block: int, order: ByteOrder
) -> Array:
    return plain.pack(Entries(key, value), layout, block, order)
