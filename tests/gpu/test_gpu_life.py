"""Every way in which a run on a GPU ends: soon, and with what it took given back."""

import contextlib
import json
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import processes
from tests.engines import ALL_POLICIES, CHECKPOINTS
from wscope_jax import Engine, Sampling, _ffi, devices
from wscope_jax.errors import CapacityError, WscopeError

pytestmark = pytest.mark.gpu

POLICY = ALL_POLICIES["share_0.5"]
PROMPT = list(range(1, 100))
HOW = Sampling(max_new_tokens=60, ignore_eos=True)
SOON_S = 2.0


@pytest.fixture
def eng() -> Iterator[Engine]:
    with Engine.from_pretrained(
        CHECKPOINTS["qwen3_moe"], dtype="float32", window=32, policy=POLICY
    ) as made:
        yield made


def test_two_engines_at_once(eng: Engine) -> None:
    expected = eng.generate([PROMPT], HOW).tokens
    with Engine.from_pretrained(
        CHECKPOINTS["mixtral"], dtype="float32", window=32, policy=POLICY
    ) as other:
        alone = other.generate([PROMPT], HOW).tokens
        pairs = zip(eng.stream([PROMPT], HOW), other.stream([PROMPT], HOW), strict=True)
        tokens = [[a.token, b.token] for a, b in pairs]
    assert [list(row) for row in zip(*tokens, strict=True)] == expected + alone


def test_a_call_that_fails_ends_its_cache_and_no_more(
    eng: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = eng.generate([PROMPT], HOW).tokens
    stream = eng.stream([PROMPT], HOW)
    for _ in range(20):
        next(stream)
    began = time.monotonic()
    plan = stream._cache._decode.plan
    assert plan is not None
    stream._cache._dispatcher._push(plan)  # one too many: a later store meets a plan of a step
    with pytest.raises((WscopeError, jax.errors.JaxRuntimeError)):
        list(stream)
    stream.close()
    assert time.monotonic() - began < SOON_S
    assert eng.generate([PROMPT], HOW).tokens == expected


def test_a_host_budget_that_is_too_small_is_refused_at_once(eng: Engine) -> None:
    eng._caches.host_memory = 60 * 32 * eng.model.num_layers * 512
    began = time.monotonic()
    with pytest.raises(CapacityError, match="host memory"):
        eng.generate([PROMPT], HOW, max_model_len=20_000)
    assert time.monotonic() - began < SOON_S


def test_a_full_host_budget_ends_rows(eng: Engine) -> None:
    """As if the memory had gone after planning."""
    how = Sampling(max_new_tokens=300, ignore_eos=True)
    free = eng.generate([PROMPT], how).tokens[0]
    stream = eng.stream([PROMPT], how)
    stream._cache.placement.max_slots = stream._cache._pools.max_slots = 4
    began = time.monotonic()
    tokens = [event.token for event in stream if event.token is not None]
    assert stream.result.finish_reason == ["length"]
    assert tokens == free[: len(tokens)]
    assert len(PROMPT) + len(tokens) == 4 * 32 + 32 + 48 + 1
    assert time.monotonic() - began < 20


def test_no_room_on_the_device(eng: Engine) -> None:
    hog = []
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        while True:
            hog.append(jax.block_until_ready(jnp.zeros(1 << 30, jnp.uint8)))
    left = devices.memory_left()
    assert left is not None
    hog.append(jnp.zeros(max(0, left - (64 << 20)), jnp.uint8))
    began = time.monotonic()
    with pytest.raises(CapacityError, match="GPU memory"):
        eng.generate([PROMPT] * 4096, HOW, max_model_len=300)  # windows of some 300 MB
    assert time.monotonic() - began < SOON_S
    hog.clear()
    assert len(eng.generate([PROMPT], HOW).tokens[0]) == 60


# --- whole processes --------------------------------------------------------------------------------------------------


def start(*words: object) -> "subprocess.Popen[bytes]":
    changes = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return processes.python(processes.environment(**changes), *words)


@pytest.fixture
def endless(tmp_path: Path) -> list[object]:
    np.save(tmp_path / "ids.npy", np.arange(100, dtype=np.int32))
    words = ["-m", "wscope_jax", "generate", "--model", CHECKPOINTS["qwen3_moe"], "--tokens"]
    options = ["--dtype", "float32", "--window", 32, "--cpu-share", 0.5, "--ignore-eos"]
    return [*words, tmp_path / "ids.npy", *options, "--max-new-tokens"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_of_a_step(endless: list[object], number: int, code: int) -> None:
    with start(*endless, 100_000) as process:
        assert process.stdout is not None
        process.stdout.read(200)  # it decodes
        began = time.monotonic()
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < SOON_S
    assert process.returncode == code, err
    assert b"Traceback" not in err


def test_a_second_process_on_the_same_gpu(endless: list[object]) -> None:
    with start(*endless, 40) as one, start(*endless, 40) as two:
        outs = [process.communicate(timeout=120) for process in (one, two)]
    assert [one.returncode, two.returncode] == [0, 0], outs
    assert outs[0][0] == outs[1][0]


def test_the_interpreter_ends_with_a_live_cache() -> None:
    program = f"""
        import time
        from wscope_jax import Engine, Sampling, policies
        eng = Engine.from_pretrained({str(CHECKPOINTS["qwen3_moe"])!r}, dtype="float32", window=32,
                                     policy=policies.choose("write_scope", 0.5))
        made = eng._caches.make
        def slow(*args, **kwargs):
            cache = made(*args, **kwargs)
            cache.set_fault(store_delay_ms=50, job_delay_ms=5)
            return cache
        eng._caches.make = slow
        stream = eng.stream([list(range(100))], Sampling(max_new_tokens=500, ignore_eos=True))
        for _ in range(40):
            next(stream)
        print(time.time(), flush=True)
    """
    with start("-W", "ignore", "-c", textwrap.dedent(program)) as process:
        out, err = process.communicate(timeout=120)
        ended = time.time()
    assert process.returncode == 0, err
    assert ended - float(out) < SOON_S + 1  # the interpreter itself has to end too


def test_where_pages_cannot_be_pinned_all_goes_to_the_cpu(endless: list[object]) -> None:
    """Under a small limit on locked memory, without the right to lock more."""
    code = f"""
        import ctypes, resource, sys
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)  # drops CAP_IPC_LOCK from what a new program may have
        import os
        os.execv(sys.executable, [sys.executable, *{list(map(str, endless))!r}, "70", "--json"])
    """
    with start("-c", textwrap.dedent(code)) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    values = json.loads(out)
    assert len(values["tokens"][0]) == 70
    if values["regions"]["pinned"]["tokens"] == 0:
        assert values["regions"]["unpinned"]["tokens"] > 0


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match="driver says"):
        _ffi.Pool(1, 1, 4096, 99)
