"""The three ways to compute the experts' sum against one another, and against numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wscope_jax import experts

SHAPES = [  # tokens, experts, X, F, M
    (1, 8, 2, 24, 16),
    (5, 8, 3, 16, 8),
    (40, 4, 4, 8, 12),
    (70, 16, 2, 8, 8),
    (300, 3, 1, 8, 8),
]
WAYS = {
    "gathered": experts.gathered,
    "tiled": experts.tiled,
    "tiled_static": functools.partial(experts.tiled, skip_unused=False),
    "dense": experts.dense,
    "chosen": experts.expert_ffn,
}


def draw(shape, dtype=jnp.float32, seed=0):
    num, num_experts, top_k, size, width = shape
    rng = np.random.default_rng(seed)

    def normal(*dims):
        return jnp.asarray(rng.standard_normal(dims), dtype)

    ids = np.stack([rng.permutation(num_experts)[:top_k] for _ in range(num)])
    weights = jnp.asarray(rng.uniform(0.1, 1, (num, top_k)), jnp.float32)
    stacks = (normal(num_experts, size, width), normal(num_experts, size, width))
    down = normal(num_experts, width, size)
    return normal(num, width), jnp.asarray(ids, jnp.int32), weights, *stacks, down


def expected_sum(x, ids, weights, gate, up, down, valid):
    x, weights, gate, up, down = (np.asarray(a, np.float64) for a in (x, weights, gate, up, down))
    y = np.zeros_like(x)
    for n in np.flatnonzero(valid):
        for e, weight in zip(np.asarray(ids)[n], weights[n], strict=True):
            h = gate[e] @ x[n]
            y[n] += weight * (down[e] @ (h / (1 + np.exp(-h)) * (up[e] @ x[n])))
    return y


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_weighted_sum(way, shape):
    args = draw(shape)
    valid = np.random.default_rng(1).uniform(size=shape[0]) < 0.8
    got = jax.jit(WAYS[way])(*args, jnp.asarray(valid))
    np.testing.assert_allclose(got, expected_sum(*args, valid), atol=2e-4, rtol=2e-5)
    assert got.dtype == jnp.float32


@pytest.mark.parametrize("valid", [[True] * 6, [False] * 6, [False, True] * 3])
@pytest.mark.parametrize("way", WAYS)
def test_all_tokens_in_one_expert(way, valid):
    x, ids, *rest = draw((6, 5, 1, 8, 8))
    ids = jnp.full_like(ids, 4)
    got = jax.jit(WAYS[way])(x, ids, *rest, jnp.asarray(valid))
    np.testing.assert_allclose(got, expected_sum(x, ids, *rest, valid), atol=1e-4)


@pytest.mark.parametrize("num", [3, 40])
def test_invalid_tokens_enter_no_expert_whatever_they_hold(num):
    x, *rest = draw((num, 8, 2, 8, 8))
    valid = jnp.arange(num) % 2 == 0
    bad = jnp.where(valid[:, None], x, jnp.nan)
    got = jax.jit(experts.expert_ffn)(bad, *rest, valid)
    np.testing.assert_allclose(got, expected_sum(x, *rest, valid), atol=1e-4)


def test_none_means_that_all_are_valid():
    args = draw((5, 8, 2, 8, 8))
    np.testing.assert_array_equal(
        experts.expert_ffn(*args), experts.expert_ffn(*args, jnp.ones(5, bool))
    )


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_accumulates_in_float32(way):
    args = draw((4, 8, 2, 64, 256), jnp.bfloat16)
    got = jax.jit(WAYS[way])(*args, jnp.ones(4, bool))
    expected = expected_sum(*args, [True] * 4)
    assert np.abs(np.asarray(got, np.float64) - expected).max() < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("num", [1, 4, 64])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_second_copy_of_the_weights(num, dtype):
    """No dense expansion, and no conversion of all experts to float32 (twice the weights)."""
    args = draw((num, 16, 2, 128, 256), dtype)
    compiled = jax.jit(experts.expert_ffn).lower(*args, jnp.ones(num, bool)).compile()
    weights = sum(w.nbytes for w in args[3:])
    assert compiled.memory_analysis().temp_size_in_bytes < weights / 2


def test_tiles_cover_every_assignment_once():
    ids = jnp.asarray([[0, 2], [2, 3], [4, 4], [2, 0], [2, 1]], jnp.int32)  # 4 = nobody
    expert, assigned, is_live, num_used = experts._cut_into_tiles(ids, 4, 2)
    live = np.asarray(is_live)
    taken = np.sort(np.asarray(assigned)[live])
    np.testing.assert_array_equal(taken, [0, 1, 2, 3, 6, 7, 8, 9])
    owner = np.broadcast_to(np.asarray(expert)[:, None], live.shape)[live]
    np.testing.assert_array_equal(np.asarray(ids).reshape(-1)[np.asarray(assigned)[live]], owner)
    assert num_used == 1 + 1 + 2 + 1
    assert not live[int(num_used) :].any()


@pytest.mark.parametrize("normalise", [True, False])
def test_router_takes_the_most_probable_experts(normalise):
    rng = np.random.default_rng(0)
    x, gate = rng.standard_normal((6, 16)), rng.standard_normal((8, 16))
    scores = np.exp(x @ gate.T)
    probs = scores / scores.sum(-1, keepdims=True)
    expected_ids = np.argsort(-probs, axis=-1)[:, :3]
    expected = np.take_along_axis(probs, expected_ids, -1)
    if normalise:
        expected = expected / expected.sum(-1, keepdims=True)
    x32, gate32 = jnp.asarray(x, jnp.float32), jnp.asarray(gate, jnp.float32)
    ids, weights = experts.router(x32, gate32, experts.Routing(top_k=3, normalise=normalise))
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-4)
    assert weights.dtype == jnp.float32


def test_router_keeps_to_the_groups_with_the_likeliest_experts():
    """Two groups of four, in each of which three experts are next to impossible."""
    logits = jnp.asarray([[9.0, -40, -40, -40, 8, 7, 6, 5], [1, 2, 3, 4, 9, -40, -40, -40]])
    limited = experts.Routing(top_k=2, scale=16.0, num_groups=2, top_groups=1)
    ids, weights = experts.router(logits, jnp.eye(8), limited)
    assert ids.tolist() == [
        [0, 1],
        [4, 5],
    ]  # not the second best of all, which is of the other group
    probs = jax.nn.softmax(logits, axis=-1)
    expected = 16 * jnp.take_along_axis(probs, ids, axis=-1)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    free = experts.Routing(top_k=2, num_groups=2, top_groups=2)
    assert experts.router(logits, jnp.eye(8), free)[0].tolist() == [[0, 4], [4, 3]]


@pytest.mark.parametrize("num", [1, 32, 1024])
def test_lowers_for_a_gpu(num):
    args = draw((num, 8, 2, 8, 8))
    traced = jax.jit(experts.expert_ffn).trace(*args, jnp.ones(num, bool))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert dots
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in dots)
    # A batch in decode goes through all experts at once, without any loop.
    assert ("stablehlo.while" in text) == (num != 32)
