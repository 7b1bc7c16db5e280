"""What every benchmark prints and writes: one table, and one JSON object a row."""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

COSTS: Final = ("s", "ms", "us", "ns", "MB")  # units of which less is better


def row(
    case: str, implementation: str, samples: Sequence[float], unit: str, ceiling: float | None
) -> dict[str, Any]:
    """One row: the median of `samples` beside its ceiling from the same run, None where it has none.

    `share` is value / ceiling for rates and ceiling / value for times and sizes: higher is better. `spread` is
    the distance between the quartiles over the median. Either is None where it says nothing: without a ceiling, and
    where what is left of a difference is not above 0.
    """
    value = statistics.median(samples)
    quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else [value] * 3
    share = None
    if ceiling is not None and value > 0:
        share = ceiling / value if unit in COSTS else value / ceiling
    return {
        "benchmark": Path(sys.argv[0]).stem,
        "case": case,
        "implementation": implementation,
        "value": value,
        "unit": unit,
        "ceiling": ceiling,
        "share": share,
        "spread": (quartiles[2] - quartiles[0]) / value if value > 0 else None,
        "runs": len(samples),
    }


def _shown(number: float | None, width: int, digits: str) -> str:
    """The number, or a dash, in so many columns."""
    return ("-" if number is None else format(number, f".{digits}")).rjust(width)


def part_of(path: Path) -> Path:
    """The file that becomes `path` once it is whole."""
    return path.with_name(f"{path.name}.part")


@contextlib.contextmanager
def kept(path: Path | None) -> Iterator[list[dict[str, Any]]]:
    """A list for rows, which is printed and written at the end, whatever ends the block: a time limit, too.

    What a run that has no row yet was to replace stays.
    """
    rows: list[dict[str, Any]] = []
    try:
        yield rows
    finally:
        if rows:
            finish(rows, path)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str | None:
    if commit := os.environ.get("WSCOPE_COMMIT"):  # for a copy of the tree without its history
        return commit
    here = Path(__file__).parent
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout.strip() or None


def _command() -> str:
    """What was typed, but for where the rows go."""
    words = ["python", *sys.argv]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return shlex.join(words)


def finish(rows: Sequence[dict[str, Any]], path: Path | None) -> None:
    """Prints the table and writes the rows, completed by machine, versions, commit and command."""
    for r in rows:
        print(
            f"{r['case']:24} {r['implementation']:28} {r['value']:12.4g} {r['unit']:6} "
            f"ceiling {_shown(r['ceiling'], 10, '4g')}  share {_shown(r['share'], 6, '3f')}  "
            f"spread {_shown(r['spread'], 5, '3f')}  runs {r['runs']}"
        )
    if path is None:
        return
    import jax

    gpus = [d.device_kind for d in jax.devices() if d.platform != "cpu"]
    facts = {
        "machine": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "gpu": gpus[0] if gpus else None,
        },
        "versions": {
            "python": platform.python_version(),
            **{
                name: importlib.metadata.version(name)
                for name in ("jax", "jaxlib", "flax", "numpy")
            },
        },
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "command": _command(),
    }
    text = "".join(f"{json.dumps({**r, **facts})}\n" for r in rows)
    if path.exists() and not path.is_file():  # a pipe
        path.write_text(text)
        return
    part = part_of(path)
    part.write_text(text)
    part.replace(path)
