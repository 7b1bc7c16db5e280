"""Progress of long loads and prefills, on a terminal and nowhere else."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from wscope_jax.cli import signals
from wscope_jax.progress import SILENT, Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

AFTER_S: Final = 0.5  # what is shorter needs no bar
EVERY_S: Final = 0.1
RESTORE: Final = b"\r\x1b[2K\x1b[?25h"  # an empty line and the cursor that a bar hides


class TerminalProgress:
    """A line on a terminal that goes away when its phase is over. Colours follow NO_COLOR."""

    def __init__(self, bars: "Bars") -> None:
        self._bars = bars
        self._tasks: dict[str, object] = {}
        self._began = time.monotonic()
        self._drawn = 0.0
        self._is_running = False
        self._is_over = False

    def loading(self, done: int, total: int) -> None:
        """See `Progress`."""
        self._show("loading", done / 1e6, total / 1e6, "MB", done == total)

    def prefilling(self, done: int, total: int) -> None:
        """See `Progress`."""
        self._show("reading the prompt", done, total, "tokens", done == total)

    def hide(self) -> None:
        """Takes the line away, for good: from now on the terminal belongs to the answer."""
        self._stop()
        self._is_over = True

    def _show(self, name: str, done: float, total: float, unit: str, is_done: bool) -> None:
        now = time.monotonic()
        if self._is_over:
            return
        if is_done:
            self._stop()
            self._began = now  # of the next phase
            return
        if now - self._began < AFTER_S or now - self._drawn < EVERY_S:
            return
        self._drawn = now
        if not self._is_running:
            signals.set_farewell(b"" if self._bars.console.is_dumb_terminal else RESTORE)
            self._bars.start()
            self._is_running = True
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, unit=unit)
        task = self._tasks[name]
        self._bars.update(task, completed=done, total=total)  # type: ignore[arg-type]
        self._bars.refresh()

    def _stop(self) -> None:
        if self._is_running:
            self._bars.stop()
            self._is_running = False
            signals.set_farewell(b"")
        for task in self._tasks.values():
            self._bars.remove_task(task)  # type: ignore[arg-type]
        self._tasks.clear()


@contextlib.contextmanager
def shown(*, quiet: bool) -> Iterator[Progress]:
    """Progress to pass on: lines on stderr if that is a terminal and `quiet` is not set, else nothing."""
    if quiet or not sys.stderr.isatty():
        yield SILENT
        return
    progress = TerminalProgress(_bars())
    try:
        yield progress
    finally:
        progress.hide()


def make_room(progress: Progress) -> None:
    """Called before text goes to stdout: on a shared terminal, a bar would be drawn over it."""
    if isinstance(progress, TerminalProgress) and sys.stdout.isatty():
        progress.hide()


def _bars() -> "Bars":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("wscope: {task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} {task.fields[unit]}"),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        auto_refresh=False,  # no thread: it is drawn when there is news
        redirect_stdout=False,
        redirect_stderr=False,
    )
