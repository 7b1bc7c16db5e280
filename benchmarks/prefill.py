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
import options
import record
from decode import build

from wscope_jax import Engine, InplaceKVCache
from wscope_jax.policies import Policy, Resident


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__, "a small model, a short prompt")
    parser.add_argument("--model", default="qwen3-30b-a3b", help="name of a configuration")
    parser.add_argument(
        "--layers", type=options.count, help="fewer layers than the configuration has"
    )
    parser.add_argument("--context", type=options.count, default=8192, help="tokens of a prompt")
    parser.add_argument("--rounds", type=options.count, default=5)
    options.add_policies(parser)
    return options.parse(parser, layers=2, context=2048, rounds=3)


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
    chosen: dict[str, Policy] = {"resident": Resident(), **args.policies}
    chosen |= {f"share_{share}": policy for share, policy in args.shares.items()}
    rates: dict[str, list[float]] = {name: [] for name in chosen}
    with contextlib.ExitStack() as stack:
        caches: dict[str, Any] = {}
        for name, policy in chosen.items():
            policy = eng.policy if name == "write_scope" else policy
            caches[name] = stack.enter_context(eng._caches.make(1, args.context + 256, policy))
            prefill_s(eng, caches[name], ids)
        for _ in range(args.rounds):
            for name in chosen:
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
    options.end_in_one_line(main)
