"""Trains the bundled model of `wscope demo`: a byte-level MoE in the Qwen3-MoE shape that can look things up.

    python examples/train_demo_model.py --out demo_model --minutes 9                  # on a GPU
    python examples/train_demo_model.py --out demo_model --minutes 55 --lengths 512   # on a CPU
    python examples/train_demo_model.py --tiny                                        # in seconds

Learns English prose that ships with Python, in which notes are planted and asked for; first in short texts, last in
texts of the demo's full length. Prints losses now and then, and on held-out text bits per byte and the share of right
answers. Writes the checkpoint and the held-out prose. Two cores run it too, but far too slowly to learn look-ups.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import jax
from demo_model import corpus, export, network, training
from demo_model.sequences import Sampler

SHARES = {1: (1.0,), 2: (0.4, 0.6), 3: (0.15, 0.35, 0.5)}  # of the time, by the number of lengths
TINY = network.Shape(num_layers=2, width=32, head_dim=16, expert_width=16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo_model"), help="folder to write")
    parser.add_argument("--minutes", type=float, default=9.0, help="when to end, from the start")
    parser.add_argument("--steps", type=int, help="train so many steps, whatever the time")
    parser.add_argument("--lengths", default="512,2048,9216", help="bytes of a text, per phase")
    parser.add_argument("--step-bytes", type=int, help="bytes of a step (65536; on a CPU 4096)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, help="folder that corpus.write wrote, not this Python")
    parser.add_argument("--processes", type=int, default=2, help="that draw batches")
    parser.add_argument("--tiny", action="store_true", help="only try it out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.tiny:
            arguments.out = Path(scratch)
        run(arguments, time.monotonic() + 60 * arguments.minutes)


def run(arguments: argparse.Namespace, deadline: float) -> None:
    on_gpu = jax.default_backend() == "gpu"
    dtype, attention = ("bfloat16", "cudnn") if on_gpu else ("float32", "xla")
    arithmetic = network.Arithmetic(dtype, attention, training.DROPOUT)
    shape = TINY if arguments.tiny else network.Shape()
    step_bytes = arguments.step_bytes or (65536 if on_gpu else 4096)
    lengths = [256] if arguments.tiny else [int(word) for word in arguments.lengths.split(",")]
    phases = [
        training.Phase(length, max(1, step_bytes // length), share)
        for length, share in zip(lengths, SHARES[len(lengths)], strict=True)
    ]
    plan = training.Plan(
        phases=phases,
        deadline=deadline,
        steps=5 if arguments.tiny else arguments.steps,
        seed=arguments.seed,
        num_processes=arguments.processes,
    )
    texts = corpus.bundled() if arguments.tiny else corpus.read(arguments.text)

    def report(params: network.Params, phase: training.Phase, figures: dict[str, float]) -> None:
        seconds = round(time.monotonic() - deadline + 60 * arguments.minutes, 1)
        print(json.dumps({"s": seconds, "length": phase.length, **figures}), flush=True)
        export.write(arguments.out, params, shape, lengths[-1])

    first = network.initial(shape, arguments.seed)
    samplers = Sampler(texts.train, arguments.seed), Sampler(texts.modules, arguments.seed)
    training.train(first, shape, arithmetic, plan, samplers, report)
    (arguments.out / "prose.txt").write_text(texts.prose, "ascii")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
