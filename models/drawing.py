"""Random parameters, drawn a piece at a time.

On a GPU little memory is needed beside what is kept; elsewhere the pieces of one parameter are held twice.
"""

import functools
import math
from typing import Any, Final

import jax
import jax.numpy as jnp

PRNG: Final = "threefry2x32"  # named, so that jax's default does not change what a seed draws
DRAWN: Final = 1 << 20  # numbers drawn at a time


def draw(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """One parameter, drawn a few of its first dimension at a time; norms and biases are ones."""
    if len(leaf.shape) == 1:
        return jnp.ones(leaf.shape, leaf.dtype)
    num, *rest = leaf.shape
    piece = max(1, DRAWN // math.prod(rest))
    shapes = {start: (min(piece, num - start), *rest) for start in range(0, num, piece)}
    if next(iter(key.devices())).platform == "cpu":
        # XLA's CPU platform widens bfloat16 to write to it: all of the parameter, for each piece.
        return jnp.concatenate(
            [
                _draw_some(key, jnp.int32(start), leaf.dtype, shape)
                for start, shape in shapes.items()
            ]
        )
    drawn = jnp.zeros(leaf.shape, leaf.dtype)
    for start, shape in shapes.items():
        drawn = _draw_into(drawn, key, jnp.int32(start), shape)
    return drawn


@functools.partial(jax.jit, static_argnums=(2, 3))
def _draw_some(key: jax.Array, start: jax.Array, dtype: Any, shape: tuple[int, ...]) -> jax.Array:
    scale = jnp.asarray(float(shape[-1]) ** -0.5, dtype)
    drawn: jax.Array = jax.random.normal(jax.random.fold_in(key, start), shape, dtype) * scale
    return drawn


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _draw_into(
    drawn: jax.Array, key: jax.Array, start: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Writes a piece in place: what is needed beside the parameter is small."""
    some = _draw_some(key, start, drawn.dtype, shape)
    return jax.lax.dynamic_update_slice_in_dim(drawn, some, start, 0)
