"""The CPU's attention on arrays, through every instruction set, against the oracle in plain JAX."""

import os
import subprocess
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import CASES
from wscope_jax import _ffi
from wscope_jax.ops import host_attention
from wscope_jax.ops.arrays import HOST_ATTENTION
from wscope_jax.ops.reference import attend_reference, masked_attention
from wscope_jax.partial import Partial, merge

ROWS, ENTRIES, BLOCK = 3, 150, 64
EXACT = {"portable", "avx2", "avx512"}


@pytest.fixture(params=_ffi.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    _ffi.force_isa(request.param)
    yield request.param
    _ffi.force_isa(os.environ.get("WSCOPE_ISA", ""))


def _inputs(name: str, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    case, draw = CASES[name], np.random.default_rng(3)
    layout = case.layout

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(draw.standard_normal(shape, np.float32), dtype)

    q = normal(ROWS, case.num_q_heads, layout.key_dim)
    key = normal(ROWS, ENTRIES, layout.num_kv_heads, layout.key_dim)
    if layout.value_in_key:
        return q, key, None
    return q, key, normal(ROWS, ENTRIES, layout.num_kv_heads, layout.value_dim)


def _close(got: Partial, want: Partial, exact: bool) -> None:
    o, lse = (1e-5, 1e-5) if exact else (2e-2, 2e-4)
    np.testing.assert_allclose(got.o, want.o, atol=o)
    np.testing.assert_allclose(got.lse, want.lse, atol=lse)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_it_equals_the_oracle(name: str, dtype: str, isa: str) -> None:
    q, key, value = _inputs(name, dtype)
    width = CASES[name].layout.value_dim
    lengths = jnp.array([ENTRIES, 0, 33])
    got = jax.jit(lambda *args: host_attention(*args, value_dim=width, block=BLOCK))(
        q, key, value, lengths
    )
    wide = [x.astype(jnp.float32) for x in (q, key, key[..., :width] if value is None else value)]
    want = attend_reference(*wide, lengths, scale=CASES[name].scale)
    _close(got, want, dtype == "float32" or isa in EXACT)
    assert not np.any(np.asarray(got.o[1]))


def test_a_program_may_be_the_first_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers that it starts suit a device, which is asked for while the program is traced."""
    started: list[int] = []
    monkeypatch.setattr(_ffi, "num_workers", lambda: 0)
    monkeypatch.setattr(_ffi, "start_workers", started.append)
    inputs = _inputs("gqa8_d128", "float32")
    jax.eval_shape(host_attention, *inputs, jnp.full(ROWS, ENTRIES))
    assert len(started) == 1


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_lengths_of_any_width(dtype: str) -> None:
    q, key, value = (jnp.concatenate([x, x], 1) for x in _inputs("gqa8_d128", "float32"))
    q = q[:, : q.shape[1] // 2]
    lengths = jnp.array([100, 3, jnp.iinfo(dtype).max], dtype)
    got = host_attention(q, key, value, lengths, block=BLOCK)
    whole = jnp.array(np.minimum(np.asarray(lengths, np.int64), 2 * ENTRIES), jnp.int32)
    want = host_attention(q, key, value, whole, block=BLOCK)
    np.testing.assert_array_equal(got.lse, want.lse)


def test_the_call_refuses_what_does_not_fit() -> None:
    """What Python never passes on: results of another shape, and no such number of blocks."""
    q, blocks = jnp.ones((2, 4, 16)), jnp.ones((2, 1, 2, 32 * 32))
    words = jnp.ones((2, 1), jnp.uint32)

    def call(o: tuple[int, ...], blocks: jax.Array, words: jax.Array) -> jax.Array:
        shapes = tuple(jax.ShapeDtypeStruct(dims, jnp.float32) for dims in (o, o[:2]))
        numbers = {"num_kv_heads": 2, "key_dim": 16, "value_dim": 16, "value_in_key": 0}
        attributes = {name: np.int32(number) for name, number in numbers.items()}
        result: list[jax.Array] = jax.ffi.ffi_call(HOST_ATTENTION, shapes)(
            q, blocks, words, block=np.int32(32), scale=np.float32(1), **attributes
        )
        return jax.block_until_ready(result[0])

    assert call((2, 4, 16), blocks, words).shape == (2, 4, 16)
    for o in ((1, 4, 16), (2, 2, 16), (2, 4, 8), (2, 4, 32)):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT: o: is \["):
            call(o, blocks, words)
    for wrong in ((blocks[:1], words), (blocks[..., :16], words), (blocks, words[:, :0])):
        with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: blocks: is"):
            call((2, 4, 16), *wrong)


def test_lengths_beyond_the_array_count_all_and_negative_ones_none(isa: str) -> None:
    q, key, value = _inputs("gqa8_d128", "float32")
    got = host_attention(q, key, value, jnp.array([ENTRIES + 1, 2**31 - 1, -1]), block=BLOCK)
    want = host_attention(q, key, value, jnp.array([ENTRIES, ENTRIES, 0]), block=BLOCK)
    np.testing.assert_array_equal(got.o, want.o)
    np.testing.assert_array_equal(got.lse, want.lse)


def test_selected_entries_and_a_sink(isa: str) -> None:
    q, key, value = _inputs("gqa8_d128", "bfloat16")
    select = jnp.asarray(np.random.default_rng(4).random((ROWS, ENTRIES)) < 0.2).at[2].set(False)
    sink = jnp.linspace(-1.0, 2.0, q.shape[1])
    lengths = jnp.full(ROWS, ENTRIES - 5)
    got = host_attention(q, key, value, lengths, select=select, sink=sink, block=32)
    mask = select & (jnp.arange(ENTRIES) < ENTRIES - 5)[None, :]
    wide = [x.astype(jnp.float32) for x in (q, key.swapaxes(1, 2), value.swapaxes(1, 2))]
    part = masked_attention(*wide, mask, scale=128**-0.5)
    want = merge(
        part, Partial(jnp.zeros_like(part.o), jnp.broadcast_to(sink[None, :], part.lse.shape))
    )
    _close(got, want, isa in EXACT)


def _import_with(isa: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from wscope_jax import _ffi, ops; print(_ffi.isas())"],
        env={**os.environ, "WSCOPE_ISA": isa, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_an_isa_that_is_not_there_is_an_error() -> None:
    done = _import_with("sse9")
    assert done.returncode != 0
    assert "MachineError" in done.stderr
    assert "sse9" in done.stderr
    assert "portable" in done.stderr
    for name in {"avx2", "avx512", "avx512_bf16", "amx"} - set(_ffi.isas()):
        assert "cannot run here" in _import_with(name).stderr


def test_the_choice_of_a_shape_is_kept() -> None:
    shape = (32, 4, 128, 128, False, 256, "bfloat16")
    assert _ffi.isa_of(*shape) == _ffi.isa_of(*shape)
    assert _ffi.isa_of(*shape) in _ffi.isas()
    with pytest.raises(ValueError, match="block"):
        _ffi.isa_of(32, 4, 128, 128, False, 33, "bfloat16")
