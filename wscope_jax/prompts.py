"""Prompts on their way into the cache: where their blocks go, and which layers are still to be written."""

from collections.abc import Sequence
from typing import Any

from wscope_jax.arguments import integer, shown
from wscope_jax.errors import UsageError
from wscope_jax.evictions import Route
from wscope_jax.footprint import LAYERS_IN_FLIGHT
from wscope_jax.layout import byte_order
from wscope_jax.placement import Placement
from wscope_jax.pools import HostPools
from wscope_jax.step_plan import StepPlan, store_plan
from wscope_jax.views import CacheSpec


class Prompts:
    """Rows between `begin` and `end`.

    Args:
        placement: where blocks live; updated here.
        pools: memory of the host regions.
        route: host region of the oldest window block of a row, or None if nothing has room.
        num_layers: layers of the cache.
        max_len: tokens that a row may hold.
    """

    def __init__(
        self,
        placement: Placement,
        pools: HostPools,
        route: Route,
        *,
        num_layers: int,
        max_len: int,
    ) -> None:
        self._placement = placement
        self._pools = pools
        self._route = route
        self._num_layers = num_layers
        self._max_len = max_len
        self._missing: dict[int, list[int]] = {}  # row -> layers that are not written

    def begin(self, row: int, length: int, spec: CacheSpec) -> None:
        """Starts a sequence and gives each of its blocks a slot; if that fails the row is empty.

        Raises:
            UsageError: no such row, the row holds a sequence, or an impossible length.
            CapacityError: the host regions have no room for it.
        """
        length = integer("length", length, 1, self._max_len)
        placement = self._placement
        placement.begin(row)
        try:
            placement.append(row, length)
            while spec.has_calls and placement.is_due(row):
                region = self._route(row)
                if region is None:
                    raise self._pools.full(f"a prompt of {length} tokens")
                placement.place(row, region)
        except BaseException:
            placement.release(row)
            raise
        self._missing[row] = list(range(self._num_layers))

    def check(self, row: int, layers: Any) -> list[int]:
        """`layers` as numbers, if the prompt of `row` still needs each of them.

        Raises:
            UsageError: the row has no prompt under way, or a layer is out of range or comes twice.
        """
        missing = self._of(row)
        if not isinstance(layers, Sequence) or isinstance(layers, str):
            raise UsageError(f"layers: expected a list of layers, got {shown(layers)}")
        numbers = [integer("layers", layer, 0, self._num_layers - 1) for layer in layers]
        for at, layer in enumerate(numbers):
            if layer not in missing or layer in numbers[:at]:
                raise UsageError(
                    f"layers: layer {layer} of row {row} is written already; write each once"
                )
        return numbers

    def plan(self, row: int, layers: Sequence[int], spec: CacheSpec) -> tuple[StepPlan, int]:
        """The plan of a program that writes `layers`, and how many stores before it may be under way."""
        slots = self._placement.rows[row].slots
        calls = [
            [(i, slot) for i, slot in enumerate(slots) if byte_order(slot.region) is order]
            for order in spec.store_orders
        ]
        return store_plan(layers, calls), (LAYERS_IN_FLIGHT - 1) * len(calls)

    def written(self, row: int, layers: Sequence[int]) -> None:
        """A program that writes `layers` was dispatched."""
        self._missing[row] = [i for i in self._missing[row] if i not in layers]

    def check_whole(self, row: int) -> None:
        """Raises UsageError if the row has no prompt under way, or says which layers are missing."""
        if missing := self._of(row):
            raise UsageError(
                f"row: the prompt of row {row} is not written in layers {', '.join(map(str, missing))} of "
                f"{self._num_layers}; call write_prompt for them first"
            )

    def forget(self, row: int) -> None:
        """The prompt of `row`, if one is under way, has ended."""
        self._missing.pop(row, None)

    def _of(self, row: int) -> list[int]:
        if row not in self._missing:
            raise UsageError(f"row: row {row} has no prompt under way; call begin_prompt first")
        return self._missing[row]
