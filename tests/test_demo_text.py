"""Texts with planted notes: the same everywhere, and every note where it is said to be."""

import importlib.resources
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wscope_jax import demo_text
from wscope_jax.cli import demo

# Of plant(seed): equal on every version of Python and on every machine.
CRC32 = {0: 4235189428, 1: 1428676061, 17: 833478855}


@pytest.mark.parametrize("seed", CRC32)
def test_a_seed_gives_one_text(seed: int) -> None:
    planted = demo_text.plant(seed)
    assert zlib.crc32(planted.text.encode("ascii")) == CRC32[seed]
    assert demo_text.plant(seed) == planted


def test_seeds_give_different_texts() -> None:
    texts = [demo_text.plant(seed) for seed in range(20)]
    assert len({text for text, _ in texts}) == 20
    assert len({notes for _, notes in texts}) == 20


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**64),
    num_bytes=st.integers(4096, 100_000),
    num_notes=st.integers(0, len(demo_text.KEYS)),
)
def test_every_note_is_a_line_at_its_position(seed: int, num_bytes: int, num_notes: int) -> None:
    text, notes = demo_text.plant(seed, num_bytes=num_bytes, num_notes=num_notes)
    assert len(text.encode("ascii")) == num_bytes
    assert len({note.key for note in notes}) == len(notes) == num_notes
    assert [note.position for note in notes] == sorted(note.position for note in notes)
    rest, done = [], 0
    for key, value, position in notes:
        line = demo_text.note_line(key, value)
        assert text.startswith(line, position)
        assert position == 0 or text[position - 1] == "\n"
        assert text.count(line) == 1
        assert key in demo_text.KEYS
        assert len(value) == demo_text.NUM_DIGITS
        assert value.isdecimal()
        rest.append(text[done:position])
        done = position + len(line)
    prose = demo_text.prose()
    around = prose * (num_bytes // len(prose) + 2)
    assert "".join([*rest, text[done:]]) in around  # nothing of the prose is lost or moved


def test_the_notes_are_in_no_prose() -> None:
    assert "[note:" not in demo_text.prose()
    assert "[recall:" not in demo_text.prose()
    assert len(set(demo_text.KEYS)) == len(demo_text.KEYS)


def test_a_question_begins_what_the_value_ends() -> None:
    assert demo_text.note_line("maple", "4821") == "[note: the code of maple is 4821]\n"
    assert demo_text.question("maple") == "[recall: the code of maple is "


@pytest.mark.parametrize("depths", [(0.0,), (0.9, 0.1, 0.5), (0.05, 0.3, 0.31, 0.95, 0.999)])
@pytest.mark.parametrize("num_bytes", [4096, 32768])
def test_depths_are_kept(depths: tuple[float, ...], num_bytes: int) -> None:
    longest = max(map(len, demo_text.prose().splitlines())) + 1
    for seed in range(20):
        text, notes = demo_text.plant(seed, num_bytes=num_bytes, depths=depths)
        assert len(notes) == len(depths)
        lines = sum(len(demo_text.note_line(key, value)) for key, value, _ in notes)
        for note, depth in zip(notes, sorted(depths), strict=True):
            target = int(depth * num_bytes)
            assert target - longest - lines <= note.position <= target
        assert len(text) == num_bytes


def test_notes_at_one_depth_follow_each_other() -> None:
    _, notes = demo_text.plant(3, num_bytes=4096, depths=(0.5, 0.5, 0.5))
    ends = [note.position + len(demo_text.note_line(note.key, note.value)) for note in notes]
    assert [note.position for note in notes[1:]] == ends[:-1]


def test_prose_of_the_caller_is_taken_around_its_end() -> None:
    source = "One line.\nAnother.\n\nA paragraph.\n\n"
    text, (note,) = demo_text.plant(0, num_bytes=300, num_notes=1, source=source)
    without = text.replace(demo_text.note_line(note.key, note.value), "")
    assert without in source * 12
    assert len(text) == 300


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"depths": (0.5, 1.0)}, "depths: .* from 0 to below 1"),
        ({"depths": (-0.1,)}, "depths: .* from 0 to below 1"),
        ({"depths": (float("nan"),)}, "depths: .* from 0 to below 1"),
        ({"num_notes": len(demo_text.KEYS) + 1}, f"at most {len(demo_text.KEYS)}"),
        ({"num_bytes": 100, "num_notes": 3}, "num_bytes: 100 is too short for 3 notes"),
    ],
)
def test_what_is_refused(asked: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        demo_text.plant(0, **asked)


def test_a_source_of_one_paragraph_begins_at_its_beginning() -> None:
    text, _ = demo_text.plant(0, num_bytes=40, num_notes=0, source="Words of one line.\n")
    assert text.startswith("Words of one line.\n")


def test_the_demo_writes_as_its_model_reads_best() -> None:
    folder = importlib.resources.files("wscope_jax") / "assets" / "demo_model"
    how = demo._writing()
    best = f"Temperature {how.temperature:g} with top_p {how.top_p:g} reads best"
    assert best in (folder / "README.md").read_text()
