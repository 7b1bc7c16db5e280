"""What is asked of `generate`: prompts from any source, each with its name for messages and its own settings."""

import argparse
import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wscope_jax.cli import jsonl, start, weights
from wscope_jax.cli.prompts import Prompt, list_sources, read_named, require_tokenizer
from wscope_jax.errors import UsageError
from wscope_jax.sizes import counted

if TYPE_CHECKING:
    from wscope_jax.chat import Message
    from wscope_jax.sampling import Sampling

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt.

    Attributes:
        where: what messages call it.
        number: its line in the JSONL file, or its number among the prompts, from 1.
        prompt: text or token ids.
        key: the id that the JSONL line gives it, or None.
        is_whole: the text has its special tokens already.
        settings: sampling options of its own.
    """

    where: str
    number: int
    prompt: Prompt
    key: str | int | None = None
    is_whole: bool = False
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read_requests(arguments: argparse.Namespace) -> list[Request]:
    """All prompts of a `generate` call; chat templates are rendered.

    Raises:
        UsageError: If there is not exactly one source, or something in it is wrong.
        CheckpointError: If the checkpoint lacks a tokenizer or a chat template that is needed, or
            they are wrong.
        MachineError: If what renders chat templates is missing.
    """
    if arguments.chat_template is not None and not arguments.chat and arguments.jsonl_in is None:
        raise UsageError("--chat-template: chooses a template for --chat; give that, too")
    lines = _lines(arguments)
    if any(line.tokens is None for line in lines):
        require_tokenizer(arguments.model)
    are_chats = [
        line.messages is not None or (arguments.chat and line.tokens is None) for line in lines
    ]
    rendered = iter(_render(arguments, list(itertools.compress(lines, are_chats))))
    requests = []
    for line, is_chat in zip(lines, are_chats, strict=True):
        prompt = next(rendered) if is_chat else line.prompt if line.tokens is None else line.tokens
        assert prompt is not None
        requests.append(Request(line.where, line.number, prompt, line.key, is_chat, line.settings))
    return requests


def make_samplings(arguments: argparse.Namespace, requests: Sequence[Request]) -> "list[Sampling]":
    """The sampling of each request.

    Raises:
        UsageError: If a value is outside its range; it names the request.
    """
    common = start.make_sampling(arguments)
    samplings = []
    for request in requests:
        try:
            own = start.make_sampling(arguments, request.settings) if request.settings else common
        except UsageError as error:
            raise UsageError(f"{request.where}: {error}") from None
        samplings.append(own)
    return samplings


def encode(arguments: argparse.Namespace, requests: Sequence[Request]) -> list[list[int]]:
    """Token ids of each request, checked against the checkpoint before its weights are read.

    Raises:
        UsageError: If a prompt has no token, one that the model has not, or more than --max-model-len.
        CheckpointError: If the checkpoint's configuration or tokenizer is wrong.
    """
    from wscope_jax.token_ids import check_ids
    from wscope_jax.tokenizer import Tokenizer

    vocab_size = weights.of(arguments).vocab_size()
    tokenizer = None
    if any(isinstance(request.prompt, str) for request in requests):
        tokenizer = Tokenizer.from_dir(arguments.model, vocab_size)
    encoded = []
    for request in requests:
        if isinstance(request.prompt, str):
            assert tokenizer is not None
            try:
                ids = tokenizer.encode(request.prompt, is_whole=request.is_whole)
            except UsageError as error:
                text = str(error).removeprefix("prompt: ")
                raise UsageError(f"{request.where}: {text}") from None
        else:
            ids = request.prompt
        check_ids(ids, vocab_size, request.where)
        encoded.append(_fit(request.where, ids, arguments.max_model_len, arguments.truncate))
    return encoded


def _fit(where: str, ids: list[int], most: int | None, side: str | None) -> list[int]:
    """The ids, cut at one side where that was asked for; room for one new token is left."""
    if most is None or len(ids) < most:
        return ids
    kept = most - 1
    if side is None or not kept:
        leave = f"{counted(len(ids), 'token')} {'leaves' if len(ids) == 1 else 'leave'}"
        raise UsageError(
            f"{where}: {leave} no room for a new one in --max-model-len {most}; "
            "shorten it, raise the limit, or let it be cut with --truncate left or right"
        )
    log.warning(
        "%s: %d of %s are kept, cut at the %s", where, kept, counted(len(ids), "token"), side
    )
    return ids[-kept:] if side == "left" else ids[:kept]


def _lines(arguments: argparse.Namespace) -> list[jsonl.Line]:
    if arguments.jsonl_in is not None:
        if others := list_sources(arguments):
            raise UsageError(
                f"--jsonl-in and {' and '.join(others)}: give one source of the prompts"
            )
        return jsonl.read(arguments.jsonl_in)
    prompts = read_named(arguments)
    if arguments.chat and any(not isinstance(prompt, str) for _, prompt in prompts):
        raise UsageError(
            f"--chat and {list_sources(arguments)[0]}: a chat template needs text; give --prompt"
        )
    lines = []
    for number, (where, prompt) in enumerate(prompts, start=1):
        if isinstance(prompt, str):
            lines.append(jsonl.Line(where=where, number=number, prompt=prompt))
        else:
            lines.append(jsonl.Line(where=where, number=number, tokens=prompt))
    return lines


def _render(arguments: argparse.Namespace, lines: Sequence[jsonl.Line]) -> list[str]:
    if not lines:
        return []
    from wscope_jax.chat import ChatTemplate

    conversations: list[Sequence[Message]] = [
        line.messages or [{"role": "user", "content": line.prompt or ""}] for line in lines
    ]
    template = ChatTemplate.from_dir(Path(arguments.model), arguments.chat_template)
    return template.render(conversations, [line.where for line in lines])
