"""SIGTERM ends a run the way Ctrl-C does: at the next step, with what was printed so far kept."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived; a KeyboardInterrupt, so that what cleans up after Ctrl-C does so too."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Within the block SIGTERM raises Terminated in the main thread.

    Outside the main thread, where Python allows no handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated
