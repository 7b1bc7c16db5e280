"""Attention over blocks where they lie gives what attention over the same entries gives."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.filled import _write_layer
from benchmarks.mapped import Mapped, _Layer
from tests.cases import CASES
from tests.ops.exact import DTYPES, check
from wscope_jax import Entries, InplaceKVCache, Stream, _ffi
from wscope_jax.layout import Region, unpack
from wscope_jax.ops.reference import attend_reference
from wscope_jax.policies import GpuOnly


def check_mapped(name: str, storage: str) -> None:
    """Holds a mapped layer's attention against that over what its blocks hold, which differ from each other."""
    case, lengths, window = CASES[name], (3, 1), 32
    layout, dtype = case.layout, jnp.dtype(storage)
    sizes = {"batch": 2, "max_len": 128, "window": window}
    with InplaceKVCache([[Stream(layout)]] * 2, policy=GpuOnly(), dtype=storage, **sizes) as cache:
        for row, blocks in enumerate(lengths):
            fill_row(cache, row, blocks * window)
        pool, draw = cache._pools.pool(Region.PINNED), np.random.default_rng(7)
        slots = [cache.placement.table(row, Region.PINNED) for row in range(2)]
        assert list(map(len, slots)) == list(lengths)
        for layer, slot in itertools.product(range(2), itertools.chain(*slots)):
            block = pool.view(layer, slot)
            block[:] = (
                draw.standard_normal(block.size // dtype.itemsize).astype(dtype).view(np.uint8)
            )
        stored = [
            [np.stack([pool.view(layer, slot) for slot in row]).view(dtype) for row in slots]
            for layer in range(2)
        ]
        q = jax.random.normal(jax.random.key(2), (2, case.num_q_heads, layout.key_dim), storage)
        mapped = Mapped(cache, float(case.scale))
        got = []
        for layer in range(2):
            mapped._layers.append(mapped._layers.pop(0))  # the last one's result is what comes out
            assert mapped._layers[1].unsafe_buffer_pointer() == pool.view(layer, 0).ctypes.data
            got.append(jax.block_until_ready(mapped.attend(q)))
    for layer, row in itertools.product(range(2), range(2)):
        tokens = lengths[row] * window
        blocks = stored[layer][row].reshape(lengths[row], layout.num_kv_heads, -1)
        key, value = (
            jnp.asarray(x).swapaxes(1, 2).reshape(1, tokens, layout.num_kv_heads, -1)
            for x in unpack(jnp.asarray(blocks), layout, window)
        )
        whole = jnp.array([tokens], jnp.int32)
        want = attend_reference(q[row : row + 1], key, value, whole, scale=case.scale)
        check(jax.tree.map(lambda x, row=row: x[row : row + 1], got[layer]), want, storage)


def fill_row(cache: InplaceKVCache, row: int, tokens: int) -> None:
    """Gives a row blocks, of numbers that do not matter."""
    layout = cache.layout
    key = jnp.zeros((tokens, layout.num_kv_heads, layout.key_dim), cache.spec.storage)
    value = None if layout.value_in_key else key[..., : layout.value_dim]
    cache.begin_prompt(row, tokens)
    for layer in range(cache.num_layers):
        at = functools.partial(
            _write_layer, layer, Entries(key, value), jnp.int32(row), jnp.int32(tokens)
        )
        cache.write_prompt(row, (layer,), at)
    cache.end_prompt(row)


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


def test_the_array_keeps_the_memory_of_a_pool_that_is_closed() -> None:
    pool = _ffi.Pool(1, 2, 64)
    pool.commit(2)
    pool.view(0, 1)[:] = 7

    array = np.from_dlpack(_Layer(pool, 0, 2, "float32"))
    assert pool.device is None
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.mapped(0, 2, "float32")
    del pool
    assert array.shape == (1, 2, 2, 8)
    assert (array[0, 1].view(np.uint8) == 7).all()
    assert not array[0, 0].any()
