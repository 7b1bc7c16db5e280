"""The N-th allocation, thread or write is refused, for every N.

Each loop lets the N-th call fail, N = 1, 2, 3, ..., until one run meets no failure. After each run the engine must work
as before, and nothing may have stayed behind.
"""

import concurrent.futures
import gc
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest

from tests.engines import ALL_POLICIES, engine
from tests.mistakes.commands import TINY, caught, check, tiny_with, wscope
from wscope_jax import Engine, Sampling, _ffi, dispatcher, pools, regions, views
from wscope_jax.errors import CapacityError, MachineError
from wscope_jax.models import registry

PROMPT = list(range(1, 100))
HOW = Sampling(max_new_tokens=60, ignore_eos=True)


class Failing:
    """Calls a function through, but for the N-th call and, if `lasting`, all that follow."""

    def __init__(self, fn: Callable[..., Any], error: Exception, *, lasting: bool = False) -> None:
        self.fn, self.error, self.lasting = fn, error, lasting
        self.at, self.calls, self.failures = 0, 0, 0
        self.last = 10**9  # the last N that fails, where later calls are all alike

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.at or (self.lasting and self.at and self.calls > self.at):
            self.failures += 1
            raise type(self.error)(*self.error.args)  # a fresh one: its traceback holds arrays
        return self.fn(*args, **kwargs)

    def runs(self, most: int = 200) -> Iterator[int]:
        """N = 1, 2, 3, ... until a run met no failure."""
        for n in range(1, most):
            self.at, self.calls, self.failures = n if n <= self.last else 0, 0, 0
            yield n
            if not self.failures:
                self.at = 0
                return
        raise AssertionError(f"still failing after {most} runs")


class Ffi:
    """The C++ module with some of its functions replaced."""

    def __init__(self, **replaced: Any) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(_ffi, name)


class Pool:
    """A pool whose memory may be refused."""

    commits: Failing

    def __init__(self, *sizes: int) -> None:
        self._inner = _ffi.Pool(*sizes)

    def commit(self, num_slots: int) -> None:
        self.commits(self._inner, num_slots)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture
def eng() -> Iterator[Engine]:
    made = engine()
    made.policy = ALL_POLICIES["share_0.5"]
    yield made
    gc.collect()


def state() -> tuple[int, int, int]:
    """Threads, live arrays, and whether pools and queues are all given back: the next numbers."""
    gc.collect()
    pool, queue = _ffi.Pool(1, 1, 64), _ffi.StepQueue()
    ids = (pool.id, queue.id)
    pool.close()
    queue.close()
    return len(jax.live_arrays()), *ids


def assert_given_back(before: tuple[int, int, int]) -> None:
    """Nothing is left; what earlier tests had left, a thread that compiled for them, may have gone since."""
    assert all(now <= was for now, was in zip(state(), before, strict=True)), (state(), before)


@pytest.mark.parametrize("lasting", [False, True])
def test_host_memory_refused_at_the_nth_commit(
    eng: Engine, monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    expected = eng.generate([PROMPT], HOW).tokens[0]
    before = state()
    failing = Failing(
        lambda pool, slots: pool.commit(slots),
        MemoryError("the machine has 3 MiB left"),
        lasting=lasting,
    )
    monkeypatch.setattr(Pool, "commits", failing, raising=False)
    monkeypatch.setattr(pools, "_ffi", Ffi(Pool=Pool))
    monkeypatch.setattr(pools, "COMMIT_BYTES", 1)  # a commit for each slot
    reasons = set()
    for _ in failing.runs():
        results: list[list[int]] = []

        def run(results: list[list[int]] = results) -> None:
            results.append(eng.generate([PROMPT], HOW).tokens[0])

        text = caught(CapacityError, run)
        if text is not None:
            assert "host memory" in text
            assert "3 MiB left" in text
            reasons.add("refused")
        else:
            # Refused while it decodes, the row ends early; a single refusal is not even noticed.
            assert results[0] == expected[: len(results[0])]
            reasons.add(f"length {len(results[0]) == len(expected)}")
        assert_given_back(before)
    assert "length True" in reasons
    if lasting:
        assert "refused" in reasons
    assert eng.generate([PROMPT], HOW).tokens[0] == expected


@pytest.mark.parametrize(
    ("module", "name", "error", "kind", "about"),
    [
        (pools, "Pool", MemoryError("Pool: cannot reserve 9 MiB"), CapacityError, "9 MiB"),
        (pools, "Pool", ValueError("overflow 64 bits"), CapacityError, "64 bits"),
        (dispatcher, "StepQueue", RuntimeError("Resource temporarily"), MachineError, "ulimit -u"),
    ],
)
def test_what_a_cache_takes_is_refused(
    eng: Engine,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    error: Exception,
    kind: type[Exception],
    about: str,
) -> None:
    before = state()
    failing = Failing(getattr(_ffi, name), error)
    monkeypatch.setattr(module, "_ffi", Ffi(**{name: failing}))
    seen = 0
    for _ in failing.runs():
        text = caught(kind, lambda: eng.generate([PROMPT], Sampling(max_new_tokens=1)))
        assert text is None or about in text
        seen += text is not None
        assert_given_back(before)
    assert seen >= 1


def test_windows_refused(eng: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = state()
    out_of_memory = jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes."
    )
    failing = Failing(views.empty_views, out_of_memory)
    monkeypatch.setattr(regions, "empty_views", failing)
    for n in failing.runs():
        if n == 1:
            with pytest.raises(CapacityError, match="window: no memory"):
                eng.generate([PROMPT], Sampling(max_new_tokens=1))
        else:
            eng.generate([PROMPT], Sampling(max_new_tokens=1))
        assert_given_back(before)


@pytest.mark.parametrize("name", ["empty_aligned", "device_put"])
def test_weights_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from wscope_jax.checkpoint import tensors

    before = state()
    if name == "empty_aligned":
        failing = Failing(tensors.empty_aligned, MemoryError("Unable to allocate"))
        monkeypatch.setattr(tensors, name, failing)
    else:
        failing = Failing(jax.device_put, RuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
        monkeypatch.setattr(tensors.jax, name, failing)
    failing.last = 5
    for _ in failing.runs():
        text = caught(CapacityError, lambda: registry.load(TINY, "float32"))
        assert (text is not None) == (failing.failures > 0)
        assert text is None or "weights: no memory for " in text
        assert_given_back(before)


def test_the_nth_thread_is_refused(eng: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a background thread all is done in the foreground, with the same tokens."""
    expected = eng.generate([PROMPT], HOW).tokens[0]
    submit = concurrent.futures.ThreadPoolExecutor.submit
    failing = Failing(submit, RuntimeError("can't start new thread"))

    def submit_or_fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        return failing(self, *args, **kwargs)

    monkeypatch.setattr(concurrent.futures.ThreadPoolExecutor, "submit", submit_or_fail)
    monkeypatch.setattr(pools, "COMMIT_BYTES", 1)
    for _ in failing.runs():
        assert eng.generate([PROMPT], HOW).tokens[0] == expected
    eng.policy = ALL_POLICIES["gpu_only"]
    eng._caches.compiled._store.futures.clear()
    chunk, eng._caches.chunk_entries = eng._caches.chunk_entries, 64
    try:
        for _ in itertools.islice(failing.runs(), 2):
            assert eng.generate([PROMPT], HOW).tokens[0] == expected
    finally:
        eng._caches.chunk_entries = chunk


def test_no_worker_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise RuntimeError("start_workers: the system refuses to start a thread (EAGAIN)")

    monkeypatch.setattr(dispatcher, "_ffi", Ffi(start_workers=refuse))
    with pytest.raises(MachineError, match="refuses to start a thread"):
        Engine(engine().model, policy="resident", window=32)


def test_fewer_workers_are_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        dispatcher, "_ffi", Ffi(start_workers=lambda n: None, num_workers=lambda: 1)
    )
    dispatcher.start_workers(3)
    assert "granted 1 of 3 workers" in caplog.text


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize("form", ["text", "json", "jsonl", "score"])
def test_a_full_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """What cannot be written is printed to stderr, with exit code 1 and no half file."""
    np.save(tmp_path / "ids.npy", np.arange(1, 40, dtype=np.int32))
    words = tiny_with(tmp_path / "ids.npy")
    generate = ["generate", *words, "--max-new-tokens", 3]
    expected = json.loads(wscope(*generate, "--json").out)["tokens"]
    out = tmp_path / "out"
    out.write_bytes(b"before")
    if form in ("text", "json"):
        import io

        class Full(io.StringIO):
            def write(self, _: str) -> int:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr("contextlib.redirect_stdout", lambda _: _swap(monkeypatch, Full()))
        done = wscope(*generate, *["--json"] * (form == "json"))
    else:
        monkeypatch.setattr(os, "fsync", Failing(os.fsync, OSError(28, "No space left on device")))
        os.fsync.at = 1  # type: ignore[attr-defined]
        if form == "jsonl":
            done = wscope(*generate, "--jsonl-out", out, "--json")
        else:
            done = wscope("score", *words, "--prefill", 30, "--logits-out", out, "--json")
        assert sorted(tmp_path.iterdir()) == [tmp_path / "ids.npy", out]
        assert out.read_bytes() == b"before"
    assert done.code == 1
    assert "No space left on device; " in done.err
    assert "the result was printed to stderr instead" in done.err
    result = json.loads(next(line for line in done.err.splitlines() if line.startswith("{")))
    if form == "score":
        assert result["nll"] > 0
    elif form == "jsonl":
        assert result["tokens"] == expected[0]
    else:
        assert result["tokens"] == expected


def _swap(monkeypatch: pytest.MonkeyPatch, stream: Any) -> Any:
    import contextlib

    monkeypatch.setattr("sys.stdout", stream)
    return contextlib.nullcontext()


def test_no_threads_or_files_are_left(eng: Engine) -> None:
    process = psutil.Process()
    eng.generate([PROMPT], HOW)
    before = (process.num_threads(), process.num_fds())
    for _ in range(3):
        stream = eng.stream([PROMPT], HOW)
        next(stream)
        stream.close()
    assert (process.num_threads(), process.num_fds()) == before
    check(wscope("version-that-is-none"))
