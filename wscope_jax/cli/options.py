"""The options of all verbs, and what a word on the command line must look like."""

import argparse
import fractions
import os
import re
import sys
from pathlib import Path
from typing import Final, NoReturn

import wscope_jax
from wscope_jax.cli import streams

# The values of three options, written out so that `--help` need not import jax; tests hold them
# against `policies.BY_NAME`, `layout.WINDOW_SIZES` and `configurations.names`.
POLICIES: Final = ("auto", "write_scope", "gpu_only", "cpu_only", "resident")
WINDOWS: Final = (32, 64, 128, 256, 512)
DEFAULT_WINDOW: Final = 256
CONFIGURATIONS: Final = ("deepseek-v2-lite", "deepseek-v4-flash", "mixtral-8x7b", "qwen3-30b-a3b")

_UNITS: Final = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGT]i?B|B)")


def is_debug() -> bool:
    """Whether WSCOPE_DEBUG asks for tracebacks and for the libraries' own messages."""
    return os.environ.get("WSCOPE_DEBUG", "") not in ("", "0")


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Prints the line and exits with code 2."""
        line = streams.printable(f"error: {message} (see {self.prog} --help)")
        print(f"wscope: {line}", file=sys.stderr)
        raise SystemExit(2)


def size(text: str) -> int:
    """Bytes from `32GiB`, `100GB`, `1.5TiB`, `512MiB`: a number and its unit, nothing between.

    Raises:
        argparse.ArgumentTypeError: If the text has another form, or is no positive whole number.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; give a number and a unit, such as 32GiB, 100GB or 512MiB"
        )
    number = fractions.Fraction(match[1]) * _UNITS[match[2]]
    if number.denominator != 1 or number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number of bytes")
    return int(number)


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
    return value


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


def build_parser() -> Parser:
    """The parser of `wscope` with all its verbs; the chosen one ends up in `verb`."""
    parser = Parser(
        prog="wscope",
        allow_abbrev=False,
        description="Long-context inference of Mixture-of-Experts models with a KV cache that is "
        "placed once, when it is written, and attended to where it lies.",
        epilog="Exit codes: 0 done, 1 internal error, 2 usage, 3 does not fit into memory, "
        "4 checkpoint, 5 machine, 130 interrupted. WSCOPE_DEBUG=1 shows tracebacks.",
    )
    parser.add_argument("--version", action="version", version=f"wscope {wscope_jax.__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, add, line in (
        ("generate", _add_generate, "continue a prompt"),
        ("score", _add_score, "log-likelihood and logits of given tokens"),
        (
            "demo",
            _add_demo,
            "a bundled tiny model through all four regions, checked against dense logits",
        ),
        ("plan", _add_plan, "what fits: bytes of every region, largest context and batch"),
        ("inspect", _add_inspect, "what a checkpoint holds, by its headers alone"),
        ("doctor", _add_doctor, "what this machine has, what it lacks, and what to do about it"),
    ):
        verb = verbs.add_parser(name, help=line, description=_sentence(line), allow_abbrev=False)
        add(verb)
    return parser


def _sentence(line: str) -> str:
    return f"{line[0].upper()}{line[1:]}."


def _add_generate(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument_group("prompt (one source; stdin when none is named)")
    source.add_argument(
        "--prompt", metavar="TEXT", action="append", help="the prompt itself; may be repeated"
    )
    source.add_argument(
        "--prompt-file", metavar="F", type=Path, help="a UTF-8 text, taken as it is"
    )
    source.add_argument(
        "--tokens",
        metavar="F.npy",
        type=Path,
        action="append",
        help="token ids, int32 or int64: 1-D is one sequence, 2-D a batch; repeat it for sequences "
        "of different lengths",
    )
    source.add_argument(
        "--jsonl-in",
        metavar="F",
        type=Path,
        help="one JSON object a line with prompt, tokens or messages, and id and sampling options "
        "if it has any; - is stdin",
    )
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
    _add_cache(parser)
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
    sampling.add_argument("--seed", metavar="N", type=int, help="of the random draws (default 0)")
    sampling.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        help="text that ends a sequence; may be repeated",
    )
    sampling.add_argument(
        "--ignore-eos", action="store_true", help="do not end at the model's end-of-text tokens"
    )
    parser.add_argument(
        "--jsonl-out",
        metavar="F",
        type=Path,
        help="write one JSON object a prompt, whole or not at all; - is stdout",
    )
    _add_json(parser)
    _add_quiet(parser)


def _add_score(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens",
        metavar="F.npy",
        type=Path,
        required=True,
        help="token ids as for generate; one file",
    )
    parser.add_argument(
        "--prefill",
        metavar="P",
        type=count,
        required=True,
        help="tokens that are prefilled; the rest is forced through decode one by one",
    )
    parser.add_argument(
        "--logits-out",
        metavar="OUT.npy",
        type=Path,
        help="write the float32 logits of positions P-1 to the last one here",
    )
    _add_cache(parser)
    _add_json(parser)
    _add_quiet(parser)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    _add_json(parser)


def _add_cache(parser: argparse.ArgumentParser) -> None:
    """The options that `generate` and `score` share: the model, and how its cache is kept."""
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        required=True,
        help="a Hugging Face checkpoint directory",
    )
    cache = parser.add_argument_group("cache")
    _add_placement(cache)
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


def _add_placement(cache: argparse._ArgumentGroup) -> None:
    """The options that `plan` shares, too."""
    cache.add_argument("--policy", choices=POLICIES, default="auto", help="(default auto)")
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


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="DIR|NAME",
        required=True,
        help="a checkpoint directory (config.json is enough), or a model whose configuration ships "
        "with this package: " + ", ".join(CONFIGURATIONS),
    )
    parser.add_argument(
        "--batch", metavar="B", type=count, default=1, help="sequences at once (default 1)"
    )
    parser.add_argument(
        "--max-model-len",
        metavar="N",
        type=count,
        help="tokens of each (default: the positions that the model was made for)",
    )
    _add_placement(parser.add_argument_group("cache (budgets: this machine's by default)"))
    parser.add_argument("--check", action="store_true", help="exit with 3 if it does not fit")
    _add_json(parser)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="DIR", type=Path, required=True, help="a checkpoint directory"
    )
    _add_json(parser)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    _add_json(parser)


def _add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="nothing but errors on stderr: no progress"
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one line: a JSON object")
