"""The command line: its verbs, and the options that each has of its own."""

import argparse
import os
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import wscope_jax
from wscope_jax.cli import groups, streams

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


def is_debug() -> bool:
    """Whether WSCOPE_DEBUG asks for tracebacks and for the libraries' own messages."""
    return os.environ.get("WSCOPE_DEBUG", "") not in ("", "0")


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Prints the line and exits with code 2."""
        message = re.sub(r"^argument (\S+): is empty", r"\1 is empty", message)
        line = streams.printable(f"error: {message} (see {self.prog} --help)")
        streams.tell(f"wscope: {line}\n")
        raise SystemExit(2)

    def _print_message(self, message: str, file: "SupportsWrite[str] | None" = None) -> None:
        """Prints a help text; unlike argparse it does not drop the error of a full stdout."""
        (file or sys.stderr).write(message)


class Verb(Parser):
    """The parser of one verb, which refuses itself what it does not know, and so points to its own help."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parses everything, or exits with code 2."""
        found, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


class _Once(argparse.Action):
    """Takes one value and refuses another one, of which plain argparse would silently keep the last."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if (first := getattr(namespace, self.dest)) is not None:
            raise argparse.ArgumentError(self, f"{first} and {values}: give one, not two")
        setattr(namespace, self.dest, values)


def build_parser() -> Parser:
    """The parser of `wscope` with all its verbs; the chosen one ends up in `verb`."""
    parser = Parser(
        prog="wscope",
        allow_abbrev=False,
        description="Long-context inference of Mixture-of-Experts models with a KV cache that is "
        "placed once, when it is written, and attended to where it lies.",
        epilog="Exit codes: 0 done, 1 internal error, 2 usage, 3 does not fit into memory, "
        "4 checkpoint, 5 machine, 130 interrupted, 143 terminated. WSCOPE_DEBUG=1 shows tracebacks.",
    )
    parser.add_argument("--version", action="version", version=f"wscope {wscope_jax.__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Verb)
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
    groups.add_prompt(parser)
    groups.add_form(parser)
    groups.add_cache(parser)
    groups.add_sampling(parser)
    parser.add_argument(
        "--jsonl-out",
        metavar="F",
        type=groups.path,
        help="write one JSON object a prompt, whole or not at all; - is stdout",
    )
    groups.add_json(parser)
    groups.add_quiet(parser)


def _add_score(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens",
        metavar="F.npy",
        type=groups.path,
        action=_Once,
        required=True,
        help="token ids as for generate; one file",
    )
    parser.add_argument(
        "--prefill",
        metavar="P",
        type=groups.count,
        required=True,
        help="tokens that are prefilled; the rest is forced through decode one by one",
    )
    parser.add_argument(
        "--logits-out",
        metavar="OUT.npy",
        type=groups.path,
        help="write the float32 logits of positions P-1 to the last one here",
    )
    groups.add_cache(parser)
    parser.add_argument("--seed", metavar="N", type=int, help="of --random-weights (default 0)")
    groups.add_json(parser)
    groups.add_quiet(parser)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    groups.add_json(parser)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="DIR|NAME",
        type=groups.name,
        required=True,
        help="a checkpoint directory (config.json is enough), or a model whose configuration ships "
        "with this package: " + ", ".join(groups.CONFIGURATIONS),
    )
    parser.add_argument(
        "--batch", metavar="B", type=groups.count, default=1, help="sequences at once (default 1)"
    )
    parser.add_argument(
        "--max-model-len",
        metavar="N",
        type=groups.count,
        help="tokens of each (default: the positions that the model was made for)",
    )
    groups.add_placement(parser.add_argument_group("cache (budgets: this machine's by default)"))
    parser.add_argument("--check", action="store_true", help="exit with 3 if it does not fit")
    groups.add_json(parser)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    groups.add_model(parser)
    groups.add_json(parser)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    groups.add_json(parser)
