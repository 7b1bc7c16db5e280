"""Decode attention over PINNED blocks that the device reads where they lie: what the pump of chunks is held against.

Each layer's committed slots are one array, made without a copy, that the kernel of streamed blocks gets whole: nothing
is copied, no call is made. On a CPU it is the same program over the same memory.
"""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wscope_jax import InplaceKVCache
from wscope_jax._ffi import Pool
from wscope_jax.layout import EntryLayout, Region
from wscope_jax.ops.joining import join_blocks
from wscope_jax.ops.streamed import attend_chunk
from wscope_jax.partial import Partial

CPU, CUDA = 1, 2  # as DLPack numbers kinds of devices


class _Layer:
    """A layer's slots, for `jax.dlpack.from_dlpack`."""

    def __init__(self, pool: Pool, layer: int, num_heads: int, storage: str) -> None:
        self._capsule, self._device = pool.mapped(layer, num_heads, storage), pool.device

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0) if self._device is None else (CUDA, self._device)


class Mapped:
    """Attention over the PINNED blocks of a cache, layer after layer, none of which is moved.

    Args:
        cache: whose blocks are all placed; it must stay open, and its blocks where they are.
        scale: applied to the scores in float32.
    """

    def __init__(self, cache: InplaceKVCache, scale: float) -> None:
        pool, layout, storage = cache._pools.pool(Region.PINNED), cache.layout, cache.spec.storage
        self._layers = [
            jax.dlpack.from_dlpack(_Layer(pool, layer, layout.num_kv_heads, storage))
            for layer in range(cache.num_layers)
        ]
        owner = np.full((1, pool.committed), -1, np.int32)
        for row in range(cache.batch):
            owner[0, cache.placement.table(row, Region.PINNED)] = row
        self._owner = jnp.asarray(owner)
        self._sizes: dict[str, Any] = {"layout": layout, "block": cache.block, "scale": scale}

    def attend(self, q: jax.Array) -> Partial:
        """The partial of the last layer; each layer's query hangs on the result of the one before."""
        out: Partial = _attend_all(q, self._layers, self._owner, **self._sizes)
        return out

    def run(self, q: jax.Array, times: int) -> float:
        """Seconds of `attend` when so many are dispatched one behind the other."""
        began, out = time.perf_counter(), None
        for _ in range(times):
            out = self.attend(q)
        jax.block_until_ready(out)
        return (time.perf_counter() - began) / times


@functools.partial(jax.jit, static_argnames=("layout", "block", "scale"))
def _attend_all(
    q: jax.Array,
    layers: list[jax.Array],
    owner: jax.Array,
    *,
    layout: EntryLayout,
    block: int,
    scale: float,
) -> Partial:
    zero, heads, width = jnp.int32(0), q.shape[1], layout.value_dim
    part = Partial(jnp.zeros((q.shape[0], heads, width)), jnp.zeros((q.shape[0], heads)))
    for slots in layers:
        # All of it is written; it hangs on the layer before, or XLA would make and keep that of all layers at once.
        before = 0 * part.o[0, 0, 0]
        unwritten = Partial(
            jnp.broadcast_to(before, (*owner.shape, heads, width)),
            jnp.broadcast_to(before, (*owner.shape, heads)),
        )
        after = q + before.astype(q.dtype)
        sizes: dict[str, Any] = {"layout": layout, "block": block, "scale": scale}
        parts = attend_chunk(after, slots, zero, owner, zero, unwritten, **sizes)
        part = join_blocks(Partial(parts.o[0], parts.lse[0]), owner[0], q.shape[0])
    return part
