"""`wscope inspect`: whole checkpoints and broken ones, without a byte of their weights."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tests.engines import CHECKPOINTS
from tests.tiny import make_config, write_checkpoint
from wscope_jax import cli
from wscope_jax.checkpoint import Checkpoint
from wscope_jax.cli import start

Run = Callable[[Path], tuple[int, Any, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr(start, "prepare", lambda *_, **__: None)

    def refuse(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(os, "preadv", refuse)
    monkeypatch.setattr(Checkpoint, "load", refuse)

    def in_process(folder: Path) -> tuple[int, Any, str]:
        code = cli.main(["inspect", "--model", str(folder), "--json"])
        out, err = capsys.readouterr()
        assert out.count("\n") <= 1
        return code, json.loads(out) if out else None, err

    return in_process


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_whole(run: Run, family: str) -> None:
    code, got, err = run(CHECKPOINTS[family])
    assert (code, err) == (0, "")
    assert got["problem"] is None
    assert got["missing"] == got["unexpected"] == got["misshapen"] == got["unreadable"] == []
    assert [shard["file"] for shard in got["shards"]] == ["model.safetensors"]
    assert got["dtypes"] == {
        "BF16": {key: got[key] for key in ("tensors", "parameters", "bytes")},
    }
    assert got["bytes"] == 2 * got["parameters"]
    assert got["config"]["model_type"] == family


def test_shards_and_fused_experts(run: Run, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=3, fused=True, dtype="float32")
    code, got, _ = run(folder)
    assert code == 0
    assert len(got["shards"]) == 3
    assert list(got["dtypes"]) == ["F32"]
    assert sum(shard["bytes"] for shard in got["shards"]) == got["bytes"] == 4 * got["parameters"]


def test_tied_embeddings(run: Run, tmp_path: Path) -> None:
    assert run(write_checkpoint(tmp_path / "m", tie_word_embeddings=True))[0] == 0
    folder = write_checkpoint(tmp_path / "n")
    (folder / "config.json").write_text(
        json.dumps(make_config("qwen3_moe", tie_word_embeddings=True))
    )
    assert run(folder)[0] == 0  # a head that is stored counts


def test_what_is_wrong_is_listed(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    experts = [name for name in tensors if ".1.mlp.experts." in name]
    for name in experts:
        del tensors[name]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].copy()
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype("int8")
    tensors["model.extra"] = tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    code, got, err = run(folder)
    assert code == 4
    assert sorted(got["missing"]) == sorted(experts)
    assert got["unexpected"] == ["model.extra"]
    assert got["misshapen"] == ["model.norm.weight [31], expected [32]"]
    assert got["unreadable"] == ["lm_head.weight (I8)"]
    assert "24 missing tensors, 1 unexpected tensors" in got["problem"]
    assert err == f"wscope: error: {got['problem']}\n"
    assert cli.main(["inspect", "--model", str(folder)]) == 4
    out = capsys.readouterr().out
    assert "missing tensors: 24" in out
    assert "... and 4 more" in out


def test_a_tokenizer_that_is_no_file_of_the_folder(run: Run, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    assert run(folder)[1]["tokenizer"] is False
    (tmp_path / "tokenizer.json").write_text("{}")
    (folder / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    code, got, err = run(folder)
    assert code == 4
    assert got["tokenizer"] is False
    assert "links to a file outside" in got["problem"]
    assert err == f"wscope: error: {got['problem']}\n"


def test_layers_far_beyond_what_is_stored(run: Run, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    config = make_config("qwen3_moe", num_hidden_layers=1024, num_experts=512)
    (folder / "config.json").write_text(json.dumps(config))
    code, got, _ = run(folder)
    assert code == 4
    assert "num_hidden_layers in config.json is 1024" in got["problem"]


def test_unknown_family(run: Run, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    code, got, err = run(folder)
    assert code == 4
    assert got["tensors"] > 0
    assert "llama" in got["problem"]
    assert err.count("\n") == 1


def test_broken_files(run: Run, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=2)
    next(folder.glob("*-00002-*")).unlink()
    code, got, err = run(folder)
    assert (code, got) == (4, None)
    assert "model-00002-of-00002.safetensors" in err
    assert run(tmp_path / "none")[0] == 4


def test_table(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "--model", str(CHECKPOINTS["mixtral"])]) == 0
    out = capsys.readouterr().out
    for text in ("model.safetensors", "BF16", "202,688", "num_experts: 8", "whole: every tensor"):
        assert text in out
