"""One call of `generate`: the loop that feeds tokens, row by row state, and the result."""

import dataclasses
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wscope_jax import forks
from wscope_jax.cache import InplaceKVCache
from wscope_jax.layout import Region
from wscope_jax.programs import NO_TOKEN, ModelPrograms
from wscope_jax.progress import SILENT, Progress
from wscope_jax.sampling import RowSampling, Sampling, row_operands
from wscope_jax.stopping import StopMatcher
from wscope_jax.tokenizer import IncrementalDecoder, Tokenizer


class Event(NamedTuple):
    """One new token of one row.

    Attributes:
        row: number of the prompt in the call.
        token: its id, or None if the row ended without a new token.
        text: text that became certain with it; "" without a tokenizer.
        finish_reason: None while the row goes on; "stop" (an end token or a stop string), "length" (the number of
            new tokens, the model length, or host memory) or "error" (the model's logits are not finite).
    """

    row: int
    token: int | None
    text: str
    finish_reason: str | None


@dataclasses.dataclass
class Row:
    """State of one prompt.

    Attributes:
        prompt: its ids.
        sampling: its settings.
        tokens: new ids.
        text: new text, complete up to what is held back.
        finish_reason: see `Event`.
        tokens_in: tokens by region when it ended.
    """

    prompt: list[int]
    sampling: Sampling
    decoder: IncrementalDecoder | None
    matcher: StopMatcher
    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    tokens_in: dict[Region, int] = dataclasses.field(default_factory=dict)

    def take(self, token: int, eos_ids: frozenset[int]) -> str:
        """Records a new token and returns the text that it made certain; may set `finish_reason`."""
        self.tokens.append(token)
        delta = ""
        if token in eos_ids and not self.sampling.ignore_eos:
            self.finish_reason = "stop"
        elif self.decoder is not None:
            delta, stopped = self.matcher.push(self.decoder.push([token]))
            if stopped:
                self.finish_reason = "stop"
        if self.finish_reason is None and len(self.tokens) >= self.sampling.max_new_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            delta += self.end()
        self.text += delta
        return delta

    def end(self) -> str:
        """The text that was held back, at the end of the row."""
        if self.decoder is None:
            return ""
        pushed = self.matcher.push(self.decoder.flush())
        flushed = self.matcher.flush()
        if pushed.stopped or flushed.stopped:
            self.finish_reason = "stop"
        return pushed.text + flushed.text


@dataclasses.dataclass(frozen=True)
class Result:
    """What a call of `generate` gave.

    Attributes:
        tokens: new ids of each prompt, an end token included.
        text: new text of each prompt, cut before a stop string; None without a tokenizer.
        finish_reason: of each prompt, see `Event`; "interrupted" if the call was ended early.
        regions: by region name {"tokens", "bytes"}: tokens of all rows when they ended (for "ping_pong" what its two
            slots hold), bytes in all layers.
        cpu_share: r when decoding began ("first") and ended ("last").
        compiles: programs compiled: "warmup", "ahead", "stall".
        timing: seconds ("prefill_s", "decode_s", "first_token_s") and rates ("prefill_tokens_per_s",
            "decode_tokens_per_s").
    """

    tokens: list[list[int]]
    text: list[str] | None
    finish_reason: list[str]
    regions: dict[str, dict[str, int]]
    cpu_share: dict[str, float]
    compiles: dict[str, int]
    timing: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and numbers, as `--json` prints them."""
        return dataclasses.asdict(self)


class Generation:
    """Iterates over the events of one call; `result` holds what there is so far, complete after the last event.

    Closing it frees the cache; so does leaving a `for` loop over it, by `break` or by an exception. `next` goes on from
    where the last one was, until it is closed. It may be used from several threads, one at a time; others wait.
    """

    def __init__(
        self,
        programs: ModelPrograms,
        cache: InplaceKVCache,
        prompts: Sequence[list[int]],
        samplings: Sequence[Sampling],
        *,
        max_len: int,
        eos_ids: frozenset[int],
        tokenizer: Tokenizer | None,
        progress: Progress = SILENT,
    ) -> None:
        self._programs = programs
        self._cache = cache
        self._max_len = max_len
        self._eos_ids = eos_ids
        self._has_text = tokenizer is not None
        self._rows = [
            Row(
                prompt,
                sampling,
                IncrementalDecoder(tokenizer) if tokenizer else None,
                StopMatcher(sampling.stop),
            )
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
        self._operands = row_operands(samplings)
        self._next = np.zeros(len(prompts), np.int32)
        self._share = [cache.cpu_share()] * 2
        self._seconds = {"prefill_s": 0.0, "decode_s": 0.0, "first_token_s": 0.0}
        self._ping_pong = 2 * cache.slots_per_chunk * cache.block
        self._compiles_before = dict(programs.programs.compiles)
        self._progress = progress
        self._lock = threading.RLock()
        self._events = self._run()

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
            yield from self._prefill()
            yield from self._decode()
        finally:
            self._close()

    def _close(self) -> None:
        self._programs.programs.is_steady = False
        for number in list(self._cache.active_rows):
            self._rows[number].tokens_in = self._cache.row_tokens(number)
        self._cache.close()

    def _prefill(self) -> Iterator[Event]:
        began = time.perf_counter()
        total = sum(len(row.prompt) for row in self._rows)
        done = 0
        for number, row in enumerate(self._rows):
            size = len(row.prompt)

            def report(layers: int, done: int = done, size: int = size) -> None:
                part = size * layers // self._programs.num_layers
                self._progress.prefilling(done + part, total)

            x = self._programs.prefill(self._cache, number, row.prompt, report)
            done += size
            last = len(row.prompt) - 1
            logits = self._programs.logits(x[last : last + 1])
            operands = RowSampling(*(field[number : number + 1] for field in self._operands))
            token = self._programs.sample(logits, operands, jnp.array([last + 1], jnp.int32))
            event = self._take(number, int(token[0]))
            now = time.perf_counter() - began
            self._seconds["prefill_s"] = now
            if number == 0:
                self._seconds["first_token_s"] = now
            yield event

    def _decode(self) -> Iterator[Event]:
        cache, programs = self._cache, self._programs
        self._share = [cache.cpu_share()] * 2
        if cache.active_rows:
            programs.compile_step(cache, self._operands)
        programs.programs.is_steady = True
        began = time.perf_counter()
        while True:
            yield from self._end_full_rows()
            active = cache.active_rows
            if not active:
                return
            tokens, _ = programs.step(cache, jnp.array(self._next), self._operands)
            values = np.asarray(jax.device_get(tokens))
            self._share[1] = cache.cpu_share()
            self._seconds["decode_s"] = time.perf_counter() - began
            for number in active:
                yield self._take(number, int(values[number]))

    def _take(self, number: int, token: int) -> Event:
        row = self._rows[number]
        if token == NO_TOKEN:
            return self._end(number, "error")
        self._next[number] = token
        text = row.take(token, self._eos_ids)
        if row.finish_reason is not None:
            self._release(number)
        return Event(number, token, text, row.finish_reason)

    def _end_full_rows(self) -> Iterator[Event]:
        for number in self._cache.active_rows:
            if self._cache.length(number) < self._max_len and not self._cache.is_full(number):
                continue
            yield self._end(number, "length")

    def _end(self, number: int, reason: str) -> Event:
        """Ends a row that gets no further token."""
        row = self._rows[number]
        row.finish_reason = reason
        text = row.end()
        row.text += text
        self._release(number)
        return Event(number, None, text, row.finish_reason)

    def _release(self, number: int) -> None:
        self._rows[number].tokens_in = self._cache.row_tokens(number)
        self._cache.release(number)

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
        seconds["prefill_tokens_per_s"] = num_prompt / max(seconds["prefill_s"], 1e-9)
        seconds["decode_tokens_per_s"] = num_decoded / max(seconds["decode_s"], 1e-9)
        compiles = self._programs.programs.compiles
        return Result(
            tokens=[list(row.tokens) for row in self._rows],
            text=[row.text for row in self._rows] if self._has_text else None,
            finish_reason=[row.finish_reason or "interrupted" for row in self._rows],
            regions=regions,
            cpu_share={"first": self._share[0], "last": self._share[1]},
            compiles={phase: compiles[phase] - self._compiles_before[phase] for phase in compiles},
            timing={name: round(value, 6) for name, value in seconds.items()},
        )
