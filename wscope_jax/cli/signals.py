"""Ctrl-C and SIGTERM end a run at the next step, with what was printed so far kept; and soon, whatever is under way.

Python handles a signal between two of its instructions. A compilation or one layer of a long prompt is a single call
that takes longer than a user waits, so a thread watches: if the main thread does not react in time, it ends the
process.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, NoReturn

EXIT_CODES: Final = {signal.SIGINT: 130, signal.SIGTERM: 143}
WORDS: Final = {130: "interrupted", 143: "terminated"}
STUCK_S: Final = 1.5  # in a call that does not return, while there is nothing to lose
STUCK_WITH_TEXT_S: Final = 10.0  # the same once tokens have come: a step may take that long
CLEANUP_S: Final = 10.0  # between the reaction and the end of the process


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived; a KeyboardInterrupt, so that what cleans up after Ctrl-C does so too."""


class Watch:
    """Ends the process when a signal is not reacted to in time.

    Attributes:
        has_text: tokens have come, which a hard end might lose.
    """

    def __init__(self) -> None:
        self.has_text = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._reacted = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wscope-signals", daemon=True)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread.start()

    def react(self) -> None:
        """The main thread has taken notice of the signal."""
        self._reacted.set()

    def end(self) -> None:
        """Stops to watch; the process goes on."""
        self._ended.set()
        signal.set_wakeup_fd(self._before)
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _run(self) -> None:
        while not self._ended.is_set():
            number = os.read(self._reader, 1)[0]
            if number not in EXIT_CODES or self._ended.is_set():
                continue
            stuck_s = STUCK_WITH_TEXT_S if self.has_text else STUCK_S
            if not self._reacted.wait(stuck_s) or not self._ended.wait(CLEANUP_S):
                leave(EXIT_CODES[signal.Signals(number)], is_said=False)


_watch: Watch | None = None
_pending: type[KeyboardInterrupt] | None = None  # raised, and perhaps discarded


def note_text() -> None:
    """Called between two tokens: tells the watching thread that there is text, and ends the run if a signal has come.

    Python discards what is raised within a garbage collection or a destructor. A signal that arrived there is raised
    again here.
    """
    if _watch is not None:
        _watch.has_text = True
    if _pending is not None:
        raise _pending


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Within the block SIGTERM raises Terminated in the main thread, and signals are watched.

    Outside the main thread, where Python allows no handlers, nothing changes.
    """
    global _watch, _pending
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in EXIT_CODES}
    # A shell starts background jobs with SIGINT ignored; that stays so.
    chosen = [number for number in EXIT_CODES if before[number] not in (signal.SIG_IGN, None)]
    _watch = _make_watch()
    hook = sys.unraisablehook
    sys.unraisablehook = lambda discarded: _tell(discarded, hook)
    for number in chosen:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number in chosen:
            signal.signal(number, before[number])
        watch, _watch, _pending = _watch, None, None
        if watch is not None:
            watch.end()


def leave(code: int, *, is_said: bool = True) -> NoReturn:
    """Ends the process now: no thread is waited for.

    Args:
        code: exit code.
        is_said: whether the user was told already.
    """
    with contextlib.suppress(OSError, ValueError):
        if not is_said:
            os.write(2, f"wscope: {WORDS.get(code, 'ended')}\n".encode())
    os._exit(code)


def _make_watch() -> Watch | None:
    try:
        return Watch()
    except (OSError, RuntimeError):  # no descriptor or no thread left: signals are handled later
        return None


def _tell(
    discarded: "sys.UnraisableHookArgs", hook: Callable[["sys.UnraisableHookArgs"], object]
) -> None:
    """Python's report of an exception that it discards, but for an interruption: `note_text` raises that again."""
    if not issubclass(discarded.exc_type, KeyboardInterrupt):
        hook(discarded)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # What cleans up now is not disturbed again; if it hangs, the watching thread ends it.
    for each in EXIT_CODES:
        signal.signal(each, signal.SIG_IGN)
    if _watch is not None:
        _watch.react()
    global _pending
    _pending = Terminated if number == signal.SIGTERM else KeyboardInterrupt
    raise _pending
