"""The PINNED region: chunks of it pass through the PING-PONG slots and are attended there."""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from wscope_jax.layout import EntryLayout, unpack
from wscope_jax.ops import host, pallas
from wscope_jax.ops.joining import join_blocks
from wscope_jax.ops.reference import masked_attention
from wscope_jax.partial import Partial, empty_partial, merge

PARTS_BYTES: Final = 32 << 20  # of partials of blocks that wait to be joined

Carry = tuple[Partial, Array, Array]  # partials of blocks, slots, order


def attend_chunk(
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
) -> Partial:
    """Attention over the blocks of one chunk, each by the row that owns it.

    Args:
        q: one query token per row.
        slots: PING-PONG region; blocks that nobody owns may hold anything.
        index: the slot that holds the chunk.
        owner: row of each block in each turn; outside [0, B) = nobody.
        turn: the chunk's.
        parts: partials [turns, C, H, V] of the blocks of all turns.
        layout: shape of an entry.
        block: D.
        scale: applied to the scores in float32.

    Returns:
        `parts` with those of the turn.
    """
    sizes: dict[str, Any] = {"layout": layout, "block": block, "scale": scale}
    out: Partial = jax.lax.platform_dependent(
        q,
        slots,
        index,
        owner,
        turn,
        parts,
        default=functools.partial(attend_blocks, **sizes),
        cuda=functools.partial(pallas.attend_blocks, **sizes),
    )
    return out


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
) -> Partial:
    """`attend_chunk` in plain JAX."""
    num_rows = q.shape[0]
    owner_C = jax.lax.dynamic_index_in_dim(owner, turn, keepdims=False)
    is_owned = (owner_C >= 0) & (owner_C < num_rows)
    chunk = jax.lax.dynamic_index_in_dim(slots, index, keepdims=False)
    key, value = unpack(chunk, layout, block)
    mask = jnp.broadcast_to(is_owned[:, None], (owner_C.shape[0], block))
    part = masked_attention(q[jnp.clip(owner_C, 0, num_rows - 1)], key, value, mask, scale=scale)
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=turn, axis=0)
    return Partial(put(parts.o, part.o), put(parts.lse, part.lse))


def streamed_attention(
    q: Float[Array, "B H K"],
    slots: Float[Array, "slots C G E"],
    owner: Int32[Array, "turns C"],
    order: Int32[Array, ""],
    *,
    turn: int,
    layout: EntryLayout,
    block: int,
    scale: float,
    engine: int,
) -> tuple[Partial, Float[Array, "slots C G E"], Int32[Array, ""]]:
    """Attention over the PINNED blocks of one layer, chunk by chunk.

    The number of turns is the static length of a scan: a loop of unknown length would make the host wait for the
    device at every turn.

    Args:
        q: one query token per row.
        slots: PING-PONG region; overwritten in place.
        owner: row of each slot in each turn.
        order: see `ops.host`.
        turn: turns made before in this program; it says which slot the first chunk goes to.
        layout: shape of an entry.
        block: D.
        scale: applied to the scores in float32.
        engine: id of the step queue.
    """
    num_turns, num_slots = owner.shape
    size = num_slots * q.shape[1] * layout.value_dim * 4
    group = _most_turns(num_turns, size)
    attend = functools.partial(attend_chunk, layout=layout, block=block, scale=scale)

    def take_turn(carry: Carry, i: Array, first: Array, owner_TC: Array) -> tuple[Carry, None]:
        parts, slots, order = carry
        slots, lse, order = host.load(slots, parts.lse, order, engine=engine)
        index = (turn + first + i) % slots.shape[0]
        return (attend(q, slots, index, owner_TC, i, Partial(parts.o, lse)), slots, order), None

    def take_group(
        carry: tuple[Partial, Carry], turns: tuple[Array, Array]
    ) -> tuple[tuple[Partial, Carry], None]:
        so_far, inner = carry
        first, owner_TC = turns
        step = functools.partial(take_turn, first=first, owner_TC=owner_TC)
        inner, _ = jax.lax.scan(step, inner, jnp.arange(group, dtype=jnp.int32))
        parts = inner[0]
        flat = Partial(parts.o.reshape(-1, *parts.o.shape[2:]), parts.lse.reshape(-1, q.shape[1]))
        return (merge(so_far, join_blocks(flat, owner_TC.reshape(-1), q.shape[0])), inner), None

    parts = _first_partials((group, num_slots, q.shape[1]), layout.value_dim, order)
    start = (empty_partial(q.shape[0], q.shape[1], layout.value_dim), (parts, slots, order))
    turns = (
        jnp.arange(0, num_turns, group, dtype=jnp.int32),
        owner.reshape(-1, group, num_slots),
    )
    if group == num_turns:
        (part, (_, slots, order)), _ = take_group(start, jax.tree.map(lambda x: x[0], turns))
    else:
        (part, (_, slots, order)), _ = jax.lax.scan(take_group, start, turns)
    return part, slots, order


def _first_partials(blocks: tuple[int, ...], value_dim: int, order: Int32[Array, ""]) -> Partial:
    """Empty partials of blocks, made when the layer comes.

    `order` is zero, which XLA cannot know: it would make those of all layers at once, and keep them.
    """
    zero = order.astype(jnp.float32)
    o = jnp.broadcast_to(zero, (*blocks, value_dim))
    return Partial(o, jnp.broadcast_to(zero - jnp.inf, blocks))


def _most_turns(num_turns: int, turn_bytes: int) -> int:
    """The most turns whose partials are kept until they are joined: a divisor of `num_turns`.

    To join after each turn would take ten small kernels a turn; to keep all would take memory as the context does.
    """
    most = max(1, PARTS_BYTES // turn_bytes)
    return max(n for n in range(1, num_turns + 1) if num_turns % n == 0 and n <= most)
