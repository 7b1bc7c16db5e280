"""Plans: what the host and link calls of one program are to do, as plain integer arrays.

A call inside a jitted program cannot carry a list whose length changes, and on a GPU its handler cannot read its
operands. So the manager pushes the program's plan before it dispatches the program, and each call takes the plan's
next item.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wscope_jax.layout import Region
from wscope_jax.placement import Placement, Slot

Int32s = npt.NDArray[np.int32]


def _table(rows: Sequence[Sequence[int]], width: int) -> Int32s:
    return np.asarray(rows, np.int32).reshape(len(rows), width)


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One program's plan.

    Attributes:
        jobs: int32 [J, 3], host jobs in the order of their starts: layer, first row, number of rows.
        table_ptr: int32 [B + 1], where each row's blocks begin in `table`.
        table: int32, UNPINNED slots of row 0, row 1, ...
        loads: int32 [M, 3], link loads in order: layer, first PINNED slot, number of slots (0 = surplus turn).
        stores: int32 [S, 2], stores in order: layer, number of moves.
        moves: int32 [X, 3], moves of all stores in order: block of the operand, region (0 unpinned, 1 pinned), slot.
    """

    jobs: Int32s
    table_ptr: Int32s
    table: Int32s
    loads: Int32s
    stores: Int32s
    moves: Int32s

    @property
    def num_stores(self) -> int:
        """Stores, and so tickets, of this plan."""
        return len(self.stores)


REGION_CODE = {Region.UNPINNED: 0, Region.PINNED: 1}


def turn_bucket(num_turns: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is at least `num_turns`."""
    size = 1
    while size < num_turns:
        power = 1 << (size.bit_length() - 1)
        size = size + 1 if size < 4 else size + power // 2 if size == power else 2 * power
    return size


def chunk_table(
    placement: Placement, rows: Sequence[int], slots_per_chunk: int
) -> tuple[Int32s, list[tuple[int, int]]]:
    """The chunks of PINNED slots that hold a live block, and whose block each slot is.

    Args:
        placement: where the blocks lie.
        rows: rows that still decode.
        slots_per_chunk: consecutive slots in a chunk.

    Returns:
        owner int32 [chunks, slots_per_chunk] (-1 = nobody), and per chunk (first slot, slots up to the last live one).
    """
    owner_of = {slot: row for row in rows for slot in placement.table(row, Region.PINNED)}
    numbers = sorted({slot // slots_per_chunk for slot in owner_of})
    owner = np.full((len(numbers), slots_per_chunk), -1, np.int32)
    spans = []
    for chunk, number in enumerate(numbers):
        first = number * slots_per_chunk
        for offset in range(slots_per_chunk):
            owner[chunk, offset] = owner_of.get(first + offset, -1)
        spans.append((first, int(np.flatnonzero(owner[chunk] >= 0)[-1]) + 1))
    return owner, spans


def decode_plan(
    jobs: Sequence[tuple[int, int, int]],
    tables: Sequence[Sequence[int]],
    spans: Sequence[tuple[int, int]],
    num_turns: int,
    *,
    uses_host: bool,
    uses_link: bool,
) -> StepPlan:
    """The plan of a decode step.

    Args:
        jobs: the schedule's jobs: layer, first row, number of rows.
        tables: UNPINNED slots of each row.
        spans: chunks to stream, as `chunk_table` gives them.
        num_turns: turns of the program; those beyond the chunks load nothing.
        uses_host: the program has host jobs.
        uses_link: the program has loads.
    """
    turns = [*spans, *[(0, 0)] * (num_turns - len(spans))]
    loads = [(layer, first, num) for layer, _, _ in jobs for first, num in turns]
    return StepPlan(
        jobs=_table(jobs if uses_host else [], 3),
        table_ptr=np.cumsum([0, *map(len, tables)], dtype=np.int32),
        table=np.asarray([slot for table in tables for slot in table], np.int32),
        loads=_table(loads if uses_link else [], 3),
        stores=_table([], 2),
        moves=_table([], 3),
    )


def store_plan(
    layers: Sequence[int], calls_per_layer: Sequence[Sequence[tuple[int, Slot]]]
) -> StepPlan:
    """The plan of a program that only stores.

    Args:
        layers: layers that the program stores, in order.
        calls_per_layer: for each store call of a layer the moves (block of the operand, slot).
    """
    stores = [(layer, len(moves)) for layer in layers for moves in calls_per_layer]
    one_layer = [
        (block, REGION_CODE[slot.region], slot.index)
        for moves in calls_per_layer
        for block, slot in moves
    ]
    return StepPlan(
        jobs=_table([], 3),
        table_ptr=np.zeros(1, np.int32),
        table=np.zeros(0, np.int32),
        loads=_table([], 3),
        stores=_table(stores, 2),
        moves=_table(one_layer * len(layers), 3),
    )
