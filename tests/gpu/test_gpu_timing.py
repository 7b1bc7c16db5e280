"""On a GPU, whatever comes late: slow stores and workers, plans and freed blocks that are overwritten. Still exact."""

import contextlib
import resource
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from tests.engines import ALL_POLICIES, CHECKPOINTS
from wscope_jax import Engine, InplaceKVCache, Sampling, machine
from wscope_jax.dispatcher import Dispatcher
from wscope_jax.placement import HOST_REGIONS
from wscope_jax.step_plan import StepPlan

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-4  # absolute, float32
POLICY = ALL_POLICIES["share_0.5"]
NUM_STEPS = 2000


def make(platform: str) -> Engine:
    with jax.default_device(jax.devices(platform)[0]):
        return Engine.from_pretrained(
            CHECKPOINTS["qwen3_moe"], dtype="float32", window=32, policy=POLICY
        )


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[Engine]:
    with make("cuda") as eng:
        yield eng


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[Engine]:
    with make("cpu") as eng, jax.default_device(jax.devices("cpu")[0]):
        yield eng


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cache made meanwhile: late stores, slow workers, scribbled plans, NaNs in what was freed."""
    rng = np.random.default_rng(3)
    step, push, release = InplaceKVCache.step, Dispatcher._push, InplaceKVCache.release

    def slow_step(self: InplaceKVCache, fn: Any) -> Any:
        self.set_fault(store_delay_ms=250, job_delay_ms=int(rng.choice([0, 0, 0, 1, 4])))
        return step(self, fn)

    def scribbled(self: Dispatcher, plan: StepPlan) -> None:
        copy = StepPlan(**{name: array.copy() for name, array in vars(plan).items()})
        push(self, copy)
        for array in vars(copy).values():
            array.fill(0x7F7F7F7F)

    def poisoned(self: InplaceKVCache, row: int) -> None:
        freed = [(region, self.placement.table(row, region)) for region in HOST_REGIONS]
        release(self, row)
        for region, slots in freed:
            for layer in range(self.num_layers):
                for slot in slots:
                    self._pools.pool(region).view(layer, slot).fill(0xFF)

    monkeypatch.setattr(InplaceKVCache, "step", slow_step)
    monkeypatch.setattr(InplaceKVCache, "release", poisoned)
    monkeypatch.setattr(Dispatcher, "_push", scribbled)


def reference(ids: Any, prefill: int) -> Any:
    """Logits of the whole text at once, by the prefill path of the CPU."""
    with jax.default_device(jax.devices("cpu")[0]), make("cpu") as eng:
        return eng.logits(ids)[:, prefill - 1 :]


@pytest.mark.usefixtures("hostile")
def test_long_forced_texts(on_gpu: Engine) -> None:
    rng = np.random.default_rng(7)
    ids, prefill = rng.integers(0, 128, (2, 100 + NUM_STEPS)), 100
    got = on_gpu.score(ids, prefill)
    error = np.abs(got - reference(ids, prefill)).max()
    assert got.shape[1] == NUM_STEPS + 1
    assert error < TOLERANCE


@pytest.mark.usefixtures("hostile")
def test_rows_end_and_others_take_their_slots(on_gpu: Engine, on_cpu: Engine) -> None:
    rng = np.random.default_rng(9)
    prompts = [rng.integers(0, 128, size).tolist() for size in (400, 30, 250, 90, 333)]
    samplings = [Sampling(max_new_tokens=new, ignore_eos=True) for new in (20, 500, 60, 400, 5)]
    got = on_gpu.generate(prompts, samplings)
    with jax.default_device(jax.devices("cpu")[0]):
        want = on_cpu.generate(prompts, samplings)
    assert got.tokens == want.tokens
    assert got.compiles["stall"] == 0


def test_memory_is_flat(on_gpu: Engine) -> None:
    prompts = [list(range(1, 80)), list(range(5, 40))]
    how = Sampling(max_new_tokens=5100, ignore_eos=True)
    device, seen = jax.devices("cuda")[0], []
    with contextlib.closing(on_gpu.stream(prompts, how)) as stream:
        for number, _ in enumerate(stream):
            if number in (2 * 1000, 2 * 5000):
                stats = device.memory_stats()
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
                seen.append((stats["bytes_in_use"], machine.gpus()[0].free, peak))
        placed = stream._cache.entry_bytes * stream._cache.num_layers * 2 * 4000
    (used, free, peak), (used_later, free_later, peak_later) = seen
    assert used_later - used < 1 << 20
    assert free - free_later < 64 << 20
    assert peak_later - peak < placed + (128 << 20)  # a pool grows ahead of need
