"""Many prompts in one file: a JSON object a line, all of them checked before anything runs."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from wscope_jax.cli import groups, prompts
from wscope_jax.errors import UsageError
from wscope_jax.sizes import amount
from wscope_jax.strict_json import parse_object

SOURCES: Final = ("prompt", "tokens", "messages")
MOST_MESSAGES: Final = 10_000
MOST_BYTES: Final = 256 * 10**6  # of all lines


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    """One line, or a prompt from elsewhere in the same form; it has one of prompt, tokens and messages.

    Attributes:
        where: what messages call it.
        number: of the line, from 1.
        prompt: a text.
        tokens: token ids.
        messages: of a conversation, with role and content.
        key: its id, or None.
        settings: sampling options by name.
    """

    where: str
    number: int
    prompt: str | None = None
    tokens: list[int] | None = None
    messages: list[dict[str, str]] | None = None
    key: str | int | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read(file: Path) -> list[Line]:
    """The lines of a file, or of stdin if it is called `-`; empty lines are left out.

    Raises:
        UsageError: If the file cannot be read, is empty, or a line is wrong; it names the line.
    """
    where = f"--jsonl-in {file}"
    is_stdin = str(file) == "-"
    with prompts.opened_stdin() if is_stdin else prompts.opened(file, where) as stream:
        lines = [
            _parse(f"{where} line {number}", number, raw)
            for number, raw in _split(stream, where)
            if raw.strip()
        ]
    if not lines:
        raise UsageError(f"{where}: has no lines; give each prompt one")
    return lines


def _split(stream: BinaryIO, where: str) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers, read one by one so that an endless source is found out."""
    num_bytes = 0
    for number in itertools.count(1):
        raw = stream.readline(prompts.MOST_BYTES + 1)
        num_bytes += len(raw)
        if len(raw) > prompts.MOST_BYTES:
            raise UsageError(
                f"{where} line {number}: more than {amount(prompts.MOST_BYTES)}, which no model could read as a "
                "prompt; shorten it"
            )
        if num_bytes > MOST_BYTES:
            raise UsageError(
                f"{where} line {number}: more than {amount(MOST_BYTES)} up to here, which no machine could run "
                "as one batch; split the file"
            )
        if not raw:
            return
        yield number, raw.removesuffix(b"\n")


def _parse(where: str, number: int, raw: bytes) -> Line:
    found = _object(where, prompts.decode(raw, where))
    unknown = [key for key in found if key not in (*SOURCES, *groups.SAMPLING, "id")]
    if unknown:
        allowed = ", ".join((*SOURCES, "id", *groups.SAMPLING))
        raise UsageError(f"{where}: the key {unknown[0]!r:.60} is not known; allowed are {allowed}")
    given = [key for key in SOURCES if key in found]
    if len(given) != 1:
        raise UsageError(
            f"{where}: has {' and '.join(given) or 'none'} of prompt, tokens and messages; give one"
        )
    key = found.get("id")
    if key is not None and (isinstance(key, bool) or not isinstance(key, str | int)):
        raise UsageError(f"{where}: id is {key!r:.60}; give a string or an integer")
    settings: dict[str, Any] = {name: found[name] for name in groups.SAMPLING if name in found}
    if "stop" in settings:
        settings["stop"] = _stops(where, settings["stop"])
    return Line(
        where=where,
        number=number,
        prompt=_prompt(where, found["prompt"]) if "prompt" in found else None,
        tokens=_tokens(where, found["tokens"]) if "tokens" in found else None,
        messages=_messages(where, found["messages"]) if "messages" in found else None,
        key=key,
        settings=settings,
    )


def _object(where: str, text: str) -> dict[str, Any]:
    try:
        return parse_object(text)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


def _prompt(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{where}: prompt is {value!r:.60}; give a text that is not empty")
    return value


def _tokens(where: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"{where}: tokens is {value!r:.60}; give a list of at least one token id")
    for index, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int):
            raise UsageError(f"{where}: tokens[{index}] is {token!r:.60}; token ids are integers")
    return value


def _messages(where: str, value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_MESSAGES:
        raise UsageError(f"{where}: messages: expected a list of 1 to {MOST_MESSAGES} objects")
    for index, message in enumerate(value):
        fields = message if isinstance(message, dict) else {}
        texts = all(isinstance(fields.get(key), str) for key in ("role", "content"))
        if not texts or len(fields) != 2:
            raise UsageError(
                f"{where}: messages[{index}] is {message!r:.60}; "
                "expected an object with the texts role and content"
            )
    return value


def _stops(where: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise UsageError(f"{where}: stop is {value!r:.60}; give a text or a list of texts")
    return tuple(stops)
