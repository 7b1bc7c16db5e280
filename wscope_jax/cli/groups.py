"""Options that belong together or that verbs share, and what a word on the command line must look like."""

import argparse
import re
from pathlib import Path
from typing import Final

from wscope_jax.cli.units import size, size_or_none

# Values and names of options, written out so that `--help` need not import jax; tests hold them
# against `policies.BY_NAME`, `layout.WINDOW_SIZES`, `Sampling` and `configurations.names`.
POLICIES: Final = ("auto", "write_scope", "gpu_only", "cpu_only", "resident")
WINDOWS: Final = (32, 64, 128, 256, 512)
DEFAULT_WINDOW: Final = 256
SAMPLING: Final = (  # the options of `add_sampling`, as Python and a JSONL line spell them
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
)
CONFIGURATIONS: Final = ("deepseek-v2-lite", "deepseek-v4-flash", "mixtral-8x7b", "qwen3-30b-a3b")


def share(text: str) -> float | None:
    """A CPU share between 0 and 1, or None for `auto`.

    Raises:
        argparse.ArgumentTypeError: If the text is neither.
    """
    if text == "auto":
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number from 0 to 1")
    return abs(value)  # -0 is 0


def path(text: str) -> Path:
    """A path; an empty word, as of a shell's variable that is not set, would be the folder that we are in.

    Raises:
        argparse.ArgumentTypeError: If it is empty.
    """
    return Path(name(text))


def name(text: str) -> str:
    """A word that is not empty.

    Raises:
        argparse.ArgumentTypeError: If it is.
    """
    if not text:
        raise argparse.ArgumentTypeError("is empty; is a variable of the shell not set?")
    return text


def count(text: str) -> int:
    """A whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: If the text is none.
    """
    if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII) or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a whole number of at least 1 and at most 18 digits"
        )
    return int(text)


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """Where prompts come from."""
    source = parser.add_argument_group("prompt (one source; stdin when none is named)")
    source.add_argument(
        "--prompt", metavar="TEXT", action="append", help="the prompt itself; may be repeated"
    )
    source.add_argument(
        "--prompt-file", metavar="F", type=path, help="a UTF-8 text, taken as it is"
    )
    source.add_argument(
        "--tokens",
        metavar="F.npy",
        type=path,
        action="append",
        help="token ids, int32 or int64: 1-D is one sequence, 2-D a batch; repeat it for sequences "
        "of different lengths",
    )
    source.add_argument(
        "--prompt-length",
        metavar="N",
        type=count,
        action="append",
        help="N token ids drawn by --seed; repeat it for more sequences",
    )
    source.add_argument(
        "--jsonl-in",
        metavar="F",
        type=path,
        help="one JSON object a line with prompt, tokens or messages, and id and sampling options "
        "if it has any; - is stdin",
    )


def add_form(parser: argparse.ArgumentParser) -> None:
    """What becomes of a prompt before it is token ids."""
    chat = parser.add_argument_group("form")
    chat.add_argument(
        "--chat",
        action="store_true",
        help="a prompt is a user's message: put it into the checkpoint's chat template",
    )
    chat.add_argument(
        "--chat-template", metavar="NAME", help="which template, where a checkpoint has several"
    )
    chat.add_argument(
        "--truncate",
        choices=("left", "right"),
        help="where to cut a prompt that exceeds --max-model-len (default: refuse it)",
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How the next token is chosen, and where a text ends."""
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-new-tokens", metavar="N", type=count, help="tokens to add (default 128)"
    )
    sampling.add_argument("--temperature", metavar="X", type=float, help="0 is greedy (default 0)")
    sampling.add_argument(
        "--top-k", metavar="N", type=int, help="keep the N likeliest (default 0: all)"
    )
    sampling.add_argument(
        "--top-p", metavar="X", type=float, help="keep this much mass (default 1)"
    )
    sampling.add_argument(
        "--min-p",
        metavar="X",
        type=float,
        help="drop below X times the likeliest (default 0)",
    )
    sampling.add_argument(
        "--seed",
        metavar="N",
        type=int,
        help="of all random draws; rows draw apart, each by its number in the batch (default 0)",
    )
    sampling.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        help="text that ends a sequence; may be repeated",
    )
    sampling.add_argument(
        "--ignore-eos", action="store_true", help="do not end at the model's end-of-text tokens"
    )


def add_model(parser: argparse._ActionsContainer, *, is_required: bool = True) -> None:
    """The checkpoint."""
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=path,
        required=is_required,
        help="a Hugging Face checkpoint directory",
    )


def add_weights(parser: argparse.ArgumentParser) -> None:
    """A checkpoint, or a configuration whose weights are drawn."""
    which = parser.add_mutually_exclusive_group(required=True)
    add_model(which, is_required=False)
    which.add_argument(
        "--random-weights",
        metavar="CONFIG",
        type=name,
        help="no checkpoint: a config.json (or its folder), or the name of a configuration that ships with this "
        "package, at full size with weights drawn by --seed; takes token ids only. Names: "
        + ", ".join(CONFIGURATIONS),
    )


def add_cache(parser: argparse.ArgumentParser) -> None:
    """The options that `generate` and `score` share: the model, and how its cache is kept."""
    add_weights(parser)
    cache = parser.add_argument_group("cache")
    add_placement(cache)
    cache.add_argument(
        "--max-model-len",
        metavar="N",
        type=count,
        help="tokens a sequence may reach (default: what this call needs)",
    )
    cache.add_argument("--threads", metavar="N", type=count, help="CPU workers (default: by cores)")
    cache.add_argument(
        "--check-tensors",
        action="store_true",
        help="look at every weight for NaN and infinity, not at a sample",
    )


def add_placement(cache: argparse._ArgumentGroup) -> None:
    """The options that `plan` shares, too."""
    cache.add_argument(
        "--policy",
        choices=POLICIES,
        default="auto",
        help="(default auto: resident where a GPU holds the whole cache, else write_scope)",
    )
    cache.add_argument(
        "--cpu-share",
        metavar="auto|X",
        type=share,
        help="part of the cache that the CPU attends to, 0 to 1 (default auto: measured)",
    )
    cache.add_argument(
        "--window",
        metavar="D",
        type=int,
        choices=WINDOWS,
        default=DEFAULT_WINDOW,
        help=f"entries of a block: 32, 64, 128, 256 or 512 (default {DEFAULT_WINDOW})",
    )
    cache.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of weights and cache (default: as stored)",
    )
    cache.add_argument("--gpu-memory", metavar="SIZE", type=size, help="GPU budget, such as 32GiB")
    cache.add_argument("--host-memory", metavar="SIZE", type=size, help="host budget, as 100GiB")
    cache.add_argument(
        "--spare-memory",
        metavar="SIZE",
        type=size_or_none,
        default=0,
        help="GPU memory for windows to keep more of each sequence than D, in whole blocks: part of --gpu-memory "
        "(default 0)",
    )


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Less on stderr."""
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="nothing but errors on stderr: no progress"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """The answer for programs."""
    parser.add_argument("--json", action="store_true", help="print one line: a JSON object")
