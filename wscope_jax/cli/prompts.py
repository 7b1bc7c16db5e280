"""Where a prompt comes from: the command line, a file, files of token ids, or stdin."""

import argparse
import sys
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from wscope_jax.errors import CheckpointError, UsageError

Prompt = str | list[int]
Ids = npt.NDArray[np.int64]


def read_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """The prompts of a `generate` call: texts, or the rows of all `--tokens` files in order.

    Raises:
        UsageError: If there is not exactly one source, or it cannot be read, or a prompt is empty.
    """
    given = list_sources(arguments)
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: give one source of the prompt, not {len(given)}")
    if arguments.tokens is not None:
        return [
            row for file in arguments.tokens for row in np.atleast_2d(read_tokens(file)).tolist()
        ]
    if arguments.prompt is not None:
        where, texts = "--prompt", [_argument(text) for text in arguments.prompt]
    elif arguments.prompt_file is not None:
        where = f"--prompt-file {arguments.prompt_file}"
        texts = [decode(read_file(arguments.prompt_file, where), where)]
    else:
        where = "stdin"
        texts = [decode(read_stdin(), where)]
    if not all(texts):
        raise UsageError(f"{where}: the prompt is empty; give it a token")
    return list(texts)


def list_sources(arguments: argparse.Namespace) -> list[str]:
    """The options of the command line that name prompts."""
    sources = {
        "--prompt": arguments.prompt,
        "--prompt-file": arguments.prompt_file,
        "--tokens": arguments.tokens,
    }
    return [name for name, value in sources.items() if value is not None]


def read_tokens(file: Path) -> Ids:
    """The token ids of one `.npy` file as int64, [T] for one sequence or [B, T] for a batch.

    Raises:
        UsageError: If the file is missing, empty, or no int32 or int64 array of 1 or 2 dimensions.
    """
    where = f"--tokens {file}"
    try:
        with file.open("rb") as stream:
            ids = _load(stream)
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror or error}") from error
    except Exception as error:
        # A broken header, which is a Python literal, comes as any of half a dozen errors.
        raise UsageError(
            f"{where}: not a .npy file of numbers; write it with numpy.save"
        ) from error
    if ids.dtype.newbyteorder("=") not in (np.dtype(np.int32), np.dtype(np.int64)):
        raise UsageError(f"{where}: holds {ids.dtype}; token ids are int32 or int64")
    if ids.ndim not in (1, 2):
        raise UsageError(f"{where}: has shape {ids.shape}; give a sequence (1-D) or a batch (2-D)")
    if ids.size == 0:
        raise UsageError(f"{where}: the prompt is empty (shape {ids.shape}); give it a token")
    return ids.astype(np.int64)


def _load(stream: BinaryIO) -> npt.NDArray[np.generic]:
    """Reads one array; refuses pickles and archives, which `numpy.load` would recognise."""
    if stream.read(6) != np.lib.format.MAGIC_PREFIX:
        raise ValueError("no .npy header")
    stream.seek(0)
    array: npt.NDArray[np.generic] = np.lib.format.read_array(stream, allow_pickle=False)
    return array


def _argument(text: str) -> str:
    """A word of the command line, in which Python hides bytes that are not UTF-8 as half surrogates."""
    return decode(text.encode("utf-8", "surrogateescape"), "--prompt")


def read_file(file: Path, where: str) -> bytes:
    """All bytes of a file.

    Raises:
        UsageError: If it cannot be read.
    """
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror or error}") from error


def read_stdin() -> bytes:
    """All bytes of stdin.

    Raises:
        UsageError: If it is a terminal, closed, or cannot be read.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("no prompt; give --prompt, --prompt-file or --tokens, or pipe it to stdin")
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise UsageError(f"stdin: {error.strerror or error}") from error


def decode(raw: bytes, where: str) -> str:
    """The text that bytes spell in UTF-8.

    Raises:
        UsageError: If they do not, with the first wrong byte.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where}: not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}"
        ) from error


def require_tokenizer(model: Path) -> None:
    """Refuses before weights are read. What is no checkpoint at all is left to the loader.

    Raises:
        CheckpointError: If the checkpoint has no tokenizer.
    """
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
