"""`--random-weights`: a configuration without a checkpoint, run at its full size."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines import CHECKPOINTS
from tests.mistakes import commands
from tests.mistakes.commands import refused, wscope
from wscope_jax import devices, models

FEW = ["--window", 32, "--dtype", "float32", "--max-new-tokens", 3, "--json"]


@pytest.fixture(autouse=True)
def _command(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with commands.in_process(monkeypatch):
        yield


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config.json, and nothing else."""
    shutil.copy(CHECKPOINTS["qwen3_moe"] / "config.json", tmp_path / "small.json")
    return tmp_path / "small.json"


def answer(*words: object) -> dict[str, Any]:
    done = wscope("generate", *words, *FEW)
    assert (done.code, done.err) == (0, ""), done
    values: dict[str, Any] = json.loads(done.out)
    return values


def test_a_seed_decides_weights_and_prompts(config: Path) -> None:
    words = ["--random-weights", config, "--prompt-length", 70, "--prompt-length", 5]
    first, again, other = (answer(*words, "--seed", seed) for seed in (1, 1, 2**40))
    assert first["tokens"] == again["tokens"] != other["tokens"]
    assert first["text"] is None
    assert [len(row) for row in first["tokens"]] == [3, 3]
    held = first["regions"]
    assert held["unpinned"]["tokens"] + held["pinned"]["tokens"] == 64


def test_spare_memory_keeps_blocks_in_the_windows(config: Path) -> None:
    words = ["--random-weights", config, "--prompt-length", 70, "--seed", 1]
    usual, roomy = answer(*words), answer(*words, "--spare-memory", "1GB")
    assert usual["tokens"] == roomy["tokens"]
    assert [usual["regions"]["window"]["tokens"], roomy["regions"]["window"]["tokens"]] == [8, 72]


def test_weights_are_those_of_the_library(config: Path, tmp_path: Path) -> None:
    """The folder stands for its file; scored are the logits of a model that was drawn here."""
    np.save(tmp_path / "ids.npy", ids := np.arange(40)[None])
    config.rename(config.with_name("config.json"))
    words = [
        "--tokens",
        tmp_path / "ids.npy",
        "--prefill",
        33,
        "--logits-out",
        tmp_path / "out.npy",
    ]
    done = wscope("score", "--random-weights", tmp_path, *words, "--seed", 7, *FEW[:4])
    assert done.code == 0, done
    from wscope_jax import Engine

    model = models.random(models.read_config(tmp_path), 7, "float32")
    with Engine(model, window=32) as engine:
        expected = engine.logits(ids)[:, 32:]
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-4)


def test_refusals(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "random", lambda *_: pytest.fail("weights were drawn"))
    some, length = ["generate", "--random-weights"], ["--prompt-length", 9]
    refused(wscope(*some, "gpt-2", *length), 4, "gpt-2", "mixtral-8x7b, qwen3-30b-a3b")
    refused(wscope(*some, "deepseek-v4-flash", *length), 4, "deepseek_v4", "not supported")
    refused(wscope(*some, tmp_path, *length), 4, "no config.json")
    refused(wscope(*some, config, "--prompt", "x"), 2, "no tokenizer", "--prompt-length")
    refused(wscope(*some, config, *length, "--prompt", "x"), 2, "--prompt and --prompt-length")
    refused(wscope(*some, config, *length, "--chat"), 2, "--chat and --prompt-length")
    refused(wscope(*some, config, *length, "--check-tensors"), 2, "--check-tensors")
    refused(wscope(*some, config, *length, "--seed", -1), 2, "--seed")
    refused(wscope(*some, config, "--prompt-length", 10**9), 2, "--prompt-length", "1,000,000,000")
    monkeypatch.setattr(devices, "memory_left", lambda: 10**9)
    refused(wscope(*some, "qwen3-30b-a3b", *length), 3, "GPU memory: weights", "short by")
