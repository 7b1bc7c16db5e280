"""Causal attention of a whole prompt against float64, for lengths with and without large divisors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import DTYPES, RUNS, attend, draw, sharpen

from tests.cases import CASES, TOLERANCES
from wscope_jax.ops import prefill

H, G = 6, 2


def _run(q: Any, key: Any, value: Any, scale: float) -> Any:
    def fn(
        *args: jax.Array,
    ) -> jax.Array:  # a function of its own: chunk sizes differ between tests
        return prefill.causal_attention(*args, scale=scale)

    compiled = jax.jit(fn)
    args = tuple(map(jnp.asarray, (q, key, value)))
    got = np.asarray(compiled(*args))
    assert got.dtype == np.float32
    assert got.tobytes() == np.asarray(compiled(*args)).tobytes()
    return got


def _check(q: Any, key: Any, value: Any, scale: float, dtype: str, tokens: Any = None) -> None:
    got = _run(q, key, value, scale)
    for t in range(len(q)) if tokens is None else tokens:
        o, _ = attend(q[t], key[: t + 1], value[: t + 1], scale)
        np.testing.assert_allclose(got[t], o, atol=TOLERANCES[dtype].o, err_msg=f"token {t}")


def _draw(num_tokens: int, key_dim: int, value_dim: int, dtype: str) -> Any:
    rng = np.random.default_rng(num_tokens)
    return tuple(
        rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))
        for shape in (
            (num_tokens, H, key_dim),
            (num_tokens, G, key_dim),
            (num_tokens, G, value_dim),
        )
    )


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 31, 35, 48, 58, 64])
def test_any_length(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MAX_CHUNK", 16)
    _check(*_draw(num_tokens, 12, 7, "float32"), 12**-0.5, "float32")


@pytest.mark.parametrize(("num_tokens", "size"), [(511, 511), (514, 257), (620, 310), (1024, 512)])
def test_chunks_of_the_real_size(num_tokens: int, size: int) -> None:
    assert prefill._chunk_size(num_tokens) == size
    ends = {0, 1, size - 1, size % num_tokens, num_tokens - 1, num_tokens // 2}
    _check(*_draw(num_tokens, 8, 5, "float32"), 0.3, "float32", sorted(ends))


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_every_case(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MAX_CHUNK", 16)
    case = CASES[name]
    num_tokens = 45  # three chunks of 15
    q = draw(case, 7, num_tokens, 1, dtype)[0]
    _, key, value = (x[0] for x in draw(case, 8, 1, num_tokens, dtype))
    _check(q, key, value, case.scale, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_and_extreme_scores(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MAX_CHUNK", 16)
    q, key, value = _draw(40, 12, 7, dtype)
    _check(np.zeros_like(q), key, value, 1.0, dtype)
    q, key = sharpen(q, key, 9)
    _check(q, key, value, 1.0, dtype)
    _check(q, np.full_like(key, -100), value, 1.0, dtype)


def test_later_tokens_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MAX_CHUNK", 16)
    q, key, value = _draw(48, 12, 7, "float32")
    before = _run(q, key, value, 0.3)
    key[20:], value[20:] = 50, -1e30
    after = _run(q, key, value, 0.3)
    np.testing.assert_array_equal(before[:20], after[:20])
    assert not np.array_equal(before[20:], after[20:])
