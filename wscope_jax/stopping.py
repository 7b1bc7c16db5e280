"""Where a row's text ends: stop strings, found across the borders of tokens."""

from collections.abc import Sequence
from typing import NamedTuple

from wscope_jax.errors import UsageError


class Emission(NamedTuple):
    """What a piece of text led to.

    Attributes:
        text: may be shown now; it never has to be taken back.
        stopped: a stop string is complete; the text before it is out and nothing will follow.
    """

    text: str
    stopped: bool


class StopMatcher:
    """Cuts a stream of text at the first occurrence of any stop string.

    However the text is split, the texts emitted by `push` and `flush` join to the whole text up to
    where the first stop string begins. Text that may turn out to belong to a stop string is held
    back until that is known: at most the length of the longest stop string.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """Starts at the beginning of a text.

        Raises:
            UsageError: If a stop string is empty.
        """
        if not all(stop_strings):
            raise UsageError("stop: an empty stop string ends every text at once; leave it out")
        self._stops = tuple(dict.fromkeys(stop_strings))
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self._stopped = False

    def push(self, delta: str) -> Emission:
        """Takes the next piece of text; after a stop it is dropped."""
        if self._stopped:
            return Emission("", True)
        text = self._held + delta
        found = self._find_stop(text)
        begun = self._find_beginning(text)
        # A stop string that began earlier, and may still be completed, goes before one that is
        # complete.
        if found is not None and (begun is None or found < begun):
            return self._stop(text[:found])
        end = len(text) if begun is None else begun
        self._held = text[end:]
        return Emission(text[:end], False)

    def flush(self) -> Emission:
        """Ends the text: emits what was held back, up to a stop string in it."""
        if self._stopped:
            return Emission("", True)
        text, self._held = self._held, ""
        found = self._find_stop(text)
        return Emission(text, False) if found is None else self._stop(text[:found])

    def _stop(self, text: str) -> Emission:
        self._held = ""
        self._stopped = True
        return Emission(text, True)

    def _find_stop(self, text: str) -> int | None:
        """Where the first complete stop string begins."""
        return min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=None)

    def _find_beginning(self, text: str) -> int | None:
        """Where the first stop string begins that the end of the text leaves incomplete."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[at:]
            if tail[0] in self._first_characters and any(
                len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops
            ):
                return at
        return None
