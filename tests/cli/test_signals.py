"""A signal that arrives where Python discards exceptions still ends the run."""

import os
import re
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import wscope_jax
from tests import processes
from wscope_jax.cli import signals


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals go to the main thread",
)
def test_a_discarded_interruption_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own report of it, a traceback, is left out; that of another error is not."""
    told: list[type[BaseException]] = []

    def hook(discarded: Any) -> None:
        told.append(discarded.exc_type)

    class Broken:
        def __del__(self) -> None:
            raise KeyError("its own")

    class Collected:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):  # the handler runs between two instructions
                pass

    monkeypatch.setattr(sys, "unraisablehook", hook)

    def interrupted() -> None:
        with signals.terminable():
            signals.note_text()
            Collected()
            Broken()
            signals.note_text()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    signals.note_text()
    assert told == [KeyError]
    assert sys.unraisablehook is hook


# --- in a process of its own ----------------------------------------------------------------------


def run_python(program: str) -> tuple[int, str, str, float]:
    """Runs a program; its exit code, stdout, stderr, and how long it took."""
    began = time.monotonic()
    with processes.python(processes.environment(), "-c", textwrap.dedent(program)) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out.decode(), err.decode(), time.monotonic() - began


STARTING = """
    import os, signal, sys, types
    from wscope_jax import cli
    from wscope_jax.cli import signals

    def verb(arguments):
{verb}
    sys.modules["wscope_jax.cli.demo"] = module = types.ModuleType("wscope_jax.cli.demo")
    module.run = verb
    sys.argv = ["wscope", "demo"]
    sys.exit(cli.main())
"""


def run_verb(verb: str) -> tuple[int, str, str, float]:
    """Runs `wscope demo` with this body in the place of the demo."""
    return run_python(STARTING.format(verb=textwrap.indent(textwrap.dedent(verb), " " * 8)))


@pytest.mark.parametrize(("number", "code"), signals.EXIT_CODES.items())
def test_a_start_is_ended_where_it_is(number: signal.Signals, code: int) -> None:
    """Also in what would swallow an exception, or crash of it: a callback of the garbage collection."""
    verb = f"""
        import gc
        gc.callbacks.append(lambda *_: os.kill(os.getpid(), {number.value}))
        gc.collect()
        gc.collect()
        return 0
    """
    assert run_verb(verb)[:3] == (code, "", f"wscope: {signals.WORDS[code]}\n")


def test_an_interruption_that_is_swallowed_comes_again() -> None:
    """While there is something to lose it is raised: in vain within a collection, so once more soon after."""
    verb = """
        import gc, time
        signals.keep()
        gc.callbacks.append(lambda phase, _: phase == "stop" and os.kill(os.getpid(), signal.SIGTERM))
        gc.collect()
        gc.callbacks.clear()
        try:
            try:
                os.getpid()
                time.sleep(20)
            except BaseException:
                pass
            time.sleep(20)
        finally:
            time.sleep(0.4)  # it does not disturb what cleans up
            print("cleaned")
        return 0
    """
    code, out, err, took_s = run_verb(verb)
    assert (code, out, err) == (143, "cleaned\n", "wscope: terminated\n")
    assert took_s < 10


def test_it_is_not_raised_within_an_import(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.3)\n"
    )
    verb = f"""
        import time
        signals.keep()
        sys.path.insert(0, {str(tmp_path)!r})
        import slow
        print("imported")
        time.sleep(20)
        return 0
    """
    code, out, err, took_s = run_verb(verb)
    assert (code, out, err) == (130, "imported\n", "wscope: interrupted\n")
    assert took_s < 10


def test_the_end_of_the_block_raises_what_was_swallowed() -> None:
    verb = """
        signals.keep()
        try:
            os.kill(os.getpid(), signal.SIGINT)
            os.getpid()
        except BaseException:
            pass
        return 0
    """
    assert run_verb(verb)[:3] == (130, "", "wscope: interrupted\n")


def test_a_file_is_not_left_half_written(tmp_path: Path) -> None:
    verb = f"""
        import time
        from pathlib import Path
        from wscope_jax.cli import answer

        def write(stream):
            stream.write(b"half")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)

        answer.write_whole(Path({str(tmp_path)!r}) / "result", write)
        return 0
    """
    assert run_verb(verb)[:3] == (143, "", "wscope: terminated\n")
    assert not list(tmp_path.iterdir())


def test_a_stuck_cleanup_with_nothing_to_lose_is_ended() -> None:
    verb = """
        import time
        signals.keep()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)
        finally:
            time.sleep(20)
        return 0
    """
    code, _, err, took_s = run_verb(verb)
    assert (code, err) == (143, "wscope: terminated\n")
    assert took_s < 6


def test_a_sudden_end_puts_the_terminal_in_order() -> None:
    verb = """
        signals.set_farewell(b"<cursor>")
        os.kill(os.getpid(), signal.SIGINT)
        return 0
    """
    assert run_verb(verb)[2] == "<cursor>wscope: interrupted\n"


IMPORTING = """
    import os, signal, sys
    from wscope_jax import __main__ as command

    class Interrupted:
        def find_spec(self, name, path, target=None):
            if name == {module!r}:
                os.kill(os.getpid(), {number})

    {first}
    sys.meta_path.insert(0, Interrupted())
    sys.argv = ["wscope", "--version"]
    sys.exit(command.main())
"""


@pytest.mark.parametrize(("number", "code"), signals.EXIT_CODES.items())
@pytest.mark.parametrize(
    "module", ["wscope_jax.cli", "argparse", "wscope_jax.cli.signals", "wscope_jax.cli.streams"]
)
def test_an_import_of_the_command_line_is_ended(
    module: str, number: signal.Signals, code: int
) -> None:
    """Before its own handlers are there; what only imports the entry keeps its handlers."""
    kept = "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    done = run_python(IMPORTING.format(module=module, number=number.value, first=kept))
    assert done[:3] == (code, "", f"wscope: {signals.WORDS[code]}\n")


def test_an_interruption_that_is_ignored_stays_so() -> None:
    """As in a shell's background job."""
    first = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    program = IMPORTING.format(module="argparse", number=signal.SIGINT.value, first=first)
    code, out, err, _ = run_python(program)
    assert (code, err) == (0, "")
    assert out.startswith("wscope ")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_every_moment_of_a_start(number: signal.Signals) -> None:
    """From the first moment of the entry on, through the imports, one line and the documented code."""
    model = Path(wscope_jax.__file__).parent / "assets" / "demo_model"
    code = signals.EXIT_CODES[number]
    for wait_s in (0.0, 0.005, 0.01, 0.015, 0.02, 0.03, *(0.04 * step for step in range(1, 14))):
        with processes.start(processes.environment(), "plan", "--model", model) as process:
            handlers = Path(f"/proc/{process.pid}/status")
            while not int(re.findall(r"SigCgt:\s*(\w+)", handlers.read_text())[0], 16) >> 14 & 1:
                time.sleep(0.002)
            time.sleep(wait_s)
            began = time.monotonic()
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        if process.returncode in (0, -number) and out:
            break  # it was done
        assert (process.returncode, err.decode()) == (code, f"wscope: {signals.WORDS[code]}\n")
        assert time.monotonic() - began < 5  # on a machine that others use too
