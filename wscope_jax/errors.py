"""The errors that users see.

Each names what is wrong, where, why and what to do, on one line (a list may follow, indented), and carries the exit
code of the command line. Each also inherits the builtin that a caller would catch.

What callers of the public surface give is answered by these. A bare ValueError is a broken rule among our own modules.
"""

from typing import ClassVar, Final

# In the text of JAX's error, which has no class of its own.
OUT_OF_MEMORY: Final = "RESOURCE_EXHAUSTED"


class WscopeError(Exception):
    """Base of all errors that this package raises on purpose.

    Attributes:
        exit_code: What the command line returns when this error ends it.
    """

    exit_code: ClassVar[int] = 1


class UsageError(WscopeError, ValueError):
    """An argument, a flag or a request is outside its allowed range."""

    exit_code = 2


class CapacityError(WscopeError, MemoryError):
    """What was asked does not fit into the memory that it was given."""

    exit_code = 3


class CheckpointError(WscopeError, ValueError):
    """Anything wrong with a checkpoint: its directory, configuration, tensors or tokenizer."""

    exit_code = 4


class MachineError(WscopeError, OSError):
    """This machine or its installation lacks something that was asked for."""

    exit_code = 5


class OutputError(WscopeError, OSError):
    """A result could not be written where it was to go."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, Python's or JAX's, says that memory was refused."""
    return isinstance(error, MemoryError) or OUT_OF_MEMORY in str(error)
