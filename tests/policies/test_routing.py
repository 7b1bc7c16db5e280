"""Routing: the batch follows r, and no row strays from it by more than a block."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wscope_jax.errors import UsageError
from wscope_jax.layout import Region
from wscope_jax.placement import Placement
from wscope_jax.policies import BY_NAME, CpuOnly, GpuOnly, Policy, WriteScope, choose
from wscope_jax.roofline import Roofline


def _place(policy: Policy, rows: list[int], num_rows: int) -> Placement:
    placement = Placement(num_rows, 1, len(rows) + 1)
    for row in range(num_rows):
        placement.begin(row)
    for row in rows:
        placement.append(row)
        region = policy.route(placement.occupancy(row, unpinned_room=True, pinned_room=True))
        assert region is not None
        placement.place(row, region)
    return placement


@given(st.floats(0, 1), st.lists(st.integers(0, 3), max_size=60))
def test_shares_follow_r(share: float, rows: list[int]) -> None:
    placement = _place(WriteScope(share=share), rows, 4)
    for row in range(4):
        blocks = len(placement.rows[row].slots)
        assert abs(placement.num_blocks(row, Region.UNPINNED) - share * blocks) <= 1 + 1e-9


@pytest.mark.parametrize(("share", "region"), [(0.0, Region.PINNED), (1.0, Region.UNPINNED)])
def test_the_ends_are_exact(share: float, region: Region) -> None:
    placement = _place(WriteScope(share=share), [0, 1, 0, 0, 2, 1], 3)
    assert {slot.region for row in placement.rows for slot in row.slots} == {region}


@given(st.integers(1, 400), st.floats(0.05, 0.95))
def test_one_row_reaches_r(num_blocks: int, share: float) -> None:
    placement = _place(WriteScope(share=share), [0] * num_blocks, 1)
    assert abs(placement.num_blocks(0, Region.UNPINNED) - share * num_blocks) <= 1


def test_prompts_that_come_row_by_row_reach_the_share_of_them_all() -> None:
    """A fixed cost weighs less the more is placed; the first rows must not be routed as if they stayed alone."""
    num_rows, num_blocks = 8, 32
    roofline = Roofline(cpu_s_per_entry=0.1, link_s_per_entry=0.15, cpu_fixed_s=6.4)
    policy = WriteScope(roofline=roofline)
    assert policy.cpu_share(num_blocks) == 0
    assert policy.cpu_share(num_rows * num_blocks) == pytest.approx(0.5)
    placement = Placement(num_rows, 1, num_rows * num_blocks)
    for row in range(num_rows):
        placement.begin(row)
        placement.append(row, num_blocks)
        for _ in range(num_blocks):
            region = policy.route(placement.occupancy(row, True, True))
            assert region is not None
            placement.place(row, region)
        assert placement.num_blocks(row, Region.UNPINNED) == 16


@pytest.mark.parametrize("balance", [0.0, 1e-6, 0.1, 0.3, 0.5, 0.7, 0.9, 1 - 1e-6, 1.0])
def test_a_share_leans_a_little_to_the_side_that_may_be_late(balance: float) -> None:
    """Equal costs per entry with a fixed cost that shifts the balance to either end, or costs that make it so."""
    if balance in (0.0, 1.0):
        fixed = {"cpu_fixed_s": 1.0 - balance, "link_fixed_s": balance}
        roofline = Roofline(cpu_s_per_entry=1e-6, link_s_per_entry=1e-6, **fixed)
    else:
        roofline = Roofline(cpu_s_per_entry=1e-6 * (1 - balance), link_s_per_entry=1e-6 * balance)
    assert roofline.cpu_share(1000) == pytest.approx(balance)
    share = WriteScope(roofline=roofline).cpu_share(1000)
    assert 0 <= share <= 1
    leans = share - roofline.cpu_share(1000)
    assert abs(leans) <= 0.02
    if balance in (0.0, 0.5, 1.0):
        assert leans == pytest.approx(0, abs=1e-12)
    else:
        assert (leans > 0) == (balance > 0.5)


def test_rows_that_have_begun_count_as_long_as_they_are() -> None:
    placement = Placement(4, 8, 100)
    assert placement.expected_blocks == 0
    for row, length in ((0, 80), (1, 17)):
        placement.begin(row)
        placement.append(row, length)
    assert placement.expected_blocks == 10 + 2 + 2 * 10
    placement.begin(2)
    placement.begin(3)
    assert placement.expected_blocks == 10 + 2
    placement.release(0)
    assert placement.expected_blocks == 2


def test_a_full_region_hands_over_to_the_other() -> None:
    placement = Placement(1, 1, 5)
    placement.begin(0)
    for policy, unpinned, pinned, expected in [
        (WriteScope(share=1.0), False, True, Region.PINNED),
        (WriteScope(share=0.0), True, False, Region.UNPINNED),
        (WriteScope(share=0.5), False, False, None),
        (GpuOnly(), True, False, None),
        (CpuOnly(), False, True, None),
    ]:
        occupancy = placement.occupancy(0, unpinned_room=unpinned, pinned_room=pinned)
        assert policy.route(occupancy) is expected


def test_policies_by_name() -> None:
    assert choose("auto").name == "write_scope"
    for name in BY_NAME:
        assert choose(name).name == name
    assert choose("auto", 0.25) == choose("write_scope", 0.25) == WriteScope(share=0.25)


@pytest.mark.parametrize(
    ("name", "share"), [("nothing", None), ("cpu_only", 0.5), ("auto", 1.5), ("auto", float("nan"))]
)
def test_choose_refuses(name: str, share: float | None) -> None:
    with pytest.raises(UsageError):
        choose(name, share)
