"""GPU kernels of the decode step: attention of one query token per row over rings and over streamed blocks.

Each stored byte is read once: a program takes one kv head and all query heads that read it. Products are exact for
float32 and sums are float32. Their namesakes in `ops.window` and `ops.streamed` are
the oracles, and what runs on other platforms.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32

from wscope_jax.layout import EntryLayout
from wscope_jax.ops.tiling import Tiling, key_parts, padded
from wscope_jax.partial import Partial, join
from wscope_jax.views import Rings

LOWEST: Final = -3.4e38  # a float32 below every score that counts
# Of a ring in one program: a long one is cut, so that all multiprocessors have work.
SPLIT_ENTRIES: Final = 1024

Load = Callable[[Any], tuple[tuple[Any, ...], Any]]


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
    q_parts: Sequence[Any], load: Load, first: Any, end: Any, step: int, width: int, scale: float
) -> tuple[Any, Any]:
    """Softmax attention over entries [first, end), `step` at a time: normalised o [P, width] and lse [P].

    `load` gives the parts of the keys, each [step, dims], and the values [step, width] of an index [step]; what it
    gives for entries from `end` on does not count, but must be finite.
    """
    size, dtype = q_parts[0].shape[0], q_parts[0].dtype

    def take(i: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        o_PV, top_P, total_P = carry
        entry_S = first + i * step + jnp.arange(step, dtype=jnp.int32)
        keys, value_SV = load(entry_S)
        products = [
            _dot(q_PK, key_SK.astype(dtype), (1, 1))
            for q_PK, key_SK in zip(q_parts, keys, strict=True)
        ]
        scores_PS = functools.reduce(operator.add, products)
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


class _Heads:
    """The query heads of one program: reads their queries, writes their results, and nothing beyond the arrays."""

    def __init__(self, layout: EntryLayout, tiling: Tiling, head: Any, tile: Any) -> None:
        row_P = tile * tiling.rows + jnp.arange(tiling.rows, dtype=jnp.int32)
        self.layout = layout
        self.is_one_P = row_P < tiling.group
        self.head_P = head * tiling.group + row_P

    def queries(self, q_ref: Any, row: Any) -> list[Any]:
        """The parts of the queries, [P, dims] each, zeros for what is padding."""

        def part(offset: int, dim: int) -> Any:
            dims_1K = jnp.arange(padded(dim), dtype=jnp.int32)[None, :]
            place = q_ref.at[row, self.head_P[:, None], offset + dims_1K]
            return pltriton.load(
                place,
                mask=self.is_one_P[:, None] & (dims_1K < dim),
                other=jnp.zeros((), q_ref.dtype),
            )

        return [part(offset, dim) for offset, dim in key_parts(self.layout)]

    def write(self, o_PV: Any, lse_P: Any, o_ref: Any, lse_ref: Any, at: tuple[Any, ...]) -> None:
        """Writes the results to o [..., H, V] and lse [..., H] at the leading indices `at`."""
        dims_1V = jnp.arange(padded(self.layout.value_dim), dtype=jnp.int32)[None, :]
        mask_PV = self.is_one_P[:, None] & (dims_1V < self.layout.value_dim)
        pltriton.store(o_ref.at[(*at, self.head_P[:, None], dims_1V)], o_PV, mask=mask_PV)
        pltriton.store(lse_ref.at[(*at, self.head_P)], lse_P, mask=self.is_one_P)


def _results(lead: tuple[int, ...], num_heads: int, value_dim: int) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct((*lead, num_heads, value_dim), jnp.float32),
        jax.ShapeDtypeStruct((*lead, num_heads), jnp.float32),
    ]


def _ring_kernel(
    start_ref: Any,
    end_ref: Any,
    q_ref: Any,
    *refs: Any,
    layout: EntryLayout,
    capacity: int,
    tiling: Tiling,
    scale: float,
) -> None:
    row, head, tile, split = (pl.program_id(axis) for axis in range(4))
    *ring_refs, o_ref, lse_ref = refs
    heads = _Heads(layout, tiling, head, tile)
    first = start_ref[row] + split * SPLIT_ENTRIES
    end = jnp.minimum(end_ref[row], first + SPLIT_ENTRIES)

    def load(entry_S: Any) -> tuple[tuple[Any, ...], Any]:
        at_S1 = (entry_S % capacity)[:, None]
        counts_S1 = (entry_S < end)[:, None]

        def part(ref: Any, offset: int, dim: int) -> Any:
            dims_1K = jnp.arange(padded(dim), dtype=jnp.int32)[None, :]
            place = ref.at[row, at_S1, head, offset + dims_1K]
            return pltriton.load(place, mask=counts_S1 & (dims_1K < dim), other=0.0)

        keys = tuple(part(ring_refs[0], offset, dim) for offset, dim in key_parts(layout))
        return keys, keys[0] if layout.value_in_key else part(ring_refs[1], 0, layout.value_dim)

    queries, width = heads.queries(q_ref, row), padded(layout.value_dim)
    o_PV, lse_P = _attend(queries, load, first, end, tiling.step, width, scale)
    heads.write(o_PV, lse_P, o_ref, lse_ref, (row, split))


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
    tiling = Tiling.of(layout, q.shape[1], capacity, rings.key.dtype.itemsize)
    splits = -(-capacity // SPLIT_ENTRIES)
    stored = [rings.key] if rings.value is None else [rings.key, rings.value]
    kernel = functools.partial(
        _ring_kernel, layout=layout, capacity=capacity, tiling=tiling, scale=scale
    )
    o, lse = pl.pallas_call(
        kernel,
        grid=(num_rows, num_kv_heads, tiling.tiles, splits),
        in_specs=[pl.no_block_spec] * (3 + len(stored)),
        out_specs=[pl.no_block_spec] * 2,
        out_shape=_results((num_rows, splits), q.shape[1], layout.value_dim),
        compiler_params=tiling.params(layout.value_dim),
        interpret=interpret,
        name="attend_rings",
    )(start, end, q, *stored)
    return join(Partial(o, lse))


def _block_kernel(
    index_ref: Any,
    owner_ref: Any,
    turn_ref: Any,
    q_ref: Any,
    slots_ref: Any,
    _o_before: Any,
    _lse_before: Any,
    o_ref: Any,
    lse_ref: Any,
    *,
    layout: EntryLayout,
    block: int,
    tiling: Tiling,
    scale: float,
) -> None:
    slot, head, tile = (pl.program_id(axis) for axis in range(3))
    heads = _Heads(layout, tiling, head, tile)
    turn = turn_ref[0]
    owner = owner_ref[turn, slot]
    is_owned = (owner >= 0) & (owner < q_ref.shape[0])
    row = jnp.where(is_owned, owner, jnp.int32(0))
    index = index_ref[0]

    def load(entry_S: Any) -> tuple[tuple[Any, ...], Any]:
        def part(offset: int, stride: int, dim: int) -> Any:
            dims_1K = jnp.arange(padded(dim), dtype=jnp.int32)[None, :]
            place = slots_ref.at[index, slot, head, offset + entry_S[:, None] * stride + dims_1K]
            if dim == padded(dim):
                return pltriton.load(place)
            mask = jnp.broadcast_to(dims_1K < dim, (tiling.step, padded(dim)))
            return pltriton.load(place, mask=mask, other=0.0)

        keys = tuple(part(offset, layout.key_dim, dim) for offset, dim in key_parts(layout))
        if layout.value_in_key:
            return keys, keys[0]
        return keys, part(block * layout.key_dim, layout.value_dim, layout.value_dim)

    # Nothing is read of a slot that nobody owns.
    end = jnp.where(is_owned, jnp.int32(block), jnp.int32(0))
    queries, width = heads.queries(q_ref, row), padded(layout.value_dim)
    o_PV, lse_P = _attend(queries, load, jnp.int32(0), end, tiling.step, width, scale)
    heads.write(o_PV, lse_P, o_ref, lse_ref, (turn, slot))


@functools.partial(jax.jit, static_argnames=("layout", "block", "scale", "interpret"))
def attend_blocks(
    q: Float[Array, "B H K"],
    slots: Float[Array, "slots C G E"],
    index: Int32[Array, ""],
    owner: Int32[Array, "turns C"],
    turn: Int32[Array, ""],
    parts: Partial,
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
        index: the slot that holds the chunk.
        owner: row of each block in each turn; outside [0, B) = nobody.
        turn: the row of `owner` that counts.
        parts: partials [turns, C, H, V] of all turns; those of the turn are written, in place.
        layout: shape of an entry.
        block: D.
        scale: applied to the scores in float32.
        interpret: run as plain JAX, for tests without a GPU.

    Returns:
        `parts`; empty where nobody owns the block.
    """
    _, num_slots, num_kv_heads, _ = slots.shape
    tiling = Tiling.of(layout, q.shape[1], block, slots.dtype.itemsize)
    kernel = functools.partial(
        _block_kernel, layout=layout, block=block, tiling=tiling, scale=scale
    )
    o, lse = pl.pallas_call(
        kernel,
        grid=(num_slots, num_kv_heads, tiling.tiles),
        in_specs=[pl.no_block_spec] * 7,
        out_specs=[pl.no_block_spec] * 2,
        out_shape=[jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in parts],
        input_output_aliases={5: 0, 6: 1},
        compiler_params=tiling.params(layout.value_dim),
        interpret=interpret,
        name="attend_blocks",
    )(index.reshape(1), owner, turn.reshape(1), q, slots, *parts)
    return Partial(o, lse)
