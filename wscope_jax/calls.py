"""One call of an engine: what it asks for, checked before anything is made for it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from wscope_jax.arguments import integer, shown
from wscope_jax.errors import UsageError
from wscope_jax.sampling import Sampling
from wscope_jax.token_ids import Prompt, prompt_ids
from wscope_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Call:
    """Prompts and how each of them is to go on.

    Attributes:
        ids: token ids of each prompt.
        samplings: settings of each.
        max_len: tokens that a row may hold; more than the longest prompt has.
    """

    ids: list[list[int]]
    samplings: list[Sampling]
    max_len: int

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        sampling: Any,
        max_model_len: int | None,
        *,
        vocab_size: int,
        tokenizer: Tokenizer | None,
    ) -> "Call":
        """What `Engine.stream` was given.

        Raises:
            UsageError: an empty prompt, an id or a setting out of range, text without a tokenizer, no room.
        """
        ids = prompt_ids(prompts, vocab_size, tokenizer)
        samplings = _settings(sampling, len(ids))
        for setting in samplings:
            _check(setting, vocab_size, tokenizer)
        longest = max(map(len, ids))
        if max_model_len is not None:
            max_len = integer("max_model_len", max_model_len, 1)
        else:
            rows = zip(ids, samplings, strict=True)
            max_len = max(len(row) + setting.max_new_tokens for row, setting in rows)
        if longest >= max_len:
            raise UsageError(
                f"prompt: {longest} tokens leave no room for a new one in max_model_len={max_len}; shorten it or raise "
                "the limit"
            )
        return cls(ids, samplings, max_len)


def _settings(sampling: Any, num_prompts: int) -> list[Sampling]:
    """The settings of each prompt."""
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling or Sampling()] * num_prompts
    if not isinstance(sampling, Sequence) or not all(isinstance(s, Sampling) for s in sampling):
        raise UsageError(
            f"sampling: expected Sampling(...), or a list of them, got {shown(sampling)}"
        )
    if len(sampling) != num_prompts:
        raise UsageError(
            f"sampling: expected one setting for each of {num_prompts} prompts, got {len(sampling)}"
        )
    return list(sampling)


def _check(setting: Sampling, vocab_size: int, tokenizer: Tokenizer | None) -> None:
    """Raises UsageError for what this model cannot do."""
    if setting.stop and tokenizer is None:
        raise UsageError(
            "stop: this checkpoint has no tokenizer.json, so there is no text to find stop strings in; give none"
        )
    if setting.top_k > vocab_size:
        raise UsageError(
            f"top_k: expected an integer from 0 to {vocab_size}, the size of the vocabulary, got {setting.top_k}"
        )
