"""`wscope generate`: continues prompts, streaming the text as it comes."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wscope_jax.cli import answer, progress, report, requests, signals, start, weights
from wscope_jax.cli.requests import Request
from wscope_jax.errors import UsageError, WscopeError

if TYPE_CHECKING:
    from wscope_jax.generation import Generation
    from wscope_jax.progress import Progress


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns the exit code.

    Raises:
        WscopeError: What was wrong, with its exit code.
        KeyboardInterrupt: Interrupted; the text so far is printed.
    """
    _check_outputs(arguments)
    weights.of(arguments)  # refuses options that do not go together
    start.prepare(arguments.threads, quiet=arguments.quiet)  # reading a checkpoint imports jax
    asked = requests.read_requests(arguments)
    samplings = requests.make_samplings(arguments, asked)
    start.require_device()
    ids = requests.encode(arguments, asked)
    longest = max(
        len(row) + sampling.max_new_tokens for row, sampling in zip(ids, samplings, strict=True)
    )
    start.require_fit(arguments, len(ids), longest, shorter="lower --max-model-len to {}")
    with (
        progress.shown(quiet=arguments.quiet) as shown,
        start.open_engine(arguments, shown) as engine,
    ):
        signals.keep()
        generation = engine.stream(ids, samplings, max_model_len=arguments.max_model_len)
        printer = None
        if not arguments.json and str(arguments.jsonl_out) != "-":
            is_text = engine.tokenizer is not None
            printer = answer.RowPrinter(len(asked), sys.stdout, is_text=is_text)
        values = _stream(arguments, asked, generation, printer, shown)
        _check_rows(asked, values, lambda row: engine.find_broken(ids[row] + values["tokens"][row]))
    return 0


def _check_outputs(arguments: argparse.Namespace) -> None:
    if arguments.jsonl_out is None:
        return
    if str(arguments.jsonl_out) != "-":
        answer.require_writable(arguments.jsonl_out, "--jsonl-out")
        answer.require_not_read(arguments.jsonl_out, "--jsonl-out", arguments)
    elif arguments.json:
        raise UsageError("--json and --jsonl-out -: both print to stdout; name a file")


def _stream(
    arguments: argparse.Namespace,
    asked: Sequence[Request],
    generation: "Generation",
    printer: answer.RowPrinter | None,
    shown: "Progress",
) -> Mapping[str, Any]:
    """Runs a generation, prints it as it comes, and delivers its result, also if it is interrupted."""
    refused: OSError | None = None
    try:
        for event in generation:
            signals.note_text()
            if printer is not None and refused is None:
                progress.make_room(shown)
                try:
                    printer.add(event)
                except BrokenPipeError:
                    raise
                except OSError as error:  # a full disk: the rest is still generated, for stderr
                    refused = error
    finally:
        # Interrupted, too: what there is so far is the answer, and its rows say "interrupted".
        generation.close()
        values = generation.result.as_dict()
        if isinstance(sys.exception(), Exception):
            reasons = values["finish_reason"]
            values["finish_reason"] = ["error" if r == "interrupted" else r for r in reasons]
        if arguments.jsonl_out is not None:
            answer.write_lines(arguments.jsonl_out, "--jsonl-out", _lines(asked, values))
        if arguments.json:
            answer.print_json(values)
        elif refused is not None:
            answer.fail("stdout", values, refused)
        elif printer is not None:
            printer.close()
        if not arguments.json and not arguments.quiet:
            report.print_summary(values, sys.stderr)
    return values


def _lines(asked: Sequence[Request], values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A result object for each request."""
    lines = []
    for row, request in enumerate(asked):
        line: dict[str, Any] = {"line": request.number}
        if request.key is not None:
            line["id"] = request.key
        line["text"] = None if values["text"] is None else values["text"][row]
        line["tokens"] = values["tokens"][row]
        line["finish_reason"] = values["finish_reason"][row]
        lines.append(line)
    return lines


def _check_rows(
    asked: Sequence[Request], values: Mapping[str, Any], find_broken: Callable[[int], str | None]
) -> None:
    """Says which rows the model gave no numbers for, and where in the model they went.

    Raises:
        WscopeError: There is at least one.
    """
    failed = [row for row, reason in enumerate(values["finish_reason"]) if reason == "error"]
    if failed:
        row = failed[0]
        others = f" (and of {len(failed) - 1} other prompts)" if len(failed) > 1 else ""
        raise WscopeError(
            f"{asked[row].where}: the model's logits are not finite after {len(values['tokens'][row])} new "
            f"tokens{others}, so the text ends there (first in {find_broken(row) or 'a step of decode'}); look for "
            "broken weights with --check-tensors, or try --dtype float32"
        )
