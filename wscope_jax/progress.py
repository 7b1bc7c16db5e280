"""Who is told how far a long phase is: an object passed in, so that no library code asks about terminals."""

from typing import Final, Protocol


class Progress(Protocol):
    """Told again and again how much of a phase is done; called by the thread that works, so it must be quick.

    What it raises ends the phase.
    """

    def loading(self, done: int, total: int) -> None:
        """Bytes of tensors that are in place, and of all of them."""

    def prefilling(self, done: int, total: int) -> None:
        """Prompt tokens that went through all layers (a part of the layers counts as a part), and all of them."""


class Silent:
    """Progress that nobody looks at."""

    def loading(self, done: int, total: int) -> None:
        """See `Progress`."""

    def prefilling(self, done: int, total: int) -> None:
        """See `Progress`."""


SILENT: Final = Silent()
