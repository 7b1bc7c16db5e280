"""Numbers that callers give, as Python's own, or a UsageError that says what was expected."""

import math
import numbers
import operator
from typing import Any, Final

from wscope_jax.errors import UsageError

MOST_SEED: Final = 2**63 - 1  # here, where no jax is: seeds are checked before it may start


def integer(name: str, given: Any, least: int, most: int | None = None) -> int:
    """An integer of any type, numpy's too, as an int.

    Args:
        name: what the message calls it.
        given: what the caller gave.
        least: lowest value.
        most: highest value; None = no limit.

    Raises:
        UsageError: another type, or outside the range.
    """
    try:
        value = None if isinstance(given, bool) else operator.index(given)
    except TypeError:
        value = None
    if value is None or value < least or (most is not None and value > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name}: expected an integer {allowed}, got {given!r:.60}")
    return value


def number(name: str, given: Any, least: float, most: float, *, above_least: bool = False) -> float:
    """A real number of any type, numpy's too, as a float.

    Args:
        name: what the message calls it.
        given: what the caller gave.
        least: lowest value.
        most: highest value.
        above_least: `least` itself is refused.

    Raises:
        UsageError: another type, not a number, or outside the range.
    """
    is_number = isinstance(given, numbers.Real) and not isinstance(given, bool)
    value = float(given) if is_number else math.nan
    if not least <= value <= most or (above_least and value == least):
        sides = f"above {least:g}, up to {most:g}" if above_least else f"{least:g} to {most:g}"
        raise UsageError(f"{name}: expected a number {sides}, got {given!r:.60}")
    return value
