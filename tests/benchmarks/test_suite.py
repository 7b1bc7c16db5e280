"""A benchmark says in one line what was wrong with its options, and ends quietly when it is told to."""

import signal
from pathlib import Path

import pytest

from tests.processes import environment, python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("decode_attention.py --share 2", "--share: expected a number 0 to 1, got 2.0"),
        ("decode_attention.py --policies resident", "resident: not one of write_scope"),
        ("decode_attention.py --context 255", "at least 256 tokens"),
        ("decode_attention.py --shares 0.5,nan", "--shares: expected a number 0 to 1, got nan"),
        ("load.py --loads readers,writers", "writers is none of readers, copies"),
        ("host_attention.py --threads 0 --quick", "expected an integer of at least 1, got 0"),
        ("stream.py --json /nowhere/rows.jsonl", "/nowhere/rows.jsonl cannot be written"),
        ("decode.py --context 1024,,2048", "expected a list with one comma between two"),
    ],
)
def test_a_bad_option_is_a_usage_error(words: str, said: str) -> None:
    name, *others = words.split()
    _, error = (process := python(environment(), BENCHMARKS / name, *others)).communicate()
    assert process.returncode == 2
    assert said in error.decode().splitlines()[-1]
    assert b"Traceback" not in error


def test_an_unknown_model_ends_with_the_exit_code_of_its_error() -> None:
    process = python(environment(), BENCHMARKS / "decode.py", "--quick", "--model", "nonsense")
    _, error = process.communicate()
    assert process.returncode == 4
    assert error.decode().splitlines()[-1].startswith("decode: nonsense: neither a configuration")


def test_what_was_measured_before_a_signal_is_kept(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    script = (
        "import os, signal, options, record\nfrom pathlib import Path\n"
        "def main():\n"
        f"    with record.kept(Path({str(rows)!r})) as rows:\n"
        "        rows.append(record.row('case', 'reader', [3.0, 5.0], 'GB/s', 8.0))\n"
        "        rows.append(record.row('case', 'difference', [-1.0], 'us', None))\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        signal.pause()\n"
        "options.run(main)\n"
    )
    process = python(environment(PYTHONPATH=f"{BENCHMARKS}:{BENCHMARKS.parent}"), "-c", script)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert signal.SIGTERM.name not in error.decode()
    assert error.decode().splitlines()[-1].endswith("interrupted")
    assert b"share  0.500" in out
    assert len(rows.read_text().splitlines()) == 2


def test_a_stage_ends_at_its_limit_and_another_is_left_out(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path\n"
        "import suite\n"
        f"rows, log = Path({str(tmp_path)!r}) / 'rows', Path({str(tmp_path)!r}) / 'log'\n"
        "print(suite.run(suite.Stage('short', 'stream.py --quick', 0.2), rows, log))\n"
        "print(suite.run(suite.Stage('wrong', 'stream.py --slow', 60), rows, log))\n"
    )
    paths = environment(PYTHONPATH=f"{BENCHMARKS}:{BENCHMARKS.parent}")
    out, _ = python(paths, "-c", script).communicate(timeout=120)
    assert [line.split()[0] for line in out.decode().splitlines()] == ["ENDED", "FAILED"]
    assert "unrecognized arguments: --slow" in (tmp_path / "log").read_text()

    words = ("--quick", "--stages", "stream", "--seconds", 1, "--out", tmp_path / "new")
    suite = python(environment(), BENCHMARKS / "suite.py", *words)
    out, _ = suite.communicate(timeout=60)
    assert suite.returncode == 0
    assert b"stream: left out, it may take 300 s" in out
