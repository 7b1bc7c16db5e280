"""Steps that are dispatched ahead: what is dropped, what is not lost, and what is counted."""

import dataclasses
from typing import Any

import jax
import pytest

from wscope_jax import Engine, Sampling
from wscope_jax.errors import WscopeError
from wscope_jax.programs import ModelPrograms
from wscope_jax.regions import Regions

PROMPT = list(range(1, 70))
FREE = Sampling(max_new_tokens=30, ignore_eos=True)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done in which order: "step" where one is dispatched, "read" where tokens are."""
    done: list[str] = []
    step, device_get = ModelPrograms.step, jax.device_get

    def dispatch(*args: Any) -> Any:
        done.append("step")
        return step(*args)

    def read(x: Any) -> Any:
        done.append("read")
        return device_get(x)

    monkeypatch.setattr(ModelPrograms, "step", dispatch)
    monkeypatch.setattr(jax, "device_get", read)
    return done


def held(result: Any) -> int:
    return sum(result.regions[region]["tokens"] for region in ("unpinned", "pinned", "window"))


def test_the_next_step_is_dispatched_before_tokens_are_read(eng: Engine, log: list[str]) -> None:
    eng.generate([PROMPT], dataclasses.replace(FREE, max_new_tokens=5))
    assert log == ["step", "step", "read", "step", "read", "step", "read", "read"]


def test_no_step_is_dispatched_beyond_the_last_token_of_a_row(eng: Engine, log: list[str]) -> None:
    how = [dataclasses.replace(FREE, max_new_tokens=n) for n in (3, 6)]
    result = eng.generate([PROMPT, PROMPT[:40]], how)
    assert [len(tokens) for tokens in result.tokens] == [3, 6]
    assert log.count("step") == 5
    assert held(result) == len(PROMPT) + 2 + 40 + 5


def test_what_comes_after_the_end_of_a_row_is_dropped(eng: Engine, log: list[str]) -> None:
    one, other = eng.generate([PROMPT, PROMPT[:40]], FREE).tokens
    last = next(i for i in range(2, 20) if one[i] not in [*one[:i], *other])
    made = eng.eos_ids
    log.clear()
    try:
        eng.eos_ids = frozenset({one[last]})
        result = eng.generate([PROMPT, PROMPT[:40]], dataclasses.replace(FREE, ignore_eos=False))
    finally:
        eng.eos_ids = made
    assert result.tokens == [one[: last + 1], other]
    assert result.finish_reason == ["stop", "length"]
    assert held(result) == len(PROMPT) + last + 40 + 29
    assert log.count("step") == 29


def test_the_tokens_before_a_step_that_cannot_be_dispatched_are_given(
    eng: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = eng.generate([PROMPT], FREE).tokens[0]
    whole, count = ModelPrograms.step, [0]

    def step(*args: Any) -> Any:
        count[0] += 1
        if count[0] == 4:
            raise WscopeError("it cannot be dispatched")
        return whole(*args)

    monkeypatch.setattr(ModelPrograms, "step", step)
    tokens: list[int | None] = []
    with eng.stream([PROMPT], FREE) as stream, pytest.raises(WscopeError, match="cannot be"):
        tokens.extend(event.token for event in stream)
    assert tokens == free[:4]
    assert stream.result.tokens == [free[:4]]


def test_events_do_not_wait_for_the_step_ahead(
    eng: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that ends is released after the events of its step: a step that fails takes none of them along."""
    one, other = eng.generate([PROMPT, PROMPT[:40]], FREE).tokens
    last = next(i for i in range(2, 20) if one[i] not in [*one[:i], *other])
    made = eng.eos_ids

    def fail(*_: Any) -> None:
        raise WscopeError("the step ahead has failed")

    events = []

    def read() -> None:
        for event in stream:
            events.append(event)
            if event.finish_reason == "stop":
                monkeypatch.setattr(Regions, "wait", fail)

    try:
        eng.eos_ids = frozenset({one[last]})
        stream = eng.stream([PROMPT, PROMPT[:40]], dataclasses.replace(FREE, ignore_eos=False))
        with stream, pytest.raises(WscopeError, match="has failed"):
            read()
    finally:
        eng.eos_ids = made
    ends = [(event.row, event.token, event.finish_reason) for event in events[2 * last :]]
    assert ends[:2] == [(0, one[last], "stop"), (1, other[last], None)]
    assert ends[2:] == [(1, other[last + 1], None)]  # of the step that was under way
