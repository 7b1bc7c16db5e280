"""Progress on a terminal, and nowhere else."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engines import CHECKPOINTS
from wscope_jax import Engine, Sampling, policies
from wscope_jax.cli import progress
from wscope_jax.progress import SILENT

TINY = CHECKPOINTS["qwen3_moe"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Noting:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: dict[str, list[tuple[int, int]]] = {"loading": [], "prefilling": []}

    def loading(self, done: int, total: int) -> None:
        self.told["loading"].append((done, total))

    def prefilling(self, done: int, total: int) -> None:
        self.told["prefilling"].append((done, total))


def test_what_the_library_tells() -> None:
    noting = Noting()
    with Engine.from_pretrained(
        TINY, policy=policies.GpuOnly(), window=32, dtype="float32", threads=1, progress=noting
    ) as engine:
        engine.generate([[1] * 60, [2] * 30], Sampling(max_new_tokens=1))
        engine.score(np.ones((2, 50), np.int32), 49)
    loading = noting.told["loading"]
    assert [done for done, _ in loading] == sorted({done for done, _ in loading})
    total = sum(np.prod(leaf.shape) * 4 for leaf in engine._programs._model.leaves)
    assert loading[-1] == (total, total)
    assert {all_of_it for _, all_of_it in loading} == {total}
    assert noting.told["prefilling"] == [
        *[(20, 90), (40, 90), (60, 90), (70, 90), (80, 90), (90, 90)],
        *[(16, 98), (32, 98), (49, 98), (65, 98), (81, 98), (98, 98)],
    ]


@pytest.mark.parametrize(
    ("stream", "quiet"), [(io.StringIO(), False), (Terminal(), True), (io.StringIO(), True)]
)
def test_silent_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, stream: Any, quiet: bool
) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    with progress.shown(quiet=quiet) as made:
        assert made is SILENT
    assert stream.getvalue() == ""


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal, and a clock on which every look takes a second."""
    stream = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream, stdout=io.StringIO()))
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    clock = iter(range(10**6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    return stream


@pytest.mark.parametrize("no_color", [False, True])
def test_on_a_terminal(drawn: Terminal, monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    with progress.shown(quiet=False) as shown:
        for part in range(1, 5):
            shown.loading(part * 10**6, 4 * 10**6)
        for part in range(1, 4):
            shown.prefilling(1000 * part, 3000)
    text = drawn.getvalue()
    for words in ("loading", "2 of 4 MB", "reading the prompt", "2,000 of 3,000 tokens"):
        assert words in text
    assert ("\x1b[38" in text or "\x1b[35" in text) is not no_color
    assert "\x1b[?25h" in text  # the cursor is back


def test_it_goes_for_good_when_the_answer_begins(
    drawn: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress.shown(quiet=False) as shown:
        shown.prefilling(1, 9)
        progress.make_room(shown)  # stdout is a file: the line may stay
        shown.prefilling(2, 9)
        progress.sys.stdout = Terminal()
        before = drawn.getvalue()
        progress.make_room(shown)
        after = drawn.getvalue()
        assert after != before
        shown.prefilling(3, 9)
        assert drawn.getvalue() == after


def test_short_phases_show_nothing(drawn: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.time, "monotonic", lambda: 0.0)
    with progress.shown(quiet=False) as shown:
        shown.loading(1, 2)
        shown.loading(2, 2)
    assert drawn.getvalue() == ""


def test_piped_stderr_is_plain(tmp_path: Path) -> None:
    """A real terminal on stdout alone: stderr has lines only, stdout the answer only."""
    np.save(tmp_path / "ids.npy", np.arange(40, dtype=np.int32))
    words = ["--model", str(TINY), "--tokens", str(tmp_path / "ids.npy"), "--max-new-tokens", "3"]
    leader, follower = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "wscope_jax", "generate", *words, "--window", "32"],
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=subprocess.PIPE,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        timeout=120,
        check=False,
    )
    os.close(follower)
    out = os.read(leader, 10**4)
    os.close(leader)
    assert done.returncode == 0, done.stderr
    assert b"\x1b" not in out + done.stderr
    assert len(out.split()) == 3
    assert done.stderr.startswith(b"wscope: 3 tokens")
