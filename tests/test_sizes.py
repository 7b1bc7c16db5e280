"""How sizes are shown."""

import pytest

from wscope_jax.sizes import amount


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
    assert amount(num_bytes) == text
