"""Copies to the device at a given rate: a neighbour who takes a part of the link."""

import statistics
import threading
from typing import Final

from ceilings import GB, Ceilings

COPY_BYTES: Final = 256 << 20  # of one copy; smaller ones do not get half beside a cache's own
PHASE_S: Final = 5.0  # of copies, until their rate is known or they can stop


class Copies:
    """A thread that copies to the device, one large copy at a time.

    Args:
        ceilings: memory to copy from.
        rate: bytes a second, if the link gives them that.
    """

    def __init__(self, ceilings: Ceilings, rate: float) -> None:
        self._ceilings, self._rate = ceilings, rate
        self._ended, self._told = threading.Event(), threading.Event()
        self._rates: list[float] = []
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def _copy(self) -> None:
        try:
            while not self._ended.is_set():
                got = self._ceilings.link_alone(PHASE_S, COPY_BYTES, rate=self._rate)
                self._rates.append(GB * got)
                self._told.set()
        except Exception as error:
            self._failure = error
        self._told.set()

    def __enter__(self) -> "Copies":
        self._thread.start()
        return self

    def rate(self) -> float:
        """Bytes a second of the newest copies, once there are some; raises what has ended them."""
        self._told.wait()
        if self._failure is not None:
            raise self._failure
        return statistics.median(self._rates[-9:])

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
