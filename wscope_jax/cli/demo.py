"""`wscope demo`: the bundled model reads a long text, goes on with it and looks things up in it.

Everything runs through the four regions, in float32, and is checked against a dense cache at the end.
"""

import argparse
import contextlib
import importlib.resources
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from wscope_jax import demo_text
from wscope_jax.cli import answer, kept_programs, report, start, streams
from wscope_jax.layout import Region

if TYPE_CHECKING:
    from wscope_jax.engine import Engine
    from wscope_jax.generation import Generation
    from wscope_jax.sampling import Sampling

_SEED: Final = 7  # of the text that is read
_WINDOW: Final = 256
# 32 blocks of 256 and a rest, which holds the last note: it is in the window.
_TEXT_BYTES: Final = 8330
_DEPTHS: Final = (0.05, 0.12, 0.2, 0.29, 0.37, 0.46, 0.55, 0.63, 0.72, 0.81, 0.9, 0.998)
_NEW_BYTES: Final = 512  # evictions at 8,448 and at 8,704 bytes fall into decode
_MAX_LEN: Final = _TEXT_BYTES + _NEW_BYTES + 64
_TOLERANCE: Final = 1e-4  # of logits, float32
_SHARE_EVERY: Final = 64  # steps between two points of the CPU share's path


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns 0 if the four regions give the logits of a dense cache, else 1.

    Raises:
        WscopeError: What was wrong, with its exit code.
    """
    start.prepare()
    start.require_device()
    kept_programs.warn()
    planted = demo_text.plant(_SEED, num_bytes=_TEXT_BYTES, depths=_DEPTHS)
    with _open_engine() as engine:
        values = _continue(engine, planted.text, is_shown=not arguments.json)
        values["look_ups"] = _look_up(engine, planted)
        difference = _difference(engine, planted.text, values["tokens"][0])
    values["matches_dense"] = difference < _TOLERANCE
    if arguments.json:
        answer.print_json(values)
    else:
        with streams.printing():
            _print(values, difference)
    return 0 if values["matches_dense"] else 1


@contextlib.contextmanager
def _open_engine() -> Iterator["Engine"]:
    from wscope_jax.engine import Engine

    model = importlib.resources.files("wscope_jax") / "assets" / "demo_model"
    with importlib.resources.as_file(model) as directory:
        _say(f"loading {directory.name}: 1.8 million parameters, computed in float32")
        engine = Engine.from_pretrained(
            directory, policy="write_scope", window=_WINDOW, dtype="float32"
        )
    with engine:
        yield engine


def _continue(engine: "Engine", text: str, *, is_shown: bool) -> dict[str, Any]:
    """Streams what the model makes of the text; the result, with the path of the CPU share."""
    _say(f"reading {len(text):,} bytes, then writing {_NEW_BYTES}; they end with:")
    _say("..." + " ".join(text[-200:].split()))
    _say("what it writes has the form of sentences and no meaning: it is a very small model")
    path = []
    with engine.stream([text], _writing(), max_model_len=_MAX_LEN) as generation:
        for number, event in enumerate(generation):
            if is_shown:
                with streams.printing():
                    sys.stdout.write(event.text)
            if number % _SHARE_EVERY == 0:
                path.append(round(generation.cpu_share, 3))
        values = generation.result.as_dict()
    if is_shown:
        with streams.printing():
            print()
    values["cpu_share"]["path"] = path
    return values


def _look_up(engine: "Engine", planted: demo_text.PlantedText) -> list[dict[str, Any]]:
    """Asks for one note in each region of a cache whose host regions hold the same number of blocks."""
    from wscope_jax.policies import WriteScope

    policy = WriteScope(share=0.5)
    asked: list[dict[str, Any]] = []
    notes = [planted.notes[-1]]  # the newest one is in the window; the others are found from there
    for wanted in (Region.WINDOW, Region.UNPINNED, Region.PINNED):
        _say(f"asking for a note whose bytes lie in {wanted}")
        note = notes.pop(0)
        prompt = planted.text + demo_text.question(note.key)
        with engine.stream(
            [prompt], _digits(), max_model_len=_MAX_LEN, policy=policy
        ) as generation:
            next(generation)
            region = generation.region_of(0, note.position)
            if not notes:
                notes = _one_in_each_host_region(generation, planted)
            for _ in generation:
                pass
            said = (generation.result.text or [""])[0].rstrip("]")
        asked.append(
            {
                "key": note.key,
                "position": note.position,
                "region": region.value,
                "value": note.value,
                "answer": said,
                "right": said == note.value and region is wanted,
            }
        )
    return asked


def _writing() -> "Sampling":
    """How the text goes on: at lower temperatures it repeats itself, whatever the seed."""
    from wscope_jax.sampling import Sampling

    return Sampling(max_new_tokens=_NEW_BYTES, temperature=0.9, top_p=0.9, seed=6, ignore_eos=True)


def _digits() -> "Sampling":
    from wscope_jax.sampling import Sampling

    return Sampling(max_new_tokens=demo_text.NUM_DIGITS + 1, stop=("]",), ignore_eos=True)


def _one_in_each_host_region(
    generation: "Generation", planted: demo_text.PlantedText
) -> list[demo_text.Note]:
    """The oldest note that lies wholly in UNPINNED, and the oldest in PINNED."""

    def region(note: demo_text.Note) -> Region | None:
        last = note.position + len(demo_text.note_line(note.key, note.value)) - 1
        places = {generation.region_of(0, at) for at in (note.position, last)}
        return places.pop() if len(places) == 1 else None

    return [
        next(note for note in planted.notes if region(note) is wanted)
        for wanted in (Region.UNPINNED, Region.PINNED)
    ]


def _difference(engine: "Engine", text: str, new: list[int]) -> float:
    """Largest difference of a logit between forced steps over the four regions and a dense cache."""
    _say("forcing the same bytes through the four regions, and once through a dense cache")
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    ids = np.concatenate([ids, np.asarray(new, np.int32)])
    forced = engine.score(ids, len(text), max_model_len=_MAX_LEN)
    dense = engine.logits(ids[None])[0, len(text) - 1 :]
    return float(np.abs(forced - dense).max())


def _print(values: dict[str, Any], difference: float) -> None:
    print()
    for asked in values["look_ups"]:
        verdict = "right" if asked["right"] else f"WRONG, it is {asked['value']}"
        print(
            f"the code of {asked['key']}, from byte {asked['position']:,} in {asked['region'].upper()}: "
            f"{asked['answer']} ({verdict})"
        )
    print()
    report.print_regions(values["regions"], sys.stdout)
    print(report.summary(values))
    print("CPU share over time: " + " ".join(f"{r:.2f}" for r in values["cpu_share"]["path"]))
    verdict = "match" if values["matches_dense"] else "DIFFER FROM"
    print(
        f"forced logits of {_NEW_BYTES} decode steps {verdict} those of a dense cache: "
        f"largest difference {difference:.1e}, allowed {_TOLERANCE:.0e}"
    )


def _say(line: str) -> None:
    print(f"wscope: {line}", file=sys.stderr, flush=True)
