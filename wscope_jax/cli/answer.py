"""How an answer leaves the program: streamed rows, a line of JSON, a result file."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn, Protocol, TextIO

from wscope_jax.cli import signals, streams
from wscope_jax.errors import OutputError, UsageError


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
        self._has_begun = False
        self._out = out
        self._is_text = is_text

    def add(self, event: Event) -> None:
        """Takes one event and prints what may be printed."""
        self._has_begun = True
        self._pending[event.row].append(event.text if self._is_text else self._id(event))
        self._is_finished[event.row] |= event.finish_reason is not None
        self._print()

    def close(self) -> None:
        """Prints what was held back, of rows that did not come to their end too; nothing if nothing came at all."""
        if not self._has_begun:
            return
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
    deliver("stdout", json.dumps(values, allow_nan=False) + "\n", _print)


def print_line(text: str) -> None:
    """Prints a line.

    Raises:
        OutputError: See `deliver`.
    """
    deliver("stdout", text + "\n", _print)


def deliver(where: str, text: str, write: Callable[[str], None]) -> None:
    """Writes a result; if that fails, shows it on stderr, for it may have taken hours.

    Raises:
        OutputError: If it could not be written; it says where.
        BrokenPipeError: If the reader has gone, who wants no more of it.
    """
    try:
        write(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        _fail(where, text, error)


def fail(where: str, values: Mapping[str, object], error: OSError, *, rest: str = "") -> NoReturn:
    """Shows a result on stderr that could not be written to `where`.

    Args:
        where: what the message calls it.
        values: the result.
        error: why.
        rest: what of the result the values do not have.

    Raises:
        OutputError: Always.
    """
    _fail(where, json.dumps(values) + "\n", error, rest)


def _fail(where: str, text: str, error: OSError, rest: str = "") -> NoReturn:
    if streams.tell(text):
        what = f"{rest}the result was printed to stderr instead"
    else:
        what = "stderr takes no more, either: the result is lost"
    raise OutputError(f"{where}: {error.strerror or error}; {what}") from error


def write_lines(file: Path, option: str, lines: Sequence[Mapping[str, object]]) -> None:
    """Writes one JSON object a line, to stdout if the file is called `-`, else whole or not at all.

    Raises:
        OutputError: See `deliver`.
    """
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    if str(file) == "-":
        deliver("stdout", text, _print)
        return
    raw = text.encode()

    def write(_: str) -> None:
        write_whole(file, lambda stream: stream.write(raw))

    deliver(f"{option} {file}", text, write)


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def require_writable(file: Path, option: str) -> None:
    """Finds out before any work whether a result could be written here.

    Raises:
        UsageError: If the file is a directory, or its folder is missing or closed to us.
    """
    folder = file.parent
    try:
        if file.is_dir():
            raise UsageError(f"{option} {file}: is a directory; name a file")
        if not folder.is_dir():
            raise UsageError(f"{option} {file}: there is no directory {folder}; make it first")
        is_writable = os.access(folder if not file.exists() or file.is_file() else file, os.W_OK)
    except OSError as error:  # too long, or in a folder that is closed to us
        raise UsageError(f"{option} {file}: {error.strerror or error}; name another") from error
    if not is_writable:
        raise UsageError(f"{option} {file}: not writable; name another")


def require_not_read(file: Path, option: str, arguments: argparse.Namespace) -> None:
    """Finds out before any work whether a result would take the place of something that the command reads.

    Raises:
        UsageError: If another option names this file, or the directory of a checkpoint that it belongs to.
    """
    for name, value in vars(arguments).items():
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, Path) and path is not file and _holds(path, file):
                other = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} {file}: {other} reads it; name another file")


def _holds(path: Path, file: Path) -> bool:
    try:
        if not file.is_file():  # new, or a device
            return False
        return path.samefile(file) or path.samefile(file.resolve().parent)
    except OSError:
        return False


def write_whole(file: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file under a temporary name, then renames it: no half file ever bears the name.

    Args:
        file: The result. A link is followed; a device or a pipe is written to directly.
        write: Writes the content; what it returns is not looked at.

    Raises:
        OSError: If writing fails; the temporary file is gone by then.
    """
    signals.note_file()
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
