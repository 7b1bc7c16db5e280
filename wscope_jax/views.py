"""What the jitted step sees of the cache: one pytree for all layers, donated into the step and returned by it.

`Views` holds the window rings of every layer and, once, what all layers share. `views[i]` is layer i's `View`;
`attend` returns it and `views.put(i, view)` hands its shared part on to the next layer, so that no array appears
twice among the donated leaves.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from wscope_jax.errors import UsageError
from wscope_jax.layout import PING_PONG_SLOTS, ByteOrder, EntryLayout, Region, byte_order
from wscope_jax.ops import host


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """What a traced program fixes about its cache; hashable and static.

    Attributes:
        engine: id of the step queue that the program's calls talk to.
        block: D, entries in a block.
        capacity: entries that a window ring holds per row.
        spare_blocks: blocks that a window keeps beyond D before it gives its oldest one away.
        storage: dtype name of stored entries, "float32" or "bfloat16".
        uses_host: the program attends to the UNPINNED region.
        uses_link: the program streams the PINNED region.
    """

    engine: int
    block: int
    capacity: int
    spare_blocks: int
    storage: str
    uses_host: bool
    uses_link: bool

    @property
    def store_orders(self) -> tuple[ByteOrder, ...]:
        """Byte orders that blocks are stored in: one per kind of reader."""
        used = {Region.UNPINNED: self.uses_host, Region.PINNED: self.uses_link}
        return tuple(
            dict.fromkeys(byte_order(region) for region, is_used in used.items() if is_used)
        )

    def window_start(self, length: Int32[Array, ""]) -> Int32[Array, ""]:
        """The first entry of a prompt of `length` that its window keeps."""
        if not self.has_calls:
            return jnp.zeros((), jnp.int32)
        return self.block * jnp.maximum(length // self.block - self.spare_blocks, 0)

    @property
    def has_calls(self) -> bool:
        """Whether programs over this cache make any host or link call at all."""
        return self.uses_host or self.uses_link


class Rings(NamedTuple):
    """Window of one stream in one layer: entry e of a row is at ring index e % capacity.

    Attributes:
        key: [B, capacity, G, K].
        value: [B, capacity, G, V], or None where the value is part of the key.
    """

    key: jax.Array
    value: jax.Array | None


class Shared(NamedTuple):
    """What all layers share, once.

    Attributes:
        slots: PING-PONG region, [PING_PONG_SLOTS, slots_per_chunk, G, D * stored_dim].
        owner: int32 [turns, slots_per_chunk], row that a streamed slot belongs to; -1 = nobody.
        start: int32 [B], oldest entry that the window answers for.
        length: int32 [B], entries written; the position of the next token.
        active: bool [B], rows that still decode; the others are masked and do not advance.
        order: int32 [], threads through every host and link call and so orders them.
    """

    slots: jax.Array
    owner: jax.Array
    start: jax.Array
    length: jax.Array
    active: jax.Array
    order: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """One layer's part of the cache, as `attend` takes and returns it.

    Attributes:
        rings: window rings, one per stream of the layer.
        shared: see `Shared`.
        layouts: layout of each stream (static).
        spec: see `CacheSpec` (static).
        turn: link calls made so far in this program; it names the PING-PONG slot (static).
        attended: rows that `attend` was called for so far in this program, over all layers (static).
    """

    rings: tuple[Rings, ...]
    shared: Shared
    layouts: tuple[EntryLayout, ...] = dataclasses.field(metadata={"static": True})
    spec: CacheSpec = dataclasses.field(metadata={"static": True})
    turn: int = dataclasses.field(metadata={"static": True})
    attended: int = dataclasses.field(metadata={"static": True})

    def with_shared(self, **arrays: jax.Array) -> "View":
        """The view with some shared arrays replaced."""
        return dataclasses.replace(self, shared=self.shared._replace(**arrays))

    def begin(self) -> "View":
        """Opens the next plan of the step queue: the first call of every program, if it has any."""
        if not self.spec.has_calls:
            return self
        return self.with_shared(order=host.step_begin(self.shared.order, engine=self.spec.engine))

    def rows(self, first: int, num: int) -> "View":
        """The view of rows first .. first + num - 1 alone: a mini-batch of its own."""
        part = slice(first, first + num)
        shared = self.shared._replace(
            owner=self.shared.owner - first,  # rows of others fall outside [0, num) and own nothing
            start=self.shared.start[part],
            length=self.shared.length[part],
            active=self.shared.active[part],
        )
        rings = tuple(jax.tree.map(lambda x: x[part], ring) for ring in self.rings)
        return dataclasses.replace(self, rings=rings, shared=shared)

    def put_rows(self, first: int, part: "View") -> "View":
        """The view after `part`, a view of rows from `first` on, went through a call."""

        def join(whole: jax.Array, rows: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(whole, rows, first, axis=0)

        rings = tuple(
            jax.tree.map(join, whole, rows)
            for whole, rows in zip(self.rings, part.rings, strict=True)
        )
        view = self.with_shared(slots=part.shared.slots, order=part.shared.order)
        return dataclasses.replace(view, rings=rings, turn=part.turn, attended=part.attended)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Views:
    """The cache as one jitted step sees it.

    Attributes:
        layers: per layer and stream the window rings.
        shared: see `Shared`.
        layouts: per layer and stream the layout (static).
        spec: see `CacheSpec` (static).
        turn: see `View` (static).
        attended: see `View` (static).
    """

    layers: tuple[tuple[Rings, ...], ...]
    shared: Shared
    layouts: tuple[tuple[EntryLayout, ...], ...] = dataclasses.field(metadata={"static": True})
    spec: CacheSpec = dataclasses.field(metadata={"static": True})
    turn: int = dataclasses.field(default=0, metadata={"static": True})
    attended: int = dataclasses.field(default=0, metadata={"static": True})

    def __getitem__(self, layer: int) -> View:
        return View(
            self.layers[layer],
            self.shared,
            self.layouts[layer],
            self.spec,
            self.turn,
            self.attended,
        )

    def put(self, layer: int, view: View) -> "Views":
        """The views after layer `layer`: its rings replaced, its shared part handed on.

        Raises:
            UsageError: `attend` was called for all rows of a layer, and this is not the next one.
        """
        rows = self.shared.length.shape[0]
        if view.attended - self.attended == rows and self.attended != rows * layer:
            raise UsageError(
                f"put: layer {layer} comes after {self.attended / rows:g} layers; attend to each layer once, in order"
            )
        layers = (*self.layers[:layer], view.rings, *self.layers[layer + 1 :])
        return dataclasses.replace(
            self, layers=layers, shared=view.shared, turn=view.turn, attended=view.attended
        )

    @property
    def positions(self) -> jax.Array:
        """int32 [B]: position of the token that the step feeds in each row."""
        return self.shared.length

    def begin(self) -> "Views":
        """Opens the step's plan; the first thing a step does."""
        return self.put(0, self[0].begin())

    def advance(self) -> "Views":
        """Counts the token that the step fed; the last thing a step does. Finished rows stay.

        Raises:
            UsageError: `attend` was not called once a layer, or its view was not `put`.
        """
        rows, num_layers = self.shared.length.shape[0], len(self.layers)
        if self.attended != rows * num_layers:
            raise UsageError(
                f"advance: the step has put the views of {self.attended / rows:g} calls of attend, the cache has "
                f"{num_layers} layers; call attend once a layer and hand its view on with views.put"
            )
        length = self.shared.length + self.shared.active.astype(jnp.int32)
        shared = self.shared._replace(length=length)
        return dataclasses.replace(self, shared=shared, turn=0, attended=0)


def empty_views(
    layout: EntryLayout,
    spec: CacheSpec,
    *,
    num_layers: int,
    batch: int,
    num_turns: int,
    slots_per_chunk: int,
) -> Views:
    """Views of a cache that holds nothing, with one stream of `layout` in every layer."""
    dtype = jnp.dtype(spec.storage)
    ring = (batch, spec.capacity, layout.num_kv_heads)

    def rings() -> Rings:
        key = jnp.zeros((*ring, layout.key_dim), dtype)
        value = None if layout.value_in_key else jnp.zeros((*ring, layout.value_dim), dtype)
        return Rings(key, value)

    block_shape = (layout.num_kv_heads, spec.block * layout.stored_dim)
    shared = Shared(
        slots=jnp.zeros((PING_PONG_SLOTS, slots_per_chunk, *block_shape), dtype),
        owner=jnp.full((num_turns, slots_per_chunk), -1, jnp.int32),
        start=jnp.zeros(batch, jnp.int32),
        length=jnp.zeros(batch, jnp.int32),
        active=jnp.zeros(batch, bool),
        order=jnp.zeros((), jnp.int32),
    )
    return Views(
        layers=tuple((rings(),) for _ in range(num_layers)),
        shared=shared,
        layouts=((layout,),) * num_layers,
        spec=spec,
    )
