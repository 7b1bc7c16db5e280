"""stdout and stderr as a user may have set them: closed, in another encoding, full."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator

from wscope_jax.errors import MachineError, OutputError


class _Nowhere(io.TextIOWrapper):
    """Stands for a stream that was closed when the process began."""


def prepare() -> None:
    """Makes both usable: what was closed goes nowhere, what cannot be encoded is escaped."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            # Otherwise the next file that is opened, a shard perhaps, gets this number.
            setattr(sys, name, _open_nowhere(number))
        elif hasattr(stream, "reconfigure"):
            with contextlib.suppress(ValueError):
                stream.reconfigure(errors="backslashreplace")


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
