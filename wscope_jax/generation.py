"""One call of `generate`: the loop that feeds tokens."""

import atexit
import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from wscope_jax import forks
from wscope_jax.cache import InplaceKVCache
from wscope_jax.calls import Call
from wscope_jax.errors import CapacityError
from wscope_jax.layout import PING_PONG_SLOTS, Region
from wscope_jax.policies import Policy
from wscope_jax.programs import NO_TOKEN, ModelPrograms
from wscope_jax.progress import SILENT, Progress
from wscope_jax.rows import Event, Result, Row
from wscope_jax.sampling import row_operands
from wscope_jax.steps import Steps
from wscope_jax.stopping import StopMatcher
from wscope_jax.tokenizer import IncrementalDecoder, Tokenizer

SHARE_CHANGE: Final = 0.005  # a smaller change of the share is not noted


class Generation:
    """Iterates over the events of one call; `result` holds what there is so far, complete after the last event.

    Closing it frees the cache; so does leaving a `for` loop over it, by `break` or by an exception. `next` goes on from
    where the last one was, until it is closed; once the engine is closed, it frees the cache and raises UsageError. It
    may be used from several threads, one at a time; others wait.
    """

    def __init__(
        self,
        programs: ModelPrograms,
        cache: InplaceKVCache,
        call: Call,
        *,
        eos_ids: frozenset[int],
        tokenizer: Tokenizer | None,
        progress: Progress = SILENT,
        learned: Callable[[Policy], None] | None = None,
        check_open: Callable[[], None] = lambda: None,
    ) -> None:
        self._learned = learned
        self._programs = programs
        self._cache = cache
        self._eos_ids = eos_ids
        self._has_text = tokenizer is not None
        self._rows = [
            Row(
                prompt,
                sampling,
                min(sampling.max_new_tokens, call.max_len - len(prompt)),
                IncrementalDecoder(tokenizer) if tokenizer else None,
                StopMatcher(sampling.stop),
            )
            for prompt, sampling in zip(call.ids, call.samplings, strict=True)
        ]
        self._operands = row_operands(call.samplings)
        self._next = np.zeros(len(call.ids), np.int32)
        self._steps = Steps(programs, cache, self._operands)
        self._ended: list[int] = []  # rows that the cache still holds
        self._share = [cache.cpu_share()] * 2
        self._shares: list[tuple[int, float]] = []  # steps at which it changed
        self._num_steps = 0
        self._seconds = {"prefill_s": 0.0, "decode_s": 0.0, "first_token_s": 0.0}
        self._ping_pong = PING_PONG_SLOTS * cache.slots_per_chunk * cache.block
        self._progress = progress
        self._check_open = check_open
        self._lock = threading.RLock()
        self._events = self._run()
        self._is_closed = False
        _open.add(self)

    def __iter__(self) -> Iterator[Event]:
        try:
            while (event := next(self, None)) is not None:
                yield event
        finally:
            self.close()

    def __next__(self) -> Event:
        forks.check("stream")
        with self._lock:
            return next(self._events)

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the call and frees the cache; rows that still went on are "interrupted". A second call does nothing."""
        with self._lock:
            self._events.close()
            self._close()

    def _run(self) -> Generator[Event]:
        try:
            self._check_open()
            for event in itertools.chain(self._prefill(), self._decode()):
                yield event
                if any(row.finish_reason is None for row in self._rows):
                    self._check_open()
        finally:
            self._close()

    def _close(self) -> None:
        if self._is_closed:
            return
        for number in list(self._cache.active_rows):
            row = self._rows[number]
            if not row.tokens_in:  # not closed before
                row.tokens_in = self._tokens_in(number)
                row.text += row.end()
        if self._learned is not None:
            self._learned(self._cache.policy)
        self._cache.close()
        self._is_closed = True

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Adds the time of a block, and not what the consumer does between two events."""
        began = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - began

    def _prefill(self) -> Iterator[Event]:
        total = sum(len(row.prompt) for row in self._rows)
        done = 0
        for number, row in enumerate(self._rows):
            size = len(row.prompt)

            def report(layers: int, done: int = done, size: int = size) -> None:
                part = size * layers // self._programs.num_layers
                self._progress.prefilling(done + part, total)

            try:
                with self._timed("prefill_s"):
                    event = self._take(number, self._first_token(number, report))
            except CapacityError:
                if number == 0:
                    raise
                event = self._end(number, "length")  # the rows before it go on
            done += size
            self._release_ended()
            if number == 0:
                self._seconds["first_token_s"] = self._seconds["prefill_s"]
            yield event

    def _first_token(self, number: int, report: Callable[[int], None]) -> int:
        programs, cache, prompt = self._programs, self._cache, self._rows[number].prompt
        x = programs.prefill(cache, number, prompt, report)
        last = len(prompt) - 1
        logits = programs.logits(cache, x[last : last + 1])
        operands = self._operands.only(number)
        token = programs.sample(cache, logits, operands, jnp.array([last + 1], jnp.int32))
        return int(token[0])

    def _decode(self) -> Iterator[Event]:
        cache, programs = self._cache, self._programs
        self._share = [cache.cpu_share()] * 2
        if cache.active_rows:
            programs.compile_step(cache, self._operands)
        cache.compiled.is_steady = True
        began = 0.0
        while True:
            if not self._steps.rows_ahead:
                self._release_ended()
                for number in filter(cache.is_full, cache.active_rows):
                    yield self._end(number, "length")
                self._release_ended()
                began = time.perf_counter()
            if all(row.finish_reason for row in self._rows):
                return
            rows, values = self._steps.take(self._next, self._may_go_on)
            now = time.perf_counter()
            self._seconds["decode_s"] += now - began
            began = now  # with a step under way, what the consumer does between two events counts
            self._note_share(cache.cpu_share())
            for number in rows:
                if self._rows[number].finish_reason is None:
                    yield self._take(number, int(values[number]))

    def _may_go_on(self, rows: tuple[int, ...]) -> bool:
        """Whether all of these take another token after the one that is under way, unless that one ends them.

        Where a row has ended none is dispatched ahead, so that it is released without waiting for a step.
        """
        cache = self._cache
        if self._ended:
            return False
        going = [n for n in rows if self._rows[n].finish_reason is None]
        return bool(going) and not any(
            cache.is_full(n) or len(self._rows[n].tokens) + 1 >= self._rows[n].most_tokens
            for n in going
        )

    def _note_share(self, share: float) -> None:
        self._num_steps += 1
        self._share[1] = share
        if not self._shares or abs(share - self._shares[-1][1]) >= SHARE_CHANGE:
            self._shares.append((self._num_steps, round(share, 4)))

    def _take(self, number: int, token: int) -> Event:
        row = self._rows[number]
        if token == NO_TOKEN:
            return self._end(number, "error")
        self._next[number] = token
        text = row.take(token, self._eos_ids)
        if row.finish_reason is not None:
            self._note_end(number)
        return Event(number, token, text, row.finish_reason)

    def _end(self, number: int, reason: str) -> Event:
        """Ends a row that gets no further token."""
        row = self._rows[number]
        row.finish_reason = reason
        text = row.end()
        row.text += text
        self._note_end(number)
        return Event(number, None, text, row.finish_reason)

    def _note_end(self, number: int) -> None:
        if self._cache.holds(number):
            self._rows[number].tokens_in = self._tokens_in(number)
            self._ended.append(number)

    def _release_ended(self) -> None:
        """Frees the slots of rows that have ended: after their events, which a step that fails must not take along."""
        while self._ended:
            self._cache.release(self._ended.pop())

    def _tokens_in(self, number: int) -> dict[Region, int]:
        tokens = self._cache.row_tokens(number)
        if number in self._steps.rows_ahead:  # the newest one was fed ahead
            tokens[Region.WINDOW] -= 1
        return tokens

    @property
    def cpu_share(self) -> float:
        """The share r that the policy aims at now."""
        return self._share[1]

    def region_of(self, row: int, token: int) -> Region:
        """Where token number `token` of a row that still goes on lives now."""
        return self._cache.placement.region_of(row, token)

    @property
    def result(self) -> Result:
        """What there is so far."""
        tokens_in = {
            region: sum(row.tokens_in.get(region, 0) for row in self._rows)
            for region in (Region.UNPINNED, Region.PINNED, Region.WINDOW)
        }
        token_bytes = self._cache.entry_bytes * self._cache.num_layers
        regions = {
            region.value: {"tokens": count, "bytes": count * token_bytes}
            for region, count in tokens_in.items()
        }
        regions[Region.PING_PONG.value] = {
            "tokens": self._ping_pong,
            "bytes": self._ping_pong * self._cache.entry_bytes,
        }
        seconds = dict(self._seconds)
        num_prompt = sum(len(row.prompt) for row in self._rows)
        num_decoded = sum(max(0, len(row.tokens) - 1) for row in self._rows)
        for phase, count in (("prefill", num_prompt), ("decode", num_decoded)):
            took_s = seconds[f"{phase}_s"]
            seconds[f"{phase}_tokens_per_s"] = count / took_s if took_s > 0 else 0.0
        return Result(
            tokens=[list(row.tokens) for row in self._rows],
            text=[row.text for row in self._rows] if self._has_text else None,
            finish_reason=[row.finish_reason or "interrupted" for row in self._rows],
            regions=regions,
            cpu_share={"first": self._share[0], "last": self._share[1]},
            compiles=dict(self._cache.compiled.compiles),
            work=self._work(),
            timing={name: round(value, 6) for name, value in seconds.items()},
        )

    def _work(self) -> dict[str, Any]:
        work, entry_bytes = self._cache.work, self._cache.entry_bytes
        # Of the time of all steps; the newest are not timed yet.
        took_s = self._seconds["decode_s"] * work.steps / max(1, self._num_steps)
        return {
            "limit": work.limit(took_s) if work.steps else None,
            "steps": work.steps,
            "cpu_s": round(work.cpu_s, 6),
            "link_s": round(work.link_s, 6),
            "wait_cpu_s": round(work.wait_cpu_s, 6),
            "wait_link_s": round(work.wait_link_s, 6),
            "cpu_bytes": work.host_entries * entry_bytes,
            "link_bytes": work.streamed_entries * entry_bytes,
            "shares": [list(pair) for pair in self._shares],
        }


_open: Final[weakref.WeakSet[Generation]] = weakref.WeakSet()


@atexit.register
def _close_open() -> None:
    """Before the modules that closing needs are torn down. One that another thread is in is left to that."""
    for generation in [] if forks.is_child() else list(_open):
        if generation._lock.acquire(blocking=False):
            try:
                generation.close()
            finally:
                generation._lock.release()
