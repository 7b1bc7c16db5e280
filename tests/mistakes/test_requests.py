"""Wrong prompts, absurd options: what is refused, and in which words."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines import ALL_POLICIES, engine
from tests.mistakes.commands import TINY, caught, check, refused, wscope
from wscope_jax import Sampling, machine
from wscope_jax.cli import groups
from wscope_jax.errors import UsageError

MODEL = ["--model", TINY, "--dtype", "float32", "--window", 32]


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    np.save(tmp_path / "ids.npy", np.arange(1, 70, dtype=np.int32))
    return tmp_path / "ids.npy"


def no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with a request is said before weights are read."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("wscope_jax.models.registry.load", load)


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize(
    ("words", "about"),
    [
        (["--max-new-tokens", 0], ["--max-new-tokens", "at least 1"]),
        (["--max-new-tokens", -1], ["--max-new-tokens"]),
        (["--max-new-tokens", 2**31], ["--max-new-tokens:", str(2**31 - 1)]),
        (["--temperature", -0.1], ["--temperature:", "0 to 100"]),
        (["--temperature", "nan"], ["--temperature:"]),
        (["--temperature", "inf"], ["--temperature:"]),
        (["--top-p", 0], ["--top-p:", "above 0"]),
        (["--top-p", 1.1], ["--top-p:"]),
        (["--min-p", -1], ["--min-p:"]),
        (["--top-k", -1], ["--top-k:"]),
        (["--seed", 2**63], ["--seed:", str(2**63 - 1)]),
        (["--seed", "9" * 5000], ["--seed"]),
        (["--stop", ""], ["--stop:", "1 to 1024"]),
        (["--stop", "x"] * 65, ["--stop:", "64"]),
        (["--stop", "x" * 1025], ["--stop:"]),
        (["--max-model-len", 68], ["--tokens", "69 tokens", "68", "--truncate"]),
        (["--max-model-len", 10**19], ["--max-model-len"]),
        (["--window", 48], ["--window"]),
        (["--threads", 0], ["--threads"]),
        (["--host-memory", "0GiB"], ["--host-memory"]),
        (["--policy", "none"], ["--policy"]),
        (["--policy", "cpu_only", "--cpu-share", "0.3"], ["--cpu-share: policy cpu_only"]),
        (
            ["--max-model-len", 10**10],
            ["--max-model-len: expected an integer from 1 to 2147483647"],
        ),
        (["--max-model-len", 69], ["69 tokens leave no room", "in --max-model-len 69"]),
        (["--jsonl-out", "/no/such/place"], ["--jsonl-out", "/no/such"]),
        (["--jsonl-out", "-", "--json"], ["--json", "--jsonl-out"]),
        (["--chat"], ["--chat and --tokens"]),
        (["--chat-template", "x"], ["--chat-template", "--chat"]),
        (["--prompt", "a"], ["--prompt and --tokens"]),
        (["--jsonl-in", "x"], ["--jsonl-in and --tokens"]),
    ],
)
def test_what_is_out_of_range_is_refused(
    ids: Path, monkeypatch: pytest.MonkeyPatch, words: list[Any], about: list[str]
) -> None:
    no_load(monkeypatch)
    refused(wscope("generate", *MODEL, "--tokens", ids, *words), 2, *about)


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["generate", "--prompt-file", "none"], "No such file or directory; give a file that"),
        (["generate", "--prompt-file", "."], "Is a directory; give a file that can be read"),
        (["generate", "--prompt-file", "latin"], "at offset 3; encode it in UTF-8"),
        (["generate", "--tokens", "none.npy"], "No such file or directory; give a file that"),
        (["generate", "--tokens", "float.npy"], "holds float64; give int32 or int64"),
        (["generate", "--jsonl-in", "none"], "No such file or directory; give a file that"),
        (["generate", "--jsonl-in", "broken"], "line 1 column 2 (char 1); correct it there"),
        (
            ["generate", "--prompt", "a", "--jsonl-out", "none/x"],
            "no directory none; make it first",
        ),
        (
            ["score", "--tokens", "ids.npy", "--prefill", 1, "--max-model-len", 3],
            "less than the 69 tokens; raise it, or leave it out",
        ),
    ],
)
def test_a_refusal_says_what_to_do(
    ids: Path, monkeypatch: pytest.MonkeyPatch, words: list[Any], remedy: str
) -> None:
    no_load(monkeypatch)
    monkeypatch.chdir(ids.parent)
    Path("latin").write_bytes("caf\xe9".encode("latin-1"))
    Path("broken").write_text("{")
    np.save("float.npy", np.zeros(3))
    refused(wscope(*words, *MODEL), 2, remedy)


@pytest.mark.usefixtures("command")
def test_random_weights_have_no_tensors_to_check() -> None:
    words = ["--random-weights", "mixtral-8x7b", "--prompt-length", 3, "--check-tensors"]
    refused(wscope("generate", *words), 2, "--random-weights has none; leave it out")


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize("words", [["generate"], ["score", "--prefill", 1]])
@pytest.mark.parametrize("budget", [["--host-memory", "1KB"], ["--max-model-len", 10**9]])
def test_what_does_not_fit_is_refused_before_weights_are_read(
    ids: Path, monkeypatch: pytest.MonkeyPatch, words: list[Any], budget: list[Any]
) -> None:
    no_load(monkeypatch)
    done = wscope(*words, *MODEL, "--tokens", ids, *budget)
    is_named = "--host-memory" in budget
    memory = "host memory" if is_named else "this machine's memory"
    refused(done, 3, f"error: {memory}: the placed blocks", "short by")
    assert ("raise --host-memory" if is_named else "free memory on this machine") in done.err
    assert "another machine" not in done.err  # that is for plan


@pytest.mark.usefixtures("command")
def test_windows_that_the_machine_cannot_hold_are_refused_before_weights_are_read(
    ids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_load(monkeypatch)
    memory = machine.Memory(10**6, 10**6, None, 10**6)
    monkeypatch.setattr(machine, "memory", lambda: memory)
    done = wscope("generate", *MODEL, "--tokens", ids, "--host-memory", "1GB", "--quiet")
    refused(done, 3, "this machine's memory", "short by", "free memory on this machine")


@pytest.mark.usefixtures("command")
def test_score_takes_ids_of_the_vocabulary_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_load(monkeypatch)
    np.save(tmp_path / "ids.npy", np.array([1, 2, 128]))
    words = ["--tokens", tmp_path / "ids.npy", "--prefill", 1]
    refused(wscope("score", *MODEL, *words), 2, "--tokens", "id 128 at index 2", "0 to 127")


@pytest.mark.usefixtures("command")
def test_an_id_in_a_batch_is_named_by_row_and_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_load(monkeypatch)
    np.save(tmp_path / "ids.npy", np.array([[1, 2, 3], [4, 5, -6]]))
    words = ["--tokens", tmp_path / "ids.npy"]
    done = wscope("score", *MODEL, *words, "--prefill", 1)
    refused(done, 2, "--tokens", "id -6 at row 1, column 2 (both from 0)")
    refused(wscope("generate", *MODEL, *words), 2, "ids.npy row 1 (from 0): id -6 at index 2")


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize("verb", ["generate", "score", "inspect"])
def test_a_configuration_is_no_checkpoint(
    ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = {"generate": ["--tokens", ids], "score": ["--tokens", ids, "--prefill", 1]}
    command = [verb, "--model", "qwen3-30b-a3b", *words.get(verb, [])]
    refused(wscope(*command), 4, "configuration without weights", "`wscope plan`", "directory")
    (tmp_path / "qwen3-30b-a3b").mkdir()  # a directory of that name is one
    refused(wscope(*command), 4, "error: qwen3-30b-a3b: ")


@pytest.mark.usefixtures("command")
def test_a_text_that_places_nothing_needs_no_host_memory(tmp_path: Path) -> None:
    """The budget is for placed blocks: below the window there are none, whatever the budget."""
    np.save(tmp_path / "ids.npy", np.arange(5, dtype=np.int32))
    words = [*MODEL, "--tokens", tmp_path / "ids.npy", "--host-memory", "1KiB", "--json"]
    done = wscope("generate", *words, "--max-new-tokens", 26)
    assert (done.code, done.err) == (0, "")
    held = json.loads(done.out)["regions"]
    assert held["unpinned"]["tokens"] == held["pinned"]["tokens"] == 0
    refused(wscope("generate", *words, "--max-new-tokens", 27), 3, "host memory", "is 1.024 KB")


@pytest.mark.usefixtures("command")
def test_a_budget_beyond_the_machine_is_taken_and_told(ids: Path) -> None:
    words = [*MODEL, "--tokens", ids, "--max-new-tokens", 1, "--host-memory", "4TB"]
    done = wscope("generate", *words)
    assert done.code == 0
    (line,) = [line for line in done.err.splitlines() if "warning" in line]
    assert line.startswith("wscope: warning: --host-memory 4.000 TB: this ")
    assert wscope("generate", *words, "--quiet").err == ""


@pytest.mark.usefixtures("command")
def test_top_k_beyond_the_vocabulary(ids: Path) -> None:
    refused(wscope("generate", *MODEL, "--tokens", ids, "--top-k", 129), 2, "--top-k:", "128")


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--max-model-len", 10**18], 2),
        (["--max-model-len", 10**12], 2),
        (["--max-model-len", 10**9], 3),
        (["--max-model-len", 10**9, "--policy", "resident"], 3),
        (["--max-new-tokens", 2**31 - 1], 2),
        (["--max-new-tokens", 2**31 - 100, "--policy", "cpu_only"], 3),
        (["--host-memory", "1B"], 3),
        (["--threads", 10**6, "--max-new-tokens", 1, "--json"], 0),
        (["--threads", 10**17, "--max-new-tokens", 1, "--json"], 0),
        (["--gpu-memory", "1B", "--max-new-tokens", 1, "--json"], 0),
    ],
)
def test_absurd_sizes(ids: Path, words: list[Any], code: int) -> None:
    done = wscope("generate", *MODEL, "--tokens", ids, *words)
    check(done)
    assert done.code == code, done
    if code:
        assert done.out == ""


@pytest.mark.usefixtures("command")
def test_more_threads_than_cores_are_not_started(ids: Path) -> None:
    done = wscope("generate", *MODEL, "--tokens", ids, "--threads", 999, "--max-new-tokens", 1)
    assert done.code == 0
    assert "--threads: 999 workers were asked for" in done.err


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize(("side", "kept"), [("left", slice(-31, None)), ("right", slice(31))])
def test_truncation_is_asked_for_and_told(
    ids: Path, tmp_path: Path, side: str, kept: slice
) -> None:
    words = ["--max-model-len", 32, "--max-new-tokens", 1]
    done = wscope("generate", *MODEL, "--tokens", ids, *words, "--truncate", side)
    assert done.code == 0
    assert f"31 of 69 tokens are kept, cut at the {side}" in done.err
    np.save(tmp_path / "cut.npy", np.load(ids)[kept])
    assert wscope("generate", *MODEL, "--tokens", tmp_path / "cut.npy", *words).out == done.out


@pytest.mark.usefixtures("command")
def test_empty_prompts(tmp_path: Path) -> None:
    refused(wscope("generate", *MODEL, "--prompt", ""), 2, "empty")
    (tmp_path / "empty").touch()
    refused(wscope("generate", *MODEL, "--prompt-file", tmp_path / "empty"), 2, "empty")
    np.save(tmp_path / "none.npy", np.zeros((3, 0), np.int32))
    refused(wscope("generate", *MODEL, "--tokens", tmp_path / "none.npy"), 2, "empty")
    with pytest.raises(UsageError, match="prompt 1 is empty"):
        engine().generate([[1], [], [2]])


@pytest.mark.usefixtures("command")
def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"good \xe9 bad")
    refused(wscope("generate", *MODEL, "--prompt-file", tmp_path / "p"), 2, "0xe9", "offset 5")
    refused(wscope("generate", *MODEL, "--prompt", "ab\udcff"), 2, "--prompt", "0xff", "offset 2")


@pytest.mark.parametrize(
    ("prompt", "about"),
    [
        ([1, 2, 128], "prompt 1: id 128 at index 2"),
        ([1, -1], "-1 at index 1"),
        ([2**70], "index 0"),
        ([1, 2.0], r"2\.0 at index 1 of prompt 1"),
        ([1, True], "True at index 1"),
        ([1, None], "None at index 1"),
        (["1"], "'1' at index 0"),
        ([math.nan], "nan at index 0"),
        ("text", r"tokenizer\.json"),
    ],
)
def test_ids_are_named_with_their_index(prompt: Any, about: str) -> None:
    with pytest.raises(ValueError, match=about):
        engine().generate([[1], prompt])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.dictionaries(
        st.sampled_from(groups.SAMPLING),
        st.one_of(
            st.integers(),
            st.floats(),
            st.none(),
            st.booleans(),
            st.text(max_size=3),
            st.lists(st.text(max_size=3), max_size=3).map(tuple),
            st.just(np.float32("nan")),
            st.just(np.int64(-1)),
        ),
    )
)
def test_any_value_is_taken_or_refused(values: dict[str, Any]) -> None:
    text = caught(UsageError, lambda: Sampling(**values))
    assert text is None or text.split(":")[0] in values


def test_a_batch_of_257_rows() -> None:
    """Rows of all lengths, duplicates, and rows that end at once: each equals its solo run."""
    eng = engine()
    eng.policy = ALL_POLICIES["share_0.5"]
    draw = np.random.default_rng(0)
    few = [draw.integers(0, 128, length).tolist() for length in (1, 33, 40, 70)]
    how = [Sampling(max_new_tokens=n, ignore_eos=True) for n in (5, 1, 3, 6)]
    alone = [
        eng.generate([prompt], each, max_model_len=96).tokens[0]
        for prompt, each in zip(few, how, strict=True)
    ]
    which = [0, *(draw.integers(0, 4, 256)).tolist()]
    result = eng.generate([few[i] for i in which], [how[i] for i in which], max_model_len=96)
    assert result.tokens == [alone[i] for i in which]
