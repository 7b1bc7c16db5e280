"""Messages of the library in the words of the command line."""

import pytest

from wscope_jax.cli import spelling

PARAMETERS = ("top_k", "host_memory", "max_model_len", "window", "prompt", "tokens")


@pytest.mark.parametrize(
    ("words", "text", "expected"),
    [
        ("--top-k -1", "top_k: expected 0, got -1", "--top-k: expected 0, got -1"),
        ("", "host_memory: one block", "--host-memory: one block"),
        ("--window 32", "window: expected 64", "--window: expected 64"),
        ("--window=32", "window: expected 64", "--window: expected 64"),
        ("", "window: no memory for the rings", "window: no memory for the rings"),
        (
            "--tokens f",
            "prompt: 3 tokens in max_model_len=3",
            "prompt: 3 tokens in --max-model-len 3",
        ),
        ("--prompt a", "prompt: it is empty", "--prompt: it is empty"),
        ("--top-k 1", "--jsonl-in f line 2: top_k: no", "--jsonl-in f line 2: top_k: no"),
        ("--top-k 1", "the key top_k is unknown", "the key top_k is unknown"),
        ("--seed 1", "other_name: no", "other_name: no"),
    ],
)
def test_spell(words: str, text: str, expected: str) -> None:
    spelling.learn(PARAMETERS, words.split())
    assert spelling.spell(text) == expected


def test_an_earlier_command_is_forgotten() -> None:
    spelling.learn(PARAMETERS, ["--window"])
    spelling.learn([], [])
    assert spelling.spell("window: no") == "window: no"
