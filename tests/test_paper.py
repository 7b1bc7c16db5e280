"""Numbers of the paper, reproduced by what the program prints."""

import json

import pytest

from wscope_jax import cli
from wscope_jax.cli import start

# 32K tokens x 32 sequences, bfloat16. Decimal units: GB in both host regions, MB in the window and in PING-PONG.
MEMORY = {
    "deepseek-v2-lite": (0.489, 32.61, 254.8, 37.7),
    "qwen3-30b-a3b": (0.601, 103.08, 805.3, 67.1),
    "mixtral-8x7b": (0.75, 137.44, 1073.7, 134.2),
}
# GB of either host region at the share above.
SPLIT = {
    "deepseek-v2-lite": (15.95, 16.66),
    "qwen3-30b-a3b": (61.95, 41.13),
    "mixtral-8x7b": (103.08, 34.36),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_table(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "prepare", lambda *_, **__: None)
    share, total_gb, window_mb, ping_pong_mb = MEMORY[name]
    words = f"plan --model {name} --batch 32 --max-model-len 32768 --cpu-share {share} --json"
    assert cli.main(words.split()) == 0
    sizes = json.loads(capsys.readouterr().out)["bytes"]
    host = sizes["unpinned"] + sizes["pinned"]
    assert host / 1e9 == pytest.approx(total_gb, abs=0.005)
    assert sizes["window"] / 1e6 == pytest.approx(window_mb, abs=0.05)
    assert sizes["ping_pong"] / 1e6 == pytest.approx(ping_pong_mb, abs=0.05)
    # The share that the paper prints is rounded to three digits: 0.0005 of the total.
    for region, gb in zip(("unpinned", "pinned"), SPLIT[name], strict=True):
        assert sizes[region] / 1e9 == pytest.approx(gb, abs=0.0005 * total_gb + 0.005)
