"""Benchmarks say in one line what was wrong with their options, and end quietly when they are told to."""

import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.processes import environment, python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PATHS = {"PYTHONPATH": f"{BENCHMARKS}:{BENCHMARKS.parent}"}
LIMIT_S = 300  # on a machine that others use too


def run(*words: object, paths: Mapping[str, str] = {}) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a program of this interpreter."""
    with python(environment(**paths), *words) as process:
        try:
            out, error = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    return process.returncode, out.decode(), error.decode()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("decode_attention.py --share 2", "--share: expected a number 0 to 1, got 2.0"),
        ("decode_attention.py --policies resident", "resident: not one of write_scope"),
        ("decode_attention.py --context 255", "at least 256 tokens"),
        ("decode_attention.py --shares 0.5,nan", "--shares: expected a number 0 to 1, got nan"),
        ("load.py --loads readers,writers", "writers: not one of readers, copies"),
        ("host_attention.py --threads 0 --quick", "expected an integer of at least 1, got 0"),
        ("decode.py --context 1024,,2048", "expected a list with one comma between two"),
        ("stream.py --json /nowhere/x", "'/nowhere/x' cannot be written: No such file"),
        ("stream.py --json /etc/passwd/x", "cannot be written: Not a directory"),
        ("stream.py --json /tmp", "cannot be written: it is a directory"),
        (f"stream.py --json {'x' * 300}", "cannot be written: File name too long"),
        ("suite.py --out /dev/null/x", "--out: '/dev/null/x' cannot be made: Not a directory"),
        ("suite.py --stages stream,beam", "--stages: beam: not one of host,"),
    ],
)
def test_a_bad_option_is_a_usage_error(words: str, said: str) -> None:
    name, *others = words.split()
    code, _, error = run(BENCHMARKS / name, *others)
    assert code == 2
    assert said in error.splitlines()[-1]
    assert "Traceback" not in error


def test_an_unknown_model_ends_with_the_exit_code_of_its_error() -> None:
    code, _, error = run(BENCHMARKS / "decode.py", "--quick", "--model", "nonsense")
    assert code == 4
    assert error.splitlines()[-1].startswith("decode: nonsense: neither a configuration")


@pytest.mark.parametrize(
    ("name", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")]
)
def test_what_was_measured_before_a_signal_is_kept(
    tmp_path: Path, name: str, code: int, word: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    script = f"""
import options, record, signal
from pathlib import Path
def main():
    with record.kept(Path({str(rows)!r})) as rows:
        rows.append(record.row("case", "reader", [3.0, 5.0], "GB/s", 8.0))
        rows.append(record.row("case", "difference", [-1.0], "us", None))
        signal.raise_signal(signal.{name})
options.end_in_one_line(main)
"""
    ended, out, error = run("-c", script, paths=PATHS)
    assert ended == code
    assert error.splitlines()[-1].endswith(f": {word}")
    assert "Traceback" not in error
    assert "share  0.500" in out
    assert len(rows.read_text().splitlines()) == 2


def test_a_stage_ends_at_its_limit_and_another_is_left_out(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
import suite
rows, log = Path({str(tmp_path)!r}) / "rows", Path({str(tmp_path)!r}) / "log"
print(suite.run(suite.Stage("short", "stream.py --quick", 0.2), rows, log))
print(suite.run(suite.Stage("wrong", "stream.py --slow", 250), rows, log))
"""
    _, out, _ = run("-c", script, paths=PATHS)
    assert [line.split()[0] for line in out.splitlines()] == ["ENDED", "FAILED"]
    assert "unrecognized arguments: --slow" in (tmp_path / "log").read_text()

    words = ("--quick", "--stages", "stream", "--seconds", 300, "--out", tmp_path / "a" / "b")
    code, out, _ = run(BENCHMARKS / "suite.py", *words)
    assert code == 1
    assert "stream: left out, it may take 300 s" in out
    assert (tmp_path / "a" / "b").is_dir()


def test_a_stage_that_does_not_listen_is_ended_with_the_suite(tmp_path: Path) -> None:
    """Two signals come: the first asks the stage to end, the second finds the suite waiting for that."""
    folder, alive = tmp_path / "benchmarks", tmp_path / "alive"
    folder.mkdir()
    (folder / "deaf.py").write_text(
        "import pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "while True:\n"
        f"    pathlib.Path({str(alive)!r}).write_text(str(time.monotonic()))\n"
        "    time.sleep(0.02)\n"
    )
    script = f"""
from pathlib import Path
import options, suite
suite.HERE = Path({str(folder)!r})
folder = suite.HERE.parent
options.end_in_one_line(lambda: suite.run(suite.Stage("deaf", "deaf.py", 250), folder / "r", folder / "l"))
"""
    process = python(environment(**PATHS), "-c", script)
    until = time.monotonic() + LIMIT_S
    while not alive.exists() and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 143
    last = alive.read_text()
    time.sleep(0.5)
    assert alive.read_text() == last


def test_the_stages_of_the_suite_are_benchmarks() -> None:
    code, out, _ = run(BENCHMARKS / "suite.py", "--list")
    assert code == 0
    files = [line.split(" s  ")[1].split()[0] for line in out.splitlines()]
    assert all((BENCHMARKS / file).is_file() for file in files)
