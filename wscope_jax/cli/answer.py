"""How an answer leaves the program: streamed rows, a line of JSON, a result file."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol, TextIO

from wscope_jax.errors import UsageError


class Event(Protocol):
    """What the engine tells about one row; `generation.Event` is one."""

    @property
    def row(self) -> int:
        """The row's number in the call."""

    @property
    def token(self) -> int | None:
        """The new token's id, None if the row ended without one."""

    @property
    def text(self) -> str:
        """The text that became certain."""

    @property
    def finish_reason(self) -> str | None:
        """Why the row ended, None while it goes on."""


class RowPrinter:
    """Prints rows one after the other while all of them grow at once.

    The first unfinished row is printed live, later ones are held back. Each ends with a newline.

    Args:
        num_rows: Rows there will be.
        out: Where to.
        is_text: Print the text; otherwise the token ids, separated by spaces.
    """

    def __init__(self, num_rows: int, out: TextIO, *, is_text: bool) -> None:
        self._pending: list[list[str]] = [[] for _ in range(num_rows)]
        self._is_finished = [False] * num_rows
        self._has_ids = [False] * num_rows
        self._current = 0
        self._out = out
        self._is_text = is_text

    def add(self, event: Event) -> None:
        """Takes one event and prints what may be printed."""
        self._pending[event.row].append(event.text if self._is_text else self._id(event))
        self._is_finished[event.row] |= event.finish_reason is not None
        self._print()

    def close(self) -> None:
        """Prints what was held back, of rows that did not come to their end too."""
        while self._current < len(self._pending):
            self._is_finished[self._current] = True
            self._print()

    def _id(self, event: Event) -> str:
        if event.token is None:
            return ""
        separator = " " if self._has_ids[event.row] else ""
        self._has_ids[event.row] = True
        return f"{separator}{event.token}"

    def _print(self) -> None:
        while self._current < len(self._pending):
            # Taken before it is written: an interruption of the write must not make `close` repeat it.
            text, self._pending[self._current] = "".join(self._pending[self._current]), []
            self._out.write(text)
            if not self._is_finished[self._current]:
                break
            self._out.write("\n")
            self._current += 1
        self._out.flush()


def print_json(values: Mapping[str, object]) -> None:
    """Prints one object on one line.

    Raises:
        ValueError: If a number is not finite, which JSON cannot say.
    """
    sys.stdout.write(json.dumps(values, allow_nan=False) + "\n")
    sys.stdout.flush()


def require_writable(file: Path, option: str) -> None:
    """Finds out before any work whether a result could be written here.

    Raises:
        UsageError: If the file is a directory, or its folder is missing or closed to us.
    """
    folder = file.parent
    if file.is_dir():
        raise UsageError(f"{option} {file}: is a directory; name a file")
    if not folder.is_dir():
        raise UsageError(f"{option} {file}: there is no directory {folder}")
    if not os.access(folder if not file.exists() or file.is_file() else file, os.W_OK):
        raise UsageError(f"{option} {file}: not writable")


def write_whole(file: Path, write: Callable[[BinaryIO], None]) -> None:
    """Writes a file under a temporary name, then renames it: no half file ever bears the name.

    Args:
        file: The result. A link is followed; a device or a pipe is written to directly.
        write: Writes the content.

    Raises:
        OSError: If writing fails; the temporary file is gone by then.
    """
    target = Path(os.path.realpath(file))
    if target.exists() and not target.is_file():
        with target.open("wb") as stream:
            write(stream)
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
