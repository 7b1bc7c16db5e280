"""What a message calls a thing is what the user called it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import wscope_jax
from tests.mistakes import commands
from tests.mistakes.commands import TINY, check, tiny_with, wscope

DEMO = Path(wscope_jax.__file__).parent / "assets" / "demo_model"


@pytest.fixture(autouse=True)
def _command(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with commands.in_process(monkeypatch):
        yield


def refusal(*words: object, code: int = 2) -> str:
    """The line with which `generate` ends."""
    done = wscope("generate", *words)
    check(done)
    assert done.code == code, done
    return done.err


def test_files_of_ids(tmp_path: Path) -> None:
    good, bad, batch = tmp_path / "good.npy", tmp_path / "bad.npy", tmp_path / "batch.npy"
    np.save(good, np.arange(9))
    np.save(bad, np.array([1, -5]))
    np.save(batch, np.array([[1, 2], [3, 10**9]]))
    assert f"--tokens {bad}: id -5 at index 1" in refusal(*tiny_with(bad))
    assert f"--tokens {bad}: id -5" in refusal(*tiny_with(good), "--tokens", bad)
    assert f"--tokens {batch} row 1 (from 0): id 1000000000" in refusal(*tiny_with(batch))


@pytest.mark.parametrize(
    "line",
    [{"prompt": "\ud800"}, {"tokens": [-4]}, {"prompt": "a", "temperature": -3}, {"prompt": ""}],
    ids=repr,
)
def test_every_error_of_a_line_names_file_and_line(tmp_path: Path, line: object) -> None:
    file = tmp_path / "in"
    file.write_text('{"prompt": "good"}\n' + json.dumps(line) + "\n")
    assert f"--jsonl-in {file} line 2: " in refusal("--model", DEMO, "--jsonl-in", file)


def test_messages_without_a_template(tmp_path: Path) -> None:
    file = tmp_path / "in"
    file.write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    assert "without --chat" not in refusal("--model", DEMO, "--jsonl-in", file, code=4)


@pytest.mark.parametrize(
    "option", ["--model", "--prompt-file", "--tokens", "--jsonl-in", "--jsonl-out"]
)
def test_an_empty_name(option: str) -> None:
    assert f"{option} is empty; " in refusal("--model", TINY, "--prompt", "x", option, "")
    if option == "--model":
        done = wscope("plan", "--model", "")
        assert (done.code, "--model is empty; " in done.err) == (2, True)


def test_an_option_that_is_not_known() -> None:
    line = refusal("--model", TINY, "--prompt", "x", "--no-such")
    assert line == "wscope: error: unrecognized arguments: --no-such (see wscope generate --help)\n"


def test_a_budget_without_a_gpu(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(9))
    words = [*tiny_with(tmp_path / "ids.npy"), "--max-new-tokens", 1, "--gpu-memory", "1TiB"]
    done = wscope("generate", *words)
    assert "the budget of 1.100 TB is not used" in done.err
    assert "wscope: 1 token, " in done.err


def test_an_error_in_the_middle_is_no_interruption(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from wscope_jax.programs import ModelPrograms

    def broken(*_: object) -> None:
        raise KeyError("broken")

    np.save(tmp_path / "ids.npy", np.arange(9))
    monkeypatch.setattr(ModelPrograms, "step", broken)
    done = wscope("generate", *tiny_with(tmp_path / "ids.npy"), "--json")
    check(done)
    assert done.code == 1
    assert json.loads(done.out)["finish_reason"] == ["error"]


def test_a_plan_takes_no_checkpoint_that_a_run_refuses(tmp_path: Path) -> None:
    """A key that is absent has its family's default, which the files contradict."""
    for file in DEMO.iterdir():
        os.link(file, tmp_path / file.name) if file.name != "config.json" else None
    values = json.loads((DEMO / "config.json").read_text())
    del values["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    refused = refusal("--model", tmp_path, "--prompt", "x", code=4)
    done = wscope("plan", "--model", tmp_path)
    assert (done.code, done.err) == (4, refused)
    assert "has shape" in refused


def test_a_template_of_another_name(tmp_path: Path) -> None:
    for file in DEMO.iterdir():
        os.link(file, tmp_path / file.name)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    words = ["--model", tmp_path, "--prompt", "x", "--chat", "--chat-template"]
    line = refusal(*words, "zzz")
    assert "--chat-template 'zzz': " in line
    assert "chat_template.jinja is the only one, which is called 'default'" in line


def test_a_share_of_minus_nothing() -> None:
    done = wscope("plan", "--model", DEMO, "--cpu-share", "-0", "--json")
    assert done.code == 0
    assert "-0" not in done.out


def test_a_plan_tells_what_it_takes_for_granted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    done = wscope("plan", "--model", tmp_path)
    assert done.code == 0
    assert (
        "config.json: hidden_size is missing; 2048 is taken, the default of qwen3_moe" in done.err
    )
