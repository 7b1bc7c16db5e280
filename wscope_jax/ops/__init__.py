"""Kernels as pure functions of arrays that give a `Partial`, and the calls that move bytes."""
