"""The engine on a GPU: golden logits, and the tokens of the CPU engine in every share, policy and batch."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.engines import ALL_POLICIES, CHECKPOINTS, FAMILIES, golden
from wscope_jax import Engine, Sampling

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
