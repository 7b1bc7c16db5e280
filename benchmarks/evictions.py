"""What does it cost a decode that its blocks leave the window, and does anything compile meanwhile?

The paper's own load: short prompts are decoded on until most of the cache has gone through the windows. A step counts
as one that evicts while a block of any row is on its way, from the step that sends it to the one that finds it in its
place; windows fill up in the same steps, so there are a few of these every D steps, and none between. Each round of D
steps is held against its own quiet steps: their median for those after the moves, the mean of the medians before and
after for those with moves, because the cache is larger after them. The bar: all steps of a round take at most 2 %
longer than that.

The CPU's share is fixed at what calibration says, and chunks of the link are smaller than usual, so that the turns of a
layer grow past a bucket: `stall` counts the programs that decode had to wait for, which is none. (But with
--quick, where a bucket lasts for less time than the next program takes to compile.)
"""

import argparse
import itertools
import os
import statistics
import time
from typing import Any, NamedTuple

import options
import record
from ceilings import GB, Ceilings
from decode import open_engine, steps
from filled import fill, placed_bytes

from wscope_jax import Engine, Sampling
from wscope_jax.policies import WriteScope
from wscope_jax.sampling import Rows, row_operands

BAR = 0.02  # of the steps' time


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__, "a small model, small windows")
    parser.add_argument("--model", default="qwen3-30b-a3b", help="name of a configuration")
    parser.add_argument(
        "--layers", type=options.count, help="fewer layers than the configuration has"
    )
    parser.add_argument("--batch", type=options.count, default=32)
    parser.add_argument("--context", type=options.count, default=2048, help="tokens of a prompt")
    parser.add_argument(
        "--rounds", type=options.count, default=5, help="of D steps, the first not counted"
    )
    parser.add_argument("--window", type=options.count, default=256, help="D")
    parser.add_argument("--chunk-entries", type=options.count, default=4096, help="of the link")
    parser.add_argument(
        "--share", type=options.share, help="of the CPU, instead of what calibration says"
    )
    return options.parse(
        parser, layers=2, batch=4, context=256, window=32, chunk_entries=128, rounds=7
    )


class Step(NamedTuple):
    """One step: its seconds, and whether a block of any row was on its way."""

    seconds: float
    evicts: bool


def decode(eng: Engine, cache: Any, rows: Rows, count: int) -> list[Step]:
    """So many steps, and which of them evict."""
    found, under_way = [], cache._evictions._tickets
    was_busy = bool(under_way)
    for seconds in steps(eng, cache, rows, count):
        is_busy = bool(under_way)
        found.append(Step(seconds, was_busy or is_busy))
        was_busy = is_busy
    return found


def rounds_of(steps: list[Step], window: int) -> list[list[Step]]:
    """The steps of each round, which begins with the first step that evicts."""
    first = next((i for i, step in enumerate(steps) if step.evicts), len(steps))
    starts = range(first, len(steps) - window + 1, window)
    return [steps[max(0, first - window) : first], *(steps[at : at + window] for at in starts)]


class Round(NamedTuple):
    """What a round took, in ms a step.

    Attributes:
        quiet: median of the steps without evictions.
        evicting: median of those with.
        expected: what those with would take without.
        all: mean of all.
        all_expected: what that would be without.
        surplus: how far all are beyond it because of those with evictions.
        num_evicting: steps with evictions.
    """

    quiet: float
    evicting: float
    expected: float
    all: float
    all_expected: float
    surplus: float
    num_evicting: int


def judge(before: list[Step], now: list[Step]) -> Round | None:
    """A round beside the quiet steps of the round before; None if one has none, or nothing was evicted."""
    old = [1e3 * step.seconds for step in before if not step.evicts]
    quiet = [1e3 * step.seconds for step in now if not step.evicts]
    busy = [1e3 * step.seconds for step in now if step.evicts]
    if not (old and quiet and busy):
        return None
    median = statistics.median(quiet)
    expected = (statistics.median(old) + median) / 2
    return Round(
        quiet=median,
        evicting=statistics.median(busy),
        expected=expected,
        all=statistics.mean(quiet + busy),
        all_expected=(median * len(quiet) + expected * len(busy)) / len(now),
        surplus=(sum(busy) - expected * len(busy)) / len(now),
        num_evicting=len(busy),
    )


def tell(found: list[Round]) -> dict[str, float]:
    """Prints each round, and what evictions add; returns that as parts of the time without."""
    for number, r in enumerate(found, start=1):
        print(
            f"  round {number}: {r.quiet:.2f} ms without; {r.num_evicting} steps with, {r.evicting:.2f} ms where "
            f"{r.expected:.2f} are expected; all {r.all:.3f} ms a step, {r.all_expected:.3f} expected"
        )
    added = statistics.median(r.all / r.all_expected - 1 for r in found)
    own = statistics.median(r.surplus / r.all_expected for r in found)
    whole = sum(r.all for r in found) / sum(r.all_expected for r in found) - 1
    verdict = "below" if added < BAR else "ABOVE"
    print(
        f"  a round takes {100 * added:+.2f} % beyond its quiet steps' median, {verdict} the bar of "
        f"{100 * BAR:.0f} %; the steps that evict account for {100 * own:+.2f} %, the rest is how quiet steps spread\n"
        f"  all rounds together: {100 * whole:+.2f} %",
        flush=True,
    )
    return {"added": added, "added_by_evicting_steps": own, "added_in_all": whole}


def measure(args: argparse.Namespace, eng: Engine) -> list[dict[str, Any]]:
    """Rows: quiet steps beside what both readers give, steps that evict and all steps beside quiet ones."""
    ceilings = Ceilings.make(args.quick)
    ceilings.sample(0.1, times=5)
    ceilings.close()
    ceilings.tell()
    rows = row_operands([Sampling(ignore_eos=True)] * args.batch)
    count = args.window * (args.rounds + 1)
    share = eng.policy.cpu_share(args.batch * (args.context + count // 2))
    policy = WriteScope(share=share if args.share is None else args.share)
    with eng._caches.make(args.batch, args.context + count + 2 * args.window, policy) as cache:
        fill(cache, args.context)
        began = time.perf_counter()
        eng._programs.compile_step(cache, rows)
        print(f"  compiled in {time.perf_counter() - began:.1f} s", flush=True)
        cache.compiled.is_steady = True
        turns, placed = cache.num_turns, sum(placed_bytes(cache).values())
        done = decode(eng, cache, rows, count)
        compiles = cache.compiled.compiles
        final = sum(placed_bytes(cache).values())
        words = ", ".join(f"{number} {phase}" for phase, number in compiles.items())
        print(
            f"  {count} steps, {placed / GB:.2f} -> {final / GB:.2f} GB placed, r = {cache.cpu_share():.3f}; "
            f"turns {turns} -> {cache.num_turns}; compiles: {words}",
            flush=True,
        )
        if cache.num_turns == turns:
            print("  no bucket of turns was crossed: take smaller --chunk-entries to count stalls")
    parts = rounds_of(done, args.window)
    pairs = itertools.pairwise(parts[1:])  # what came before them warms up
    found = [r for before, now in pairs if (r := judge(before, now)) is not None]
    if not found:
        raise SystemExit("evictions: no round had steps with evictions and steps without")
    added = tell(found)
    middle = 1e3 * (placed + final) / 2 / GB / statistics.median(ceilings.both())
    case = f"{args.model}_b{args.batch}_{args.context}"
    names = ("quiet", "evicting", "all")
    samples = {name: [getattr(r, name) for r in found] for name in names}
    limits = {
        "quiet": middle,
        "evicting": statistics.median(r.expected for r in found),
        "all": statistics.median(r.all_expected for r in found),
    }
    stalls = {"stall": compiles["stall"], "steps": count, "turns": [turns, cache.num_turns]}
    facts = stalls | added
    return [
        record.row(case, f"wscope/{name} steps", samples[name], "ms", limits[name]) | facts
        for name in names
    ]


def main() -> None:
    args = arguments()
    with record.kept(args.json) as rows:
        eng = open_engine(args, args.window)
        eng._caches.chunk_entries = args.chunk_entries
        rows += measure(args, eng)
        eng.close()


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.85")
    options.end_in_one_line(main)
