"""Between text and token ids: a checkpoint's tokenizer.json, and decoding while tokens arrive.

Of tokenizer_config.json one key counts: `add_bos_token`, by which DeepSeek's checkpoints ask for a begin token that
their tokenizer.json does not put there.

The tokenizers library is imported only when a tokenizer is read.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from wscope_jax.checkpoint import locate, open_directory, read_bytes, read_json, show
from wscope_jax.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import tokenizers

FILE_NAME: Final = "tokenizer.json"
CONFIG_FILE: Final = "tokenizer_config.json"
MOST_BYTES: Final = 256 * 2**20  # a hundred thousand tokens take ten MiB
REPLACEMENT: Final = "\ufffd"  # what an incomplete character decodes to


class Tokenizer:
    """The tokenizer of a checkpoint; it neither truncates nor pads."""

    def __init__(self, inner: "tokenizers.Tokenizer", begin_id: int | None = None) -> None:
        """Takes over a tokenizer of the library; switches its truncation and padding off.

        Args:
            inner: the tokenizer.
            begin_id: put before every text that does not begin with it.
        """
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._begin_id = begin_id
        self._byte_ids = _find_byte_ids(inner)
        added = inner.get_added_tokens_decoder()
        self._silent_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def from_dir(cls, directory: str | Path, vocab_size: int | None = None) -> "Tokenizer | None":
        """Reads tokenizer.json of a checkpoint directory, and whether a begin token is asked for beside it.

        Without a tokenizer.json there is no tokenizer: None.

        Args:
            directory: the checkpoint.
            vocab_size: the model's number of token ids, to be checked against.

        Raises:
            CheckpointError: If there is no such directory, the file is refused (see
                `checkpoint.locate`) or cannot be read as a tokenizer, or has ids that the model has not, or not
                the begin token that is asked for.
        """
        root = open_directory(directory)
        path = locate(root, FILE_NAME)
        if path is None:
            return None
        inner = _read(path)
        tokenizer = cls(inner, _find_begin_id(root, inner))
        if vocab_size is not None and tokenizer.num_ids > vocab_size:
            raise CheckpointError(
                f"{path}: its ids reach {tokenizer.num_ids - 1}, but the model has {vocab_size} "
                "(vocab_size in config.json); take both from the same checkpoint"
            )
        return tokenizer

    @property
    def num_ids(self) -> int:
        """The highest token id plus one, added tokens included."""
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, is_whole: bool = False) -> list[int]:
        """Token ids of a text; with a begin token only if the checkpoint asks for one.

        Args:
            text: the text.
            is_whole: the text has its special tokens already, as what a chat template makes.

        Raises:
            UsageError: If the text holds half of a surrogate pair, which is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"prompt: character {error.start} is {text[error.start]!r}, half of a surrogate "
                "pair; give valid Unicode text"
            ) from None
        ids = list(self._inner.encode(text, add_special_tokens=not is_whole).ids)
        if self._begin_id is not None and not is_whole and ids[:1] != [self._begin_id]:
            ids.insert(0, self._begin_id)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids. Special tokens and ids without a token give nothing."""
        return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def ends_in_bytes(self, ids: Sequence[int]) -> bool:
        """Whether the text ends in a run of byte tokens, which the next token may continue.

        Such a run decodes as a whole or, if it is not valid UTF-8, to one replacement character per
        byte: its text is certain only when the run has ended. Tokens that give no text do not end
        it.
        """
        if not self._byte_ids:
            return False
        for token_id in reversed(ids):
            if token_id in self._byte_ids:
                return True
            if token_id not in self._silent_ids and self._inner.id_to_token(token_id) is not None:
                return False
        return False


class IncrementalDecoder:
    """Turns a stream of token ids into pieces of text that never have to be taken back.

    The pieces join to what `Tokenizer.decode` gives for all ids at once. Of a character that is
    spread over several tokens nothing appears before its last byte.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Starts at the beginning of a text."""
        self._tokenizer = tokenizer
        # A decoder treats the beginning of a text differently (a leading space), so each piece is
        # decoded behind the tokens of the piece before it.
        self._ids: list[int] = []
        self._num_settled = 0  # ids at the front whose text is out and ends with a whole character
        self._emitted = ""  # what of the text of `_ids` is out

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next tokens and gives the text that they make certain."""
        self._ids.extend(ids)
        if self._tokenizer.ends_in_bytes(self._ids):
            return ""
        text = self._tokenizer.decode(self._ids)
        # The last character may be the beginning of another one; those before it are what they are.
        settled = text.removesuffix(REPLACEMENT)
        delta = self._emit(settled)
        if settled == text and self._emitted == text:
            self._forget()
        return delta

    def flush(self) -> str:
        """Ends the text and gives the rest of it."""
        return self._emit(self._tokenizer.decode(self._ids))

    def _emit(self, text: str) -> str:
        """The part of the text that is new; nothing while the decoder goes back on what is out."""
        if not text.startswith(self._emitted):
            return ""
        delta = text[len(self._emitted) :]
        self._emitted = text
        return delta

    def _forget(self) -> None:
        """Drops all ids but those of the last piece, if these have text to stand behind."""
        last_piece = self._ids[self._num_settled :]
        text = self._tokenizer.decode(last_piece)
        if text:
            self._ids = last_piece
            self._emitted = text
        self._num_settled = len(self._ids)


def _read(path: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    content = read_bytes(path, MOST_BYTES)
    try:
        return tokenizers.Tokenizer.from_str(content.decode())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path}: cannot be read as a tokenizer: {reason}; fetch it again from where the "
            "checkpoint came from"
        ) from None


def _find_begin_id(root: Path, inner: "tokenizers.Tokenizer") -> int | None:
    """The id of the begin token, if tokenizer_config.json wants one before every text."""
    path = locate(root, CONFIG_FILE)
    config = {} if path is None else read_json(path)
    named = config.get("bos_token")
    if config.get("add_bos_token") is not True or named is None:
        return None
    token = named.get("content") if isinstance(named, dict) else named
    begin_id = inner.token_to_id(token) if isinstance(token, str) else None
    if begin_id is None:
        raise CheckpointError(
            f"{path}: add_bos_token is true, but bos_token is {show(named)}, which is no token of "
            f"{FILE_NAME}; take both from the same checkpoint"
        )
    return begin_id


def _find_byte_ids(inner: "tokenizers.Tokenizer") -> frozenset[int]:
    """Ids of the tokens <0x00> to <0xFF>, if the decoder joins runs of them to characters."""
    decoder = json.loads(inner.to_str()).get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    if not any(step.get("type") == "ByteFallback" for step in steps):
        return frozenset()
    ids = (inner.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in ids if token_id is not None)
