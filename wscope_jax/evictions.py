"""Blocks on their way out of the window: which move, where to, and when their slots answer for them."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from wscope_jax.attention import evict
from wscope_jax.compiled import CompiledPrograms
from wscope_jax.dispatcher import Dispatcher
from wscope_jax.footprint import moves_under_way
from wscope_jax.layout import ByteOrder, EntryLayout, Region, byte_order
from wscope_jax.placement import Placement
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
        dispatcher: of the cache.
        compiled: compiled programs.
        route: host region of the oldest window block of a row, or None if nothing has room.
    """

    def __init__(
        self, placement: Placement, dispatcher: Dispatcher, compiled: CompiledPrograms, route: Route
    ) -> None:
        self._placement = placement
        self._dispatcher = dispatcher
        self._compiled = compiled
        self._route = route
        self._tickets: dict[int, int] = {}  # row -> ticket of its block under way

    def __contains__(self, row: int) -> bool:
        """Whether a block of `row` is under way."""
        return row in self._tickets

    def due(self, rows: Iterable[int]) -> list[int]:
        """Rows whose oldest block should start to move now: fullest window first, a few at a time."""
        full = [
            row
            for row in rows
            if row not in self and self._placement.window_length(row) >= self._placement.block
        ]
        full.sort(key=lambda row: -self._placement.window_length(row))
        return full[: max(0, moves_under_way(len(self._placement.rows)) - len(self._tickets))]

    def start(self, row: int, views: Views) -> Views | None:
        """Sends the oldest block of a row's window on its way.

        Returns:
            The views after the program, or None if nothing has room for the block.
        """
        region = self._route(row)
        if region is None:
            return None
        index, start = jnp.int32(row), jnp.int32(self._placement.window_start(row))
        # Compiled before anything is written down: a compilation may fail or be interrupted.
        program = self._program(views, index, start, byte_order(region))
        slot = self._placement.start_move(row, region)

        def run() -> tuple[jax.Array, jax.Array]:
            order = program(views.layers, views.shared.order, index, start)
            return order, order

        order = self._dispatcher.dispatch(store_plan(range(len(views.layers)), [[(0, slot)]]), run)
        self._tickets[row] = self._dispatcher.tickets
        return dataclasses.replace(views, shared=views.shared._replace(order=order))

    def settle(self) -> bool:
        """Lets every block that has arrived answer from its slot; says whether there was any."""
        completed = self._dispatcher.completed
        arrived = [row for row, ticket in self._tickets.items() if ticket <= completed]
        for row in arrived:
            self._placement.finish_move(row)
            del self._tickets[row]
        return bool(arrived)

    def wait(self, row: int) -> None:
        """Returns when the block of `row` that is under way has arrived."""
        self._dispatcher.wait(self._tickets[row])

    def forget(self, row: int) -> None:
        """Drops the move of a row that ends; its slot is free, and later stores to it come after."""
        self._tickets.pop(row, None)

    def compile(self, views: Views) -> None:
        """Compiles the program of `start` before it is needed."""
        index = jax.ShapeDtypeStruct((), jnp.int32)
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
