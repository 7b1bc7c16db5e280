"""What only a process of its own shows: signals, closed pipes, the whole demo."""

import contextlib
import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import processes

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "mixtral"
LONG = ["--dtype", "float32", "--window", "32", "--max-new-tokens", "50000", "--ignore-eos"]


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts `wscope` in a process of its own; what one compiled the next one finds."""
    environment = processes.environment(tmp_path_factory.mktemp("compiled"))
    with contextlib.ExitStack() as stack:

        def start_one(*words: str) -> subprocess.Popen[bytes]:
            process = processes.start(environment, *words)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start_one


@pytest.fixture
def endless(tmp_path: Path) -> list[str]:
    """A generation that takes minutes."""
    np.save(tmp_path / "ids.npy", np.arange(100, dtype=np.int32))
    return ["generate", "--model", str(GOLDEN), "--tokens", str(tmp_path / "ids.npy"), *LONG]


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(signal.SIGINT, 130, "wscope: interrupted"), (signal.SIGTERM, 143, "wscope: terminated")],
)
def test_signals_keep_what_there_is(
    start: Any, endless: list[str], number: signal.Signals, code: int, line: str
) -> None:
    process = start(*endless)
    first = b""
    while len(first) < 100:  # some forty tokens
        first += process.stdout.read(100)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    assert re.fullmatch(rb"[0-9]+( [0-9]+)+\n", first + out)
    assert err.decode().splitlines()[-1] == line
    assert b"Traceback" not in err


def test_reader_that_leaves(start: Any, endless: list[str]) -> None:
    process = start(*endless)
    process.stdout.read(20)
    process.stdout.close()
    assert process.wait(timeout=300) == 0
    err = process.stderr.read()
    assert b"error" not in err
    assert b"Traceback" not in err


def test_demo(start: Any) -> None:
    process = start("demo", "--json")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.count(b"\n") == 1
    values = json.loads(out)
    assert values["matches_dense"] is True
    assert values["compiles"]["stall"] == 0
    assert len(values["tokens"][0]) == 512
    words = values["text"][0].split()
    runs = list(zip(words, words[1:], words[2:], strict=False))
    assert len(set(runs)) > 0.6 * len(runs), values["text"]  # it does not go round in circles
    assert [asked["region"] for asked in values["look_ups"]] == ["window", "unpinned", "pinned"]
    assert all(asked["right"] for asked in values["look_ups"]), values["look_ups"]
    assert all(held["tokens"] > 0 for held in values["regions"].values()), values["regions"]
