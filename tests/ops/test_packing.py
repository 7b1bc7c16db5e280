"""Packing in C++ equals packing inside the program, bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.test_layout import LAYOUTS, _entries
from wscope_jax import layout as plain
from wscope_jax.layout import ByteOrder, Entries, EntryLayout
from wscope_jax.ops.packing import pack


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("order", ByteOrder)
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_equals_packing_in_the_program(name: str, order: ByteOrder, dtype: str) -> None:
    layout, block = LAYOUTS[name], 64
    entries = Entries(
        *(None if x is None else jnp.asarray(x) for x in _entries(layout, 192, jnp.dtype(dtype)))
    )
    want = plain.pack(entries, layout, block, order)
    got = jax.jit(lambda e: pack(e, layout, block, order))(entries)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))


def test_other_platforms_pack_in_the_program() -> None:
    layout = EntryLayout(num_kv_heads=2, key_dim=16, value_dim=16)
    x = jax.ShapeDtypeStruct((64, 2, 16), jnp.bfloat16)
    text = (
        jax.jit(lambda k, v: pack(Entries(k, v), layout, 32, ByteOrder.TILES))
        .trace(x, x)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert "wscope_pack" not in text


@pytest.mark.parametrize(
    ("block", "size", "message"),
    [(48, 48 * 32, "multiple of 32"), (40, 40 * 32, "must divide"), (32, 1000, "blocks: is")],
)
def test_what_does_not_fit_is_refused(block: int, size: int, message: str) -> None:
    x = jnp.zeros((96, 2, 16), jnp.float32)
    call = jax.ffi.ffi_call(
        "wscope_pack", jax.ShapeDtypeStruct((96 // block, 2, size), jnp.float32)
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call(x, x, block=np.int32(block), tiles=np.int32(1))
