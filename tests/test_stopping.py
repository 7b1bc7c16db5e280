import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from wscope_jax.errors import UsageError
from wscope_jax.stopping import StopMatcher

# A small alphabet makes overlaps and false beginnings likely.
texts = st.text("abc", max_size=40)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)
cuts = st.lists(st.integers(0, 40), max_size=12)


def cut(text, stops):
    """The text up to the first occurrence of any stop string, and whether there is one."""
    found = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(found)], True) if found else (text, False)


def split(text, at):
    borders = sorted({0, *(min(border, len(text)) for border in at), len(text)})
    return [text[a:b] for a, b in itertools.pairwise(borders)] or [""]


def run(pieces, stops):
    matcher = StopMatcher(stops)
    emissions = [matcher.push(piece) for piece in pieces]
    return [*emissions, matcher.flush()]


@given(texts, stop_lists, cuts)
@example("abc", ["abc", "b"], [1, 2])
@example("abd", ["abc", "b"], [1, 2])
@example("ab", ["abc", "b"], [1])
@example("aab", ["ab"], [1, 2])
@example("ababac", ["abac"], [1, 2, 3, 4, 5])
def test_any_split_gives_the_text_before_the_first_stop(text, stops, at):
    emissions = run(split(text, at), stops)
    expected, is_stopped = cut(text, stops)
    assert "".join(emission.text for emission in emissions) == expected
    assert emissions[-1].stopped == is_stopped


@given(texts, stop_lists)
def test_a_stop_is_told_as_soon_as_it_is_certain(text, stops):
    """No longer than the longest stop string after it, and at once if it is the only one."""
    emissions = run(list(text), stops)
    told = next((at for at, emission in enumerate(emissions) if emission.stopped), None)
    expected, is_stopped = cut(text, stops)
    if is_stopped:
        longest = max(map(len, stops))
        assert told < len(expected) + longest or told == len(text)
        if len(set(stops)) == 1:
            assert told == len(expected) + len(stops[0]) - 1


@given(texts, stop_lists, cuts)
def test_no_more_is_held_back_than_needed(text, stops, at):
    matcher = StopMatcher(stops)
    pushed, emitted = "", ""
    for piece in split(text, at):
        pushed += piece
        emission = matcher.push(piece)
        emitted += emission.text
        if emission.stopped:
            break
        held = pushed[len(emitted) :]
        assert not held or any(stop.startswith(held[: len(stop)]) for stop in stops)


def test_text_flows_through_without_stops():
    matcher = StopMatcher([])
    assert matcher.push("hello") == ("hello", False)
    assert matcher.flush() == ("", False)


def test_nothing_comes_after_a_stop():
    matcher = StopMatcher(["END"])
    assert matcher.push("a EN") == ("a ", False)
    assert matcher.push("D b") == ("", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ("", True)


def test_a_false_beginning_is_given_back():
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("one\n") == ("one", False)
    assert matcher.push("\nUs") == ("", False)
    assert matcher.push("ed") == ("\n\nUsed", False)
    assert matcher.push("\n") == ("", False)
    assert matcher.flush() == ("\n", False)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UsageError, match="stop"):
        StopMatcher(["a", ""])
