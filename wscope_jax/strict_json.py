"""JSON that others wrote: one object, each key once, every number finite."""

import json
from collections import Counter
from typing import Any, NoReturn


def parse_object(text: str) -> dict[str, Any]:
    """The object that a text spells in JSON.

    Raises:
        ValueError: It is not JSON, nested too deeply, no object, or holds a key twice or a number that is not finite.
            What it says is to be put behind the name of the file.
    """
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply; flatten it") from None
    except _WrongError:
        raise
    except ValueError as error:  # a number of thousands of digits, too
        raise ValueError(f"not valid JSON: {error}; correct it there") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found {found!a:.80}")
    return found


class _WrongError(ValueError):
    """Valid JSON that is refused."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, num in Counter(key for key, _ in pairs).items() if num > 1)
        raise _WrongError(f"the key {twice!a:.80} is there twice; keep one of them")
    return found


def _refuse(word: str) -> NoReturn:
    raise _WrongError(f"holds {word}, which is no number here; write a finite one")
