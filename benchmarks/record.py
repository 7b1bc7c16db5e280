"""What every benchmark prints and writes: one table, and one JSON object a row."""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def parser(doc: str | None, quick: str = "end within a minute on 2 cores") -> ArgumentParser:
    """The two options that every benchmark has; `quick` says what the first one does."""
    made = ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    return made


def row(
    case: str, implementation: str, samples: Sequence[float], unit: str, ceiling: float
) -> dict[str, Any]:
    """One row: the median of `samples` beside its ceiling from the same run.

    `share` is value / ceiling for rates and ceiling / value for times and sizes: higher is better. `spread` is
    the distance between the quartiles over the median.
    """
    value = statistics.median(samples)
    quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else [value] * 3
    is_cost = unit in ("s", "ms", "us", "ns", "MB")
    return {
        "benchmark": Path(sys.argv[0]).stem,
        "case": case,
        "implementation": implementation,
        "value": value,
        "unit": unit,
        "ceiling": ceiling,
        "share": ceiling / value if is_cost else value / ceiling,
        "spread": (quartiles[2] - quartiles[0]) / value,
        "runs": len(samples),
    }


@contextlib.contextmanager
def kept(path: Path | None) -> Iterator[list[dict[str, Any]]]:
    """A list for rows, which is printed and written at the end, whatever ends the block: a time limit, too.

    What a run that has no row yet was to replace stays.
    """
    rows: list[dict[str, Any]] = []

    def leave(*_: object) -> None:
        sys.exit("terminated")

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield rows
    finally:
        signal.signal(signal.SIGTERM, before)
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
            f"ceiling {r['ceiling']:10.4g}  share {r['share']:6.3f}  spread {r['spread']:.3f}  runs {r['runs']}"
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
    lines = [json.dumps({**r, **facts}) for r in rows]
    path.write_text("\n".join(lines) + "\n")
