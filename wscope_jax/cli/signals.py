"""Ctrl-C and SIGTERM end a run at once while it has nothing to lose, later at the next step with what was printed kept.

An exception that a signal's handler raises is not safe everywhere: the import of an extension turns it into a crash, a
garbage collection or a destructor discards it. So a process that is still starting is ended by the handler itself, and
what is raised later is raised again until the run unwinds.

Python handles a signal between two of its instructions. A compilation or one layer of a long prompt is a single call
that takes longer than a user waits, so a thread watches: if the main thread does not react in time, it ends the
process.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, NoReturn

from wscope_jax.interruption import EXIT_CODES as EXIT_CODES
from wscope_jax.interruption import WORDS as WORDS

STUCK_S: Final = 1.0  # from the signal to the end of the process, while there is nothing to lose
# The same once there is something to lose: a step may take that long.
STUCK_WITH_TEXT_S: Final = 10.0
CLEANUP_S: Final = 10.0  # between the reaction and the end of the process
AGAIN_S: Final = 0.1  # until what was raised is raised again, unless the run unwinds by then
POLL_S: Final = 0.02
IMPORTS: Final = "<frozen importlib"  # how the file of a frame begins that carries out an import


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived; a KeyboardInterrupt, so that what cleans up after Ctrl-C does so too."""


class Watch:
    """Ends the process when a signal is not reacted to in time.

    Attributes:
        has_text: there is something to lose: tokens that have come, a file that is being written.
    """

    def __init__(self, *, is_process: bool) -> None:
        """Begins to watch.

        Args:
            is_process: the process belongs to the command; otherwise its cleanup is waited for in any case.
        """
        self.has_text = False
        self._is_process = is_process
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._reacted_s: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wscope-signals", daemon=True)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread.start()

    def react(self) -> None:
        """The main thread has taken notice of the signal."""
        if self._reacted_s is None:
            self._reacted_s = time.monotonic()

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
            came_s = time.monotonic()
            while not self._ended.wait(POLL_S):
                if time.monotonic() > self._deadline_s(came_s):
                    leave(EXIT_CODES[signal.Signals(number)], is_said=False)

    def _deadline_s(self, came_s: float) -> float:
        """When the process is ended whose signal came at `came_s`."""
        if self._reacted_s is not None and (self.has_text or not self._is_process):
            return self._reacted_s + CLEANUP_S
        return came_s + (STUCK_WITH_TEXT_S if self.has_text else STUCK_S)


_watch: Watch | None = None
_pending: type[KeyboardInterrupt] | None = None  # raised, and perhaps discarded
_is_direct = False  # the handler ends the process
_leaving: Final = threading.Lock()
_farewell = b""


def keep() -> None:
    """From now on there is something that a sudden end would leave half done: a signal raises in the main thread."""
    global _is_direct
    _is_direct = False


def note_file() -> None:
    """A file is being written; the process is not ended in the middle of it, nor soon after a signal."""
    keep()
    if _watch is not None:
        _watch.has_text = True


def note_text() -> None:
    """Called between two tokens: there is text to lose; ends the run if a signal has come."""
    if _watch is not None:
        _watch.has_text = True
    if _pending is not None:
        raise _pending


def set_farewell(raw: bytes) -> None:
    """Bytes that put the terminal in order again, to be written to stderr if the process is ended suddenly."""
    global _farewell
    _farewell = raw


@contextlib.contextmanager
def terminable(*, is_process: bool = False) -> Iterator[None]:
    """Within the block signals are watched, SIGINT raises KeyboardInterrupt and SIGTERM raises Terminated.

    Outside the main thread, where Python allows no handlers, nothing changes.

    Args:
        is_process: the process belongs to the command. Then a signal ends it at once until `keep` is called, and
            again after the block.
    """
    global _watch, _is_direct
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in EXIT_CODES}
    # A shell starts background jobs with SIGINT ignored; that stays so.
    chosen = [number for number in EXIT_CODES if before[number] not in (signal.SIG_IGN, None)]
    _is_direct = is_process
    for number in chosen:
        signal.signal(number, _interrupt)
    _watch = _make_watch(is_process=is_process)
    hook = sys.unraisablehook
    sys.unraisablehook = lambda discarded: _tell(discarded, hook)
    try:
        with _alarm_kept():
            yield
            if _pending is not None:
                raise _pending
    finally:
        sys.unraisablehook = hook
        _is_direct = is_process
        for number in chosen:
            signal.signal(number, _interrupt if is_process else before[number])
        _end_watch()


def leave(code: int, *, is_said: bool = True) -> NoReturn:
    """Ends the process now: no thread is waited for.

    Args:
        code: exit code.
        is_said: whether the user was told already.
    """
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()  # another thread ends it
    with contextlib.suppress(OSError, ValueError):
        if not is_said:
            os.write(2, _farewell + f"wscope: {WORDS.get(code, 'ended')}\n".encode())
    os._exit(code)


def _make_watch(*, is_process: bool) -> Watch | None:
    try:
        return Watch(is_process=is_process)
    except (OSError, RuntimeError):  # no descriptor or no thread left: signals are handled later
        return None


def _end_watch() -> None:
    global _watch, _pending
    watch, _watch, _pending = _watch, None, None
    if watch is not None:
        watch.end()


@contextlib.contextmanager
def _alarm_kept() -> Iterator[None]:
    """After the block the alarm clock, which `_interrupt` sets, is as it was."""
    handler, began_s = signal.getsignal(signal.SIGALRM), time.monotonic()
    left_s, interval_s = signal.getitimer(signal.ITIMER_REAL)
    try:
        yield
    finally:
        if _pending is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            if left_s:
                left_s = max(1e-3, left_s - (time.monotonic() - began_s))
                signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)


def _tell(
    discarded: "sys.UnraisableHookArgs", hook: Callable[["sys.UnraisableHookArgs"], object]
) -> None:
    """Python's report of an exception that it discards, but for an interruption: that is raised again."""
    if not issubclass(discarded.exc_type, KeyboardInterrupt):
        hook(discarded)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _is_direct:
        leave(EXIT_CODES[signal.Signals(number)], is_said=False)
    # What cleans up now is not disturbed again; if it hangs, the watching thread ends it.
    for each in EXIT_CODES:
        signal.signal(each, signal.SIG_IGN)
    global _pending
    _pending = Terminated if number == signal.SIGTERM else KeyboardInterrupt
    signal.signal(signal.SIGALRM, _raise_again)
    signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)
    _raise(frame)


def _raise_again(number: int, frame: FrameType | None) -> None:
    """Raises what was raised before, unless it is what the interrupted code is unwinding from."""
    handled = sys.exception()
    while handled is not None:
        if isinstance(handled, KeyboardInterrupt):
            if _watch is not None:
                _watch.react()
            return
        handled = handled.__context__
    _raise(frame)


def _raise(frame: FrameType | None) -> None:
    """Raises what is pending, but not within an import: extensions do not survive that. It comes again."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORTS):
            return
        frame = frame.f_back
    if _pending is not None:
        raise _pending
