"""GPU kernels of the decode step: attention of one query token per row over rings and over streamed blocks.

Each stored byte is read once: a program takes one kv head and all query heads that read it. Products are exact for
float32 and sums are float32. Their namesakes in `ops.window` and `ops.streamed` are
the oracles, and what runs on other platforms.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32

from wscope_jax.layout import EntryLayout
from wscope_jax.partial import Partial
from wscope_jax.views import Rings

LEAST: Final = 16  # rows and columns of the smallest product of the tensor cores
LOWEST: Final = -3.4e38  # a float32 below every score that counts
STEP_ENTRIES: Final = 64  # taken at a time, at most
SPLIT_ENTRIES: Final = (
    1024  # of a ring in one program: a long one is cut, so that all multiprocessors have work
)

Load = Callable[[Any], tuple[Any, Any]]


def _padded(size: int) -> int:
    """The power of two that a kernel takes for `size`."""
    return max(LEAST, 1 << (size - 1).bit_length())


def _params() -> pltriton.CompilerParams:
    return pltriton.CompilerParams(num_warps=4, num_stages=3)


def _by_kv_head(q: Float[Array, "B H K"], num_kv_heads: int) -> Float[Array, "B G P Kp"]:
    """Queries by the kv head that they read, padded with zeros to what a product takes."""
    num_rows, num_heads, key_dim = q.shape
    group = num_heads // num_kv_heads
    q = q.reshape(num_rows, num_kv_heads, group, key_dim)
    pad = (0, 0), (0, 0), (0, _padded(group) - group), (0, _padded(key_dim) - key_dim)
    return jnp.pad(q, pad)


def _dot(a: Any, b: Any, over: tuple[int, int]) -> Any:
    """Exact products of float32 (the default is TF32), float32 sums."""
    return jax.lax.dot_general(
        a,
        b,
        (((over[0],), (over[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _weighed(weight_PS: Any, value_SV: Any) -> Any:
    """The weighted sum of the values; a weight of bfloat16 is cut in two, so that it loses nothing that counts."""
    coarse_PS = weight_PS.astype(value_SV.dtype)
    sum_PV = _dot(coarse_PS, value_SV, (1, 0))
    if value_SV.dtype == jnp.float32:
        return sum_PV
    rest_PS = (weight_PS - coarse_PS.astype(jnp.float32)).astype(value_SV.dtype)
    return sum_PV + _dot(rest_PS, value_SV, (1, 0))


def _attend(
    q_PK: Any, load: Load, first: Any, end: Any, step: int, width: int, scale: float
) -> tuple[Any, Any]:
    """Softmax attention over entries [first, end), `step` at a time: normalised o [P, width] and lse [P].

    `load` gives keys [step, K] and values [step, width] of an index [step]; what it gives for entries from `end`
    on does not count, but must be finite.
    """
    size = q_PK.shape[0]

    def take(i: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        o_PV, top_P, total_P = carry
        entry_S = first + i * step + jnp.arange(step, dtype=jnp.int32)
        key_SK, value_SV = load(entry_S)
        scores_PS = _dot(q_PK, key_SK, (1, 1))
        scores_PS = jnp.where((entry_S < end)[None, :], scores_PS * scale, -jnp.inf)
        new_top_P = jnp.maximum(top_P, jnp.max(scores_PS, axis=1))
        shrink_P = jnp.exp(top_P - new_top_P)
        weight_PS = jnp.exp(scores_PS - new_top_P[:, None])
        total_P = total_P * shrink_P + jnp.sum(weight_PS, axis=1)
        weighed_PV = _weighed(weight_PS, value_SV)
        return o_PV * shrink_P[:, None] + weighed_PV, new_top_P, total_P

    # Every step has an entry that counts, so no maximum stays at the start value, which is finite against NaNs.
    start = (
        jnp.zeros((size, width), jnp.float32),
        jnp.full((size,), LOWEST, jnp.float32),
        jnp.zeros((size,), jnp.float32),
    )
    num_steps = jnp.maximum(0, (end - first + step - 1) // step)
    o_PV, top_P, total_P = jax.lax.fori_loop(0, num_steps, take, start)
    is_empty_P = total_P == 0
    safe_P = jnp.where(is_empty_P, 1.0, total_P)
    lse_P = jnp.where(is_empty_P, -jnp.inf, top_P + jnp.log(safe_P))
    return o_PV / safe_P[:, None], lse_P


def _ring_kernel(
    start_ref: Any,
    end_ref: Any,
    q_ref: Any,
    *refs: Any,
    layout: EntryLayout,
    capacity: int,
    step: int,
    scale: float,
) -> None:
    row, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    *ring_refs, o_ref, lse_ref = refs
    start = start_ref[row]
    first = start + split * SPLIT_ENTRIES
    end = jnp.minimum(end_ref[row], first + SPLIT_ENTRIES)
    dtype = q_ref.dtype

    def load(entry_S: Any) -> tuple[Any, Any]:
        at_S1 = (entry_S % capacity)[:, None]
        counts_S1 = (entry_S < end)[:, None]

        def part(ref: Any, dim: int) -> Any:
            dims_1K = jnp.arange(_padded(dim), dtype=jnp.int32)[None, :]
            place = ref.at[row, at_S1, head, dims_1K]
            return pltriton.load(place, mask=counts_S1 & (dims_1K < dim), other=0.0)

        key = part(ring_refs[0], layout.key_dim)
        value = part(ring_refs[-1], layout.value_dim)
        return key.astype(dtype), value

    o_PV, lse_P = _attend(q_ref[...], load, first, end, step, _padded(layout.value_dim), scale)
    o_ref[...] = o_PV
    lse_ref[...] = lse_P


@functools.partial(jax.jit, static_argnames=("layout", "scale", "interpret"))
def attend_rings(
    q: Float[Array, "B H K"],
    rings: Rings,
    start: Int32[Array, " B"],
    end: Int32[Array, " B"],
    *,
    layout: EntryLayout,
    scale: float,
    interpret: bool = False,
) -> Partial:
    """Attention over the entries start .. end - 1 that the window of each row answers for.

    Args:
        q: one query token per row.
        rings: of one layer.
        start: oldest entry of each row's window.
        end: the entry after its newest.
        layout: shape of an entry.
        scale: applied to the scores in float32.
        interpret: run as plain JAX, for tests without a GPU.
    """
    num_rows, capacity, num_kv_heads, _ = rings.key.shape
    q_BGPK = _by_kv_head(q, num_kv_heads)
    rows, width = q_BGPK.shape[2], _padded(layout.value_dim)
    splits = -(-capacity // SPLIT_ENTRIES)
    stored = [rings.key] if rings.value is None else [rings.key, rings.value]
    kernel = functools.partial(
        _ring_kernel,
        layout=layout,
        capacity=capacity,
        step=min(STEP_ENTRIES, _padded(capacity)),
        scale=scale,
    )
    o, lse = pl.pallas_call(
        kernel,
        grid=(num_rows, num_kv_heads, splits),
        in_specs=[
            pl.no_block_spec,
            pl.no_block_spec,
            pl.BlockSpec((None, None, *q_BGPK.shape[2:]), lambda b, g, s: (b, g, 0, 0)),
            *[pl.no_block_spec] * len(stored),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, rows, width), lambda b, g, s: (b, s, g, 0, 0)),
            pl.BlockSpec((None, None, None, rows), lambda b, g, s: (b, s, g, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((num_rows, splits, num_kv_heads, rows, width), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, splits, num_kv_heads, rows), jnp.float32),
        ],
        compiler_params=_params(),
        interpret=interpret,
        name="attend_rings",
    )(start, end, q_BGPK, *stored)
    part = _unpadded(o, lse, q.shape[1] // num_kv_heads, layout.value_dim)
    return _join_splits(part)


def _unpadded(
    o: Float[Array, "N S G P Vp"], lse: Float[Array, "N S G P"], group: int, value_dim: int
) -> Partial:
    """Without what was added to the group and the value: o [N, S, H, V] and lse [N, S, H]."""
    num, splits = o.shape[:2]
    o = o[..., :group, :value_dim].reshape(num, splits, -1, value_dim)
    return Partial(o, lse[..., :group].reshape(num, splits, -1))


def _join_splits(part: Partial) -> Partial:
    """Attention over all splits, the second axis, in their order."""
    if part.lse.shape[1] == 1:
        return Partial(part.o[:, 0], part.lse[:, 0])
    top = part.lse.max(1)
    base = jnp.where(jnp.isneginf(top), 0.0, top)  # -inf minus -inf is a NaN
    weight = jnp.exp(part.lse - base[:, None])
    total = weight.sum(1)
    safe = jnp.where(total == 0, 1.0, total)
    o = (part.o * weight[..., None]).sum(1) / safe[..., None]
    return Partial(o, jnp.where(total == 0, -jnp.inf, base + jnp.log(safe)))


def _block_kernel(
    index_ref: Any,
    owner_ref: Any,
    q_ref: Any,
    slots_ref: Any,
    o_ref: Any,
    lse_ref: Any,
    *,
    layout: EntryLayout,
    block: int,
    step: int,
    scale: float,
) -> None:
    slot, head = pl.program_id(0), pl.program_id(1)
    num_rows = q_ref.shape[0]
    owner = owner_ref[slot]
    is_owned = (owner >= 0) & (owner < num_rows)
    row = jnp.where(is_owned, owner, jnp.int32(0))
    index = index_ref[0]
    q_PK = q_ref[row, head]

    def load(entry_S: Any) -> tuple[Any, Any]:
        def part(offset: int, stride: int, dim: int) -> Any:
            dims_1K = jnp.arange(_padded(dim), dtype=jnp.int32)[None, :]
            place = slots_ref.at[index, slot, head, offset + entry_S[:, None] * stride + dims_1K]
            if dim == _padded(dim):
                return pltriton.load(place)
            return pltriton.load(
                place, mask=jnp.broadcast_to(dims_1K < dim, (step, _padded(dim))), other=0.0
            )

        key = part(0, layout.key_dim, layout.key_dim)
        if layout.value_in_key:
            value = part(0, layout.key_dim, layout.value_dim)
        else:
            value = part(block * layout.key_dim, layout.value_dim, layout.value_dim)
        return key.astype(q_ref.dtype), value

    end = jnp.where(
        is_owned, jnp.int32(block), jnp.int32(0)
    )  # nothing is read of a slot that nobody owns
    o_PV, lse_P = _attend(q_PK, load, jnp.int32(0), end, step, _padded(layout.value_dim), scale)
    o_ref[...] = o_PV
    lse_ref[...] = lse_P


@functools.partial(jax.jit, static_argnames=("layout", "block", "scale", "interpret"))
def attend_blocks(
    q: Float[Array, "B H K"],
    slots: Float[Array, "2 C G E"],
    index: Int32[Array, ""],
    owner: Int32[Array, " C"],
    *,
    layout: EntryLayout,
    block: int,
    scale: float,
    interpret: bool = False,
) -> Partial:
    """Attention of each block of one PING-PONG slot by the row that owns it.

    Args:
        q: one query token per row.
        slots: the PING-PONG region, read where it is; what nobody owns may hold anything.
        index: 0 or 1, the slot.
        owner: row of each block; outside [0, B) = nobody.
        layout: shape of an entry.
        block: D.
        scale: applied to the scores in float32.
        interpret: run as plain JAX, for tests without a GPU.

    Returns:
        A partial per block, [C, H, V] and [C, H]; empty where nobody owns the block.
    """
    _, num_slots, num_kv_heads, _ = slots.shape
    q_BGPK = _by_kv_head(q, num_kv_heads)
    rows, width = q_BGPK.shape[2], _padded(layout.value_dim)
    kernel = functools.partial(
        _block_kernel, layout=layout, block=block, step=min(STEP_ENTRIES, block), scale=scale
    )
    o, lse = pl.pallas_call(
        kernel,
        grid=(num_slots, num_kv_heads),
        in_specs=[pl.no_block_spec] * 4,
        out_specs=[
            pl.BlockSpec((None, None, rows, width), lambda c, g: (c, g, 0, 0)),
            pl.BlockSpec((None, None, rows), lambda c, g: (c, g, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((num_slots, num_kv_heads, rows, width), jnp.float32),
            jax.ShapeDtypeStruct((num_slots, num_kv_heads, rows), jnp.float32),
        ],
        compiler_params=_params(),
        interpret=interpret,
        name="attend_blocks",
    )(index.reshape(1), owner, q_BGPK, slots)
    part = _unpadded(o[:, None], lse[:, None], q.shape[1] // num_kv_heads, layout.value_dim)
    return Partial(part.o[:, 0], part.lse[:, 0])
