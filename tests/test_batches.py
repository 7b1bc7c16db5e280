"""A row's tokens are its own: whatever the policy, the neighbours and their order."""

import functools

import numpy as np
import pytest

from tests.engines import ALL_POLICIES, engine
from wscope_jax import Sampling

LENGTHS = (5, 64, 133)
NEW = 90  # crosses two evictions of a window of 32 in every row


def _prompts() -> list[list[int]]:
    draw = np.random.default_rng(7)
    return [draw.integers(0, 128, length).tolist() for length in LENGTHS]


@functools.cache
def _alone(family: str) -> list[list[int]]:
    eng = engine(family)
    eng.policy = ALL_POLICIES["resident"]
    how = Sampling(max_new_tokens=NEW, ignore_eos=True)
    return [eng.generate([prompt], how, max_model_len=256).tokens[0] for prompt in _prompts()]


@pytest.fixture
def alone() -> list[list[int]]:
    return _alone("qwen3_moe")


@pytest.mark.parametrize("policy", ALL_POLICIES)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_every_policy_gives_the_same_tokens(family: str, policy: str) -> None:
    eng = engine(family)
    eng.policy = ALL_POLICIES[policy]
    how = Sampling(max_new_tokens=NEW, ignore_eos=True)
    result = eng.generate(_prompts(), how, max_model_len=256)
    assert result.tokens == _alone(family)


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0)])
def test_order_of_rows_does_not_matter(order: tuple[int, ...], alone: list[list[int]]) -> None:
    eng, prompts = engine(), _prompts()
    eng.policy = ALL_POLICIES["share_0.5"]
    how = Sampling(max_new_tokens=NEW, ignore_eos=True)
    result = eng.generate([prompts[i] for i in order], how, max_model_len=256)
    assert result.tokens == [alone[i] for i in order]


def test_rows_that_end_early_leave_the_others_alone(alone: list[list[int]]) -> None:
    eng = engine()
    eng.policy = ALL_POLICIES["share_0.5"]
    news = (NEW, 1, 40)
    how = [Sampling(max_new_tokens=n, ignore_eos=True) for n in news]
    result = eng.generate(_prompts(), how, max_model_len=256)
    assert result.tokens == [row[:n] for row, n in zip(alone, news, strict=True)]


def test_sampled_rows_do_not_depend_on_their_neighbours() -> None:
    eng, prompts = engine(), _prompts()
    eng.policy = ALL_POLICIES["share_0.5"]
    how = [
        Sampling(max_new_tokens=40, temperature=t, top_k=k, top_p=p, seed=seed, ignore_eos=True)
        for seed, t, k, p in [(3, 0.9, 0, 1.0), (4, 1.3, 20, 0.9), (5, 0.7, 0, 0.8)]
    ]
    together = eng.generate(prompts, how, max_model_len=256).tokens
    assert together == eng.generate(prompts, how, max_model_len=256).tokens
    other = [prompts[0], prompts[2], prompts[2]]  # row 0 and row 2 with another neighbour
    again = eng.generate(other, how, max_model_len=256).tokens
    assert (again[0], again[2]) == (together[0], together[2])
    assert again[1] != together[1]
    alone = eng.generate(prompts[:1], how[:1], max_model_len=256).tokens
    assert alone[0] == together[0]
