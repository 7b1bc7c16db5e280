"""How near to "CPU and link at once" does decode attention alone come?

A jitted step of some layers that only attend, chained by data, over a cache filled through the real `store`. GB/s are
bytes of the placed blocks over the time of a step, of a few dispatched one behind the other. The ceilings come from the
same run, between the steps: the workers reading, the link copying chunks of 32 MiB, and both at once, over memory of
their own. What `write_scope` gains over another policy has the ceiling that the paper's comparison has, both readers
over one; a policy below its own ceiling flatters it, so the rates are what to read. `write_scope` is settled first: its
share is fed back over some steps and applied to a fresh cache, three times, beside the caches of the others. The caches
of all policies of a context are open at once, are filled row by row in turns and run in turns: what others do on the
machine meets them alike, and no one has the faster part of the memory.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

import options
import record
from ceilings import GB, Ceilings
from filled import Setup, filled_together, phases, placed_bytes

from tests.cases import CASES
from wscope_jax import calibration, machine
from wscope_jax.errors import CapacityError
from wscope_jax.footprint import CHUNK_ENTRIES
from wscope_jax.layout import Region
from wscope_jax.placement import HOST_REGIONS
from wscope_jax.policies import Policy, WriteScope

GROUP: Final = 4  # steps dispatched one behind the other
LEAST_LAYERS: Final = 4
WINDOW: Final = 256
SETTLE_STEPS: Final = 40
FIRST_ROUNDS: Final = 3  # of settling, one for each further context
ROUNDS: Final = 6

Rows = list[dict[str, Any]]


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    parser.add_argument("--case", choices=CASES, default="gqa8_d128")
    parser.add_argument("--batch", type=options.count, default=32)
    parser.add_argument(
        "--context", type=options.counts, default="8192,16384,32768", help="tokens of a row, a list"
    )
    parser.add_argument(
        "--layers", type=options.count, default=8, help=f"fewer, but {LEAST_LAYERS}, if long"
    )
    parser.add_argument("--gigabytes", type=options.size, default=6.0, help="of each cache, about")
    options.add_policies(parser)
    parser.add_argument(
        "--share", type=options.share, help="of the CPU in write_scope, instead of its own"
    )
    parser.add_argument(
        "--chunk-entries", type=options.count, default=CHUNK_ENTRIES, help="of the link"
    )
    parser.add_argument(
        "--seconds", type=options.size, default=1.5, help="of steps measured per policy"
    )
    args = options.parse(
        parser, batch=4, context="2048", layers=4, seconds=1.0, chunk_entries=2 * WINDOW
    )
    if min(args.context) < WINDOW:
        parser.error(f"--context: at least {WINDOW} tokens, a block, are needed")
    return args


class Bench:
    """One case, batch and context; the settled policy is handed on to the next context."""

    def __init__(self, args: argparse.Namespace, ceilings: Ceilings) -> None:
        self.args, self.ceilings = args, ceilings
        self.case = CASES[args.case]
        self.rates: dict[str, list[float]] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.context = self.layers = 0
        self.is_settled = args.share is not None
        if self.is_settled:
            self.write_scope = WriteScope(share=args.share)
        else:
            roofline = calibration.measure(
                self.case.layout,
                num_q_heads=self.case.num_q_heads,
                window=WINDOW,
                dtype="bfloat16",
            )
            self.write_scope = WriteScope(roofline=roofline)

    def setup(self, policy: Policy) -> Setup:
        """A fresh cache, its windows half full."""
        tokens = self.context // WINDOW * WINDOW + WINDOW // 2
        batch = self.args.batch
        return Setup(
            self.case,
            layers=self.layers,
            batch=batch,
            tokens=tokens,
            policy=policy,
            chunk_entries=self.args.chunk_entries,
        )

    def settle(self, beside: Sequence[Policy] = ()) -> None:
        """Lets feedback find the share, on a cache that has the share found before.

        `beside` it lie caches that run a few steps and then idle: with those of the comparison that follows, it has the
        same part of faster and of slower pages.
        """
        if self.args.share is not None:
            return
        for _ in range(1 if self.is_settled else FIRST_ROUNDS):
            setup = self.setup(self.write_scope)
            with filled_together([setup, *map(self.setup, beside)]):
                before = setup.cache.cpu_share()
                for _ in range(10 if self.args.quick else SETTLE_STEPS // GROUP):
                    setup.run(1 if self.args.quick else GROUP)
                found = setup.cache.policy
                after = setup.cache.cpu_share()
            assert isinstance(found, WriteScope)
            self.write_scope = found
            print(f"  settling: a cache with r = {before:.3f} asks for r = {after:.3f}", flush=True)
        self.is_settled = True

    def measure(self, chosen: dict[str, Policy]) -> None:
        """GB/s of groups of steps of each policy, in turns, with the ceilings sampled in between."""
        setups = {name: self.setup(policy) for name, policy in chosen.items()}
        with filled_together(list(setups.values())):
            single = {name: min(one.run(1) for _ in range(3)) for name, one in setups.items()}
            groups = {
                name: max(2, round(self.args.seconds / ROUNDS / (GROUP * one.run(GROUP))))
                for name, one in setups.items()
            }
            step_s: dict[str, list[float]] = {name: [] for name in setups}
            own: dict[str, list[float]] = {name: [] for name in setups}
            for setup in setups.values():
                setup.timings.clear()
            for _ in range(ROUNDS):
                self.sample()
                for name, setup in setups.items():
                    step_s[name] += [setup.run(GROUP) for _ in range(min(groups[name], 40))]
                    own[name].append(self.own_pages(setup))
            self.sample()
            for name, setup in setups.items():
                self.tell(name, setup, step_s[name], single[name], statistics.median(own[name]))

    def require_room(self, caches: int) -> None:
        """Raises CapacityError where so many caches do not fit at once."""
        one = self.layers * self.args.batch * self.context * self.case.layout.entry_bytes(2)
        left = machine.memory().budget
        if caches * one > left:
            raise CapacityError(
                f"{caches} caches of {one / GB:.1f} GB are compared, {left / GB:.1f} GB are left; lower "
                "--gigabytes, or take fewer policies and shares"
            )

    def tell(
        self, name: str, setup: Setup, step_s: list[float], single_s: float, own: float
    ) -> None:
        """Keeps what a policy's steps gave, and prints it."""
        placed = placed_bytes(setup.cache)
        host, pinned = placed[Region.UNPINNED], placed[Region.PINNED]
        found = phases(setup.timings)
        self.rates[name] = [(host + pinned) / s / GB for s in step_s]
        self.facts[name] = {
            "r": host / (host + pinned),
            "layers": self.layers,
            "phases_ms": found,
            "own_pages": own,  # GB/s
            "asks_for": setup.cache.cpu_share(),
        }
        busy = [
            f"{side} {size / (1e6 * found[side]):.1f} GB/s"
            for side, size in (("cpu", host), ("link", pinned))
            if size and found[side]
        ]
        words = ", ".join(f"{phase} {ms:.2f}" for phase, ms in found.items())
        print(
            f"  {name}: r {host / (host + pinned):.3f}, UNPINNED {host / GB:.2f} GB, PINNED {pinned / GB:.2f} GB; "
            f"filled in {setup.filled_s:.1f} s, compiled in {setup.compiled_s:.1f} s\n"
            f"    a step, ms: {1e3 * statistics.median(step_s):.2f} in a row, {1e3 * single_s:.2f} alone; {words}\n"
            f"    while busy: {', '.join(busy)}; its readers get {own:.1f} GB/s out of its own pages; it asks for "
            f"r = {setup.cache.cpu_share():.3f}",
            flush=True,
        )

    def own_pages(self, setup: Setup) -> float:
        """GB/s that the policy's readers get out of the cache's own pages, which differ from each other."""
        placed, seconds = placed_bytes(setup.cache), 0.05
        pools = {r: setup.cache._pools.pool(r) for r in HOST_REGIONS if placed[r]}
        read, link = pools.get(Region.UNPINNED), pools.get(Region.PINNED)
        if read and link:
            return sum(self.ceilings.at_once(seconds, read, link))
        if read:
            return self.ceilings.cpu_alone(seconds, pool=read)
        return self.ceilings.link_alone(seconds, pool=link)

    def median(self, name: str) -> float:
        """GB/s of a policy."""
        return statistics.median(self.rates[name])

    def sample(self) -> None:
        """Samples the ceilings."""
        self.ceilings.sample(0.1)

    def run(self, context: int) -> Rows:
        """All rows of one context."""
        args, entry = self.args, self.case.layout.entry_bytes(2)
        most = int(args.gigabytes * GB / (entry * args.batch * context))
        self.context = context
        self.layers = min(args.layers, max(LEAST_LAYERS, most))
        self.rates = {}
        self.ceilings.clear()
        print(f"{args.case}, batch {args.batch}, context {context}, {self.layers} layers")
        chosen: dict[str, Policy] = {n: p for n, p in args.policies.items() if n != "write_scope"}
        chosen |= {f"share_{share}": policy for share, policy in args.shares.items()}
        settles = "write_scope" in args.policies
        self.require_room(len(chosen) + settles)
        if settles:
            self.settle(list(chosen.values()))
            chosen = {"write_scope": self.write_scope, **chosen}
        self.measure(chosen)
        return self.rows()

    def rows(self) -> Rows:
        """Readers, policies, and how much faster one is than another, each beside its ceiling."""
        case = f"{self.args.case}_b{self.args.batch}_{self.context}"
        ceil = self.ceilings
        both = statistics.median(ceil.both())
        print(
            f"  at once: CPU {ceil['cpu_of_both']:.1f} + link {ceil['link_of_both']:.1f} GB/s, "
            f"so r = {ceil['cpu_of_both'] / both:.3f} at best"
        )
        limits = {"gpu_only": ceil["link"], "cpu_only": ceil["cpu"]}
        rows = [
            record.row(case, name, values, "GB/s", statistics.median(values))
            for name, values in (
                ("streaming_read", ceil.samples["cpu"]),
                ("dma", ceil.samples["link"]),
                ("streaming_read+dma", ceil.both()),
            )
        ]
        for name, values in self.rates.items():
            row = record.row(case, f"wscope/{name}", values, "GB/s", limits.get(name, both))
            rows.append(row | self.facts[name])
        for name, limit in limits.items():
            if name in self.rates and "write_scope" in self.rates:
                gain = self.median("write_scope") / self.median(name)
                label = f"wscope/write_scope:{name}"
                rows.append(record.row(case, label, [gain], "x", both / limit))
        fixed = [self.median(name) for name in self.rates if name.startswith("share_")]
        if fixed and "write_scope" in self.rates:
            found = self.median("write_scope") / max(fixed)
            rows.append(record.row(case, "wscope/write_scope:best share", [found], "x", 1.0))
        return rows


def main() -> None:
    args = arguments()
    ceilings = Ceilings.make(args.quick, int(args.gigabytes * GB))
    bench = Bench(args, ceilings)
    with record.kept(args.json) as rows:
        for context in args.context:
            began = time.perf_counter()
            rows += bench.run(context)
            print(f"  {time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    options.end_in_one_line(main)
