"""Processes that read memory at a given rate, on whatever core they are put: a neighbour who takes bandwidth."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

NAME: Final = "wscope-bench-reader"  # in the process list
PIECE: Final = 16 << 20  # bytes read between two looks at the clock
ARRAY: Final = 256 << 20  # bytes of each reader, more than its part of any cache
START_S: Final = 60.0
BEHIND_S: Final = 0.2  # what a reader that was kept waiting may catch up with


class Readers:
    """So many processes that together read `rate` bytes a second, if the machine gives them that.

    Args:
        count: processes.
        rate: bytes a second of all of them.
        size: bytes that each goes through over and over.
    """

    def __init__(self, count: int, rate: float, size: int = ARRAY) -> None:
        self._words = [str(size), str(rate / count)]
        self._count = count
        self._running: list[subprocess.Popen[bytes]] = []
        with tempfile.NamedTemporaryFile(prefix=NAME, delete=False) as file:
            file.write(bytes(8 * count))
        self._file = Path(file.name)
        self._read: Any = np.memmap(self._file, np.int64, "r")
        self._since = (0, 0.0)

    def __enter__(self) -> "Readers":
        for number in range(self._count):
            words = [sys.executable, __file__, NAME, str(self._file), str(number), *self._words]
            self._running.append(subprocess.Popen(words))
        until = time.monotonic() + START_S
        while not self._read.all():
            if time.monotonic() > until or any(one.poll() is not None for one in self._running):
                self.__exit__()
                raise SystemExit("readers: not all of the readers started")
            time.sleep(0.05)
        self.rate()
        return self

    def rate(self) -> float:
        """Bytes a second that they have read since the call before."""
        now = (int(self._read.sum()), time.perf_counter())
        before, self._since = self._since, now
        return (now[0] - before[0]) / (now[1] - before[1])

    def __exit__(self, *_: object) -> None:
        for one in self._running:
            one.terminate()
        for one in self._running:
            one.wait()
        self._running.clear()
        self._file.unlink(missing_ok=True)


def read(file: str, number: int, size: int, rate: float) -> None:
    """What a reader does until it is ended, or its parent has gone."""
    parent, counts = os.getppid(), np.memmap(file, np.int64, "r+")
    pieces = np.ones(max(size, PIECE) // PIECE * PIECE // 8, np.int64).reshape(-1, PIECE // 8)
    at, due = 0, time.perf_counter()
    while os.getppid() == parent:
        pieces[at].sum()
        counts[number] += PIECE
        at, now = (at + 1) % len(pieces), time.perf_counter()
        due = max(due + PIECE / rate, now - BEHIND_S)
        time.sleep(max(0.0, due - now))


if __name__ == "__main__" and sys.argv[1:2] == [NAME]:
    read(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
