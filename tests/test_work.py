"""Which side sets the pace of a run, as told by what its steps took."""

from typing import Any

import pytest

from wscope_jax.roofline import StepTiming
from wscope_jax.work import Work

MS = 1_000_000


def timing(**times: Any) -> StepTiming:
    nothing = {"cpu_ns": 0, "link_ns": 0, "wait_cpu_ns": 0, "wait_link_ns": 0}
    return StepTiming(**{**nothing, **times}, host_entries=64, streamed_entries=32, jobs=2)


def test_sums() -> None:
    work = Work().after(timing(cpu_ns=3 * MS)).after(timing(cpu_ns=1 * MS, link_ns=2 * MS))
    assert (work.steps, work.host_entries, work.streamed_entries) == (2, 128, 64)
    assert work.cpu_s == pytest.approx(4e-3)
    assert work.link_s == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("times", "limit"),
    [
        ({"cpu_ns": 60, "wait_cpu_ns": 30, "link_ns": 90}, "cpu"),
        ({"cpu_ns": 20, "wait_link_ns": 30, "link_ns": 70}, "link"),
        ({"link_ns": 95}, "link"),  # no job that could have waited
        ({"cpu_ns": 20, "link_ns": 30, "wait_cpu_ns": 4}, "device"),
        ({}, "device"),
    ],
)
def test_limit(times: dict[str, int], limit: str) -> None:
    work = Work().after(timing(**{name: ms * MS for name, ms in times.items()}))
    assert work.limit(0.1) == limit


def test_the_link_is_not_blamed_for_the_device() -> None:
    ms = {"cpu_ns": 20 * MS, "wait_link_ns": 30 * MS, "link_ns": 90 * MS}
    nothing_streamed = StepTiming(**ms, wait_cpu_ns=0, host_entries=64, streamed_entries=0, jobs=2)
    assert Work().after(nothing_streamed).limit(0.1) == "device"
    short = timing(**{**ms, "link_ns": 1 * MS})
    assert Work().after(short).limit(0.1) == "device"


def test_no_time_is_nobodys() -> None:
    assert Work().limit(0.0) == "device"
