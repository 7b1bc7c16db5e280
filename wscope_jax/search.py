"""The largest number for which something holds."""

from collections.abc import Callable


def largest(holds: Callable[[int], bool], first: int, last: int) -> int:
    """The largest in [first, last] for which it holds, where it holds for all smaller ones; first - 1 for none."""
    low, high = first - 1, last + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
