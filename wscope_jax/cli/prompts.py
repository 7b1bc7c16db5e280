"""Where a prompt comes from: the command line, a file, files of token ids, or stdin."""

import argparse
import codecs
import contextlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from wscope_jax.cli import weights
from wscope_jax.errors import CheckpointError, UsageError
from wscope_jax.sizes import amount

MOST_BYTES: Final = 64 * 10**6  # of one prompt: some ten million tokens
MOST_IDS: Final = 10**8  # in one file of token ids
_CHUNK_BYTES: Final = 1 << 20

Prompt = str | list[int]
Ids = npt.NDArray[np.int64]


def read_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """The prompts of a `generate` call: texts, or the rows of all `--tokens` files in order.

    Raises:
        UsageError: If there is not exactly one source, or it cannot be read, or a prompt is empty.
    """
    return [prompt for _, prompt in read_named(arguments)]


def read_named(arguments: argparse.Namespace) -> list[tuple[str, Prompt]]:
    """The prompts of `read_prompts`, each with what messages call it.

    Raises:
        UsageError: See `read_prompts`.
    """
    given = list_sources(arguments)
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: give one source of the prompt, not {len(given)}")
    if arguments.prompt_length is not None:
        return _draw(arguments)
    if arguments.tokens is not None:
        return [row for file in arguments.tokens for row in _name_rows(file)]
    if arguments.prompt is not None:
        where, texts = "--prompt", [_argument(text) for text in arguments.prompt]
    elif arguments.prompt_file is not None:
        where = f"--prompt-file {arguments.prompt_file}"
        with opened(arguments.prompt_file, where) as stream:
            texts = [read_text(stream, where)]
    else:
        where = "stdin"
        with opened_stdin() as stream:
            texts = [read_text(stream, where)]
    if not all(texts):
        raise UsageError(f"{where}: the prompt is empty; give it a token")
    names = ["prompt", *(f"prompt {number}" for number in range(1, len(texts) + 1))]
    return list(zip(names[len(texts) > 1 :], texts, strict=False))


def _draw(arguments: argparse.Namespace) -> list[tuple[str, Prompt]]:
    """Random ids of the model's vocabulary, one sequence for each length."""
    lengths = arguments.prompt_length
    if sum(lengths) > MOST_IDS:
        raise UsageError(
            f"--prompt-length: {sum(lengths):,} token ids in all, at most {MOST_IDS:,} are possible; ask for fewer or "
            "shorter prompts"
        )
    draw = np.random.default_rng(weights.seed(arguments))
    most = weights.of(arguments).vocab_size()
    where = [f"--prompt-length {length}" for length in lengths]
    return [
        (name, draw.integers(0, most, n).tolist()) for name, n in zip(where, lengths, strict=True)
    ]


def _name_rows(file: Path) -> list[tuple[str, Prompt]]:
    ids = read_tokens(file)
    if ids.ndim == 1:
        return [(f"--tokens {file}", ids.tolist())]
    return [(f"--tokens {file} row {row} (from 0)", each) for row, each in enumerate(ids.tolist())]


def list_sources(arguments: argparse.Namespace) -> list[str]:
    """The options of the command line that name prompts."""
    sources = {
        "--prompt": arguments.prompt,
        "--prompt-file": arguments.prompt_file,
        "--tokens": arguments.tokens,
        "--prompt-length": arguments.prompt_length,
    }
    return [name for name, value in sources.items() if value is not None]


def read_tokens(file: Path) -> Ids:
    """The token ids of one `.npy` file as int64, [T] for one sequence or [B, T] for a batch.

    Raises:
        UsageError: If the file is missing, empty, beyond `MOST_IDS`, or no int32 or int64 array of 1 or 2 dimensions.
    """
    where = f"--tokens {file}"
    try:
        with file.open("rb") as stream:
            ids = _load(stream, where)
    except UsageError:
        raise
    except OSError as error:
        raise _unreadable(where, error) from error
    except Exception as error:
        # A broken header, which is a Python literal, comes as any of half a dozen errors.
        raise UsageError(
            f"{where}: not a .npy file of numbers; write it with numpy.save"
        ) from error
    if ids.dtype.newbyteorder("=") not in (np.dtype(np.int32), np.dtype(np.int64)):
        raise UsageError(f"{where}: holds {ids.dtype}; give int32 or int64")
    if ids.ndim not in (1, 2):
        raise UsageError(f"{where}: has shape {ids.shape}; give a sequence (1-D) or a batch (2-D)")
    if ids.size == 0:
        raise UsageError(f"{where}: the prompt is empty (shape {ids.shape}); give it a token")
    return ids.astype(np.int64)


def _load(stream: BinaryIO, where: str) -> npt.NDArray[np.generic]:
    """Reads one array; refuses pickles and archives, which `numpy.load` would recognise, and what is too large."""
    form = np.lib.format
    if stream.read(6) != form.MAGIC_PREFIX:
        raise ValueError("no .npy header")
    stream.seek(0)
    read_header = (
        form.read_array_header_1_0
        if form.read_magic(stream) == (1, 0)
        else form.read_array_header_2_0
    )
    shape, _, dtype = read_header(stream)
    if math.prod(shape) * max(1, dtype.itemsize // 8) > MOST_IDS:
        raise UsageError(
            f"{where}: has shape {shape}, more than {MOST_IDS:,} token ids, which no model could read; "
            "give fewer"
        )
    stream.seek(0)
    array: npt.NDArray[np.generic] = form.read_array(stream, allow_pickle=False)
    return array


def _argument(text: str) -> str:
    """A word of the command line, in which Python hides bytes that are not UTF-8 as half surrogates."""
    return decode(text.encode("utf-8", "surrogateescape"), "--prompt")


def _unreadable(where: str, error: OSError) -> UsageError:
    return UsageError(f"{where}: {error.strerror or error}; give a file that can be read")


@contextlib.contextmanager
def opened(file: Path, where: str) -> Iterator[BinaryIO]:
    """The bytes of a file, which is closed after the block.

    Raises:
        UsageError: If it cannot be opened or, within the block, read.
    """
    try:
        with file.open("rb") as stream:
            yield stream
    except OSError as error:
        raise _unreadable(where, error) from error


@contextlib.contextmanager
def opened_stdin() -> Iterator[BinaryIO]:
    """The bytes of stdin.

    Raises:
        UsageError: If it is a terminal, closed or, within the block, cannot be read.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("no prompt; give --prompt, --prompt-file or --tokens, or pipe it to stdin")
    try:
        yield sys.stdin.buffer
    except OSError as error:
        raise _unreadable("stdin", error) from error


def read_text(stream: BinaryIO, where: str) -> str:
    """All text of a stream in UTF-8; what is wrong with it ends the reading at once.

    Raises:
        UsageError: If it is not UTF-8, with the first wrong byte, or longer than `MOST_BYTES`.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    parts, num_bytes, raw = [], 0, b"-"
    while raw:
        raw = stream.read(_CHUNK_BYTES)
        begun = len(decoder.getstate()[0])  # bytes of a character whose end is still to come
        try:
            parts.append(decoder.decode(raw, final=not raw))
        except UnicodeDecodeError as error:
            raise _no_utf8(error, where, num_bytes - begun) from error
        num_bytes += len(raw)
        if num_bytes > MOST_BYTES:
            raise UsageError(
                f"{where}: more than {amount(MOST_BYTES)}, which no model could read as a prompt; shorten it"
            )
    return "".join(parts)


def decode(raw: bytes, where: str) -> str:
    """The text that bytes spell in UTF-8.

    Raises:
        UsageError: If they do not, with the first wrong byte.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _no_utf8(error, where, 0) from error


def _no_utf8(error: UnicodeDecodeError, where: str, before: int) -> UsageError:
    wrong, offset = error.object[error.start], before + error.start
    return UsageError(
        f"{where}: not UTF-8: byte 0x{wrong:02x} at offset {offset}; encode it in UTF-8"
    )


def require_tokenizer(model: Path | None) -> None:
    """Refuses before weights are read. What is no checkpoint at all is left to the loader.

    Raises:
        UsageError: If there is no checkpoint.
        CheckpointError: If the checkpoint has no tokenizer.
    """
    if model is None:
        raise UsageError(
            "--random-weights: has no tokenizer, so a text prompt cannot be encoded; "
            "give token ids with --tokens F.npy or --prompt-length N"
        )
    from wscope_jax.checkpoint import locate, open_directory

    try:
        root = open_directory(model)
        is_missing = locate(root, "config.json") and not locate(root, "tokenizer.json")
    except CheckpointError:  # that, too, is the loader's to tell
        return
    if is_missing:
        raise CheckpointError(
            f"{model}: no tokenizer.json, so a text prompt cannot be encoded; "
            "give token ids with --tokens F.npy"
        )
