"""The GPU's kernels against their plain twins, interpreted; and their lowering for CUDA, which needs no GPU."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import DTYPES, RUNS, check, draw, wide

from tests.cases import CASES
from tests.lowering import target
from wscope_jax.layout import EntryLayout
from wscope_jax.ops import joining, pallas, streamed, window
from wscope_jax.ops.tiling import key_parts
from wscope_jax.partial import Partial
from wscope_jax.views import Rings

BLOCK = 64
OWNER = [2, -1, 0, 0, 3, -7]


def _rings(name: str, dtype: str, rows: int, capacity: int) -> tuple[Any, Rings]:
    q, key, value = draw(CASES[name], 1, rows, capacity, dtype)
    in_key = CASES[name].layout.value_in_key
    return jnp.asarray(q), Rings(jnp.asarray(key), None if in_key else jnp.asarray(value))


def _slots(name: str, dtype: str) -> tuple[Any, Any]:
    q = draw(CASES[name], 3, 3, 1, dtype)[0]
    _, key, value = draw(CASES[name], 4, len(OWNER), BLOCK, dtype)
    parts = [key] if CASES[name].layout.value_in_key else [key, value]
    rows = [x.swapaxes(1, 2).reshape(len(x), x.shape[2], -1) for x in parts]
    chunk = jnp.asarray(np.concatenate(rows, axis=-1))
    free = np.array([not 0 <= row < 3 for row in OWNER])
    chunk = jnp.where(free[:, None, None], jnp.nan, chunk).astype(dtype)
    return jnp.asarray(q), jnp.stack([jnp.full_like(chunk, jnp.nan), chunk])


def _parts(name: str) -> Partial:
    """Of two turns, before the second."""
    shape = (2, len(OWNER), CASES[name].num_q_heads)
    return Partial(jnp.full((*shape, CASES[name].layout.value_dim), 7.0), jnp.full(shape, 7.0))


@pytest.mark.parametrize(("name", "dtype"), RUNS)
@pytest.mark.parametrize("capacity", [80, 1100], ids=["window", "resident"])
def test_rings(name: str, dtype: str, capacity: int) -> None:
    if capacity > 80 and CASES[name].layout.key_dim > 200:
        pytest.skip("slow to interpret, and no other path")
    q, rings = _rings(name, dtype, 4, capacity)
    # Nothing; one entry; all of it, from the middle on; some, across the end.
    start = jnp.array([7, 1000, 33, capacity - 3], jnp.int32)
    end = start + jnp.array([0, 1, capacity, 21], jnp.int32)
    sizes: dict[str, Any] = {"layout": CASES[name].layout, "scale": CASES[name].scale}
    want = window.attend_rings(
        *wide(q), jax.tree.map(lambda x: wide(x)[0], rings), start, end, **sizes
    )
    got = pallas.attend_rings(q, rings, start, end, interpret=True, **sizes)
    check(got, want, dtype)
    assert np.isneginf(np.asarray(got.lse[0])).all()
    assert not np.asarray(got.o[0]).any()


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_blocks(name: str, dtype: str) -> None:
    q, slots = _slots(name, dtype)
    owner, index, turn = jnp.array([OWNER[::-1], OWNER], jnp.int32), jnp.int32(1), jnp.int32(1)
    parts = _parts(name)
    sizes: dict[str, Any] = {
        "layout": CASES[name].layout,
        "scale": CASES[name].scale,
        "block": BLOCK,
    }
    want = streamed.attend_blocks(*wide(q, slots), index, owner, turn, parts, **sizes)
    got = pallas.attend_blocks(q, slots, index, owner, turn, parts, interpret=True, **sizes)
    check(got, want, dtype)
    assert np.isneginf(np.asarray(got.lse[1]))[[1, 4, 5]].all()
    assert (np.asarray(got.lse[0]) == 7).all()


def _blocks_of_rows(name: str, owner: list[int]) -> tuple[Partial, Any]:
    """Partials of blocks, an empty one among them, and NaNs where nobody owns the block."""
    rng, case = np.random.default_rng(5), CASES[name]
    shape = (len(owner), case.num_q_heads)
    o = rng.normal(size=(*shape, case.layout.value_dim)).astype(np.float32)
    lse = rng.uniform(-30, 30, shape).astype(np.float32)
    o[1], lse[1] = 0, -np.inf
    free = [not 0 <= row < 4 for row in owner]
    o[free], lse[free] = np.nan, np.nan
    return Partial(jnp.asarray(o), jnp.asarray(lse)), jnp.array(owner, jnp.int32)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [6, 32, 75])
def test_joined_blocks(name: str, count: int) -> None:
    owner = [*OWNER, *np.random.default_rng(count).integers(-1, 4, count - 6).tolist()]
    part, owner_C = _blocks_of_rows(name, owner)
    sizes: dict[str, Any] = {"num_rows": 5}  # the last owns nothing
    want = joining.contract(
        jax.tree.map(lambda x: jnp.nan_to_num(x, neginf=-jnp.inf), part), owner_C, **sizes
    )
    got = joining.gather(part, owner_C, interpret=True, **sizes)
    np.testing.assert_allclose(got.o, want.o, atol=1e-5)
    np.testing.assert_allclose(got.lse, want.lse, atol=1e-5)
    assert np.isneginf(np.asarray(got.lse[4])).all()
    assert not np.asarray(got.o[4]).any()


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("field", ["o", "lse"])
def test_a_broken_block_is_joined_to_its_own_row_alone(field: str, broken: float) -> None:
    if field == "lse" and np.isneginf(broken):
        pytest.skip("an empty block, not a broken one")
    part, owner = _blocks_of_rows("gqa3_d24", OWNER)
    o, lse = np.array(part.o), np.array(part.lse)
    want = joining.gather(part, owner, num_rows=4, interpret=True)
    if field == "o":
        o[2, 1, 3] = broken
    else:
        lse[2, 1] = broken
    got = joining.gather(
        Partial(jnp.asarray(o), jnp.asarray(lse)), owner, num_rows=4, interpret=True
    )
    free = [row < 0 or row >= 4 for row in OWNER]
    o[free], lse[free] = 0, 0  # the twin reads what nobody owns
    twin = joining.contract(Partial(jnp.asarray(o), jnp.asarray(lse)), owner, num_rows=4)
    for which in (got, twin):
        assert np.isnan(which.o[0, 1]).all()
        np.testing.assert_allclose(which.o[0, 0], want.o[0, 0], atol=1e-5)
        np.testing.assert_allclose(which.o[1:], want.o[1:], atol=1e-5)


def _dots(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from _dots(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_kernels_lower_for_cuda_with_exact_products(name: str, dtype: str) -> None:
    case = CASES[name]
    layout: EntryLayout = case.layout
    q, rings = _rings(name, dtype, 2, 80)
    _, slots = _slots(name, dtype)
    rows = jnp.zeros(2, jnp.int32)
    owner = jnp.array([OWNER, OWNER], jnp.int32)

    def ring(*args: Any) -> Partial:
        return pallas.attend_rings(*args, layout=layout, scale=case.scale)

    def block(*args: Any) -> Partial:
        return pallas.attend_blocks(*args, layout=layout, block=BLOCK, scale=case.scale)

    def joined(part: Partial, owner: Any) -> Partial:
        return joining.join_blocks(part, owner, 3)

    blocks, owner_C = Partial(*(x.reshape(-1, *x.shape[2:]) for x in _parts(name))), owner.ravel()
    with target("cuda"):
        traced = jax.jit(joined).trace(blocks, owner_C)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in text
    assert "dot_general" not in text
    for fn, args in (
        (ring, (q, rings, rows, rows)),
        (block, (q, slots, jnp.int32(0), owner, jnp.int32(1), _parts(name))),
    ):
        with target("cuda"):
            traced = jax.jit(fn).trace(*args)
            lowered = traced.lower(lowering_platforms=("cuda",))
        dots = list(_dots(traced.jaxpr.jaxpr))
        assert len(dots) == (1 if dtype == "float32" else 2) + len(key_parts(layout))
        assert all(dot.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2 for dot in dots)
        assert "triton" in lowered.as_text()
