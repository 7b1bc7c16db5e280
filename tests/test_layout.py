"""Byte orders of blocks: what lies where, and back."""

import ml_dtypes
import numpy as np
import pytest

from wscope_jax.layout import ByteOrder, Entries, EntryLayout, Region, byte_order, pack, unpack

LAYOUTS = {
    "gqa": EntryLayout(num_kv_heads=2, key_dim=128, value_dim=128),
    "odd": EntryLayout(num_kv_heads=3, key_dim=21, value_dim=77),
    "narrow": EntryLayout(num_kv_heads=1, key_dim=1, value_dim=1),
    "latent": EntryLayout(num_kv_heads=1, key_dim=72, value_dim=64, value_in_key=True),
    "odd_latent": EntryLayout(num_kv_heads=2, key_dim=37, value_dim=5, value_in_key=True),
}


def _entries(layout: EntryLayout, num: int, dtype: type) -> Entries:
    draw = np.random.default_rng(1)
    shapes = [
        (num, layout.num_kv_heads, layout.key_dim),
        (num, layout.num_kv_heads, layout.value_dim),
    ]
    key, value = (draw.standard_normal(shape).astype(dtype) for shape in shapes)
    return Entries(key, None if layout.value_in_key else value)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("order", ByteOrder)
@pytest.mark.parametrize("name", LAYOUTS)
def test_unpack_undoes_pack(name: str, order: ByteOrder, dtype: type) -> None:
    layout, block = LAYOUTS[name], 64
    entries = _entries(layout, 3 * block, dtype)
    blocks = pack(entries, layout, block, order)
    assert blocks.shape == (3, layout.num_kv_heads, block * layout.stored_dim)
    assert blocks.dtype == dtype
    key, value = (np.asarray(x) for x in unpack(blocks, layout, block, order))
    want = entries.key[..., : layout.value_dim] if entries.value is None else entries.value
    for got, given in ((key, entries.key), (value, want)):
        by_entry = got.swapaxes(1, 2).reshape(given.shape)
        np.testing.assert_array_equal(by_entry.astype(np.float32), np.asarray(given, np.float32))


def _number(layout: EntryLayout, block: int, dtype: type, entry: int, dim: int, part: str) -> int:
    """Place of one number in tile order, by the sentence that describes it (layout.py)."""
    pair = 2 if np.dtype(dtype).itemsize == 2 else 1
    if part == "key" and not layout.value_in_key:
        at = entry // 16 * 16 * layout.key_dim
        whole = layout.key_dim - layout.key_dim % pair
        if dim >= whole:
            return at + whole * 16 + entry % 16
        return at + dim // pair * 16 * pair + entry % 16 * pair + dim % pair
    dims = layout.key_dim if layout.value_in_key else layout.value_dim
    panel = dims if layout.value_in_key else 64
    at = 0 if layout.value_in_key else block * layout.key_dim
    at += dim // panel * panel * block
    width = min(panel, dims - dim // panel * panel)
    at += entry // 32 * 32 * width + dim % panel // 16 * 16 * 32
    tile = min(16, width - dim % panel // 16 * 16)
    return at + entry % 32 // pair * tile * pair + dim % panel % 16 * pair + entry % pair


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_tiles_lie_as_described(name: str, dtype: type) -> None:
    layout, block = LAYOUTS[name], 64
    entries = _entries(layout, 2 * block, dtype)
    blocks = np.asarray(pack(entries, layout, block, ByteOrder.TILES), np.float32)
    draw = np.random.default_rng(2)
    for _ in range(300):
        n, g = draw.integers(2), draw.integers(layout.num_kv_heads)
        entry = int(draw.integers(block))
        for part, x in (("key", entries.key), ("value", entries.value)):
            if x is None:
                continue
            dim = int(draw.integers(x.shape[-1]))
            at = _number(layout, block, dtype, entry, dim, part)
            assert blocks[n, g, at] == np.float32(x[n * block + entry, g, dim])


def test_each_region_has_its_order() -> None:
    assert byte_order(Region.UNPINNED) is ByteOrder.TILES
    assert byte_order(Region.PINNED) is ByteOrder.ROWS
    with pytest.raises(ValueError, match="window"):
        byte_order(Region.WINDOW)
