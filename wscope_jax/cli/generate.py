"""`wscope generate`: continues prompts, streaming the text as it comes."""

import argparse
import sys

from wscope_jax.cli import answer, report, start
from wscope_jax.cli.prompts import read_prompts


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns the exit code.

    Raises:
        WscopeError: What was wrong, with its exit code.
        KeyboardInterrupt: Interrupted; the text so far is printed.
    """
    prompts = read_prompts(arguments)
    start.prepare(arguments.threads)
    sampling = start.make_sampling(arguments)
    with start.open_engine(arguments) as engine:
        generation = engine.stream(prompts, sampling, max_model_len=arguments.max_model_len)
        printer = None
        if not arguments.json:
            is_text = engine.tokenizer is not None
            printer = answer.RowPrinter(len(prompts), sys.stdout, is_text=is_text)
        try:
            for event in generation:
                if printer is not None:
                    printer.add(event)
        finally:
            # Interrupted, too: what there is so far is the answer, and its rows say "interrupted".
            generation.close()
            values = generation.result.as_dict()
            if printer is None:
                answer.print_json(values)
            else:
                printer.close()
                report.print_summary(values, sys.stderr)
    return 0
