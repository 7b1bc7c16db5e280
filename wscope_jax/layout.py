"""What one token stores in one layer, and how whole blocks of it lie in memory.

Everything that differs between grouped-query attention, latent attention and compressed attention is a value of
`EntryLayout`; how the numbers are stored (bfloat16, float32) belongs to the pool that holds them.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wscope_jax.arguments import boolean, instance, integer, shown
from wscope_jax.errors import UsageError

WINDOW_SIZES: Final = (32, 64, 128, 256, 512)  # entries in a block; 256 is what is tuned
# Ring entries beyond a block, so that decoding goes on while an eviction is under way.
WINDOW_SPARE: Final = 48
# Slots of a chunk each; streaming may be one less ahead of attention. More than two, so that the link goes on while the
# device waits for a CPU that is late in one layer, and the next layers profit: side by side both may be as slow as they
# are on average, not as the slower one in each layer.
PING_PONG_SLOTS: Final = 4


LANES: Final = 16  # 4-byte lanes of the widest vectors
TILE_ENTRIES: Final = 32  # entries of a tile of values
PANEL_DIMS: Final = 64  # dims of a panel of values


class Region(enum.StrEnum):
    """Where an entry lives. The first two are in host memory, the last two on the device."""

    UNPINNED = "unpinned"  # attended by the CPU where it lies
    PINNED = "pinned"  # streamed to the device at full link speed
    WINDOW = "window"  # the newest entries of a sequence, not placed yet
    PING_PONG = "ping_pong"  # the slots that streamed blocks pass through


class ByteOrder(enum.IntEnum):
    """Order of a block's bytes, named by the reader that wants it."""

    ROWS = 0  # [G][K rows: D x key_dim | V rows: D x value_dim]
    # What every kernel of the CPU reads with whole vectors and tiles, whatever its instruction set. P numbers make
    # 4 bytes: 2 of bfloat16, 1 of float32. [G][keys | values], or [G][latent] where the value is in the key:
    #   keys    [D / 16][K / P][16 entries][P dims], a last odd dim as [16 entries]
    #   values  [panels of 64 dims][D / 32][tiles of 16 dims][32 / P][16 dims][P entries]
    #   latent  as values, in one panel of K dims
    # The last panel and the last tile are as narrow as what is left: nothing is padded.
    TILES = 1


class Entries(NamedTuple):
    """New entries of one stream, one per token.

    Attributes:
        key: [N, G, K] in the compute dtype.
        value: [N, G, V], or None where the value is the first V numbers of the key.
    """

    key: jax.Array
    value: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntryLayout:
    """Shape of what one token (or one compressed group of tokens) stores in one layer.

    Attributes:
        num_kv_heads: G, heads that are stored.
        key_dim: K, numbers in a key.
        value_dim: V, numbers in a value.
        value_in_key: the value is the first `value_dim` numbers of the key and is not stored again.
        tokens_per_entry: tokens that one entry stands for (more than one in compressed attention).

    Raises:
        UsageError: an impossible number.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    value_in_key: bool = False
    tokens_per_entry: int = 1

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "key_dim", "value_dim", "tokens_per_entry"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        boolean("value_in_key", self.value_in_key)
        if self.value_in_key and self.value_dim > self.key_dim:
            raise UsageError(
                f"value_dim: a value inside the key has at most key_dim={self.key_dim} numbers, "
                f"got {self.value_dim}"
            )

    @property
    def stored_dim(self) -> int:
        """Numbers stored per head and entry."""
        return self.key_dim + (0 if self.value_in_key else self.value_dim)

    def entry_bytes(self, itemsize: int) -> int:
        """Bytes of one entry of one layer when a number takes `itemsize` bytes."""
        return self.num_kv_heads * self.stored_dim * itemsize


@dataclasses.dataclass(frozen=True)
class Stream:
    """One kind of entry that a layer stores.

    Attributes:
        layout: shape of an entry.
        kind: "placed" (blocks in host memory and a window ring on the device).

    Raises:
        UsageError: `layout` is none, or another kind.
    """

    layout: EntryLayout
    kind: str = "placed"

    def __post_init__(self) -> None:
        instance("layout", self.layout, EntryLayout, "an EntryLayout")
        instance("kind", self.kind, str, "'placed'")
        if self.kind != "placed":
            raise UsageError(f"kind: only 'placed' streams are supported, got {shown(self.kind)}")


def check_window(window: Any) -> int:
    """D, if a window may have it.

    Raises:
        UsageError: it may not.
    """
    if not isinstance(window, int | np.integer) or window not in WINDOW_SIZES:
        raise UsageError(f"window: expected one of {WINDOW_SIZES}, got {shown(window)}")
    return int(window)


def check_layers(streams: Any) -> None:
    """Checks that `streams` has one sequence of streams a layer, and a layer at all.

    Raises:
        UsageError: it has not.
    """
    expected = (
        "streams: expected one list of streams a layer, such as [[Stream(layout)]] * num_layers"
    )
    if not isinstance(streams, Sequence) or not streams:
        raise UsageError(f"{expected}, got {shown(streams)}")
    for i, layer in enumerate(streams):
        is_layer = isinstance(layer, Sequence) and layer
        if not is_layer or not all(isinstance(stream, Stream) for stream in layer):
            raise UsageError(f"{expected}, got {shown(layer)} for layer {i}")


def byte_order(region: Region) -> ByteOrder:
    """Byte order that the reader of `region` wants its blocks in."""
    if region not in (Region.UNPINNED, Region.PINNED):
        raise ValueError(f"region: blocks are stored in unpinned or pinned memory, got {region}")
    return ByteOrder.TILES if region is Region.UNPINNED else ByteOrder.ROWS


def pack(entries: Entries, layout: EntryLayout, block: int, order: ByteOrder) -> jax.Array:
    """Lays n whole blocks out in the byte order of their region.

    Args:
        entries: n * block entries of one sequence, oldest first, in the type that the pool stores.
        layout: their shape.
        block: D, entries in a block; a multiple of 32.
        order: byte order of the region that the blocks go to.

    Returns:
        [n, G, D * stored_dim]: per block and head first the keys, then the values.
    """
    if order is ByteOrder.ROWS:
        parts = [_rows(entries.key, block)]
    elif layout.value_in_key:
        parts = [_panel_tiles(entries.key, block)]
    else:
        parts = [_key_tiles(entries.key, block)]
    if not layout.value_in_key:
        assert entries.value is not None
        by_head = _rows if order is ByteOrder.ROWS else _value_tiles
        parts.append(by_head(entries.value, block))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def _rows(x_NGK: jax.Array, block: int) -> jax.Array:
    num, heads, dim = x_NGK.shape
    x_nDGK = x_NGK.reshape(num // block, block, heads, dim)
    return x_nDGK.swapaxes(1, 2).reshape(num // block, heads, block * dim)


def _key_tiles(x_NGK: jax.Array, block: int) -> jax.Array:
    num, heads, dim = x_NGK.shape
    n, pair = num // block, 4 // x_NGK.dtype.itemsize
    parts = []
    for first, width in ((0, pair), (dim - dim % pair, 1)):  # dims in pairs, then what is left
        dims = x_NGK[..., first : first + (dim - first) // width * width]
        if dims.shape[-1] and (width == pair or dim % pair):
            rows = dims.reshape(n, block // LANES, LANES, heads, -1, width)
            rows = rows.transpose(0, 3, 1, 4, 2, 5)  # [n, G, D / 16, K / P, 16, P]
            parts.append(rows.reshape(n, heads, block // LANES, -1))
    return jnp.concatenate(parts, axis=-1).reshape(n, heads, block * dim)


def _value_tiles(x_NGV: jax.Array, block: int) -> jax.Array:
    num, heads, dim = x_NGV.shape
    whole = dim - dim % PANEL_DIMS
    parts = []
    if whole:  # each panel like a head of its own
        panels = _panel_tiles(x_NGV[..., :whole].reshape(num, -1, PANEL_DIMS), block)
        parts.append(panels.reshape(num // block, heads, -1))
    if whole < dim:
        parts.append(_panel_tiles(x_NGV[..., whole:], block))
    return jnp.concatenate(parts, axis=-1)


def _panel_tiles(x_NGV: jax.Array, block: int) -> jax.Array:
    num, heads, dim = x_NGV.shape
    n, pair = num // block, 4 // x_NGV.dtype.itemsize
    chunks = block // TILE_ENTRIES
    parts = []
    for first, width in ((0, LANES), (dim - dim % LANES, dim % LANES)):
        tiles = (dim - first) // width if width else 0
        if tiles:
            dims = x_NGV[..., first : first + tiles * width]
            rows = dims.reshape(n, chunks, TILE_ENTRIES // pair, pair, heads, tiles, width)
            rows = rows.transpose(0, 4, 1, 5, 2, 6, 3)  # [n, G, D / 32, tiles, 32 / P, 16, P]
            parts.append(rows.reshape(n, heads, chunks, -1))
    return jnp.concatenate(parts, axis=-1).reshape(n, heads, block * dim)


def unpack(
    blocks: jax.Array, layout: EntryLayout, block: int, order: ByteOrder = ByteOrder.ROWS
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of blocks: the inverse of `pack`.

    Args:
        blocks: [..., G, D * stored_dim].
        layout: shape of an entry.
        block: D.
        order: their byte order.

    Returns:
        Keys [..., G, D, K] and values [..., G, D, V].
    """
    if order is ByteOrder.TILES:
        blocks = jnp.take(blocks, _tiles_to_rows(layout, block, blocks.dtype.itemsize), axis=-1)
    split = block * layout.key_dim
    key = blocks[..., :split].reshape(*blocks.shape[:-1], block, layout.key_dim)
    if layout.value_in_key:
        return key, key[..., : layout.value_dim]
    return key, blocks[..., split:].reshape(*blocks.shape[:-1], block, layout.value_dim)


def _tiles_to_rows(layout: EntryLayout, block: int, itemsize: int) -> npt.NDArray[np.int64]:
    """Where each number of a head in row order lies in tile order."""
    one_head = dataclasses.replace(layout, num_kv_heads=1)
    size = block * layout.stored_dim
    number_type = {2: jnp.uint16, 4: jnp.uint32}[itemsize]
    lies_at = np.zeros(size, np.int64)
    # Which row number lies where, digit by digit: 16 bits cannot count a large head's numbers.
    for shift in range(0, size.bit_length(), 8):
        digit = (np.arange(size) >> shift & 0xFF).astype(number_type)
        split = block * layout.key_dim
        key = jnp.asarray(digit[:split].reshape(block, 1, -1))
        value = None if layout.value_in_key else jnp.asarray(digit[split:].reshape(block, 1, -1))
        packed = pack(Entries(key, value), one_head, block, ByteOrder.TILES)
        lies_at |= np.asarray(packed).reshape(-1).astype(np.int64) << shift
    return np.argsort(lies_at)
