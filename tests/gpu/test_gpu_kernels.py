"""The GPU's kernels, compiled for the GPU, against their twins in plain JAX: every shape, every storage."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.benchmarks.test_mapped import check_mapped
from tests.cases import CASES
from tests.ops.exact import DTYPES, check, draw, wide
from wscope_jax.ops import joining, pallas, streamed, window
from wscope_jax.partial import Partial
from wscope_jax.views import Rings

pytestmark = pytest.mark.gpu

BLOCK = 64
OWNER = [2, -1, 0, 0, 3, -7]
RUNS = [(name, dtype) for name in CASES for dtype in DTYPES]


def on_cpu(fn: Any, *args: Any, **sizes: Any) -> Any:
    with jax.default_device(jax.devices("cpu")[0]):
        return fn(*jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), args), **sizes)


@pytest.mark.parametrize(("name", "dtype"), RUNS)
@pytest.mark.parametrize("capacity", [80, 1100], ids=["window", "resident"])
def test_rings(name: str, dtype: str, capacity: int) -> None:
    case = CASES[name]
    q, key, value = draw(case, 1, 4, capacity, dtype)
    # Nothing; one entry; all of it, from the middle on; some, across the end.
    start = np.array([7, 1000, 33, capacity - 3], np.int32)
    end = start + np.array([0, 1, capacity, 21], np.int32)
    sizes: dict[str, Any] = {"layout": case.layout, "scale": case.scale}

    def rings(*arrays: Any) -> Rings:
        return Rings(arrays[0], None if case.layout.value_in_key else arrays[1])

    want = on_cpu(window.attend_rings, *wide(q), rings(*wide(key, value)), start, end, **sizes)
    got = pallas.attend_rings(
        jnp.asarray(q),
        rings(jnp.asarray(key), jnp.asarray(value)),
        jnp.asarray(start),
        jnp.asarray(end),
        **sizes,
    )
    check(got, want, dtype)
    assert np.isneginf(np.asarray(got.lse[0])).all()


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_blocks(name: str, dtype: str) -> None:
    case = CASES[name]
    q = draw(case, 3, 3, 1, dtype)[0]
    _, key, value = draw(case, 4, len(OWNER), BLOCK, dtype)
    parts = [key] if case.layout.value_in_key else [key, value]
    chunk = np.concatenate(
        [x.swapaxes(1, 2).reshape(len(x), x.shape[2], -1) for x in parts], axis=-1
    )
    chunk[[not 0 <= row < 3 for row in OWNER]] = np.nan  # nobody's
    slots = np.stack([np.full_like(chunk, np.nan), chunk])
    owner, index, turn = np.array([OWNER[::-1], OWNER], np.int32), np.int32(1), np.int32(1)
    shape = (2, len(OWNER), case.num_q_heads)
    parts = Partial(
        np.full((*shape, case.layout.value_dim), 7, np.float32), np.full(shape, 7, np.float32)
    )
    sizes: dict[str, Any] = {"layout": case.layout, "scale": case.scale, "block": BLOCK}
    want = on_cpu(streamed.attend_blocks, *wide(q, slots), index, owner, turn, parts, **sizes)
    arrays = jax.tree.map(jnp.asarray, (q, slots, index, owner, turn, parts))
    got = pallas.attend_blocks(*arrays, **sizes)
    check(got, want, dtype)
    assert np.isneginf(np.asarray(got.lse[1]))[[1, 4, 5]].all()
    assert (np.asarray(got.lse[0]) == 7).all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [6, 32, 75, 512])
def test_joined_blocks(name: str, count: int) -> None:
    rng, case = np.random.default_rng(count), CASES[name]
    owner = np.array([*OWNER, *rng.integers(-1, 4, count - 6)], np.int32)
    shape = (count, case.num_q_heads)
    o = rng.normal(size=(*shape, case.layout.value_dim)).astype(np.float32)
    lse = rng.uniform(-30, 30, shape).astype(np.float32)
    o[2], lse[2] = 0, -np.inf  # a block without entries
    free = (owner < 0) | (owner >= 4)
    want = on_cpu(
        functools.partial(joining.contract, num_rows=5),
        Partial(np.where(free[:, None, None], 0, o), np.where(free[:, None], 0, lse)),
        owner,
    )
    o[free], lse[free] = np.nan, np.nan
    gather = jax.jit(functools.partial(joining.gather, num_rows=5))
    got = gather(Partial(jnp.asarray(o), jnp.asarray(lse)), jnp.asarray(owner))
    np.testing.assert_allclose(np.asarray(got.o), np.asarray(want.o), atol=1e-5)
    np.testing.assert_allclose(np.asarray(got.lse), np.asarray(want.lse), atol=1e-5)


@pytest.mark.parametrize("name", ["gqa4_d128", "mla16_576"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_read_where_they_lie(name: str, dtype: str) -> None:
    check_mapped(name, dtype)
