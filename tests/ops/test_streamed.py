"""Chunks of the PINNED region: whose block is whose, and that each turn looks at the slot it was loaded into."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import DTYPES, RUNS, bits, check, draw, sharpen, wide
from ffi_bench import BLOCK, Bench, zero
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import CASES, SMALL
from wscope_jax.layout import ByteOrder, EntryLayout, unpack
from wscope_jax.ops import streamed
from wscope_jax.ops.joining import join_blocks
from wscope_jax.ops.reference import attend_reference
from wscope_jax.ops.streamed import (
    _most_turns,
    attend_chunk,
    streamed_attention,
)
from wscope_jax.partial import Partial, merge

B, C = 3, 5
OWNERS = {
    "one_each": [0, 1, 2, -1, -1],
    "several_of_one": [1, 1, 0, 1, -1],
    "apart": [2, 0, 2, 0, 2],
    "nobody": [-1, -1, -1, -1, -1],
    "outside": [-7, B, 0, B + 1, 2**31 - 1],
}


@functools.partial(jax.jit, static_argnames=("layout", "block", "scale"))
def attend(q: Any, chunk: Any, owner: Any, **sizes: Any) -> Partial:
    other = jnp.full_like(chunk, jnp.nan)
    shape = (1, *owner.shape, q.shape[1])
    empty = Partial(jnp.zeros((*shape, sizes["layout"].value_dim)), jnp.full(shape, -jnp.inf))
    one, turn = jnp.int32(1), jnp.int32(0)
    parts = attend_chunk(q, jnp.stack([other, chunk]), one, owner[None], turn, empty, **sizes)
    return join_blocks(Partial(parts.o[0], parts.lse[0]), owner, q.shape[0])


oracle = jax.jit(attend_reference, static_argnames="scale")


def _blocks(key: Any, value: Any, layout: EntryLayout) -> Any:
    """[n, G, D * stored_dim] of keys [n, D, G, K] and values [n, D, G, V], written out once more."""
    parts = [key] if layout.value_in_key else [key, value]
    rows = [x.swapaxes(1, 2).reshape(len(x), layout.num_kv_heads, -1) for x in parts]
    return np.concatenate(rows, axis=-1)


def _want(q: Any, key: Any, value: Any, owner: list[int], scale: float) -> Partial:
    """The oracle over the blocks that each row owns, joined to one sequence."""
    gathered = []
    for x in (key, value):
        rows = np.zeros((len(q), len(x) * x.shape[1], *x.shape[2:]), x.dtype)
        for row in range(len(q)):
            own = x[[c for c, r in enumerate(owner) if r == row]]
            rows[row, : own.shape[0] * own.shape[1]] = own.reshape(-1, *x.shape[2:])
        gathered.append(rows)
    lengths = [owner.count(row) * key.shape[1] for row in range(len(q))]
    return oracle(*wide(q, *gathered), jnp.array(lengths, jnp.int32), scale=scale)


def _check(
    name: str,
    dtype: str,
    q: Any,
    key: Any,
    value: Any,
    owner: list[int],
    scale: float,
    top: float = 0.0,
) -> Partial:
    layout = CASES[name].layout
    chunk = _blocks(key, value, layout)
    free = [c for c, row in enumerate(owner) if not 0 <= row < B]
    chunk[free] = np.resize(np.array([np.nan, np.inf, -np.inf], chunk.dtype), chunk[free].shape)
    args = (jnp.asarray(q), jnp.asarray(chunk), jnp.array(owner, jnp.int32))
    got = attend(*args, layout=layout, block=BLOCK, scale=scale)
    check(got, _want(q, key, value, owner, scale), dtype, top)
    assert bits(got) == bits(attend(*args, layout=layout, block=BLOCK, scale=scale))
    return got


def _draw(name: str, seed: int, dtype: str) -> Any:
    q = draw(CASES[name], seed, B, 1, dtype)[0]
    return (q, *draw(CASES[name], seed + 1, C, BLOCK, dtype)[1:])


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_each_row_attends_to_its_blocks(name: str, dtype: str) -> None:
    q, key, value = _draw(name, 1, dtype)
    for owner in OWNERS.values() if name in SMALL else [OWNERS["several_of_one"]]:
        got = _check(name, dtype, q, key, value, owner, CASES[name].scale)
        for row in set(range(B)) - set(owner):
            assert not np.any(np.asarray(got.o[row]))
            assert np.isneginf(got.lse[row]).all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), owner=st.lists(st.integers(-2, B + 1), min_size=C, max_size=C))
def test_any_owners(seed: int, owner: list[int]) -> None:
    q, key, value = _draw("gqa3_d24", seed, "bfloat16")
    _check("gqa3_d24", "bfloat16", q, key, value, owner, CASES["gqa3_d24"].scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL)
def test_equal_and_extreme_scores(name: str, dtype: str) -> None:
    q, key, value = _draw(name, 3, dtype)
    owner = OWNERS["several_of_one"]
    got = _check(name, dtype, np.zeros_like(q), key, value, owner, 1.0)
    np.testing.assert_allclose(got.lse[1], np.log(3 * BLOCK), rtol=1e-6)
    q, key = sharpen(q, key, 4)
    if CASES[name].layout.value_in_key:
        value = key[..., : value.shape[-1]]
    _check(name, dtype, q, key, value, owner, 1.0, top=1e4)
    key[1, ..., 0], key[3, ..., 0] = -100, 100  # two blocks of one row, 20000 apart
    if CASES[name].layout.value_in_key:
        value = key[..., : value.shape[-1]]
    _check(name, dtype, q, key, value, owner, 1.0, top=1e4)


@pytest.mark.parametrize("broken", ["q", "block"])
def test_a_row_that_is_broken_breaks_no_other(broken: str) -> None:
    q, key, value = _draw("gqa3_d24", 5, "float32")
    layout, scale = CASES["gqa3_d24"].layout, CASES["gqa3_d24"].scale
    owner = OWNERS["several_of_one"]
    want = _want(q, key, value, owner, scale)
    if broken == "q":
        q[1] = np.nan
    else:
        value[1, 3] = np.inf
    got = attend(
        jnp.asarray(q),
        jnp.asarray(_blocks(key, value, layout)),
        jnp.array(owner, jnp.int32),
        layout=layout,
        block=BLOCK,
        scale=scale,
    )
    assert not np.isfinite(got.o[1]).all()
    whole = np.array([0, 2])
    check(Partial(*(x[whole] for x in got)), Partial(*(x[whole] for x in want)), "float32")


# --- through the queue -----------------------------------------------------------------------------

LAYERS, SLOTS, PER_CHUNK = 3, 6, 2


@pytest.fixture(params=[(name, dtype) for name in SMALL for dtype in DTYPES], ids="-".join)
def streams(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, Bench]]:
    name, dtype = request.param
    bench = Bench(CASES[name].layout, dtype, LAYERS, SLOTS)
    yield name, dtype, bench
    bench.queue.close()
    bench.pool.close()


def _step(name: str, bench: Bench) -> Any:
    """All layers in one program, as a decode step chains them."""
    layout = CASES[name].layout

    def step(q: Any, slots: Any, owner: Any, order: Any) -> Any:
        order, parts = bench.begin(order), []
        for layer in range(LAYERS):
            part, slots, order = streamed_attention(
                q,
                slots,
                owner,
                order,
                turn=layer * owner.shape[0],
                layout=layout,
                block=BLOCK,
                scale=CASES[name].scale,
                engine=bench.queue.id,
            )
            parts.append(part)
            q = q + (part.o.sum() * 0).astype(q.dtype)  # a layer needs the one before it
        return parts, slots, order

    return jax.jit(step, donate_argnums=1)


def _stored(bench: Bench, layer: int) -> Any:
    """Keys [slots, D, G, K] and values of a layer of the pool."""
    blocks = np.stack([np.asarray(bench.block(layer, s)) for s in range(SLOTS)])
    shaped = jnp.asarray(blocks.reshape(SLOTS, bench.layout.num_kv_heads, -1))
    return [
        np.asarray(x).swapaxes(1, 2) for x in unpack(shaped, bench.layout, BLOCK, ByteOrder.ROWS)
    ]


@pytest.mark.parametrize("parts_bytes", [1, 32 << 20], ids=["joined_each", "joined_once"])
@pytest.mark.parametrize("turns", [1, 3])
def test_an_odd_number_of_turns_over_several_layers(
    turns: int,
    streams: tuple[str, str, Bench],
    parts_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streamed, "PARTS_BYTES", parts_bytes)
    name, dtype, bench = streams
    layout = CASES[name].layout
    q = draw(CASES[name], 6, B, 1, dtype)[0]
    shape = (2, PER_CHUNK, layout.num_kv_heads, BLOCK * layout.stored_dim)
    slots, order = jnp.full(shape, jnp.nan, jnp.dtype(dtype)), zero()
    step = _step(name, bench)
    seen = []
    # Owners by slot of the pool. The second step begins with slot 0 again, though the first had an odd number of loads.
    for owners in ([0, 2, 1, 1, -1, 0], [1, 0, 2, -1, 2, 2], [0, 2, 1, 1, -1, 0]):
        used = owners[: turns * PER_CHUNK]
        spans = [(first, PER_CHUNK) for first in range(0, len(used), PER_CHUNK)]
        bench.push(loads=[(layer, first, num) for layer in range(LAYERS) for first, num in spans])
        owner = jnp.array(used, jnp.int32).reshape(turns, PER_CHUNK)
        parts, slots, order = step(jnp.asarray(q), slots, owner, order)
        for layer, part in enumerate(parts):
            key, value = _stored(bench, layer)
            want = _want(q, key[: len(used)], value[: len(used)], used, CASES[name].scale)
            check(part, want, dtype)
        seen.append([bits(part) for part in parts])
        assert bench.queue.idle
    assert bench.queue.poison is None
    assert seen[0] == seen[2]
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    ("turns", "turn_bytes", "most"),
    [(6, 1, 6), (6, 8 << 20, 3), (6, 12 << 20, 2), (24, 5 << 20, 6), (3, 64 << 20, 1), (1, 1, 1)],
)
def test_partials_that_wait_are_bounded(turns: int, turn_bytes: int, most: int) -> None:
    assert _most_turns(turns, turn_bytes) == most


def test_surplus_turns_and_short_chunks_add_nothing(streams: tuple[str, str, Bench]) -> None:
    name, dtype, bench = streams
    layout = CASES[name].layout
    q = draw(CASES[name], 7, B, 1, dtype)[0]
    shape = (2, PER_CHUNK, layout.num_kv_heads, BLOCK * layout.stored_dim)
    spans, owner = [(4, 2), (2, 1), (0, 0)], [[0, 1], [1, -1], [-1, -1]]
    bench.push(loads=[(layer, first, num) for layer in range(LAYERS) for first, num in spans])
    parts, *_ = _step(name, bench)(
        jnp.asarray(q),
        jnp.full(shape, jnp.nan, jnp.dtype(dtype)),
        jnp.array(owner, jnp.int32),
        zero(),
    )
    for layer, part in enumerate(parts):
        key, value = (x[[4, 5, 2]] for x in _stored(bench, layer))
        check(part, _want(q, key, value, [0, 1, 1], CASES[name].scale), dtype)


def test_parts_of_one_chunk_each_merge_to_the_whole() -> None:
    q, key, value = _draw("mla5_40", 8, "float32")
    owner, layout = OWNERS["apart"], CASES["mla5_40"].layout
    chunk = jnp.asarray(_blocks(key, value, layout))
    how = {"layout": layout, "block": BLOCK, "scale": CASES["mla5_40"].scale}
    parts = [
        attend(
            jnp.asarray(q),
            chunk,
            jnp.array([r if c == i else -1 for c, r in enumerate(owner)], jnp.int32),
            **how,
        )
        for i in range(C)
    ]
    check(merge(*parts), _want(q, key, value, owner, how["scale"]), "float32")
