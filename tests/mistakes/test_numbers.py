"""Weights and logits that are no numbers, empty shares, absurd timings."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import tiny
from tests.engines import ALL_POLICIES, engine
from tests.mistakes.commands import refused, wscope
from wscope_jax import Engine, Partial, Roofline, Sampling, merge
from wscope_jax.errors import CheckpointError
from wscope_jax.models import registry
from wscope_jax.roofline import StepTiming

BAD = 0  # token whose embedding is NaN: the one that prompts are padded with
HOW = Sampling(max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("nan") / "c", seed=3)


@pytest.fixture(scope="module")
def broken(checkpoint: Path) -> Iterator[Engine]:
    """An engine whose model has no numbers for one token."""
    model = registry.load(checkpoint, "float32")
    graphdef, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    table = flat["embedding",]
    flat["embedding",] = table.replace(table[...].at[BAD].set(jnp.nan))
    model = nnx.merge(graphdef, nnx.from_flat_state(flat))
    with Engine(model, policy=ALL_POLICIES["share_0.5"], window=32, threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(
        checkpoint, policy=ALL_POLICIES["share_0.5"], window=32, dtype="float32", threads=1
    ) as made:
        yield made


@pytest.mark.parametrize("policy", ["share_0.5", "gpu_only", "cpu_only", "resident"])
@pytest.mark.parametrize("length", [3, 75])
def test_a_row_without_numbers_ends_and_leaves_the_others_alone(
    broken: Engine, whole: Engine, policy: str, length: int
) -> None:
    """With 75 tokens two blocks of NaN lie among those of the others, in slots that nobody reads any more."""
    good = [list(range(10, 90)), list(range(20, 100))]
    bad = [7] * (length - 2) + [BAD, 9]
    whole.policy = broken.policy = ALL_POLICIES[policy]
    expected = whole.generate(good, HOW, max_model_len=128).tokens
    assert BAD not in expected[0] + expected[1]
    result = broken.generate([good[0], bad, good[1]], HOW, max_model_len=128)
    assert result.finish_reason == ["length", "error", "length"]
    assert result.tokens == [expected[0], [], expected[1]]


def test_numbers_that_end_during_decode(broken: Engine, whole: Engine) -> None:
    """The token that the model itself chooses is the one that it has no numbers for."""
    free = whole.generate([[9, 8, 7]], HOW).tokens[0]
    target = next(token for token in free if token != BAD)
    prompts, first = [[9, 8, 7], list(range(10, 30))], free.index(target)
    model = nnx.clone(whole.model)
    graphdef, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    table = flat["embedding",]
    flat["embedding",] = table.replace(table[...].at[target].set(jnp.nan))
    model = nnx.merge(graphdef, nnx.from_flat_state(flat))
    with Engine(model, policy=ALL_POLICIES["share_0.5"], window=32, threads=1) as made:
        events = list(made.stream(prompts, HOW))
        result = made.generate(prompts, HOW)
    assert result.finish_reason[0] == "error"
    assert result.tokens[0] == free[: first + 1]
    last = [event for event in events if event.row == 0][-1]
    assert (last.token, last.finish_reason) == (None, "error")


@pytest.mark.usefixtures("command")
def test_the_command_says_so(checkpoint: Path, tmp_path: Path) -> None:
    """One number of 4,096 is NaN, between those that are sampled while loading."""
    tensors = tiny.draw_tensors(tiny.make_config("qwen3_moe"), 3)
    tensors["model.embed_tokens.weight"][BAD, 1] = np.nan
    folder = tiny.write_checkpoint(tmp_path / "c", seed=3)
    tiny.write_tensors(folder, tensors)
    np.save(tmp_path / "ids.npy", np.array([[7, 8, 9], [7, BAD, 9]], np.int32))
    words = ["--model", folder, "--dtype", "float32", "--window", 32, "--tokens"]
    words += [tmp_path / "ids.npy"]
    done = wscope("generate", *words, "--max-new-tokens", 4)
    assert done.code == 1
    lines = done.out.split("\n")
    assert len(lines[0].split()) == 4
    assert lines[1:] == ["", ""]
    where = "ids.npy row 1 (from 0)"
    assert f"{where}: the model's logits are not finite after 0 new tokens" in done.err
    assert "first in the embedding" in done.err
    assert "--check-tensors" in done.err
    assert wscope("score", *words, "--prefill", 3).code == 1
    refused(wscope("generate", *words, "--check-tensors"), 4, "model.embed_tokens.weight", "NaN")


def test_all_numbers_are_looked_at(tmp_path: Path) -> None:
    tensors = tiny.draw_tensors(tiny.make_config("qwen3_moe"), 3)
    folder = tiny.write_checkpoint(tmp_path / "c", seed=3)
    for value in (np.nan, np.inf):
        tensors["lm_head.weight"][77, 31] = value
        tiny.write_tensors(folder, tensors)
        registry.load(folder, "float32")
        with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
            registry.load(folder, "float32", check_all=True)


@pytest.mark.parametrize("share", ["share_0.0", "share_1.0", "share_0.5"])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 50])
def test_empty_shares_and_lengths_around_a_block(share: str, length: int) -> None:
    made = engine()
    prompt = [list(range(3, 3 + length))]
    made.policy = ALL_POLICIES["resident"]
    expected = made.generate(prompt, HOW, max_model_len=128).tokens
    made.policy = ALL_POLICIES[share]
    assert made.generate(prompt, HOW, max_model_len=128).tokens == expected


def test_extreme_and_empty_partials() -> None:
    o = jnp.ones((1, 2, 4), jnp.float32)
    for lse in (-3e38, -1e30, 0.0, 1e30, 3e38):
        big = Partial(o, jnp.full((1, 2), lse, jnp.float32))
        empty = Partial(jnp.zeros_like(o), jnp.full((1, 2), -jnp.inf, jnp.float32))
        assert np.isfinite(np.asarray(merge(big, big).o)).all()
        np.testing.assert_allclose(np.asarray(merge(big, empty).o), 1.0)
        nothing = merge(empty, empty)
        assert np.asarray(nothing.o).max() == 0
        assert np.isneginf(np.asarray(nothing.lse)).all()


def test_identical_keys_and_huge_activations(whole: Engine) -> None:
    """A prompt of one token repeated: all keys of a layer differ by their rotation alone."""
    same = [[11] * 70]
    expected = whole.generate(same, HOW, max_model_len=128).tokens
    policy = whole.policy
    try:
        whole.policy = ALL_POLICIES["resident"]
        assert whole.generate(same, HOW, max_model_len=128).tokens == expected
    finally:
        whole.policy = policy


def test_absurd_timings_leave_the_share_in_its_range() -> None:
    line = Roofline(cpu_s_per_entry=1e-6, link_s_per_entry=1e-6, cpu_fixed_s=0.0, link_fixed_s=0.0)
    usual: dict[str, Any] = {"cpu_ns": 9**7, "link_ns": 9**7, "link_idle_ns": 9**6, "jobs": 2}
    usual |= {"wait_cpu_ns": 9**6, "wait_link_ns": 9**6}
    usual |= {"host_entries": 1000, "streamed_entries": 1000}
    for value in (0, -1, 10**9, 10**18, 2**62, 10**400, math.inf, math.nan):
        times = dict.fromkeys((name for name in usual if name.endswith("_ns")), value)
        for changes in (times, *({name: value} for name in usual)):
            policy = dataclasses.replace(ALL_POLICIES["share_0.5"], share=None, roofline=line)
            for _ in range(3):
                policy = policy.observe(StepTiming(**usual | changes))
                for num_placed in (0, 10_000, 10**400):
                    assert 0.0 <= policy.cpu_share(num_placed) <= 1.0


def test_jax_is_where_it_was() -> None:
    assert jax.default_backend() == "cpu"
