"""A real checkpoint with a few mutations, and the real engine over it: an answer or one clear line, and no hang."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.mistakes.commands import TINY, Done, check, tiny_with, wscope

BUDGET_S = float(
    os.environ.get("WSCOPE_FUZZ_S", "20")
)  # an example may have to compile for seconds
FEWEST = 20  # examples, however long they take on a busy machine
SLOW_S = 60.0  # for one example, on a busy machine

# Values that a configuration may hold, of which some are honoured and some refused.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "num_experts_per_tok": st.integers(0, 9),
    "num_hidden_layers": st.integers(0, 4),
    "num_attention_heads": st.sampled_from([0, 1, 2, 3, 4, 8]),
    "num_key_value_heads": st.sampled_from([0, 1, 2, 3, 4]),
    "head_dim": st.sampled_from([0, 1, 8, 16, 17, 32]),
    "hidden_size": st.sampled_from([0, 32, 64, 128]),
    "vocab_size": st.sampled_from([0, 1, 127, 128, 129]),
    "rms_norm_eps": st.sampled_from([0, -1, 1e-6, 1.0, 1e300, "x"]),
    "rope_parameters": st.sampled_from(
        [None, {}, {"rope_type": "default", "rope_theta": 1e-9}, {"rope_type": "yarn"}]
    ),
    "rope_theta": st.sampled_from([0, -1, 1e-30, 1e30, 10_000]),
    "max_position_embeddings": st.sampled_from([0, 1, 4, 4096]),
    "norm_topk_prob": st.sampled_from([True, False, None, 1]),
    "tie_word_embeddings": st.booleans(),
    "attention_bias": st.booleans(),
    "mlp_only_layers": st.sampled_from([[], [0], [9], "x"]),
    "decoder_sparse_step": st.integers(0, 3),
    "sliding_window": st.sampled_from([None, 0, 4]),
    "use_sliding_window": st.booleans(),
    "hidden_act": st.sampled_from(["silu", "gelu", None]),
    "dtype": st.sampled_from(["float32", "bfloat16", "float16", "int8", None]),
    "torch_dtype": st.sampled_from(["float32", "bfloat16", "x"]),
    "eos_token_id": st.sampled_from([None, 0, 127, 128, -1, [1, 2], [], "x"]),
    "model_type": st.sampled_from(["qwen3_moe", "mixtral", "llama", 3]),
    "quantization_config": st.sampled_from([None, {}, {"quant_method": "fp8"}]),
}

Mutation = Callable[[Path], None]


def changed(file: str, key: str, value: Any) -> Mutation:
    """Another value in a JSON file."""

    def apply(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))

    return apply


def poked(at: float, raw: bytes) -> Mutation:
    """Other bytes somewhere in the weights: numbers of any size, infinities, NaN, or a wrong header."""

    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = bytearray(path.read_bytes())
        first = int(at * len(content))
        content[first : first + len(raw)] = raw
        path.write_bytes(content)

    return apply


def header(old: bytes, new: bytes) -> Mutation:
    """A word of the weights' header replaced by one of the same length."""

    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes().replace(old, new, 1))

    return apply


def cut(file: str, part: float) -> Mutation:
    """A file that ends too early."""

    def apply(folder: Path) -> None:
        raw = (folder / file).read_bytes()
        (folder / file).write_bytes(raw[: int(part * len(raw))])

    return apply


FILES = ("config.json", "generation_config.json", "model.safetensors")
mutations = st.one_of(
    st.sampled_from(sorted(VALUES)).flatmap(
        lambda key: st.builds(changed, st.just("config.json"), st.just(key), VALUES[key])
    ),
    st.builds(
        changed,
        st.just("generation_config.json"),
        st.sampled_from(["eos_token_id", "temperature", "max_length", "x"]),
        st.one_of(VALUES["eos_token_id"], st.floats(), st.text(max_size=3)),
    ),
    st.builds(poked, st.floats(0, 1), st.binary(min_size=1, max_size=4)),
    st.builds(poked, st.floats(0.1, 1), st.sampled_from([b"\xff\xff\xff\x7f", b"\x80\x7f" * 20])),
    st.builds(
        header,
        st.sampled_from([b"BF16", b"F32", b"layers.0", b"gate_proj", b"weight", b"[32"]),
        st.sampled_from([b"BF16", b"F32", b"F16", b"U16", b"layers.9", b"weighs", b"[23"]),
    ),
    st.builds(cut, st.sampled_from(FILES), st.floats(0, 1)),
)
options = st.lists(
    st.sampled_from(
        [
            *(["--policy", name] for name in ("gpu_only", "cpu_only", "resident")),
            *(["--temperature", text] for text in ("0.5", "100")),
            ["--top-k", "3"],
            ["--check-tensors"],
            ["--json"],
            ["--host-memory", "1KiB"],
            ["--max-model-len", "41"],
            ["--cpu-share", "0.5"],
            ["--dtype", "bfloat16"],
        ]
    ),
    max_size=2,
)


def judge(done: Done) -> None:
    """An answer, or one line and a documented code; 1 is only for a model that gives no numbers."""
    check(done)
    assert done.code in (0, 2, 3, 4, 5) or (done.code, "not finite" in done.err) == (1, True), done
    if done.code in (2, 3, 4, 5):
        assert done.out == "", done
    errors = [line for line in done.err.splitlines() if line.startswith("wscope: error: ")]
    assert len(errors) == (done.code != 0), done


class Clock:
    """Lets examples run until the time is over; once one has failed, all, so that it can be made smaller."""

    def __init__(self) -> None:
        self.end = time.monotonic() + BUDGET_S
        self.has_failed = False
        self.codes: list[int] = []

    def is_over(self) -> bool:
        is_late = time.monotonic() > self.end and len(self.codes) >= FEWEST
        return is_late and not self.has_failed


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("command")
def test_a_mutated_checkpoint_in_the_real_engine(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(40, dtype=np.int32))  # a block and a rest
    clock = Clock()
    folder = tmp_path / "c"

    @settings(
        max_examples=2000,
        derandomize="WSCOPE_FUZZ_S" not in os.environ,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(changes=st.lists(mutations, min_size=1, max_size=2), words=options)
    def run(changes: list[Mutation], words: list[list[str]]) -> None:
        if clock.is_over():
            return
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for name in FILES:
                shutil.copy(TINY / name, folder)
            for change in changes:
                try:
                    change(folder)
                except ValueError:  # the one before has cut the JSON that this one edits
                    continue
            began = time.monotonic()
            flat = [word for pair in words for word in pair]
            command = ["generate", *tiny_with(tmp_path / "ids.npy", folder)]
            done = wscope(*command, "--max-new-tokens", 2, *flat)
            judge(done)
            assert time.monotonic() - began < SLOW_S, done
            clock.codes.append(done.code)
        except BaseException:
            clock.has_failed = True
            raise

    run()
    assert set(clock.codes) >= {0, 4}, clock.codes  # some were harmless, some were found
