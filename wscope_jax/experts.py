"""The routed experts of a feed-forward layer: the router, and one operation for few tokens and one for many.

Neither expands to all experts on the CPU. Weights lie as checkpoints have them, one row per output: gate and up
[E, F, M], down [E, M, F]. Every product is accumulated in float32.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

MIN_TILE: Final = 8  # assignments of one expert that are multiplied at a time, at least
MAX_TILE: Final = 128  # and at most
GATHER_TOKENS: Final = (
    3  # on CUDA, up to so many tokens gather their experts (measured: 121 us at 1, even at 4)
)
DENSE_TOKENS: Final = (
    256  # on CUDA, up to so many go through all experts (350 us at 32, 1.25 of reading them)
)

_dot = functools.partial(
    jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
)


def router(
    x: Float[Array, "N M"], gate: Float[Array, "E M"], top_k: int, normalise: bool
) -> tuple[Int32[Array, "N X"], Float[Array, "N X"]]:
    """The experts that each token enters, best first, and their float32 weights.

    Args:
        x: tokens.
        gate: one row per expert.
        top_k: X.
        normalise: scale the weights of a token to sum to one; otherwise they are the probabilities.
    """
    probs_NE = jax.nn.softmax(_dot("nm,em->ne", x, gate), axis=-1)
    weights_NX, ids_NX = jax.lax.top_k(probs_NE, top_k)
    if normalise:
        weights_NX = weights_NX / jnp.sum(weights_NX, axis=-1, keepdims=True)
    return ids_NX, weights_NX


def expert_ffn(
    x: Float[Array, "N M"],
    ids: Int32[Array, "N X"],
    weights: Float[Array, "N X"],
    gate: Float[Array, "E F M"],
    up: Float[Array, "E F M"],
    down: Float[Array, "E M F"],
    valid: Bool[Array, " N"] | None = None,
) -> Float[Array, "N M"]:
    """The weighted sum of each token's experts, silu(x gate) * (x up) through down; in the dtype of `x`.

    Args:
        x: tokens.
        ids: experts that each token enters, no one twice.
        weights: their weights, float32.
        gate: see above.
        up: see above.
        down: see above.
        valid: tokens that enter experts at all; the others get zeros, whatever they hold. None means all.
    """
    num, top_k = ids.shape
    if valid is None:
        valid = jnp.ones(num, bool)
    x = jnp.where(
        valid[:, None], x, 0
    )  # else NaN x 0 = NaN where a tile or a mask multiplies by zero
    weights = jnp.where(valid[:, None], weights, 0)
    on_cpu = gathered if num * top_k <= gate.shape[0] else tiled
    on_cuda = gathered if num <= GATHER_TOKENS else dense if num <= DENSE_TOKENS else tiled
    args = (x, ids, weights, gate, up, down, valid)
    if on_cpu is on_cuda:
        return on_cpu(*args).astype(x.dtype)
    return jax.lax.platform_dependent(*args, default=on_cpu, cuda=on_cuda).astype(x.dtype)


def gathered(
    x: Float[Array, "N M"],
    ids: Int32[Array, "N X"],
    weights: Float[Array, "N X"],
    gate: Float[Array, "E F M"],
    up: Float[Array, "E F M"],
    down: Float[Array, "E M F"],
    valid: Bool[Array, " N"],
) -> Float[Array, "N M"]:
    """For few tokens: token after token, with only its own experts' weights; float32."""

    def one_token(_: None, token: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        x_M, ids_X, weights_X = token
        gate_XFM, up_XFM, down_XMF = (
            w.at[ids_X].get(mode="promise_in_bounds") for w in (gate, up, down)
        )
        h_XF = jax.nn.silu(_dot("m,xfm->xf", x_M, gate_XFM)) * _dot("m,xfm->xf", x_M, up_XFM)
        y_XM = _dot("xf,xmf->xm", h_XF.astype(x.dtype), down_XMF)
        return None, _dot("x,xm->m", weights_X, y_XM)

    _, y_NM = jax.lax.scan(one_token, None, (x, ids, weights))
    return y_NM


def tiled(
    x: Float[Array, "N M"],
    ids: Int32[Array, "N X"],
    weights: Float[Array, "N X"],
    gate: Float[Array, "E F M"],
    up: Float[Array, "E F M"],
    down: Float[Array, "E M F"],
    valid: Bool[Array, " N"],
) -> Float[Array, "N M"]:
    """For many tokens: assignments sorted by expert and cut into tiles of one expert each; float32."""
    (num, top_k), num_experts = ids.shape, gate.shape[0]
    num_assigned = num * top_k
    mean = -(-num_assigned // num_experts)
    tile = min(MAX_TILE, max(MIN_TILE, 1 << (mean - 1).bit_length()))
    tiles = _cut_into_tiles(jnp.where(valid[:, None], ids, num_experts), num_experts, tile)
    weights_A = weights.reshape(-1)

    def one_tile(y_NM: jax.Array, place: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        expert, assigned_T, is_live_T = place
        token_T = assigned_T // top_k
        x_TM = x.at[token_T].get(mode="promise_in_bounds")
        gate_FM, up_FM, down_MF = (
            jax.lax.dynamic_index_in_dim(w, expert, keepdims=False) for w in (gate, up, down)
        )
        h_TF = jax.nn.silu(_dot("tm,fm->tf", x_TM, gate_FM)) * _dot("tm,fm->tf", x_TM, up_FM)
        y_TM = _dot("tf,mf->tm", h_TF.astype(x.dtype), down_MF)
        y_TM = y_TM * weights_A.at[assigned_T].get(mode="promise_in_bounds")[:, None]
        # Dead rows go past the end, each to a place of its own, and are dropped there.
        row_T = jnp.where(is_live_T, token_T, num + jnp.arange(tile, dtype=jnp.int32))
        return y_NM.at[row_T].add(y_TM, mode="drop", unique_indices=True), None

    y_NM, _ = jax.lax.scan(one_tile, jnp.zeros(x.shape, jnp.float32), tiles)
    return y_NM


def _cut_into_tiles(
    ids: Int32[Array, "N X"], num_experts: int, tile: int
) -> tuple[Int32[Array, " C"], Int32[Array, "C T"], Bool[Array, "C T"]]:
    """Per tile its expert, its assignments (indices into the flat `ids`), and which of them are live.

    Ids of num_experts belong to nobody. The number of tiles is static: enough for any distribution.
    """
    ids_A = ids.reshape(-1)
    order_A = jnp.argsort(ids_A).astype(jnp.int32)  # stable: tokens of an expert stay in order
    count_E = jnp.zeros(num_experts, jnp.int32).at[ids_A].add(1, mode="drop")
    end_E = jnp.cumsum(count_E)
    tiles_E = (count_E + tile - 1) // tile
    end_tile_E = jnp.cumsum(tiles_E)
    num_tiles = -(-ids_A.size // tile) + min(num_experts, ids_A.size)
    tile_C = jnp.arange(num_tiles, dtype=jnp.int32)
    expert_C = jnp.searchsorted(end_tile_E, tile_C, side="right").astype(jnp.int32)
    is_used_C = expert_C < num_experts
    expert_C = jnp.minimum(expert_C, num_experts - 1)
    tile_of_expert_C = tile_C - (end_tile_E - tiles_E)[expert_C]
    first_C = (end_E - count_E)[expert_C] + tile_of_expert_C * tile
    at_CT = first_C[:, None] + jnp.arange(tile, dtype=jnp.int32)[None, :]
    is_live_CT = is_used_C[:, None] & (at_CT < end_E[expert_C][:, None])
    return expert_C, order_A[jnp.where(is_live_CT, at_CT, 0)], is_live_CT


def dense(
    x: Float[Array, "N M"],
    ids: Int32[Array, "N X"],
    weights: Float[Array, "N X"],
    gate: Float[Array, "E F M"],
    up: Float[Array, "E F M"],
    down: Float[Array, "E M F"],
    valid: Bool[Array, " N"],
) -> Float[Array, "N M"]:
    """Every token through every expert, masked by the weights; float32. The oracle of the others."""
    num, num_experts = x.shape[0], gate.shape[0]
    rows_N1 = jnp.arange(num)[:, None]
    weights_NE = jnp.zeros((num, num_experts), jnp.float32).at[rows_N1, ids].add(weights)
    h_NEF = jax.nn.silu(_dot("nm,efm->nef", x, gate)) * _dot("nm,efm->nef", x, up)
    h_NEF = h_NEF * jnp.where(valid[:, None], weights_NE, 0)[:, :, None]
    return _dot("nef,emf->nm", h_NEF.astype(x.dtype), down)
