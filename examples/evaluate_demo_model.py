"""Measures the bundled model of `wscope demo` in float32: look-ups, and bits per byte of held-out prose.

    python examples/evaluate_demo_model.py               # 100 texts of 8 KiB: some 20 minutes on two cores
    python examples/evaluate_demo_model.py --tiny        # one text of 1 KiB, in seconds

Each text hides twelve notes. One of them, at a uniformly random depth, is asked for at the end; the answer is right if
every digit is the likeliest byte. Bits per byte are of the same prose, read with much and with little before it.
"""

import argparse
import math
from pathlib import Path

import numpy as np

import wscope_jax as ws
from wscope_jax import demo_text

MODEL = Path(ws.__file__).parent / "assets" / "demo_model"
NUM_NOTES, BEFORE, MEASURED = 12, 768, 512  # bytes: the little that is read first, what is measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="the checkpoint's directory")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--bytes", type=int, default=8192, help="of a text")
    parser.add_argument("--seed", type=int, default=0, help="of the first text")
    parser.add_argument("--stride", type=int, default=1024, help="between measured parts")
    parser.add_argument("--tiny", action="store_true", help="one short text")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.trials, arguments.bytes, arguments.stride = 1, 1024, 1 << 20
    with ws.Engine.from_pretrained(arguments.model, dtype="float32") as engine:
        look_up(engine, arguments)
        measure_bits(engine, arguments)


def look_up(engine: ws.Engine, arguments: argparse.Namespace) -> None:
    right, asked = np.zeros(3, int), np.zeros(3, int)
    for seed in range(arguments.seed, arguments.seed + arguments.trials):
        planted = demo_text.plant(seed, num_bytes=arguments.bytes - 64, num_notes=NUM_NOTES)
        note = planted.notes[seed % NUM_NOTES]
        text = planted.text.rpartition("\n")[0] + "\n" + demo_text.question(note.key) + note.value
        logits = engine.logits(np.frombuffer(text.encode().rjust(arguments.bytes), np.uint8)[None])
        best = logits[0, -len(note.value) - 1 : -1].argmax(-1)
        third = 3 * note.position // arguments.bytes
        asked[third] += 1
        right[third] += bytes(best.tolist()) == note.value.encode()
    by_third = ", ".join(f"{r} of {a}" for r, a in zip(right, asked, strict=True))
    print(f"look-ups right: {right.sum()} of {asked.sum()}; by thirds of the text: {by_third}")


def measure_bits(engine: ws.Engine, arguments: argparse.Namespace) -> None:
    prose = np.frombuffer(demo_text.prose().encode(), np.uint8)
    much, little = [], []
    for end in range(max(arguments.bytes, BEFORE + MEASURED), prose.size, arguments.stride):
        much.append(bits(engine, prose[end - arguments.bytes : end]))
        little.append(bits(engine, prose[end - BEFORE - MEASURED : end]))
    for name, parts in (("little", little), ("much", much)):
        print(f"bits per byte with {name} before: {np.mean(parts):.3f}")
    gain = np.subtract(little, much)
    error = gain.std() / math.sqrt(gain.size)
    print(f"gain {gain.mean():.3f} +- {error:.3f}, {gain.size} parts of {MEASURED} bytes")


def bits(engine: ws.Engine, ids: np.ndarray) -> float:
    """Mean over the last bytes."""
    logits = engine.logits(ids[None])[0, -MEASURED - 1 : -1].astype(np.float64)
    top = logits.max(-1)
    total = top + np.log(np.exp(logits - top[:, None]).sum(-1))
    taken = logits[np.arange(MEASURED), ids[-MEASURED:]]
    return float((total - taken).mean() / math.log(2))


if __name__ == "__main__":
    main()
