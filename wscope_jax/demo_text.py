"""Texts for the demonstration: prose in which notes are planted, and the questions that ask for them.

A note is a line of its own, `[note: the code of maple is 4821]`. Its question is what stands before the value in
`[recall: the code of maple is 4821]`: the bundled model was trained to go on with the value. All texts are ASCII, so
that bytes, characters and tokens are the same. Equal seeds give equal texts on every version of Python.
"""

import functools
import importlib.resources
import random
from collections.abc import Sequence
from typing import Final, NamedTuple

NUM_DIGITS: Final = 4  # of a value
KEYS: Final = (  # left out of the words that are keys in training
    *("acorn", "amber", "anchor", "anvil", "apple", "apron", "arrow", "badger", "bamboo", "banjo"),
    *("barley", "basil", "beacon", "beaver", "birch", "bonnet", "bramble", "breeze", "candle"),
    *("canyon", "carrot", "cedar", "cello", "cherry", "clover", "cobalt", "comet", "copper"),
    *("coral", "cotton", "crystal", "daisy", "dolphin", "ember", "falcon", "feather", "fennel"),
    *("garnet", "ginger", "glacier", "hammer", "harbor", "hazel", "heron", "indigo", "island"),
    *("ivory", "jasmine", "juniper", "kettle", "lagoon", "lantern", "lemon", "lilac", "magnet"),
    *("maple", "marble", "meadow", "nutmeg", "olive", "orchid", "otter", "pebble", "pepper"),
    *("pigeon", "plum", "quartz", "rabbit", "raven", "saffron", "salmon", "sparrow", "thistle"),
    *("tulip", "turtle", "velvet", "violet", "walnut", "willow", "winter", "zebra"),
)


class Note(NamedTuple):
    """A planted note.

    Attributes:
        key: the word that the question names.
        value: the digits that answer it.
        position: byte of the text where the note's line begins.
    """

    key: str
    value: str
    position: int


class PlantedText(NamedTuple):
    """A text and what is planted in it.

    Attributes:
        text: ASCII.
        notes: by position; no two keys are equal.
    """

    text: str
    notes: tuple[Note, ...]


def note_line(key: str, value: str) -> str:
    """The line that plants a value."""
    return f"[note: the code of {key} is {value}]\n"


def question(key: str) -> str:
    """The beginning of a line that the value, and then a closing bracket, completes."""
    return f"[recall: the code of {key} is "


@functools.cache
def prose() -> str:
    """The bundled prose: topics of the Python documentation that the bundled model was not trained on."""
    file = importlib.resources.files("wscope_jax") / "assets" / "demo_model" / "prose.txt"
    return file.read_text(encoding="ascii")


def plant(
    seed: int,
    *,
    num_bytes: int = 8192,
    num_notes: int = 12,
    depths: Sequence[float] | None = None,
    source: str | None = None,
) -> PlantedText:
    """A text with notes planted at line ends.

    Args:
        seed: chooses the part of the prose, the keys, the values, and the depths unless they are given.
        num_bytes: length of the text; it ends wherever it does.
        num_notes: notes at random depths.
        depths: instead of random ones: for each note the part of the text that is before it, from 0 to below 1. A
            note stands up to one line before that, or behind the notes that stand there already.
        source: prose to take instead of the bundled one.

    Raises:
        ValueError: There are more notes than keys or than the text can hold, or a depth is out of its range.
    """
    rng = random.Random(seed)
    if depths is None:
        depths = [rng.random() for _ in range(num_notes)]
    if len(depths) > len(KEYS) or not all(0 <= depth < 1 for depth in depths):
        raise ValueError(f"depths: give at most {len(KEYS)} numbers from 0 to below 1")
    keys = list(KEYS)
    facts = [(keys.pop(_below(rng, len(keys))), _value(rng)) for _ in depths]
    lines = [note_line(key, value) for key, value in facts]
    size = num_bytes - sum(map(len, lines))
    if size < 0:
        raise ValueError(f"num_bytes: {num_bytes} is too short for {len(lines)} notes")
    part = _part(prose() if source is None else source, size, rng)
    return _assemble(part, facts, lines, [int(depth * num_bytes) for depth in sorted(depths)])


def _assemble(
    part: str, facts: Sequence[tuple[str, str]], lines: Sequence[str], targets: Sequence[int]
) -> PlantedText:
    """Puts each line at the last line end of `part` that keeps it at or before its target byte."""
    pieces: list[str] = []
    notes: list[Note] = []
    done = position = 0  # of the prose, of the text
    for (key, value), line, target in zip(facts, lines, targets, strict=True):
        end = part.rfind("\n", done, max(done, done + target - position)) + 1
        if end > done:
            pieces.append(part[done:end])
            position += end - done
            done = end
        notes.append(Note(key, value, position))
        pieces.append(line)
        position += len(line)
    return PlantedText("".join([*pieces, part[done:]]), tuple(notes))


def _part(source: str, size: int, rng: random.Random) -> str:
    """`size` characters of the source from the beginning of some paragraph on, around its end if need be."""
    found = source.find("\n\n", _below(rng, max(1, len(source) - size)))
    start = 0 if found < 0 else found + 2
    rotated = source[start:] + source[:start]
    return (rotated * (size // len(source) + 1))[:size]


def _value(rng: random.Random) -> str:
    return "".join(str(_below(rng, 10)) for _ in range(NUM_DIGITS))


def _below(rng: random.Random, limit: int) -> int:
    """An integer from 0 to below the limit; of `random.Random`, only `random` is the same in every Python."""
    return int(rng.random() * limit)
