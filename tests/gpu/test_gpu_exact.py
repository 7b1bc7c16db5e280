"""The engine on a GPU: golden logits, and the tokens of the CPU engine in every share, policy and batch."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import CASES
from tests.engines import ALL_POLICIES, CHECKPOINTS, FAMILIES, golden
from tests.test_schedules import TwoHalves
from wscope_jax import Engine, Entries, InplaceKVCache, Sampling, Stream, attend, policies
from wscope_jax.attention import attend_prompt
from wscope_jax.views import Views

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-4  # absolute, float32
ENGINES: dict[Any, Engine] = {}


def engine(family: str, window: int, platform: str = "cuda") -> Engine:
    key = (family, window, platform)
    if key not in ENGINES:
        with jax.default_device(jax.devices(platform)[0]):
            ENGINES[key] = Engine.from_pretrained(
                CHECKPOINTS[family], dtype="float32", window=window, policy="write_scope"
            )
    return ENGINES[key]


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_logits(family: str) -> None:
    data = golden(family)
    got = engine(family, 32).logits(data.ids)
    np.testing.assert_allclose(got, data.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("window", [32, 64, 256])
@pytest.mark.parametrize("name", ["auto", *ALL_POLICIES])
@pytest.mark.parametrize("family", FAMILIES)
def test_forced_text(family: str, name: str, window: int) -> None:
    data = golden(family)
    logits = engine(family, window).score(
        data.long_ids, data.long_first, policy=ALL_POLICIES.get(name)
    )
    assert np.abs(logits - data.long_logits).max() < TOLERANCE


@pytest.mark.parametrize("name", ["share_0.3", "gpu_only", "cpu_only"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_windows_that_keep_four_blocks_more(family: str, name: str) -> None:
    data, policy, plain = golden(family), ALL_POLICIES[name], engine(family, 32)
    layouts = [stream.layout for streams in plain.model.streams for stream in streams]
    spare_memory = 4 * 32 * sum(layout.entry_bytes(4) for layout in layouts)
    prompts, settings = [data.long_ids[:400].tolist()], Sampling(max_new_tokens=70)
    with Engine.from_pretrained(
        CHECKPOINTS[family], dtype="float32", window=32, spare_memory=spare_memory
    ) as eng:
        logits = eng.score(data.long_ids, data.long_first, policy=policy)
        found = eng.generate(prompts, settings, policy=policy)
    assert np.abs(logits - data.long_logits).max() < TOLERANCE
    wanted = plain.generate(prompts, settings, policy=policy)
    assert found.tokens == wanted.tokens
    windows = [result.regions["window"]["tokens"] for result in (found, wanted)]
    assert windows[0] == windows[1] + 4 * 32


@pytest.mark.parametrize("name", ["auto", *ALL_POLICIES])
@pytest.mark.parametrize("family", FAMILIES)
def test_sequence(family: str, name: str) -> None:
    data = golden(family)
    result = engine(family, 32).generate(
        [row.tolist() for row in data.ids],
        Sampling(max_new_tokens=16, ignore_eos=True),
        policy=ALL_POLICIES.get(name),
    )
    assert result.tokens == data.seq[:, data.ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", ["share_0.0", "share_0.5", "share_1.0", "resident"])
def test_ragged_batch_has_the_tokens_of_the_cpu(name: str) -> None:
    """Rows of different lengths end at different times; the others go on."""
    rng = np.random.default_rng(5)
    family, policy = "qwen3_moe", ALL_POLICIES[name]
    prompts = [rng.integers(0, 128, size).tolist() for size in (300, 1, 33, 150, 64)]
    samplings = [
        Sampling(max_new_tokens=new, ignore_eos=True, temperature=temperature, seed=11)
        for new, temperature in ((120, 0.0), (200, 0.8), (40, 0.0), (7, 1.1), (90, 0.0))
    ]
    got = engine(family, 32).generate(prompts, samplings, policy=policy)
    with jax.default_device(jax.devices("cpu")[0]):
        want = engine(family, 32, "cpu").generate(prompts, samplings, policy=policy)
    assert got.tokens == want.tokens
    assert got.finish_reason == want.finish_reason
    assert got.compiles["stall"] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_two_jobs_open(family: str) -> None:
    data, eng = golden(family), engine(family, 32)
    texts = np.stack([data.long_ids[:200], data.long_ids[200:400], data.long_ids[400:600]])
    policy = policies.choose("write_scope", 0.5)
    expected = eng.score(texts, 150, policy=policy)
    got = eng.score(texts, 150, policy=dataclasses.replace(policy, schedule=TwoHalves()))
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", ["mla5_40", "gqa3_d24"])
def test_queries_that_are_a_slice(case: str) -> None:
    """XLA:GPU would let a call read them where they lie, in the larger array."""
    got = _attend_with_slices(case)
    with jax.default_device(jax.devices("cpu")[0]):
        want = _attend_with_slices(case)
    np.testing.assert_allclose(got, want, atol=2e-5, rtol=0)


def _attend_with_slices(name: str) -> Any:
    case, length, layers = CASES[name], 200, 2
    layout, rng = case.layout, np.random.default_rng(1)

    def entries(count: int) -> Entries:
        key = rng.standard_normal((count, layout.num_kv_heads, layout.key_dim), np.float32)
        value = rng.standard_normal((count, layout.num_kv_heads, layout.value_dim), np.float32)
        return Entries(jnp.asarray(key), None if layout.value_in_key else jnp.asarray(value))

    def queries(*shape: int) -> jax.Array:
        return jnp.asarray(
            rng.standard_normal((*shape, case.num_q_heads, layout.key_dim), np.float32)
        )

    prompt, new, many = entries(224), entries(1), queries(3)
    prompt_q, row = queries(224), jnp.int32(0)

    def write(layer: int, views: Views) -> tuple[Views, None]:
        _, view = attend_prompt(
            prompt_q,
            prompt,
            views[layer].begin(),
            row=row,
            length=jnp.int32(length),
            scale=case.scale,
        )
        return views.put(layer, view), None

    def step(views: Views) -> tuple[Views, list[jax.Array]]:
        views, out = views.begin(), []
        for i in range(layers):
            o, view = attend(many[i : i + 1], new, views[i], scale=case.scale)
            views = views.put(i, view)
            out.append(o)
        return views.advance(), out

    policy = policies.choose("write_scope", 0.5)
    with InplaceKVCache(
        [[Stream(layout)]] * layers, policy=policy, batch=1, max_len=300, window=32
    ) as cache:
        cache.begin_prompt(0, length)
        for i in range(layers):
            fn = functools.partial(write, i)
            cache.write_prompt(0, (i,), jax.jit(fn, donate_argnums=0))
        cache.end_prompt(0)
        return np.asarray(cache.step(jax.jit(step, donate_argnums=0)))
