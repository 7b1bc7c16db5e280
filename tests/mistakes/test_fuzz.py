"""Whatever a checkpoint or a command line holds: an answer, a documented exit code, no traceback, no hang.

The seeds are fixed. WSCOPE_FUZZ=5000 tries that many examples of each kind, with seeds of their own.
"""

import json
import os
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import tiny
from tests.mistakes.commands import check, wscope
from wscope_jax.errors import UsageError

EXAMPLES = int(os.environ.get("WSCOPE_FUZZ", "0"))
SLOW_S = 20.0  # on a busy machine; an example takes some hundredths
fuzz = settings(
    max_examples=EXAMPLES or 60,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 300),
        st.integers(),
        st.just(2**31),
        st.just(10**30),
        st.floats(allow_nan=True),
        st.text(max_size=8),
        st.sampled_from(
            ["silu", "gelu", "bfloat16", "default", "yarn", "full_attention", "mixtral"]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=6,
)


class Fixed:
    """A checkpoint that is restored before every example."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "c"
        tiny.write_checkpoint(folder / "whole", shards=2, num_hidden_layers=1, num_experts=2)
        self.whole = folder / "whole"
        self.ids = folder / "ids.npy"
        np.save(self.ids, np.arange(5, dtype=np.int32))

    def restore(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.whole, self.folder)

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return found

    def read(self) -> None:
        """Every verb that reads a checkpoint."""
        judge("score", "--model", self.folder, "--tokens", self.ids, "--prefill", 5)
        judge("plan", "--model", self.folder, "--json")
        judge("inspect", "--model", self.folder)


@pytest.fixture
def fixed(tmp_path: Path, command: None, monkeypatch: pytest.MonkeyPatch) -> Fixed:
    """Engines are not built: the fuzz is about what is read, and a compilation takes seconds."""

    def stop(self: object, *_: Any, **__: Any) -> None:
        raise UsageError("stop: the checkpoint is good")

    monkeypatch.setattr("wscope_jax.engine.Engine.__init__", stop)
    return Fixed(tmp_path)


def judge(*words: object) -> None:
    began = time.monotonic()
    check(wscope(*words))
    assert time.monotonic() - began < SLOW_S, words


KEYS = sorted(
    {*tiny.make_config("qwen3_moe"), *tiny.make_config("mixtral"), "auto_map", "rope_scaling"}
)
LATENT_KEYS = sorted({*tiny.make_config("deepseek_v2"), "scoring_func", "moe_layer_freq"})


@fuzz
@given(changes=st.dictionaries(st.sampled_from(KEYS), values, min_size=1, max_size=3))
def test_config_values(fixed: Fixed, changes: dict[str, Any]) -> None:
    fixed.restore()
    text = json.dumps({**fixed.config(), **changes})
    (fixed.folder / "config.json").write_text(text)
    fixed.read()


@fuzz
@given(changes=st.dictionaries(st.sampled_from(LATENT_KEYS), values, min_size=1, max_size=3))
def test_config_values_of_latent_attention(fixed: Fixed, changes: dict[str, Any]) -> None:
    """Beside tensors of another family: what is read of the configuration comes first."""
    fixed.restore()
    (fixed.folder / "config.json").write_text(
        json.dumps(tiny.make_config("deepseek_v2", **changes))
    )
    fixed.read()


@fuzz
@given(data=st.data())
def test_files_with_other_bytes(fixed: Fixed, data: st.DataObject) -> None:
    """A few bytes of any file are replaced, inserted or cut off."""
    fixed.restore()
    tokenizer = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    (fixed.folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    file = data.draw(st.sampled_from(sorted(fixed.folder.iterdir())))
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(len(raw), 3000)))
        new = data.draw(st.binary(max_size=4))
        raw[at : at + data.draw(st.sampled_from([0, len(new), 1, 10**9]))] = new
    file.write_bytes(raw)
    fixed.read()


entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(st.sampled_from(["F32", "BF16", "I8", "F4"]), values),
        "shape": st.one_of(st.lists(st.integers(-1, 2**64), max_size=4), values),
        "data_offsets": st.one_of(st.lists(st.integers(-1, 2**64), min_size=2, max_size=2), values),
        "more": values,
    },
)


@fuzz
@given(
    header=st.dictionaries(st.sampled_from(["model.norm.weight", "__metadata__", "x"]), entries),
    size=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    rest=st.binary(max_size=40),
)
def test_headers(fixed: Fixed, header: dict[str, Any], size: int | None, rest: bytes) -> None:
    fixed.restore()
    raw = json.dumps(header).encode()
    prefix = struct.pack("<Q", len(raw) if size is None else size)
    file = sorted(fixed.folder.glob("*.safetensors"))[0]
    file.write_bytes(prefix + raw + rest)
    fixed.read()


@fuzz
@given(
    index=st.one_of(
        values,
        st.fixed_dictionaries(
            {"weight_map": st.dictionaries(st.text(max_size=9), values, max_size=3)},
            optional={"metadata": values},
        ),
        st.fixed_dictionaries(
            {
                "weight_map": st.dictionaries(
                    st.sampled_from(["model.norm.weight", "x"]),
                    st.text(max_size=9).map(lambda name: f"{name}.safetensors"),
                )
            }
        ),
    )
)
def test_index(fixed: Fixed, index: Any) -> None:
    fixed.restore()
    (fixed.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fixed.read()


@fuzz
@given(
    tokenizer=st.fixed_dictionaries(
        {},
        optional={
            "version": st.one_of(st.just("1.0"), values),
            "added_tokens": st.one_of(st.just([]), values),
            "decoder": st.one_of(
                st.just({"type": "ByteFallback"}),
                st.just({"type": "Sequence", "decoders": []}),
                values,
            ),
            "post_processor": values,
            "model": st.one_of(
                st.fixed_dictionaries(
                    {"type": st.sampled_from(["BPE", "WordLevel", "Unigram"])},
                    optional={"vocab": st.one_of(st.just({"a": 0}), values), "merges": values},
                ),
                values,
            ),
        },
    )
)
def test_tokenizers(fixed: Fixed, tokenizer: Any) -> None:
    fixed.restore()
    (fixed.folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    judge("generate", "--model", fixed.folder, "--prompt", "aä")


OPTIONS = [
    "--model",
    "--prompt",
    "--prompt-file",
    "--tokens",
    "--jsonl-in",
    "--jsonl-out",
    "--chat",
    "--chat-template",
    "--truncate",
    "--policy",
    "--cpu-share",
    "--window",
    "--max-model-len",
    "--dtype",
    "--gpu-memory",
    "--host-memory",
    "--threads",
    "--max-new-tokens",
    "--temperature",
    "--top-k",
    "--top-p",
    "--min-p",
    "--seed",
    "--stop",
    "--ignore-eos",
    "--json",
    "--quiet",
    "--check-tensors",
    "--prefill",
    "--logits-out",
    "--batch",
    "--check",
    "-q",
    "-h",
    "--version",
]
WORDS = [
    "0",
    "1",
    "-1",
    "32",
    "0.5",
    "nan",
    "inf",
    "1e309",
    "auto",
    "left",
    "32GiB",
    "-",
    "--",
    "",
    "float32",
]


@fuzz
@given(
    verb=st.sampled_from(["generate", "score", "generate", "plan", "inspect", "x", ""]),
    words=st.lists(
        st.tuples(
            st.sampled_from(OPTIONS),
            st.one_of(
                st.none(), st.sampled_from(WORDS), st.text(max_size=6), st.integers().map(str)
            ),
        ),
        max_size=5,
    ),
    has_model=st.booleans(),
    source=st.sampled_from(["--tokens", "--prompt", "--jsonl-in", None]),
)
def test_command_lines(
    fixed: Fixed,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    words: list[tuple[str, str | None]],
    has_model: bool,
    source: str | None,
) -> None:
    fixed.restore()
    monkeypatch.chdir(fixed.folder)  # a word may name an output file
    monkeypatch.setattr("sys.stdin", None)
    line: list[object] = [word for pair in words for word in pair if word is not None]
    if has_model:
        line += ["--model", fixed.folder]
    if source is not None:
        line += [source, fixed.ids if source == "--tokens" else "a"]
    judge(verb, *line)


@fuzz
@given(
    lines=st.lists(
        st.one_of(
            values,
            st.dictionaries(
                st.sampled_from(
                    ["prompt", "tokens", "messages", "id", "stop", "top_k", "seed", "x"]
                ),
                st.one_of(
                    values, st.just([1, 2]), st.just("a"), st.just([{"role": "a", "content": ""}])
                ),
                max_size=3,
            ),
        ),
        max_size=3,
    ),
    noise=st.binary(max_size=3),
)
def test_jsonl(fixed: Fixed, lines: list[Any], noise: bytes) -> None:
    fixed.restore()
    file = fixed.ids.with_name("in.jsonl")
    file.write_bytes(b"\n".join(json.dumps(line).encode() for line in lines) + noise)
    judge("generate", "--model", fixed.folder, "--jsonl-in", file)


def test_the_fixed_checkpoint_is_good(fixed: Fixed) -> None:
    fixed.restore()
    done = wscope("score", "--model", fixed.folder, "--tokens", fixed.ids, "--prefill", 5)
    assert (done.code, done.err) == (2, "wscope: error: stop: the checkpoint is good\n")
