"""The engine's loop: what ends a row, what is compiled when, what stays flat, and what is refused."""

import dataclasses
import gc
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import psutil
import pytest

from tests.engines import CHECKPOINTS, golden
from wscope_jax import Engine, Sampling, machine, policies
from wscope_jax.errors import CapacityError, UsageError, WscopeError
from wscope_jax.programs import ModelPrograms

PROMPT = list(range(1, 70))


def test_no_compile_stalls_in_600_steps(eng: Engine) -> None:
    how = Sampling(max_new_tokens=601, ignore_eos=True)
    result = eng.generate([PROMPT, PROMPT[:40]], how)
    assert result.compiles["stall"] == 0
    assert sum(result.regions[r]["tokens"] for r in ("unpinned", "pinned")) >= 2 * 600
    again = eng.generate([PROMPT, PROMPT[:40]], how)
    assert again.tokens == result.tokens
    assert again.compiles == {"warmup": 0, "ahead": 0, "stall": 0}


def test_turns_that_grow_are_compiled_ahead() -> None:
    eng = Engine.from_pretrained(CHECKPOINTS["qwen3_moe"], dtype="float32", window=32, threads=2)
    eng.policy = policies.GpuOnly()
    eng._caches.chunk_entries = 64  # two blocks a chunk: the number of turns grows during decode
    how = Sampling(max_new_tokens=500, ignore_eos=True)
    stream = eng.stream([PROMPT], how)
    for _ in stream:
        stream._cache.compiled.settle()  # a tiny model's steps are shorter than any compilation
    result = stream.result
    assert result.compiles["stall"] == 0
    assert result.compiles["ahead"] >= 3
    eng.policy = policies.Resident()
    assert eng.generate([PROMPT], how).tokens == result.tokens
    eng.close()


def test_memory_is_flat_over_3000_steps(eng: Engine) -> None:
    process = psutil.Process()
    seen = []
    stream = eng.stream([PROMPT], Sampling(max_new_tokens=3600, ignore_eos=True))
    for number, _ in enumerate(stream):
        if number in (600, 3599):
            gc.collect()
            seen.append(process.memory_info().rss)
    # The sequence itself grows: 3,000 tokens of 1,536 bytes in three layers are 4.6 MB.
    assert seen[1] - seen[0] < 16 << 20


def test_memory_is_flat_over_50_requests(eng: Engine) -> None:
    process = psutil.Process()
    seen = []
    for number in range(52):
        eng.generate([PROMPT, PROMPT[:33]], Sampling(max_new_tokens=40, ignore_eos=True))
        if number in (1, 51):
            gc.collect()
            seen.append((process.memory_info().rss, process.num_threads(), len(jax.live_arrays())))
    assert seen[1][0] - seen[0][0] < 16 << 20
    assert seen[1][1:] == seen[0][1:]


def test_at_most_two_layers_are_alive_outside_their_home(
    eng: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = golden("qwen3_moe")
    layout, num_tokens = eng.model.streams[0][0].layout, len(data.long_ids)
    one_layer = num_tokens * layout.entry_bytes(4)
    alive: list[int] = []
    waters: list[int] = []
    whole = ModelPrograms._prefill_layer

    def watch(self: ModelPrograms, i: int, x: jax.Array, *rest: Any) -> Any:
        out = whole(self, i, x, *rest)
        big = [
            a for a in jax.live_arrays() if a.nbytes >= one_layer // 2 and a.shape[0] >= num_tokens
        ]
        alive.append(sum(a.nbytes for a in big) - x.nbytes)
        return out

    made = eng._caches.make

    def slow_cache(*args: Any, **kwargs: Any) -> Any:
        cache = made(*args, **kwargs)
        cache.set_fault(store_delay_ms=60)
        closing = cache.close

        def close() -> None:
            if not waters:
                waters.append(cache.layers_in_flight)
            closing()

        monkeypatch.setattr(cache, "close", close)
        return cache

    monkeypatch.setattr(ModelPrograms, "_prefill_layer", watch)
    monkeypatch.setattr(eng._caches, "make", slow_cache)
    eng.generate([data.long_ids.tolist()], Sampling(max_new_tokens=1))
    assert waters == [2]  # stores are slow, so both places were used, and never a third
    # Outside the cache only layer inputs and outputs are arrays: no layer's entries are.
    assert max(alive) <= 2 * num_tokens * eng.model.config.hidden_size * 4


@pytest.mark.parametrize("delay_ms", [0, 5, 300])
def test_slow_stores_and_workers_change_nothing(
    eng: Engine, delay_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = golden("qwen3_moe")
    made = eng._caches.make

    def faulty(*args: Any, **kwargs: Any) -> Any:
        cache = made(*args, **kwargs)
        cache.set_fault(store_delay_ms=delay_ms, job_delay_ms=1 if delay_ms else 0)
        return cache

    monkeypatch.setattr(eng._caches, "make", faulty)
    steps = 250 if delay_ms < 100 else 120
    ids = data.long_ids[: data.long_first + steps]
    logits = eng.score(ids, data.long_first)
    np.testing.assert_allclose(logits, data.long_logits[: steps + 1], atol=1e-4, rtol=0)


# --- what ends a row ------------------------------------------------------------------------------


def test_an_end_token_ends_a_row(eng: Engine) -> None:
    how = Sampling(max_new_tokens=30, ignore_eos=True)
    free = eng.generate([PROMPT], how).tokens[0]
    made = eng.eos_ids
    try:
        eng.eos_ids = frozenset({free[7]})
        first = free.index(free[7])
        result = eng.generate([PROMPT], dataclasses.replace(how, ignore_eos=False))
        assert result.tokens[0] == free[: first + 1]
        assert result.finish_reason == ["stop"]
        assert eng.generate([PROMPT], how).tokens[0] == free
    finally:
        eng.eos_ids = made


def test_model_length_ends_a_row(eng: Engine) -> None:
    result = eng.generate(
        [PROMPT, PROMPT[:9]], Sampling(max_new_tokens=64, ignore_eos=True), max_model_len=80
    )
    assert [len(row) for row in result.tokens] == [80 - 69, 64]
    assert result.finish_reason == ["length", "length"]


def test_a_full_host_budget_ends_a_row(eng: Engine) -> None:
    """Beyond what was planned, a row ends with "length" when nothing can give its window room."""
    how = Sampling(max_new_tokens=300, ignore_eos=True)
    free = eng.generate([PROMPT], how).tokens[0]
    stream = eng.stream([PROMPT], how)
    stream._cache.placement.max_slots = 4  # as if the memory had gone after planning
    stream._cache._pools.max_slots = 4
    tokens = [event.token for event in stream if event.token is not None]
    assert stream.result.finish_reason == ["length"]
    assert tokens == free[: len(tokens)]
    assert len(PROMPT) + len(tokens) == 4 * 32 + 32 + 48 + 1


def test_windows_beyond_the_machine_are_refused(
    eng: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU they are host memory, which a named budget does not count."""
    monkeypatch.setattr(eng._caches, "host_memory", 10**9)
    assert eng.generate([PROMPT], Sampling(max_new_tokens=2)).tokens
    monkeypatch.setattr(machine, "memory", lambda: types.SimpleNamespace(budget=10**5))
    with pytest.raises(
        CapacityError,
        match=r"this machine.s memory: the placed blocks, .* is 100\.0 KB: .*free memory",
    ):
        eng.stream([PROMPT] * 3, Sampling(max_new_tokens=2))


def test_closing_a_stream_early_keeps_what_there_is(eng: Engine) -> None:
    stream = eng.stream([PROMPT], Sampling(max_new_tokens=50, ignore_eos=True))
    seen = [next(stream).token for _ in range(5)]
    stream.close()
    result = stream.result
    assert result.tokens == [seen]
    assert result.finish_reason == ["interrupted"]
    held = sum(result.regions[region]["tokens"] for region in ("unpinned", "pinned", "window"))
    assert held == len(PROMPT) + len(seen) - 1  # the last token was not fed
    assert list(stream) == []


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "match"),
    [
        ([], "at least one prompt"),
        ([[]], "empty"),
        ([[1, 2], []], "prompt 1 is empty"),
        ([[1, 128]], "prompt 0: id 128 at index 1"),
        ([[-1]], "id -1"),
        (["text"], "tokenizer"),
    ],
)
def test_bad_prompts(eng: Engine, prompts: list[Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        eng.generate(prompts, Sampling(max_new_tokens=1))


def test_a_prompt_beyond_the_limit(eng: Engine) -> None:
    with pytest.raises(UsageError, match="69 tokens leave no room"):
        eng.generate([PROMPT], Sampling(max_new_tokens=1), max_model_len=69)


def test_a_budget_that_is_too_small(eng: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    # Five blocks of three layers, and two layers of them on their way.
    monkeypatch.setattr(eng._caches, "host_memory", 5 * 3 * 16384 + 2 * 5 * 16384)
    eng.generate([list(range(60))], Sampling(max_new_tokens=100))
    with pytest.raises(CapacityError, match=r"short by 81\.92 KB.*lower max_model_len to 191"):
        eng.generate([list(range(60))], Sampling(max_new_tokens=132))


@pytest.mark.parametrize("ids", [np.zeros(0, np.int32), np.zeros(3), np.zeros((1, 1, 1), np.int32)])
def test_bad_arrays(eng: Engine, ids: Any) -> None:
    with pytest.raises(UsageError, match="tokens"):
        eng.score(ids, 1)


@pytest.mark.parametrize("prefill", [0, 4, -1])
def test_bad_prefill(eng: Engine, prefill: int) -> None:
    with pytest.raises(UsageError, match="prefill"):
        eng.score([1, 2, 3], prefill)


@pytest.fixture(autouse=True)
def _no_leak() -> Iterator[None]:
    yield
    gc.collect()


def test_stop_strings_need_text(eng: Engine) -> None:
    with pytest.raises(UsageError, match=r"stop: this checkpoint has no tokenizer.*; give none"):
        eng.generate([PROMPT], Sampling(max_new_tokens=1, stop=("END",)))


def test_a_call_may_have_a_policy_of_its_own(eng: Engine) -> None:
    how = Sampling(max_new_tokens=3, ignore_eos=True)
    result = eng.generate([PROMPT], how, policy=policies.CpuOnly())
    assert result.regions["unpinned"]["tokens"] == 64
    assert eng.generate([PROMPT], how).regions["pinned"]["tokens"] == 32


def test_a_text_in_place_of_a_list_of_texts(eng: Engine) -> None:
    with pytest.raises(UsageError, match=r"give \[text\]"):
        eng.generate("hello", Sampling(max_new_tokens=1))
    with pytest.raises(UsageError, match="prompt 0 is 5"):
        eng.generate([5], Sampling(max_new_tokens=1))  # type: ignore[list-item]


@pytest.mark.parametrize("host_memory", ["1GiB", -5, 0, 1.5, True])
def test_a_budget_is_a_number_of_bytes(eng: Engine, host_memory: Any) -> None:
    with pytest.raises(UsageError, match="host_memory"):
        Engine(eng.model, host_memory=host_memory)


def test_the_next_call_begins_with_what_was_measured() -> None:
    eng = Engine.from_pretrained(CHECKPOINTS["qwen3_moe"], dtype="float32", window=32, threads=2)
    with eng:
        before = eng.policy
        eng.generate([PROMPT], Sampling(max_new_tokens=100, ignore_eos=True))
        learned = eng.policy
        assert isinstance(before, policies.WriteScope)
        assert isinstance(learned, policies.WriteScope)
        assert learned.roofline != before.roofline
        eng.generate(
            [PROMPT], Sampling(max_new_tokens=3), policy=policies.CpuOnly()
        )  # of that call alone
        assert eng.policy is learned


def test_bytes_are_no_ids(eng: Engine) -> None:
    for prompts in ([b"abc"], [bytearray(b"abc")], [[1], b"abc"]):
        with pytest.raises(
            UsageError, match=r"prompts: prompt \d is .*b'abc'.*; expected a text or"
        ):
            eng.stream(prompts)  # type: ignore[arg-type]
    for given in (b"abc", 3):
        with pytest.raises(UsageError, match="prompts: expected a list of prompts, got"):
            eng.stream(given)  # type: ignore[arg-type]


def test_prompts_may_be_an_array(eng: Engine) -> None:
    how = Sampling(max_new_tokens=3, ignore_eos=True)
    ids = np.array([PROMPT[:9], PROMPT[9:18]])
    assert eng.generate(ids, how).tokens == eng.generate(ids.tolist(), how).tokens  # type: ignore[arg-type]
    for given, about in (
        (ids[0], "prompt 0 is"),
        (ids.astype(float), "is no token id"),
        (ids[:0], "at least one prompt"),
        (np.array(3), "expected a list of prompts"),
    ):
        with pytest.raises(UsageError, match=about):
            eng.stream(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("policy", value) for value in (None, 3, policies.CpuOnly, "fast")],
        *[("window", value) for value in (100, "32", None)],
        *[("threads", value) for value in (0, "2", 1.5)],
    ],
)
def test_arguments_of_an_engine(
    eng: Engine, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wscope_jax.models.registry.load", None)  # refused before weights are read
    for make in (
        lambda **how: Engine(eng.model, **how),
        lambda **how: Engine.from_pretrained(CHECKPOINTS["qwen3_moe"], **how),
    ):
        with pytest.raises(UsageError, match=f"{name}: "):
            make(**{name: value})


@pytest.mark.parametrize("directory", [None, 3, b"x"])
def test_a_directory_is_a_path(directory: Any) -> None:
    with pytest.raises(UsageError, match="directory: expected the path of a checkpoint, got"):
        Engine.from_pretrained(directory)


def test_arguments_of_a_call(eng: Engine) -> None:
    for sampling in (3, {"top_k": 1}, [None]):
        with pytest.raises(UsageError, match="sampling: expected"):
            eng.stream([PROMPT], sampling)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"policy: expected .*, got 'cpu_only'"):
        eng.stream([PROMPT], policy="cpu_only")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="max_model_len: "):
        eng.stream([PROMPT], max_model_len="100")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="prefill: "):
        eng.score([1, 2, 3], "1")  # type: ignore[arg-type]


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_stream_ends_with_its_engine(eng: Engine, taken: int) -> None:
    """Once its engine is closed a stream raises, frees its cache, and is then at its end."""
    made = Engine(eng.model, policy="cpu_only", window=32)
    stream = made.stream([PROMPT, PROMPT], Sampling(max_new_tokens=5, ignore_eos=True))
    for _ in range(taken):
        next(stream)
    made.close()
    with pytest.raises(UsageError, match="engine: it was closed"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)
    assert stream.result.finish_reason == ["interrupted"] * 2
    with pytest.raises(WscopeError, match="it was closed"):
        stream._cache.prepare_step()


def test_a_stream_that_is_over_outlives_its_engine(eng: Engine) -> None:
    made = Engine(eng.model, policy="cpu_only", window=32)
    stream = made.stream([PROMPT], Sampling(max_new_tokens=1))
    next(stream)
    made.close()
    with pytest.raises(StopIteration):
        next(stream)
