"""Windows that keep whole blocks beyond D: the same numbers, and fewer blocks elsewhere."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.engines import ALL_POLICIES, CHECKPOINTS, engine, golden
from tests.test_golden import TOLERANCE
from wscope_jax import Engine, Sampling, policies
from wscope_jax.footprint import Footprint

WINDOW = 32


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v2"])
def roomy(request: pytest.FixtureRequest) -> Iterator[tuple[str, Engine]]:
    """An engine whose windows keep four blocks more of one row, or two of two rows."""
    family = request.param
    streams = engine(family, WINDOW).model.streams
    block = len(streams) * WINDOW * streams[0][0].layout.entry_bytes(4)
    how = {"dtype": "float32", "window": WINDOW, "threads": 2}
    with Engine.from_pretrained(CHECKPOINTS[family], spare_memory=4 * block, **how) as eng:
        yield family, eng


def test_forced_text_is_exact(roomy: tuple[str, Engine]) -> None:
    family, eng = roomy
    data = golden(family)
    for name in ("share_0.3", "gpu_only", "cpu_only"):
        logits = eng.score(data.long_ids, data.long_first, policy=ALL_POLICIES[name])
        assert np.abs(logits - data.long_logits).max() < TOLERANCE, name


def test_tokens_of_ragged_rows_are_those_of_a_small_window(roomy: tuple[str, Engine]) -> None:
    family, eng = roomy
    ids = golden(family).long_ids
    prompts = [ids[:400].tolist(), ids[400:450].tolist()]  # one gives blocks away, one keeps all
    settings = Sampling(max_new_tokens=70, ignore_eos=True)
    policy = policies.choose("write_scope", 0.5)
    found = eng.generate(prompts, settings, policy=policy)
    plain = engine(family, WINDOW).generate(prompts, settings, policy=policy)
    assert plain.tokens == found.tokens
    # 469 entries: blocks 0 to 11 are placed; 119: block 0.
    tokens = {name: region["tokens"] for name, region in found.regions.items()}
    assert tokens["window"] == 469 - 12 * 32 + 119 - 32
    assert tokens["unpinned"] + tokens["pinned"] == 13 * 32


def test_a_text_that_the_windows_hold_is_placed_nowhere(roomy: tuple[str, Engine]) -> None:
    family, eng = roomy
    ids = golden(family).long_ids[:150].tolist()
    result = eng.generate(
        [ids], Sampling(max_new_tokens=4, ignore_eos=True), policy=policies.GpuOnly()
    )
    tokens = {name: region["tokens"] for name, region in result.regions.items()}
    assert (tokens["window"], tokens["pinned"]) == (153, 0)


def test_less_than_a_block_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with Engine.from_pretrained(
        CHECKPOINTS["qwen3_moe"], dtype="float32", window=WINDOW, spare_memory=100, threads=2
    ) as eng:
        eng.generate([[1, 2, 3]], Sampling(max_new_tokens=2))
    assert "spare_memory: 100 B are less than a block of each of 1 rows" in caplog.text


def test_sizes() -> None:
    from tests.cases import CASES
    from wscope_jax import Stream

    stream = Stream(CASES["gqa8_d128"].layout)
    sizes = dict(
        streams=((stream,),) * 3,
        batch=2,
        max_len=1000,
        window=64,
        itemsize=2,
        uses_host=True,
        uses_link=True,
    )
    step = 2 * 3 * 64 * stream.layout.entry_bytes(2)
    plain, roomy = Footprint(**sizes), Footprint(**sizes, spare_memory=5 * step + step - 1)
    assert (plain.spare_blocks, roomy.spare_blocks) == (0, 5)
    assert roomy.device_bytes - plain.device_bytes == 5 * step
    assert plain.pool_bytes() - roomy.pool_bytes() == 5 * step
    assert roomy.row_blocks(stream) == 15 - 5
    whole = Footprint(**sizes, spare_memory=1000 * step)
    assert (whole.spare_blocks, whole.row_blocks(stream), whole.require_slots(0)) == (15, 0, 0)
    assert (
        Footprint(
            **{**sizes, "uses_host": False, "uses_link": False}, spare_memory=step
        ).spare_blocks
        == 0
    )
