"""The CPU's attention on ordinary arrays, without a cache."""

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from wscope_jax import _ffi, arguments, devices
from wscope_jax.arguments import array, integer, query_heads
from wscope_jax.errors import UsageError
from wscope_jax.layout import TILE_ENTRIES, ByteOrder, Entries, EntryLayout
from wscope_jax.ops.packing import pack
from wscope_jax.partial import Partial, merge

HOST_ATTENTION: Final = "wscope_host_attention"
WORD_BITS: Final = 32
MOST_BLOCK: Final = 1 << 16  # entries; every row is padded to whole blocks


def host_attention(
    q: Float[Array, "B H K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S G V"] | None,
    lengths: Integer[Array, " B"],
    *,
    scale: float | None = None,
    value_dim: int | None = None,
    select: Bool[Array, "B S"] | None = None,
    sink: Float[Array, " H"] | None = None,
    block: int = 256,
) -> Partial:
    """Attention of one query token per row over arrays, by the CPU's kernels and workers.

    Entries are packed into blocks first, which takes longer than to attend to them once: this is for tests, for
    benchmarks and for arrays that are attended to where they are. Works inside `jax.jit` on the platform "cpu"; has no
    gradient and cannot be batched by `jax.vmap`.

    Args:
        q: not scaled; query head h reads kv head h // (H / G).
        key: S entries a row, of which the first `lengths[b]` count; float32 or bfloat16. All must be finite, those that
            do not count too: what else comes of them is not defined.
        value: one per key, float32 or bfloat16, or None where the value is the first `value_dim` numbers of the key.
        lengths: entries that count in each row; all S if it is more, none if it is negative.
        scale: a positive Python number, applied to the scores in float32, in whose range it is; K ** -0.5 unless given.
        value_dim: V, where `value` is None.
        select: entries that count, besides `lengths`: a gathered list as a mask.
        sink: one more logit per head that takes weight and gives nothing; not scaled.
        block: entries in a block, a multiple of 32, at most 65,536.

    Returns:
        o [B, H, V] and lse [B, H] in float32; 0 and -inf for a row where nothing counts. The same bits each time for
        one number of workers and one instruction set; others add in another order. With bfloat16 keys some instruction
        sets round queries and weights to bfloat16 (docs/kernel.md).

    Raises:
        UsageError: an argument of another type or shape.
    """
    _check(q, key, value, lengths, select, sink, block)
    if _ffi.num_workers() == 0:
        _ffi.start_workers(devices.num_workers(None))
    num_rows, num_entries, num_kv_heads, key_dim = key.shape
    width = key_dim if value is None else value.shape[-1]
    if value_dim is not None:
        width = integer("value_dim", value_dim, 1 if value is None else width, width)
    scale = arguments.scale(key_dim**-0.5 if scale is None else scale)
    layout = EntryLayout(
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=width,
        value_in_key=value is None,
    )
    num_blocks = -(-num_entries // block)
    pad = ((0, 0), (0, num_blocks * block - num_entries))

    def padded(x: Array) -> Array:
        x = jnp.pad(x, (*pad, (0, 0), (0, 0)))
        return x.reshape(num_rows * num_blocks * block, *x.shape[2:])

    entries = Entries(padded(key), None if value is None else padded(value.astype(key.dtype)))
    blocks = pack(entries, layout, block, ByteOrder.TILES)
    lengths = jnp.asarray(lengths)  # NumPy's int64 is int32 here.
    # Cut before it is cast, for uint32 goes beyond int32; as a number of its type, for int8 ends at 127.
    most = min(num_entries, int(jnp.iinfo(lengths.dtype).max))  # type: ignore[no-untyped-call]
    kept = jnp.minimum(lengths, jnp.asarray(most, lengths.dtype)).astype(jnp.int32)
    counts = jnp.arange(num_blocks * block)[None, :] < kept[:, None]
    if select is not None:
        counts &= jnp.pad(select, pad)
    bits = counts.reshape(num_rows, -1, WORD_BITS).astype(jnp.uint32)
    shifts = jnp.arange(WORD_BITS, dtype=jnp.uint32)[None, None, :]
    words = (bits << shifts).sum(-1, dtype=jnp.uint32)
    shape = (num_rows, q.shape[1], width)
    call = jax.ffi.ffi_call(
        HOST_ATTENTION,
        (
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape[:2], jnp.float32),
        ),
    )
    o, lse = call(
        q,
        blocks.reshape(num_rows, num_blocks, *blocks.shape[1:]),
        words,
        num_kv_heads=np.int32(num_kv_heads),
        key_dim=np.int32(key_dim),
        value_dim=np.int32(width),
        value_in_key=np.int32(value is None),
        block=np.int32(block),
        scale=np.float32(scale),
    )
    partial = Partial(o, lse)
    if sink is None:
        return partial
    logits = jnp.broadcast_to(sink.astype(jnp.float32)[None, :], lse.shape)
    return merge(partial, Partial(jnp.zeros_like(o), logits))


def _check(q: Any, key: Any, value: Any, lengths: Any, select: Any, sink: Any, block: Any) -> None:
    """Raises UsageError for what is no array of its shape, and for another block."""
    array("q", q, "float", "B", "H", "K")
    num_rows, _, key_dim = q.shape
    array("key", key, "float", num_rows, "S", "G", key_dim)
    _check_numbers("q", q)
    _check_numbers("key", key)
    if value is not None:
        array("value", value, "float", *key.shape[:3], "V")
        _check_numbers("value", value)
    query_heads(q, key.shape[2])
    array("lengths", lengths, "int", num_rows)
    if select is not None:
        array("select", select, "bool", num_rows, key.shape[1])
    if sink is not None:
        array("sink", sink, "float", q.shape[1])
    if integer("block", block, TILE_ENTRIES, MOST_BLOCK) % TILE_ENTRIES:
        raise UsageError(f"block: expected a multiple of {TILE_ENTRIES}, got {block}")


def _check_numbers(name: str, floats: Any) -> None:
    """Of a type that is stored; there may be no entries, but not no rows, heads or dims."""
    if str(floats.dtype) not in ("float32", "bfloat16"):
        raise UsageError(f"{name}: expected float32 or bfloat16, got {floats.dtype}")
    if 0 in (floats.shape[0], *floats.shape[-2:]):
        raise UsageError(f"{name}: expected rows, heads and dims of at least 1, got {floats.shape}")
