"""Rings of the newest entries: what is written where after many turns, and attention over it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import DTYPES, RUNS, attend, bits, check, draw, sharpen, wide
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import BIG, CASES, SMALL
from wscope_jax.layout import Entries, EntryLayout
from wscope_jax.ops.reference import attend_reference
from wscope_jax.ops.window import append, fill, oldest_block, window_attention
from wscope_jax.partial import Partial
from wscope_jax.views import Rings

B, BLOCK, CAPACITY, PROMPT = 4, 32, 80, 416
LAYOUTS = {
    "apart": EntryLayout(num_kv_heads=2, key_dim=4, value_dim=3),
    "value_in_key": EntryLayout(num_kv_heads=1, key_dim=5, value_dim=3, value_in_key=True),
}
POSITIONS = st.integers(0, 40 * CAPACITY)

append_once = jax.jit(append)
fill_row = jax.jit(fill)
take_block = jax.jit(oldest_block, static_argnums=3)
attend_window = jax.jit(window_attention, static_argnames=("layout", "scale"))
oracle = jax.jit(attend_reference, static_argnames="scale")


def _negative(pair: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(-np.asarray(x)), pair)


def _pair(layout: EntryLayout, key: Any, value: Any) -> tuple[jax.Array, jax.Array | None]:
    return jnp.asarray(key), None if layout.value_in_key else jnp.asarray(value)


def _numbers(layout: EntryLayout, *shape: int, dtype: str = "float32") -> Any:
    """Keys and values that are all different, so that a wrong place is a wrong number."""
    size = int(np.prod(shape)) * layout.num_kv_heads
    dims = (layout.key_dim, layout.value_dim)
    key, value = (
        (np.arange(size * dim, dtype=np.float32) + 1)
        .reshape(*shape, layout.num_kv_heads, dim)
        .astype(jnp.dtype(dtype))
        for dim in dims
    )
    return _pair(layout, key, value)


def _same(got: Any, want: Any) -> None:
    for x, y in zip(got, want, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            np.testing.assert_array_equal(x, y)


# --- writing and reading ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=60, deadline=None)
@given(
    length=st.lists(POSITIONS, min_size=B, max_size=B),
    active=st.lists(st.booleans(), min_size=B, max_size=B),
)
def test_append_writes_one_place_of_each_active_row(
    name: str, length: list[int], active: list[bool]
) -> None:
    rings = Rings(*_numbers(LAYOUTS[name], B, CAPACITY))
    new = Entries(*_negative(_numbers(LAYOUTS[name], B)))
    got = append_once(rings, new, jnp.array(length, jnp.int32), jnp.array(active))
    want = jax.tree.map(np.array, rings)
    for row in range(B):
        if active[row]:
            for ring, entries in zip(want, new, strict=True):
                if ring is not None:
                    ring[row, length[row] % CAPACITY] = entries[row]
    _same(got, want)


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=60, deadline=None)
@given(row=st.integers(0, B - 1), start=st.integers(0, PROMPT), size=st.integers(0, CAPACITY))
def test_fill_puts_the_rest_of_a_prompt_into_one_row(
    name: str, row: int, start: int, size: int
) -> None:
    length = min(start + size, PROMPT)
    rings = Rings(*_numbers(LAYOUTS[name], B, CAPACITY))
    prompt = Entries(*_negative(_numbers(LAYOUTS[name], PROMPT)))
    got = fill_row(rings, prompt, *map(jnp.int32, (row, start, length)))
    want = jax.tree.map(np.array, rings)
    for ring, entries in zip(want, prompt, strict=True):
        if ring is not None:
            ring[row] = 0
            for entry in range(start, length):
                ring[row, entry % CAPACITY] = entries[entry]
    _same(got, want)


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=60, deadline=None)
@given(row=st.integers(0, B - 1), start=POSITIONS)
def test_oldest_block_is_in_order_around_the_end(name: str, row: int, start: int) -> None:
    rings = Rings(*_numbers(LAYOUTS[name], B, CAPACITY))
    at = [entry % CAPACITY for entry in range(start, start + BLOCK)]
    want = [None if ring is None else np.asarray(ring)[row, at] for ring in rings]
    _same(take_block(rings, jnp.int32(row), jnp.int32(start), BLOCK), want)


@pytest.mark.parametrize("name", LAYOUTS)
def test_entries_are_stored_in_the_type_of_the_ring(name: str) -> None:
    layout = LAYOUTS[name]
    rings = Rings(*jax.tree.map(jnp.zeros_like, _numbers(layout, B, CAPACITY, dtype="bfloat16")))
    new = Entries(*_numbers(layout, B))
    got = append_once(rings, new, jnp.full(B, 3 * CAPACITY + 1), jnp.ones(B, bool))
    for ring, entries in zip(got, new, strict=True):
        if ring is not None:
            assert ring.dtype == jnp.bfloat16
            np.testing.assert_array_equal(ring[:, 1], entries.astype(jnp.bfloat16))


# --- attention -------------------------------------------------------------------------------------


def _rings(key: Any, value: Any, start: list[int], end: list[int], layout: EntryLayout) -> Rings:
    """Rings that hold entries start .. end - 1 of each row, given oldest first, and NaN in all other places."""

    def put(x: Any) -> Any:
        ring = np.full((B, CAPACITY, *x.shape[2:]), np.nan, x.dtype)
        for row in range(B):
            for i in range(end[row] - start[row]):
                ring[row, (start[row] + i) % CAPACITY] = x[row, i]
        return ring

    return Rings(*_pair(layout, put(key), put(value)))


def _attend(
    name: str, dtype: str, q: Any, key: Any, value: Any, start: Any, end: Any, scale: float
) -> Partial:
    """Runs the kernel twice, checks it against the oracle, returns its result."""
    layout = CASES[name].layout
    rings = _rings(key, value, start, end, layout)
    args = (jnp.asarray(q), rings, jnp.array(start, jnp.int32), jnp.array(end, jnp.int32))
    got = attend_window(*args, layout=layout, scale=scale)
    lengths = np.subtract(end, start).astype(np.int32)
    check(got, oracle(*wide(q, key, value), jnp.asarray(lengths), scale=scale), dtype)
    assert bits(got) == bits(attend_window(*args, layout=layout, scale=scale))
    return got


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_it_equals_the_oracle(name: str, dtype: str) -> None:
    case = CASES[name]
    q, key, value = draw(case, 1, B, CAPACITY, dtype)
    for start, end in (
        ([0, 0, 0, 0], [0, 1, 33, 80]),  # the first turn
        ([70, 80, 320, 399], [81, 81, 400, 399]),
        ([7 * 80 + 1, 3231, 79, 99], [8 * 80 + 1, 3232, 80, 178]),
    ):
        _attend(name, dtype, q, key, value, start, end, case.scale)
        if name in BIG:
            break


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    start=st.lists(POSITIONS, min_size=B, max_size=B),
    size=st.lists(st.integers(0, CAPACITY), min_size=B, max_size=B),
)
def test_any_part_of_any_turn(seed: int, start: list[int], size: list[int]) -> None:
    case = CASES["gqa3_d24"]
    q, key, value = draw(case, seed, B, CAPACITY, "bfloat16")
    end = [a + b for a, b in zip(start, size, strict=True)]
    _attend("gqa3_d24", "bfloat16", q, key, value, start, end, case.scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL)
def test_equal_and_extreme_scores(name: str, dtype: str) -> None:
    q, key, value = draw(CASES[name], 2, B, CAPACITY, dtype)
    start, end = [75, 0, 400, 1000], [155, 3, 401, 1040]
    got = _attend(name, dtype, np.zeros_like(q), key, value, start, end, 1.0)
    sizes = np.array(end) - np.array(start)
    np.testing.assert_allclose(got.lse, np.log(sizes)[:, None] + np.zeros_like(got.lse), rtol=1e-6)
    q, key = sharpen(q, key, 3)
    if CASES[name].layout.value_in_key:
        value = key[..., : value.shape[-1]]
    _attend(name, dtype, q, key, value, start, end, 1.0)


@pytest.mark.parametrize("name", SMALL)
def test_appended_entries_are_attended_to_turn_after_turn(name: str) -> None:
    """A window that a block leaves as soon as there is no room, as in decoding: 250 tokens, three turns."""
    layout, scale, steps = CASES[name].layout, CASES[name].scale, 250
    q, key, value = draw(CASES[name], 4, B, steps, "float32")
    zeros = np.zeros((B, CAPACITY, layout.num_kv_heads, 1), np.float32)
    rings = Rings(*_pair(layout, zeros + 0 * key[:, :1], zeros + 0 * value[:, :1]))
    put = jax.jit(append, donate_argnums=0)
    start = 0
    for t in range(steps):
        if t - start == CAPACITY:
            block = take_block(rings, jnp.int32(1), jnp.int32(start), BLOCK)
            np.testing.assert_array_equal(block.key, key[1, start : start + BLOCK])
            start += BLOCK
        new = Entries(*_pair(layout, key[:, t], value[:, t]))
        rings = put(rings, new, jnp.full(B, t, jnp.int32), jnp.ones(B, bool))
        if t % 37 == 0 or t == steps - 1:
            first, last = (jnp.full(B, x, jnp.int32) for x in (start, t + 1))
            got = attend_window(jnp.asarray(q), rings, first, last, layout=layout, scale=scale)
            for row in range(B):
                held = slice(start, t + 1)
                o, lse = attend(q[row], key[row, held], value[row, held], scale)
                np.testing.assert_allclose(got.o[row], o, atol=1e-5)
                np.testing.assert_allclose(got.lse[row], lse, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_the_oracle_equals_float64(name: str) -> None:
    case = CASES[name]
    q, key, value = draw(case, 5, B, CAPACITY, "float32")
    lengths = [CAPACITY, 1, 50, 0]
    run = functools.partial(oracle, scale=case.scale)
    got = run(*wide(q, key, value), jnp.array(lengths, jnp.int32))
    for row, length in enumerate(lengths[:3]):
        o, lse = attend(q[row], key[row, :length], value[row, :length], case.scale)
        np.testing.assert_allclose(got.o[row], o, atol=1e-5)
        np.testing.assert_allclose(got.lse[row], lse, atol=1e-5)
    assert not np.any(np.asarray(got.o[3]))
    assert np.isneginf(got.lse[3]).all()


def test_a_write_widens_no_ring() -> None:
    """XLA:CPU scatters bfloat16 by way of float32, of the whole ring: the program must have no such array."""
    shape = (8, 48, 2, 16)
    rings = Rings(jnp.zeros(shape, jnp.bfloat16), jnp.zeros(shape, jnp.bfloat16))
    entry = Entries(jnp.ones((8, 2, 16), jnp.bfloat16), jnp.ones((8, 2, 16), jnp.bfloat16))
    prompt = Entries(jnp.ones((64, 2, 16), jnp.bfloat16), jnp.ones((64, 2, 16), jnp.bfloat16))
    rows = (jnp.zeros(8, jnp.int32), jnp.ones(8, bool))
    for fn, args in (
        (append, (entry, *rows)),
        (fill, (prompt, jnp.int32(3), jnp.int32(0), jnp.int32(40))),
    ):
        program = jax.jit(fn, donate_argnums=0).lower(rings, *args).compile()
        assert "f32[8,48,2,16]" not in program.as_text()
