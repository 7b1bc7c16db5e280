"""Threads and locks do not survive `fork()`: what was started before it is refused in the child at once.

Without this a child's first call would wait for ever, for workers or for a JAX backend that only its parent has.
"""

import os

from wscope_jax.errors import MachineError

_started_in: int | None = None  # process that started workers or a JAX backend for this package


def mark_started() -> None:
    """Notes that this process has threads from now on; the first call counts."""
    global _started_in
    check("wscope_jax")
    _started_in = _started_in or os.getpid()


def is_child() -> bool:
    """Whether this process was forked after threads were started."""
    return _started_in is not None and _started_in != os.getpid()


def check(what: str) -> None:
    """Refuses to go on in a forked child.

    Args:
        what: what was called, for the message.

    Raises:
        MachineError: This process was forked after threads were started.
    """
    if is_child():
        raise MachineError(
            f"{what}: this process was forked from one that had already started JAX and workers, whose threads did "
            "not come along; start it with multiprocessing's 'spawn' or 'forkserver' method"
        )
