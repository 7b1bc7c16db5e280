"""How fast does a whole model decode over a cache of a given length, and what is the limit?

A released configuration at full size with random weights (random routing touches all experts, the worst case). The
cache is filled with random entries through the real `store`. The ceiling of a step counts the bytes of the placed
blocks alone: with both readers at work, bytes / (CPU's + link's bandwidth), as measured in the same run; with one of
them, bytes over its own.
"""

import argparse
import dataclasses
import os
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import record
from filled import fill, phases, placed_bytes

from wscope_jax import Engine, Sampling, _ffi, configurations, devices, models, policies
from wscope_jax.layout import Region
from wscope_jax.sampling import row_operands

READ_SLOTS, READ_BYTES = 512, 1 << 20  # of the CPU's streaming read: half a gigabyte
SMALL = {  # with --quick, those of them that the family's configurations have
    "hidden_size": 256,
    "dense_size": 256,
    "expert_size": 128,
    "num_experts": 8,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, a short cache")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--model", default="qwen3-30b-a3b", help="name of a configuration")
    parser.add_argument("--layers", type=int, help="fewer layers than the configuration has")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--policies", default="write_scope,gpu_only,cpu_only")
    return parser.parse_args()


def build(args: argparse.Namespace) -> Any:
    """The configuration's model with random weights, as `wscope generate --random-weights` draws them."""
    _, config = configurations.read_alone(args.model)
    changes: dict[str, Any] = {"num_layers": 2 if args.quick else args.layers or config.num_layers}
    if args.quick:
        changes |= {name: small for name, small in SMALL.items() if hasattr(config, name)}
    return models.random(dataclasses.replace(config, **changes), 0, "bfloat16")


def measure(eng: Engine, args: argparse.Namespace, policy: Any) -> tuple[list[float], Any]:
    """Seconds of each step, and the cache's timings over them."""
    programs = eng._programs
    rows = row_operands([Sampling(ignore_eos=True)] * args.batch)
    max_len = args.context + 2 * args.steps + 2 * eng.window
    timings: list[Any] = []
    with eng._cache(args.batch, max_len, policy) as cache:
        began = time.perf_counter()
        fill(cache, args.context)
        filled_s = time.perf_counter() - began
        observe = cache._dispatcher.timings

        def keep(jobs: int) -> Any:
            found = observe(jobs)
            timings.extend(found)
            return found

        cache._dispatcher.timings = keep  # type: ignore[method-assign]
        began = time.perf_counter()
        programs.compile_step(cache, rows)
        compiled_s = time.perf_counter() - began
        ids = jnp.arange(args.batch, dtype=jnp.int32)
        seconds = []
        for _ in range(args.steps):
            began = time.perf_counter()
            ids, _ = programs.step(cache, ids, rows)
            np.asarray(ids)
            seconds.append(time.perf_counter() - began)
        placed = placed_bytes(cache)
        share = cache.cpu_share()
    print(
        f"  {policy.name}: filled in {filled_s:.1f} s, compiled in {compiled_s:.1f} s, r = {share:.3f}"
    )
    return seconds, (placed, timings[len(timings) // 2 :])


def bandwidths() -> tuple[float, float]:
    """Bytes a second that the CPU reads and the link brings, each alone."""
    pool = _ffi.Pool(1, READ_SLOTS, READ_BYTES)
    pool.commit(READ_SLOTS)
    isa = _ffi.isas()[-1]
    times = [_ffi.measure_read(pool, 0, READ_SLOTS, isa)[0] for _ in range(9)]
    pool.close()
    number = devices.cuda_number()
    size = 64 << 20
    link_ns = _ffi.time_copy(size) if number is None else _ffi.time_load(number, size)
    return READ_SLOTS * READ_BYTES / statistics.median(times) * 1e9, size / link_ns * 1e9


def main() -> None:
    args = arguments()
    if args.quick:
        args.batch, args.context, args.steps = 2, 1024, 20
    began = time.perf_counter()
    eng = Engine(build(args), policy="write_scope", window=256)
    jax.block_until_ready(eng._programs._model.leaves)
    print(
        f"{args.model}: {eng._programs.weight_bytes / 1e9:.1f} GB of weights in {time.perf_counter() - began:.1f} s"
    )
    cpu, link = bandwidths()
    print(f"alone: CPU reads {cpu / 1e9:.1f} GB/s, the link brings {link / 1e9:.1f} GB/s")
    rows = []
    for name in args.policies.split(","):
        policy = eng.policy if name == "write_scope" else policies.choose(name)
        seconds, (placed, timings) = measure(eng, args, policy)
        host, pinned = placed[Region.UNPINNED], placed[Region.PINNED]
        readers = {"write_scope": cpu + link, "gpu_only": link, "cpu_only": cpu}.get(name, 0.0)
        ceiling = (host + pinned) / readers if readers else 0.0
        samples = [1e3 * s for s in seconds[len(seconds) // 3 :]]
        case = f"{args.model}_b{args.batch}_{args.context}"
        rows.append(record.row(case, f"wscope/{name}", samples, "ms", 1e3 * ceiling))
        words = ", ".join(f"{phase} {ms:.2f} ms" for phase, ms in phases(timings).items())
        rate = args.batch / statistics.median(samples) * 1e3
        print(
            f"  {rate:.1f} tokens/s; UNPINNED {host / 1e9:.2f} GB, PINNED {pinned / 1e9:.2f} GB; a step: {words}"
        )
    record.finish(rows, args.json)
    eng.close()


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.85")
    main()
