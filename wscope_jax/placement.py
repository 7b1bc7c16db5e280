"""Which block lives where: append-only records, pure bookkeeping without arrays.

The write-time principle as a data type: a block is placed once, in one of the two host regions, and a second move
raises. Everything here is plain integers, so it is tested by properties (tests/test_placement.py).
"""

import dataclasses
import heapq

from wscope_jax.arguments import integer
from wscope_jax.errors import UsageError
from wscope_jax.layout import Region

HOST_REGIONS = (Region.UNPINNED, Region.PINNED)


@dataclasses.dataclass(frozen=True)
class Slot:
    """One block's place in a host region.

    Attributes:
        region: UNPINNED or PINNED.
        index: number of the slot in the region's pool.
        epoch: how often the slot was handed out before; an older epoch is stale.
    """

    region: Region
    index: int
    epoch: int


class SlotList:
    """Slots of one region: handed out lowest first, given back with an epoch."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.num_used = 0  # slots ever handed out: what the pool must have committed
        self._free: list[int] = []
        self._epochs: list[int] = []

    @property
    def num_free(self) -> int:
        """Slots that were given back and are free again."""
        return len(self._free)

    def take(self) -> Slot:
        """The lowest free slot, or a new one."""
        if self._free:
            index = heapq.heappop(self._free)
        else:
            index = self.num_used
            self.num_used += 1
            self._epochs.append(0)
        return Slot(self.region, index, self._epochs[index])

    def give_back(self, slot: Slot) -> None:
        """Frees a slot; every copy of `slot` is stale from now on."""
        self.check(slot)
        self._epochs[slot.index] += 1
        heapq.heappush(self._free, slot.index)

    def check(self, slot: Slot) -> None:
        """Raises ValueError if `slot` was given back in the meantime."""
        if slot.region is not self.region or not 0 <= slot.index < self.num_used:
            raise ValueError(f"slot: {slot} was never handed out by the {self.region} region")
        if self._epochs[slot.index] != slot.epoch:
            raise ValueError(
                f"slot: {slot.region} slot {slot.index} is stale (epoch {slot.epoch}, now "
                f"{self._epochs[slot.index]})"
            )


@dataclasses.dataclass
class RowRecord:
    """Where the entries of one sequence live.

    Attributes:
        length: entries written so far.
        slots: place of each placed block, oldest block first; entry e < len(slots) * D is in slots[e // D].
        moving: the slot that the oldest window block is on its way to, if any.
        is_live: the row holds a sequence.
    """

    length: int = 0
    slots: list[Slot] = dataclasses.field(default_factory=list)
    moving: Slot | None = None
    is_live: bool = False


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """How many blocks lie where, at the moment a block is to be placed.

    Attributes:
        row_blocks: placed blocks of the row.
        row_unpinned: those of them in UNPINNED.
        batch_blocks: placed blocks of all rows.
        batch_unpinned: those of them in UNPINNED.
        expected_blocks: of all rows once the prompts are placed, see `Placement.expected_blocks`.
        block: D, entries in a block.
        unpinned_room: UNPINNED can take another block, and is used by the policy.
        pinned_room: PINNED can take another block, and is used by the policy.
    """

    row_blocks: int
    row_unpinned: int
    batch_blocks: int
    batch_unpinned: int
    expected_blocks: int
    block: int
    unpinned_room: bool = True
    pinned_room: bool = True

    def has_room(self, region: Region) -> bool:
        """Whether a host region can take another block."""
        return self.unpinned_room if region is Region.UNPINNED else self.pinned_room

    def fits(self, wanted: Region) -> Region | None:
        """`wanted`, or the other host region if that one is full, or None if both are."""
        other = Region.PINNED if wanted is Region.UNPINNED else Region.UNPINNED
        return wanted if self.has_room(wanted) else other if self.has_room(other) else None


class Placement:
    """Records of all rows of a batch.

    Args:
        num_rows: sequences in the batch.
        block: D, entries in a block.
        max_slots: slots that both host regions together may use (the one host budget).
        region_slots: slots that each single region may use; None = only the budget counts.
        spare_blocks: blocks that a window keeps beyond D before it gives its oldest one away.
    """

    def __init__(
        self,
        num_rows: int,
        block: int,
        max_slots: int,
        region_slots: dict[Region, int] | None = None,
        *,
        spare_blocks: int = 0,
    ) -> None:
        if num_rows < 1 or block < 1 or max_slots < 0 or spare_blocks < 0:
            raise ValueError(
                "expected num_rows, block >= 1 and max_slots, spare_blocks >= 0, got "
                f"{num_rows}, {block}, {max_slots}, {spare_blocks}"
            )
        self.block = block
        self.spare_blocks = spare_blocks
        self.max_slots = max_slots
        self.rows = [RowRecord() for _ in range(num_rows)]
        self._begun: set[int] = set()  # rows that hold a sequence, or have held one
        self.slot_lists = {region: SlotList(region) for region in HOST_REGIONS}
        self._region_slots = region_slots or {}

    def has_room(self, region: Region) -> bool:
        """Whether `region` can take one more block."""
        slots = self.slot_lists[region]
        if slots.num_free:
            return True
        if slots.num_used >= self._region_slots.get(region, self.max_slots):
            return False
        return sum(s.num_used for s in self.slot_lists.values()) < self.max_slots

    def index(self, row: int) -> int:
        """The number of a row that callers give, which must not count from the end.

        Raises:
            UsageError: there is no such row.
        """
        return integer("row", row, 0, len(self.rows) - 1)

    def begin(self, row: int) -> None:
        """Starts an empty sequence in `row`."""
        row = self.index(row)
        if self.rows[row].is_live:
            raise UsageError(f"row: row {row} still holds a sequence; release it first")
        self.rows[row] = RowRecord(is_live=True)
        self._begun.add(row)

    def append(self, row: int, count: int = 1) -> None:
        """Records `count` new entries of `row`; they are in the window."""
        self._live(row).length += count

    def place(self, row: int, region: Region) -> Slot:
        """Places the oldest unplaced block of `row` at once (prefill)."""
        slot = self.start_move(row, region)
        self.finish_move(row)
        return slot

    def start_move(self, row: int, region: Region) -> Slot:
        """Gives the oldest window block of `row` a slot; the window answers for it until `finish_move`."""
        record = self._live(row)
        if region not in HOST_REGIONS:
            raise ValueError(f"region: a block moves to unpinned or pinned, got {region}")
        if record.moving is not None:
            raise ValueError(
                f"row: the oldest block of row {row} is already on its way to {record.moving.region}"
            )
        if self.window_length(row) < self.block:
            raise ValueError(
                f"row: only whole blocks of {self.block} move, the window of row {row} holds {self.window_length(row)}"
            )
        if not self.has_room(region):
            raise ValueError(f"region: {region} has no room for another block")
        record.moving = self.slot_lists[region].take()
        return record.moving

    def finish_move(self, row: int) -> Slot:
        """The block under way has arrived: from now on its slot answers for it."""
        record = self._live(row)
        if record.moving is None:
            raise ValueError(f"row: no block of row {row} is on its way")
        slot, record.moving = record.moving, None
        record.slots.append(slot)
        return slot

    def release(self, row: int) -> None:
        """Ends the sequence of `row` and gives its slots back."""
        record = self._live(row)
        for slot in [*record.slots, *([record.moving] if record.moving else [])]:
            self.slot_lists[slot.region].give_back(slot)
        self.rows[row] = RowRecord()

    def window_start(self, row: int) -> int:
        """Index of the oldest entry that the window answers for."""
        return len(self.rows[row].slots) * self.block

    def window_length(self, row: int) -> int:
        """Entries that the window answers for."""
        return self.rows[row].length - self.window_start(row)

    def is_due(self, row: int) -> bool:
        """Whether the oldest window block of `row` has to be placed."""
        return self.window_length(row) >= (1 + self.spare_blocks) * self.block

    def region_of(self, row: int, entry: int) -> Region:
        """The one region that answers for an entry."""
        record = self._live(row)
        if not 0 <= entry < record.length:
            raise UsageError(f"entry: row {row} holds {record.length} entries, got {entry}")
        index = entry // self.block
        return record.slots[index].region if index < len(record.slots) else Region.WINDOW

    def occupancy(self, row: int, unpinned_room: bool, pinned_room: bool) -> Occupancy:
        """What a policy is told before it routes the oldest window block of `row`."""
        unpinned = [self.num_blocks(r, Region.UNPINNED) for r in range(len(self.rows))]
        return Occupancy(
            row_blocks=len(self.rows[row].slots),
            row_unpinned=unpinned[row],
            batch_blocks=sum(len(record.slots) for record in self.rows),
            batch_unpinned=sum(unpinned),
            expected_blocks=self.expected_blocks,
            block=self.block,
            unpinned_room=unpinned_room,
            pinned_room=pinned_room,
        )

    @property
    def expected_blocks(self) -> int:
        """Blocks of all rows once what they hold is placed; a row that has not begun yet counts as the longest.

        Prompts come row by row, and a block placed now is attended to beside those that follow.
        """
        blocks = [max(0, r.length // self.block - self.spare_blocks) for r in self.rows]
        return sum(blocks) + max(blocks) * (len(self.rows) - len(self._begun))

    def num_blocks(self, row: int, region: Region) -> int:
        """Placed blocks of `row` in `region`."""
        return sum(slot.region is region for slot in self.rows[row].slots)

    def table(self, row: int, region: Region) -> list[int]:
        """Slot numbers of the row's blocks in `region`, oldest first; raises if one is stale."""
        slots = [slot for slot in self.rows[row].slots if slot.region is region]
        for slot in slots:
            self.slot_lists[region].check(slot)
        return [slot.index for slot in slots]

    def _live(self, row: int) -> RowRecord:
        record = self.rows[self.index(row)]
        if not record.is_live:
            raise UsageError(f"row: row {row} holds no sequence; begin a prompt in it first")
        return record
