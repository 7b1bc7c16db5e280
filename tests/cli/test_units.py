"""Sizes, read and written."""

import argparse

import pytest

from wscope_jax.cli import units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("32GiB", 32 << 30),
        ("100GB", 100 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5TiB", 3 << 39),
        ("0.1KB", 100),
        ("7B", 7),
    ],
)
def test_size(text: str, expected: int) -> None:
    assert units.size(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "32", "GiB", "32 GiB", "32gib", "-1GiB", "0GiB", "0.5B", "1e3MB", "nanGB", "1.GB", "٣GB"],
)
def test_size_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        units.size(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.000 KB"),
        (37_748_736, "37.75 MB"),
        (254_803_968, "254.8 MB"),
        (32_614_907_904, "32.61 GB"),
        (5_000_000_000_000_000, "5,000 TB"),
    ],
)
def test_amount(num_bytes: int, text: str) -> None:
    assert units.amount(num_bytes) == text
