"""Joins partials of blocks to partials of the rows that own them."""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32

from wscope_jax.ops.tiling import padded
from wscope_jax.partial import Partial

STEP_BLOCKS: Final = 32  # taken at a time by the GPU's kernel


def join_blocks(part: Partial, owner: Int32[Array, " C"], num_rows: int) -> Partial:
    """Joins partials of blocks [C, H, V] to partials of rows [B, H, V].

    Args:
        part: of the blocks.
        owner: row of each block; outside [0, B) = nobody.
        num_rows: B.

    Returns:
        The rows' partials; empty where a row owns no block. Equal inputs give equal bits. What is not finite in a block
        makes its head NaN, in its own row alone.
    """
    out: Partial = jax.lax.platform_dependent(
        part,
        owner,
        default=functools.partial(contract, num_rows=num_rows),
        cuda=functools.partial(gather, num_rows=num_rows),
    )
    return out


def contract(part: Partial, owner: Int32[Array, " C"], *, num_rows: int) -> Partial:
    """`join_blocks` in plain JAX: a one-hot contraction."""
    owns_CB = owner[:, None] == jnp.arange(num_rows)[None, :]
    lse_CBH = jnp.where(owns_CB[:, :, None], part.lse[:, None, :], -jnp.inf)
    top_1BH = lse_CBH.max(0, keepdims=True)
    base_1BH = jnp.where(jnp.isneginf(top_1BH), 0.0, top_1BH)
    weight_CBH = jnp.exp(lse_CBH - base_1BH)
    total_BH = weight_CBH.sum(0)
    # Zero times a NaN is a NaN: what is broken in one row's blocks must not reach the others.
    is_finite_CH = jnp.isfinite(part.o).all(2)
    o_CHV = jnp.where(is_finite_CH[:, :, None], part.o, 0.0)
    is_broken_BH = (owns_CB[:, :, None] & ~is_finite_CH[:, None]).any(0)
    o_BHV = jnp.einsum("cbh,chv->bhv", weight_CBH, o_CHV, precision=jax.lax.Precision.HIGHEST)
    o_BHV = jnp.where(is_broken_BH[:, :, None], jnp.nan, o_BHV)
    safe_BH = jnp.where(total_BH == 0, 1.0, total_BH)
    lse_BH = jnp.where(total_BH == 0, -jnp.inf, base_1BH[0] + jnp.log(safe_BH))
    return Partial(o=o_BHV / safe_BH[..., None], lse=lse_BH)


def _kernel(owner_ref: Any, o_ref: Any, lse_ref: Any, out_o_ref: Any, out_lse_ref: Any) -> None:
    row, head = pl.program_id(0), pl.program_id(1)
    num_blocks, _, value_dim = o_ref.shape
    dims_V = jnp.arange(padded(value_dim), dtype=jnp.int32)

    def take(i: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        o_V, top, total = carry
        block_S = i * STEP_BLOCKS + jnp.arange(STEP_BLOCKS, dtype=jnp.int32)
        exists_S = block_S < num_blocks
        nobody = jnp.int32(-1)
        is_own_S = pltriton.load(owner_ref.at[block_S], mask=exists_S, other=nobody) == row
        lse_S = pltriton.load(lse_ref.at[block_S, head], mask=is_own_S, other=-jnp.inf)
        new_top = jnp.maximum(top, jnp.max(lse_S))
        # -inf minus -inf is a NaN: as long as no block counts, subtract zero instead.
        base = jnp.where(new_top == -jnp.inf, jnp.float32(0), new_top)
        weight_S = jnp.exp(lse_S - base)
        shrink = jnp.exp(top - base)
        # Nothing is read of the others' blocks, so what is broken there stays there.
        o_SV = pltriton.load(
            o_ref.at[block_S[:, None], head, dims_V[None, :]],
            mask=is_own_S[:, None] & (dims_V[None, :] < value_dim),
            other=0.0,
        )
        o_V = o_V * shrink + jnp.sum(weight_S[:, None] * o_SV, axis=0)
        return o_V, new_top, total * shrink + jnp.sum(weight_S)

    start = (jnp.zeros(dims_V.shape, jnp.float32), jnp.float32(-jnp.inf), jnp.float32(0))
    o_V, top, total = jax.lax.fori_loop(0, -(-num_blocks // STEP_BLOCKS), take, start)
    safe = jnp.where(total == 0, jnp.float32(1), total)
    num_broken = jnp.sum(jnp.where(jnp.abs(o_V) < jnp.inf, jnp.float32(0), jnp.float32(1)))
    o_V = jnp.where(num_broken > 0, jnp.nan, o_V)
    pltriton.store(out_o_ref.at[row, head, dims_V], o_V / safe, mask=dims_V < value_dim)
    out_lse_ref[row, head] = jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))


def gather(
    part: Partial, owner: Int32[Array, " C"], *, num_rows: int, interpret: bool = False
) -> Partial:
    """`join_blocks` as one GPU kernel, where XLA makes eleven: each row's programs read its own blocks.

    It stands between the last chunk of a layer and the next layer's queries, when neither CPU nor link is waited for.
    """
    _, num_heads, value_dim = part.o.shape
    out: list[Float[Array, ...]] = pl.pallas_call(
        _kernel,
        grid=(num_rows, num_heads),
        in_specs=[pl.no_block_spec] * 3,
        out_specs=[pl.no_block_spec] * 2,
        out_shape=[
            jax.ShapeDtypeStruct((num_rows, num_heads, value_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, num_heads), jnp.float32),
        ],
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="join_blocks",
    )(owner, *part)
    return Partial(*out)
