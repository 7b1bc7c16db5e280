"""Sizes in bytes, as a command line takes them and as tables show them."""

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


def amount(num_bytes: int) -> str:
    """A size with four digits and a decimal unit, as the paper writes sizes."""
    for unit, power in (("TB", 4), ("GB", 3), ("MB", 2), ("KB", 1)):
        value = num_bytes / 1000**power
        if value >= 1:
            return f"{value:,.{max(0, 4 - len(str(int(value))))}f} {unit}"
    return f"{num_bytes} B"


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
