"""The custom calls as a compiled program sees them: results, order, concurrency."""

import threading
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ffi_bench import BLOCK, DTYPES, GQA, MLA, Bench, zero

from wscope_jax.layout import EntryLayout
from wscope_jax.ops import host
from wscope_jax.partial import Partial


@pytest.fixture(params=["float32", "bfloat16"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(GQA, request.param)
    yield made
    made.queue.close()
    made.pool.close()


@pytest.fixture
def plain() -> Iterator[Bench]:
    made = Bench(GQA, "float32")
    yield made
    made.queue.close()
    made.pool.close()


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize("q_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("layout", "num_heads"), [(GQA, 8), (GQA, 2), (MLA, 16)])
def test_start_and_finish_match_numpy(
    layout: EntryLayout, num_heads: int, storage: str, q_dtype: str
) -> None:
    bench = Bench(layout, storage)
    tables: list[list[int]] = [[3, 1, 4], [], [0], [5, 2]]
    rng = np.random.default_rng(1)
    q = rng.standard_normal((4, num_heads, layout.key_dim)).astype(DTYPES[q_dtype])
    step = jax.jit(bench.attend)
    order = zero()
    for layer in (1, 0, 1):
        bench.push([(layer, 0, 4)], tables)
        partial, order = step(q, order)
        for row, slots in enumerate(tables):
            o, lse = bench.reference(layer, q[row], slots)
            np.testing.assert_allclose(partial.o[row], o, atol=2e-5)
            np.testing.assert_allclose(partial.lse[row], lse, atol=2e-5)
    assert bench.queue.idle
    assert bench.queue.poison is None
    bench.queue.close()


def test_side_effects_are_known_to_xla_and_not_to_jax(plain: Bench) -> None:
    """JAX would dispatch a program that has an effect in Python, argument by argument."""
    q = jnp.zeros((2, 4, plain.layout.key_dim))
    step = jax.jit(plain.attend)
    assert not jax.make_jaxpr(step)(q, zero()).effects
    calls = [line for line in step.lower(q, zero()).as_text().splitlines() if "@wscope_" in line]
    assert len(calls) == 3
    assert all("has_side_effect = true" in line for line in calls)


def test_two_halves_may_be_open(plain: Bench) -> None:
    def step(q: jax.Array, order: jax.Array) -> tuple[Partial, Partial, jax.Array]:
        order = plain.begin(order)
        first, order = plain.start(q[:1], order)
        second, order = plain.start(q[1:], order)
        a, order = plain.finish(first, order)
        b, order = plain.finish(second, order)
        return a, b, order

    tables = [[1, 2], [3], [0, 4]]
    q = np.random.default_rng(2).standard_normal((3, 4, GQA.key_dim)).astype(np.float32)
    plain.push([(0, 0, 1), (0, 1, 2)], tables)
    a, b, _ = jax.jit(step)(q, zero())
    for row, slots in enumerate(tables):
        o, _ = plain.reference(0, q[row], slots)
        np.testing.assert_allclose(np.concatenate([a.o, b.o])[row], o, atol=2e-5)


def test_results_repeat_bit_by_bit(bench: Bench) -> None:
    q = np.random.default_rng(3).standard_normal((1, 8, GQA.key_dim)).astype(np.float32)
    step = jax.jit(bench.attend)
    seen = []
    for _ in range(5):
        bench.push([(0, 0, 1)], [[0, 1, 2, 3, 4]])
        partial, _ = step(q, zero())
        seen.append((np.asarray(partial.o).tobytes(), np.asarray(partial.lse).tobytes()))
    assert len(set(seen)) == 1


def test_start_returns_while_the_job_runs(plain: Bench) -> None:
    delay_s = 0.3
    start = jax.jit(lambda q, order: plain.start(q, plain.begin(order)))
    finish = jax.jit(plain.finish)
    q = jnp.ones((1, 4, GQA.key_dim))
    for delay_ms in (0, int(1000 * delay_s)):  # the first round compiles
        plain.queue.set_fault(job_delay_ms=delay_ms)
        plain.push([(0, 0, 1)], [[0, 1]])
        begun = time.perf_counter()
        q, order = jax.block_until_ready(start(q, zero()))
        started = time.perf_counter()
        jax.block_until_ready(finish(q, order))
        finished = time.perf_counter()
    assert started - begun < delay_s / 2
    assert finished - begun >= delay_s
    (timing,) = plain.queue.drain_timings()[1:]
    cpu_ns, link_ns, link_idle_ns, wait_cpu_ns, *rest = timing
    assert cpu_ns >= 1e9 * delay_s
    assert wait_cpu_ns >= 1e9 * (finished - started) / 2
    assert 0 < link_ns < 1e9 * delay_s
    assert rest == [0, 2 * BLOCK, 0]  # wait_link_ns, entries of the host, of the link
    assert link_idle_ns == wait_cpu_ns


@pytest.mark.parametrize("num_slots", [2, 3, 4])
def test_loads_take_the_slots_in_turns(bench: Bench, num_slots: int) -> None:
    chunk = 3

    def step(slots: jax.Array, order: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        order = bench.begin(order)
        after = jnp.zeros((2, 1))
        seen = []
        for _ in range(4):
            slots, after, order = host.load(slots, after, order, engine=bench.queue.id)
            seen.append(slots + jnp.zeros_like(slots))  # a copy, before the next load
            after = after + seen[-1][0, 0, 0, 0].astype(jnp.float32)
        return seen, order

    numbers = BLOCK * GQA.stored_dim
    loads = [(0, 1, 3), (1, 0, 2), (0, 0, 0), (1, 5, 1)]
    slots = np.zeros((num_slots, chunk, GQA.num_kv_heads, numbers), bench.dtype)
    bench.push(loads=loads)
    seen, _ = jax.jit(step, donate_argnums=0)(jnp.asarray(slots), zero())
    for turn, (layer, first, count) in enumerate(loads):
        for slot in range(count):
            slots[turn % num_slots, slot] = bench.block(layer, first + slot).reshape(
                GQA.num_kv_heads, -1
            )
        np.testing.assert_array_equal(
            np.asarray(seen[turn]).astype(np.float32), slots.astype(np.float32)
        )
    assert bench.queue.idle


def test_donated_buffers_stay_where_they_are(plain: Bench) -> None:
    def step(slots: jax.Array, order: jax.Array) -> tuple[jax.Array, jax.Array]:
        order = plain.begin(order)
        slots, _, order = host.load(slots, jnp.zeros(()), order, engine=plain.queue.id)
        return slots, order

    program = jax.jit(step, donate_argnums=(0, 1))
    slots = jnp.zeros((2, 1, GQA.num_kv_heads, BLOCK * GQA.stored_dim))
    order = zero()
    pointers = (slots.unsafe_buffer_pointer(), order.unsafe_buffer_pointer())
    for _ in range(3):
        plain.push(loads=[(0, 2, 1)])
        slots, order = program(slots, order)
        assert (slots.unsafe_buffer_pointer(), order.unsafe_buffer_pointer()) == pointers
    np.testing.assert_array_equal(np.asarray(slots[0, 0]).ravel(), plain.block(0, 2))


def test_stores_land_in_order_and_count_tickets(bench: Bench) -> None:
    def step(blocks: jax.Array, order: jax.Array) -> jax.Array:
        order = bench.begin(order)
        for layer in range(2):
            order = host.store(blocks + layer, order, engine=bench.queue.id)
        return order

    shape = (3, GQA.num_kv_heads, BLOCK * GQA.stored_dim)
    blocks = (np.arange(np.prod(shape)).reshape(shape) % 61).astype(bench.dtype)
    before = bench.block(0, 1).copy()
    bench.queue.set_fault(store_delay_ms=30)
    bench.push(stores=[(0, 2), (1, 1)], moves=[(2, 0), (0, 3), (1, 5)])
    jax.block_until_ready(jax.jit(step)(blocks, zero()))
    assert bench.queue.idle
    assert not bench.queue.wait_completed(2, 0.0)
    assert bench.queue.staged_layers >= 1
    assert bench.queue.staged_bytes % bench.pool.block_bytes == 0
    assert bench.queue.wait_completed(1, 10.0)
    assert bench.queue.wait_completed(2, 10.0)
    assert (bench.queue.completed, bench.queue.staged_layers, bench.queue.staged_bytes) == (2, 0, 0)
    assert bench.queue.staged_high_water == 2
    for layer, block, slot in ((0, 2, 0), (0, 0, 3), (1, 1, 5)):
        want = (blocks[block].astype(np.float32) + layer).ravel()
        np.testing.assert_array_equal(bench.block(layer, slot).astype(np.float32), want)
    np.testing.assert_array_equal(bench.block(0, 1), before)
    assert len(bench.queue.drain_timings()) == 0


def test_a_store_without_moves_has_a_ticket(plain: Bench) -> None:
    blocks = jnp.zeros((1, GQA.num_kv_heads, BLOCK * GQA.stored_dim))
    plain.push(stores=[(0, 0)])
    step = jax.jit(
        lambda blocks, order: host.store(blocks, plain.begin(order), engine=plain.queue.id)
    )
    step(blocks, zero())
    assert plain.queue.wait_completed(1, 10.0)
    assert plain.queue.staged_high_water == 0


def test_wait_completed_lets_other_threads_run(plain: Bench) -> None:
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.005):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    begun = time.perf_counter()
    assert not plain.queue.wait_completed(1, 0.2)
    waited = time.perf_counter() - begun
    stop.set()
    thread.join()
    assert 0.15 < waited < 5.0
    assert len(ticks) > 3
