"""Golden logits and tokens of every family, for every share, window and policy."""

import numpy as np
import pytest

from tests.engines import ALL_POLICIES, FAMILIES, auto_policy, engine, golden
from wscope_jax import Sampling

TOLERANCE = 1e-4  # absolute, float32

# The scope puts tests of one engine beside each other: it, and what it compiled, is made once.
families = pytest.mark.parametrize("family", FAMILIES, scope="module")


def windows(*sizes: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("window", sizes, scope="module")


@families
def test_prompt_logits(family: str) -> None:
    data = golden(family)
    np.testing.assert_allclose(engine(family).logits(data.ids), data.logits, atol=TOLERANCE, rtol=0)


@windows(32, 64, 256)
@families
def test_forced_text_in_every_share_and_policy(family: str, window: int) -> None:
    data, eng = golden(family), engine(family, window)
    for name, policy in {"auto": auto_policy(family, window), **ALL_POLICIES}.items():
        eng.policy = policy
        logits = eng.score(data.long_ids, data.long_first)
        error = np.abs(logits - data.long_logits).max()
        assert error < TOLERANCE, f"{name}: {error}"


@windows(32, 256)
@families
def test_generate_reproduces_the_sequence(family: str, window: int) -> None:
    data, eng = golden(family), engine(family, window)
    prompts = [row.tolist() for row in data.ids]
    for name, policy in {"auto": auto_policy(family, window), **ALL_POLICIES}.items():
        eng.policy = policy
        result = eng.generate(prompts, Sampling(max_new_tokens=16, ignore_eos=True))
        assert result.tokens == data.seq[:, data.ids.shape[1] :].tolist(), name
        assert result.finish_reason == ["length", "length"]


@windows(32, 256)
@families
def test_forced_steps_of_a_batch(family: str, window: int) -> None:
    data, eng = golden(family), engine(family, window)
    for name, policy in {"auto": auto_policy(family, window), **ALL_POLICIES}.items():
        eng.policy = policy
        error = np.abs(eng.score(data.seq[:, :-1], data.ids.shape[1]) - data.step_logits).max()
        assert error < TOLERANCE, f"{name}: {error}"
