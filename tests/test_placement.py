"""The write-time principle, by properties: every entry in exactly one region, and no second move."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from wscope_jax.layout import Region
from wscope_jax.placement import HOST_REGIONS, Placement, Slot, SlotList

BLOCK = 4
NUM_ROWS = 3
MAX_SLOTS = 9


class PlacementMachine(RuleBasedStateMachine):
    """Random lives of a batch, beside a plain list of what each entry's region must be."""

    @initialize(pinned=st.integers(0, MAX_SLOTS), spare=st.integers(0, 3))
    def start(self, pinned: int, spare: int) -> None:
        limits = {Region.PINNED: pinned}
        self.spare = spare
        self.placement = Placement(NUM_ROWS, BLOCK, MAX_SLOTS, limits, spare_blocks=spare)
        self.regions: dict[int, list[Region]] = {}
        self.moving: dict[int, Slot] = {}
        self.ended: list[Slot] = []

    @rule(row=st.integers(0, NUM_ROWS - 1), count=st.integers(1, 11))
    def grow(self, row: int, count: int) -> None:
        if row not in self.regions:
            self.placement.begin(row)
            self.regions[row] = []
        self.placement.append(row, count)
        self.regions[row] += [Region.WINDOW] * count

    @rule(row=st.integers(0, NUM_ROWS - 1), region=st.sampled_from(HOST_REGIONS))
    def start_move(self, row: int, region: Region) -> None:
        window = self.regions.get(row, []).count(Region.WINDOW)
        if window < BLOCK or row in self.moving or not self.placement.has_room(region):
            with pytest.raises(ValueError, match=r"row|region"):
                self.placement.start_move(row, region)
            return
        before = [r.num_used for r in self.placement.slot_lists.values()]
        slot = self.placement.start_move(row, region)
        after = [r.num_used for r in self.placement.slot_lists.values()]
        assert sum(after) - sum(before) in (0, 1)
        self.moving[row] = slot

    @rule(row=st.integers(0, NUM_ROWS - 1))
    def finish_move(self, row: int) -> None:
        if row not in self.moving:
            with pytest.raises(ValueError, match="row"):
                self.placement.finish_move(row)
            return
        slot = self.placement.finish_move(row)
        assert slot == self.moving.pop(row)
        first = self.regions[row].index(Region.WINDOW)
        self.regions[row][first : first + BLOCK] = [slot.region] * BLOCK

    @precondition(lambda self: self.regions)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.regions)))
        self.ended += self.placement.rows[row].slots
        if row in self.moving:
            self.ended.append(self.moving.pop(row))
        self.placement.release(row)
        del self.regions[row]

    @invariant()
    def every_entry_is_in_one_region(self) -> None:
        for row, regions in getattr(self, "regions", {}).items():
            assert [self.placement.region_of(row, i) for i in range(len(regions))] == regions

    @invariant()
    def a_window_keeps_what_it_may(self) -> None:
        for row, regions in getattr(self, "regions", {}).items():
            is_due = regions.count(Region.WINDOW) >= (1 + self.spare) * BLOCK
            assert self.placement.is_due(row) == is_due
        if not hasattr(self, "placement") or len(self.placement._begun) < NUM_ROWS:
            return
        lengths = [len(regions) for regions in self.regions.values()]
        most = sum(max(0, length // BLOCK - self.spare) for length in lengths)
        assert self.placement.expected_blocks == most

    @invariant()
    def no_two_blocks_share_a_slot(self) -> None:
        if not hasattr(self, "placement"):
            return
        slots = [(s.region, s.index) for r in self.placement.rows for s in r.slots]
        slots += [(s.region, s.index) for s in self.moving.values()]
        assert len(slots) == len(set(slots))
        assert sum(s.num_used for s in self.placement.slot_lists.values()) <= MAX_SLOTS

    @invariant()
    def old_slots_are_stale(self) -> None:
        for slot in getattr(self, "ended", []):
            with pytest.raises(ValueError, match="stale"):
                self.placement.slot_lists[slot.region].check(slot)


PlacementMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestPlacement = PlacementMachine.TestCase


def test_slots_are_handed_out_lowest_first() -> None:
    slots = SlotList(Region.PINNED)
    taken = [slots.take() for _ in range(5)]
    for i in (3, 1):
        slots.give_back(taken[i])
    assert [slots.take().index for _ in range(3)] == [1, 3, 5]


def test_a_slot_is_given_back_once() -> None:
    slots = SlotList(Region.PINNED)
    slot = slots.take()
    slots.give_back(slot)
    with pytest.raises(ValueError, match="stale"):
        slots.give_back(slot)


def test_region_of_refuses_entries_that_do_not_exist() -> None:
    placement = Placement(1, BLOCK, MAX_SLOTS)
    placement.begin(0)
    placement.append(0, 3)
    with pytest.raises(ValueError, match="entry"):
        placement.region_of(0, 3)
