"""Rotary position embedding: pairs of a head's numbers turn with the position.

The frequencies are computed once, in float64, when a program is traced; the angles are float32.
"""

import dataclasses
import math
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from wscope_jax.models.fields import Fields

MAX_POSITIONS: Final = (1 << 31) - 1  # positions are int32
TYPES: Final = ("default", "linear", "llama3", "yarn")
FloatArray = np.ndarray[Any, np.dtype[np.float64]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """How the rotation of a head depends on the position; hashable and static.

    Attributes:
        dim: K, numbers in a head; even.
        theta: base of the wavelengths.
        kind: "default", "linear", "llama3" or "yarn"; what follows counts only where its kind uses it.
        factor: by how much long wavelengths are stretched.
        amplitude: multiplies the rotated vectors (yarn).
        original_positions: positions of the training before the stretching (llama3, yarn).
        beta: (fast, slow), turns within the original positions between which yarn blends.
        truncate: yarn rounds the two ends of its blend to whole pairs.
        freq_factors: (low, high), turns between which llama3 blends.
        is_adjacent: the pairs are (2i, 2i + 1), not (i, i + K/2).
    """

    dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    amplitude: float = 1.0
    original_positions: int = 0
    beta: tuple[float, float] = (32.0, 1.0)
    truncate: bool = True
    freq_factors: tuple[float, float] = (1.0, 4.0)
    is_adjacent: bool = False

    def frequencies(self) -> FloatArray:
        """Angle per position of each pair, [K/2]."""
        plain_k = self.theta ** -(np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        keep_k: FloatArray = np.ones_like(plain_k)  # share of each frequency that is not stretched
        if self.kind == "linear":
            keep_k = np.zeros_like(plain_k)
        elif self.kind == "llama3":
            keep_k = self._kept_by_llama3(plain_k)
        elif self.kind == "yarn":
            keep_k = self._kept_by_yarn(plain_k.size)
        frequencies_k: FloatArray = plain_k * (keep_k + (1.0 - keep_k) / self.factor)
        return frequencies_k

    def _kept_by_llama3(self, plain: FloatArray) -> FloatArray:
        """Short wavelengths stay, long ones are stretched, those between are blended by their turns."""
        low, high = self.freq_factors
        turns = self.original_positions * plain / (2 * math.pi)
        return np.clip((turns - low) / (high - low), 0.0, 1.0)

    def _kept_by_yarn(self, num_pairs: int) -> FloatArray:
        """As llama3, but blended by a ramp over the pairs."""

        def pair_of(turns: float) -> float:
            ratio = self.original_positions / (turns * 2 * math.pi)
            return self.dim * math.log(ratio) / (2 * math.log(self.theta))

        first, last = (pair_of(turns) for turns in self.beta)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.dim - 1)
        last += 0.001 * (first == last)  # a step; without it 0/0
        ramp_k: FloatArray = (np.arange(num_pairs, dtype=np.float64) - first) / (last - first)
        return 1.0 - np.clip(ramp_k, 0.0, 1.0)


def rotate(x: Float[Array, "N H K"], pos: Int32[Array, " N"], rope: Rope) -> Float[Array, "N H K"]:
    """Turns the pairs of each head by the angles of its token's position; in the dtype of `x`."""
    freq_k = jnp.asarray(rope.frequencies(), jnp.float32)
    angle_Nk = pos.astype(jnp.float32)[:, None] * freq_k[None, :]
    cos_N1k = rope.amplitude * jnp.cos(angle_Nk)[:, None, :]
    sin_N1k = rope.amplitude * jnp.sin(angle_Nk)[:, None, :]
    x32 = x.astype(jnp.float32)
    halves = (x32[..., 0::2], x32[..., 1::2]) if rope.is_adjacent else jnp.split(x32, 2, axis=-1)
    a_NHk, b_NHk = halves
    turned = (a_NHk * cos_N1k - b_NHk * sin_N1k, b_NHk * cos_N1k + a_NHk * sin_N1k)
    if rope.is_adjacent:
        return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def scaling_fields(fields: Fields) -> Fields:
    """The object of config.json that describes the rotation, under either of its names; maybe empty.

    Raises:
        CheckpointError: It is no object.
    """
    found = fields.child("rope_scaling") or fields.child("rope_parameters")
    return found or Fields({}, fields.path)


def growth(factor: float, weight: float = 1.0) -> float:
    """By how much the scores of a text stretched by `factor` are to grow.

    Source: YaRN (arXiv 2309.00071), equation 22; the weight is DeepSeek's `mscale`.
    """
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def read_rope(fields: Fields, dim: int, max_positions: int, default_theta: float) -> Rope:
    """The rotation that config.json names, in the old spelling (`rope_scaling`, `rope_theta`) or the new.

    Args:
        fields: keys of config.json.
        dim: K.
        max_positions: stands for the original positions where they are not given.
        default_theta: the family's base.

    Raises:
        CheckpointError: A value is out of its range, or the rope_type is one that is not supported: those that change
            the rotation with the length of the text (dynamic, longrope) do not fit a cache of rotated keys.
    """
    scaling = scaling_fields(fields)
    for source in (scaling, fields):
        if source.number("partial_rotary_factor", 1.0, 0.0, 1.0) != 1.0:
            raise source.refuse("partial_rotary_factor", "1.0")
    kind = scaling.choice("rope_type", scaling.choice("type", "default", TYPES), TYPES)
    base = scaling if scaling.get("rope_theta") is not None else fields
    theta = base.number("rope_theta", default_theta, 1.001, 1e15)
    rope = Rope(dim=dim, theta=theta)
    if kind == "default":
        return rope
    outer = fields if fields.get("original_max_position_embeddings") else scaling
    original = max_positions
    if kind != "linear":
        original = outer.integer("original_max_position_embeddings", original, 1, MAX_POSITIONS)
    implied = max(1.0, max_positions / original) if kind == "yarn" else None
    factor = scaling.number("factor", implied, 1e-3, 1e6)
    rope = dataclasses.replace(rope, kind=kind, factor=factor, original_positions=original)
    if kind == "llama3":
        return _read_llama3(scaling, rope)
    return _read_yarn(scaling, rope) if kind == "yarn" else rope


def _read_llama3(scaling: Fields, rope: Rope) -> Rope:
    low = scaling.number("low_freq_factor", None, 1e-3, 1e6)
    high = scaling.number("high_freq_factor", None, 1e-3, 1e6)
    if high <= low:
        raise scaling.refuse("high_freq_factor", f"more than low_freq_factor, {low:g}")
    return dataclasses.replace(rope, freq_factors=(low, high))


def _read_yarn(scaling: Fields, rope: Rope) -> Rope:
    mscale = scaling.number("mscale", 0.0, 0.0, 1e3)
    mscale_all_dim = scaling.number("mscale_all_dim", 0.0, 0.0, 1e3)
    both = mscale and mscale_all_dim
    implied = growth(rope.factor)
    if both:
        implied = growth(rope.factor, mscale) / growth(rope.factor, mscale_all_dim)
    return dataclasses.replace(
        rope,
        amplitude=scaling.number("attention_factor", implied, 0.0, 1e3),
        # zero means absent here, as it does where these checkpoints are published
        beta=(
            scaling.number("beta_fast", 0.0, 0.0, 1e6) or 32.0,
            scaling.number("beta_slow", 0.0, 0.0, 1e6) or 1.0,
        ),
        truncate=scaling.flag("truncate", True),
    )
