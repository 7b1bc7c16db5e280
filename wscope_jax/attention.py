"""Attention over a cache that lives in four regions: the only functions that a model needs.

`attend` is one decode step of one layer: the CPU starts on its part, the device attends to the window and to what is
streamed, and three exact partial results over disjoint entries are merged. `attend_prompt` is the same for a whole
prompt, whose entries go straight to their final home. `evict` moves the oldest block of a row's window there.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from wscope_jax import arguments
from wscope_jax.arguments import array, instance, query_heads
from wscope_jax.errors import UsageError
from wscope_jax.layout import ByteOrder, Entries, EntryLayout
from wscope_jax.ops import host
from wscope_jax.ops.packing import pack
from wscope_jax.ops.prefill import causal_attention
from wscope_jax.ops.streamed import streamed_attention
from wscope_jax.ops.window import append, fill, oldest_block, window_attention
from wscope_jax.partial import Partial, empty_partial, merge
from wscope_jax.views import View, Views


def begin(
    q: Float[Array, "B H K"], view: View, *, scale: float
) -> tuple[Float[Array, "B H K"], View]:
    """Starts the host part of one layer's attention and returns at once.

    Args:
        q: one query token per row; not scaled.
        view: the layer's view.
        scale: static softmax scale, applied to the scores in float32 by every kernel.

    Returns:
        q as an alias, to be used by all later work, and the view.
    """
    if not view.spec.uses_host:
        return q, view
    with jax.named_scope("host_start"):
        q, order = host.host_start(
            q,
            view.shared.order,
            layout=view.layouts[0],
            block=view.spec.block,
            scale=scale,
            storage=view.spec.storage,
            engine=view.spec.engine,
        )
    return q, view.with_shared(order=order)


def end(
    q: Float[Array, "B H K"],
    entries: Entries,
    view: View,
    *,
    scale: float,
    sink: Float[Array, " H"] | None = None,
) -> tuple[Float[Array, "B H V"], View]:
    """Ends what `begin` started: window and streamed parts, the wait for the host's, the merge.

    Args:
        q: what `begin` returned.
        entries: the step's own entry of each row; it is appended to the window first.
        view: what `begin` returned.
        scale: as given to `begin`.
        sink: one more logit per head that takes weight and gives nothing; not scaled.

    Returns:
        The attention output in the dtype of q, and the view.
    """
    layout, spec = view.layouts[0], view.spec
    with jax.named_scope("window"):
        rings = append(view.rings[0], entries, view.shared.length, view.shared.active)
        near = window_attention(
            q, rings, view.shared.start, view.shared.length + 1, layout=layout, scale=scale
        )
    far = empty_partial(q.shape[0], q.shape[1], layout.value_dim)
    slots, order, turn = view.shared.slots, view.shared.order, view.turn
    if spec.uses_link:
        with jax.named_scope("streamed"):
            far, slots, order = streamed_attention(
                q,
                slots,
                view.shared.owner,
                order,
                turn=turn,
                layout=layout,
                block=spec.block,
                scale=scale,
                engine=spec.engine,
            )
        turn += view.shared.owner.shape[0]
    parts = [far, near]
    if spec.uses_host:
        with jax.named_scope("host_finish"):
            near, far, cpu, order = host.host_finish(near, far, order, engine=spec.engine)
        parts = [cpu, far, near]
    if sink is not None:
        lse = jnp.broadcast_to(sink.astype(jnp.float32), near.lse.shape)
        parts.append(Partial(jnp.zeros_like(near.o), lse))
    with jax.named_scope("merge"):
        o = merge(*parts).o.astype(q.dtype)
    shared = view.shared._replace(slots=slots, order=order)
    attended = view.attended + q.shape[0]
    return o, View((rings, *view.rings[1:]), shared, view.layouts, spec, turn, attended)


def attend(
    q: Float[Array, "B H K"],
    entries: Entries,
    view: View,
    *,
    scale: float,
    sink: Float[Array, " H"] | None = None,
) -> tuple[Float[Array, "B H V"], View]:
    """Attention of one new token per row over everything the cache holds of its sequence, and the token itself.

    Args:
        q: [B, H, K], rotated, not scaled; query head h reads kv head h // (H / G).
        entries: the new token's own entry in each row.
        view: the layer's view, `views[i]`; hand the returned one on with `views.put(i, view)`.
        scale: static softmax scale.
        sink: see `end`.

    Returns:
        o [B, H, V] in the dtype of q, and the view.

    Raises:
        UsageError: an argument of another type or shape.
    """
    _check(entries, view, scale)
    layout, num_rows = view.layouts[0], view.shared.length.shape[0]
    array("q", q, "float", num_rows, "H", layout.key_dim)
    _check_entries(entries, num_rows, layout)
    query_heads(q, layout.num_kv_heads)
    if sink is not None:
        array("sink", sink, "float", q.shape[1])
    q, view = begin(q, view, scale=scale)
    return end(q, entries, view, scale=scale, sink=sink)


def attend_prompt(
    q: Float[Array, "T H K"],
    entries: Entries,
    view: View,
    *,
    row: Int32[Array, ""],
    length: Int32[Array, ""],
    scale: float,
    attended: Entries | None = None,
) -> tuple[Float[Array, "T H V"], View]:
    """Causal attention over a prompt, and the write of its entries to their final home.

    Whole blocks go to the regions that the plan names, the newest rest to the window of `row`.

    Args:
        q: queries of all T tokens of one sequence; T is a multiple of the block.
        entries: their entries; tokens from `length` on are padding, may hold anything, and are stored nowhere.
        view: the layer's view.
        row: row of the batch that the sequence lives in.
        length: tokens that count, as `begin_prompt` was told: an operand, which nothing compares with that.
        scale: static softmax scale.
        attended: keys and values of all T tokens, of any dims and number of heads, where the queries are not made for
            the entries; they are used here and stored nowhere.

    Returns:
        o [T, H, V] in the dtype of q, and the view; V is that of `attended`, if given.

    Raises:
        UsageError: an argument of another type or shape.
    """
    _check(entries, view, scale)
    layout, spec = view.layouts[0], view.spec
    array("q", q, "float", "T", "H", layout.key_dim if attended is None else "K")
    _check_entries(entries, q.shape[0], layout)
    if attended is not None:
        instance("attended", attended, Entries, "Entries(key, value) or None")
        array("attended.key", attended.key, "float", q.shape[0], "G", q.shape[2])
        array("attended.value", attended.value, "float", q.shape[0], attended.key.shape[1], "V")
    for name, scalar in (("row", row), ("length", length)):
        array(name, scalar, "int")
    key, value = entries if attended is None else attended
    query_heads(q, key.shape[1])
    if q.shape[0] == 0 or q.shape[0] % spec.block:
        raise UsageError(
            f"q: expected tokens padded to a multiple of the block, {spec.block}, got {q.shape[0]}"
        )
    value = key[..., : layout.value_dim] if value is None else value
    # Padding gets no weight, but 0 times what is not finite would count.
    counts = jnp.arange(q.shape[0])[:, None, None] < length
    value = jnp.where(counts, value, jnp.zeros((), value.dtype))
    with jax.named_scope("prefill"):
        o = causal_attention(q, key, value, scale=scale).astype(q.dtype)
    stored = jax.tree.map(lambda x: x.astype(spec.storage), entries)
    with jax.named_scope("store"):
        view = store_blocks(stored, view)
    rings = fill(view.rings[0], stored, row, spec.window_start(length), length)
    return o, dataclasses.replace(view, rings=(rings, *view.rings[1:]))


def _check(entries: Any, view: Any, scale: Any) -> None:
    """Raises UsageError for what is no view, no entries or no number."""
    instance("entries", entries, Entries, "Entries(key, value)")
    instance("view", view, View, "a layer's view, such as views[i]")
    arguments.scale(scale)


def _check_entries(entries: Entries, num: int, layout: EntryLayout) -> None:
    """Raises UsageError for entries that are not `num` of this layout."""
    array("entries.key", entries.key, "float", num, layout.num_kv_heads, layout.key_dim)
    if layout.value_in_key:
        instance("entries.value", entries.value, type(None), "None: it is in the key")
    else:
        array("entries.value", entries.value, "float", num, layout.num_kv_heads, layout.value_dim)


def evict(
    views: Views, *, row: Int32[Array, ""], start: Int32[Array, ""], order: ByteOrder
) -> Int32[Array, ""]:
    """Stores the oldest window block of `row`, in all layers, where the plan says.

    The rings are read only: the window answers for these entries until the manager has seen the ticket.

    Args:
        views: of the cache.
        row: row of the batch.
        start: the block's first entry.
        order: byte order of the region that the block goes to.

    Returns:
        The order that the next program takes.
    """
    views = views.begin()
    for layer in range(len(views.layers)):
        view = views[layer]
        entries = oldest_block(view.rings[0], row, start, views.spec.block)
        views = views.put(layer, store_blocks(entries, view, (order,)))
    return views.shared.order


def store_blocks(entries: Entries, view: View, orders: tuple[ByteOrder, ...] | None = None) -> View:
    """Packs whole blocks once per byte order and calls `store` for each; the plan picks the blocks.

    Args:
        entries: of one sequence, oldest first, in the storage dtype; a multiple of the block.
        view: the layer's view.
        orders: byte orders to store in; None = those of all readers that the cache has.

    Returns:
        The view behind the stores.
    """
    order = view.shared.order
    for bytes_in in view.spec.store_orders if orders is None else orders:
        blocks = pack(entries, view.layouts[0], view.spec.block, bytes_in)
        order = host.store(blocks, order, engine=view.spec.engine)
    return view.with_shared(order=order)
