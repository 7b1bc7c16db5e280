"""Sizes as the command line takes them."""

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


def test_none_is_a_size_where_it_may_be() -> None:
    assert [units.size_or_none(text) for text in ("0", "0B", "1GB")] == [0, 0, 10**9]
    with pytest.raises(argparse.ArgumentTypeError):
        units.size_or_none("-1GB")
