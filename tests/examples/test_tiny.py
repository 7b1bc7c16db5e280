"""Every example runs with --tiny, in seconds and on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_runs(example: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(example), "--tiny"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_help_is_all_that_it_prints(example: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(example), "--help"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {example.name} [-h]")
    assert example.read_text().splitlines()[0].strip('"').split()[0] in done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) <= 80


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "mixtral_8x7b", "deepseek_v2_lite"])
def test_says_what_it_needs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--tiny" in done.stderr
