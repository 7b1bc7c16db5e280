"""Policies of somebody else that answer with what they may not: refused before it is acted on."""

import dataclasses
import math
from typing import Any

import pytest

from tests.test_cache import BLOCK, LAYOUT, Texts
from wscope_jax import policies
from wscope_jax.errors import CapacityError, UsageError
from wscope_jax.layout import Region
from wscope_jax.placement import Occupancy
from wscope_jax.roofline import StepTiming


@dataclasses.dataclass(frozen=True)
class Answers(policies.WriteScope):
    """Answers what it is told to."""

    region: Any = Region.UNPINNED
    after: Any = "self"
    r: Any = 0.5

    def route(self, occupancy: Occupancy) -> Region | None:
        return self.region(occupancy) if callable(self.region) else self.region

    def observe(self, timing: StepTiming) -> Any:
        return self if self.after == "self" else self.after

    def cpu_share(self, num_placed: int) -> Any:
        return self.r


def begun(policy: policies.Policy, **options: Any) -> Texts:
    """A row of three blocks, ready to decode."""
    made = Texts(1, 320, policy=policy, **options)
    made.cache.begin_prompt(0, 3 * BLOCK)
    made.write(0, 3 * BLOCK)
    made.cache.end_prompt(0)
    return made


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"region": "unpinned"}, "Region.UNPINNED, Region.PINNED, None"),
        ({"region": Region.WINDOW}, "Region.UNPINNED, Region.PINNED, None"),
        ({"region": True}, "Region.UNPINNED, Region.PINNED, None"),
        ({"region": Region.PINNED, "uses_link": False}, "Region.UNPINNED, None"),
        ({"region": Region.UNPINNED, "uses_host": False}, "Region.PINNED, None"),
    ],
)
def test_a_region_that_is_none_or_not_used(changes: dict[str, Any], allowed: str) -> None:
    made = Texts(1, 320, policy=Answers(**changes))
    with pytest.raises(UsageError, match=f"policy: .* may answer here is {allowed}$"):
        made.cache.begin_prompt(0, 3 * BLOCK)
    assert not made.cache.holds(0)
    made.cache.close()


def decode(texts: Texts) -> None:
    """To the end of the row."""
    while texts.cache.length(0) < texts.cache.max_len:
        assert texts.error(0, texts.step()) < 1e-5


@pytest.fixture
def few() -> int:
    """Bytes of host memory for five blocks, and for the buffers that a prompt of so many passes through."""
    return 15 * BLOCK * LAYOUT.entry_bytes(4)


def test_a_region_that_is_full(few: int) -> None:
    """It would be asked for ever."""
    made = begun(Answers(region=Region.PINNED), host_memory=few)
    with pytest.raises(UsageError, match=r"policy: .* may answer here is None$"):
        decode(made)
    assert made.cache.row_tokens(0)[Region.PINNED] == 5 * BLOCK
    made.cache.close()


def test_an_answer_that_fits_goes_on_to_where_the_room_ends(few: int) -> None:
    made = begun(Answers(region=lambda found: found.fits(Region.PINNED)), host_memory=few)
    with pytest.raises(CapacityError, match="no room for another token of row 0"):
        decode(made)
    made.cache.close()


def test_what_is_no_policy_after_a_step() -> None:
    made = begun(Answers(after=None))
    with pytest.raises(UsageError, match="policy: expected an object such as"):
        decode(made)
    made.cache.close()


@pytest.mark.parametrize("r", [math.nan, 2.0, -1, None, "0.5"])
def test_a_share_that_is_none(r: Any) -> None:
    made = Texts(1, 320, policy=Answers(r=r))
    with pytest.raises(UsageError, match=r"policy\.cpu_share: expected a number 0 to 1"):
        made.cache.cpu_share()
    made.cache.close()
