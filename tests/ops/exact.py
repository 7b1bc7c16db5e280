"""Attention in float64 by numpy, and the numbers that the tests of the device's kernels draw."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.cases import BIG, SMALL, TOLERANCES, Case
from wscope_jax.partial import Partial

Numbers = np.ndarray[Any, Any]
DTYPES = ("float32", "bfloat16")
RUNS = [
    *((name, dtype) for name in SMALL for dtype in DTYPES),
    *((name, "bfloat16") for name in BIG),
]


def attend(q: Any, key: Any, value: Any, scale: float) -> tuple[Numbers, Numbers]:
    """(o [H, V], lse [H]) of one query token [H, K] over keys [S, G, K] and values [S, G, V], S at least 1."""
    q_HK, key_SGK, value_SGV = (np.asarray(x).astype(np.float64) for x in (q, key, value))
    group = q_HK.shape[0] // key_SGK.shape[1]
    key_SHK, value_SHV = (np.repeat(x, group, axis=1) for x in (key_SGK, value_SGV))
    scores_HS = np.einsum("hk,shk->hs", q_HK, key_SHK) * scale
    top_H1 = scores_HS.max(axis=1, keepdims=True)
    weight_HS = np.exp(scores_HS - top_H1)
    total_H1 = weight_HS.sum(axis=1, keepdims=True)
    o_HV = np.einsum("hs,shv->hv", weight_HS / total_H1, value_SHV)
    return o_HV, (top_H1 + np.log(total_H1))[:, 0]


def draw(case: Case, seed: int, batch: int, num_entries: int, dtype: str) -> tuple[Numbers, ...]:
    """Normal q [B, H, K], keys [B, S, G, K] and values [B, S, G, V], as numbers of `dtype`."""
    rng, layout = np.random.default_rng(seed), case.layout
    stored = (batch, num_entries, layout.num_kv_heads)
    q, key, value = (
        rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))
        for shape in (
            (batch, case.num_q_heads, layout.key_dim),
            (*stored, layout.key_dim),
            (*stored, layout.value_dim),
        )
    )
    return q, key, key[..., : layout.value_dim] if layout.value_in_key else value


def sharpen(q: Numbers, key: Numbers, seed: int) -> tuple[Numbers, Numbers]:
    """q and keys whose scores are exactly -10000, 0 or 10000 at a scale of 1."""
    q, key = np.zeros_like(q), np.zeros_like(key)
    q[..., 0] = 100
    key[..., 0] = np.random.default_rng(seed).choice([-100, 0, 100], key.shape[:-1])
    return q, key


def wide(*arrays: Any) -> list[jax.Array]:
    """The arrays in float32, as the oracle takes them."""
    return [jnp.asarray(np.asarray(x).astype(np.float32)) for x in arrays]


def check(got: Partial, want: Partial, dtype: str, top: float = 0.0) -> None:
    """The two are as close as the table asks; -inf equals -inf, and a NaN equals nothing.

    Partials that were merged know their weights as well as float32 holds an lse of the size of `top`.
    """
    step = float(np.spacing(np.float32(top)))
    for x, y, most in zip(got, want, TOLERANCES[dtype], strict=True):
        np.testing.assert_allclose(x, y, atol=most + step, rtol=1e-6, equal_nan=False)


def bits(part: Partial) -> tuple[bytes, bytes]:
    return np.asarray(part.o).tobytes(), np.asarray(part.lse).tobytes()
