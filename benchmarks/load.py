"""Does the CPU's share follow when something else takes bandwidth, and is it worth what the model says?

Steps that only attend, `write_scope` settled on an idle machine (share r0). Then a load begins, while the cache goes
on:

- readers: processes of numpy, pinned to no core, that together read a third of what the CPU gives.
- copies: large copies to the device at half of the link's rate, one at a time. The device makes the copies of one
  direction one after the other: several enqueued at once would leave the cache's own none, and a small one waits for so
  many of those that it gets a fifth of the rate.

Feedback runs on; a fresh batch is placed with the share that it found (r1) and held against a fresh batch with r0, both
under the load, in turns, their caches filled row by row in turns. That is done a few times, and what the batch with r1
took is fed back as well: its pages are not those of the cache that the load surprised. The last time is judged.
Equations 1 and 2 say what r1 gains, from the costs of an entry under the load, A for the CPU and B for the link: the
time that it saves should be 0.8 of what they say. The ceilings of the rows are these predictions, no limit of the
machine. The share over time is in the rows (`series`: seconds from the onset, share) and printed as a plot.
"""

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, NamedTuple

import options
import record
from ceilings import GB, Ceilings
from copies import Copies
from decode_attention import GROUP, LEAST_LAYERS, WINDOW, Bench
from filled import Setup, filled_together, placed_bytes
from readers import Readers

from tests.cases import CASES
from wscope_jax.footprint import CHUNK_ENTRIES
from wscope_jax.layout import Region
from wscope_jax.policies import WriteScope
from wscope_jax.roofline import Roofline, StepTiming

PART: Final = 1 / 3  # of the CPU's bandwidth, that the readers take
PART_OF_LINK: Final = 1 / 2
BAR: Final = 0.8  # of the predicted gain
TIMES: Final = 3  # that fresh batches are held against each other
LEAST: Final = 0.02  # of a step, that a gain has to be to be judged
LINES: Final = 24  # of the plot
LOADS: Final = ("readers", "copies")
Series = list[tuple[float, float]]  # seconds from the onset, share of the CPU


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    parser.add_argument("--case", choices=CASES, default="gqa8_d128")
    parser.add_argument("--batch", type=options.count, default=32)
    parser.add_argument("--context", type=options.count, default=8192, help="tokens of a row")
    parser.add_argument("--layers", type=options.count, default=8)
    parser.add_argument(
        "--chunk-entries", type=options.count, default=CHUNK_ENTRIES, help="of the link"
    )
    parser.add_argument(
        "--loads",
        type=options.some_of(LOADS),
        default=",".join(LOADS),
        help=f"a list of {', '.join(LOADS)}",
    )
    parser.add_argument(
        "--readers", type=options.count, help="processes (default: half of the cores)"
    )
    parser.add_argument(
        "--groups", type=options.count, default=40, help=f"of {GROUP} steps, each phase"
    )
    args = options.parse(
        parser, batch=4, context=2048, layers=LEAST_LAYERS, groups=10, chunk_entries=2 * WINDOW
    )
    args.share = None  # of `Bench`: its own
    return args


def costs(timings: Sequence[StepTiming], known: Roofline) -> Roofline:
    """A and B of these steps; what is fixed, or what these steps had no entries for, is what was known before."""

    def cost(time_field: str, entries_field: str, fixed_s: float, known_s: float) -> float:
        samples = [
            (1e-9 * getattr(t, time_field) - t.jobs * fixed_s) / getattr(t, entries_field)
            for t in timings
            if getattr(t, entries_field) and getattr(t, time_field)
        ]
        found = statistics.median(samples) if samples else 0.0
        return found if found > 0 else known_s

    return dataclasses.replace(
        known,
        cpu_s_per_entry=cost("cpu_ns", "host_entries", known.cpu_fixed_s, known.cpu_s_per_entry),
        link_s_per_entry=cost(
            "link_ns", "streamed_entries", known.link_fixed_s, known.link_s_per_entry
        ),
    )


def step_s(model: Roofline, share: float, placed: int) -> float:
    """Seconds of a layer's attention: its slower side. Source: equation 1."""
    return max(model.cpu_time(share, placed), model.link_time(share, placed))


class Comparison(NamedTuple):
    """Fresh batches with r0 and with r1, under the load.

    Attributes:
        idle: r0.
        loaded: r1.
        old_s: seconds of a step with r0, of each group.
        new_s: seconds of a step with r1.
        model: costs of an entry meanwhile, in the batch with r0.
    """

    idle: float
    loaded: float
    old_s: list[float]
    new_s: list[float]
    model: Roofline


class LoadBench(Bench):
    """`Bench`, settled on an idle machine, and what becomes of it under a load."""

    def __init__(self, args: argparse.Namespace, ceilings: Ceilings) -> None:
        super().__init__(args, ceilings)
        self.context, self.layers = args.context, args.layers
        self.placed = args.batch * (args.context // WINDOW) * WINDOW  # entries, one layer
        self.entry_bytes = self.case.layout.entry_bytes(2)

    def load(self, kind: str) -> AbstractContextManager[Readers | Copies]:
        """A load that is not there yet."""
        if kind == "copies":
            return Copies(self.ceilings, PART_OF_LINK * GB * self.ceilings["link"])
        count = self.args.readers or max(1, len(os.sched_getaffinity(0)) // 2)
        return Readers(count, PART * GB * self.ceilings["cpu"])

    def share(self) -> float:
        """What the settled policy asks for."""
        return self.write_scope.cpu_share(self.placed)

    def model(self, setup: Setup) -> Roofline:
        """Costs of the steps since they were last asked for."""
        assert self.write_scope.roofline is not None
        found = costs(setup.timings, self.write_scope.roofline)
        setup.timings.clear()
        return found

    def tell_costs(self, when: str, model: Roofline) -> None:
        """Prints A and B, as rates too."""
        rates = [
            self.entry_bytes / cost / GB for cost in (model.cpu_s_per_entry, model.link_s_per_entry)
        ]
        print(
            f"  {when}: A {1e9 * model.cpu_s_per_entry:.2f} ns ({rates[0]:.1f} GB/s), B "
            f"{1e9 * model.link_s_per_entry:.2f} ns ({rates[1]:.1f} GB/s); equation 2 asks for r = "
            f"{model.cpu_share(self.placed):.3f}",
            flush=True,
        )

    def run_under(self, kind: str) -> list[dict[str, Any]]:
        """Rows of one load."""
        idle_policy, idle = self.write_scope, self.share()
        print(f"{kind}: settled on r0 = {idle:.3f}", flush=True)
        try:
            with self.onset(kind) as (load, series):
                for _ in range(TIMES):
                    found = self.compare(idle, load)
        finally:
            self.write_scope = idle_policy
        return self.judge(kind, found, series)

    @contextmanager
    def onset(self, kind: str) -> Iterator[tuple[Any, Series]]:
        """Starts a load while a cache with r0 decodes; within the block there is the load, and what the share did."""
        series: Series = []
        with self.setup(self.write_scope) as setup:
            began = time.perf_counter()
            self.watch(setup, series, began)
            began, ahead = time.perf_counter(), time.perf_counter() - began
            series[:] = [(at - ahead, share) for at, share in series]
            self.tell_costs("idle", self.model(setup))
            with self.load(kind) as load:
                self.watch(setup, series, began)
                found = setup.cache.policy
                self.tell_costs("under load, the cache as it was", self.model(setup))
                plot(series)
                setup.cache.close()
                assert isinstance(found, WriteScope)
                self.write_scope = found
                yield load, series

    def watch(self, setup: Setup, series: Series, began: float) -> None:
        """Decodes for a phase, and notes the share."""
        for _ in range(self.args.groups):
            setup.run(GROUP)
            series.append((time.perf_counter() - began, setup.cache.cpu_share()))

    def compare(self, idle: float, load: Any) -> Comparison:
        """Runs fresh batches with r0 and with the share found so far, in turns; feeds back what the latter took."""
        old_s, new_s = [], []
        old, new = self.setup(WriteScope(share=idle)), self.setup(self.write_scope)
        with filled_together((old, new)):
            placed = placed_bytes(new.cache)
            loaded = placed[Region.UNPINNED] / sum(placed.values())
            load.rate()
            for _ in range(self.args.groups):
                old_s.append(old.run(GROUP))
                new_s.append(new.run(GROUP))
            saved = 1 - statistics.median(new_s) / statistics.median(old_s)
            print(
                f"  fresh batches: r1 = {loaded:.3f} saves {100 * saved:.1f} %; the load itself: "
                f"{load.rate() / GB:.1f} GB/s"
            )
            self.tell_costs("of the batch with r1", self.model(new))
            found = new.cache.policy
            assert isinstance(found, WriteScope)
            self.write_scope = found
            return Comparison(idle, loaded, old_s, new_s, self.model(old))

    def judge(self, kind: str, found: Comparison, series: Series) -> list[dict[str, Any]]:
        """Prints what r1 gains beside what equations 1 and 2 say; rows of both steps and of the gain."""
        idle, loaded, old_s, new_s, model = found
        self.tell_costs("under load, a fresh batch with r0", model)
        best = model.cpu_share(self.placed)
        limits = [self.layers * step_s(model, share, self.placed) for share in (idle, best)]
        old, new = statistics.median(old_s), statistics.median(new_s)
        saved, foreseen = 1 - new / old, 1 - limits[1] / limits[0]
        verdict = "the load hardly shifts the balance: nothing to judge"
        if self.args.quick:
            verdict = "too few steps to judge"
        elif foreseen >= LEAST:
            reached = saved / foreseen
            verdict = f"{reached:.2f} of the predicted gain, {BAR} {'' if reached >= BAR else 'NOT '}reached"
        print(
            f"  a step: {1e3 * old:.2f} ms with r0 = {idle:.3f}, {1e3 * new:.2f} ms with r1 = {loaded:.3f}: saves "
            f"{100 * saved:.1f} %; predicted {1e3 * limits[0]:.2f} and {1e3 * limits[1]:.2f} ms (r = {best:.3f}): "
            f"{100 * foreseen:.1f} %\n  {verdict}",
            flush=True,
        )
        case = f"{self.args.case}_b{self.args.batch}_{self.context}_{kind}"
        facts = {
            "shares": {"idle": idle, "loaded": loaded, "predicted": best},
            "costs_s": [model.cpu_s_per_entry, model.link_s_per_entry],
            "saved": saved,
            "predicted_saved": foreseen,
        }
        gain, most = [a / b for a, b in zip(old_s, new_s, strict=True)], limits[0] / limits[1]
        return [
            record.row(case, "wscope/r0", [1e3 * s for s in old_s], "ms", 1e3 * limits[0]) | facts,
            record.row(case, "wscope/r1", [1e3 * s for s in new_s], "ms", 1e3 * limits[1]) | facts,
            record.row(case, "wscope/r0:r1", gain, "x", most) | facts | {"series": series},
        ]


def plot(series: Series) -> None:
    """Prints the share over time; a line across marks the onset."""
    print("    seconds  r")
    was_before = True
    for number in range(min(LINES, len(series))):
        at, share = series[number * len(series) // min(LINES, len(series))]
        if was_before and at >= 0:
            print("    " + "-" * 32 + " the load begins")
        was_before = at < 0
        print(f"    {at:7.1f}  {share:.3f} {'#' * round(60 * share)}")


def main() -> None:
    args = arguments()
    with record.kept(args.json) as rows:
        ceilings = Ceilings.make(args.quick)
        ceilings.sample(0.1, times=3)
        ceilings.tell()
        bench = LoadBench(args, ceilings)
        bench.settle()
        for kind in args.loads:
            rows += bench.run_under(kind)


if __name__ == "__main__":
    options.end_in_one_line(main)
