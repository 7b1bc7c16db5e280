"""What callers give as prompts or forced texts, as token ids that the model has."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wscope_jax.arguments import shown
from wscope_jax.errors import UsageError
from wscope_jax.tokenizer import Tokenizer

Prompt = str | Sequence[int]


def prompt_ids(
    prompts: Sequence[Prompt], vocab_size: int, tokenizer: Tokenizer | None
) -> list[list[int]]:
    """Ids of each prompt.

    Args:
        prompts: texts, or sequences of ids, or an array [prompts, ids].
        vocab_size: number of ids that the model has.
        tokenizer: for texts.

    Raises:
        UsageError: no prompt, an empty one, an id out of range, text without a tokenizer.
    """
    if isinstance(prompts, str):
        raise UsageError("prompts: expected a list of prompts, got one text; give [text]")
    if prompts is not None and not _is_list(prompts):
        raise UsageError(f"prompts: expected a list of prompts, got {shown(prompts)}")
    each: list[Any] = [] if prompts is None else list(prompts)
    if not each:
        raise UsageError("prompts: expected at least one prompt, got none")
    return [_ids(number, prompt, vocab_size, tokenizer) for number, prompt in enumerate(each)]


def id_array(ids: Any, vocab_size: int) -> npt.NDArray[np.int32]:
    """Int32 [B, T] of integers [T] or [B, T].

    Raises:
        UsageError: another type or shape, nothing at all, an id out of range.
    """
    try:
        array = np.asarray(ids)
    except ValueError:  # rows of different lengths
        raise UsageError(
            f"tokens: expected integers [T] or [B, T], got {shown(ids)}; give rows of one length"
        ) from None
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or array.size == 0:
        raise UsageError(
            f"tokens: expected integers [T] or [B, T], at least one, got {array.dtype} {list(array.shape)}"
        )
    check_ids(array, vocab_size, "tokens")
    return np.atleast_2d(array).astype(np.int32)


def check_ids(ids: npt.ArrayLike, vocab_size: int, where: str) -> None:
    """Checks that there are token ids, and that the model has them.

    Args:
        ids: integers [T] or [B, T].
        vocab_size: number of ids that the model has.
        where: what the message calls them.

    Raises:
        UsageError: there is none, or one is out of range.
    """
    array = np.asarray(ids)
    if not array.size:
        raise UsageError(f"{where} is empty: it has no token; give it one")
    wrong = np.argwhere((array < 0) | (array >= vocab_size))
    if len(wrong):
        *row, at = wrong[0].tolist()
        place = f"row {row[0]}, column {at} (both from 0)" if row else f"index {at}"
        raise UsageError(
            f"{where}: id {int(array[*row, at])} at {place} is outside the vocabulary, 0 to "
            f"{vocab_size - 1}; was it made with another tokenizer?"
        )


def _ids(number: int, prompt: Prompt, vocab_size: int, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UsageError("prompt: this checkpoint has no tokenizer.json; give token ids")
        ids = tokenizer.encode(prompt)
    elif _is_list(prompt):
        ids = [_integer(value, at, number) for at, value in enumerate(prompt)]
    else:
        raise UsageError(
            f"prompts: prompt {number} is {shown(prompt)}; expected a text or a list of token ids"
        )
    check_ids(ids, vocab_size, f"prompt {number}")
    return ids


def _is_list(given: Any) -> bool:
    """Whether there is one thing after another in it; there is not in an array without dimensions."""
    is_bytes = isinstance(given, bytes | bytearray)
    return isinstance(given, Iterable) and getattr(given, "ndim", 1) > 0 and not is_bytes


def _integer(value: Any, at: int, number: int) -> int:
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise UsageError(
            f"tokens: {shown(value)} at index {at} of prompt {number} is no token id; give integers"
        ) from None
