"""Runs `wscope` in this process and judges how it answers."""

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engines import CHECKPOINTS
from wscope_jax import cli
from wscope_jax.cli import start

CODES = (0, 1, 2, 3, 4, 5, 130, 143)
TINY = CHECKPOINTS["qwen3_moe"]


def tiny_with(ids: Path, model: Path = TINY) -> list[object]:
    """Options of `generate` and `score`: the tiny checkpoint or a copy of it, and a file of token ids."""
    return ["--model", model, "--tokens", ids, "--dtype", "float32", "--window", 32]


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


@contextlib.contextmanager
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it `wscope` leaves this process's environment, log and jax as they are."""

    def prepare(*_: object, quiet: bool = False) -> None:
        handler = logging.StreamHandler()
        handler.setFormatter(start._OneLine())
        logging.basicConfig(
            level=logging.ERROR if quiet else logging.WARNING, handlers=[handler], force=True
        )

    monkeypatch.setattr(start, "prepare", prepare)
    monkeypatch.delenv("WSCOPE_DEBUG", raising=False)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = before
        root.setLevel(level)


def wscope(*words: object) -> Done:
    """Runs a command line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return Done(code, out.getvalue(), err.getvalue())


def check(done: Done) -> None:
    """Whatever went wrong, it is told as a user is promised: a documented code, lines, no traceback."""
    assert done.code in CODES, done
    assert "Traceback" not in done.err, done.err
    if done.code not in (0, 130, 143):
        # Warnings may stand before; an indented list may follow; the error itself is one line.
        heads = [line for line in done.err.splitlines() if not line.startswith("  ")]
        assert heads, done
        assert heads[-1].startswith("wscope: error: "), done.err
        assert all(line.startswith("wscope: ") for line in heads), done.err
        assert all(c.isprintable() for line in heads for c in line), heads


def caught(kind: type[Exception], use: Callable[[], object]) -> str | None:
    """What an error of this kind says; None if there is none. The error itself, which holds arrays, is dropped."""
    try:
        use()
    except kind as error:
        return str(error)
    return None


def refused(done: Done, code: int, *about: str) -> None:
    """The command printed nothing on stdout, one error that names `about`, and has this code."""
    check(done)
    assert (done.code, done.out) == (code, ""), done
    for text in about:
        assert text in done.err, done.err
