"""Sizes and numbers, as every message and table shows them."""


def amount(num_bytes: int) -> str:
    """A size with four digits and a decimal unit, as the paper writes sizes."""
    for unit, power in (("TB", 4), ("GB", 3), ("MB", 2), ("KB", 1)):
        value = num_bytes / 1000**power
        if value >= 1:
            return f"{value:,.{max(0, 4 - len(str(int(value))))}f} {unit}"
    return f"{num_bytes} B"


def counted(number: int, thing: str) -> str:
    """A number of things: "1 token", "2,000 tokens"."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
