"""The parser: what it takes, and how it refuses."""

import argparse
import dataclasses

import pytest

from wscope_jax import Sampling, layout, policies
from wscope_jax.cli import groups, options

MODEL = ["--model", "m"]


def parse(*words: str) -> argparse.Namespace:
    return options.build_parser().parse_args(words)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr of a command line that is refused with exit code 2."""
    with pytest.raises(SystemExit) as end:
        parse(*words)
    assert end.value.code == 2
    out, line = capsys.readouterr()
    assert out == ""
    assert line.startswith("wscope: error: ")
    assert line.count("\n") == 1
    return line


@pytest.mark.parametrize(
    ("text", "expected"), [("auto", None), ("0", 0.0), ("1", 1.0), ("0.3", 0.3)]
)
def test_share(text: str, expected: float | None) -> None:
    assert groups.share(text) == expected


@pytest.mark.parametrize("text", ["", "Auto", "-0.1", "1.1", "nan", "inf", "half"])
def test_share_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        groups.share(text)


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1_000", " 1", "1" * 19, "٣"])
def test_count_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        groups.count(text)


def test_choices_are_those_of_the_library() -> None:
    assert set(groups.POLICIES) == {"auto", *policies.BY_NAME}
    assert groups.WINDOWS == layout.WINDOW_SIZES
    assert set(groups.SAMPLING) == {field.name for field in dataclasses.fields(Sampling)}


def test_generate_defaults() -> None:
    assert vars(parse("generate", *MODEL)) | {"model": None} == {
        "verb": "generate",
        "model": None,
        "random_weights": None,
        "prompt": None,
        "prompt_file": None,
        "tokens": None,
        "prompt_length": None,
        "jsonl_in": None,
        "jsonl_out": None,
        "chat": False,
        "chat_template": None,
        "truncate": None,
        "check_tensors": False,
        "quiet": False,
        "policy": "auto",
        "cpu_share": None,
        "window": 256,
        "max_model_len": None,
        "dtype": None,
        "gpu_memory": None,
        "host_memory": None,
        "spare_memory": 0,
        "threads": None,
        "max_new_tokens": None,
        "temperature": None,
        "top_k": None,
        "top_p": None,
        "min_p": None,
        "seed": None,
        "stop": None,
        "ignore_eos": False,
        "json": False,
    }


def test_generate_takes_all() -> None:
    words = (
        "--tokens a.npy --tokens b.npy --policy write_scope --cpu-share 0.3 --window 32 "
        "--max-model-len 100 --dtype float32 --gpu-memory 1GiB --host-memory 2GB --threads 3 "
        "--spare-memory 3GB "
        "--max-new-tokens 5 --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --seed 7 --stop x "
        "--stop y --ignore-eos --json"
    )
    got = parse("generate", *MODEL, *words.split())
    assert [str(file) for file in got.tokens] == ["a.npy", "b.npy"]
    assert (got.policy, got.cpu_share, got.window, got.dtype) == ("write_scope", 0.3, 32, "float32")
    assert (got.gpu_memory, got.host_memory, got.threads) == (1 << 30, 2 * 10**9, 3)
    assert got.spare_memory == 3 * 10**9
    assert (got.temperature, got.top_k, got.top_p, got.min_p, got.seed) == (0.5, 4, 0.9, 0.1, 7)
    assert (got.max_model_len, got.max_new_tokens) == (100, 5)
    assert (got.stop, got.ignore_eos, got.json) == (["x", "y"], True, True)


def test_score_takes_all() -> None:
    words = "--tokens a.npy --prefill 5 --logits-out o.npy --cpu-share auto --window 64 --json"
    got = parse("score", *MODEL, *words.split())
    assert (str(got.tokens), got.prefill, str(got.logits_out)) == ("a.npy", 5, "o.npy")
    assert (got.cpu_share, got.window, got.json) == (None, 64, True)


def test_plan_takes_all() -> None:
    assert vars(parse("plan", "--model", "mixtral-8x7b")) == {
        "verb": "plan",
        "model": "mixtral-8x7b",
        "batch": 1,
        "max_model_len": None,
        "policy": "auto",
        "cpu_share": None,
        "window": 256,
        "dtype": None,
        "gpu_memory": None,
        "host_memory": None,
        "spare_memory": 0,
        "check": False,
        "json": False,
    }
    words = (
        "--batch 3 --max-model-len 100 --window 32 --cpu-share 0.3 --policy auto --dtype float32 "
        "--gpu-memory 1GiB --host-memory 2GB --check --json"
    )
    got = parse("plan", *MODEL, *words.split())
    assert (got.batch, got.max_model_len, got.window, got.cpu_share) == (3, 100, 32, 0.3)
    assert (got.gpu_memory, got.host_memory) == (1 << 30, 2 * 10**9)
    assert (got.policy, got.dtype, got.check, got.json) == ("auto", "float32", True, True)


@pytest.mark.parametrize(
    ("words", "about"),
    [
        ([], "VERB"),
        (["plan"], "--model"),
        (["plan", *MODEL, "--batch", "0"], "--batch"),
        (["plan", *MODEL, "--threads", "2"], "--threads"),
        (["inspect"], "--model"),
        (["doctor", "--model", "m"], "--model"),
        (["frobnicate"], "frobnicate"),
        (["generate"], "--model --random-weights"),
        (["generate", *MODEL, "--random-weights", "mixtral-8x7b"], "--random-weights"),
        (["generate", "--random-weights", ""], "--random-weights is empty"),
        (["generate", *MODEL, "--prompt-length", "0"], "--prompt-length"),
        (["generate", *MODEL, "--frobnicate"], "--frobnicate"),
        (["generate", *MODEL, "--temp", "1"], "--temp"),
        (["generate", *MODEL, "--window", "100"], "--window"),
        (["generate", *MODEL, "--window", "x"], "--window"),
        (["generate", *MODEL, "--policy", "best"], "--policy"),
        (["generate", *MODEL, "--cpu-share", "2"], "--cpu-share"),
        (["generate", *MODEL, "--dtype", "float16"], "--dtype"),
        (["generate", *MODEL, "--gpu-memory", "32"], "--gpu-memory"),
        (["generate", *MODEL, "--max-new-tokens", "0"], "--max-new-tokens"),
        (["generate", *MODEL, "--temperature", "hot"], "--temperature"),
        (["score", *MODEL, "--prefill", "1"], "--tokens"),
        (["score", *MODEL, "--tokens", "a", "--prefill", "0"], "--prefill"),
        (["score", *MODEL, "--tokens", "a", "--tokens", "b", "--prefill", "1"], "a and b"),
        (["demo", "--window", "32"], "--window"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], words: list[str], about: str) -> None:
    assert about in refusal(capsys, *words)


@pytest.mark.parametrize("words", [["--help"], ["generate", "--help"], ["demo", "--help"]])
def test_help(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(*words)
    assert end.value.code == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: wscope")
    assert err == ""


@pytest.mark.parametrize(
    ("value", "expected"), [(None, False), ("", False), ("0", False), ("1", True)]
)
def test_debug(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool) -> None:
    if value is None:
        monkeypatch.delenv("WSCOPE_DEBUG", raising=False)
    else:
        monkeypatch.setenv("WSCOPE_DEBUG", value)
    assert options.is_debug() is expected
