"""Blocks on their way out of the window: which move, where to, and when their slots answer for them."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from wscope_jax.attention import evict
from wscope_jax.compiled import CompiledPrograms
from wscope_jax.footprint import moves_under_way
from wscope_jax.layout import ByteOrder, EntryLayout, Region, byte_order
from wscope_jax.placement import Placement
from wscope_jax.regions import Regions
from wscope_jax.step_plan import store_plan
from wscope_jax.views import CacheSpec, Rings, Shared, Views

Route = Callable[[int], Region | None]


class Evictions:
    """Moves of full blocks from windows to their homes, by ticket.

    A move has three moments. It starts when a program is dispatched whose `store` takes a copy of the block. It has
    arrived when the store's ticket is completed. It is settled when the manager has seen that: the block's slot answers
    for it in every step dispatched from then on, and the window did in every step before.

    Args:
        placement: where blocks live; updated here.
        regions: of the cache; their views are replaced here.
        compiled: compiled programs.
        route: host region of the oldest window block of a row, or None if nothing has room.
    """

    def __init__(
        self, placement: Placement, regions: Regions, compiled: CompiledPrograms, route: Route
    ) -> None:
        self._placement = placement
        self._regions = regions
        self._compiled = compiled
        self._route = route
        self._tickets: dict[int, int] = {}  # row -> ticket of its block under way

    def __contains__(self, row: int) -> bool:
        """Whether a block of `row` is under way."""
        return row in self._tickets

    def start_due(self, rows: Iterable[int]) -> None:
        """Sends the oldest blocks of full windows on their way: fullest window first, a few at a time."""
        if not self._regions.views.spec.has_calls:
            return
        full = [row for row in rows if row not in self and self._placement.is_due(row)]
        full.sort(key=lambda row: -self._placement.window_length(row))
        most = moves_under_way(len(self._placement.rows)) - len(self._tickets)
        for row in full[: max(0, most)]:
            self._start(row)

    def make_room(self, row: int) -> None:
        """Returns when the oldest block of the row's window, which may be under way already, has arrived.

        Raises:
            CapacityError: nothing has room for the block.
        """
        if row not in self and not self._start(row):
            raise self._regions.pools.full(f"another token of row {row}")
        self._regions.dispatcher.wait(self._tickets[row])
        self.settle()

    def _start(self, row: int) -> bool:
        """Sends the oldest block of a row's window on its way; false if nothing has room for it."""
        region = self._route(row)
        if region is None:
            return False
        views = self._regions.views
        index, start = jnp.int32(row), jnp.int32(self._placement.window_start(row))
        # Compiled before anything is written down: a compilation may fail or be interrupted.
        program = self._program(views, index, start, byte_order(region))
        slot = self._placement.start_move(row, region)

        def run() -> tuple[jax.Array, jax.Array]:
            order = program(views.layers, views.shared.order, index, start)
            return order, order

        dispatcher = self._regions.dispatcher
        order = dispatcher.dispatch(store_plan(range(len(views.layers)), [[(0, slot)]]), run)
        self._tickets[row] = dispatcher.tickets
        self._regions.views = dataclasses.replace(views, shared=views.shared._replace(order=order))
        return True

    def settle(self) -> bool:
        """Lets every block that has arrived answer from its slot; says whether there was any."""
        completed = self._regions.dispatcher.completed
        arrived = [row for row, ticket in self._tickets.items() if ticket <= completed]
        for row in arrived:
            self._placement.finish_move(row)
            del self._tickets[row]
        return bool(arrived)

    def forget(self, row: int) -> None:
        """Drops the move of a row that ends; its slot is free, and later stores to it come after."""
        self._tickets.pop(row, None)

    def compile(self) -> None:
        """Compiles the program that moves a block, before it is needed."""
        views, index = self._regions.views, jax.ShapeDtypeStruct((), jnp.int32)
        for order in views.spec.store_orders:
            self._program(views, index, index, order)

    def _program(
        self, views: Views, row: Any, start: Any, order: ByteOrder
    ) -> Callable[..., jax.Array]:
        """The region is known when a move starts, so each byte order has a program of its own."""
        key = ("evict", order, views.spec, views.layouts, len(self._placement.rows))
        fn = functools.partial(_evict, byte_order=order, spec=views.spec, layouts=views.layouts)
        args = (views.layers, views.shared.order, row, start)
        program: Callable[..., jax.Array] = self._compiled.get(key, fn, args, donate=(1,))
        return program


def _evict(
    layers: tuple[tuple[Rings, ...], ...],
    order: jax.Array,
    row: jax.Array,
    start: jax.Array,
    *,
    byte_order: ByteOrder,
    spec: CacheSpec,
    layouts: tuple[tuple[EntryLayout, ...], ...],
) -> jax.Array:
    # Of what layers share only the order is donated to this program; it touches nothing else.
    nothing = jnp.zeros((0,), jnp.int32)
    shared = Shared(nothing, nothing, nothing, nothing, nothing, order)
    return evict(Views(layers, shared, layouts, spec), row=row, start=start, order=byte_order)
