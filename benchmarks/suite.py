"""The benchmarks that the documents quote, one after the other: rows and what was printed, in one folder.

Each stage is a process with a time limit, and has a file of rows and one of what it printed. One that is ended at its
limit keeps the rows that it had, and one that fails does not stop the others. With --seconds a stage is left out if its
limit goes beyond what is left. Exit code 1 if a stage failed or was ended, or if none ran.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

import options

from wscope_jax.errors import UsageError

HERE: Final = Path(__file__).parent
GRACE_S: Final = 20.0  # from the signal that asks a stage to end to the one that makes it


class Stage(NamedTuple):
    """One run of a benchmark.

    Attributes:
        name: to choose it by.
        words: of its command line.
        limit_s: seconds that it may take.
    """

    name: str
    words: str
    limit_s: float


# Limits are about twice what a stage took on a machine with an H200 and 16 cores.
FULL: Final = (
    Stage("host", "host_attention.py", 120),
    Stage("host-one-thread", "host_attention.py --threads 1 --without-torch", 80),
    Stage("stream", "stream.py", 180),
    Stage("attention", "decode_attention.py", 240),
    Stage(
        "attention-shares",
        "decode_attention.py --context 4096,8192,16384 --policies write_scope --shares 0.64,0.68,0.72,0.76 "
        "--gigabytes 4.5",
        240,
    ),
    Stage(
        "attention-one-row",
        "decode_attention.py --batch 1 --context 131072 --layers 24 --gigabytes 8 --shares 0.68,0.72",
        200,
    ),
    Stage("attention-latent", "decode_attention.py --case mla16_576 --context 8192,32768", 140),
    Stage("load", "load.py --groups 15", 200),
    Stage(
        "decode",
        "decode.py --batch 32 --context 8192,16384,32768 --steps 32 --policies write_scope",
        700,
    ),
    Stage("evictions", "evictions.py --layers 12 --rounds 4", 120),
    Stage("prefill", "prefill.py --layers 6 --rounds 4", 150),
)
WITHOUT_GPU: Final = ("overlap.py",)  # which says nothing of a GPU
QUICK_S: Final = 300.0


def stages(quick: bool) -> list[Stage]:
    """What there is to choose from: with `quick` each benchmark once, the one for machines without a GPU too."""
    if not quick:
        return list(FULL)
    files = sorted({stage.words.split()[0] for stage in FULL} | {*WITHOUT_GPU})
    return [Stage(Path(file).stem, f"{file} --quick", QUICK_S) for file in files]


def directory(text: str) -> Path:
    """A folder, made if it is not there."""
    path = Path(text).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # the latter: a name that is none
        raise UsageError(f"--out: {text!r} cannot be made: {options.reason(error)}") from None
    return path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=options.Description)
    parser.add_argument("--quick", action="store_true", help="each benchmark once, quickly")
    parser.add_argument("--stages", type=options.words, default="", help="a list (default: all)")
    parser.add_argument("--seconds", type=options.size, default=1e9, help="of all stages together")
    parser.add_argument("--list", action="store_true", help="print the stages, and run none")
    parser.add_argument(
        "--out", default=str(HERE.parent / "build" / "bench"), help="folder of rows and logs"
    )
    args = parser.parse_args()
    known = {stage.name: stage for stage in stages(args.quick)}
    if unknown := [name for name in args.stages if name not in known]:
        parser.error(f"--stages: {', '.join(unknown)}: not one of {', '.join(known)}")
    args.chosen = [known[name] for name in args.stages or known]
    return args


def run(stage: Stage, rows: Path, log: Path) -> str:
    """Runs a stage, whose rows go to one file and whose output to another; says how it ended."""
    rows.unlink(missing_ok=True)  # of a run before
    # Rows name their command: the file as it lies in the repository.
    command = [sys.executable, *f"{HERE.name}/{stage.words}".split(), "--json", str(rows)]
    process = None
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=HERE.parent,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        code = process.wait(stage.limit_s)
        return "ok" if code == 0 else f"FAILED with {code}, see {log}"
    except subprocess.TimeoutExpired:
        return f"ENDED at its limit of {stage.limit_s:.0f} s"
    finally:
        if process is not None:
            end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a stage that still runs, and what it has started, also if a signal comes meanwhile."""
    try:
        if process.poll() is None:
            process.terminate()
            process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tell(rows: Path) -> None:
    """Prints of each row what came out."""
    for row in map(json.loads, rows.read_text().splitlines() if rows.exists() else []):
        share = "-" if row["share"] is None else f"{row['share']:.3f}"
        print(
            f"    {row['case']:28} {row['implementation']:32} {row['value']:10.4g} {row['unit']:9} share {share}",
            flush=True,
        )


def main() -> None:
    args = arguments()
    if args.list:
        for stage in args.chosen:
            print(f"{stage.name:18} {stage.limit_s:5.0f} s  {stage.words}")
        return
    out, began, ends = directory(args.out), time.monotonic(), []
    for stage in args.chosen:
        at = time.monotonic()
        if stage.limit_s + GRACE_S > args.seconds - (at - began):
            print(f"{stage.name}: left out, it may take {stage.limit_s:.0f} s", flush=True)
            continue
        rows = out / f"{stage.name}.jsonl"
        ends.append(run(stage, rows, out / f"{stage.name}.log"))
        print(f"{stage.name}: {ends[-1]}, {time.monotonic() - at:.0f} s", flush=True)
        tell(rows)
    print(f"rows and logs are in {out}")
    if not ends or any(ended != "ok" for ended in ends):
        sys.exit(1)


if __name__ == "__main__":
    options.end_in_one_line(main)
