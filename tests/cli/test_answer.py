"""How answers are printed and written."""

import argparse
import contextlib
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pytest

from wscope_jax.cli import answer
from wscope_jax.errors import OutputError, UsageError


class Event(NamedTuple):
    row: int
    token: int | None
    text: str = ""
    finish_reason: str | None = None


def printed(num_rows: int, *events: Event, is_text: bool = True) -> list[str]:
    """What stood on the output after each event and after the end."""
    out = io.StringIO()
    printer = answer.RowPrinter(num_rows, out, is_text=is_text)
    states = []
    for event in events:
        printer.add(event)
        states.append(out.getvalue())
    printer.close()
    return [*states, out.getvalue()]


def test_text_comes_as_it_grows() -> None:
    got = printed(1, Event(0, 5, "He"), Event(0, 6, ""), Event(0, 7, "llo", "length"))
    assert got == ["He", "He", "Hello\n", "Hello\n"]


def test_ids_where_there_is_no_tokenizer() -> None:
    events = (Event(0, 5), Event(1, 8), Event(0, 6), Event(0, None, "", "length"))
    assert printed(2, *events, is_text=False) == ["5", "5", "5 6", "5 6\n8", "5 6\n8\n"]


def test_rows_do_not_mix() -> None:
    got = printed(
        3,
        Event(0, 1, "a"),
        Event(1, 1, "x"),
        Event(2, 1, "p", "stop"),
        Event(0, 2, "b", "stop"),
        Event(1, 2, "y"),
        Event(1, 3, "z", "length"),
    )
    assert got == ["a", "a", "a", "ab\nx", "ab\nxy", "ab\nxyz\np\n", "ab\nxyz\np\n"]


def test_interrupted_rows_are_kept() -> None:
    got = printed(2, Event(0, 1, "a"), Event(1, 1, "x"))
    assert got == ["a", "a", "a\nx\n"]


def test_interrupted_before_the_first_token() -> None:
    assert printed(1) == [""]
    assert printed(2) == [""]


def test_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    answer.print_json({"text": ["a\nb\u2028é"], "nll": None})
    assert capsys.readouterr() == ('{"text": ["a\\nb\\u2028\\u00e9"], "nll": null}\n', "")


def test_json_has_no_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        answer.print_json({"nll": float("nan")})


def test_write_whole(tmp_path: Path) -> None:
    file = tmp_path / "out.npy"
    for content in (b"first", b"second"):
        answer.write_whole(file, lambda stream, content=content: stream.write(content))
        assert file.read_bytes() == content
    assert list(tmp_path.iterdir()) == [file]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask


def test_no_half_file(tmp_path: Path) -> None:
    file = tmp_path / "out.npy"
    file.write_bytes(b"before")

    def fail(stream: BinaryIO) -> None:
        stream.write(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        answer.write_whole(file, fail)
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_bytes() == b"before"


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    answer.write_whole(tmp_path / "link", lambda stream: stream.write(b"x"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"x"


def test_devices_stay_devices() -> None:
    answer.write_whole(Path(os.devnull), lambda stream: stream.write(b"x"))
    assert Path(os.devnull).is_char_device()


def test_require_writable(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    for name in ("new", "there", "/dev/null"):
        answer.require_writable(tmp_path / name, "--out")
    for name, about in ((".", "directory"), ("none/x", "no directory")):
        with pytest.raises(UsageError, match=about):
            answer.require_writable(tmp_path / name, "--out")


def test_a_result_does_not_take_the_place_of_what_is_read(tmp_path: Path) -> None:
    model, ids = tmp_path / "model", tmp_path / "ids.npy"
    model.mkdir()
    for file in (ids, model / "config.json"):
        file.touch()
    (tmp_path / "link").symlink_to(ids)
    for name, other in (("ids.npy", "tokens"), ("link", "tokens"), ("model/config.json", "model")):
        out = tmp_path / name
        named = argparse.Namespace(model=model, tokens=[ids], prompt_file=None, out=out)
        with pytest.raises(UsageError, match=f"--out {out}: --{other} reads it"):
            answer.require_not_read(out, "--out", named)
    for name in ("new", "model/logits.npy", "/dev/null"):
        out = tmp_path / name
        named = argparse.Namespace(model=model, tokens=[ids], jsonl_in=Path("/dev/null"), out=out)
        answer.require_not_read(out, "--out", named)


def test_the_truth_about_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(28, "No space left on device")
    with pytest.raises(OutputError, match="the result was printed to stderr instead"):
        answer.fail("stdout", {}, error)
    with open("/dev/full", "w", encoding="utf-8", buffering=1) as full:
        monkeypatch.setattr("sys.stderr", full)
        with pytest.raises(OutputError, match="stderr takes no more, either: the result is lost"):
            answer.fail("stdout", {}, error)
        with contextlib.suppress(OSError):
            full.close()
