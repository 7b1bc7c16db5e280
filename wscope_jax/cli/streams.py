"""stdout and stderr as a user may have set them: closed, in another encoding, full."""

import contextlib
import os
import sys
from typing import TextIO


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


def flush() -> None:
    """Flushes stdout.

    Raises:
        OSError: it cannot be written to.
    """
    sys.stdout.flush()


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


def _open_nowhere(number: int) -> TextIO:
    opened = os.open(os.devnull, os.O_WRONLY)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    return os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
