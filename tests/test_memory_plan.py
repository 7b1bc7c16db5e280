"""The plan against itself, and against what a run allocates."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines import ALL_POLICIES, CHECKPOINTS, engine
from wscope_jax import Sampling, cli, policies
from wscope_jax.cache import InplaceKVCache
from wscope_jax.cli import start
from wscope_jax.cli.plan import as_dict
from wscope_jax.errors import CapacityError, UsageError
from wscope_jax.footprint import Footprint, PlannedStream
from wscope_jax.layout import PING_PONG_SLOTS, EntryLayout, Region, Stream
from wscope_jax.memory_plan import Plan, plan
from wscope_jax.placement import HOST_REGIONS
from wscope_jax.pools import COMMIT_BYTES
from wscope_jax.regions import Regions

GQA = Stream(EntryLayout(num_kv_heads=2, key_dim=32, value_dim=32))
HALF = EntryLayout(num_kv_heads=1, key_dim=64, value_dim=64, value_in_key=True, tokens_per_entry=4)
MIXED = (
    (PlannedStream(dataclasses.replace(HALF, tokens_per_entry=1), kind="sliding(20)"),),
    (
        PlannedStream(dataclasses.replace(HALF, tokens_per_entry=1), kind="sliding(20)"),
        Stream(HALF),
        PlannedStream(dataclasses.replace(HALF, key_dim=8, value_dim=8), kind="resident"),
    ),
)
BATCH, MAX_LEN, WINDOW = 2, 200, 32


def made(**changes: Any) -> Plan:
    how: dict[str, Any] = {
        "policy": policies.choose("write_scope", 0.5),
        "batch": BATCH,
        "max_len": MAX_LEN,
        "window": WINDOW,
        "itemsize": 4,
    }
    return plan(**{"streams": ((GQA,),) * 3, **how, **changes})


# --- the prediction and the run -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["share_0.5", "share_0.3", "gpu_only", "cpu_only", "resident"])
def test_a_run_allocates_what_was_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = ALL_POLICIES[name]
    eng = engine()
    predicted = made(streams=eng.model.streams, policy=policy)
    caches: list[InplaceKVCache] = []
    monkeypatch.setattr(eng, "policy", policy)
    monkeypatch.setattr(eng._caches, "host_memory", predicted.host_needed)
    make = eng._caches.make

    def kept(*args: Any, **kwargs: Any) -> InplaceKVCache:
        caches.append(make(*args, **kwargs))
        return caches[-1]

    monkeypatch.setattr(eng._caches, "make", kept)
    prompts = [list(range(1, 100))] * BATCH
    stream = eng.stream(prompts, Sampling(max_new_tokens=MAX_LEN - 99, ignore_eos=True))
    measured: dict[str, int] = {}
    for _ in stream:
        measured = measure(caches[0])
    assert len(stream.result.tokens[0]) == MAX_LEN - 99
    want = predicted.bytes
    assert measured["ping_pong"] == want["ping_pong"]
    assert measured["rings"] == want["window"] + want["spare"] - predicted.footprint.buffer_bytes()
    assert measured["max_slots"] == predicted.footprint.host_slots(None)
    one_block = sum(GQA.layout.entry_bytes(4) for _ in range(3)) * WINDOW
    for region in HOST_REGIONS:  # which block goes where depends on the order of rows a little
        assert abs(measured[region] - want[region]) <= (one_block if "share" in name else 0)
    assert measured["unpinned"] + measured["pinned"] == want["unpinned"] + want["pinned"]
    # Pages are committed a step ahead of need, in each region for itself.
    ahead = min(COMMIT_BYTES, predicted.footprint.pool_bytes())
    assert measured["committed"] <= predicted.footprint.pool_bytes() + ahead


def measure(cache: InplaceKVCache) -> dict[str, int]:
    """Bytes that a cache holds at this moment."""
    pools = {region: cache._pools.pool(region) for region in HOST_REGIONS}
    slot = {region: pool.block_bytes * pool.num_layers for region, pool in pools.items()}
    rings = [a for layer in cache.views.layers for ring in layer for a in ring if a is not None]
    return {
        **{
            region.value: cache.placement.slot_lists[region].num_used * slot[region]
            for region in HOST_REGIONS
        },
        "committed": sum(pool.committed * slot[region] for region, pool in pools.items()),
        "max_slots": cache.placement.max_slots,
        "rings": sum(a.nbytes for a in rings),
        "ping_pong": cache.views.shared.slots.nbytes,
    }


def test_buffers_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow stores: what waits on its way home is never more than the plan says, and gets there."""
    eng = engine()
    monkeypatch.setattr(eng, "policy", ALL_POLICIES["share_0.5"])
    predicted = made(streams=eng.model.streams, batch=1)
    staged: list[int] = []
    dispatch = Regions.dispatch

    def watch(self: Regions, *args: Any) -> Any:
        out = dispatch(self, *args)
        staged.append(self.dispatcher._queue.staged_bytes)
        return out

    with eng._caches.make(1, MAX_LEN) as cache:
        cache.set_fault(store_delay_ms=50)
        monkeypatch.setattr(Regions, "dispatch", watch)
        eng._programs.prefill(cache, 0, list(range(1, 100)) * 2)
    assert max(staged) <= predicted.footprint.buffer_bytes()
    assert predicted.footprint.buffer_bytes() == 2 * 6 * predicted.footprint.block_bytes(GQA)


@pytest.fixture
def wscope(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setattr(start, "prepare", lambda *_, **__: None)

    def run(*words: Any) -> tuple[int, Any]:
        capsys.readouterr()
        code = cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, json.loads(out) if code == 0 else err

    return run


def test_the_largest_context_runs_and_one_more_is_refused(wscope: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(1, 61)[None].repeat(2, axis=0))
    how = ["--model", CHECKPOINTS["qwen3_moe"], "--dtype", "float32", "--window", "32"]
    how += ["--cpu-share", "0.5", "--host-memory", "1MB", "--json"]
    code, found = wscope("plan", *how, "--batch", 2, "--max-model-len", 100)
    assert (code, found["fits"]) == (0, True)
    largest = found["largest_context"]
    assert largest % 32 == 31  # a block more is what does not fit
    for length, expected in ((largest, 0), (largest + 1, 3)):
        code, _ = wscope("plan", *how, "--batch", 2, "--max-model-len", length, "--check")
        assert code == expected
        words = ["--tokens", tmp_path / "ids.npy", "--max-new-tokens", length - 60, "--ignore-eos"]
        code, result = wscope("generate", *how, *words)
        assert code == expected, result
        if code == 0:
            assert [len(row) for row in result["tokens"]] == [length - 60] * 2
        else:
            assert f"--max-model-len to {largest}" in result


def test_the_largest_batch_runs_and_one_more_is_refused(wscope: Any, tmp_path: Path) -> None:
    how = ["--model", CHECKPOINTS["qwen3_moe"], "--dtype", "float32", "--window", "32"]
    how += ["--policy", "gpu_only", "--host-memory", "0.5MB", "--json"]
    _, found = wscope("plan", *how, "--max-model-len", 70)
    largest = found["largest_batch"]
    assert largest > 1
    for batch, expected in ((largest, 0), (largest + 1, 3)):
        ids = np.arange(1, 69)[None].repeat(batch, axis=0)
        np.save(tmp_path / "ids.npy", ids)
        code, _ = wscope("plan", *how, "--batch", batch, "--max-model-len", 70, "--check")
        assert code == expected
        words = ["--tokens", tmp_path / "ids.npy", "--prefill", 66, "--max-model-len", 70]
        code, result = wscope("score", *how, *words)
        assert code == expected, result
        if code:
            assert f"take {largest} of the {batch} sequences" in result


def test_a_cache_takes_as_many_blocks_as_fit() -> None:
    size = made().footprint
    for slots in (1, 5, 11):
        with InplaceKVCache(
            size.streams,
            policy=policies.choose("write_scope", 0.5),
            batch=BATCH,
            max_len=MAX_LEN,
            window=WINDOW,
            host_memory=size.host_bytes(slots),
        ) as cache:
            assert cache.placement.max_slots == slots
    with pytest.raises(CapacityError, match=f"take {size.host_bytes(1)} bytes"):
        InplaceKVCache(
            size.streams,
            policy=policies.choose("write_scope", 0.5),
            batch=BATCH,
            max_len=MAX_LEN,
            window=WINDOW,
            host_memory=size.host_bytes(1) - 1,
        )


def test_the_machine_is_the_limit_of_an_engine_without_a_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from wscope_jax import machine

    eng = engine()
    assert eng._caches.host_memory is None
    room = 10**6 + machine.LEAST_MARGIN
    memory = machine.Memory(room, room, room, room)
    monkeypatch.setattr(machine, "memory", lambda: memory)
    eng.generate([[1, 2, 3]], Sampling(max_new_tokens=2))
    with pytest.raises(CapacityError, match=r"the budget is 1\.000 MB") as caught:
        eng.generate([[1, 2, 3]], Sampling(max_new_tokens=2), max_model_len=10_000)
    assert "free memory on this machine or lower max_model_len to " in str(caught.value)
    assert "--" not in str(caught.value)  # a caller of the library has no command line


# --- the plan itself ------------------------------------------------------------------------------


def test_regions() -> None:
    got = made()
    block = WINDOW * GQA.layout.entry_bytes(4)  # of one layer
    assert got.bytes == {
        "unpinned": 3 * 6 * block,
        "pinned": 3 * 6 * block,
        "window": 3 * BATCH * block,
        "ping_pong": PING_PONG_SLOTS * 13 * block,  # all 400 tokens, rounded up
        "spare": 3 * BATCH * 48 * GQA.layout.entry_bytes(4) + 2 * 6 * block,
        "weights": 0,
    }
    assert got.bytes_per_token == 3 * GQA.layout.entry_bytes(4)
    assert (got.fits, got.short_by, got.why) == (True, 0, None)
    assert (got.largest_context, got.largest_batch) == (None, None)


def test_streams_of_several_kinds() -> None:
    got = made(streams=MIXED, max_len=1000)
    ring, entry, index = 64 * 4, 64 * 4, 8 * 4
    sliding, placed, resident = got.layers[1]
    assert sliding.bytes == {"unpinned": 0, "pinned": 0, "window": BATCH * 20 * ring, "spare": 0}
    # 1000 tokens are 250 entries: 7 blocks of 32 a row
    assert placed.bytes["unpinned"] + placed.bytes["pinned"] == BATCH * 7 * 32 * entry
    assert placed.bytes["window"] == BATCH * 32 * entry
    assert placed.bytes["spare"] == BATCH * 48 * entry
    assert resident.bytes["unpinned"] + resident.bytes["pinned"] == 0
    assert resident.bytes["window"] + resident.bytes["spare"] == BATCH * 256 * index
    assert got.bytes_per_token == (entry + index) // 4
    assert got.bytes["ping_pong"] == PING_PONG_SLOTS * 512 * entry
    told = as_dict(got)
    assert [len(layer["streams"]) for layer in told["layers"]] == [1, 3]
    for region in ("unpinned", "pinned", "window"):
        assert sum(layer["bytes"][region] for layer in told["layers"]) == told["bytes"][region]


@pytest.mark.parametrize("kind", ["", "sliding", "sliding(0)", "sliding(-1)", "moving", "placed "])
def test_kinds_that_do_not_exist(kind: str) -> None:
    with pytest.raises(ValueError, match="kind"):
        PlannedStream(HALF, kind=kind)


def test_resident_keeps_everything_in_its_window() -> None:
    got = made(policy=policies.Resident())
    entry = 3 * GQA.layout.entry_bytes(4)
    assert got.bytes == {
        "unpinned": 0,
        "pinned": 0,
        "window": BATCH * 32 * entry,
        "ping_pong": 0,
        "spare": BATCH * (224 - 32) * entry,
        "weights": 0,
    }
    assert got.host_needed == 0


def test_gpu_budget() -> None:
    full = made(gpu_memory=1 << 40)
    buffers = full.footprint.buffer_bytes()
    assert full.bytes["spare"] == made().bytes["spare"] + buffers  # staging on the GPU, too
    tight = made(gpu_memory=10 << 30, weights=(10 << 30) - (640 << 20))
    assert tight.margin == (10 << 30) // 16
    assert set(tight.shortages) == {"gpu"}
    assert tight.why is not None
    assert tight.why.startswith("GPU memory: weights, window")
    short = tight.short_by
    for budget, fits in ((short, True), (short - 1, False)):  # its margin grows with it
        assert dataclasses.replace(tight, gpu_memory=(10 << 30) + budget).fits == fits
    assert (tight.largest_context, tight.largest_batch) == (0, 0)
    with pytest.raises(CapacityError, match="no length and no batch fits, raise gpu_memory"):
        tight.require_fit()


def test_a_machine_without_a_gpu_holds_all_in_one_memory() -> None:
    size = made().footprint
    needed = 1000 + size.host_bytes() + size.device_bytes
    how = {"weights": 1000, "host_memory": size.host_bytes()}
    assert made(**how, machine_memory=needed).fits
    short = made(**how, machine_memory=needed - 1)
    assert short.shortages == {"machine": 1}
    with pytest.raises(CapacityError, match="this machine's memory: the placed blocks, ") as caught:
        short.require_fit()
    assert "free memory on this machine or lower max_model_len to" in str(caught.value)


@pytest.mark.parametrize("spare", [0, 10**5, 3 * 10**5, 10**6, 10**7])
@pytest.mark.parametrize("host", [10**6, 3 * 10**6])
def test_the_largest_batch_is_the_largest_that_fits(spare: int, host: int) -> None:
    how = {"spare_memory": spare, "host_memory": host, "gpu_memory": (512 << 20) + 8 * 10**6}
    fits = [batch for batch in range(1, 300) if made(**how, batch=batch).fits]
    for batch in (1, 3, 7):
        assert made(**how, batch=batch).largest_batch == max(fits, default=0)


def test_spare_memory_that_does_not_fit_is_said_to_be_lowered() -> None:
    tight = made(spare_memory=10**7, gpu_memory=(512 << 20) + 15 * 10**5)
    blocks, step = tight.largest_spare, tight.footprint.spare_block_bytes
    assert 0 < blocks < tight.footprint.spare_blocks
    megabytes = -(-blocks * step // 10**6)
    with pytest.raises(CapacityError, match=f"lower spare_memory to {megabytes}MB"):
        tight.require_fit()
    how = {"gpu_memory": tight.gpu_memory}
    assert made(**how, spare_memory=blocks * step).fits
    assert not made(**how, spare_memory=(blocks + 1) * step).fits


def test_both_budgets_may_be_short() -> None:
    got = made(host_memory=1, gpu_memory=1)
    assert set(got.shortages) == {"host", "gpu"}
    assert got.short_by == got.host_needed - 1 + got.device_needed - 1


@pytest.mark.parametrize(
    "changes",
    [{"window": 48}, {"batch": 0}, {"max_len": 0}, {"max_len": 1 << 31}, {"batch": 1 << 31}],
    ids=str,
)
def test_impossible_sizes(changes: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        made(**changes)


@settings(deadline=None)
@given(
    share=st.sampled_from([0.0, 0.3, 0.489, 1.0]),
    name=st.sampled_from(["write_scope", "gpu_only", "cpu_only", "resident"]),
    batch=st.integers(1, 70),
    max_len=st.integers(1, 5000),
    window=st.sampled_from([32, 256, 512]),
    streams=st.sampled_from([((GQA,),) * 3, ((GQA,), MIXED[1]), MIXED]),
    host=st.integers(0, 1 << 28) | st.none(),
    gpu=st.integers(1 << 29, 1 << 31) | st.none(),
)
def test_the_largest_fit_and_no_larger(
    share: float,
    name: str,
    batch: int,
    max_len: int,
    window: int,
    streams: Any,
    host: int | None,
    gpu: int | None,
) -> None:
    policy = policies.choose(name, share if name == "write_scope" else None)
    sizes = {"batch": batch, "max_len": max_len}
    how = {"window": window, "streams": streams, "host_memory": host, "gpu_memory": gpu}
    got = plan(policy=policy, **sizes, **how)
    assert got.fits == (got.short_by == 0) == (got.why is None)
    for size, largest in (("max_len", got.largest_context), ("batch", got.largest_batch)):
        if largest is None:
            assert got.fits
            continue
        assert got.fits == (sizes[size] <= largest)
        if largest:
            assert plan(policy=policy, **{**sizes, size: largest}, **how).fits
        assert not plan(policy=policy, **{**sizes, size: largest + 1}, **how).fits
    # Blocks and the two host regions are the same bytes, whatever the share.
    assert got.bytes["unpinned"] + got.bytes["pinned"] == got.footprint.pool_bytes()


@given(
    batch=st.integers(1, 40),
    max_len=st.integers(1, 3000),
    slots=st.integers(0, 200),
    extra=st.integers(0, 1000),
)
def test_slots_are_as_many_as_fit(batch: int, max_len: int, slots: int, extra: int) -> None:
    size = Footprint(
        streams=((GQA,),) * 3,
        batch=batch,
        max_len=max_len,
        window=32,
        itemsize=2,
        uses_host=True,
        uses_link=True,
    )
    needed = batch * (max_len // 32)
    assert size.host_slots(None) == needed
    got = size.host_slots(size.host_bytes(slots) + extra)
    assert min(slots, needed) <= got <= needed
    assert size.host_bytes(got) <= size.host_bytes(slots) + extra
    if got < needed:
        assert size.host_bytes(got + 1) > size.host_bytes(slots) + extra


def test_the_policy_splits_as_its_routing_does() -> None:
    """The plan's division of the host regions is where the policy's own routing ends, block by block."""
    from wscope_jax.placement import Placement

    for share in (0.0, 0.1, 0.3, 0.489, 0.5, 0.601, 0.75, 1.0):
        policy = policies.choose("write_scope", share)
        placement = Placement(1, WINDOW, 1000)
        placement.begin(0)
        placement.append(0, 100 * WINDOW)
        for _ in range(100):
            region = policy.route(placement.occupancy(0, True, True))
            assert region is not None
            placement.place(0, region)
        got = made(policy=policy, batch=1, max_len=100 * WINDOW)
        block = 3 * got.footprint.block_bytes(GQA)
        assert placement.num_blocks(0, Region.UNPINNED) * block == got.bytes["unpinned"]
