"""Attention over blocks where they lie gives what attention over the same entries gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.filled import fill
from benchmarks.mapped import Mapped
from tests.cases import CASES
from tests.ops.exact import DTYPES, check
from wscope_jax import InplaceKVCache, Stream, _ffi
from wscope_jax.layout import Region, unpack
from wscope_jax.ops.reference import attend_reference
from wscope_jax.policies import GpuOnly


def check_mapped(name: str, storage: str) -> None:
    """Holds a mapped layer's attention against that over what its blocks hold."""
    case, batch, tokens = CASES[name], 2, 96
    layout, sizes = case.layout, {"batch": batch, "max_len": 128, "window": 32}
    streams = [[Stream(layout)]] * 2
    with InplaceKVCache(streams, policy=GpuOnly(), dtype=storage, **sizes) as cache:
        fill(cache, tokens)
        pool = cache._pools.pool(Region.PINNED)
        slots = [cache.placement.table(row, Region.PINNED) for row in range(batch)]
        stored = np.array([[pool.view(1, slot) for slot in row] for row in slots])
        shape = (batch, case.num_q_heads, layout.key_dim)
        q = jax.random.normal(jax.random.key(2), shape, storage)
        mapped = Mapped(cache, float(case.scale))
        got = jax.block_until_ready(mapped.attend(q))
        assert mapped._layers[1].unsafe_buffer_pointer() == pool.view(1, 0).ctypes.data
        assert [len(row) for row in slots] == [tokens // 32] * batch
    blocks = jnp.asarray(stored.view(jnp.dtype(storage))).reshape(batch, 3, layout.num_kv_heads, -1)
    key, value = (
        x.swapaxes(2, 3).reshape(batch, tokens, layout.num_kv_heads, -1)
        for x in unpack(blocks, layout, 32)
    )
    want = attend_reference(q, key, value, jnp.full(batch, tokens), scale=case.scale)
    check(got, want, storage)


@pytest.mark.parametrize("name", ["gqa4_d128", "mla16_576"])
@pytest.mark.parametrize("storage", DTYPES)
def test_it_is_attention_over_all_placed_entries(name: str, storage: str) -> None:
    check_mapped(name, storage)


def test_what_cannot_be_mapped_is_refused() -> None:
    pool = _ffi.Pool(2, 4, 96)
    with pytest.raises(ValueError, match="no slot is committed"):
        pool.mapped(0, 1, "float32")
    pool.commit(1)
    for layer, heads, storage, said in (
        (2, 1, "float32", "no such layer"),
        (0, 5, "float32", "a block of 96 bytes"),
        (0, 0, "bfloat16", "a block of 96 bytes"),
        (0, 1, "int8", "storage"),
    ):
        with pytest.raises(ValueError, match=said):
            pool.mapped(layer, heads, storage)
