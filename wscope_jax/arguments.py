"""What callers give, numbers as Python's own, or a UsageError that says what was expected."""

import math
import numbers
import operator
from collections.abc import Iterable
from typing import Any, Final

from wscope_jax.errors import UsageError

MOST_SEED: Final = 2**63 - 1  # here, where no jax is: seeds are checked before it may start

FLOAT32: Final = (2.0**-126, 2.0**127)  # within the range of its normal numbers


def shown(given: Any) -> str:
    """What a caller gave, as one short line."""
    # A repr of somebody's class may raise, and so does Python's of an integer with thousands of digits.
    try:
        return " ".join(f"{given!r:.60}".split())
    except Exception:
        return f"an object of type {type(given).__name__}"


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
        raise UsageError(f"{name}: expected an integer {allowed}, got {shown(given)}")
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
    value = _float(given) if _is_real(given) else math.nan
    if not least <= value <= most or (above_least and value == least):
        sides = f"above {least:g}, up to {most:g}" if above_least else f"{least:g} to {most:g}"
        raise UsageError(f"{name}: expected a number {sides}, got {shown(given)}")
    return value


def real(name: str, given: Any) -> None:
    """Checks a real number of any type and size, infinite and NaN too.

    Raises:
        UsageError: another type.
    """
    if not _is_real(given):
        raise UsageError(f"{name}: expected a number, got {shown(given)}")


def _is_real(given: Any) -> bool:
    return isinstance(given, numbers.Real) and not isinstance(given, bool)


def _float(given: Any) -> float:
    try:
        return float(given)
    except OverflowError:  # an integer or a fraction beyond all floats
        return math.inf if given > 0 else -math.inf


def scale(given: Any) -> float:
    """The scale of scores, which are float32.

    Raises:
        UsageError: another type, or not a positive number that float32 has.
    """
    return number("scale", given, *FLOAT32)


def boolean(name: str, given: Any) -> bool:
    """True or False.

    Raises:
        UsageError: anything else, 1 and 0 too.
    """
    if not isinstance(given, bool):
        raise UsageError(f"{name}: expected True or False, got {shown(given)}")
    return given


def array(name: str, given: Any, kind: str, *shape: int | str) -> None:
    """Checks an array, or what JAX traces in place of one.

    Args:
        name: what the message calls it.
        given: what the caller gave.
        kind: "float", "int" or "bool", of any width.
        shape: numbers of each dimension; a letter for any number.

    Raises:
        UsageError: no array, or one of another kind or shape.
    """
    sizes: Any = getattr(given, "shape", None)
    dtype = str(getattr(given, "dtype", None))
    is_array = isinstance(sizes, tuple)
    fits = is_array and kind in dtype and len(sizes) == len(shape)
    if not fits or any(w != s for s, w in zip(sizes, shape, strict=True) if not isinstance(w, str)):
        got = f"{dtype} {list(sizes)}" if is_array else shown(given)
        wanted = ", ".join(map(str, shape))
        raise UsageError(f"{name}: expected an array of {kind}s [{wanted}], got {got}")


def query_heads(q: Any, num_kv_heads: int) -> None:
    """Checks that the kv heads serve the query heads [..., H, K] alike.

    Raises:
        UsageError: H is no multiple of them, or there are none.
    """
    if q.shape[-2] == 0 or num_kv_heads == 0 or q.shape[-2] % num_kv_heads:
        raise UsageError(
            f"q: expected query heads a multiple of the {num_kv_heads} kv heads, got {q.shape}"
        )


def instance(name: str, given: Any, kind: type, example: str) -> None:
    """Checks an object of a class.

    Raises:
        UsageError: it is of another, or is the class.
    """
    if not isinstance(given, kind):
        raise UsageError(f"{name}: expected {example}, got {_called(given)}")


def having(name: str, given: Any, members: Iterable[str], example: str) -> None:
    """Checks an object by what it has.

    Raises:
        UsageError: it is a class, or lacks something.
    """
    names = list(members)
    missing = [member for member in names if not hasattr(given, member)]
    if missing or isinstance(given, type):
        lacks = f", which lacks {', '.join(missing)}" if 0 < len(missing) < len(names) else ""
        raise UsageError(f"{name}: expected {example}, got {_called(given)}{lacks}")


def _called(given: Any) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else shown(given)
