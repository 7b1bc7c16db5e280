"""The host pools: one budget for two regions, pages in steps, what a refusal leaves."""

from collections.abc import Iterator
from typing import Any

import pytest

from wscope_jax import _ffi, pools
from wscope_jax.layout import Region
from wscope_jax.placement import Placement
from wscope_jax.pools import HostPools

BLOCK = 4096
UNPINNED, PINNED = Region.UNPINNED, Region.PINNED


class Pool:
    """A real pool; the machine has `left` slots for it."""

    left = 10**6

    def __init__(self, layers: int, slots: int, block_bytes: int, device: int | None) -> None:
        del device  # there is none
        self._pool = _ffi.Pool(layers, slots, block_bytes)
        self.asked: list[int] = []

    def commit(self, slots: int) -> None:
        self.asked.append(slots)
        if slots > self.left:
            raise MemoryError("the machine has no more")
        self._pool.commit(slots)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(pools, "_ffi", type("Ffi", (), {"Pool": Pool}))
    monkeypatch.setattr(Pool, "left", 10**6)
    made: list[HostPools] = []

    def pools_of(slots: int, **sizes: Any) -> HostPools:
        made.append(HostPools(2, BLOCK, slots, **sizes))
        return made[-1]

    yield pools_of
    for each in made:
        each.close()


def place(host: HostPools, placement: Placement, region: Region, count: int) -> int:
    """Places up to `count` blocks; how many had room."""
    for number in range(count):
        if not (host.has_room(region, placement) and host.make_room(region, placement)):
            return number
        placement.append(0, placement.block)
        placement.place(0, region)
    return count


def placement_of(slots: int) -> Placement:
    placement = Placement(1, 32, slots)
    placement.begin(0)
    return placement


def settled(host: HostPools) -> int:
    """Slots that both regions have, once what goes on in the background has ended."""
    for pending in host._pending.values():
        pending.exception()
    return sum(host.pool(region).committed for region in (UNPINNED, PINNED))


@pytest.mark.parametrize("chunk", [0, 8, 64])
@pytest.mark.parametrize("first", [UNPINNED, PINNED])
def test_the_budget_holds_and_every_slot_of_it_can_be_used(
    make: Any, chunk: int, first: Region
) -> None:
    host, placement = make(100, device=0, slots_per_chunk=chunk), placement_of(100)
    second = UNPINNED if first is PINNED else PINNED
    done = 0
    for size in (1, 3, 40, 100):
        done += place(host, placement, first, size)
        assert settled(host) <= 100
        done += place(host, placement, second, size)
        assert settled(host) <= 100
    done += place(host, placement, first, 100)
    assert (done, settled(host)) == (100, 100)


def test_to_ask_commits_nothing(make: Any) -> None:
    host, placement = make(100, device=0, slots_per_chunk=8), placement_of(100)
    assert host.has_room(PINNED, placement)
    assert host.pool(PINNED).asked == []
    assert place(host, placement, UNPINNED, 100) == 100
    assert not host.has_room(PINNED, placement)


def test_a_chunk_is_pinned_in_one_piece_or_in_equal_ones(make: Any) -> None:
    host = make(1000, device=0, slots_per_chunk=64)
    place(host, placement_of(1000), PINNED, 200)
    settled(host)
    assert {size % 64 for size in host.pool(PINNED).asked} == {0}
    host = make(200, device=0, slots_per_chunk=64)
    place(host, placement_of(200), PINNED, 100)
    settled(host)
    assert {size % 22 for size in host.pool(PINNED).asked[:4]} == {0}


def test_what_is_left_is_used_when_a_step_is_refused(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, placement = make(1000, device=0, slots_per_chunk=64), placement_of(1000)
    monkeypatch.setattr(Pool, "left", 70)
    assert place(host, placement, PINNED, 100) == 70
    assert "the machine has no more" in str(host.full("a block"))
    asked = len(host.pool(PINNED).asked)
    assert not host.has_room(PINNED, placement)
    assert not host.make_room(PINNED, placement)
    assert len(host.pool(PINNED).asked) == asked  # not asked again
