"""Attention in plain JAX, float32: the oracle of every kernel, and what runs where there is no kernel yet."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from wscope_jax.partial import Partial


def masked_attention(
    q: Float[Array, "B H K"],
    key: Float[Array, "B G S K"],
    value: Float[Array, "B G S V"],
    mask: Bool[Array, "B S"],
    *,
    scale: float,
) -> Partial:
    """Attention of one query token per row over the entries that `mask` allows.

    Query head h reads kv head h // (H / G). Scores, softmax and sums are float32. Masked entries may hold anything,
    NaN included.

    Returns:
        The partial; a row whose mask allows nothing gives the empty partial.
    """
    num_rows, num_heads, key_dim = q.shape
    num_kv_heads = key.shape[1]
    q_BGHK = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, key_dim)
    scores_BGHS = jnp.einsum(
        "bghk,bgsk->bghs",
        q_BGHK,
        key.astype(q.dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    ) * jnp.float32(scale)
    allowed = mask[:, None, None, :]
    scores_BGHS = jnp.where(allowed, scores_BGHS, -jnp.inf)
    top = scores_BGHS.max(-1, keepdims=True)
    base = jnp.where(jnp.isneginf(top), 0.0, top)  # -inf minus -inf is a NaN
    weight_BGHS = jnp.exp(scores_BGHS - base)
    total = weight_BGHS.sum(-1, keepdims=True)
    value_BGSV = jnp.where(mask[:, None, :, None], value.astype(jnp.float32), 0.0)
    o = jnp.einsum("bghs,bgsv->bghv", weight_BGHS, value_BGSV, precision=jax.lax.Precision.HIGHEST)
    safe = jnp.where(total == 0, 1.0, total)
    lse = jnp.where(total == 0, -jnp.inf, base + jnp.log(safe))
    return Partial(
        o=(o / safe).reshape(num_rows, num_heads, value.shape[-1]),
        lse=lse.reshape(num_rows, num_heads),
    )


def attend_reference(
    q: Float[Array, "B H K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S G V"],
    lengths: Int32[Array, " B"],
    *,
    scale: float,
) -> Partial:
    """Attention over the first `lengths[b]` entries of each row: what all regions together must equal."""
    mask = jnp.arange(key.shape[1])[None, :] < lengths[:, None]
    return masked_attention(q, key.swapaxes(1, 2), value.swapaxes(1, 2), mask, scale=scale)
