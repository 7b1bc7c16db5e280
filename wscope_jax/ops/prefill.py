"""Causal attention of a whole prompt, with a peak of memory that is linear in its length."""

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Query and key tokens scored at once: H * 512 * 512 float32 scores are alive.
MAX_CHUNK: Final = 512


def _chunk_size(num_tokens: int) -> int:
    """The largest divisor of `num_tokens` that is at most MAX_CHUNK."""
    return max(size for size in range(1, min(MAX_CHUNK, num_tokens) + 1) if num_tokens % size == 0)


def causal_attention(
    q: Float[Array, "T H K"],
    key: Float[Array, "T G K"],
    value: Float[Array, "T G V"],
    *,
    scale: float,
) -> Float[Array, "T H V"]:
    """Attention of every token over itself and all tokens before it.

    The pairs (query chunk, key chunk) on and below the diagonal are one flat scan of known length: no work is spent
    above the diagonal, and no loop has a trip count that the device would have to tell the host.

    Returns:
        Float32. Query head h reads kv head h // (H / G).
    """
    num_tokens, num_heads, key_dim = q.shape
    num_kv_heads, value_dim = key.shape[1], value.shape[2]
    group = num_heads // num_kv_heads
    size = _chunk_size(num_tokens)
    num_chunks = num_tokens // size
    q_nGHcK = q.reshape(num_chunks, size, num_kv_heads, group, key_dim).transpose(0, 2, 3, 1, 4)
    key_nGcK = key.reshape(num_chunks, size, num_kv_heads, key_dim).swapaxes(1, 2).astype(q.dtype)
    value_nGcV = value.reshape(num_chunks, size, num_kv_heads, value_dim).swapaxes(1, 2)
    on_diagonal = jnp.tril(jnp.ones((size, size), bool))[None, None]

    def take_pair(
        carry: tuple[Array, Array, Array, Array], pair: Array
    ) -> tuple[tuple[Array, Array, Array, Array], None]:
        out, o, top, total = carry
        query, keys = pair[0], pair[1]
        is_first = keys == 0
        o = jnp.where(is_first, 0.0, o)
        top = jnp.where(is_first, -jnp.inf, top)
        total = jnp.where(is_first, 0.0, total)
        scores_GHcs = jnp.einsum(
            "ghck,gsk->ghcs",
            q_nGHcK[query],
            key_nGcK[keys],
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        ) * jnp.float32(scale)
        scores_GHcs = jnp.where((keys < query) | on_diagonal, scores_GHcs, -jnp.inf)
        # The diagonal is never empty, and the pairs below it are full: no row of scores is all -inf.
        new_top = jnp.maximum(top, scores_GHcs.max(-1))
        weight_GHcs = jnp.exp(scores_GHcs - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        total = total * shrink + weight_GHcs.sum(-1)
        o = o * shrink[..., None] + jnp.einsum(
            "ghcs,gsv->ghcv",
            weight_GHcs,
            value_nGcV[keys].astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        done = (o / total[..., None]).transpose(2, 0, 1, 3).reshape(size, num_heads, value_dim)
        out = jax.lax.dynamic_update_slice_in_dim(out, done, query * size, axis=0)
        return (out, o, new_top, total), None

    pairs = np.array([(i, j) for i in range(num_chunks) for j in range(i + 1)], np.int32)
    state = (
        jnp.zeros((num_tokens, num_heads, value_dim), jnp.float32),
        jnp.zeros((num_kv_heads, group, size, value_dim), jnp.float32),
        jnp.full((num_kv_heads, group, size), -jnp.inf, jnp.float32),
        jnp.zeros((num_kv_heads, group, size), jnp.float32),
    )
    (out, *_), _ = jax.lax.scan(take_pair, state, jnp.asarray(pairs))
    return out
