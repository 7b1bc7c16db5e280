"""The demo model for training: the equations of `wscope_jax.models.qwen3_moe`, over whole batches and differentiable.

Parameters are stacked over the layers, float32; products are computed in the dtype of the training. All tokens go
through all experts, masked by the router's weights: with so narrow experts this is faster than to sort the tokens.
"""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]
EMBEDDING_SCALE: Final = 0.1


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of the model; hashable."""

    num_layers: int = 6
    width: int = 128  # M
    num_q_heads: int = 4  # H
    num_kv_heads: int = 2  # G
    head_dim: int = 64  # K
    num_experts: int = 8  # E
    top_k: int = 2
    expert_width: int = 64  # F
    vocab_size: int = 256  # V, bytes
    rope_theta: float = 1e6
    eps: float = 1e-6


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How the model is computed; hashable.

    Attributes:
        dtype: of the operands of products.
        attention: implementation that `jax.nn.dot_product_attention` takes.
        dropout: share of the embedding and of each branch's output that is dropped in training.
    """

    dtype: str = "bfloat16"
    attention: str | None = "cudnn"
    dropout: float = 0.0


def initial(shape: Shape, seed: int) -> Params:
    """Random parameters; weights have one row per output, as in checkpoints."""
    layers, width, experts, inner = (
        shape.num_layers,
        shape.width,
        shape.num_experts,
        shape.expert_width,
    )
    q_width, kv_width = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rng = np.random.default_rng(seed)

    def draw(*dims: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.normal(0, scale * dims[-1] ** -0.5, dims), jnp.float32)

    branch = (2 * layers) ** -0.5  # so that the sum of all branches has the size of one
    return {
        "embedding": draw(shape.vocab_size, width, scale=EMBEDDING_SCALE * width**0.5),
        "head": draw(shape.vocab_size, width, scale=0.5),
        "norm": jnp.ones(width),
        "layers": {
            "attention_norm": jnp.ones((layers, width)),
            "ffn_norm": jnp.ones((layers, width)),
            "q_norm": jnp.ones((layers, shape.head_dim)),
            "k_norm": jnp.ones((layers, shape.head_dim)),
            "q": draw(layers, q_width, width),
            "k": draw(layers, kv_width, width),
            "v": draw(layers, kv_width, width),
            "o": draw(layers, width, q_width, scale=branch),
            "router": draw(layers, experts, width),
            "gate": draw(layers, experts, inner, width),
            "up": draw(layers, experts, inner, width),
            "down": draw(layers, experts, width, inner, scale=branch),
        },
    }


def forward(
    params: Params, ids: jax.Array, shape: Shape, arithmetic: Arithmetic, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Float32 logits [B, T, V] of ids [B, T], and how uneven the experts' load is (1 is even)."""
    turn = _rotation(ids.shape[1], shape)
    first_key, *keys = jax.random.split(key, shape.num_layers + 1)

    def layer(x: jax.Array, inputs: tuple[Params, jax.Array]) -> tuple[jax.Array, jax.Array]:
        weights, key = inputs
        dropped = jax.random.split(key)
        h = _norm(x, weights["attention_norm"], shape.eps)
        x = x + _drop(_attend(h, weights, turn, shape, arithmetic), arithmetic.dropout, dropped[0])
        h = _norm(x, weights["ffn_norm"], shape.eps)
        y, unevenness = _route(h, weights, shape, arithmetic)
        return x + _drop(y, arithmetic.dropout, dropped[1]), unevenness

    x_BTM = _drop(params["embedding"][ids], arithmetic.dropout, first_key)
    x_BTM, unevenness = jax.lax.scan(layer, x_BTM, (params["layers"], jnp.stack(keys)))
    x_BTM = _norm(x_BTM, params["norm"], shape.eps)
    head_VM = params["head"].astype(arithmetic.dtype)
    x_BTM = x_BTM.astype(arithmetic.dtype)
    logits_BTV = jnp.einsum("btm,vm->btv", x_BTM, head_VM, preferred_element_type=jnp.float32)
    return logits_BTV, unevenness.mean()


def _dot(subscripts: str, x: jax.Array, weight: jax.Array, dtype: str) -> jax.Array:
    """A product in and of a dtype: were it float32 of bfloat16, so would be its slow gradients."""
    return jnp.einsum(subscripts, x.astype(dtype), weight.astype(dtype))


def _norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _drop(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    if rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def _rotation(num: int, shape: Shape) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of each position and pair, [T, 1, K/2]."""
    half = np.arange(0, shape.head_dim, 2) / shape.head_dim
    angle_Tk = np.arange(num)[:, None] * shape.rope_theta**-half
    return jnp.float32(np.cos(angle_Tk))[:, None], jnp.float32(np.sin(angle_Tk))[:, None]


def _attend(
    h: jax.Array,
    weights: Params,
    turn: tuple[jax.Array, jax.Array],
    shape: Shape,
    arithmetic: Arithmetic,
) -> jax.Array:
    dtype = arithmetic.dtype

    def heads(name: str) -> jax.Array:
        y = _dot("btm,im->bti", h, weights[name], dtype)
        return y.reshape(*y.shape[:2], -1, shape.head_dim)

    def rotated(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x, 2, axis=-1)
        cos, sin = turn
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(dtype)

    q_BTHK = rotated(_norm(heads("q").astype(jnp.float32), weights["q_norm"], shape.eps))
    k_BTGK = rotated(_norm(heads("k").astype(jnp.float32), weights["k_norm"], shape.eps))
    o_BTHK = jax.nn.dot_product_attention(
        q_BTHK, k_BTGK, heads("v"), is_causal=True, implementation=arithmetic.attention
    )
    return _dot("bti,mi->btm", o_BTHK.reshape(*h.shape[:2], -1), weights["o"], dtype)


def _route(
    h: jax.Array, weights: Params, shape: Shape, arithmetic: Arithmetic
) -> tuple[jax.Array, jax.Array]:
    """The weighted experts of each token, and the product of the experts' load and probability."""
    logits_BTE = jnp.einsum("btm,em->bte", h, weights["router"], precision="highest")
    probs_BTE = jax.nn.softmax(logits_BTE)
    entered_BTE = _is_among_best(jax.lax.stop_gradient(probs_BTE), shape.top_k)
    share_BTE = jnp.where(entered_BTE, probs_BTE, 0)
    share_BTE = share_BTE / jnp.sum(share_BTE, axis=-1, keepdims=True)
    dtype = arithmetic.dtype
    gate_BTEF = _dot("btm,efm->btef", h, weights["gate"], dtype)
    up_BTEF = _dot("btm,efm->btef", h, weights["up"], dtype)
    inner_BTEF = jax.nn.silu(gate_BTEF) * up_BTEF * share_BTE[..., None].astype(dtype)
    y_BTM = _dot("btef,emf->btm", inner_BTEF, weights["down"], dtype)
    load_E = entered_BTE.mean((0, 1)) / shape.top_k
    return y_BTM, shape.num_experts * jnp.sum(load_E * probs_BTE.mean((0, 1)))


def _is_among_best(probs: jax.Array, num: int) -> jax.Array:
    """Whether each number is among the `num` largest of the last axis; cheaper than a sort on a GPU."""
    rest = probs
    for _ in range(num):
        least = rest.max(-1, keepdims=True)
        rest = jnp.where(rest == least, -jnp.inf, rest)
    return probs >= least
