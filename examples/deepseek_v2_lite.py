"""Continues several texts of different lengths at once with DeepSeek-V2-Lite, one latent vector a token in the cache.

    python examples/deepseek_v2_lite.py --model DeepSeek-V2-Lite --prompt-file a.txt b.txt c.txt
    python examples/deepseek_v2_lite.py --tiny     # a tiny checkpoint from the tests, in seconds

Prints what a token takes in the cache, as a latent and with the keys and values of every head, the new text of each row
(token ids where there is no tokenizer), then where the cache lies.
"""

import argparse
from pathlib import Path

import numpy as np

import wscope_jax as ws

TINY = Path(__file__).resolve().parent.parent / "tests" / "golden" / "deepseek_v2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="the checkpoint's directory")
    parser.add_argument("--prompt-file", type=Path, nargs="+", help="a UTF-8 text for each row")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of each row")
    parser.add_argument("--tiny", action="store_true", help="run a tiny checkpoint instead")
    arguments = parser.parse_args()

    if arguments.tiny:
        # Blocks of 32 tokens instead of 256, so that short prompts already fill every region.
        directory, window = TINY, 32
        draw = np.random.default_rng(0)
        prompts = [draw.integers(0, 128, length).tolist() for length in (40, 300, 150)]
    elif arguments.model and arguments.prompt_file:
        directory, window = arguments.model, 256
        prompts = [file.read_text(encoding="utf-8") for file in arguments.prompt_file]
    else:
        parser.error("give --model and --prompt-file, or --tiny")

    sampling = ws.Sampling(max_new_tokens=arguments.max_new_tokens)
    with ws.Engine.from_pretrained(directory, policy="write_scope", window=window) as engine:
        config, itemsize = engine.model.config, 4 if engine.dtype == "float32" else 2
        stored = sum(stream.layout.entry_bytes(itemsize) for (stream,) in engine.model.streams)
        head = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        expanded = config.num_layers * config.num_q_heads * head * itemsize
        print(f"a token takes {stored:,} bytes; keys and values of every head: {expanded:,}")
        result = engine.generate(prompts, sampling)

    for row, tokens in enumerate(result.tokens):
        shown = result.text[row] if result.text else " ".join(map(str, tokens))
        print(f"row {row} ({result.finish_reason[row]}): {shown}")
    for region, held in result.regions.items():
        print(f"{region:10} {held['tokens']:8,} tokens {held['bytes']:14,} bytes")
    share, speed = result.cpu_share, result.timing["decode_tokens_per_s"]
    print(f"CPU share {share['first']:.2f} -> {share['last']:.2f}, {speed:.1f} tokens/s")


if __name__ == "__main__":
    main()
