"""How fast does a whole model decode over a cache of a given length, what is the limit, and what does the cache take?

A released configuration at full size with random weights (random routing touches all experts, the worst case). The
cache is filled with random entries through the real `store`. The ceiling of a step counts the bytes of the placed
blocks alone, over what CPU and link bring when both are at work, as measured before and after each policy's steps; with
one of them, over its own. What windows keep beyond D (--spare-gigabytes) is no such block. `write_scope` is settled
first, as a call is by those before it: a cache's steps are fed back, and the share that they ask for places the blocks
of a fresh cache; twice, and once for each further context.

The GPU's memory is the peak of the run less the weights and a run without a cache (gpu_memory.py). JAX's peak cannot be
set back, so the figure is told for the first policy of the first context alone. Host memory is printed before
anything is filled: 32 rows of 32,768 tokens of Qwen3-30B-A3B are 2.2 GB a layer, 105 GB in all 48. Where a machine has
less, --layers N takes the first N layers.
"""

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gpu_memory
import jax
import jax.numpy as jnp
import numpy as np
import options
import record
from ceilings import GB, Ceilings
from filled import TELL_S, fill, phases, placed_bytes

from wscope_jax import Engine, Sampling, configurations, models
from wscope_jax.errors import CapacityError
from wscope_jax.layout import Region
from wscope_jax.policies import Policy
from wscope_jax.sampling import Rows, row_operands
from wscope_jax.steps import Steps

SMALL = {  # with --quick, those of them that the family's configurations have
    "hidden_size": 256,
    "dense_size": 256,
    "expert_size": 128,
    "num_experts": 8,
}


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__, "a small model, a short cache")
    parser.add_argument("--model", default="qwen3-30b-a3b", help="name of a configuration")
    parser.add_argument(
        "--layers",
        type=options.count,
        help="fewer layers than the configuration has, to fit host memory",
    )
    parser.add_argument("--batch", type=options.count, default=8)
    parser.add_argument(
        "--context", type=options.counts, default="8192", help="tokens of a row, a list"
    )
    parser.add_argument("--steps", type=options.count, default=60)
    options.add_policies(parser, resident=True)
    parser.add_argument(
        "--spare-gigabytes", type=options.size, default=0.0, help="that windows may take beyond D"
    )
    return options.parse(parser, batch=2, context="1024", steps=20, layers=2)


def build(args: argparse.Namespace) -> Any:
    """The configuration's model with random weights, as `wscope generate --random-weights` draws them."""
    _, config = configurations.read_alone(args.model)
    changes: dict[str, Any] = {"num_layers": args.layers or config.num_layers}
    if args.quick:
        changes |= {name: small for name, small in SMALL.items() if hasattr(config, name)}
    return models.random(dataclasses.replace(config, **changes), 0, "bfloat16")


def open_engine(args: argparse.Namespace, window: int = 256, spare_memory: int = 0) -> Engine:
    """An engine over that model, its weights in place."""
    began = time.perf_counter()
    eng = Engine(build(args), policy="write_scope", window=window, spare_memory=spare_memory)
    jax.block_until_ready(eng._programs._model.leaves)
    took_s, size = time.perf_counter() - began, eng._programs.weight_bytes
    print(f"{args.model}: {size / GB:.1f} GB of weights in {took_s:.1f} s", flush=True)
    return eng


def watch(cache: Any) -> list[Any]:
    """A list that gets the timings of the cache's steps."""
    timings: list[Any] = []
    observe = cache._dispatcher.timings

    def keep(jobs: int) -> Any:
        found = observe(jobs)
        timings.extend(found)
        return found

    cache._dispatcher.timings = keep
    return timings


class Bench:
    """One engine and batch; the settled policy is handed on to the next context."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.eng = open_engine(args, spare_memory=int(args.spare_gigabytes * GB))
        gpu_memory.print_host("with the weights in place")
        self.rows = row_operands([Sampling(ignore_eos=True)] * args.batch)
        self.ceilings = Ceilings.make(args.quick)
        self.account = gpu_memory.Account(self.eng, self.rows, args.batch)
        self.write_scope = self.eng.policy
        self.is_settled = self.is_counted = False
        self.context = 0

    def plan(self, policy: Policy, max_len: int) -> Any:
        """What the cache will take; raises CapacityError where that does not fit."""
        plan = self.eng._caches.plan(policy, self.args.batch, max_len)
        layers = self.eng.model.num_layers
        pools = plan.footprint.pool_bytes()
        budget = "" if plan.host_memory is None else f" of {plan.host_memory / GB:.1f} GB"
        print(
            f"  {policy.name}: {plan.host_needed / GB:.1f} GB{budget} of host memory; blocks take "
            f"{pools / layers / GB:.3f} GB in each of {layers} layers",
            flush=True,
        )
        if not plan.fits:
            raise CapacityError(f"{plan.why}; take fewer layers with --layers N")
        return plan

    @contextmanager
    def cache(self, policy: Policy) -> Iterator[tuple[Any, Any]]:
        """A filled cache, its step compiled, and the plan of its memory."""
        args, eng = self.args, self.eng
        max_len = self.context + 2 * args.steps + 2 * eng.window
        plan = self.plan(policy, max_len)
        with eng._caches.make(args.batch, max_len, policy) as cache:
            began = time.perf_counter()
            fill(cache, self.context)
            filled_s, began = time.perf_counter() - began, time.perf_counter()
            eng._programs.compile_step(cache, self.rows)
            compiled_s = time.perf_counter() - began
            words = f"filled in {filled_s:.1f} s, compiled in {compiled_s:.1f} s"
            print(f"  {words}, r = {cache.cpu_share():.3f}", flush=True)
            yield cache, plan

    def settle(self) -> None:
        """Lets feedback find the share, on a cache that has the share found before."""
        for _ in range(1 if self.is_settled else 2):
            with self.cache(self.write_scope) as (cache, _):
                before = cache.cpu_share()
                seconds = list(steps(self.eng, cache, self.rows, self.args.steps))
                self.write_scope, after = cache.policy, cache.cpu_share()
            print(
                f"  settling: a cache with r = {before:.3f}, {1e3 * statistics.median(seconds):.1f} ms a step, asks "
                f"for r = {after:.3f}",
                flush=True,
            )
        self.is_settled = True

    def measure(self, name: str, policy: Policy) -> list[dict[str, Any]]:
        """Rows of a policy: its steps, and what its cache takes of the GPU's memory."""
        self.ceilings.clear()
        self.ceilings.sample(0.1, times=3)
        with self.cache(policy) as (cache, plan):
            gpu_memory.print_host("with the cache filled")
            timings = watch(cache)
            ids = jnp.zeros(self.args.batch, jnp.int32)
            alive = self.account.alive(
                cache, self.eng._programs._step_program(cache, ids, self.rows)
            )
            seconds = list(steps(self.eng, cache, self.rows, self.args.steps))
            placed = placed_bytes(cache)
            held = []
            if not self.is_counted:  # peaks cannot be set back: later ones would be the first one's
                held = self.account.row(self.case(), name, alive, plan.footprint)
                self.is_counted = True
        self.ceilings.sample(0.1, times=3)
        return [self.row(name, seconds, placed, timings[len(timings) // 2 :]), *held]

    def case(self) -> str:
        """What the rows are called."""
        return f"{self.args.model}_b{self.args.batch}_{self.context}"

    def run(self, context: int) -> list[dict[str, Any]]:
        """All rows of one context."""
        self.context = context
        rows: list[dict[str, Any]] = []
        for name, policy in self.args.policies.items():
            if name == "write_scope":
                self.settle()
            rows += self.measure(name, self.write_scope if name == "write_scope" else policy)
        for share, policy in self.args.shares.items():
            rows += self.measure(f"share_{share}", policy)
        return rows

    def row(
        self, name: str, seconds: list[float], placed: dict[Region, int], timings: list[Any]
    ) -> dict[str, Any]:
        """The row of a policy's steps, but for the first ones."""
        host, pinned = placed[Region.UNPINNED], placed[Region.PINNED]
        ceil = self.ceilings
        readers = {"gpu_only": ceil["link"], "cpu_only": ceil["cpu"]}
        reader = GB * readers.get(name, statistics.median(ceil.both()))
        ceiling = 1e3 * (host + pinned) / reader if host + pinned else None
        samples = [1e3 * s for s in seconds[len(seconds) // 3 :]]
        words = ", ".join(f"{phase} {ms:.2f} ms" for phase, ms in phases(timings).items())
        rate = self.args.batch / statistics.median(samples) * 1e3
        print(
            f"  {name}: {rate:.1f} tokens/s; UNPINNED {host / GB:.2f} GB, PINNED {pinned / GB:.2f} GB; a step: {words}",
            flush=True,
        )
        ceil.tell()
        return record.row(self.case(), f"wscope/{name}", samples, "ms", ceiling)


def steps(eng: Engine, cache: Any, rows: Rows, count: int) -> Iterator[float]:
    """Seconds from the tokens of each step to those of the next; a long run tells how far it is."""
    decoding, ids = Steps(eng._programs, cache, rows), np.arange(cache.batch, dtype=np.int32)
    told = began = time.perf_counter()
    number = 0

    def may_go_on(_: tuple[int, ...]) -> bool:
        return number + 1 < count

    for number in range(count):
        decoding.take(ids, may_go_on)
        seconds, began = time.perf_counter() - began, time.perf_counter()
        if time.perf_counter() - told > TELL_S:
            told = time.perf_counter()
            words = f"{1e3 * seconds:.1f} ms, {cache.num_turns} turns"
            print(f"  step {number + 1} of {count}: {words}", flush=True)
        yield seconds


def main() -> None:
    args = arguments()
    with record.kept(args.json) as rows:
        bench = Bench(args)
        for context in args.context:
            rows += bench.run(context)
        bench.eng.close()


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.85")
    options.end_in_one_line(main)
