"""Kernels as pure functions of arrays that give a `Partial`, and the calls that move bytes."""

from wscope_jax.ops import host as host  # registers the custom calls
from wscope_jax.ops.arrays import host_attention

__all__ = ["host_attention"]
