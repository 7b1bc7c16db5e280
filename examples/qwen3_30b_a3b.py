"""Continues one long text with Qwen3-30B-A3B, its KV cache in host memory.

    python examples/qwen3_30b_a3b.py --model Qwen3-30B-A3B --prompt-file book.txt
    python examples/qwen3_30b_a3b.py --tiny      # the bundled tiny model, in seconds

Prints the text as it comes (the tiny model has no tokenizer: token ids), then, on stderr, where the
cache lies and which share of it the CPU attends to.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

import wscope_jax as ws

TINY = Path(ws.__file__).parent / "assets" / "tiny_qwen3_moe"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="the checkpoint's directory")
    parser.add_argument("--prompt-file", type=Path, help="a UTF-8 text")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--tiny", action="store_true", help="run the bundled tiny model instead")
    arguments = parser.parse_args()

    if arguments.tiny:
        # Blocks of 32 tokens instead of 256, so that a short prompt already fills every region.
        directory, window = TINY, 32
        prompt = np.random.default_rng(0).integers(0, 128, 300).tolist()
    elif arguments.model and arguments.prompt_file:
        directory, window = arguments.model, 256
        prompt = arguments.prompt_file.read_text(encoding="utf-8")
    else:
        parser.error("give --model and --prompt-file, or --tiny")

    sampling = ws.Sampling(max_new_tokens=arguments.max_new_tokens)
    with ws.Engine.from_pretrained(directory, policy="write_scope", window=window) as engine:
        generation = engine.stream([prompt], sampling)
        for event in generation:
            print(
                event.text if engine.tokenizer else event.token, end=" " if arguments.tiny else ""
            )
            sys.stdout.flush()
        print()

    result = generation.result
    for region, held in result.regions.items():
        print(f"{region:10} {held['tokens']:8,} tokens {held['bytes']:14,} bytes", file=sys.stderr)
    share, speed = result.cpu_share, result.timing["decode_tokens_per_s"]
    print(f"CPU share {share['first']:.2f} -> {share['last']:.2f}", file=sys.stderr)
    print(f"{speed:.1f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    main()
