"""Sizes in bytes, as a command line takes them."""

import argparse
import fractions
import re
from typing import Final

_UNITS: Final = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGT]i?B|B)")


def size(text: str) -> int:
    """Bytes from `32GiB`, `100GB`, `1.5TiB`, `512MiB`: a number and its unit, nothing between.

    Raises:
        argparse.ArgumentTypeError: If the text has another form, or is no positive whole number.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; give a number and a unit, such as 32GiB, 100GB or 512MiB"
        )
    number = fractions.Fraction(match[1]) * _UNITS[match[2]]
    if number.denominator != 1 or number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number of bytes")
    return int(number)


def size_or_none(text: str) -> int:
    """Bytes as `size` takes them, or 0.

    Raises:
        argparse.ArgumentTypeError: See `size`.
    """
    return 0 if text in ("0", "0B") else size(text)
