"""Every way for a verb to end, as a line on stderr and an exit code."""

import contextlib
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from wscope_jax import cli
from wscope_jax.cli import prompts, signals
from wscope_jax.errors import (
    CapacityError,
    CheckpointError,
    MachineError,
    UsageError,
    WscopeError,
)


class Refusing(type(Path())):  # type: ignore[misc]
    """A file for which there is no memory."""

    def open(self, *_: object, **__: object) -> NoReturn:
        raise MemoryError


LESS = "; ask for less at once, or free memory (wscope plan says what fits)"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], int]:
    """Runs `wscope demo` with this function in the place of the demo."""
    monkeypatch.delenv("WSCOPE_DEBUG", raising=False)

    def with_verb(verb: Callable[[], int]) -> int:
        module = types.ModuleType("wscope_jax.cli.demo")
        module.run = lambda arguments: verb()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "wscope_jax.cli.demo", module)
        return cli.main(["demo"])

    return with_verb


def raising(error: BaseException) -> Callable[[], int]:
    def verb() -> int:
        print("part", end="")
        raise error

    return verb


@pytest.mark.parametrize("code", [0, 1])
def test_verb_decides(run: Callable[..., int], code: int) -> None:
    assert run(lambda: code) == code


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (WscopeError("x"), 1, "error: x"),
        (UsageError("--top-k: -1"), 2, "error: --top-k: -1"),
        (CapacityError("short by 1 GiB"), 3, "error: short by 1 GiB"),
        (CheckpointError("no weights"), 4, "error: no weights"),
        (MachineError("no GPU"), 5, "error: no GPU"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (signals.Terminated(), 143, "terminated"),
        (MemoryError(), 3, f"error: out of memory{LESS}"),
        (MemoryError("256 GiB"), 3, f"error: out of memory (256 GiB){LESS}"),
        (
            RuntimeError("RESOURCE_EXHAUSTED: no"),
            3,
            f"error: out of memory (RESOURCE_EXHAUSTED: no){LESS}",
        ),
        (ImportError("no _ffi"), 5, "error: no _ffi"),
        (KeyError("k"), 1, "error: KeyError: 'k' (WSCOPE_DEBUG=1 shows where)"),
        (ValueError("a\n  b"), 1, "error: ValueError: a b (WSCOPE_DEBUG=1 shows where)"),
        (RuntimeError(), 1, "error: RuntimeError: no message (WSCOPE_DEBUG=1 shows where)"),
        (OSError(28, "No space left"), 5, "error: [Errno 28] No space left"),
    ],
    ids=repr,
)
def test_errors(
    run: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    line: str | None,
) -> None:
    assert run(raising(error)) == code
    out, err = capsys.readouterr()
    assert out == "part"
    assert err.startswith("wscope: ")
    assert err.count("\n") == 1
    if line is not None:
        assert err == f"wscope: {line}\n"


def test_out_of_memory_says_where(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def verb() -> int:
        with prompts.opened(Refusing("book.txt"), "--prompt-file book.txt"):
            return 0

    assert run(verb) == 3
    line = f"wscope: error: out of memory in wscope_jax.cli.prompts.opened{LESS}\n"
    assert capsys.readouterr().err == line


def test_a_full_stdout(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run(lambda: print("answer")) == 1  # type: ignore[arg-type, func-returns-value]
        with contextlib.suppress(OSError):
            full.close()
    err = capsys.readouterr().err
    assert err.startswith("wscope: error: stdout: No space left on device; the answer is lost")
    assert err.count("\n") == 1


def test_options_are_named_as_they_are_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = types.ModuleType("wscope_jax.cli.plan")
    monkeypatch.setitem(sys.modules, "wscope_jax.cli.plan", module)
    words = ["plan", "--model", "m", "--host-memory", "1GB"]
    for error, text in (
        (CapacityError("host_memory: too small"), "--host-memory: too small"),
        (CheckpointError("host_memory: no such directory"), "host_memory: no such directory"),
    ):
        module.run = lambda _, error=error: raising(error)()  # type: ignore[attr-defined]
        assert cli.main(words) == error.exit_code
        assert capsys.readouterr().err == f"wscope: error: {text}\n"


def test_long_messages_are_cut(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(raising(RuntimeError("x" * 10_000))) == 1
    assert len(capsys.readouterr().err) < 600


def test_debug_shows_where(
    run: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WSCOPE_DEBUG", "1")
    assert run(raising(KeyError("k"))) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("wscope: error: KeyError: 'k'\n")


def test_sigterm_ends_cleanly(run: Callable[..., int]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def verb() -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            seen.append("cleaned up")
        return 0

    assert run(verb) == 143
    assert seen == ["cleaned up"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_the_main_thread(run: Callable[..., int]) -> None:
    codes = []
    thread = threading.Thread(target=lambda: codes.append(run(lambda: 0)))
    thread.start()
    thread.join()
    assert codes == [0]
