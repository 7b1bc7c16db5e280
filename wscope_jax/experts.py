"""The routed experts of a feed-forward layer: the router, and three ways to compute the same sum.

`tiled` multiplies each expert's weights with the tokens that entered it and with nothing else; on the CPU it is the
fastest for any number of tokens. On a GPU a few tokens gather their experts' weights, and a batch in decode goes
through all experts, masked. Weights lie as checkpoints have them, one row per output. Sums are accumulated in float32.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

MIN_TILE: Final = 8  # assignments of one expert that are multiplied at a time, at least
MAX_TILE: Final = 128  # and at most
# On CUDA, up to so many tokens gather their experts' weights: 121 us at 1 token, no gain at 4.
GATHER_TOKENS: Final = 3
# On CUDA, up to so many go through all experts: 350 us at 32, 1.25 of the time to read them once.
DENSE_TOKENS: Final = 256
SPLIT_TOKENS: Final = 64  # beyond, one product for each expert takes more memory than it saves time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """How the experts of a token are chosen and weighted; hashable and static.

    Attributes:
        top_k: X, experts that a token enters.
        normalise: scale the weights of a token to sum to one; otherwise they are the probabilities.
        scale: multiplies the weights.
        num_groups: groups of equally many consecutive experts; a divisor of E.
        top_groups: groups that the experts of a token may be of: those with the likeliest single experts.
    """

    top_k: int
    normalise: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1


def _dot(subscripts: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(
        subscripts,
        *operands,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def router(
    x: Float[Array, "N M"], gate: Float[Array, "E M"], routing: Routing
) -> tuple[Int32[Array, "N X"], Float[Array, "N X"]]:
    """The experts that each token enters, best first, and their float32 weights.

    Args:
        x: tokens.
        gate: one row per expert.
        routing: how they are chosen and weighted.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.2.2, for the limit to groups.
    """
    probs_NE = jax.nn.softmax(_dot("nm,em->ne", x, gate), axis=-1)
    if routing.top_groups < routing.num_groups:
        probs_NE = _limit_to_groups(probs_NE, routing)
    weights_NX, ids_NX = jax.lax.top_k(probs_NE, routing.top_k)
    if routing.normalise:
        weights_NX = weights_NX / jnp.sum(weights_NX, axis=-1, keepdims=True)
    return ids_NX, weights_NX * jnp.float32(routing.scale)


def _limit_to_groups(probs: Float[Array, "N E"], routing: Routing) -> Float[Array, "N E"]:
    """The probabilities, below zero in all but the groups with the likeliest experts."""
    num_tokens, num_experts = probs.shape
    probs_NGE = probs.reshape(num_tokens, routing.num_groups, -1)
    _, groups_Ng = jax.lax.top_k(probs_NGE.max(-1), routing.top_groups)
    is_kept_NG = (groups_Ng[:, :, None] == jnp.arange(routing.num_groups)[None, None, :]).any(1)
    return jnp.where(is_kept_NG[:, :, None], probs_NGE, -1.0).reshape(num_tokens, num_experts)


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
    num = x.shape[0]
    if valid is None:
        valid = jnp.ones(num, bool)
    x = jnp.where(valid[:, None], x, 0)  # a masked product with NaN would still be NaN
    # A GPU's loop of unknown length asks the host after every turn whether to go on.
    prefill_on_cuda = functools.partial(tiled, skip_unused=False)
    on_cuda = (
        gathered if num <= GATHER_TOKENS else dense if num <= DENSE_TOKENS else prefill_on_cuda
    )
    args = (x, ids, weights, gate, up, down, valid)
    y: jax.Array = jax.lax.platform_dependent(*args, default=tiled, cuda=on_cuda)
    return y.astype(x.dtype)


def gathered(
    x: Float[Array, "N M"],
    ids: Int32[Array, "N X"],
    weights: Float[Array, "N X"],
    gate: Float[Array, "E F M"],
    up: Float[Array, "E F M"],
    down: Float[Array, "E M F"],
    valid: Bool[Array, " N"],
) -> Float[Array, "N M"]:
    """Token after token, with a copy of its own experts' weights; float32."""

    def one_token(_: None, token: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        x_M, ids_X, weights_X = token
        gate_XFM, up_XFM, down_XMF = (
            w.at[ids_X].get(mode="promise_in_bounds") for w in (gate, up, down)
        )
        h_XF = jax.nn.silu(_dot("m,xfm->xf", x_M, gate_XFM)) * _dot("m,xfm->xf", x_M, up_XFM)
        y_XM = _dot("xf,xmf->xm", h_XF.astype(x.dtype), down_XMF)
        return None, _dot("x,xm->m", weights_X, y_XM)

    weights_NX = jnp.where(valid[:, None], weights, 0)
    _, y_NM = jax.lax.scan(one_token, None, (x, ids, weights_NX))
    return y_NM


def tiled(
    x: Float[Array, "N M"],
    ids: Int32[Array, "N X"],
    weights: Float[Array, "N X"],
    gate: Float[Array, "E F M"],
    up: Float[Array, "E F M"],
    down: Float[Array, "E M F"],
    valid: Bool[Array, " N"],
    *,
    skip_unused: bool = True,
) -> Float[Array, "N M"]:
    """Assignments sorted by expert and cut into tiles of one expert each, tile after tile; float32.

    How many tiles are used depends on the assignments; `skip_unused` ends the loop after the last of
    them, otherwise it has a static length, enough for any assignments.
    """
    (num, top_k), num_experts = ids.shape, gate.shape[0]
    num_assigned = num * top_k
    mean = -(-num_assigned // num_experts)
    tile = min(MAX_TILE, max(MIN_TILE, 1 << (mean - 1).bit_length()))
    ids_NX = jnp.where(valid[:, None], ids, num_experts)
    expert_C, assigned_CT, is_live_CT, num_used = _cut_into_tiles(ids_NX, num_experts, tile)
    weights_A = weights.reshape(-1)

    def add_tile(c: jax.Array, y_NM: jax.Array) -> jax.Array:
        expert, assigned_T, is_live_T = expert_C[c], assigned_CT[c], is_live_CT[c]
        token_T = assigned_T // top_k
        x_TM = x.at[token_T].get(mode="promise_in_bounds")
        # Without the barrier XLA:CPU converts all bfloat16 experts to float32 ahead of the loop.
        barrier: Callable[..., tuple[jax.Array, ...]] = jax.lax.optimization_barrier
        expert, *stacks = barrier((expert, gate, up, down))
        gate_FM, up_FM, down_MF = (
            jax.lax.dynamic_index_in_dim(w, expert, keepdims=False) for w in stacks
        )
        h_TF = jax.nn.silu(_dot("tm,fm->tf", x_TM, gate_FM)) * _dot("tm,fm->tf", x_TM, up_FM)
        y_TM = _dot("tf,mf->tm", h_TF.astype(x.dtype), down_MF)
        y_TM = y_TM * weights_A.at[assigned_T].get(mode="promise_in_bounds")[:, None]
        # Dead rows go past the end, each to a place of its own, and are dropped there.
        row_T = jnp.where(is_live_T, token_T, num + jnp.arange(tile, dtype=jnp.int32))
        return y_NM.at[row_T].add(y_TM, mode="drop", unique_indices=True)

    num_turns = num_used if skip_unused else expert_C.size
    zeros_NM = jnp.zeros(x.shape, jnp.float32)
    y_NM: jax.Array = jax.lax.fori_loop(0, num_turns, add_tile, zeros_NM)
    return y_NM


def _cut_into_tiles(
    ids: Int32[Array, "N X"], num_experts: int, tile: int
) -> tuple[Int32[Array, " C"], Int32[Array, "C T"], Bool[Array, "C T"], Int32[Array, ""]]:
    """Per tile its expert, its assignments (indices into the flat `ids`), and which are live.

    Ids of num_experts belong to nobody. There are enough tiles for any assignments; the last result is
    the number of those that are used, which come first.
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
    assigned_CT = order_A[jnp.where(is_live_CT, at_CT, 0)]
    return expert_C, assigned_CT, is_live_CT, end_tile_E[-1]


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
    h_NEF = h_NEF.astype(x.dtype)
    if num > SPLIT_TOKENS:
        return _dot("nef,emf->nm", h_NEF, down)
    # Expert by expert: summed within the product, XLA would transpose all of `down` first.
    return _dot("nef,emf->enm", h_NEF, down).sum(0)
