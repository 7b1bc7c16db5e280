"""The command `wscope`: parses, runs one verb, turns every error into one line and an exit code.

The answer goes to stdout, everything else to stderr. Nothing here imports jax: a verb does, once
its options are known to be right.
"""

import argparse
import contextlib
import importlib
import sys
import traceback
from collections.abc import Sequence

from wscope_jax.cli import options, signals, spelling, streams
from wscope_jax.errors import (
    CapacityError,
    CheckpointError,
    MachineError,
    WscopeError,
    is_out_of_memory,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code.

    Args:
        argv: The words after the program's name, None for those of this process; then an
            interruption ends the process here, and no thread of a library is waited for.

    Returns:
        0 done, 1 internal, 2 usage, 3 does not fit, 4 checkpoint, 5 machine, 130 interrupted,
        143 terminated.

    Raises:
        SystemExit: After `--help` and `--version`, and for a usage error that the parser found.
    """
    streams.prepare()
    code = _run(argv)
    if argv is None and code in signals.WORDS:
        signals.leave(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        with signals.terminable(is_process=argv is None):
            words = sys.argv[1:] if argv is None else argv
            arguments = _parse(words)
            spelling.learn(vars(arguments), words)
            streams.require_stdout()
            verb = importlib.import_module(f"wscope_jax.cli.{arguments.verb}")
            code: int = verb.run(arguments)
            streams.flush()
            return code
    except BrokenPipeError:
        # The reader had enough (`wscope ... | head`).
        streams.discard_stdout()
        return 0
    except signals.Terminated:
        return _report(signals.WORDS[143], 143)
    except KeyboardInterrupt:
        return _report(signals.WORDS[130], 130)
    except WscopeError as error:
        # What is wrong with a checkpoint begins with a file, whatever that is called.
        is_file = isinstance(error, CheckpointError)
        text = str(error) if is_file else spelling.spell(str(error))
        return _report(f"error: {text}", error.exit_code)
    except Exception as error:
        return _report(*_unexpected(error))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    try:
        with streams.printing():  # the text of --help
            return options.build_parser().parse_args(words)
    except SystemExit:
        streams.flush()
        raise


def _report(line: str, code: int) -> int:
    """Prints one line (and the traceback, in debug mode) to stderr and returns the code."""
    if options.is_debug():
        traceback.print_exc()
    # The text that was streamed so far is an answer, cut short: it must not be lost in a buffer.
    try:
        streams.flush()
    except (OSError, ValueError):
        streams.discard_stdout()
    with contextlib.suppress(OSError, ValueError):
        print(f"wscope: {streams.printable(line)}", file=sys.stderr, flush=True)
    return code


def _unexpected(error: Exception) -> tuple[str, int]:
    """The line and the exit code of an error that nobody raised on purpose."""
    said = " ".join(str(error).split())
    text = said if len(said) <= 400 else said[:400] + "..."
    if is_out_of_memory(error):
        where = "".join(f" {part}" for part in (_place(error), f"({text})") if part.strip("() "))
        line = f"error: out of memory{where}; ask for less at once, or free memory (wscope plan says what fits)"
        return line, CapacityError.exit_code
    text = text or "no message"
    if isinstance(error, ImportError | OSError) or "can't start new thread" in text:
        return f"error: {text}", MachineError.exit_code
    hint = "" if options.is_debug() else " (WSCOPE_DEBUG=1 shows where)"
    return f"error: {type(error).__name__}: {text}{hint}", WscopeError.exit_code


def _place(error: Exception) -> str:
    """Which function of this package an error came through last, "" if it came through none but the command's own."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        module = frame.f_globals.get("__name__", "")
        if module.startswith("wscope_jax.") and module != __name__:
            return f"in {module}.{frame.f_code.co_name}"
    return ""
