"""The verbs on the golden Mixtral: what stands on stdout, on stderr, and in the exit code."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wscope_jax import cli
from wscope_jax.cli import start
from wscope_jax.generation import Generation

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "mixtral"
CACHE = ["--model", str(GOLDEN), "--dtype", "float32", "--window", "32"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "golden.npz") as arrays:
        return dict(arrays)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process; returns its exit code, stdout and stderr."""
    monkeypatch.setattr(start, "prepare", lambda *_, **__: None)

    def in_process(*words: object) -> tuple[int, str, str]:
        code = cli.main([str(word) for word in words])
        return code, *capsys.readouterr()

    return in_process


@pytest.fixture
def tokens(tmp_path: Path, golden: dict[str, np.ndarray]) -> Path:
    """The golden prompts, a batch of two."""
    np.save(tmp_path / "ids.npy", golden["ids"])
    return tmp_path / "ids.npy"


@pytest.fixture(scope="module")
def with_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden checkpoint with a tokenizer: each of the 128 ids is one letter, `letter(id)`."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("checkpoint")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, folder)
    vocabulary = {letter(i): i for i in range(128)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.decoder = tokenizers.decoders.Fuse()
    inner.save(str(folder / "tokenizer.json"))
    return folder


def letter(token: int) -> str:
    return chr(0x100 + token)


def letters(tokens: np.ndarray) -> str:
    return "".join(map(letter, tokens.tolist()))


def test_ids_are_printed_row_by_row(run: Run, tokens: Path, golden: dict[str, np.ndarray]) -> None:
    code, out, err = run("generate", *CACHE, "--tokens", tokens, "--max-new-tokens", 16)
    assert code == 0, err
    assert [row.split(" ") for row in out.splitlines()] == [
        [str(token) for token in row] for row in golden["seq"][:, 37:]
    ]
    assert err.startswith("wscope: 32 tokens")
    assert err.count("\n") == 1


def test_json(run: Run, tokens: Path, golden: dict[str, np.ndarray]) -> None:
    words = ["--tokens", tokens, "--max-new-tokens", 16, "--cpu-share", 0.5, "--json"]
    code, out, err = run("generate", *CACHE, *words)
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    values = json.loads(out)
    assert list(values) == [
        "tokens",
        "text",
        "finish_reason",
        "regions",
        "cpu_share",
        "compiles",
        "work",
        "timing",
    ]
    assert values["tokens"] == golden["seq"][:, 37:].tolist()
    assert values["text"] is None
    assert values["finish_reason"] == ["length", "length"]
    assert list(values["regions"]) == ["unpinned", "pinned", "window", "ping_pong"]
    assert all(set(held) == {"tokens", "bytes"} for held in values["regions"].values())
    assert values["cpu_share"] == {"first": 0.5, "last": 0.5}
    assert values["compiles"]["stall"] == 0
    work = values["work"]
    assert work["limit"] in ("cpu", "link", "device")
    assert work["steps"] > 0


def test_text_is_printed_as_it_is(run: Run, with_text: Path, golden: dict[str, np.ndarray]) -> None:
    prompt, new = golden["seq"][0, :37], golden["seq"][0, 37:]
    words = ["--model", with_text, "--prompt", letters(prompt), "--max-new-tokens", 16]
    code, out, err = run("generate", *CACHE, *words)
    assert code == 0, err
    assert out == letters(new) + "\n"


def test_text_stops(
    run: Run, with_text: Path, golden: dict[str, np.ndarray], tmp_path: Path
) -> None:
    prompt, new = golden["seq"][0, :37], golden["seq"][0, 37:]
    (tmp_path / "prompt").write_text(letters(prompt))
    words = ["--model", with_text, "--prompt-file", tmp_path / "prompt", "--json"]
    code, out, err = run("generate", *CACHE, *words, "--stop", letters(new[6:8]))
    assert code == 0, err
    values = json.loads(out)
    assert values["text"] == [letters(new[:6])]
    assert values["finish_reason"] == ["stop"]


@pytest.mark.parametrize("is_batch", [False, True])
def test_score(run: Run, tmp_path: Path, golden: dict[str, np.ndarray], is_batch: bool) -> None:
    ids = golden["ids"] if is_batch else golden["ids"][1]
    logits = golden["logits"] if is_batch else golden["logits"][1]
    np.save(tmp_path / "ids.npy", ids.astype(np.int64))
    words = ["--tokens", tmp_path / "ids.npy", "--prefill", 30, "--logits-out", tmp_path / "out"]
    code, out, err = run("score", *CACHE, *words, "--json")
    assert code == 0, err
    assert out.count("\n") == 1
    values = json.loads(out)
    assert list(values) == ["nll", "prefill", "logits_out"]
    got = np.load(tmp_path / "out")
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, logits[..., 29:, :], atol=1e-4)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_p[..., 29:-1, :], ids[..., 30:, None], -1)
    assert values["nll"] == pytest.approx(-picked.mean(), abs=1e-4)


def test_score_of_a_prompt_alone(run: Run, tokens: Path) -> None:
    code, out, _ = run("score", *CACHE, "--tokens", tokens, "--prefill", 37, "--json")
    assert code == 0
    assert json.loads(out) == {"nll": None, "prefill": 37, "logits_out": None}


@pytest.mark.parametrize(
    ("verb", "words", "code", "about"),
    [
        ("generate", ["--prompt", "a"], 4, "tokenizer.json"),
        ("generate", ["--prompt", ""], 2, "empty"),
        ("generate", ["--temperature", "-1"], 2, "temperature"),
        ("generate", ["--policy", "gpu_only", "--cpu-share", "0.5"], 2, "gpu_only"),
        ("generate", ["--max-model-len", "10"], 2, "10"),
        ("generate", ["--host-memory", "1KB"], 3, "host"),
        ("generate", ["--model", "no/such/place"], 4, "no/such/place"),
        ("score", ["--prefill", "38"], 2, "37"),
        ("score", ["--prefill", "1", "--max-model-len", "36"], 2, "37"),
        ("score", ["--prefill", "1", "--host-memory", "1KB"], 3, "host"),
        ("score", ["--prefill", "1", "--logits-out", "no/such/place"], 2, "no/such"),
    ],
)
def test_errors_are_one_line(
    run: Run, tokens: Path, verb: str, words: list[str], code: int, about: str
) -> None:
    source = [] if "--prompt" in words else ["--tokens", tokens]
    got, out, err = run(verb, *CACHE, *source, *words)
    assert (got, out) == (code, "")
    assert err.startswith("wscope: error: ")
    assert err.count("\n") == 1
    assert about in err


@pytest.mark.parametrize("token", [-1, 128, 2**31])
def test_ids_outside_the_vocabulary(run: Run, tmp_path: Path, token: int) -> None:
    np.save(tmp_path / "ids.npy", np.array([1, 2, token], np.int64))
    got: Any = run("generate", *CACHE, "--tokens", tmp_path / "ids.npy")
    assert got[0] == 2
    assert str(token) in got[2]


@pytest.mark.parametrize("is_json", [False, True])
def test_interrupted(
    run: Run,
    tokens: Path,
    golden: dict[str, np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    is_json: bool,
) -> None:
    """What there was at Ctrl-C is printed in either form, whole and once."""
    take, taken = Generation._take, []

    def interrupted(self: Generation, number: int, token: int) -> Any:
        if len(taken) == 5:
            raise KeyboardInterrupt
        taken.append(token)
        return take(self, number, token)

    monkeypatch.setattr(Generation, "_take", interrupted)
    code, out, err = run("generate", *CACHE, "--tokens", tokens, *["--json"] * is_json)
    new = [golden["seq"][0, 37:40].tolist(), golden["seq"][1, 37:39].tolist()]
    assert code == 130
    assert err.splitlines()[-1] == "wscope: interrupted"
    if is_json:
        values = json.loads(out)
        assert values["tokens"] == new
        assert values["finish_reason"] == ["interrupted"] * 2
    else:
        assert out == "".join(" ".join(map(str, row)) + "\n" for row in new)
