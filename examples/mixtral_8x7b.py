"""Compares the policies on one batch with Mixtral-8x7B: same tokens, different speed.

    python examples/mixtral_8x7b.py --model Mixtral-8x7B-v0.1 --batch 4 --prompt-tokens 8000
    python examples/mixtral_8x7b.py --tiny       # a tiny checkpoint from the tests, in seconds

Prints one line per policy: tokens per second, the CPU's share of the cache, tokens by region. With
float32 all policies give the same tokens; this is checked.
"""

import argparse
from pathlib import Path

import numpy as np

import wscope_jax as ws

TINY = Path(__file__).resolve().parent.parent / "tests" / "golden" / "mixtral"
NEW_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="the checkpoint's directory")
    parser.add_argument("--batch", type=int, default=2, help="rows")
    parser.add_argument("--prompt-tokens", type=int, default=300, help="of each row, random ids")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--tiny", action="store_true", help="run a tiny checkpoint instead")
    arguments = parser.parse_args()
    if not arguments.tiny and arguments.model is None:
        parser.error("give --model, or --tiny")

    directory, window = (TINY, 32) if arguments.tiny else (arguments.model, 256)
    shape = (arguments.batch, arguments.prompt_tokens)
    prompts = np.random.default_rng(0).integers(0, 100, shape).tolist()
    sampling = ws.Sampling(max_new_tokens=NEW_TOKENS, ignore_eos=True)

    expected = None
    for policy in ("write_scope", "gpu_only", "cpu_only", "resident"):
        with ws.Engine.from_pretrained(
            directory, policy=policy, window=window, dtype=arguments.dtype
        ) as engine:
            result = engine.generate(prompts, sampling)
        held = ", ".join(f"{name} {what['tokens']:,}" for name, what in result.regions.items())
        speed, share = result.timing["decode_tokens_per_s"], result.cpu_share["last"]
        print(f"{policy:12} {speed:8.1f} tokens/s   CPU share {share:.2f}   {held}")
        expected = expected or result.tokens
        if arguments.dtype == "float32" and result.tokens != expected:
            raise SystemExit(f"{policy}: other tokens than write_scope")


if __name__ == "__main__":
    main()
