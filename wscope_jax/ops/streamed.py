"""The PINNED region: chunks of it pass through the two PING-PONG slots and are attended there."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from wscope_jax.layout import EntryLayout, unpack
from wscope_jax.ops import host, pallas
from wscope_jax.ops.reference import masked_attention
from wscope_jax.partial import Partial


def attend_chunk(
    q: Float[Array, "B H K"],
    slots: Float[Array, "2 C G E"],
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
    parts = jax.lax.platform_dependent(
        q,
        slots,
        index,
        owner,
        turn,
        parts,
        default=functools.partial(attend_blocks, **sizes),
        cuda=functools.partial(pallas.attend_blocks, **sizes),
    )
    return parts


def attend_blocks(
    q: Float[Array, "B H K"],
    slots: Float[Array, "2 C G E"],
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


def join_blocks(part: Partial, owner: Int32[Array, " C"], num_rows: int) -> Partial:
    """Joins partials of blocks [C, H, V] to partials of rows [B, H, V].

    By a one-hot contraction, so equal inputs give equal bits.
    """
    owns_CB = owner[:, None] == jnp.arange(num_rows)[None, :]
    lse_CBH = jnp.where(owns_CB[:, :, None], part.lse[:, None, :], -jnp.inf)
    top_1BH = lse_CBH.max(0, keepdims=True)
    base_1BH = jnp.where(jnp.isneginf(top_1BH), 0.0, top_1BH)
    weight_CBH = jnp.exp(lse_CBH - base_1BH)
    total_BH = weight_CBH.sum(0)
    # Zero times a NaN is a NaN: what is broken in one row's blocks must not reach the others.
    is_finite_C = jnp.isfinite(part.o).all((1, 2))
    o_CHV = jnp.where(is_finite_C[:, None, None], part.o, 0.0)
    is_broken_B = (owns_CB & ~is_finite_C[:, None]).any(0)
    o_BHV = jnp.einsum("cbh,chv->bhv", weight_CBH, o_CHV, precision=jax.lax.Precision.HIGHEST)
    o_BHV = jnp.where(is_broken_B[:, None, None], jnp.nan, o_BHV)
    safe_BH = jnp.where(total_BH == 0, 1.0, total_BH)
    lse_BH = jnp.where(total_BH == 0, -jnp.inf, base_1BH[0] + jnp.log(safe_BH))
    return Partial(o=o_BHV / safe_BH[..., None], lse=lse_BH)


def streamed_attention(
    q: Float[Array, "B H K"],
    slots: Float[Array, "2 C G E"],
    owner: Int32[Array, "turns C"],
    order: Int32[Array, ""],
    *,
    turn: int,
    layout: EntryLayout,
    block: int,
    scale: float,
    engine: int,
) -> tuple[Partial, Float[Array, "2 C G E"], Int32[Array, ""]]:
    """Attention over the PINNED blocks of one layer, chunk by chunk.

    The number of turns is the static length of a scan: a loop of unknown length would make the host wait for the
    device at every turn.

    Args:
        q: one query token per row.
        slots: PING-PONG region; overwritten in place.
        owner: row of each slot in each turn.
        order: see `ops.host`.
        turn: turns made before in this program; the parity says which slot the first chunk goes to.
        layout: shape of an entry.
        block: D.
        scale: applied to the scores in float32.
        engine: id of the step queue.
    """
    num_turns, num_slots = owner.shape
    num_heads = q.shape[1]

    def take_turn(
        carry: tuple[Partial, Array, Array], i: Array
    ) -> tuple[tuple[Partial, Array, Array], None]:
        parts, slots, order = carry
        slots, lse, order = host.load(slots, parts.lse, order, engine=engine)
        parts = attend_chunk(
            q,
            slots,
            (turn + i) % 2,
            owner,
            i,
            Partial(parts.o, lse),
            layout=layout,
            block=block,
            scale=scale,
        )
        return (parts, slots, order), None

    # All turns write to one array, joined at the end: to join after each would take ten small kernels a turn.
    blocks = (num_turns, num_slots, num_heads)
    parts = Partial(jnp.zeros((*blocks, layout.value_dim)), jnp.full(blocks, -jnp.inf))
    turns = jnp.arange(num_turns, dtype=jnp.int32)
    (parts, slots, order), _ = jax.lax.scan(take_turn, (parts, slots, order), turns)
    flat = Partial(parts.o.reshape(-1, *parts.o.shape[2:]), parts.lse.reshape(-1, num_heads))
    return join_blocks(flat, owner.reshape(-1), q.shape[0]), slots, order
