"""stdout and stderr as a user may have set them: closed, in another encoding, full."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from wscope_jax.errors import MachineError, OutputError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


class _Nowhere(io.TextIOWrapper):
    """Stands for a stream that was closed when the process began."""


class _Lossy(io.FileIO):
    """A descriptor for messages: what it does not take is lost, and ends nothing.

    Attributes:
        has_lost: something was not taken.
    """

    has_lost = False

    def write(self, raw: "Buffer", /) -> int:
        """Writes what can be written."""
        try:
            return super().write(raw)
        except OSError:
            self.has_lost = True
            return memoryview(raw).nbytes


def prepare() -> None:
    """Makes both usable: closed ones go nowhere, what cannot be encoded is escaped. A full stderr ends nothing."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            # Otherwise the next file that is opened, a shard perhaps, gets this number.
            setattr(sys, name, _open_nowhere(number))
        elif hasattr(stream, "reconfigure"):
            with contextlib.suppress(ValueError):
                stream.reconfigure(errors="backslashreplace")
    stderr: Any = sys.__stderr__
    if stderr is not None and stderr is sys.stderr:
        raw, encoding = io.BufferedWriter(_Lossy(2, "wb", closefd=False)), stderr.encoding
        sys.stderr = io.TextIOWrapper(raw, encoding, errors="backslashreplace", line_buffering=True)


def require_stdout() -> None:
    """Finds out before any work that nobody would see the answer.

    Raises:
        MachineError: stdout was closed when the process began (`>&-`).
    """
    if isinstance(sys.stdout, _Nowhere):
        raise MachineError(
            "stdout is closed, so the answer would be lost; send it to a file, or to /dev/null"
        )


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Within it something is printed to stdout, which takes it all before the block is left.

    Raises:
        OutputError: stdout takes no more; it says why.
        BrokenPipeError: The reader has gone, who wants no more of it.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(
            f"stdout: {error.strerror or error}; the answer is lost: send it to another place"
        ) from error


def flush() -> None:
    """Flushes stdout.

    Raises:
        OutputError: See `printing`; also BrokenPipeError.
    """
    with printing():
        pass


def tell(text: str) -> bool:
    """Writes to stderr; whether it has taken everything so far."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        return False
    raw = getattr(getattr(sys.stderr, "buffer", None), "raw", None)
    return not getattr(raw, "has_lost", False)


def discard_stdout() -> None:
    """Lets what is still to come, and what the interpreter flushes when it ends, go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def printable(text: str) -> str:
    """A message that moves no cursor and stays one line; an indented list may follow the line."""
    first, *rest = text.split("\n  ")
    return "\n  ".join(_escape(line) for line in (first, *rest))


def _escape(line: str) -> str:
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line
    )


def _open_nowhere(number: int) -> _Nowhere:
    opened = os.open(os.devnull, os.O_WRONLY)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    raw = os.fdopen(number, "wb", closefd=False)
    return _Nowhere(raw, encoding="utf-8", errors="backslashreplace")
