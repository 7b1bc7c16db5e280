"""Merging partial results equals attention over the union, for every cut and without a NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wscope_jax.ops.reference import masked_attention
from wscope_jax.partial import Partial, empty_partial, merge

B, H, G, S, K, V = 2, 4, 2, 12, 8, 6


@jax.jit
def _split_and_whole(
    seed: jax.Array, part_of: jax.Array, gain: jax.Array
) -> tuple[Partial, Partial]:
    keys = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(keys[0], (B, H, K)) * gain
    key = jax.random.normal(keys[1], (B, G, S, K))
    value = jax.random.normal(keys[2], (B, G, S, V))
    parts = [masked_attention(q, key, value, part_of == i, scale=0.3) for i in range(3)]
    return merge(*parts), masked_attention(q, key, value, part_of < 3, scale=0.3)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    parts=st.lists(st.integers(0, 3), min_size=B * S, max_size=B * S),
    gain=st.sampled_from([1.0, 1e-3, 100.0, 3e4]),
)
def test_merge_of_any_cut_is_attention_over_the_union(
    seed: int, parts: list[int], gain: float
) -> None:
    part_of = jnp.array(parts, jnp.int32).reshape(B, S)
    merged, whole = _split_and_whole(jnp.int32(seed), part_of, jnp.float32(gain))
    np.testing.assert_allclose(merged.o, whole.o, atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(merged.lse, whole.lse, atol=2e-5, rtol=2e-5)
    assert not np.isnan(merged.o).any()
    assert not np.isnan(merged.lse).any()


def test_empty_partials_drop_out() -> None:
    part = Partial(jnp.full((B, H, V), 2.0), jnp.full((B, H), -3.0))
    empty = empty_partial(B, H, V)
    for merged in (merge(part, empty), merge(empty, part), merge(empty, part, empty)):
        np.testing.assert_array_equal(merged.o, part.o)
        np.testing.assert_allclose(merged.lse, part.lse)


def test_the_union_of_empty_sets_is_empty() -> None:
    merged = merge(empty_partial(B, H, V), empty_partial(B, H, V))
    np.testing.assert_array_equal(merged.o, 0)
    assert np.isneginf(merged.lse).all()


@pytest.mark.parametrize("lse", [1e4, -1e4, 3e38])
def test_extreme_weights_do_not_overflow(lse: float) -> None:
    one = Partial(jnp.ones((B, H, V)), jnp.full((B, H), lse))
    two = Partial(3 * jnp.ones((B, H, V)), jnp.full((B, H), lse))
    np.testing.assert_allclose(merge(one, two).o, 2.0)
