"""Does it matter where the looked-up bytes lie? Asks for notes in UNPINNED, PINNED and WINDOW, at three CPU shares.

    python examples/look_up_in_regions.py                # 100 texts of 8 KiB: some 15 minutes on two cores
    python examples/look_up_in_regions.py --tiny         # three texts of 1 KiB

At share 0.5 the blocks of a text alternate between the two host regions. Each text is asked for one note, whose region
there goes round; the same question is asked again with all blocks in PINNED (share 0) and in UNPINNED (share 1).
"""

import argparse
import collections
from pathlib import Path

import wscope_jax as ws
from wscope_jax import demo_text
from wscope_jax.layout import Region

MODEL = Path(ws.__file__).parent / "assets" / "demo_model"
WINDOW, REST = 256, 140  # bytes: a block, and what stays in the window behind the last whole one
ASKED = (Region.UNPINNED, Region.PINNED, Region.WINDOW)
ANSWER = ws.Sampling(max_new_tokens=demo_text.NUM_DIGITS + 1, stop=("]",), ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--bytes", type=int, default=8192, help="in whole blocks")
    parser.add_argument("--tiny", action="store_true", help="three short texts")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.trials, arguments.bytes = 3, 1024
    right, asked, same = collections.Counter[Region](), collections.Counter[Region](), 0
    with ws.Engine.from_pretrained(MODEL, dtype="float32", window=WINDOW) as engine:
        for seed in range(arguments.trials):
            size = arguments.bytes + REST
            depths = [(n + 0.5) / 12 * arguments.bytes / size for n in range(11)] + [0.995]
            planted = demo_text.plant(seed, num_bytes=size, depths=depths)
            wanted = ASKED[seed % 3]
            notes = planted.notes[-1:] if wanted is Region.WINDOW else planted.notes[seed % 9 :]
            for note in notes:  # the first that is really there
                region, said = ask(engine, planted.text, note, 0.5, wanted)
                if region is wanted:
                    break
            others = [ask(engine, planted.text, note, share, None)[1] for share in (0.0, 1.0)]
            asked[region] += 1
            right[region] += said == note.value
            same += others == [said, said]
    for region in ASKED:
        print(f"{region}: {right[region]} of {asked[region]} right")
    print(f"same answer at shares 0, 0.5 and 1: {same} of {arguments.trials}")


def ask(
    engine: ws.Engine, text: str, note: demo_text.Note, share: float, wanted: Region | None
) -> tuple[Region, str]:
    """Where a note lies, and what the model says; nothing unless it lies in `wanted` (None = anywhere)."""
    policy = ws.policies.WriteScope(share=share)
    prompt = text + demo_text.question(note.key)
    with engine.stream([prompt], ANSWER, policy=policy) as generation:
        next(generation)
        region = generation.region_of(0, note.position)
        if wanted in (None, region):
            for _ in generation:
                pass
        return region, (generation.result.text or [""])[0]


if __name__ == "__main__":
    main()
