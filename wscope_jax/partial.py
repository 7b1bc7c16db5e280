"""Partial attention results over disjoint sets of entries, and the one function that joins them."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from wscope_jax.arguments import having, instance
from wscope_jax.errors import UsageError


class Partial(NamedTuple):
    """Attention of some queries over some entries.

    Attributes:
        o: [..., H, V] float32, normalised output; zero for an empty set.
        lse: [..., H] float32, natural logarithm of the sum of exponentials; -inf for an empty set.
    """

    o: Float[Array, "*B H V"]
    lse: Float[Array, "*B H"]


def empty_partial(batch: int, num_heads: int, value_dim: int) -> Partial:
    """The partial of no entries at all: the neutral element of `merge`."""
    return Partial(
        o=jnp.zeros((batch, num_heads, value_dim), jnp.float32),
        lse=jnp.full((batch, num_heads), -jnp.inf, jnp.float32),
    )


def merge(*partials: Partial) -> Partial:
    """Attention over the union of disjoint sets of entries, from the partial of each.

    The order of the arguments fixes the order of the sums, so equal inputs give equal bits. Empty partials
    drop out; the union of empty sets is the empty partial, never a NaN.

    Raises:
        UsageError: there is none, or something else, or their shapes differ.

    Source: the log-sum-exp merge of the paper's sequence-dimension split.
    """
    for part in partials or (None,):
        instance("partials", part, Partial, "Partial(o, lse), at least one")
    for part in partials:
        for number in part:
            having("partials", number, ("shape", "dtype"), "two arrays in a Partial")
    shapes = {(part.o.shape, part.lse.shape) for part in partials}
    if len(shapes) > 1 or partials[0].o.shape[:-1] != partials[0].lse.shape:
        raise UsageError(
            "partials: expected o [..., V] and lse [...], the same of each, got "
            + ", ".join(f"{list(part.o.shape)} and {list(part.lse.shape)}" for part in partials)
        )
    top = partials[0].lse
    for part in partials[1:]:
        top = jnp.maximum(top, part.lse)
    # -inf minus -inf is a NaN: where every set is empty, subtract zero instead.
    base = jnp.where(jnp.isneginf(top), jnp.zeros_like(top), top)
    total = jnp.zeros_like(top)
    o = jnp.zeros_like(partials[0].o)
    for part in partials:
        weight = jnp.exp(part.lse - base)
        total = total + weight
        o = o + weight[..., None] * part.o
    is_empty = total == 0
    o = jnp.where(
        is_empty[..., None], jnp.zeros_like(o), o / jnp.where(is_empty, 1.0, total)[..., None]
    )
    return Partial(
        o=o, lse=jnp.where(is_empty, -jnp.inf, base + jnp.log(jnp.where(is_empty, 1.0, total)))
    )


def join(part: Partial) -> Partial:
    """`merge` over the second axis of one array: from o [N, S, H, V] and lse [N, S, H] to [N, H, V] and [N, H]."""
    if part.lse.shape[1] == 1:
        return Partial(part.o[:, 0], part.lse[:, 0])
    top = part.lse.max(1)
    base = jnp.where(jnp.isneginf(top), 0.0, top)
    weight = jnp.exp(part.lse - base[:, None])
    total = weight.sum(1)
    safe = jnp.where(total == 0, 1.0, total)
    o = (part.o * weight[..., None]).sum(1) / safe[..., None]
    return Partial(o, jnp.where(total == 0, -jnp.inf, base + jnp.log(safe)))
