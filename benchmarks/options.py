"""What every benchmark is asked: options checked before it starts, and an end in one line where it cannot go on."""

import argparse
import os
import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import record

from wscope_jax import arguments, interruption, policies
from wscope_jax.errors import CapacityError, UsageError, WscopeError, is_out_of_memory
from wscope_jax.policies import Policy, WriteScope

STOPS: Final = (signal.SIGTERM, signal.SIGHUP)  # what ends a run beside Ctrl-C
WORDS: Final = {**interruption.WORDS, 128 + signal.SIGHUP: "its terminal has gone"}  # by exit code
Description = argparse.RawDescriptionHelpFormatter  # a module's text is printed as it stands


def parser(doc: str | None, quick: str = "end within a minute on 2 cores") -> ArgumentParser:
    """The two options that every benchmark has; `quick` says what the first one does."""
    made = ArgumentParser(description=doc, formatter_class=Description)
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--json", type=output, metavar="FILE", help="write the rows there")
    return made


def parse(made: ArgumentParser, **quick: Any) -> Namespace:
    """The options; with --quick those that were not given are these."""
    args = made.parse_args()
    if args.quick:
        made.set_defaults(**quick)
        args = made.parse_args()
    return args


def _checked(check: Callable[..., Any], *limits: Any) -> Any:
    try:
        return check("value", *limits)
    except UsageError as error:
        raise ArgumentTypeError(str(error).removeprefix("value: ")) from None


def output(text: str) -> Path:
    """A file that can be written, known before hours are spent on what goes there."""
    path = Path(text)
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a directory")
        if path.is_file() or not path.exists():
            record.part_of(path).touch()
            record.part_of(path).unlink()
        elif not os.access(path, os.W_OK):  # a pipe
            raise PermissionError("not permitted")
    except (OSError, ValueError) as error:  # the latter: a name that is none
        raise ArgumentTypeError(f"{text!r} cannot be written: {reason(error)}") from None
    return path


def reason(error: OSError | ValueError) -> str:
    """What the system says of a path, without the path."""
    return getattr(error, "strerror", None) or str(error)


def count(text: str) -> int:
    """An integer of at least 1."""
    return int(_checked(arguments.integer, _number(int, text), 1))


def counts(text: str) -> list[int]:
    """Such integers between commas, at least one of them."""
    return [count(word) for word in words(text) or [text]]


def size(text: str) -> float:
    """A number of at least 0: gigabytes, seconds."""
    return float(_checked(arguments.number, _number(float, text), 0.0, 1e9))


def share(text: str) -> float:
    """A share, from 0 to 1."""
    return float(_checked(arguments.number, _number(float, text), 0.0, 1.0))


def shares(text: str) -> dict[str, WriteScope]:
    """Policies with the fixed shares between the commas, by what was typed."""
    return {word: WriteScope(share=share(word)) for word in words(text)}


def add_policies(made: ArgumentParser, *, resident: bool = False) -> None:
    """--policies and --shares, dicts of policies by name; `resident`, which places no blocks, may be among them."""
    known = [name for name in policies.BY_NAME if resident or name != "resident"]

    def by_name(text: str) -> dict[str, Policy]:
        return {name: policies.choose(name) for name in some_of(known)(text)}

    made.add_argument(
        "--policies",
        type=by_name,
        default="write_scope,gpu_only,cpu_only",
        help=f"a list of {', '.join(known)}",
    )
    made.add_argument("--shares", type=shares, default="", help="a list of fixed shares to run too")


def words(text: str) -> list[str]:
    """What stands between commas; nothing in an empty text."""
    found = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(found):
        raise ArgumentTypeError(f"expected a list with one comma between two, got {text!r}")
    return found


def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A type of option: those of the known words that stand between commas."""

    def chosen(text: str) -> list[str]:
        found = words(text)
        if unknown := [word for word in found if word not in known]:
            raise ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
        return found

    return chosen


def _number(kind: type[int] | type[float], text: str) -> Any:
    """What the text says, or the text, which the check refuses."""
    try:
        return kind(text)
    except ValueError:
        return text


class Stopped(KeyboardInterrupt):
    """A signal that ends the run came: what cleans up after Ctrl-C does so then, too."""


def end_in_one_line(main: Callable[[], None]) -> None:
    """Runs a benchmark. A user's mistake, a lack of room and a signal end it in one line."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(number)

    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, stop)
    name = Path(sys.argv[0]).stem
    try:
        main()
    except KeyboardInterrupt as error:
        code = 128 + (error.args[0] if isinstance(error, Stopped) else signal.SIGINT)
        print(f"{name}: {WORDS[code]}", file=sys.stderr)
        sys.exit(code)
    except WscopeError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print(f"{name}: out of memory: {str(error).partition(chr(10))[0]}", file=sys.stderr)
        sys.exit(CapacityError.exit_code)
