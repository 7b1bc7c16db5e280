"""What one token stores in one layer, and how whole blocks of it lie in memory.

Everything that differs between grouped-query attention, latent attention and compressed attention is a value of
`EntryLayout`; how the numbers are stored (bfloat16, float32) belongs to the pool that holds them.
"""

import dataclasses
import enum
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp

WINDOW_SIZES: Final = (32, 64, 128, 256, 512)  # entries in a block; 256 is what is tuned
WINDOW_SPARE: Final = (
    48  # ring entries beyond a block, so that decoding goes on while an eviction is under way
)


class Region(enum.StrEnum):
    """Where an entry lives. The first two are in host memory, the last two on the device."""

    UNPINNED = "unpinned"  # attended by the CPU where it lies
    PINNED = "pinned"  # streamed to the device at full link speed
    WINDOW = "window"  # the newest entries of a sequence, not placed yet
    PING_PONG = "ping_pong"  # two slots that streamed blocks pass through


class ByteOrder(enum.IntEnum):
    """Order of a block's bytes, named by the reader that wants it."""

    ROWS = 0  # [G][K rows: D x key_dim | V rows: D x value_dim]


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
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    value_in_key: bool = False
    tokens_per_entry: int = 1

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "key_dim", "value_dim", "tokens_per_entry"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.value_in_key and self.value_dim > self.key_dim:
            raise ValueError(
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
    """

    layout: EntryLayout
    kind: str = "placed"

    def __post_init__(self) -> None:
        if self.kind != "placed":
            raise NotImplementedError(
                f"kind: only 'placed' streams are supported, got {self.kind!r}"
            )


def byte_order(region: Region) -> ByteOrder:
    """Byte order that the reader of `region` wants its blocks in."""
    if region not in (Region.UNPINNED, Region.PINNED):
        raise ValueError(f"region: blocks are stored in unpinned or pinned memory, got {region}")
    return ByteOrder.ROWS


def pack(entries: Entries, layout: EntryLayout, block: int, order: ByteOrder) -> jax.Array:
    """Lays n whole blocks out in the byte order of their region.

    Args:
        entries: n * block entries of one sequence, oldest first.
        layout: their shape.
        block: D, entries in a block.
        order: byte order of the region that the blocks go to.

    Returns:
        [n, G, D * stored_dim]: per block and head first the keys, then the values.
    """
    if order is not ByteOrder.ROWS:
        raise NotImplementedError(f"order: cannot pack {order!r}")

    def by_head(x_NGK: jax.Array) -> jax.Array:
        num, heads, dim = x_NGK.shape
        x_nDGK = x_NGK.reshape(num // block, block, heads, dim)
        return x_nDGK.swapaxes(1, 2).reshape(num // block, heads, block * dim)

    parts = [by_head(entries.key)]
    if not layout.value_in_key:
        assert entries.value is not None
        parts.append(by_head(entries.value))
    return jnp.concatenate(parts, axis=-1)


def unpack(blocks: jax.Array, layout: EntryLayout, block: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values of blocks in row order: the inverse of `pack` with `ByteOrder.ROWS`.

    Args:
        blocks: [..., G, D * stored_dim].
        layout: shape of an entry.
        block: D.

    Returns:
        Keys [..., G, D, K] and values [..., G, D, V].
    """
    split = block * layout.key_dim
    key = blocks[..., :split].reshape(*blocks.shape[:-1], block, layout.key_dim)
    if layout.value_in_key:
        return key, key[..., : layout.value_dim]
    return key, blocks[..., split:].reshape(*blocks.shape[:-1], block, layout.value_dim)
