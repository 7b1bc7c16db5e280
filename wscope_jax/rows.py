"""Rows of one call of `generate`: the events that they give, their state, and the result."""

import dataclasses
from typing import Any, NamedTuple

from wscope_jax.layout import Region
from wscope_jax.sampling import Sampling
from wscope_jax.stopping import StopMatcher
from wscope_jax.tokenizer import IncrementalDecoder


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
        most_tokens: new ids that it may get.
        tokens: new ids.
        text: new text, complete up to what is held back.
        finish_reason: see `Event`.
        tokens_in: tokens by region when it ended.
    """

    prompt: list[int]
    sampling: Sampling
    most_tokens: int
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
        if self.finish_reason is None and len(self.tokens) >= self.most_tokens:
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
        regions: by region name {"tokens", "bytes"}: tokens of all rows when they ended (for "ping_pong" what its
            slots hold), bytes in all layers.
        cpu_share: r when decoding began ("first") and ended ("last").
        compiles: programs compiled: "warmup", "ahead", "stall".
        work: what set the pace of decoding: "limit" ("cpu", "link" or "device"; None without steps); over the "steps"
            that were timed "cpu_s" and "link_s" (busy), "wait_cpu_s" and "wait_link_s" (waited for), "cpu_bytes" and
            "link_bytes" (of the cache, read there); "shares" (the share r over time: [step, r] where it changed).
        timing: seconds ("prefill_s", "decode_s", "first_token_s"; without what the consumer did between two events,
            unless a step was under way meanwhile) and rates ("prefill_tokens_per_s",
            "decode_tokens_per_s").
    """

    tokens: list[list[int]]
    text: list[str] | None
    finish_reason: list[str]
    regions: dict[str, dict[str, int]]
    cpu_share: dict[str, float]
    compiles: dict[str, int]
    work: dict[str, Any]
    timing: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and numbers, as `--json` prints them."""
        return dataclasses.asdict(self)
