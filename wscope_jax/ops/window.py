"""The WINDOW region: rings of the newest entries, on the device."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from wscope_jax.layout import Entries, EntryLayout
from wscope_jax.ops import pallas
from wscope_jax.ops.reference import masked_attention
from wscope_jax.partial import Partial
from wscope_jax.views import Rings


def _write(put: Callable[[Array, Array], Array], ring: Array, new: Array) -> Array:
    """`put(ring, new)`, where the ring lies if it is donated.

    To write bfloat16 XLA:CPU widens the whole ring to float32 and narrows it again: 10 to 100 times as long.
    So there words of the same size are written.
    """
    new = new.astype(ring.dtype)

    def in_words(ring: Array, new: Array) -> Array:
        word = jnp.dtype(f"uint{8 * ring.dtype.itemsize}")
        words = put(*(jax.lax.bitcast_convert_type(x, word) for x in (ring, new)))
        return jax.lax.bitcast_convert_type(words, ring.dtype)

    out: Array = jax.lax.platform_dependent(ring, new, cpu=in_words, default=put)
    return out


def append(
    rings: Rings, entries: Entries, length: Int32[Array, " B"], active: Bool[Array, " B"]
) -> Rings:
    """Writes one new entry per active row at ring index `length % capacity`, in place when the rings are donated.

    Rings of other rows stay as they are: a prompt may be on its way into them.
    """
    rows = jnp.arange(length.shape[0])
    capacity = rings.key.shape[1]
    at = jnp.where(active, length % capacity, capacity)  # beyond the end: dropped

    def put(ring: Array, new: Array) -> Array:
        return ring.at[rows, at].set(new, mode="drop")

    key = _write(put, rings.key, entries.key)
    if rings.value is None:
        return Rings(key, None)
    assert entries.value is not None
    return Rings(key, _write(put, rings.value, entries.value))


def fill(
    rings: Rings,
    entries: Entries,
    row: Int32[Array, ""],
    start: Int32[Array, ""],
    length: Int32[Array, ""],
) -> Rings:
    """Writes entries start .. length - 1 of a prompt into the ring of one row; the rest of the ring is zeroed."""
    capacity = rings.key.shape[1]
    # Ring index j holds the one entry e >= start with e % capacity == j.
    entry = start + (jnp.arange(capacity) - start) % capacity
    is_written = (entry < length)[:, None, None]
    source = jnp.clip(entry, 0, entries.key.shape[0] - 1)

    def put(ring: Array, new: Array) -> Array:
        out: Array = jax.lax.dynamic_update_index_in_dim(ring, new, row, 0)
        return out

    def write(ring: Array, new: Array) -> Array:
        return _write(put, ring, jnp.where(is_written, new[source], 0))

    key = write(rings.key, entries.key)
    if rings.value is None:
        return Rings(key, None)
    assert entries.value is not None
    return Rings(key, write(rings.value, entries.value))


def oldest_block(
    rings: Rings, row: Int32[Array, ""], start: Int32[Array, ""], block: int
) -> Entries:
    """Entries start .. start + block - 1 of one row, oldest first: what an eviction takes."""
    at = (start + jnp.arange(block)) % rings.key.shape[1]
    value = None if rings.value is None else rings.value[row, at]
    return Entries(rings.key[row, at], value)


def window_attention(
    q: Float[Array, "B H K"],
    rings: Rings,
    start: Int32[Array, " B"],
    end: Int32[Array, " B"],
    *,
    layout: EntryLayout,
    scale: float,
) -> Partial:
    """Attention over the entries start .. end - 1 that the window of each row answers for."""
    part: Partial = jax.lax.platform_dependent(
        q,
        rings,
        start,
        end,
        default=functools.partial(attend_rings, layout=layout, scale=scale),
        cuda=functools.partial(pallas.attend_rings, layout=layout, scale=scale),
    )
    return part


def attend_rings(
    q: Float[Array, "B H K"],
    rings: Rings,
    start: Int32[Array, " B"],
    end: Int32[Array, " B"],
    *,
    layout: EntryLayout,
    scale: float,
) -> Partial:
    """`window_attention` in plain JAX."""
    capacity = rings.key.shape[1]
    offset = (jnp.arange(capacity)[None, :] - start[:, None]) % capacity
    mask = offset < (end - start)[:, None]
    key = rings.key.swapaxes(1, 2)
    value = key[..., : layout.value_dim] if rings.value is None else rings.value.swapaxes(1, 2)
    return masked_attention(q, key, value, mask, scale=scale)
