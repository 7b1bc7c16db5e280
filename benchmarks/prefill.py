"""What does it cost a prefill that its blocks go to their homes while it computes?

A released configuration with random weights reads prompts of random tokens: once with everything kept in the window
(`resident`: nothing is packed or stored), which is the ceiling, and with the blocks routed to host memory by each of
the other policies. Prompts are interleaved; the first of each policy compiles and is not counted. Tokens a second.
"""

import argparse
import contextlib
import statistics
import time
from typing import Any

import jax
import numpy as np
import record
from decode import build

from wscope_jax import Engine, InplaceKVCache, policies


def arguments() -> argparse.Namespace:
    parser = record.parser(__doc__, "a small model, a short prompt")
    parser.add_argument("--model", default="qwen3-30b-a3b", help="name of a configuration")
    parser.add_argument("--layers", type=int, help="fewer layers than the configuration has")
    parser.add_argument("--context", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--policies", default="write_scope,gpu_only,cpu_only")
    args = parser.parse_args()
    if args.quick:
        args.context, args.rounds = 2048, 3
    return args


def prefill_s(eng: Engine, cache: InplaceKVCache, ids: list[int]) -> float:
    """Seconds until the last layer's output is there and all blocks are in their homes."""
    began = time.perf_counter()
    jax.block_until_ready(eng._programs.prefill(cache, 0, ids))
    took = time.perf_counter() - began
    cache.release(0)
    return took


def main() -> None:
    args = arguments()
    eng = Engine(build(args), policy="write_scope", window=256)
    ids = np.random.default_rng(0).integers(0, eng.model.vocab_size, args.context).tolist()
    names = ["resident", *args.policies.split(",")]
    rates: dict[str, list[float]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        caches: dict[str, Any] = {}
        for name in names:
            policy = eng.policy if name == "write_scope" else policies.choose(name)
            caches[name] = stack.enter_context(eng._caches.make(1, args.context + 256, policy))
            prefill_s(eng, caches[name], ids)
        for _ in range(args.rounds):
            for name in names:
                rates[name].append(args.context / prefill_s(eng, caches[name], ids))
    ceiling = statistics.median(rates["resident"])
    case = f"{args.model}_{args.context}"
    rows = [
        record.row(case, f"wscope/{name}", values, "tokens/s", ceiling)
        for name, values in rates.items()
    ]
    record.finish(rows, args.json)
    eng.close()


if __name__ == "__main__":
    main()
