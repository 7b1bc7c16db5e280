"""Where prompts come from, and what is refused before anything is loaded."""

import argparse
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wscope_jax.cli import jsonl, prompts
from wscope_jax.cli.prompts import read_prompts, read_tokens, require_tokenizer
from wscope_jax.errors import CheckpointError, UsageError


class Stdin(io.TextIOWrapper):
    """A stdin with this content, or a terminal."""

    def __init__(self, raw: bytes, *, is_terminal: bool = False) -> None:
        super().__init__(io.BytesIO(raw))
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that has what the reader of prompts looks for."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def options(model: Path, **given: Any) -> argparse.Namespace:
    sources = dict.fromkeys(("prompt", "prompt_file", "tokens", "prompt_length"))
    return argparse.Namespace(**{"model": model, **sources} | given)


def save(file: Path, array: Any) -> Path:
    np.save(file, array)
    return file


def test_prompt(model: Path) -> None:
    assert read_prompts(options(model, prompt=["what "])) == ["what "]


def test_prompt_file_is_taken_as_it_is(model: Path, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes("naïve\r\n\n".encode())
    assert read_prompts(options(model, prompt_file=tmp_path / "p")) == ["naïve\r\n\n"]


def test_stdin(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Stdin(b"from a pipe\n"))
    assert read_prompts(options(model)) == ["from a pipe\n"]


@pytest.mark.parametrize("stdin", [None, Stdin(b"", is_terminal=True)])
def test_no_source(model: Path, monkeypatch: pytest.MonkeyPatch, stdin: Any) -> None:
    monkeypatch.setattr("sys.stdin", stdin)
    with pytest.raises(UsageError, match="no prompt"):
        read_prompts(options(model))


@pytest.mark.parametrize("raw", [b"", b"caf\xe9"])
def test_bad_stdin(model: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr("sys.stdin", Stdin(raw))
    with pytest.raises(UsageError, match="offset 3" if raw else "empty"):
        read_prompts(options(model))


@pytest.mark.parametrize("cut", range(4))
def test_characters_across_reads(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cut: int
) -> None:
    """Read piece by piece it is the same text, and the same byte is wrong."""
    monkeypatch.setattr(prompts, "_CHUNK_BYTES", 4)
    text = "x" * cut + "\U0001f600é€"
    (tmp_path / "p").write_text(text, encoding="utf-8")
    assert read_prompts(options(model, prompt_file=tmp_path / "p")) == [text]
    for tail in (b"\xff", b"\xe2\x82", b"\xe2\x82x"):
        whole = text.encode() + tail
        (tmp_path / "p").write_bytes(whole)
        with pytest.raises(UsageError, match=f"at offset {len(text.encode())};"):
            read_prompts(options(model, prompt_file=tmp_path / "p"))


def test_an_endless_source(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What never ends, or is larger than any prompt, is refused by name, without being read to its end."""
    monkeypatch.setattr(prompts, "MOST_BYTES", 3_000_000)
    zero = Path("/dev/zero")
    with pytest.raises(UsageError, match=r"--prompt-file /dev/zero: more than 3.000 MB, which no"):
        read_prompts(options(model, prompt_file=zero))
    with open(zero, encoding="utf-8") as endless:
        monkeypatch.setattr("sys.stdin", endless)
        with pytest.raises(UsageError, match=r"stdin: more than 3.000 MB, which no"):
            read_prompts(options(model))
    with pytest.raises(UsageError, match=r"--prompt-file /dev/urandom: not UTF-8: byte 0x"):
        read_prompts(options(model, prompt_file=Path("/dev/urandom")))
    with pytest.raises(UsageError, match=r"--jsonl-in /dev/zero line 1: more than 3.000 MB, which"):
        jsonl.read(zero)


def test_too_many_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jsonl, "MOST_BYTES", 1000)
    (tmp_path / "in").write_text('{"prompt": "x"}\n' * 100)
    with pytest.raises(UsageError, match=r"in line 63: more than 1.000 KB up to here"):
        jsonl.read(tmp_path / "in")


def test_more_ids_than_any_model_reads(tmp_path: Path) -> None:
    """By the header: a file may be sparse, or claim more than it has."""
    file = tmp_path / "ids.npy"
    header = {"shape": (999_999_999_999,), "fortran_order": False, "descr": "<i4"}
    with file.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
    with pytest.raises(
        UsageError, match=r"ids.npy: has shape \(999999999999,\), more than 100,000"
    ):
        read_tokens(file)


def test_two_sources(model: Path) -> None:
    with pytest.raises(UsageError, match="--prompt and --tokens"):
        read_prompts(options(model, prompt=["a"], tokens=[Path("b")]))


def test_empty_prompt(model: Path, tmp_path: Path) -> None:
    (tmp_path / "p").touch()
    for given in ({"prompt": [""]}, {"prompt_file": tmp_path / "p"}):
        with pytest.raises(UsageError, match="empty"):
            read_prompts(options(model, **given))


@pytest.mark.parametrize("name", ["missing", "."])
def test_unreadable_prompt_file(model: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="--prompt-file"):
        read_prompts(options(model, prompt_file=tmp_path / name))


def test_text_without_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"--tokens F\.npy"):
        require_tokenizer(model)


def test_a_tokenizer_that_is_refused_is_left_to_the_loader(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").mkdir()
    require_tokenizer(model)


def test_missing_model_is_left_to_the_loader(tmp_path: Path) -> None:
    require_tokenizer(tmp_path / "none")


def test_ragged_batch(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").unlink()
    files = [
        save(tmp_path / "a.npy", np.array([1, 2, 3], np.int32)),
        save(tmp_path / "b.npy", np.array([[4, 5], [6, 7]], np.int64)),
    ]
    assert read_prompts(options(model, tokens=files)) == [[1, 2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.dtype(">i4")])
def test_tokens(tmp_path: Path, dtype: Any) -> None:
    got = read_tokens(save(tmp_path / "a.npy", np.array([3, 1], dtype)))
    assert got.dtype == np.int64
    assert got.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("array", "about"),
    [
        (np.array([1.0]), "float64"),
        (np.array([1], np.uint32), "uint32"),
        (np.array([1], np.int16), "int16"),
        (np.array([True]), "bool"),
        (np.array(7), r"shape \(\)"),
        (np.zeros((1, 1, 1), np.int32), "shape"),
        (np.array([], np.int32), "empty"),
        (np.zeros((2, 0), np.int32), "empty"),
        (np.zeros((0, 2), np.int32), "empty"),
    ],
)
def test_wrong_arrays(tmp_path: Path, array: Any, about: str) -> None:
    with pytest.raises(UsageError, match=about):
        read_tokens(save(tmp_path / "a.npy", array))


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Trap:
        def __reduce__(self) -> Any:
            return (marker.touch, ())

    np.save(tmp_path / "a.npy", np.array([Trap()], object), allow_pickle=True)
    with pytest.raises(UsageError, match=r"not a \.npy file"):
        read_tokens(tmp_path / "a.npy")
    assert not marker.exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"PK\x03\x04",
        b"\x80\x04]",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00\x10\x00{'descr': garbage",
        b"\x93NUMPY\x09\x00\x10\x00",
    ],
)
def test_no_npy(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(raw)
    with pytest.raises(UsageError, match=r"not a \.npy file"):
        read_tokens(tmp_path / "a.npy")


def test_cut_short(tmp_path: Path) -> None:
    file = save(tmp_path / "a.npy", np.arange(100))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UsageError, match=r"not a \.npy file"):
        read_tokens(file)


@pytest.mark.parametrize("name", ["missing.npy", "."])
def test_unreadable_tokens(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="--tokens"):
        read_tokens(tmp_path / name)
