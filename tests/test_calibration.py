"""Calibration: costs that make sense with little memory, and a link that is busy and then let go."""

import threading
from typing import Any

import pytest

from wscope_jax import _ffi, calibration, machine
from wscope_jax.dispatcher import start_workers
from wscope_jax.layout import EntryLayout

LAYOUT = EntryLayout(num_kv_heads=2, key_dim=64, value_dim=64)


class Pool:
    """A pool of `_ffi` as far as calibration knows it: there is no device here to pin for."""

    opened: list["Pool"]

    def __init__(self, *sizes: int) -> None:
        self.is_closed = False
        Pool.opened.append(self)

    def commit(self, count: int) -> None:
        if count > 4:
            raise MemoryError("no page may be pinned")

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Copies that were made over a link that is not there."""
    made: list[tuple[Any, ...]] = []
    Pool.opened = []
    monkeypatch.setattr(_ffi, "Pool", Pool)
    monkeypatch.setattr(_ffi, "measure_streams", lambda *args: made.append(args))
    return made


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "wscope-calibration"]


@pytest.mark.parametrize("left", [0, 1 << 30, 64 << 30])
def test_costs_make_sense_however_little_memory_is_left(
    left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_workers(2)
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(64 << 30, left, None, left))
    sizes: list[int] = []
    time_copy = _ffi.time_copy
    monkeypatch.setattr(_ffi, "time_copy", lambda size: sizes.append(size) or time_copy(size))
    found = calibration.measure(LAYOUT, num_q_heads=8, window=256, dtype="bfloat16")
    assert 1e-12 < found.cpu_s_per_entry < 1e-3
    assert 1e-12 < found.link_s_per_entry < 1e-3
    assert sizes == [min(64 << 20, max(16 << 20, (left - machine.margin_of(left)) // 8) // 2)]


def test_a_line_through_two_jobs() -> None:
    per_entry, fixed = calibration.line(1000, 1.1e-3, 8000, 8.1e-3)
    assert (per_entry, fixed) == pytest.approx((1e-6, 1e-4))


@pytest.mark.parametrize("few_s", [1e-9, 3e-3, 20e-3])  # a disturbed short job
def test_noise_is_no_fixed_cost(few_s: float) -> None:
    per_entry, fixed = calibration.line(1000, few_s, 8000, 8e-3)
    assert 0 <= fixed <= 0.25e-3
    assert 0.95e-6 < per_entry <= 1e-6


def test_the_link_is_busy_while_the_kernel_runs(copies: list[Any]) -> None:
    with calibration._busy_link(0, 64 << 20):
        while not copies:
            pass
        assert threads()
    assert not threads()
    assert [pool.is_closed for pool in Pool.opened] == [True]


def test_without_a_device_nothing_is_copied(copies: list[Any]) -> None:
    with calibration._busy_link(None, 64 << 20):
        assert not threads()
    assert not Pool.opened


def test_where_nothing_may_be_pinned_the_link_stays_idle(copies: list[Any]) -> None:
    with calibration._busy_link(0, 1 << 30):
        assert not threads()
    assert [pool.is_closed for pool in Pool.opened] == [True]


def test_an_interrupted_start_leaves_no_thread(
    copies: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), calibration._busy_link(0, 64 << 20):
        pass
    assert not threads()
    assert [pool.is_closed for pool in Pool.opened] == [True]


def test_a_copy_that_fails_is_told_and_costs_nothing(
    copies: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()

    def fail(*_: Any) -> None:
        failed.set()
        raise RuntimeError("CUDA: copy: unknown error")

    monkeypatch.setattr(_ffi, "measure_streams", fail)
    with calibration._busy_link(0, 64 << 20):
        failed.wait()
    assert "the CPU will seem too fast: CUDA: copy" in caplog.text
