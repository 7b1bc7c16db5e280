"""Plans: chunks cover exactly the live PINNED slots, in slot order, and the tables name what the placement says."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wscope_jax.layout import Region
from wscope_jax.placement import Placement
from wscope_jax.step_plan import chunk_table, decode_plan, store_plan, turn_bucket


def test_turn_buckets() -> None:
    sizes = sorted({turn_bucket(n) for n in range(1, 49)})
    assert sizes == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]
    assert all(turn_bucket(n) >= n for n in range(1, 500))


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30), st.integers(1, 5))
def test_chunks_cover_the_live_slots_once(blocks: list[tuple[int, bool]], chunk: int) -> None:
    placement = Placement(3, 2, 30)
    for row in range(3):
        placement.begin(row)
    for row, is_pinned in blocks:
        placement.append(row, 2)
        placement.place(row, Region.PINNED if is_pinned else Region.UNPINNED)
    placement.release(1)
    owner, spans = chunk_table(placement, [0, 2], chunk)
    found = {}
    for owners, (first, num) in zip(owner, spans, strict=True):
        assert first % chunk == 0
        assert owners[num - 1] >= 0
        assert (owners[num:] == -1).all()
        found.update({first + i: int(r) for i, r in enumerate(owners) if r >= 0})
    expected = {s: r for r in (0, 2) for s in placement.table(r, Region.PINNED)}
    assert found == expected
    assert [first for first, _ in spans] == sorted(first for first, _ in spans)


def test_decode_plan_repeats_the_chunks_for_every_job() -> None:
    jobs = [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]
    plan = decode_plan(jobs, [[4, 2], [7]], [(0, 3)], 2, uses_host=True, uses_link=True)
    np.testing.assert_array_equal(plan.table_ptr, [0, 2, 3])
    np.testing.assert_array_equal(plan.table, [4, 2, 7])
    assert plan.loads.tolist() == [[j[0], f, n] for j in jobs for f, n in [(0, 3), (0, 0)]]
    assert decode_plan(jobs, [[], []], [], 1, uses_host=False, uses_link=False).jobs.size == 0


def test_store_plan_numbers_tickets_per_layer_and_call() -> None:
    placement = Placement(1, 2, 3)
    placement.begin(0)
    placement.append(0, 4)
    slots = [placement.place(0, Region.PINNED), placement.place(0, Region.UNPINNED)]
    plan = store_plan([5, 6], [list(enumerate(slots))])
    assert plan.stores.tolist() == [[5, 2], [6, 2]]
    assert plan.moves.tolist() == [[0, 1, 0], [1, 0, 0]] * 2
    assert plan.num_stores == 2
