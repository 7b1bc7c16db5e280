"""A signal that arrives where Python discards exceptions still ends the run."""

import os
import signal
import sys
import threading
from typing import Any

import pytest

from wscope_jax.cli import signals


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals go to the main thread",
)
def test_a_discarded_interruption_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own report of it, a traceback, is left out; that of another error is not."""
    told: list[type[BaseException]] = []

    def hook(discarded: Any) -> None:
        told.append(discarded.exc_type)

    class Broken:
        def __del__(self) -> None:
            raise KeyError("its own")

    class Collected:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):  # the handler runs between two instructions
                pass

    monkeypatch.setattr(sys, "unraisablehook", hook)
    with signals.terminable():
        signals.note_text()
        Collected()
        Broken()
        with pytest.raises(KeyboardInterrupt):
            signals.note_text()
    signals.note_text()
    assert told == [KeyError]
    assert sys.unraisablehook is hook
