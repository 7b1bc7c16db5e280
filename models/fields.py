"""Reads the keys of a JSON file, each with its allowed range; what is refused is named with its value."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wscope_jax.checkpoint import show
from wscope_jax.errors import CheckpointError


class Fields:
    """The keys of one object of a JSON file.

    Attributes:
        values: the parsed object.
        path: the file, for messages.
        prefix: what stands before a key in messages ("rope_scaling." in a nested object).
    """

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.values = values
        self.path = path
        self.prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands there; `default` where it is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def refuse(self, key: str, allowed: str) -> CheckpointError:
        """The error that says what `key` is and what it may be."""
        found = show(self.values[key]) if key in self.values else "missing"
        return CheckpointError(f"{self.path}: {self.prefix}{key} is {found}; allowed: {allowed}")

    def integer(self, key: str, default: int | None, low: int, high: int) -> int:
        """An integer in [low, high]; `default` where it is absent or null.

        Raises:
            CheckpointError: It is something else, or absent with no default.
        """
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None, low: float, high: float) -> float:
        """A number in [low, high]; `default` where it is absent or null.

        Raises:
            CheckpointError: It is something else, or absent with no default.
        """
        value = self.get(key, default)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not low <= value <= high  # false for NaN, and exact for integers of any size
            or not math.isfinite(value)
        ):
            raise self.refuse(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean; `default` where it is absent or null.

        Raises:
            CheckpointError: It is something else.
        """
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def choice(self, key: str, default: str, allowed: Sequence[str]) -> str:
        """One of `allowed`; `default` where it is absent or null.

        Raises:
            CheckpointError: It is something else.
        """
        value = self.get(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise self.refuse(key, ", ".join(allowed))
        return value

    def integers(self, key: str, low: int, high: int, default: Any = None) -> tuple[int, ...]:
        """An integer or a list of integers in [low, high]; `default` where absent, empty where null.

        Raises:
            CheckpointError: It is something else.
        """
        value = self.values.get(key, default)
        value = [] if value is None else value
        found = value if isinstance(value, list) else [value]
        for i in found:
            if not isinstance(i, int) or isinstance(i, bool) or not low <= i <= high:
                raise self.refuse(key, f"null, or integers from {low} to {high}")
        return tuple(dict.fromkeys(found))

    def absent(self, key: str) -> None:
        """Checks that a key that this package does not honour is absent, null, or empty.

        Raises:
            CheckpointError: It is not.
        """
        if self.values.get(key):
            raise self.refuse(key, "null (this package does not support it)")

    def child(self, key: str) -> "Fields | None":
        """The object under `key`; None where it is absent, null or empty.

        Raises:
            CheckpointError: It is no object.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(key, "null or an object")
        return Fields(value, self.path, f"{self.prefix}{key}.") if value else None
