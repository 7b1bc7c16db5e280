"""Many prompts: from several options and from files of lines, and results as lines."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.test_verbs import CACHE, letter, letters
from tests.cli.test_verbs import golden as golden
from tests.cli.test_verbs import run as run
from tests.cli.test_verbs import with_text as with_text
from wscope_jax.cli import jsonl
from wscope_jax.errors import UsageError

Golden = dict[str, np.ndarray]


def lines(file: Path, *objects: Any) -> Path:
    file.write_text("".join(json.dumps(each) + "\n" for each in objects))
    return file


def test_several_prompts(run: Any, with_text: Path, golden: Golden) -> None:
    words = [word for ids in golden["ids"] for word in ("--prompt", letters(ids))]
    code, out, err = run("generate", *CACHE, "--model", with_text, *words, "--max-new-tokens", 16)
    assert code == 0, err
    assert out == "".join(letters(ids[37:]) + "\n" for ids in golden["seq"])


def test_lines_in_and_out(run: Any, with_text: Path, golden: Golden, tmp_path: Path) -> None:
    new = golden["seq"][:, 37:]
    source = lines(
        tmp_path / "in",
        {"prompt": letters(golden["ids"][0]), "id": "first", "max_new_tokens": 5},
        {"tokens": golden["ids"][1].tolist(), "id": 7, "stop": letters(golden["seq"][1, 43:45])},
        {"tokens": golden["ids"][1].tolist(), "stop": ["no", "such"], "temperature": 0},
    )
    source.write_text("\n" + source.read_text())
    words = ["--model", with_text, "--jsonl-in", source, "--max-new-tokens", 16]
    code, out, err = run("generate", *CACHE, *words, "--jsonl-out", tmp_path / "out")
    assert code == 0, err
    assert out == letters(new[0][:5]) + "\n" + letters(new[1][:6]) + "\n" + letters(new[1]) + "\n"
    words = [letters(row) for row in new]
    rows = new.tolist()
    got = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert got == [
        {"line": 2, "id": "first", "text": words[0][:5], "tokens": rows[0][:5]}
        | {"finish_reason": "length"},
        {"line": 3, "id": 7, "text": words[1][:6], "tokens": rows[1][:8]}
        | {"finish_reason": "stop"},
        {"line": 4, "text": words[1], "tokens": rows[1], "finish_reason": "length"},
    ]


def test_standard_streams(run: Any, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = json.dumps({"tokens": golden["ids"][0].tolist()}).encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw)))
    words = ["--jsonl-in", "-", "--jsonl-out", "-", "--max-new-tokens", 2, "--quiet"]
    code, out, err = run("generate", *CACHE, *words)
    assert (code, err) == (0, "")
    expected = {"line": 1, "text": None, "tokens": golden["seq"][0, 37:39].tolist()}
    assert json.loads(out) == expected | {"finish_reason": "length"}


def test_chat(run: Any, with_text: Path, golden: Golden, tmp_path: Path) -> None:
    """The template makes the golden prompts, with its special tokens and without the tokenizer's."""
    pytest.importorskip("jinja2")
    folder = tmp_path / "c"
    shutil.copytree(with_text, folder)
    inner = json.loads((folder / "tokenizer.json").read_text())
    begin = letter(0)
    inner["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": begin, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {begin: {"id": begin, "ids": [0], "tokens": [begin]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(inner))
    first, last = letters(golden["ids"][0, :3]), letters(golden["ids"][0, 30:])
    template = (
        first + "{{ messages[0].content }}{% if add_generation_prompt %}" + last + "{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    middle = letters(golden["ids"][0, 3:30])
    expected = letters(golden["seq"][0, 37:]) + "\n"
    words = ["--model", folder, "--max-new-tokens", 16]
    code, out, err = run("generate", *CACHE, *words, "--chat", "--prompt", middle)
    assert (code, out) == (0, expected), err
    source = lines(tmp_path / "in", {"messages": [{"role": "user", "content": middle}]})
    code, out, err = run("generate", *CACHE, *words, "--jsonl-in", source)
    assert (code, out) == (0, expected), err
    code, out, err = run("generate", *CACHE, *words, "--prompt", middle)
    assert code == 0
    assert out != expected
    code, out, err = run("generate", *CACHE, "--model", with_text, "--chat", "--prompt", middle)
    assert (code, out) == (4, "")
    assert "base model" in err


@pytest.mark.parametrize(
    ("line", "about"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ('{"prompt": "a", "tokens": [1]}', "prompt and tokens"),
        ("{}", "none of prompt"),
        ('{"prompt": ""}', "prompt is ''"),
        ('{"prompt": 3}', "prompt is 3"),
        ('{"tokens": []}', "at least one"),
        ('{"tokens": [1, true]}', r"tokens\[1\] is True"),
        ('{"tokens": [1.0]}', r"tokens\[0\] is 1.0"),
        ('{"tokens": [NaN]}', "NaN"),
        ('{"tokens": [1], "tokens": [2]}', "twice"),
        ('{"tokens": [1], "best_of": 3}', "'best_of' is not known"),
        ('{"tokens": [1], "id": [1]}', "id is"),
        ('{"tokens": [1], "stop": 3}', "stop is 3"),
        ('{"messages": []}', "messages"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\]"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', r"messages\[0\]"),
        ('{"messages": [{"role": "user", "content": "a", "tool": 1}]}', r"messages\[0\]"),
        ("[" * 10**5, "not valid JSON"),
        ('{"prompt": "caf\xe9"}'.encode("latin-1"), "not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes, about: str) -> None:
    raw = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "in").write_bytes(b'{"tokens": [1]}\n\n' + raw + b"\n")
    with pytest.raises(UsageError, match=f"in line 3: .*{about}"):
        jsonl.read(tmp_path / "in")


@pytest.mark.parametrize(
    ("line", "about"),
    [
        ({"tokens": [1, 128]}, "line 2: id 128 at index 1"),
        ({"tokens": [2**70]}, "line 2: id"),
        ({"tokens": [1], "temperature": -1}, "line 2: temperature"),
        ({"tokens": [1], "max_new_tokens": 0}, "line 2: max_new_tokens"),
        ({"tokens": [1], "max_new_tokens": None}, "line 2: max_new_tokens"),
        ({"tokens": [1], "stop": [3]}, "line 2: stop"),
        (
            {"tokens": [1] * 40},
            "line 2: 40 tokens leave no room for a new one in --max-model-len 30",
        ),
    ],
)
def test_nothing_runs_before_all_lines_are_right(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: dict[str, Any], about: str
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("wscope_jax.models.registry.load", load)
    source = lines(tmp_path / "in", {"tokens": [1]}, line)
    code, out, err = run("generate", *CACHE, "--jsonl-in", source, "--max-model-len", 30)
    assert (code, out) == (2, "")
    assert about in err


def test_no_lines(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("\n \n")
    with pytest.raises(UsageError, match="has no lines"):
        jsonl.read(tmp_path / "in")
    with pytest.raises(UsageError, match="No such file"):
        jsonl.read(tmp_path / "none")
