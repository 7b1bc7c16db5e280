"""Pools, queues and workers as Python objects: numbers, lifetimes, the end of a process, forks."""

import os
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from wscope_jax import _ffi


def test_numbers_are_the_lowest_free_ones() -> None:
    queues = [_ffi.StepQueue() for _ in range(3)]
    pools = [_ffi.Pool(1, 1, 8) for _ in range(3)]
    for things in (queues, pools):
        numbers = [thing.id for thing in things]
        assert numbers == sorted(set(numbers))
        things[1].close()
    assert _ffi.StepQueue().id == queues[1].id
    del queues, pools


def test_a_queue_has_no_handshake_before_a_gpu() -> None:
    assert _ffi.StepQueue().handshake == ""


def test_a_view_outlives_its_pool() -> None:
    pool = _ffi.Pool(2, 4, 100)
    pool.commit(3)
    view = pool.view(1, 2)
    view[:] = 7
    assert view.shape == (100,)
    assert pool.view(1, 2)[99] == 7
    with pytest.raises(IndexError, match="slot 3"):
        pool.view(0, 3)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.view(0, 0)
    del pool
    assert view.sum() == 700


def test_a_pool_reserves_more_than_it_takes() -> None:
    pool = _ffi.Pool(4, 1 << 16, 1 << 16)
    assert (pool.committed, pool.max_slots, pool.block_bytes, pool.num_layers) == (
        0,
        1 << 16,
        1 << 16,
        4,
    )
    pool.commit(2)
    pool.commit(1)
    assert pool.committed == 2
    for bad, text in ((-1, "num_slots is -1"), ((1 << 16) + 1, "num_slots is 65537")):
        with pytest.raises(ValueError, match=text):
            pool.commit(bad)
    with pytest.raises(ValueError, match="overflow"):
        _ffi.Pool(1 << 30, 1 << 30, 1 << 30)
    with pytest.raises(MemoryError, match="address space"):
        _ffi.Pool(1, 1 << 20, 1 << 40)


def test_timings_are_positive() -> None:
    _ffi.start_workers(2)
    assert _ffi.num_workers() == 2
    assert _ffi.time_attention(8, 2, 64, 64, False, 32, "bfloat16", 3) > 0
    assert _ffi.time_attention(16, 1, 72, 64, True, 64, "float32", 1) > 0
    assert _ffi.time_copy(1 << 20) > 0
    with pytest.raises(ValueError, match="num_q_heads"):
        _ffi.time_attention(8, 3, 64, 64, False, 32, "bfloat16", 3)
    with pytest.raises(ValueError, match="storage"):
        _ffi.time_attention(8, 2, 64, 64, False, 32, "int8", 3)
    with pytest.raises(ValueError, match="num_bytes"):
        _ffi.time_copy(0)


def test_streams_run_alone_and_at_once() -> None:
    _ffi.start_workers(2)
    read, link = _ffi.Pool(2, 3, 5000), _ffi.Pool(3, 2, 7000)
    isa = _ffi.isas()[-1]
    with pytest.raises(ValueError, match="no committed slot"):
        _ffi.measure_streams(read, None, 4096, 0.02, isa)
    read.commit(3)
    link.commit(1)
    assert [r > 0 for r in _ffi.measure_streams(read, None, 4096, 0.02, isa)] == [True, False]
    assert [r > 0 for r in _ffi.measure_streams(None, link, 4096, 0.02, isa)] == [False, True]
    assert min(_ffi.measure_streams(read, link, 1 << 20, 0.2, isa)) > 0
    with pytest.raises(ValueError, match="chunk_bytes"):
        _ffi.measure_streams(read, link, 0, 0.02, isa)
    with pytest.raises(ValueError, match="seconds"):
        _ffi.measure_streams(read, link, 4096, float("nan"), isa)
    with pytest.raises(ValueError, match="not pinned"):
        _ffi.measure_streams(read, link, 4096, 0.02, isa, 0)
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="link_rate"):
            _ffi.measure_streams(None, link, 4096, 0.02, isa, link_rate=rate)


def test_no_prefetch_behind_the_loads() -> None:
    _ffi.start_workers(2)
    pool, isa = _ffi.Pool(1, 1, 32 * 2 * 64 * 2 * 2), _ffi.isas()[-1]
    pool.commit(1)
    table, shape = np.zeros((1, 1), np.int32), (8, 2, 64, 64, False, 32, "bfloat16", isa)
    for prefetch_bytes in (-1, 0, 1 << 40):  # no further than a head
        assert min(_ffi.measure_attention(pool, 0, table, *shape, prefetch_bytes)) > 0
    for nothing in (table[:, :0], table[:0]):
        with pytest.raises(ValueError, match="table: has no slot"):
            _ffi.measure_attention(pool, 0, nothing, *shape)
    with pytest.raises(ValueError, match="prefetch_bytes"):
        _ffi.measure_attention(pool, 0, table, *shape, -2)
    with pytest.raises(ValueError, match="prefetch_bytes"):
        _ffi.measure_read(pool, 0, 1, isa, -2)


def test_a_paced_link_keeps_its_rate() -> None:
    _ffi.start_workers(2)
    link, isa, rate = _ffi.Pool(1, 4, 1 << 20), _ffi.isas()[-1], 200e6
    link.commit(4)

    def measured(seconds: float, link_rate: float | None) -> float:
        return _ffi.measure_streams(None, link, 1 << 20, seconds, isa, None, link_rate)[1]

    assert 0 < measured(0.3, rate) < 2 * rate
    assert measured(0.3, None) > 4 * rate
    assert measured(0.3, 1e18) > 4 * rate  # a rate that no link reaches holds nothing up
    # The second copy would be due long after the end.
    began = time.monotonic()
    assert measured(0.1, 5e-324) > 0
    assert time.monotonic() - began < 10


def _run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )


def test_the_process_ends_cleanly_with_work_under_way() -> None:
    done = _run("""
        import jax, jax.numpy as jnp, numpy as np
        from wscope_jax import _ffi
        from wscope_jax.layout import EntryLayout
        from wscope_jax.ops import host

        _ffi.start_workers(2)
        pool = _ffi.Pool(1, 2, 32 * 2 * 4)
        pool.commit(2)
        queue = _ffi.StepQueue()
        queue.set_fault(store_delay_ms=200, job_delay_ms=200)
        none = [np.zeros((0, n), np.int32) for n in (2, 3)]
        ptr, table = np.asarray([0, 2], np.int32), np.asarray([0, 1], np.int32)
        queue.push(np.asarray([[0, 0, 1]], np.int32), pool.id, ptr, table, -1, none[1],
                   np.asarray([[0, 1]], np.int32), np.asarray([[0, pool.id, 0]], np.int32))
        layout = EntryLayout(num_kv_heads=1, key_dim=1, value_dim=1)
        def step(q, blocks, order):
            order = host.step_begin(order, engine=queue.id)
            q, order = host.host_start(q, order, layout=layout, block=32, scale=1.0,
                                       storage="float32", engine=queue.id)
            return q, host.store(blocks, order, engine=queue.id)
        jax.block_until_ready(
            jax.jit(step)(jnp.ones((1, 1, 1)), jnp.ones((1, 1, 64)), jnp.zeros((), jnp.int32)))
        assert queue.completed == 0
        print("end")
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_forked_child_is_told_at_once() -> None:
    done = _run("""
        import os, warnings
        import numpy as np
        from wscope_jax import _ffi

        warnings.simplefilter("ignore")
        _ffi.start_workers(2)
        pool, queue = _ffi.Pool(1, 2, 64), _ffi.StepQueue()
        none = np.zeros((0, 3), np.int32)
        ints = np.zeros(1, np.int32)
        push = lambda: queue.push(none, -1, ints, ints[:0], -1, none, none[:, :2], none)
        push()
        child = os.fork()
        if child == 0:
            texts = []
            for call in (push, lambda: _ffi.start_workers(2), lambda: pool.commit(1)):
                try:
                    call()
                except RuntimeError as error:
                    texts.append(str(error))
            good = len(texts) == 3 and all("fork" in text for text in texts)
            queue.close()
            os._exit(0 if good else 1)
        print(os.waitpid(child, 0)[1])
    """)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
