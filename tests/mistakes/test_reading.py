"""Broken checkpoints as a user meets them, and reads that fail at the N-th call.

What each fault of a checkpoint is told as, in detail, is tested with the reader of checkpoints.
"""

import builtins
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.mistakes.commands import check, refused, wscope
from tests.mistakes.test_resources import Failing

Change = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write_checkpoint(tmp_path / "c", shards=2, num_hidden_layers=1, num_experts=2)


def config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        made = tiny.make_config(
            "qwen3_moe", **{"num_hidden_layers": 1, "num_experts": 2, **changes}
        )
        (folder / "config.json").write_text(json.dumps(made))

    return change


def write(name: str, content: str | bytes) -> Change:
    def change(folder: Path) -> None:
        raw = content if isinstance(content, bytes) else content.encode()
        (folder / name).write_bytes(raw)

    return change


def remove(*names: str) -> Change:
    return lambda folder: [(folder / name).unlink() for name in names]


def loop(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")


def only_pickle(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


SHARD = "model-00001-of-00002.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize(
    ("change", "about"),
    [
        pytest.param(lambda f: shutil.rmtree(f), ["no such directory"], id="missing"),
        pytest.param(lambda f: (shutil.rmtree(f), f.touch()), ["not a directory"], id="a file"),
        pytest.param(remove("config.json"), ["no config.json"], id="no config"),
        pytest.param(loop, ["config.json"], id="a link to itself"),
        pytest.param(write("config.json", "{"), ["config.json", "JSON"], id="not JSON"),
        pytest.param(write("config.json", "[" * 10**5), ["config.json"], id="deep"),
        pytest.param(write("config.json", b" " * (17 << 20)), ["16 MiB"], id="large"),
        pytest.param(write("config.json", '{"a":1,"a":2}'), ["twice"], id="a key twice"),
        pytest.param(config(hidden_size="x"), ["hidden_size"], id="wrong type"),
        pytest.param(config(num_key_value_heads=3), ["num_key_value_heads"], id="heads"),
        pytest.param(config(vocab_size=2**70), ["vocab_size"], id="huge"),
        pytest.param(
            config(rope_parameters={"rope_type": "default", "rope_theta": -1}),
            ["rope_theta"],
            id="theta",
        ),
        pytest.param(config(model_type="x"), ["qwen3_moe", "mixtral"], id="unknown"),
        pytest.param(
            config(model_type="x", auto_map={"AutoModel": "m.M"}),
            ["never executed"],
            id="auto_map",
        ),
        pytest.param(only_pickle, ["pickle", "safetensors"], id="pickles"),
        pytest.param(remove(SHARD), [SHARD, "missing"], id="a shard"),
        pytest.param(write(SHARD, POINTER), [SHARD, "Git LFS"], id="a pointer"),
        pytest.param(write(SHARD, b"\xff" * 100), [SHARD], id="no header"),
        pytest.param(config(intermediate_size=48, num_experts=3), ["missing"], id="tensors"),
        pytest.param(write("tokenizer.json", "{}"), ["tokenizer.json"], id="tokenizer"),
        pytest.param(config(eos_token_id=128), ["eos_token_id"], id="eos"),
    ],
)
def test_broken_checkpoints_are_refused(
    folder: Path, tmp_path: Path, change: Change, about: list[str]
) -> None:
    np.save(tmp_path / "ids.npy", np.arange(3, dtype=np.int32))
    change(folder)
    refused(wscope("generate", "--model", folder, "--tokens", tmp_path / "ids.npy"), 4, *about)


@pytest.mark.usefixtures("command")
def test_code_of_a_checkpoint_is_not_run(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (folder / "modeling.py").write_text(f"open({str(marker)!r}, 'w')")
    config(auto_map={"AutoModelForCausalLM": "modeling.M"})(folder)
    np.save(tmp_path / "ids.npy", np.arange(3, dtype=np.int32))
    words = ["--model", folder, "--tokens", tmp_path / "ids.npy", "--max-new-tokens", 1]
    done = wscope("generate", *words, "--window", 32)
    check(done)
    assert done.code == 0
    assert "auto_map is ignored" in done.err
    assert not marker.exists()


@pytest.mark.usefixtures("command")
def test_names_that_are_too_long(folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(3, dtype=np.int32))
    long = "x" * 5000
    words = ["--model", folder, "--tokens", tmp_path / "ids.npy"]
    refused(wscope("generate", *words, "--jsonl-out", long), 2, "--jsonl-out", "too long")
    refused(wscope("score", *words, "--prefill", 1, "--logits-out", long), 2, "too long")
    refused(wscope("generate", "--model", folder, "--prompt-file", long), 2, "too long")
    refused(wscope("generate", "--model", folder, "--tokens", long), 2, "too long")
    refused(wscope("generate", "--model", folder, "--jsonl-in", long), 2, "too long")
    refused(wscope("generate", "--model", long, "--prompt", "a"), 4, "too long")


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize("name", ["open", "os.open", "os.preadv", "os.listdir", "os.stat"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_every_read_may_fail(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """The N-th access to the checkpoint fails, for N = 1, 2, 3, ...: exit code 4, and the file is named."""
    np.save(tmp_path / "ids.npy", np.arange(3, dtype=np.int32))
    words = ["score", "--model", folder, "--tokens", tmp_path / "ids.npy", "--prefill", 3]
    monkeypatch.setattr("wscope_jax.engine.Engine.__init__", _stop)
    owner, attribute = (builtins, name) if name == "open" else (os, name.removeprefix("os."))
    whole = getattr(owner, attribute)
    failing = Failing(whole, OSError(number, os.strerror(number)))
    handles: set[int] = set()

    def selective(path: Any, *args: Any, **kwargs: Any) -> Any:
        ours = path in handles if isinstance(path, int) else str(path).startswith(str(folder))
        if not ours:
            return whole(path, *args, **kwargs)
        return failing(path, *args, **kwargs)

    if name == "os.preadv":
        opened = os.open

        def remember(*args: Any, **kwargs: Any) -> int:
            handle = opened(*args, **kwargs)
            handles.add(handle)
            return handle

        monkeypatch.setattr(os, "open", remember)
    monkeypatch.setattr(owner, attribute, selective)
    seen, failing.last = 0, 25
    for n in failing.runs():
        done = wscope(*words)
        check(done)
        if failing.failures:
            seen += 1
            assert done.code == 4 or "stop:" in done.err, (n, done)  # some look-ups are not needed
            assert str(folder) in done.err or "stop:" in done.err, (n, done)
    assert seen >= 1


def _stop(*_: Any, **__: Any) -> None:
    from wscope_jax.errors import UsageError

    raise UsageError("stop: all of the checkpoint was read")
