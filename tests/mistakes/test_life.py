"""Threads, forks, signals, closing, and the end of the process."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests import processes
from tests.engines import ALL_POLICIES, CHECKPOINTS
from tests.mistakes.commands import TINY, tiny_with, wscope
from wscope_jax import Engine, InplaceKVCache, Sampling, _ffi, forks
from wscope_jax.cli import signals
from wscope_jax.errors import MachineError, UsageError, WscopeError
from wscope_jax.progress import SILENT

PROMPT = list(range(1, 100))
HOW = Sampling(max_new_tokens=40, ignore_eos=True)


# The next numbers when the test began: a queue that a test before it has lost keeps its own for good.
BEFORE = [0, 0]


def numbers() -> list[int]:
    """The next numbers of a pool and a queue."""
    gc.collect()
    pool, queue = _ffi.Pool(1, 1, 64), _ffi.StepQueue()
    pool.close()
    queue.close()
    return [pool.id, queue.id]


def given_back() -> bool:
    """Whether all pools and queues of this test are closed: their numbers are free again."""
    return all(now <= before for now, before in zip(numbers(), BEFORE, strict=True))


# --- threads and engines --------------------------------------------------------------------------


def test_two_engines_at_once(eng: Engine) -> None:
    expected = eng.generate([PROMPT], HOW).tokens
    with Engine.from_pretrained(
        CHECKPOINTS["mixtral"],
        policy=ALL_POLICIES["share_0.5"],
        window=32,
        dtype="float32",
        threads=2,
    ) as other:
        alone = other.generate([PROMPT], HOW).tokens
        one, two = eng.stream([PROMPT], HOW), other.stream([PROMPT], HOW)
        tokens = [[a.token, b.token] for a, b in zip(one, two, strict=True)]
        assert [list(row) for row in zip(*tokens, strict=True)] == expected + alone
    assert eng.generate([PROMPT], HOW).tokens == expected


def test_one_engine_from_several_threads(eng: Engine) -> None:
    prompts = [PROMPT, PROMPT[:40], PROMPT[10:]]
    expected = [eng.generate([prompt], HOW).tokens for prompt in prompts]
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        found[number] = eng.generate([prompts[number]], HOW).tokens

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [found.get(number) for number in range(3)] == expected


def test_one_stream_from_several_threads(eng: Engine) -> None:
    expected = eng.generate([PROMPT], HOW).tokens[0]
    stream, taken = eng.stream([PROMPT], HOW), []

    def work() -> None:
        with contextlib.suppress(StopIteration):
            while True:
                taken.append(next(stream))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(event.token for event in taken) == sorted(expected)
    assert stream.result.tokens == [expected]


# --- closing --------------------------------------------------------------------------------------


def test_an_exception_in_the_users_loop_closes_the_cache(eng: Engine) -> None:
    def loop() -> None:
        for number, _ in enumerate(eng.stream([PROMPT], HOW)):
            if number == 3:
                raise KeyError("the user's own")

    with pytest.raises(KeyError, match="own") as kept:
        loop()
    pool = _ffi.Pool(1, 1, 64)  # without a garbage collection, and while the traceback is alive
    assert pool.id <= BEFORE[0]
    pool.close()
    assert kept.value


def test_leaving_the_loop_closes_the_cache(eng: Engine) -> None:
    stream = eng.stream([PROMPT], HOW)
    for number, _ in enumerate(stream):
        if number == 3:
            break
    pool = _ffi.Pool(1, 1, 64)
    assert pool.id <= BEFORE[0]
    pool.close()
    assert stream.result.finish_reason == ["interrupted"]
    assert len(stream.result.tokens[0]) == 4
    with eng.stream([PROMPT], HOW) as other:
        next(other)
    assert list(other) == []


def test_an_exception_of_the_progress_object(eng: Engine) -> None:
    class Refusing:
        def loading(self, done: int, total: int) -> None:
            raise RuntimeError("enough")

        prefilling = loading

    with pytest.raises(RuntimeError, match="enough"):
        Engine.from_pretrained(TINY, progress=Refusing())
    eng.progress = Refusing()
    try:
        with pytest.raises(RuntimeError, match="enough"):
            eng.generate([PROMPT], HOW)
    finally:
        eng.progress = SILENT
    assert given_back()
    assert eng.generate([PROMPT], HOW).finish_reason == ["length"]


def test_double_close_and_use_after_close(eng: Engine) -> None:
    stream = eng.stream([PROMPT], HOW)
    next(stream)
    for _ in range(2):
        stream.close()
        with pytest.raises(StopIteration):
            next(stream)
    made = Engine(eng.model, policy="resident", window=32)
    for _ in range(2):
        made.close()
        for use in (made.generate, made.stream):
            with pytest.raises(UsageError, match="engine: it was closed"):
                use([PROMPT])
        with pytest.raises(UsageError, match="closed"):
            made.score([1, 2], 1)
        with pytest.raises(UsageError, match="closed"):
            made.logits([[1, 2]])


def test_a_cache_after_its_close(eng: Engine) -> None:
    cache = InplaceKVCache(
        eng.model.streams, policy=ALL_POLICIES["share_0.5"], batch=1, max_len=64, window=32
    )
    for _ in range(2):
        cache.close()
        uses: list[Callable[[], object]] = [
            lambda: cache.begin_prompt(0, 3),
            cache.prepare_step,
            lambda: cache.step(lambda views: (views, None)),
        ]
        for use in uses:
            with pytest.raises(WscopeError, match="not usable any more: it was closed"):
                use()
    assert given_back()


def test_collected_while_it_works(eng: Engine) -> None:
    made = eng._caches.make

    def slow(*args: Any, **kwargs: Any) -> Any:
        cache = made(*args, **kwargs)
        cache.set_fault(store_delay_ms=30, job_delay_ms=10)
        return cache

    eng._caches.make = slow  # type: ignore[method-assign]
    try:
        for taken in (0, 1, 5):
            stream = eng.stream([PROMPT], HOW)
            for _ in range(taken):
                next(stream)
            del stream
            assert given_back()
    finally:
        del eng._caches.make
    cache = eng._caches.make(1, 64)
    cache.begin_prompt(0, 40)
    del cache
    assert given_back()


# --- forks ----------------------------------------------------------------------------------------


def in_child(body: Callable[[], bool]) -> bool:
    """Whether `body` is true in a forked child, which gets 20 s."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            os._exit(0 if body() else 1)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_is_told_at_once(eng: Engine) -> None:
    stream = eng.stream([PROMPT], HOW)
    next(stream)
    cache = eng._caches.make(1, 64)

    def refuses(use: Callable[[], object]) -> bool:
        try:
            use()
        except MachineError as error:
            return "fork" in str(error) and "spawn" in str(error)
        return False

    def body() -> bool:
        uses: list[Callable[[], object]] = [
            lambda: next(stream),
            lambda: eng.generate([PROMPT]),
            lambda: eng.score([1, 2], 1),
            lambda: eng.logits([[1, 2]]),
            lambda: cache.begin_prompt(0, 3),
            lambda: Engine.from_pretrained(TINY),
            lambda: Engine(eng.model),
            lambda: InplaceKVCache(
                eng.model.streams, policy=eng.policy, batch=1, max_len=9, window=32
            ),
        ]
        good = all(refuses(use) for use in uses)
        stream.close()
        cache.close()
        eng.close()
        return good

    assert in_child(body)
    assert not forks.is_child()
    assert next(stream).token is not None  # the parent goes on
    stream.close()
    cache.close()


# --- signals --------------------------------------------------------------------------------------


def test_a_call_that_does_not_return_is_ended() -> None:
    """The main thread is in one call of C for a minute; the process ends all the same, and says why."""
    program = """
        import hashlib, os, signal, threading
        from wscope_jax.cli import signals
        signals.STUCK_S = 0.3
        with signals.terminable():
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 10**9)
    """
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "wscope: terminated\n")
    assert time.monotonic() - began < 10


def test_a_second_signal_does_not_disturb_the_cleanup() -> None:
    seen = []

    def interrupted() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            seen.append("cleaned")

    with pytest.raises(KeyboardInterrupt), signals.terminable():
        interrupted()
    assert seen == ["cleaned"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not [t for t in threading.enumerate() if t.name == "wscope-signals"]


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("phase", ["load", "prefill", "decode"])
def test_every_phase_can_be_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals, phase: str
) -> None:
    """The signal comes between two pieces of work of the phase; the answer so far is whole JSON."""
    np.save(tmp_path / "ids.npy", np.asarray(PROMPT, np.int32))
    target = {
        "load": ("wscope_jax.checkpoint.tensors._read_bytes", 30),
        "prefill": ("wscope_jax.programs.ModelPrograms._prefill_layer", 2),
        "decode": ("wscope_jax.programs.ModelPrograms._step_program", 7),
    }[phase]
    module, _, name = target[0].rpartition(".")
    owner = _resolve(module)
    whole, calls = getattr(owner, name), [0]

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == target[1]:
            os.kill(os.getpid(), number)
        return whole(*args, **kwargs)

    monkeypatch.setattr(owner, name, counting)
    words = tiny_with(tmp_path / "ids.npy")
    done = wscope("generate", *words, "--max-new-tokens", 5000, "--ignore-eos", "--json")
    assert done.code == signals.EXIT_CODES[number]
    assert done.err.splitlines()[-1] == f"wscope: {signals.WORDS[done.code]}"
    if phase == "load":
        assert done.out == ""
    else:
        values = json.loads(done.out)
        assert values["finish_reason"] == ["interrupted"]
        assert (len(values["tokens"][0]) > 3) == (phase == "decode")
    assert given_back()


def _resolve(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, last = name.rpartition(".")
        return getattr(_resolve(module), last)


# --- whole processes ------------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return processes.environment(HOME=str(tmp_path))


@pytest.fixture
def endless(tmp_path: Path) -> list[object]:
    np.save(tmp_path / "ids.npy", np.arange(100, dtype=np.int32))
    return ["generate", *tiny_with(tmp_path / "ids.npy"), "--ignore-eos", "--max-new-tokens"]


def test_ends_soon_and_starts_again(endless: list[object], tmp_path: Path) -> None:
    """Killed while it writes what it compiled, then run again; then interrupted while it starts."""
    environment = processes.environment(tmp_path / "compiled", HOME=str(tmp_path))
    with processes.start(environment, *endless, 50_000) as process:
        assert process.stdout is not None
        process.stdout.read(5)
        process.kill()
        process.wait(20)
    written = [file for file in (tmp_path / "compiled").rglob("*") if file.is_file()]
    assert written
    for number, file in enumerate(written):  # as a crash of the machine would leave them
        file.write_bytes(file.read_bytes()[: file.stat().st_size * (number % 3) // 3])
    with processes.start(environment, *endless, 3) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert len(out.split()) == 3
    assert err.decode().splitlines()[0].startswith("wscope: 3 tokens"), err
    for wait_s in (1.0, 2.5):
        with processes.start(environment, *endless, 50_000) as process:
            time.sleep(wait_s)
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert time.monotonic() - began < 5  # on a machine that others use too
        assert process.returncode in (130, -signal.SIGINT), err
        assert b"Traceback" not in err or process.returncode == -signal.SIGINT, err


def test_the_interpreter_ends_with_a_live_cache(environment: dict[str, str]) -> None:
    program = f"""
        from wscope_jax import Engine, Sampling, policies
        eng = Engine.from_pretrained({str(TINY)!r}, dtype="float32", window=32, threads=1,
                                     policy=policies.choose("write_scope", 0.5))
        made = eng._caches.make
        def slow(*args, **kwargs):
            cache = made(*args, **kwargs)
            cache.set_fault(store_delay_ms=50, job_delay_ms=5)
            return cache
        eng._caches.make = slow
        stream = eng.stream([list(range(100))], Sampling(max_new_tokens=500, ignore_eos=True))
        print(sum(1 for _ in zip(range(40), iter(lambda: next(stream), None))), flush=True)
        other = eng.stream([list(range(100))], Sampling(max_new_tokens=500, ignore_eos=True))
        next(other)
        kept = iter(eng.stream([list(range(100))], Sampling(max_new_tokens=500, ignore_eos=True)))
        next(kept)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "40\n", "")


def test_closed_and_full_streams(environment: dict[str, str], endless: list[object]) -> None:
    """Streams closed or full, an encoding that lacks letters, no home directory: no answer is lost in silence."""
    environment["PYTHONIOENCODING"] = "ascii"
    environment.pop("HOME")
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    generate = f"wscope {' '.join(map(str, endless))} 3 -q"
    done = processes.shell(
        environment,
        f"""
        {generate} 2>&- >/dev/null; echo "deaf $?"
        {generate} >&- 2>&-; echo "closed $?"
        {generate} >/dev/full; echo "full $?"
        """,
    )
    assert done.stdout.split("\n")[:3] == ["deaf 0", "closed 5", "full 1"], done
    assert "No space left on device; the result was printed to stderr instead" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["doctor", f"plan --model {TINY}", f"inspect --model {TINY}"])
def test_an_answer_that_nobody_gets(
    environment: dict[str, str], words: str, unbuffered: str
) -> None:
    """One line on stderr, and exit code 5 where stdout is closed, 1 where it is full."""
    environment["PYTHONUNBUFFERED"] = unbuffered
    script = f"wscope {words} >&-; echo $?; wscope {words} >/dev/full; echo $?"
    done = processes.shell(environment, script)
    assert done.stdout.split() == ["5", "1"], done
    closed, full = done.stderr.splitlines()
    assert closed.startswith("wscope: error: stdout is closed, so the answer would be lost; ")
    assert full.startswith("wscope: error: stdout: No space left on device; the answer is lost")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["plan -h", "--help", "--version"])
def test_help_that_nobody_gets(environment: dict[str, str], words: str, unbuffered: str) -> None:
    environment["PYTHONUNBUFFERED"] = unbuffered
    done = processes.shell(environment, f"wscope {words} >/dev/full; echo $?")
    assert done.stdout == "1\n"
    assert done.stderr.startswith("wscope: error: stdout: No space left on device; ")
    assert done.stderr.count("\n") == 1


@pytest.fixture(autouse=True)
def _all_given_back() -> Iterator[None]:
    BEFORE[:] = numbers()
    yield
    assert given_back()
    assert jax.default_backend() == "cpu"


def test_a_stderr_that_takes_nothing(environment: dict[str, str], endless: list[object]) -> None:
    """Messages are lost with it, the answer and the exit code are not."""
    words = " ".join(f"'{word}'" for word in [*endless, 3])
    script = f"""
        wscope {words} 2>/dev/full; echo "full $?"
        wscope plan --model nowhere 2>/dev/full; echo "wrong $?"
        wscope plan --modl nowhere 2>/dev/full; echo "unknown $?"
        wscope {words} --json >/dev/full 2>/dev/full; echo "both $?"
    """
    done = processes.shell({**environment, "PYTHONUNBUFFERED": ""}, script)
    first, *rest = done.stdout.splitlines()
    assert len(first.split()) == 3
    assert rest == ["full 0", "wrong 4", "unknown 2", "both 1"]


def test_logits_that_are_lost(environment: dict[str, str], tmp_path: Path) -> None:
    """Beyond the largest file that the shell allows: what is lost is said, and no file is left."""
    np.save(tmp_path / "ids.npy", np.arange(100, dtype=np.int32))
    words = " ".join(f"'{word}'" for word in tiny_with(tmp_path / "ids.npy"))
    out = tmp_path / "out"
    out.mkdir()
    script = f"ulimit -f 4; wscope score {words} --prefill 9 --logits-out {out}/l.npy; echo $?"
    done = processes.shell(environment, script)
    assert done.stdout == "1\n"
    result, line = done.stderr.splitlines()
    assert json.loads(result)["logits_out"] is None
    assert (
        "File too large; the logits are lost, and no half file is left; the rest of the result"
        in line
    )
    assert not list(out.iterdir())
