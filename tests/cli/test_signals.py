"""A signal that arrives where Python discards exceptions still ends the run."""

import os
import signal
import threading

import pytest

from wscope_jax.cli import signals


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals go to the main thread",
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_discarded_interruption_comes_again() -> None:
    class Collected:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):  # the handler runs between two instructions
                pass

    with signals.terminable():
        signals.note_text()
        Collected()
        with pytest.raises(KeyboardInterrupt):
            signals.note_text()
    signals.note_text()
